"""The last use of this server, and the wait until nothing has used it for a while (--exit-when-idle).

A request counts while it is answered, and at its end, if it does work (any method but GET, HEAD and OPTIONS) or if a
person opens a page with it. What only watches does not count, however often it comes: the live connections of a page
that is open in a browser, health probes, metrics, lists of models. Neither do refused requests. A model that answers,
loads, or is tuned counts as use of the server, and so does a running download or a batch that has not ended.
Does not know: how the server ends (up.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Receive, Scope, Send

if TYPE_CHECKING:
    from localllm.models.library.hub.downloads import Downloads
    from localllm.serving.manager import ModelManager

log = logging.getLogger(__name__)

READING = frozenset({"GET", "HEAD", "OPTIONS"})
LOOK_EVERY_S = 1.0
"""Longest time between two looks at the models and the downloads."""


class Closing(asyncio.Event):
    """Set when the server is about to stop. `is_idle`: it stops because nothing used it, so that pages which are open
    in a browser must not connect again, because that would start a server with socket activation."""

    is_idle = False


class Activity:
    """Counts requests on the event loop."""

    def __init__(self) -> None:
        self.num_open = 0  # requests being answered
        self.last_s = time.monotonic()  # end of the last use

    def around(self, app: ASGIApp) -> ASGIApp:
        """Return an application that counts the requests which `app` answers."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if not counts(scope):
                await app(scope, receive, send)
                return
            self.num_open += 1
            try:
                await app(scope, receive, send)
            finally:
                self.num_open -= 1
                self.last_s = time.monotonic()

        return counted

    async def until_idle(
        self,
        idle_s: float,
        manager: ModelManager,
        downloads: Downloads,
        has_batches: Callable[[], bool] = lambda: False,
    ) -> None:
        """Return once nothing has used the server for `idle_s`, counted from now at the earliest. has_batches: whether
        a batch has not ended."""
        self.last_s = time.monotonic()
        while (left_s := self.last_s + idle_s - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, LOOK_EVERY_S))
            downloads_run = any(not each.is_over for each in downloads.list())
            if self.num_open or manager.is_busy or has_batches() or downloads_run:
                self.last_s = time.monotonic()
        log.info("idle for_s=%.0f", idle_s)


def counts(scope: Scope) -> bool:
    """Return whether a request is use of the server. Browsers mark the opening of a page with Sec-Fetch-Mode."""
    if scope["type"] != ScopeType.HTTP:
        return False
    return scope["method"] not in READING or (b"sec-fetch-mode", b"navigate") in scope["headers"]
