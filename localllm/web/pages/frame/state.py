"""The state that the pages' handlers share: the manager, the chats, the sampler. One `Room` per application.

Does not know: routes, the requests to the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from litestar import Litestar, Request
from litestar.datastructures import Cookie
from litestar.response import Response

from localllm.engine.stats import EngineStats
from localllm.errors import LocalLLMError
from localllm.web.access.caller import salted
from localllm.web.pages.chat.active_replies import Desk
from localllm.web.pages.chat.attachments import Tray
from localllm.web.pages.chat.store import ChatStore
from localllm.web.pages.chat.store.database import chats_path
from localllm.web.pages.dashboard.machine import MachineMonitor
from localllm.web.pages.dashboard.presenters import status_pill
from localllm.web.pages.frame.history import History
from localllm.web.pages.frame.live import Sampler, Tick
from localllm.web.pages.frame.navigation import shell, theme_of
from localllm.web.pages.frame.render import render
from localllm.web.pages.frame.views import Shell, StatusPill, View

if TYPE_CHECKING:
    from localllm.config.settings import ServerConfig
    from localllm.serving.manager import ModelManager
    from localllm.serving.served import ModelCard, ServedModel


class Room:
    """The shared state of the pages."""

    def __init__(self, manager: ModelManager, asked: ServerConfig) -> None:
        self.manager = manager
        self.store = ChatStore(chats_path() if asked.chat_history else None)
        self._share_prefix_cache = asked.share_prefix_cache
        self.desk = Desk(self.store)
        self.tray = Tray()
        self.sampler = Sampler(self._stats)
        self.history = History(self._stats)
        self.machine = MachineMonitor()

    @property
    def served(self) -> ServedModel | None:
        """The ready model that was used last."""
        return self.manager.current

    @property
    def card(self) -> ModelCard | None:
        """Facts about the model that the next message goes to; None while it loads, or after it failed to load."""
        entry = self.manager.default
        return entry.card if entry is not None and entry.state not in ("loading", "failed") else None

    def cache_salt(self, owner: str) -> str | None:
        """Return the cache salt for an owner's requests from the pages, the same as through the API."""
        return salted("" if self._share_prefix_cache else owner, None)

    def pill(self, tick: Tick | None = None) -> StatusPill:
        """Return the header's status, from a tick or from the current state."""
        entry = self.manager.default
        stats = tick.stats if tick is not None else self._stats()
        plan = self.served.plan if self.served is not None else None
        return status_pill(
            entry.name if entry is not None else None, entry.state if entry is not None else "", stats, plan
        )

    def shell(
        self,
        request: Request[Any, Any, Any],
        title: str,
        here: str,
        live_url: str = "/live/status",
        *,
        waits: bool = False,
        moves: bool = False,
    ) -> Shell:
        """Return the frame of a page. `waits`: the page shows the model's load and reloads once that is done. `moves`:
        the page has live parts, which a browser without scripts gets by reloading.
        """
        if waits:
            live_url += f"{'&' if '?' in live_url else '?'}loading=1"
        return shell(title, here, self.pill(), theme_of(request), live_url, 2 if waits or moves else None)

    def _stats(self) -> EngineStats | None:
        served = self.served
        if served is None:
            return None
        try:
            return served.client.stats()
        except LocalLLMError:
            return None  # the engine is stopping or restarting; the pill then shows no served model


def room_of(request: Request[Any, Any, Any]) -> Room:
    return _room_of(request.app)


def _room_of(app: Litestar) -> Room:
    """Return the application's room, created at first use."""
    room: Room | None = app.state.get("pages_room")
    if room is None:
        room = Room(app.state["manager"], app.state["settings"].server)
        app.state["pages_room"] = room
    return room


async def open_room(app: Litestar) -> None:
    """Start recording the last hour, and purge old deletions once they can no longer be undone."""
    room = _room_of(app)
    room.history.start()
    if room.store.path is not None and room.store.path.exists():
        room.desk.purge_later()


async def close_room(app: Litestar) -> None:
    """Save the replies that are still being written, at shutdown."""
    room = _room_of(app)
    await room.history.stop()
    await room.desk.close()


def html(
    view: View, status_code: int = 200, headers: Mapping[str, str] | None = None, cookies: Sequence[Cookie] = ()
) -> Response[str]:
    """Return a view as a response."""
    return Response(
        render(view),
        status_code=status_code,
        media_type="text/html",
        headers={"Cache-Control": "no-store", **(headers or {})},
        cookies=list(cookies),
    )
