"""The state that all pages share: the manager, the sampler, the header's status. One `PagesState` per application.

A page with a state of its own keeps it with `once_per_app`.
Does not know: routes, what the pages show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from litestar import Litestar, Request
from litestar.datastructures import Cookie
from litestar.response import Response

from localllm.engine.stats import EngineStats
from localllm.errors import LocalLLMError
from localllm.serving.answers.generation import salted
from localllm.serving.suggestions import Suggestions
from localllm.web.api.remote import listed_name
from localllm.web.pages.frame import status
from localllm.web.pages.frame.navigation import shell
from localllm.web.pages.frame.render import render
from localllm.web.pages.frame.sampler import Sampler, Tick
from localllm.web.pages.frame.views import Loading, Shell, StatusPill, View

if TYPE_CHECKING:
    from localllm.config.settings import Settings
    from localllm.fleet.upstreams import Upstreams
    from localllm.serving.manager import ModelManager
    from localllm.serving.served import ModelCard, ServedModel

T = TypeVar("T")


class PagesState:
    """The shared state of the pages."""

    def __init__(self, manager: ModelManager, upstreams: Upstreams, settings: Settings) -> None:
        self.manager, self.upstreams, self._settings = manager, upstreams, settings
        self.suggestions = Suggestions(manager, settings)
        self._share_prefix_cache = settings.server.share_prefix_cache
        self.sampler = Sampler(self.stats)
        self.samplers: dict[str, Sampler] = {}  # of single models, by name

    @property
    def served(self) -> ServedModel | None:
        """The ready model that was used last."""
        return self.manager.current

    @property
    def card(self) -> ModelCard | None:
        """Facts about the model that the next message goes to; None while it loads, and before a load has succeeded."""
        entry = self.manager.register.default
        return entry.card if entry is not None and entry.state != "loading" else None

    def elsewhere(self, name: str = "") -> str:
        """Return the model that other servers answer a page's request with; empty: this server answers it.

        name: of the model that was chosen; empty: none was. What runs here is answered here.
        """
        found = listed_name(self.upstreams, self.manager.register, self._settings, name) or ""
        entry = self.manager.register.find(found) if found else None
        return "" if entry is not None and entry.is_running else found

    def cache_salt(self, owner: str) -> str | None:
        """Return the cache salt for an owner's requests from the pages, the same as through the API."""
        return salted("" if self._share_prefix_cache else owner, None)

    def pill(self, tick: Tick | None = None) -> StatusPill:
        """Return the header's status, from a tick or from the current state."""
        entry = self.manager.register.default
        stats = tick.stats if tick is not None else self.stats()
        plan = self.served.plan if self.served is not None else None
        name, state = (entry.name, entry.state) if entry is not None else (None, "")
        return status.status_pill(name, state, stats, plan, len(self.manager.ready) - 1)

    def chat_pill(self, model: str) -> StatusPill:
        """Return the status of the model that a chat's next message goes to; an empty name: the default."""
        if found := self.elsewhere(model):
            servers = self.upstreams.servers_of(found)
            return StatusPill("idle", f"on {', '.join(servers)}" if servers else "not reached", found, is_brief=True)
        entry = self.manager.register.find(model)
        if entry is None and model:
            return StatusPill("idle", "not loaded", model, is_brief=True)
        served = entry.served if entry is not None and entry.state == "ready" else None
        return status.chat_pill(entry, _stats_of(served), served.plan if served is not None else None)

    def loading(self, model: str = "") -> Loading:
        """Return the progress of a model's load, or why it failed; an empty name: the default."""
        return status.loading(self.manager.register.find(model))

    def live_parts(self, tick: Tick, *, waits: bool = False) -> dict[str, str]:
        """Return the live parts of every page by element id: the status pill, and the load progress on a page that
        waits for its model.
        """
        parts = {"status-pill": tick.cached("pill", lambda: render(self.pill(tick)))}
        if self.served is None and waits:
            parts["loading"] = tick.cached("loading", lambda: render(self.loading()))
        return parts

    def shell(
        self,
        request: Request[Any, Any, Any],
        title: str,
        here: str,
        live_url: str = "/live/status",
        *,
        waits: bool = False,
        moves: bool = False,
        pill: StatusPill | None = None,
    ) -> Shell:
        """Return the frame of a page. `waits`: the page shows the model's load and reloads once that is done. `moves`:
        the page has live parts, which a browser without scripts gets by reloading.
        """
        if waits:
            live_url += f"{'&' if '?' in live_url else '?'}loading=1"
        return shell(request, title, here, pill or self.pill(), live_url, 2 if waits or moves else None)

    def stats(self) -> EngineStats | None:
        """Return the statistics of the model that was used last; None if it is not ready."""
        return _stats_of(self.served)

    def named(self, model: str) -> ServedModel | None:
        """Return the ready model of that name."""
        return next((each for each in self.manager.ready if each.name == model), None)

    def sampler_of(self, model: str) -> Sampler:
        """Return the sampler of one of several models. It records that model's last hour from the first call on."""
        if model not in self.samplers:
            self.samplers[model] = Sampler(lambda: _stats_of(self.named(model)))
            self.samplers[model].start()
        return self.samplers[model]


def _stats_of(served: ServedModel | None) -> EngineStats | None:
    if served is None:
        return None
    try:
        return served.client.stats()
    except LocalLLMError:
        return None  # the engine is stopping or restarting; the pill then shows no served model


def once_per_app(app: Litestar, name: str, make: Callable[[], T]) -> T:
    """Return the application's object of this name, made at first use."""
    found: T | None = app.state.get(name)
    if found is None:
        found = app.state[name] = make()
    return found


def pages_state(request: Request[Any, Any, Any]) -> PagesState:
    """Return the application's state of all pages, made at first use."""
    return pages_state_of(request.app)


def pages_state_of(app: Litestar) -> PagesState:
    state = app.state
    return once_per_app(app, "pages", lambda: PagesState(state["manager"], state["upstreams"], state["settings"]))


async def open_pages(app: Litestar) -> None:
    """Record the last hour from now on, at server start."""
    pages_state_of(app).sampler.start()


async def close_pages(app: Litestar) -> None:
    state = pages_state_of(app)
    for sampler in (state.sampler, *state.samplers.values()):
        await sampler.stop()
    await state.suggestions.close()


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
