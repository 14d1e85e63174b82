"""Stored responses: GET and DELETE /v1/responses/{id}, its input items, and cancel, which is unsupported.

They are in memory, limited in number and bytes; the oldest response is dropped first. Each contains everything that the
next round needs, so it does not depend on others, and belongs to the owner of its request.
Does not know: the meaning of items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from litestar import delete, get, post
from litestar.response.base import ASGIResponse

from localllm.errors import InvalidParameter, RequestError
from localllm.units import format_bytes
from localllm.web.access.caller import owner_of
from localllm.web.api.exchange import ApiRequest, json_response, warning_headers
from localllm.web.api.openapi import Operation
from localllm.web.api.reading import read_query
from localllm.web.api.responses import shapes
from localllm.web.api.responses.schema import QUERY_RULES, ItemsQuery
from localllm.web.api.responses.shapes import Response

MAX_RESPONSES = 1000
MAX_BYTES = 64 * 1024**2

Item = dict[str, Any]
to_json = msgspec.json.encode


class ResponseNotFound(RequestError):
    """No response with this id is stored."""

    status, code = 404, "response_not_found"


class PreviousResponseNotFound(ResponseNotFound):
    """The response that a request continues is not stored."""

    code = "previous_response_not_found"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A stored response as JSON, so that its size in memory is known."""

    owner: str  # only this owner can read it
    response: bytes
    context: tuple[bytes, ...]  # items of earlier rounds, of this round's input, and of its output
    num_before: int  # number of these that belong to earlier rounds
    num_input: int  # number of these that follow and are this round's input

    @property
    def input(self) -> list[Item]:
        return decoded(self.context[self.num_before :][: self.num_input])

    @property
    def output(self) -> tuple[bytes, ...]:
        return self.context[self.num_before + self.num_input :]

    @property
    def size_bytes(self) -> int:
        return len(self.response) + sum(map(len, self.context))


def decoded(items: Sequence[bytes]) -> list[Item]:
    return [msgspec.json.decode(item) for item in items]


class ResponseStore:
    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self.max_responses, self.max_bytes = max_responses, max_bytes
        self.num_bytes = 0
        self._stored: dict[str, StoredResponse] = {}  # oldest first
        self._items: dict[str, tuple[str, bytes]] = {}  # id of an output item -> (owner, item)

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, owner: str, response: Response, before: Sequence[bytes], items: Sequence[Item]) -> None:
        """Store a response. `items`: its input. A response larger than the whole store is not stored."""
        output: Sequence[Any] = response.output
        own = (*map(to_json, items), *map(to_json, output))
        stored = StoredResponse(owner, to_json(response), (*before, *own), len(before), len(items))
        if stored.size_bytes > self.max_bytes:
            return
        self._stored[response.id] = stored
        self.num_bytes += stored.size_bytes
        for item, written in zip(output, stored.output, strict=True):
            self._items[item["id"]] = owner, written
        while len(self._stored) > self.max_responses or self.num_bytes > self.max_bytes:
            self._forget(next(iter(self._stored)))

    def get(self, owner: str, id: str) -> StoredResponse:
        """Return a response. Raises `ResponseNotFound`, also for a response of another owner."""
        stored = self._stored.get(id)
        if stored is None or stored.owner != owner:
            raise self._not_found(ResponseNotFound, id, "response_id")
        return stored

    def context(self, owner: str, id: str | None) -> tuple[bytes, ...]:
        """Return the items that a request continues. Raises `PreviousResponseNotFound`."""
        stored = self._stored.get(id) if id is not None else None
        if id is not None and (stored is None or stored.owner != owner):
            raise self._not_found(PreviousResponseNotFound, id, "previous_response_id")
        return stored.context if stored is not None else ()

    def item(self, owner: str, id: str) -> Item | None:
        whose, written = self._items.get(id, ("", b""))
        return msgspec.json.decode(written) if written and whose == owner else None

    def delete(self, owner: str, id: str) -> None:
        """Delete a response. Raises `ResponseNotFound`."""
        self.get(owner, id)
        self._forget(id)

    def _forget(self, id: str) -> None:
        stored = self._stored.pop(id)
        self.num_bytes -= stored.size_bytes
        for item in decoded(stored.output):
            del self._items[item["id"]]

    def _not_found(self, kind: type[ResponseNotFound], id: str, param: str) -> ResponseNotFound:
        return kind(
            f"Response with id {id!r} not found.",
            f"The newest {self.max_responses:,} ended responses are kept, {format_bytes(self.max_bytes)} at most, in "
            "memory only: a restart forgets them, and store: false keeps none.",
            "Send the whole conversation as input.",
            param=param,
        )


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
    warnings = QUERY_RULES.check(dict(request.query_params), ItemsQuery.__struct_fields__)
    asked = read_query(request, ItemsQuery)
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
