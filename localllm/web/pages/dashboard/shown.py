"""The model that a dashboard shows, the time range, and who looks at it.

If one model is loaded, the dashboard shows it, and its last hour is always recorded. Of several models it shows the one
that `?model=` names, else the one that was used last when the page was opened. Each has a sampler of its own, which
records from the first time that its dashboard is opened.
Does not know: how a tile is filled (views.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from litestar import Request

from localllm.errors import InvalidParameter
from localllm.serving.served import ServedModel
from localllm.web.access.caller import may
from localllm.web.pages.dashboard.plots import MINUTE, SPANS, Span
from localllm.web.pages.frame.sampler import Sampler
from localllm.web.pages.frame.state import PagesState, pages_state


@dataclass(frozen=True, slots=True)
class DashboardLink:
    """A link to the same dashboard with another model or another time range."""

    title: str
    url: str
    is_shown: bool


@dataclass(frozen=True, slots=True)
class DashboardQuery:
    """The choices of one dashboard."""

    state: PagesState
    sampler: Sampler
    model: str  # one of several loaded models; empty: the only one
    span: Span
    names_keys: bool  # the viewer may know which keys others use
    base_url: str  # the server's address as the viewer has it

    @property
    def served(self) -> ServedModel | None:
        return self.state.named(self.model) if self.model else self.state.served

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
    state, model = pages_state(request), request.query_params.get("model", "")
    if len(loaded_models(state)) < 2:
        model = ""
    elif state.named(model) is None:
        model = state.served.name if state.served is not None else ""
    base_url = f"{request.url.scheme}://{request.headers.get('host', '')}"
    sampler = state.sampler_of(model) if model else state.sampler
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


def _span(request: Request[Any, Any, Any]) -> Span:
    asked = request.query_params.get("last", MINUTE.key)
    for span in SPANS:
        if span.key == asked:
            return span
    known = ", ".join(span.key for span in SPANS)
    raise InvalidParameter(f"Unknown time span {asked[:40]!r}.", f"Known: {known}.", param="last")
