"""Frames: what goes in comes out; whatever else the bytes are is a WireError and nothing more."""

import pickle
import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.errors import LimitError, ProtocolVersionError, WireError
from kvplan.wire import messages
from kvplan.wire.codec import PROTOCOL_VERSION, decode, encode, refuse_version, version_of
from tests.wire.samples import MESSAGES

HEAD = b"KVPL" + PROTOCOL_VERSION.to_bytes(2, "big")


def test_every_kind_of_message_has_a_sample():
    assert {type(message) for message in MESSAGES.values()} == set(typing.get_args(messages.Message))


@pytest.mark.parametrize("name", MESSAGES)
def test_round_trip(name):
    assert decode(encode(MESSAGES[name])) == MESSAGES[name]


@pytest.mark.parametrize("name", MESSAGES)
def test_every_truncation_is_a_wire_error(name):
    frame = encode(MESSAGES[name])
    for length in range(len(frame)):
        with pytest.raises(WireError):
            decode(frame[:length])


def test_trailing_bytes_are_refused():
    with pytest.raises(WireError, match="trailing"):
        decode(encode(MESSAGES["not_ready"]) + b"\0")


def test_an_unknown_version_names_both():
    with pytest.raises(ProtocolVersionError, match="peer speaks protocol version 7, this side speaks 1"):
        decode(b"KVPL\x00\x07" + b"whatever comes next")


def test_a_version_refusal_names_both():
    frame = refuse_version(9)
    assert version_of(frame) == 0
    with pytest.raises(ProtocolVersionError, match="peer speaks protocol version 1, this side speaks 1"):
        decode(frame)


def test_a_frame_that_is_too_long_is_refused_before_it_is_parsed():
    with pytest.raises(LimitError, match="limit is 100"):
        decode(HEAD + bytes(1000), max_bytes=100)


def test_a_newer_sender_may_add_fields_but_not_leave_out_old_ones():
    body = msgspec.to_builtins(MESSAGES["granted"])
    assert decode(HEAD + msgspec.msgpack.encode({**body, "added_later": [1, 2]})) == MESSAGES["granted"]
    body.pop("items")
    with pytest.raises(WireError, match="items"):
        decode(HEAD + msgspec.msgpack.encode(body))


WRONG = {
    "pickle": pickle.dumps({"type": "not_ready"}),
    "unknown type": msgspec.msgpack.encode({"type": "reboot"}),
    "no type": msgspec.msgpack.encode({"detail": "x"}),
    "list": msgspec.msgpack.encode([1, 2, 3]),
    "number as text": msgspec.msgpack.encode({"type": "renew", "reader": ["d", 0], "number": "1", "items": []}),
    "negative rank": msgspec.msgpack.encode({"type": "renew", "reader": ["d", -1], "number": 1, "items": []}),
    "huge rank": msgspec.msgpack.encode({"type": "renew", "reader": ["d", 1 << 40], "number": 1, "items": []}),
    "empty engine id": msgspec.msgpack.encode({"type": "renew", "reader": ["", 0], "number": 1, "items": []}),
    "infinite lease": msgspec.msgpack.encode(
        {"type": "granted", "reader": ["d", 0], "items": [["r", "g", float("inf"), "t"]]}
    ),
    "lease that is no number": msgspec.msgpack.encode(
        {"type": "granted", "reader": ["d", 0], "items": [["r", "g", float("nan"), "t"]]}
    ),
    "too many items": msgspec.msgpack.encode(
        {"type": "renew", "reader": ["d", 0], "number": 1, "items": [["r", "g"]] * (messages.MAX_ITEMS + 1)}
    ),
    "long name": msgspec.msgpack.encode({"type": "renew", "reader": ["d" * 600, 0], "number": 1, "items": []}),
    "deep nesting": b"\x91" * 100_000,
    "bad text": b"\x81\xa4type\xa2\xff\xfe",
    "extension type": msgspec.msgpack.encode(msgspec.msgpack.Ext(3, b"x")),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_bodies_are_wire_errors(name):
    with pytest.raises(WireError):
        decode(HEAD + WRONG[name])


@given(st.binary(max_size=4096))
def test_random_bytes_are_wire_errors(noise):
    with pytest.raises(WireError):
        decode(noise)


@given(st.binary(max_size=2048))
def test_random_bodies_are_wire_errors(noise):
    with pytest.raises(WireError):
        decode(HEAD + noise)


@given(st.sampled_from(sorted(MESSAGES)), st.data())
def test_damaged_frames_are_messages_or_wire_errors(name, data):
    frame = bytearray(encode(MESSAGES[name]))
    for _ in range(data.draw(st.integers(1, 8))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(frame))
    except WireError:
        return


def test_t46b_a_megabyte_of_noise_is_refused():
    with pytest.raises(WireError):
        decode(bytes(range(256)) * 4096)
    with pytest.raises(WireError):
        decode(HEAD + bytes(range(256)) * 4096)
