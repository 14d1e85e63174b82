"""Read a request's body as Ollama does: JSON also where no content type says so.

Does not know: what the fields mean.
"""

from __future__ import annotations

from localllm.web.api.exchange import ApiRequest, Body, json_body
from localllm.web.api.fields import FieldRules
from localllm.web.api.reading import read


async def read_body(request: ApiRequest, kind: type[Body], rules: FieldRules) -> tuple[Body, list[str]]:
    """The body and its warnings. Raises the `RequestError` that names what is wrong."""
    return await read(await json_body(request, may_be_untyped=True), kind, rules)
