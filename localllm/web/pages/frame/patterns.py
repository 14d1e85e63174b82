"""`/dev/patterns`: every partial template with sample data, on one page. The template tests use the same samples.

Each page's folder has samples of its own views: `samples.py` has a function `samples` that takes the shell and returns
at least one view of each template. The samples are imported when they are drawn.
Does not know: the pages, the engine; all figures here are invented.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from litestar import Request, get
from litestar.response import Response

from localllm.web.pages.frame import views as v
from localllm.web.pages.frame.navigation import Page
from localllm.web.pages.frame.render import render
from localllm.web.pages.frame.state import html, pages_state
from localllm.web.pages.frame.static import static_files

SHEETS = tuple(sorted(name for name in static_files() if name.endswith(".css") and name != "app.css"))


@get("/dev/patterns", sync_to_thread=False)
def patterns_page(request: Request[Any, Any, Any]) -> Response[str]:
    """Show all partials."""
    pages: tuple[Page, ...] = request.app.state["registered_pages"]
    drawn = tuple((sample.template, render(sample)) for sample in samples(pages) if is_partial(sample))
    return html(v.PatternsPage(pages_state(request).shell(request, "Patterns", ""), drawn, SHEETS))


def is_partial(sample: v.View) -> bool:
    return sample.template.rpartition("/")[2].startswith("_")


def samples(pages: Sequence[Page]) -> list[v.View]:
    """Return at least one view per template of the frame and of the pages."""
    entries = tuple(page.entry for page in pages)
    pill = v.StatusPill("ready", "ready", "demo", 0.0, 0.02)

    def shell(here: str) -> v.Shell:
        look = {name: next(iter(values)) for name, values in v.LOOKS.items()}
        return v.Shell("Sample", here, entries, pill, look, "/live/status", 2, can_log_out=True)

    found = _shared(shell(""))
    for page in pages:
        found += import_module(f"localllm.web.pages.{page.entry.key}.samples").samples(shell(page.entry.key))
    return found


def _shared(shell: v.Shell) -> list[v.View]:
    phases = (
        v.LoadPhase("Weights", True, 1.0, "12 MiB in 0.1 s"),
        v.LoadPhase("KV cache", False, 0.4, "0.8 of 2.0 GiB"),
    )
    ready = v.StatusPill("ready", "ready", "demo", 0.0, 0.0)
    return [
        ready,
        v.StatusPill("busy", "3 running, 12 waiting", "Qwen3-8B-AWQ", 412.0, 0.62),
        v.StatusPill("ready", "ready", "demo", 0.0, 0.0, num_others=1),
        v.StatusPill("ready", "ready", "demo", context_tokens=4096, memory_bytes=10**7, is_brief=True),
        v.StatusPill("idle", "not loaded", "demo", is_brief=True),
        v.StatusPill("loading", "loading"),
        v.StatusPill("error", "stopped"),
        v.ErrorNotice(
            "This conversation is too long for the model.",
            "Prompt and reply need 540 tokens; 512 are available.",
            "Start a new chat, or serve the model with --max-model-len 1k.",
        ),
        v.ErrorNotice("The message is empty."),
        *phases,
        v.LoadPhase("Kernels", False, None, "3 of 11"),
        v.Loading("Qwen3-8B-AWQ", phases),
        v.Loading("Qwen3-8B-AWQ", (), v.ErrorNotice("It does not fit.", "27.5 GiB needed, 22.1 free.", "Try another.")),
        v.Loading("demo", is_tuned=True),
        v.LiveUpdate({"status-pill": render(ready)}),
        v.LoginPage(replace(shell, entries=()), "/dashboard"),
        v.LoginPage(replace(shell, entries=()), "/", v.ErrorNotice("That is not a key of this server.")),
        v.ErrorPage(shell, v.ErrorNotice("This chat does not exist.", "It was deleted.", "Start a new chat.")),
        v.ErrorPage(shell, v.ErrorNotice("Search is off."), v.NavEntry("library", "Models", "/library", "M3 5h14")),
        v.PatternsPage(shell, (("_error_notice.html", render(v.ErrorNotice("Sample."))),), SHEETS),
    ]
