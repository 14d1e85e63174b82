"""What a page's request brings: fields of a form, and whether htmx sent it.

Does not know: what any field means.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from litestar import Request


def is_scripted(request: Request[Any, Any, Any]) -> bool:
    """Sent by htmx, which swaps parts of a page in; a browser without scripts wants a whole one."""
    return "hx-request" in request.headers


async def fields_of(request: Request[Any, Any, Any]) -> Mapping[str, str]:
    """Text alone; files are left out."""
    return {name: value for name, value in (await request.form()).items() if isinstance(value, str)}
