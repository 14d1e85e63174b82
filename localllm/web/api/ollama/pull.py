"""POST /api/pull: download a model, with progress as lines of JSON.

Does not know: how files are downloaded (models/hub).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from litestar import post
from litestar.response.base import ASGIResponse

from localllm.errors import DownloadCancelled, UnsupportedParameter
from localllm.models.library.hub.downloads import Downloads, DownloadStatus
from localllm.web.api.disconnect import EventStream, unless_disconnected
from localllm.web.api.exchange import ApiRequest, json_response, warning_headers
from localllm.web.api.ollama import shapes
from localllm.web.api.ollama.body import read_body
from localllm.web.api.ollama.fields import NO_RULES
from localllm.web.api.ollama.lines import LINES, line
from localllm.web.api.ollama.models import required_name
from localllm.web.api.ollama.schema import OllamaPullBody
from localllm.web.api.operation import OF_MODELS, Operation, RequestBody
from localllm.web.api.own.hub import downloads_of, require_online
from localllm.web.errors import as_local_error, ollama_error

LOOK_EVERY_S = 0.1


@post(
    "/api/pull",
    status_code=200,
    operation=Operation(
        shapes.Pulled,
        RequestBody(OllamaPullBody, NO_RULES, example={"model": "demo"}),
        shapes.OllamaProgress,
        also=OF_MODELS,
    ),
)
async def pull(request: ApiRequest) -> ASGIResponse:
    """Download a model from the Hugging Face hub.

    If the client leaves, a download that it started is stopped; downloaded bytes are kept.
    """
    body, warnings = await read_body(request, OllamaPullBody, NO_RULES)
    if body.insecure:
        raise UnsupportedParameter(
            "'insecure' is not supported.", "The hub is always contacted over TLS.", param="insecure"
        )
    name = required_name(body)
    require_online(request)
    downloads = downloads_of(request)
    running = {each.id for each in downloads.list() if not each.is_over}
    status = await asyncio.to_thread(downloads.start, name)

    async def stop() -> None:
        if status.id not in running:
            await asyncio.to_thread(downloads.cancel, status.id)

    headers = warning_headers(warnings)
    if body.stream is False:
        try:
            await unless_disconnected(request.receive, _finished(downloads, status))
        finally:
            await stop()
        return json_response(shapes.Pulled("success"), headers)
    return EventStream(_lines(request, downloads, status), stop, headers, LINES)


async def _lines(request: ApiRequest, downloads: Downloads, status: DownloadStatus) -> AsyncGenerator[bytes, None]:
    try:
        yield line(shapes.OllamaProgress("pulling manifest"))
        async for news in _watched(downloads, status):
            yield line(_progress(news))
        yield line(shapes.OllamaProgress("verifying sha256 digest")) + line(shapes.Pulled("success"))
    except Exception as error:
        yield line(ollama_error(as_local_error(error, request.scope)))


async def _finished(downloads: Downloads, status: DownloadStatus) -> None:
    async for _ in _watched(downloads, status):
        pass


async def _watched(downloads: Downloads, status: DownloadStatus) -> AsyncGenerator[DownloadStatus, None]:
    """Yield the status whenever it changes, until the download is done. Raises the error that stopped it."""
    while True:
        status = downloads.get(status.id)
        yield status
        if status.is_over:
            break
        await asyncio.sleep(LOOK_EVERY_S)
    if status.error is not None:
        raise status.error
    if status.state != "done":
        raise DownloadCancelled(f"The download of {status.plan.name} was cancelled.", hint="Pull again to resume.")


def _progress(status: DownloadStatus) -> shapes.OllamaProgress:
    digest, progress = status.plan.commit, status.progress
    return shapes.OllamaProgress(f"pulling {digest[:12]}", digest, progress.bytes_total, progress.bytes_done)
