"""GET /openapi.json: the OpenAPI document of the API, for programs that generate clients, tests or tools.

There is no interactive page: the common ones load scripts from the internet, and this server works without it.
"""

from __future__ import annotations

import msgspec
from litestar import get
from litestar.response.base import ASGIResponse

from localllm.web.api.exchange import ApiRequest


@get("/openapi.json")
async def openapi_json(request: ApiRequest) -> ASGIResponse:
    """Return the document, generated at the first request from the application's routes."""
    from localllm.web.openapi.document import document
    from localllm.web.openapi.tables import TABLES

    state = request.app.state
    if "openapi" not in state:
        state.openapi = msgspec.json.encode(document(request.app.routes, TABLES))
    return ASGIResponse(body=state.openapi, media_type="application/json")
