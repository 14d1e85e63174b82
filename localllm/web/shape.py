"""The base of every JSON object that the API sends.

Does not know: any object.
"""

from __future__ import annotations

import msgspec


class Shape(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of objects that have exactly these fields, written in the order of their declaration."""
