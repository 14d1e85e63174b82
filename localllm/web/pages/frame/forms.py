"""Form fields of a page's request, and whether htmx sent it.

Does not know: the meaning of any field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from litestar import Request
from litestar.datastructures import FormMultiDict
from litestar.enums import RequestEncodingType
from litestar.types import Empty

from localllm.units import format_bytes, format_count
from localllm.web.api.off_loop import off_loop
from localllm.web.errors import BodyTooLarge

MAX_FIELDS = 1_000
"""Most fields of a form. The playground has the most, two for each message."""
MAX_URLENCODED_BYTES = 2_000_000
"""Largest form without files. A form with files is multipart, which is read in pieces."""


class FormRequest(Request[Any, Any, Any]):
    """A request whose form is limited in size, and parsed off the event loop if it is long."""

    async def form(self) -> FormMultiDict:
        if self._form is Empty and self.content_type[0] == RequestEncodingType.URL_ENCODED:
            raw = await self.body()
            if len(raw) > MAX_URLENCODED_BYTES:
                why = f"The limit without a file is {format_bytes(MAX_URLENCODED_BYTES)}."
                raise BodyTooLarge("The form is too large.", why)
            if raw.count(b"&") >= MAX_FIELDS:
                raise BodyTooLarge("The form has too many fields.", f"The limit is {format_count(MAX_FIELDS)}.")
            self._form = FormMultiDict(await off_loop(len(raw), lambda: _fields(raw)))
        return await super().form()


def _fields(raw: bytes) -> list[tuple[str, str]]:
    return parse_qsl(raw.decode("latin-1"), keep_blank_values=True)


def is_scripted(request: Request[Any, Any, Any]) -> bool:
    """Return whether htmx sent the request. htmx replaces parts of a page; a browser without scripts
    needs a whole one.
    """
    return "hx-request" in request.headers


async def fields_of(request: Request[Any, Any, Any]) -> Mapping[str, str]:
    """Return the text fields of the form, without files."""
    return {name: value for name, value in (await request.form()).items() if isinstance(value, str)}
