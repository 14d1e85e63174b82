"""GET /openapi.json: every route of the API, for programs that make clients, tests or tools from it.

There is no page to try it on: those that exist load their code from elsewhere, and this server is to work without an
internet.
"""

from __future__ import annotations

import msgspec
from litestar import get
from litestar.response.base import ASGIResponse

from localllm.web.api.exchange import ApiRequest


@get("/openapi.json")
async def openapi_json(request: ApiRequest) -> ASGIResponse:
    """Made when it is first asked for, from the routes of the application that was asked."""
    from localllm.web.openapi.document import document
    from localllm.web.openapi.tables import TABLES

    state = request.app.state
    if "openapi" not in state:
        state.openapi = msgspec.json.encode(document(request.app.routes, TABLES))
    return ASGIResponse(body=state.openapi, media_type="application/json")
