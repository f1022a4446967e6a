"""Addresses of peers: what can be connected to, advertised and trusted."""

import pytest

from kvplan.errors import DescriptionError, WireError
from kvplan.wire.addresses import (
    Address,
    check_advertised,
    check_allow_list,
    checked_address,
    is_allowed,
    is_loopback,
    is_wildcard,
    parse_address,
)


@pytest.mark.parametrize(
    "text,host,port",
    [
        ("10.0.0.1:5600", "10.0.0.1", 5600),
        ("node-7.cluster:1", "node-7.cluster", 1),
        ("[fe80::1]:65535", "fe80::1", 65535),
    ],
)
def test_good_addresses(text, host, port):
    assert parse_address(text) == Address(host, port)
    assert str(parse_address(text)) == text


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":80", "host:0", "host:65536", "host:-1", "host:5600x", "host:٣", "a b:80", "a;b:80",
             "tcp://h:1/x:80", "h" * 300 + ":80"]
)  # fmt: skip
def test_t44_bad_addresses(text):
    with pytest.raises(WireError):
        parse_address(text)


def test_t44_a_wildcard_is_not_an_address_to_advertise():
    for host in ("0.0.0.0", "::", "*", ""):
        assert is_wildcard(host)
    with pytest.raises(WireError, match="no one can connect"):
        check_advertised(checked_address("0.0.0.0", 80), reached="10.0.0.1")


def test_t44_loopback_is_not_advertised_to_another_machine():
    with pytest.raises(WireError, match="this machine"):
        check_advertised(Address("127.0.0.1", 80), reached="10.0.0.1")
    with pytest.raises(WireError, match="this machine"):
        check_advertised(Address("localhost", 80), reached="node-7")
    check_advertised(Address("127.0.0.1", 80), reached="localhost")
    check_advertised(Address("10.0.0.1", 80), reached="10.0.0.2")


def test_loopback():
    assert [is_loopback(h) for h in ("127.0.0.9", "::1", "localhost", "10.0.0.1", "node")] == [True] * 3 + [False] * 2


def test_t46b_the_allow_list():
    rules = ("10.0.0.0/8", "node-7", "fe80::/10")
    allowed = [is_allowed(h, rules) for h in ("10.1.2.3", "node-7", "fe80::1", "11.0.0.1", "node-8", "10.1.2.3.evil")]
    assert allowed == [True, True, True, False, False, False]
    assert is_allowed("anything", ())


def test_an_allow_list_with_a_broken_network_is_refused():
    check_allow_list(("10.0.0.0/8", "node"))
    with pytest.raises(DescriptionError, match=r"10\.0\.0\.0/99"):
        check_allow_list(("10.0.0.0/99",))
