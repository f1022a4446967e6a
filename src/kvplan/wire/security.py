"""Keys of the side channel: from a shared key to CurveZMQ key pairs, and when one is required. No sockets.

Every process derives the same two key pairs from the shared key. A client must know the server's public key to
say even its first word, and that key is never sent: so whoever completes the handshake knows the shared key, and the
channel is encrypted, ordered and safe against replay. A stranger, or a peer of another cluster, is never heard.

The derivation is slow on purpose (scrypt), because an eavesdropper could try guesses against a recorded handshake.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import NamedTuple

import zmq
from zmq.utils import z85

from kvplan.errors import DescriptionError, UnsupportedError
from kvplan.wire.addresses import is_loopback


class KeyPair(NamedTuple):
    """One CurveZMQ key pair, Z85 text."""

    public: bytes
    secret: bytes


class Keys(NamedTuple):
    """Both ends' key pairs."""

    server: KeyPair
    client: KeyPair


@lru_cache(maxsize=16)
def derive_keys(shared_key: str) -> Keys:
    """Return the key pairs that a shared key stands for; the same in every process."""
    if not zmq.has("curve"):
        raise UnsupportedError("this build of ZeroMQ has no CURVE; install pyzmq from its wheels, or leave the key out")
    return Keys(_pair(shared_key, "server"), _pair(shared_key, "client"))


def check_exposure(host: str, *, has_key: bool, insecure: bool) -> None:
    """Raise ``DescriptionError`` for a listener that strangers could reach and talk to."""
    if not has_key and not insecure and not is_loopback(host):
        raise DescriptionError(
            f"the side channel would listen on {host!r} without a key, open to everybody who reaches it: set "
            "KVPLAN_SIDE_CHANNEL_KEY (or side_channel_key) on both sides, or state insecure=True"
        )


def _pair(shared_key: str, role: str) -> KeyPair:
    salt = f"kvplan side channel 1 {role}".encode()
    secret = z85.encode(hashlib.scrypt(shared_key.encode(), salt=salt, n=1 << 14, r=8, p=1, dklen=32))
    return KeyPair(zmq.curve_public(secret), secret)
