"""What each template shows, as one frozen dataclass per template. `web/pages/render.py` draws them.

Fields hold plain values in the units of the engine (seconds, bytes, tokens per second); templates print them with
the filters of `web/pages/render.py`. A view knows the name of its template and nothing of HTTP or of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

State = Literal["loading", "ready", "busy", "error"]


class View:
    """Base of all views: `template` is the file that draws it."""

    template: ClassVar[str]


# Parts that both pages share


@dataclass(frozen=True, slots=True)
class StatusPill(View):
    """The header's one-line answer to: is it there, and what is it doing?"""

    template: ClassVar[str] = "_status_pill.html"
    state: State
    label: str  # ready, 2 running, loading weights, ...
    model: str | None = None
    tokens_per_s: float = 0.0  # generated, over the last seconds
    kv_usage: float = 0.0  # 0 to 1


@dataclass(frozen=True, slots=True)
class ErrorNotice(View):
    """What happened, why, what next; in the place where it happened."""

    template: ClassVar[str] = "_error_notice.html"
    what: str
    why: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Phase(View):
    """One phase of loading."""

    template: ClassVar[str] = "_phase.html"
    name: str
    done: bool = False
    fraction: float | None = None  # 0 to 1; None: no measure
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Loading(View):
    """The model is on its way, or rests; stands where the chat or the tiles will be."""

    template: ClassVar[str] = "_loading.html"
    model: str
    phases: tuple[Phase, ...] = ()
    error: ErrorNotice | None = None
    rests: str = ""  # sleeping, unloaded: the next request brings it back


@dataclass(frozen=True, slots=True)
class Shell:
    """What base.html needs around a page."""

    title: str
    here: str  # chat or dashboard: marks the current entry of the navigation
    live_url: str  # where the page's live parts come from
    chat_url: str  # the conversation that "Chat" goes back to
    pill: StatusPill
    refresh_s: int | None = None  # without scripts, the page reloads itself this often


# Chat


@dataclass(frozen=True, slots=True)
class Figures(View):
    """The line of figures below a finished reply."""

    template: ClassVar[str] = "_figures.html"
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish_reason: str  # stop, length, abort, error
    ttft_s: float | None = None
    tokens_per_s: float | None = None
    context_tokens: int | None = None  # of the model, to set the sum against


@dataclass(frozen=True, slots=True)
class OpenBlock(View):
    """The end of a reply that is still being written: a Markdown block that has not closed, as plain text."""

    template: ClassVar[str] = "_open_block.html"
    message_id: str
    kind: Literal["text", "code"] = "text"
    text: str = ""


@dataclass(frozen=True, slots=True)
class ChatMessage(View):
    """One message. `html` is safe markup that web/pages/markdown.py made; `text` is what the user typed."""

    template: ClassVar[str] = "_chat_message.html"
    id: str
    role: Literal["user", "assistant"]
    text: str = ""
    html: str = ""
    model: str = ""
    open: OpenBlock | None = None  # present while the reply is being written
    stream_url: str | None = None  # where to follow it
    figures: Figures | None = None
    error: ErrorNotice | None = None


@dataclass(frozen=True, slots=True)
class ComposerAction(View):
    """The composer's button: send, or stop the reply that is being written."""

    template: ClassVar[str] = "_composer_action.html"
    stop_url: str | None = None


@dataclass(frozen=True, slots=True)
class Sampling(View):
    """The drawer with system prompt and sampling: what the user set (empty: default) and what the defaults are."""

    template: ClassVar[str] = "_sampling_drawer.html"
    system: str = ""
    temperature: str = ""
    max_tokens: str = ""
    default_temperature: str = "1"
    default_max_tokens: str = "up to the context"
    source: str = "the server's defaults"  # where the default temperature comes from


@dataclass(frozen=True, slots=True)
class Composer(View):
    """Where the next message is typed."""

    template: ClassVar[str] = "_composer.html"
    conversation_id: str
    sampling: Sampling
    action: ComposerAction
    text: str = ""
    error: ErrorNotice | None = None


@dataclass(frozen=True, slots=True)
class RecentChat:
    """A link to a conversation that this browser had."""

    url: str
    title: str


@dataclass(frozen=True, slots=True)
class EmptyChat(View):
    """What a new chat shows: what answers here, and three ways to begin."""

    template: ClassVar[str] = "_empty_chat.html"
    model: str
    context_tokens: int
    examples: tuple[str, ...]
    recent: tuple[RecentChat, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatPage(View):
    """`/` and `/c/{id}`."""

    template: ClassVar[str] = "chat.html"
    shell: Shell
    messages: tuple[ChatMessage, ...] = ()
    composer: Composer | None = None
    empty: EmptyChat | None = None
    loading: Loading | None = None


@dataclass(frozen=True, slots=True)
class ChatTurn(View):
    """Answer to a message posted by htmx: the user's message, the reply's place, the composer's new state."""

    template: ClassVar[str] = "_chat_turn.html"
    user: ChatMessage
    reply: ChatMessage
    action: ComposerAction
    conversation_id: str


@dataclass(frozen=True, slots=True)
class ReplyProgress(View):
    """News of a reply: finished blocks, and the open block whole (`open`) or only its new end (`appended`)."""

    template: ClassVar[str] = "_reply_progress.html"
    message_id: str
    html: str = ""  # blocks that closed since the last news
    replaces: bool = False  # `html` is the whole reply so far: first news of a connection
    open: OpenBlock | None = None
    appended: str = ""


@dataclass(frozen=True, slots=True)
class ReplyFinished(View):
    """The last news of a reply."""

    template: ClassVar[str] = "_reply_finished.html"
    message: ChatMessage
    action: ComposerAction
    announcement: str


# Dashboard


@dataclass(frozen=True, slots=True)
class Sparkline(View):
    """One minute of a figure. Coordinates are in a 120 by 32 box; a gap in the samples starts another line."""

    template: ClassVar[str] = "_sparkline.html"
    title: str
    lines: tuple[str, ...]  # "x,y x,y ..." each
    areas: tuple[str, ...]  # path data below each line
    now: str
    low: str
    high: str
    samples: tuple[tuple[str, str], ...] = ()  # (seconds ago, value), newest first: the same as text


@dataclass(frozen=True, slots=True)
class Headline(View):
    """A figure with its last minute."""

    template: ClassVar[str] = "_headline.html"
    id: str
    title: str
    value: str
    unit: str
    note: str
    sparkline: Sparkline


@dataclass(frozen=True, slots=True)
class Segment:
    """One part of a stacked bar, 0 to 100 along the bar."""

    name: str
    kind: str  # its colour class: used, cached, free, prefill, decode, idle, queue, ...
    x: float
    width: float
    value: str


@dataclass(frozen=True, slots=True)
class PoolCell:
    """One cell of the pool map."""

    x: int
    y: int
    kind: str  # seq-0 to seq-5, used, cached, free


@dataclass(frozen=True, slots=True)
class KVUsage(View):
    """Who holds the KV cache."""

    template: ClassVar[str] = "_kv_usage.html"
    total_blocks: int
    used_blocks: int
    high_blocks: int  # where a meter starts to warn
    block_size: int
    used_tokens: int
    total_tokens: int
    reusable_tokens: int
    wasted_token_slots: int
    segments: tuple[Segment, ...]
    cells: tuple[PoolCell, ...]
    columns: int
    rows: int
    blocks_per_cell: int


@dataclass(frozen=True, slots=True)
class LastStep(View):
    """What the last step of the engine held, and where its time went."""

    template: ClassVar[str] = "_last_step.html"
    step_id: int
    num_steps: int
    prefill_tokens: int
    decode_tokens: int
    prefill_requests: int
    decode_requests: int
    budget_tokens: int
    batch: tuple[Segment, ...]
    times: tuple[Segment, ...]
    total_s: float


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """Median and 95th percentile of one latency; None without observations."""

    name: str
    title: str  # what it means, in a sentence
    p50_s: float | None
    p95_s: float | None


@dataclass(frozen=True, slots=True)
class Latency(View):
    """Latencies of the last minute, or since the start where the last minute saw none."""

    template: ClassVar[str] = "_latency.html"
    rows: tuple[LatencyRow, ...]
    span: str  # "last minute" or "since start"


@dataclass(frozen=True, slots=True)
class Fact:
    """A name, a value, and what it means where the name does not say."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Counters(View):
    """Prefix cache, preemptions and how requests ended, since the start."""

    template: ClassVar[str] = "_counters.html"
    prefix_hit_rate: float  # 0 to 1
    prefix_hits: int
    prefix_queries: int
    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class RequestRow:
    """A request that lives in the engine."""

    id: str
    state: str
    colour: str  # its class in the pool map
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    blocks: int
    tokens_per_s: float | None
    age_s: float
    cancel_url: str


@dataclass(frozen=True, slots=True)
class LiveRequests(View):
    """Requests that run or wait."""

    template: ClassVar[str] = "_live_requests.html"
    rows: tuple[RequestRow, ...]
    hidden: int = 0  # more that are not listed


@dataclass(frozen=True, slots=True)
class FinishedRow:
    """A finished request; the segments share one time scale over all rows."""

    id: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: float | None
    tokens_per_s: float | None
    total_s: float
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class FinishedRequests(View):
    """The last finished requests with where their time went."""

    template: ClassVar[str] = "_finished_requests.html"
    rows: tuple[FinishedRow, ...]
    scale_s: float


@dataclass(frozen=True, slots=True)
class Gauge:
    """A share of something limited."""

    name: str
    fraction: float  # 0 to 1
    value: str


@dataclass(frozen=True, slots=True)
class MachineUse(View):
    """CPU, memory and GPU right now."""

    template: ClassVar[str] = "_machine_use.html"
    gauges: tuple[Gauge, ...]
    facts: tuple[Fact, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelFacts(View):
    """The model and what was planned for it."""

    template: ClassVar[str] = "_model_facts.html"
    name: str
    memory: tuple[Segment, ...]
    facts: tuple[Fact, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Dashboard(View):
    """Every tile; the live stream sends those that changed."""

    template: ClassVar[str] = "_dashboard.html"
    headlines: tuple[Headline, ...]
    kv_usage: KVUsage
    last_step: LastStep
    latency: Latency
    counters: Counters
    live_requests: LiveRequests
    finished_requests: FinishedRequests
    machine: MachineUse
    model: ModelFacts


@dataclass(frozen=True, slots=True)
class DashboardPage(View):
    """`/dashboard`."""

    template: ClassVar[str] = "dashboard.html"
    shell: Shell
    dashboard: Dashboard | None = None
    loading: Loading | None = None


@dataclass(frozen=True, slots=True)
class LiveUpdate(View):
    """One live event: partials by the id of the element they replace."""

    template: ClassVar[str] = "_live_update.html"
    parts: dict[str, str] = field(default_factory=dict)  # element id -> safe markup


# Others


@dataclass(frozen=True, slots=True)
class ErrorPage(View):
    """A whole page for an error outside of any fragment."""

    template: ClassVar[str] = "error.html"
    shell: Shell
    status: int
    error: ErrorNotice


@dataclass(frozen=True, slots=True)
class PatternsPage(View):
    """`/dev/patterns`: every partial with a sample."""

    template: ClassVar[str] = "patterns.html"
    shell: Shell
    samples: tuple[tuple[str, str], ...]  # (template, safe markup)
