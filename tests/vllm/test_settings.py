"""Where settings come from, and what is refused."""

import pytest

from kvplan.errors import DescriptionError, UnsupportedError
from kvplan.vllm.compat import check_installed, check_version
from kvplan.vllm.settings import read_settings


def test_defaults():
    settings = read_settings({}, environ={})
    assert (settings.host, settings.port, settings.transport) == ("127.0.0.1", 5600, "nixl")


def test_environment_wins_over_extra_config_and_nixl_deployments_work_unchanged():
    nixl = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": "6000"}
    assert read_settings({}, environ=nixl).public_host == "10.0.0.1"
    assert read_settings({}, environ=nixl).port == 6000
    extra = {"side_channel_host": "10.0.0.2", "side_channel_port": 7000}
    assert (read_settings(extra, environ=nixl).host, read_settings(extra, environ=nixl).port) == ("10.0.0.2", 7000)
    own = nixl | {"KVPLAN_SIDE_CHANNEL_HOST": "10.0.0.3", "KVPLAN_SIDE_CHANNEL_PORT": "8000"}
    assert (read_settings(extra, environ=own).host, read_settings(extra, environ=own).port) == ("10.0.0.3", 8000)
    unchanged = read_settings({"kv_lease_duration": 60, "enforce_handshake_compat": True}, environ=nixl)
    assert unchanged.session.lease_s == 60.0


def test_the_extra_config_says_how_much_is_verified():
    assert read_settings({}, environ={}).session.verify_rate == 0.0
    assert read_settings({"verify_rate": 0.25, "verify_timeout_s": 9}, environ={}).session.verify_rate == 0.25
    with pytest.raises(DescriptionError, match="verify_rate"):
        read_settings({"verify_rate": 1.5}, environ={})


def test_data_parallel_engines_have_their_own_ports():
    ports = [read_settings({}, data_parallel_index=index, environ={}).port for index in range(2)]
    assert ports == [5600, 5601]
    with pytest.raises(DescriptionError, match="65536"):
        read_settings({"side_channel_port": 65535}, data_parallel_index=1, environ={})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*"])
def test_an_address_that_no_peer_can_reach_is_not_advertised(host):
    with pytest.raises(DescriptionError, match="cannot be reached by a peer"):
        read_settings({"side_channel_host": host}, environ={})
    settings = read_settings({"side_channel_host": host, "side_channel_advertise_host": "10.0.0.9"}, environ={})
    assert (settings.host, settings.public_host) == (host, "10.0.0.9")
    assert settings.session.public_host == "10.0.0.9"


@pytest.mark.parametrize(
    "extra,why",
    [
        ({"leese_s": 3}, "unknown key 'leese_s'; known: .*lease_s"),
        ({"side_channel_port": "many"}, "not a number"),
        ({"lease_s": "long"}, "lease_s"),
        ({"transport_options": 3}, "must be an object"),
    ],
)
def test_what_cannot_be_used_is_named(extra, why):
    with pytest.raises(DescriptionError, match=why):
        read_settings(extra, environ={})


def test_versions():
    check_installed()
    check_version("0.32.0")
    with pytest.raises(UnsupportedError, match=r"vLLM 0\.31\.2 is not supported by this kvplan; these work: 0\.32\.x"):
        check_version("0.31.2")
    with pytest.raises(UnsupportedError, match="dev is not supported"):
        check_version("dev")
