"""Which model a dashboard shows, over which time range, and for whom.

Without `?model=` the dashboard shows the model that was used last, whose last hour is always recorded. A model that is
chosen by name has a sampler of its own, which records while a dashboard shows it.
Does not know: how a tile is filled (presenters.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from litestar import Litestar, Request

from localllm.engine.stats import EngineStats
from localllm.errors import InvalidParameter, LocalLLMError
from localllm.serving.served import ServedModel
from localllm.web.access.caller import may
from localllm.web.pages.dashboard.plots import MINUTE, SPANS, Span
from localllm.web.pages.dashboard.views import DashboardLink
from localllm.web.pages.frame.sampler import Sampler
from localllm.web.pages.frame.state import PagesState, once_per_app, pages_state


@dataclass(frozen=True, slots=True)
class DashboardQuery:
    """The choices of one dashboard."""

    state: PagesState
    sampler: Sampler
    model: str  # the name that was chosen; empty: the model used last
    span: Span
    names_keys: bool  # the viewer may know which keys others use
    base_url: str  # the server's address as the viewer has it

    @property
    def served(self) -> ServedModel | None:
        return served_model(self.state, self.model) if self.model else self.state.served

    @property
    def variant(self) -> str:
        """A name for everything that the tiles depend on besides the tick."""
        return f"{self.span.key} {self.names_keys} {self.base_url}"

    def query(self, **changes: str) -> str:
        """Return the query of these choices, with some of them changed."""
        asked = {"model": self.model, "last": "" if self.span is MINUTE else self.span.key, **changes}
        found = urlencode({name: value for name, value in asked.items() if value})
        return f"?{found}" if found else ""


def shown(request: Request[Any, Any, Any]) -> DashboardQuery:
    """Return the choices of a request. Raises `InvalidParameter` for an unknown time range. A model that is not loaded
    any more is not a choice.
    """
    state = pages_state(request)
    asked = request.query_params.get("model", "")
    model = asked if len(loaded_models(state)) > 1 and served_model(state, asked) is not None else ""
    base_url = f"{request.url.scheme}://{request.headers.get('host', '')}"
    sampler = _sampler_of(request.app, state, model) if model else state.sampler
    return DashboardQuery(state, sampler, model, _span(request), may(request, "admin"), base_url)


def loaded_models(state: PagesState) -> list[str]:
    """Return the names of all ready models."""
    return [model.name for model in state.manager.ready]


def model_choices(seen: DashboardQuery) -> tuple[DashboardLink, ...]:
    """Return the models to choose from; empty if only one is loaded."""
    names = loaded_models(seen.state)
    current = seen.served.name if seen.served is not None else ""
    if len(names) < 2:
        return ()
    return tuple(DashboardLink(name, f"/dashboard{seen.query(model=name)}", name == current) for name in names)


def served_model(state: PagesState, name: str) -> ServedModel | None:
    """Return the ready model of that name."""
    return next((model for model in state.manager.ready if model.name == name), None)


def _sampler_of(app: Litestar, state: PagesState, name: str) -> Sampler:
    """Return the sampler of a ready model, made at first use."""
    known: dict[str, Sampler] = once_per_app(app, "dashboard_samplers", dict)
    if name not in known:
        known[name] = Sampler(lambda: _stats(state, name))
    return known[name]


def _stats(state: PagesState, name: str) -> EngineStats | None:
    served = served_model(state, name)
    try:
        return served.client.stats() if served is not None else None
    except LocalLLMError:
        return None  # the engine is stopping


def _span(request: Request[Any, Any, Any]) -> Span:
    asked = request.query_params.get("last", MINUTE.key)
    for span in SPANS:
        if span.key == asked:
            return span
    known = ", ".join(span.key for span in SPANS)
    raise InvalidParameter(f"Unknown time span {asked[:40]!r}.", f"Known: {known}.", param="last")
