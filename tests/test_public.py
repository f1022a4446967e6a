"""The front door: what `import kvplan` gives, what it costs, and what the installed package promises."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.metadata import entry_points, metadata, requires
from importlib.resources import files

import pytest

import kvplan

HEAVY = ("torch", "vllm", "nixl_cu12", "transformers", "httpx", "starlette", "typer", "zmq")


def test_all_is_sorted_and_complete():
    assert kvplan.__all__ == sorted(kvplan.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    public = {name for name in vars(kvplan) if not name.startswith("_")}
    submodules = {name for name in public if f"kvplan.{name}" in sys.modules}
    assert public - submodules == set(kvplan.__all__) - {"__version__"}


def test_importing_kvplan_is_light():
    code = f"import kvplan, sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_versions_agree():
    assert metadata("kvplan")["Version"] == kvplan.__version__


def test_the_package_says_that_it_is_typed():
    assert files("kvplan").joinpath("py.typed").is_file()


def test_run_time_dependencies_stay_few():
    core = {item.split(";")[0].strip().split(">")[0] for item in requires("kvplan") if "extra ==" not in item}
    assert core == {"numpy", "msgspec", "pyzmq", "typer", "rich", "pyyaml", "jinja2", "prometheus-client", "xxhash"}


@pytest.mark.parametrize(("group", "name"), [("console_scripts", "kvplan"), ("vllm.general_plugins", "kvplan")])
def test_entry_points_lead_somewhere(group, name):
    [point] = [one for one in entry_points(group=group) if one.name == name]
    assert callable(getattr(import_module(point.module), point.attr))


def test_the_command_says_its_version():
    done = subprocess.run(
        [sys.executable, "-m", "kvplan", "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == f"kvplan {kvplan.__version__}"
