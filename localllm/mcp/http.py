"""The HTTP client of a server at a URL, with bounds: the `mcp` package bounds events, not whole answers.

Does not know: the protocol.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import httpx2

from localllm.units import format_bytes

CONNECT_S = 30.0


class _Bounded(httpx2.AsyncByteStream):
    """The body of an answer, which ends with an error once it is too long."""

    def __init__(self, stream: httpx2.AsyncByteStream, limit_bytes: int) -> None:
        self._stream, self._left, self._limit_bytes = stream, limit_bytes, limit_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            self._left -= len(piece)
            if self._left < 0:
                raise httpx2.ReadError(f"The answer is longer than {format_bytes(self._limit_bytes)}.")
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


def bounded_client(headers: Mapping[str, str], limit_bytes: int, timeout_s: float) -> httpx2.AsyncClient:
    """Return a client with the user's headers, whose answers have at most `limit_bytes`. It reads no proxy and no
    credentials from the environment.
    """

    async def bound(response: httpx2.Response) -> None:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise httpx2.DecodingError("The answer is compressed, which was not asked for.", request=response.request)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _Bounded(response.stream, limit_bytes)

    timeout = httpx2.Timeout(CONNECT_S, read=timeout_s)
    own = {"Accept-Encoding": "identity", **headers}
    return httpx2.AsyncClient(headers=own, timeout=timeout, event_hooks={"response": [bound]}, trust_env=False)
