"""Parse a request's body as Ollama does: JSON is accepted without a content type.

Does not know: the meaning of the fields.
"""

from __future__ import annotations

from localllm.web.api.exchange import ApiRequest, Body, json_body
from localllm.web.api.fields import FieldRules
from localllm.web.api.ollama.fields import OPTION_RULES
from localllm.web.api.ollama.schema import Options
from localllm.web.api.operation import RequestBody
from localllm.web.api.reading import read

INSIDE = {"options": RequestBody(Options, OPTION_RULES)}


async def read_body(request: ApiRequest, kind: type[Body], rules: FieldRules) -> tuple[Body, list[str]]:
    """Return the parsed body and its warnings. Raises the `RequestError` that names the wrong field."""
    return await read(await json_body(request, may_be_untyped=True), kind, rules)
