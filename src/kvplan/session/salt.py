"""The election's salt, which both sides compute alike. Nothing else lives here."""

from __future__ import annotations

import zlib


def election_salt(reading_engine_id: str) -> int:
    """Return a number that spreads several reading engines over a producer's replicas.

    >>> election_salt("decode-0") == election_salt("decode-0")
    True
    """
    return zlib.crc32(reading_engine_id.encode())
