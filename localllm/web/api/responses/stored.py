"""Stored responses: GET and DELETE /v1/responses/{id}, its input items, and cancel, which is unsupported."""

from __future__ import annotations

from typing import Any

from litestar import delete, get, post
from litestar.response.base import ASGIResponse

from localllm.errors import InvalidParameter, RequestError
from localllm.web.access.caller import owner_of
from localllm.web.api.exchange import ApiRequest, json_response, warning_headers
from localllm.web.api.operation import Operation
from localllm.web.api.reading import read_query
from localllm.web.api.responses import shapes
from localllm.web.api.responses.fields import QUERY_RULES
from localllm.web.api.responses.schema import ItemsQuery
from localllm.web.api.responses.store import ResponseStore

PATH = "/v1/responses/{id:str}"


class CannotCancel(RequestError):
    """The response has ended. A running one is cancelled by closing its connection."""

    code = "response_not_cancellable"


def store_of(request: ApiRequest) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


@get(PATH, operation=Operation(shapes.Response, also=(404,)))
async def show_response(request: ApiRequest) -> ASGIResponse:
    """Show a stored response."""
    warnings = QUERY_RULES.check(dict(request.query_params), ())
    body = store_of(request).get(owner_of(request), request.path_params["id"]).response
    return ASGIResponse(body=body, media_type="application/json", headers=warning_headers(warnings))


@delete(PATH, status_code=200, operation=Operation(shapes.Deleted, also=(404,)))
async def delete_response(request: ApiRequest) -> ASGIResponse:
    """Delete a stored response."""
    id: str = request.path_params["id"]
    store_of(request).delete(owner_of(request), id)
    return json_response(shapes.Deleted(id, "response", deleted=True))


@post(f"{PATH}/cancel", status_code=200, operation=Operation(also=(404,), success=()))
async def cancel(request: ApiRequest) -> ASGIResponse:
    """Unsupported: a stored response has already ended."""
    store_of(request).get(owner_of(request), request.path_params["id"])
    raise CannotCancel(
        "Cannot cancel a synchronous response.",
        "The response is complete.",
        "To cancel a running response, close its connection.",
        param="response_id",
    )


@get(f"{PATH}/input_items", operation=Operation(shapes.Items, query=ItemsQuery, also=(404,)))
async def input_items(request: ApiRequest) -> ASGIResponse:
    """List the input items of a stored response.

    These are the items of the response's own request; earlier items belong to previous_response_id.
    """
    asked, warnings = _query(request)
    items = store_of(request).get(owner_of(request), request.path_params["id"]).input
    if asked.order == "desc":
        items.reverse()
    if asked.after is not None:
        ids = [item["id"] for item in items]
        if asked.after not in ids:
            raise InvalidParameter(f"There is no item {asked.after!r} in this input.", param="after")
        items = items[ids.index(asked.after) + 1 :]
    page: list[Any] = items[: asked.limit]
    listed = shapes.Items(
        object="list",
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=len(items) > len(page),
    )
    return json_response(listed, warning_headers(warnings))


def _query(request: ApiRequest) -> tuple[ItemsQuery, list[str]]:
    warnings = QUERY_RULES.check(dict(request.query_params), ItemsQuery.__struct_fields__)
    return read_query(request, ItemsQuery), warnings
