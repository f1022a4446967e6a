"""Frames: bytes to messages and back, strictly. No sockets, no meaning.

A frame is ``b"KVPL"``, the protocol version as two bytes, big end first, then one msgpack map.

1. Size, magic and version are looked at before anything is parsed.
2. Version 0 is no protocol but its negotiation: the one message there is ``VersionRefused``, for ever.
3. The rest must be exactly one message of ``kvplan.wire.messages``, every field of its type and in its limits.

Nothing is ever unpickled or evaluated; whatever the bytes are, ``decode`` returns a message or raises a
``WireError``.

>>> decode(encode(NotReady(detail="loading")))
NotReady(detail='loading')
>>> decode(b"KVPL" + bytes([0, 9]) + b"anything")
Traceback (most recent call last):
kvplan.errors.ProtocolVersionError: the peer speaks protocol version 9, this side speaks 1
"""

from __future__ import annotations

import msgspec

from kvplan.errors import LimitError, ProtocolVersionError, WireError
from kvplan.wire.messages import Message, NotReady, VersionRefused

__all__ = ["MAX_FRAME_BYTES", "PROTOCOL_VERSION", "NotReady", "decode", "encode", "refuse_version"]

PROTOCOL_VERSION = 1
"""Raised when an older peer could misunderstand a message."""
SUPPORTED_VERSIONS = (PROTOCOL_VERSION,)
MAX_FRAME_BYTES = 64 << 20
"""Largest frame, unless the caller says less."""

_MAGIC = b"KVPL"
_HEAD_BYTES = len(_MAGIC) + 2
_NEGOTIATION = 0
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message, strict=True)
_VERSION_DECODER = msgspec.msgpack.Decoder(VersionRefused, strict=True)


def encode(message: Message) -> bytes:
    """Return the frame of a message."""
    return _frame(PROTOCOL_VERSION, message)


def refuse_version(got: int) -> bytes:
    """Return the frame that answers a frame of an unknown version."""
    return _frame(_NEGOTIATION, VersionRefused(got=got, supported=SUPPORTED_VERSIONS))


def version_of(frame: bytes, *, max_bytes: int = MAX_FRAME_BYTES) -> int:
    """Return the version that a frame states; raises ``WireError`` when it is no frame of ours, or too long."""
    if len(frame) > max_bytes:
        raise LimitError(f"frame of {len(frame)} bytes; the limit is {max_bytes}")
    if len(frame) < _HEAD_BYTES or not frame.startswith(_MAGIC):
        raise WireError(f"{len(frame)} bytes that do not start with {_MAGIC!r} and a version")
    return int.from_bytes(frame[len(_MAGIC) : _HEAD_BYTES], "big")


def decode(frame: bytes, *, max_bytes: int = MAX_FRAME_BYTES) -> Message:
    """Return the message in a frame; raises ``WireError`` for whatever else the bytes are."""
    version = version_of(frame, max_bytes=max_bytes)
    body = memoryview(frame)[_HEAD_BYTES:]
    try:
        if version == _NEGOTIATION:
            refusal = _VERSION_DECODER.decode(body)
        elif version in SUPPORTED_VERSIONS:
            return _DECODER.decode(body)
        else:
            raise _unknown((version,))
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        if isinstance(error, WireError):
            raise
        raise WireError(f"frame of {len(frame)} bytes: {error}") from None
    raise _unknown(refusal.supported)


def _frame(version: int, body: msgspec.Struct | Message) -> bytes:
    return _MAGIC + version.to_bytes(2, "big") + _ENCODER.encode(body)


def _unknown(theirs: tuple[int, ...]) -> ProtocolVersionError:
    spoken = ", ".join(map(str, theirs)) or "none"
    ours = ", ".join(map(str, SUPPORTED_VERSIONS))
    return ProtocolVersionError(f"the peer speaks protocol version {spoken}, this side speaks {ours}")
