"""Views of the dashboard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from localllm.web.pages.frame.views import Fact, Gauge, Loading, Segment, Shell, View


@dataclass(frozen=True, slots=True)
class Sparkline(View):
    """The history of a value. Coordinates are in a 120 by 32 box; a gap in the samples starts another line."""

    template: ClassVar[str] = "dashboard/_sparkline.html"
    title: str
    span: str  # the period from the left edge to now
    lines: tuple[str, ...]  # one "x,y x,y ..." per line
    areas: tuple[str, ...]  # SVG path data of the area below each line
    now: str
    low: str
    high: str
    samples: tuple[tuple[str, str], ...] = ()  # (how long ago, value), newest first: the plot as text


@dataclass(frozen=True, slots=True)
class Headline(View):
    """A value with its history."""

    template: ClassVar[str] = "dashboard/_headline.html"
    id: str
    title: str
    value: str
    unit: str
    note: str
    sparkline: Sparkline


@dataclass(frozen=True, slots=True)
class PoolCell:
    """One cell of the pool map."""

    x: int
    y: int
    kind: str  # seq-0 to seq-5, used, cached, free


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """The use of the KV cache by layers with one window, beside those that keep every token."""

    window: int | None
    segments: tuple[Segment, ...]
    cells: tuple[PoolCell, ...]
    columns: int
    rows: int
    blocks_per_cell: int


@dataclass(frozen=True, slots=True)
class KVUsage(View):
    """The use of the KV cache, by request."""

    template: ClassVar[str] = "dashboard/_kv_usage.html"
    used_share: float  # 0 to 1
    sparkline: Sparkline
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
    others: tuple[GroupUsage, ...] = ()  # the other KV groups
    state_places: str = ""  # use of the places of recurrent states; empty: the model has none


@dataclass(frozen=True, slots=True)
class StepColumn:
    """One step in the plot of the last steps, in a 120 by 40 box: the prefill bar is on top of the decode bar."""

    x: float
    width: float
    decode_y: float
    decode_height: float
    prefill_y: float
    prefill_height: float


@dataclass(frozen=True, slots=True)
class StepRow:
    """A step of the plot, as text."""

    step_id: int
    prefill_tokens: int
    decode_tokens: int
    requests: int
    total_s: float


@dataclass(frozen=True, slots=True)
class RecentSteps(View):
    """The batches of the last steps, and the time breakdown of the newest."""

    template: ClassVar[str] = "dashboard/_steps.html"
    step_id: int
    num_steps: int
    prefill_tokens: int
    decode_tokens: int
    prefill_requests: int
    decode_requests: int
    budget_tokens: int
    columns: tuple[StepColumn, ...]
    rows: tuple[StepRow, ...]  # newest first
    most_tokens: int  # most tokens in one of these steps: the top of the plot
    times: tuple[Segment, ...]
    total_s: float


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """Median and 95th percentile of one latency; None without observations."""

    name: str
    title: str  # an explanation of the latency
    p50_s: float | None
    p95_s: float | None


@dataclass(frozen=True, slots=True)
class Latency(View):
    """Latencies of the last minute, or since the start if the last minute had no requests."""

    template: ClassVar[str] = "dashboard/_latency.html"
    rows: tuple[LatencyRow, ...]
    span: str  # "last minute" or "since start"


@dataclass(frozen=True, slots=True)
class Counters(View):
    """Prefix cache, preemptions and how requests ended, since the start."""

    template: ClassVar[str] = "dashboard/_counters.html"
    prefix_hit_rate: float  # 0 to 1
    prefix_hits: int
    prefix_queries: int
    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class Drafts(View):
    """Figures of speculation in the last minute, or since the start if nothing was generated in that minute."""

    template: ClassVar[str] = "dashboard/_drafts.html"
    why_off: str = ""  # why there are no drafts at all; empty: there may be some
    tokens_per_step: str = ""  # of one request
    accepted: int = 0
    drafted: int = 0
    facts: tuple[Fact, ...] = ()
    span: str = ""  # "last minute" or "since start"

    @property
    def accepted_share(self) -> float:
        """Share of the verified drafts that were right, 0 to 1."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True, slots=True)
class RequestRow:
    """A request that is running or waiting."""

    id: str
    source: str  # chat, playground, API, or a key's name
    url: str
    state: str
    colour: str  # colour class of the request in the block map
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    blocks: int
    tokens_per_s: float | None
    age_s: float
    cancel_url: str
    drafts: str = ""  # accepted of drafted tokens; empty: none were drafted


@dataclass(frozen=True, slots=True)
class LiveRequests(View):
    """Requests that are running or waiting."""

    template: ClassVar[str] = "dashboard/_live_requests.html"
    rows: tuple[RequestRow, ...]
    hidden: int = 0  # further requests that are not listed
    count: int = 0  # all of them
    cancel_url: str = ""  # cancels all of them
    curl: str = ""  # a command that sends a first request; empty: there have been requests


@dataclass(frozen=True, slots=True)
class FinishedRow:
    """A finished request. All rows share one time scale for their segments."""

    id: str
    source: str
    url: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: float | None
    tokens_per_s: float | None
    total_s: float
    segments: tuple[Segment, ...]
    drafts: str = ""  # accepted of drafted tokens; empty: none were drafted
    missed_tokens: int = 0  # computed again, although an earlier request had computed them
    missed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FinishedRequests(View):
    """The last finished requests, with a breakdown of their time."""

    template: ClassVar[str] = "dashboard/_finished_requests.html"
    rows: tuple[FinishedRow, ...]
    scale_s: float
    hidden: int = 0  # further requests that are known but not listed
    all_url: str = "/dashboard/requests"


@dataclass(frozen=True, slots=True)
class GPUUse:
    """The utilisation and memory of one GPU."""

    index: int
    name: str
    utilization: Gauge
    memory: tuple[Segment, ...]
    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class MachineUse(View):
    """CPU, memory and GPUs right now."""

    template: ClassVar[str] = "dashboard/_machine_use.html"
    gauges: tuple[Gauge, ...]
    facts: tuple[Fact, ...] = ()
    gpus: tuple[GPUUse, ...] = ()


@dataclass(frozen=True, slots=True)
class RankTile:
    """One rank: its device, memory by part, and step time."""

    number: int
    device: str
    is_up: bool
    memory: tuple[Segment, ...]
    held: str  # memory of all parts, of the whole device
    facts: tuple[Fact, ...]
    last_words: str  # why the last lost process of this rank was lost


@dataclass(frozen=True, slots=True)
class StageTile:
    """The ranks of one pipeline stage."""

    number: int
    ranks: tuple[RankTile, ...]
    bubble_ratio: float | None  # share of the time in which the stage computed nothing; None: unknown, or one stage


@dataclass(frozen=True, slots=True)
class Ranks(View):
    """The ranks of a model on several devices; hidden if the model runs in the server's process."""

    template: ClassVar[str] = "dashboard/_ranks.html"
    stages: tuple[StageTile, ...] = ()
    num_ranks: int = 0
    num_lost: int = 0


@dataclass(frozen=True, slots=True)
class ServerTile:
    """One other server behind this address."""

    name: str
    url: str
    is_up: bool
    failure: str  # why it does not answer
    models: str
    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class OtherServers(View):
    """Other servers that answer requests; hidden if there are none."""

    template: ClassVar[str] = "dashboard/_other_servers.html"
    servers: tuple[ServerTile, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelFacts(View):
    """The model and its memory plan."""

    template: ClassVar[str] = "dashboard/_model_facts.html"
    name: str
    memory: tuple[Segment, ...]
    facts: tuple[Fact, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Dashboard(View):
    """Every tile. The live stream sends the tiles that changed."""

    template: ClassVar[str] = "dashboard/_board.html"
    headlines: tuple[Headline, ...]
    ranks: Ranks
    kv_usage: KVUsage
    steps: RecentSteps
    latency: Latency
    counters: Counters
    drafts: Drafts
    live_requests: LiveRequests
    finished_requests: FinishedRequests
    machine: MachineUse
    model: ModelFacts


@dataclass(frozen=True, slots=True)
class DashboardLink:
    """A link to the same dashboard with another model or another time range."""

    title: str
    url: str
    is_shown: bool


@dataclass(frozen=True, slots=True)
class DashboardPage(View):
    """`/dashboard`."""

    template: ClassVar[str] = "dashboard/page.html"
    shell: Shell
    dashboard: Dashboard | None = None
    loading: Loading | None = None
    spans: tuple[DashboardLink, ...] = ()  # time ranges of the sparklines
    models: tuple[DashboardLink, ...] = ()  # the loaded models; empty: there is one
    query: str = ""  # of this dashboard, for the files to download
    others: OtherServers = OtherServers()


@dataclass(frozen=True, slots=True)
class RequestsPage(View):
    """`/dashboard/requests`: those that live, and all finished ones that are known."""

    template: ClassVar[str] = "dashboard/requests.html"
    shell: Shell
    live: LiveRequests
    finished: FinishedRequests


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """Something that happened to a request."""

    name: str
    at: str  # the clock's time
    after_s: float  # since its arrival


@dataclass(frozen=True, slots=True)
class CacheMissCard(View):
    """The reason why the prefix cache did not hold more of a prompt, and the texts where it left an earlier one."""

    template: ClassVar[str] = "dashboard/_cache_miss.html"
    why: str
    before: str = ""  # the text in both prompts,
    here: str = ""  # what follows in this prompt,
    earlier: str = ""  # and in the earlier one
    earlier_url: str = ""  # page of the earlier request; empty: no texts
    hides_text: bool = False  # the request is not the viewer's


@dataclass(frozen=True, slots=True)
class RequestPage(View):
    """`/dashboard/requests/{id}`: where the time of one request went."""

    template: ClassVar[str] = "dashboard/request.html"
    shell: Shell
    id: str
    state: str
    segments: tuple[Segment, ...]
    moments: tuple[TimelineEvent, ...]
    facts: tuple[Fact, ...]
    miss: CacheMissCard | None = None  # None: the cache held all that it could, or the request still waits
    cancel_url: str = ""
