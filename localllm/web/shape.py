"""The base of every JSON object that the API sends, and server-sent events made from such objects.

Does not know: any object.
"""

from __future__ import annotations

import msgspec


class Shape(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of objects that have exactly these fields, written in the order of their declaration."""


def event_bytes(event: Shape) -> bytes:
    """Return a server-sent event. Its name is the struct's tag, as in the dialects whose events have a type."""
    return b"event: %b\ndata: %b\n\n" % (str(event.__struct_config__.tag).encode(), msgspec.json.encode(event))
