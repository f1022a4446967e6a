"""The types that message fields are made of, with their limits, and the two bases of messages. No message.

Parts of messages that repeat often are arrays on the wire: fields are only ever appended.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Name = Annotated[str, Meta(min_length=1, max_length=512)]
"""An engine id, request id, generation, ticket or field name."""
Text = Annotated[str, Meta(max_length=4096)]
"""A sentence for a person, or a field's value."""
Count = Annotated[int, Meta(ge=0, le=1 << 20)]
Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Unsigned = Annotated[int, Meta(ge=0)]
"""64 bits, all of them: msgpack has no wider number."""
Offset = Annotated[int, Meta(gt=-(1 << 62), lt=1 << 62)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
MAX_ITEMS = 4096
"""Most requests in one message; more are sent in several."""


class Item(Struct, frozen=True, array_like=True, forbid_unknown_fields=False):
    """Base of a part that repeats."""


class Standalone(Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of what may stand alone in a frame."""
