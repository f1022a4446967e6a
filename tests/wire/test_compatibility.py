"""Named fields of two engines: which must match, and what is said when they do not."""

import os
import subprocess
import sys

import pytest

from kvplan.errors import CompatibilityError
from kvplan.wire.compatibility import ABSENT, ADVICE, mismatches, require_compatible
from kvplan.wire.fingerprint import fields_digest

OURS = {
    "model": "llama@8c2f",
    "dtype": "bfloat16",
    "cache_dtype": "auto",
    "num_kv_heads": "8",
    "head_size": "128",
    "layers": "32:9f1e",
    "speculative": "none",
    "mode": "pull",
    "info.tp": "4",
    "info.version": "0.1",
}


def test_t48_equal_fields_are_compatible_whatever_the_information_says():
    require_compatible(OURS, {**OURS, "info.tp": "8", "info.version": "0.2", "info.new": "x"})


@pytest.mark.parametrize("field", sorted(name for name in OURS if not name.startswith("info.")))
def test_t48_each_field_is_named_with_both_values(field):
    with pytest.raises(CompatibilityError) as caught:
        require_compatible(OURS, {**OURS, field: "other"})
    (found,) = caught.value.mismatches
    assert (found.field, found.ours, found.theirs) == (field, OURS[field], "other")
    assert found.advice == ADVICE[field]
    assert str(caught.value).startswith(f"{field}: ours {OURS[field]}, theirs other")


def test_t48_every_differing_field_is_listed():
    found = mismatches(OURS, {**OURS, "dtype": "float32", "model": "gemma", "head_size": "64"})
    assert [item.field for item in found] == ["dtype", "head_size", "model"]


def test_a_field_that_one_side_lacks_differs():
    theirs = {name: value for name, value in OURS.items() if name != "dtype"}
    assert mismatches(OURS, theirs)[0].theirs == ABSENT
    assert mismatches(theirs, OURS)[0].ours == ABSENT


def test_an_unknown_field_has_general_advice():
    assert mismatches({"rope": "yarn"}, {"rope": "none"})[0].advice == "make 'rope' equal on both sides"


def test_t43b_digests_are_equal_in_any_process():
    program = f"from kvplan.wire.fingerprint import fields_digest; print(fields_digest({OURS!r}))"
    environ = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environ)
    assert output.stdout.strip() == fields_digest(OURS)


def test_t43b_digests_depend_on_every_name_and_value_but_not_on_order():
    assert fields_digest(OURS) == fields_digest(dict(reversed(OURS.items())))
    digests = {fields_digest({**OURS, name: "other"}) for name in OURS}
    assert len(digests | {fields_digest(OURS)}) == len(OURS) + 1
