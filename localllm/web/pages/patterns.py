"""`/dev/patterns`: every partial with a sample, on one page. The template tests draw the same samples.

Does not know: the engine; all figures here are made up.
"""

from __future__ import annotations

import math
from typing import Any

from litestar import Request, get
from litestar.response import Response

from localllm.web import views as v
from localllm.web.pages.markdown import render_markdown
from localllm.web.pages.plots import pool_map, sparkline, stacked
from localllm.web.pages.render import render
from localllm.web.pages.room import html, room_of

MARKDOWN = """Paged attention keeps the KV cache in **blocks** of `block_size` tokens.

- blocks are found through a block table
- nothing is copied when a request grows

```python
def slot(block_table: list[int], position: int, block_size: int = 16) -> int:
    # where K and V of this position live
    return block_table[position // block_size] * block_size + position % block_size
```

| word | meaning |
|:-----|--------:|
| block | 16 tokens |
| slot | 1 token |

> Kwon et al. 2023. ![figure 1](https://example.com/figure.png) and [a link](https://example.com).
"""


@get("/dev/patterns", sync_to_thread=False)
def patterns_page(request: Request[Any, Any, Any]) -> Response[str]:
    """All partials at a glance."""
    drawn = tuple((sample.template, render(sample)) for sample in samples() if sample.template.startswith("_"))
    return html(v.PatternsPage(room_of(request).shell("Patterns", ""), drawn))


def samples() -> list[v.View]:
    """At least one view per template, pages included."""
    return [*_shared(), *_chat(), *_tiles(), *_pages()]


def _shell(here: str) -> v.Shell:
    return v.Shell("Sample", here, "/live/status", "/", v.StatusPill("ready", "ready", "demo", 0.0, 0.02), refresh_s=2)


def _shared() -> list[v.View]:
    phases = (v.Phase("Weights", True, 1.0, "12 MiB in 0.1 s"), v.Phase("KV cache", False, 0.4, "0.8 of 2.0 GiB"))
    return [
        v.StatusPill("ready", "ready", "demo", 0.0, 0.0),
        v.StatusPill("busy", "3 running, 12 waiting", "Qwen3-8B-AWQ", 412.0, 0.62),
        v.StatusPill("loading", "loading"),
        v.StatusPill("error", "stopped"),
        v.ErrorNotice(
            "This conversation is too long for the model.",
            "Prompt and reply need 540 tokens; 512 are available.",
            "Start a new chat, or serve the model with --max-model-len 1k.",
        ),
        v.ErrorNotice("The message is empty."),
        *phases,
        v.Phase("Kernels", False, None, "3 of 11"),
        v.Loading("Qwen3-8B-AWQ", phases),
        v.Loading("Qwen3-8B-AWQ", (), v.ErrorNotice("It does not fit.", "27.5 GiB needed, 22.1 free.", "Try another.")),
    ]


def _chat() -> list[v.View]:
    figures = v.Figures(1204, 1024, 318, "stop", 0.21, 62.1, 4096)
    user = v.ChatMessage("sample-1", "user", "What is paged attention?\nIn short, please.")
    reply = v.ChatMessage("sample-2", "assistant", html=render_markdown(MARKDOWN), model="demo", figures=figures)
    writing = v.ChatMessage("sample-3", "assistant", model="demo", open=v.OpenBlock("sample-3", "text", "It keeps the"))
    failed = v.ChatMessage("sample-4", "assistant", model="demo", error=v.ErrorNotice("The step failed.", "", "Retry."))
    sampling = v.Sampling("Be brief.", "0.2", "", "0.7", "what is left of 4,096", "the model's own setting")
    recent = (v.RecentChat("/", "What is a block table?"), v.RecentChat("/", "A very long title " * 6))
    return [
        user,
        writing,
        reply,
        failed,
        v.OpenBlock("sample-5", "code", "def f():\n    return"),
        figures,
        v.Figures(12, 0, 256, "length"),
        v.ComposerAction(),
        v.ComposerAction("/c/sample/m/sample/stop"),
        sampling,
        v.Composer("", sampling, v.ComposerAction(), "Hello", v.ErrorNotice("The message is empty.")),
        v.EmptyChat("demo", 4096, ("What is paged attention?", "How do I start localllm?"), recent),
        v.ChatTurn(user, reply, v.ComposerAction("/c/sample/m/sample/stop"), "sample"),
        v.ReplyProgress("sample-3", "<p>A block.</p>", True, v.OpenBlock("sample-3", "text", "The next")),
        v.ReplyProgress("sample-3", appended=" words"),
        v.ReplyFinished(reply, v.ComposerAction(), "Reply finished, 318 tokens"),
    ]


def _headline() -> v.Headline:
    wave = [(0.5 * i, 40 + 25 * math.sin(i / 9)) for i in range(120) if not 50 < i < 62]
    plot = sparkline("Generated tokens per second", wave, lambda value: f"{value:.0f} tok/s")
    return v.Headline("generation", "Generation", "412", "tok/s", "81,233 tokens since start", plot)


def _kv_usage() -> v.KVUsage:
    parts = [("In use", "used", 96.0, "96 blocks"), ("Reusable", "cached", 60.0, "60"), ("Free", "free", 100.0, "100")]
    cells, columns, rows, per_cell = pool_map(96, 60, 100, [("seq-0", 40), ("seq-1", 30), ("seq-4", 26)])
    return v.KVUsage(256, 96, 230, 16, 1500, 4096, 960, 36, stacked(parts), cells, columns, rows, per_cell)


def _tiles() -> list[v.View]:
    batch = stacked(
        [("Prefill", "prefill", 380, "380"), ("Decode", "decode", 24, "24"), ("Unused", "idle", 108, "108")]
    )
    times = stacked([("Schedule", "queue", 0.2, "0.2 ms"), ("Forward", "decode", 9.1, "9.1 ms")])
    waterfall = stacked(
        [("Queue", "queue", 1, "1 s"), ("Prefill", "prefill", 2, "2 s"), ("Decode", "decode", 5, "5 s")]
    )
    row = v.RequestRow("chat-4f2a91c0", "running", "seq-0", 812, 768, 201, 64, 61.8, 4.2, "/")
    waiting = v.RequestRow("chatcmpl-0c12", "waiting", "seq-1", 12, 0, 0, 0, None, 0.3, "/")
    ended = v.FinishedRow("chat-77aa", "stop", 812, 768, 201, 0.041, 61.8, 3.4, waterfall)
    aborted = v.FinishedRow("chat-77ab", "abort", 812, 0, 0, None, None, 0.4, ())
    facts = (v.Fact("Preemptions", "2", "requests that gave their blocks back"), v.Fact("Up", "12 min 4 s"))
    return [
        _headline(),
        _headline().sparkline,
        _kv_usage(),
        v.LastStep(812, 813, 380, 24, 1, 24, 512, batch, times, 0.0093),
        v.Latency(
            (v.LatencyRow("TTFT", "To the first token", 0.041, 0.22), v.LatencyRow("Queue", "", None, None)),
            "last minute",
        ),
        v.Counters(0.713, 713, 1000, facts),
        v.LiveRequests((row, waiting), hidden=3),
        v.LiveRequests(()),
        v.FinishedRequests((ended, aborted), 3.4),
        v.FinishedRequests((), 0.0),
        v.MachineUse((v.Gauge("CPU", 0.42, "42% of 8 cores"), v.Gauge("Memory", 0.95, "15.2 GiB of 16.0 GiB")), facts),
        v.ModelFacts(
            "demo", stacked([("Weights", "decode", 3, "12 MiB")]), facts, ("The KV cache is bounded on CPU.",)
        ),
        _dashboard(),
        v.LiveUpdate({"status-pill": render(v.StatusPill("ready", "ready", "demo"))}),
    ]


def _dashboard() -> v.Dashboard:
    empty = v.MachineUse((), ())
    step = v.LastStep(0, 0, 0, 0, 0, 0, 512, (), (), 0.0)
    return v.Dashboard(
        (_headline(),),
        _kv_usage(),
        step,
        v.Latency((), "since start"),
        v.Counters(0.0, 0, 0, ()),
        v.LiveRequests(()),
        v.FinishedRequests((), 0.0),
        empty,
        v.ModelFacts("demo", (), ()),
    )


def _pages() -> list[v.View]:
    sampling = v.Sampling()
    return [
        v.ChatPage(_shell("chat"), (), v.Composer("", sampling, v.ComposerAction()), v.EmptyChat("demo", 512, ("Hi",))),
        v.ChatPage(_shell("chat"), loading=v.Loading("demo")),
        v.DashboardPage(_shell("dashboard"), _dashboard()),
        v.DashboardPage(_shell("dashboard"), None, v.Loading("demo")),
        v.ErrorPage(_shell(""), 404, v.ErrorNotice("Not here.", "It made room.", "Start a new chat.")),
        v.PatternsPage(_shell(""), (("_error_notice.html", render(v.ErrorNotice("Sample."))),)),
    ]
