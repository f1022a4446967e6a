"""The wire: what crosses the side channel between engines. No request states, no bytes of cache."""

from kvplan.wire.addresses import Address, parse_address
from kvplan.wire.codec import PROTOCOL_VERSION, decode, encode
from kvplan.wire.compatibility import mismatches, require_compatible
from kvplan.wire.fingerprint import fields_digest, layout_digest, tables_digest
from kvplan.wire.layouts import from_body, to_body

__all__ = [
    "PROTOCOL_VERSION",
    "Address",
    "decode",
    "encode",
    "fields_digest",
    "from_body",
    "layout_digest",
    "mismatches",
    "parse_address",
    "require_compatible",
    "tables_digest",
    "to_body",
]
