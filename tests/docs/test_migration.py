"""The migration page names every key of vLLM's NIXL connector, and kvplan takes each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvplan.vllm.settings import NIXL_KEYS, NIXL_KEYS_WITHOUT_MEANING, read_settings

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
VLLM_NIXL = "distributed/kv_transfer/kv_connector/v1/nixl"


def keys_of_vllm() -> set[str]:
    """Every extra config key that vLLM's NIXL connector reads, from its sources."""
    import vllm

    folder = Path(vllm.__file__).parent / VLLM_NIXL
    found = [re.findall(r'get_from_extra_config\(\s*"(\w+)"', path.read_text()) for path in folder.glob("*.py")]
    return {key for keys in found for key in keys}


def test_the_page_and_the_settings_know_every_key() -> None:
    known = {*NIXL_KEYS, *NIXL_KEYS_WITHOUT_MEANING}
    assert keys_of_vllm() - known == set()
    assert {key for key in known if f"`{key}`" not in PAGE} == set()


@pytest.mark.parametrize("key", sorted(NIXL_KEYS_WITHOUT_MEANING))
def test_keys_without_meaning_change_nothing(key: str) -> None:
    assert read_settings({key: 1}, environ={}) == read_settings({}, environ={})


def test_keys_with_meaning_set_what_the_page_says() -> None:
    settings = read_settings({"kv_lease_duration": 7, "engine_ttl": 60.0, "backends": ["UCX"]}, environ={})
    assert settings.session.lease_s == 7
    assert settings.session.peer_idle_s == 60
    assert settings.transport_options == {"backends": ("UCX",)}
