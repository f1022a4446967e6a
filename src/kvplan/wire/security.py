"""Keys of the side channel: from a key's text to CurveZMQ key pairs, and when one is required. No sockets.

A key is one of two things:

* **A shared key**, any text. Every process derives the same two key pairs from it. A client must know the server's
  public key to say even its first word, and that key is never sent: so whoever completes the handshake knows the
  shared key. The derivation is slow on purpose (scrypt): an eavesdropper could try guesses against what it recorded.
* **``@path``** of a key file: a key pair of this machine's own, and the public keys of the others by host. A peer
  proves that it has its host's key when it listens, and one of the listed keys when it connects: so one machine can be
  shut out without a new key for the rest. A host that is not listed is taken for this machine.

Either way the channel is encrypted, ordered and safe against replay. A stranger, or another cluster, is never heard.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from kvplan.errors import DescriptionError, UnsupportedError
from kvplan.wire.addresses import is_loopback

FILE_MARK = "@"
"""What a key begins with that is the path of a key file."""
KEY_CHARACTERS = 40
"""Length of a public or secret key in Z85."""


class KeyPair(NamedTuple):
    """One CurveZMQ key pair, Z85 text."""

    public: bytes
    secret: bytes


@dataclass(frozen=True, slots=True)
class Keyring:
    """What a process needs to listen and to connect."""

    server: KeyPair
    """What its listeners are known by."""
    client: KeyPair
    """What it is known by to listeners."""
    hosts: Mapping[str, bytes] = field(default_factory=dict, hash=False)
    """Public keys of listeners by host; the others have our own."""
    clients: frozenset[bytes] = frozenset()
    """Public keys that may connect; empty for everybody who knows the server's key."""

    def server_at(self, host: str) -> bytes:
        """Return the public key that a listener at a host must have."""
        return self.hosts.get(host, self.server.public)


@lru_cache(maxsize=16)
def keyring(key: str) -> Keyring:
    """Return what a key stands for; the same in every process. A key file is read once."""
    if not zmq.has("curve"):
        raise UnsupportedError("this build of ZeroMQ has no CURVE; install pyzmq from its wheels, or leave the key out")
    if key.startswith(FILE_MARK):
        return _from_file(Path(key.removeprefix(FILE_MARK)))
    return Keyring(_pair(key, "server"), _pair(key, "client"))


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


def _from_file(path: Path) -> Keyring:
    """Return the keyring in a file; raises ``DescriptionError`` that names the file and the field."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DescriptionError(f"key file {path}: {error}") from None
    if not isinstance(content, dict) or set(content) != {"secret", "peers"} or not isinstance(content["peers"], dict):
        raise DescriptionError(f"key file {path}: expected an object with the fields 'secret' and 'peers'")
    secret = _key(content["secret"], f"key file {path}: secret")
    hosts = {str(host): _key(key, f"key file {path}: peers[{host!r}]") for host, key in content["peers"].items()}
    own = KeyPair(zmq.curve_public(secret), secret)
    return Keyring(own, own, hosts, frozenset([*hosts.values(), own.public]))


def _key(value: object, where: str) -> bytes:
    """Return a key's text; its value is never part of an error."""
    try:
        key = str(value).encode("ascii")
        fits = len(key) == KEY_CHARACTERS and len(z85.decode(key)) == 32
    except (ValueError, KeyError, ArithmeticError):
        fits = False
    if not fits:
        raise DescriptionError(
            f"{where} is not a key of {KEY_CHARACTERS} Z85 characters; zmq.curve_keypair() makes pairs"
        )
    return key
