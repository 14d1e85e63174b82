"""Requests of the engine: the live ones, the finished ones, and the page of one.

Does not know: routes, templates.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from urllib.parse import quote

from localllm.engine.outputs import ExplainedMiss
from localllm.engine.stats import EngineStats, RequestTimeline
from localllm.units import format_count, format_seconds
from localllm.web.pages.dashboard.plots import colours
from localllm.web.pages.frame.views import Fact, Segment, Shell, View, stacked, view


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


@view("dashboard/_live_requests.html")
class LiveRequests(View):
    """Requests that are running or waiting."""

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


@view("dashboard/_finished_requests.html")
class FinishedRequests(View):
    """The last finished requests, with a breakdown of their time."""

    rows: tuple[FinishedRow, ...]
    scale_s: float
    hidden: int = 0  # further requests that are known but not listed
    all_url: str = "/dashboard/requests"


@view("dashboard/requests.html")
class RequestsPage(View):
    """`/dashboard/requests`: those that live, and all finished ones that are known."""

    shell: Shell
    live: LiveRequests
    finished: FinishedRequests


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """Something that happened to a request."""

    name: str
    at: str  # the clock's time
    after_s: float  # since its arrival


@view("dashboard/_cache_miss.html")
class CacheMissCard(View):
    """The reason why the prefix cache did not hold more of a prompt, and the texts where it left an earlier one."""

    why: str
    before: str = ""  # the text in both prompts,
    here: str = ""  # what follows in this prompt,
    earlier: str = ""  # and in the earlier one
    earlier_url: str = ""  # page of the earlier request; empty: no texts
    hides_text: bool = False  # the request is not the viewer's


@view("dashboard/request.html")
class RequestPage(View):
    """`/dashboard/requests/{id}`: where the time of one request went."""

    shell: Shell
    id: str
    state: str
    segments: tuple[Segment, ...]
    moments: tuple[TimelineEvent, ...]
    facts: tuple[Fact, ...]
    miss: CacheMissCard | None = None  # None: the cache held all that it could, or the request still waits
    cancel_url: str = ""


MAX_LIVE, MAX_FINISHED = 24, 8


@dataclass(frozen=True, slots=True)
class Viewer:
    """The person that looks at requests."""

    names_keys: bool = True  # may know which keys others use
    base_url: str = ""  # the server's address as the viewer has it
    query: str = ""  # of the dashboard that the viewer has open


ADMIN = Viewer()


def first_request(model: str, viewer: Viewer) -> str:
    """Return a command that sends a request to the model."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]}, ensure_ascii=False)
    address = shlex.quote(f"{viewer.base_url}/v1/chat/completions")
    return f"curl {address} -H 'content-type: application/json' -d {shlex.quote(body)}"


def source_of(request: RequestTimeline, viewer: Viewer) -> str:
    """Return where a request comes from: chat, playground, API, or the name of the key that it was sent with."""
    if request.key_name and viewer.names_keys:
        return request.key_name if request.source in ("", "API") else f"{request.source}, {request.key_name}"
    return request.source or "API"


def live_requests(stats: EngineStats, viewer: Viewer = ADMIN, limit: int = MAX_LIVE, *, curl: str = "") -> LiveRequests:
    """Return the running and waiting requests. curl: a command to show while there has not been any request."""
    colour_of = colours([request.request_id for request in stats.requests])
    shown = stats.requests[:limit]
    rows = tuple(_live_row(line, colour_of[line.request_id], stats.taken_s, viewer) for line in shown)
    count = stats.num_running + stats.num_waiting
    return LiveRequests(rows, max(0, count - len(rows)), count, f"/dashboard/requests/cancel{viewer.query}", curl)


def _live_row(request: RequestTimeline, colour: str, now_s: float, viewer: Viewer) -> RequestRow:
    is_known = request.first_token_s is not None and now_s - request.first_token_s > 0.2
    return RequestRow(
        id=request.request_id,
        source=source_of(request, viewer),
        url=_url(request.request_id),
        state=request.state,
        colour=colour,
        prompt_tokens=request.num_prompt_tokens,
        cached_tokens=request.num_cached_tokens,
        output_tokens=request.num_output_tokens,
        blocks=request.num_blocks,
        tokens_per_s=request.tokens_per_s(now_s) if is_known else None,
        age_s=max(0.0, now_s - request.arrived_s),
        cancel_url=f"{_url(request.request_id)}/cancel",
        drafts=_drafts(request),
    )


def _drafts(request: RequestTimeline) -> str:
    """Return how many of a request's drafts were right; empty if it had none."""
    accepted, drafted = request.num_accepted_tokens, request.num_drafted_tokens
    return f"{format_count(accepted)} of {format_count(drafted)}" if drafted else ""


def finished_requests(
    recent: Sequence[RequestTimeline], viewer: Viewer = ADMIN, limit: int = MAX_FINISHED
) -> FinishedRequests:
    ended = [request for request in recent if request.finished_s is not None]
    shown = ended[:limit]
    scale_s = max((_total_s(request) for request in shown), default=0.0)
    return FinishedRequests(
        tuple(_finished_row(request, scale_s, viewer) for request in shown), scale_s, len(ended) - len(shown),
        f"/dashboard/requests{viewer.query}",
    )  # fmt: skip


def _total_s(request: RequestTimeline) -> float:
    return max(0.0, (request.finished_s or request.arrived_s) - request.arrived_s)


def _finished_row(request: RequestTimeline, scale_s: float, viewer: Viewer) -> FinishedRow:
    return FinishedRow(
        id=request.request_id,
        source=source_of(request, viewer),
        url=_url(request.request_id),
        finish_reason=request.finish_reason or "unknown",
        prompt_tokens=request.num_prompt_tokens,
        cached_tokens=request.num_cached_tokens,
        output_tokens=request.num_output_tokens,
        ttft_s=request.ttft_s,
        tokens_per_s=request.tokens_per_s(request.finished_s or request.arrived_s),
        total_s=_total_s(request),
        segments=_spans(request, request.finished_s or request.arrived_s, scale_s),
        drafts=_drafts(request),
        missed_tokens=request.num_missed_tokens,
        missed_s=request.missed_s or 0.0,
    )


def _spans(request: RequestTimeline, end: float, scale_s: float) -> tuple[Segment, ...]:
    """Return queue, prefill and decode; a request that ended early has fewer parts."""
    marks = [request.arrived_s, request.scheduled_s or end, request.first_token_s or end, end]
    spans = [max(0.0, after - before) for before, after in pairwise(marks)]
    names = (("Queue", "queue"), ("Prefill", "prefill"), ("Decode", "decode"))
    parts = [(name, kind, span, format_seconds(span)) for (name, kind), span in zip(names, spans, strict=True)]
    return stacked(parts, total=scale_s)


def _url(request_id: str) -> str:
    return f"/dashboard/requests/{quote(request_id, safe='')}"


def cache_miss(request: RequestTimeline, found: ExplainedMiss | None) -> CacheMissCard | None:
    """Return why the cache held no more of a prompt. found: with its texts; None: they are not the viewer's."""
    before, missed = format_count(request.miss_position), format_count(request.num_missed_tokens)
    again = "computed again" + (f" in {format_seconds(request.missed_s)}" if request.missed_s else "")
    match request.miss_reason:
        case "changed":
            why = f"The prompt left an earlier one after {before} of {format_count(request.num_prompt_tokens)} tokens."
            if request.num_missed_tokens:
                why += f" {missed} of those behind that place are the same in both, and were {again}."
            else:
                why += " Nothing behind that place was in the earlier one."
        case "evicted":
            why = (
                f"An earlier request had computed more of this prompt, but its blocks behind the first {before} tokens "
                f"are no longer in the cache: {missed} were {again}. A larger KV cache keeps more."
            )
        case "no_state":
            why = (
                f"An earlier request had computed more of this prompt. Its blocks are in the cache, but no recurrent "
                f"state behind the first {before} tokens: {missed} were {again}."
            )
        case "new":
            why = "No earlier prompt of the same sender that is still known begins like this one."
        case "off":
            why = "The prefix cache is off, or the request asked for log-probabilities of its prompt."
        case _:
            return None
    is_changed = request.miss_reason == "changed"
    if found is None or not is_changed:
        return CacheMissCard(why, hides_text=is_changed)
    return CacheMissCard(why, found.before, found.here, found.earlier, _url(found.miss.request_id))


def request_page(
    shell: Shell,
    request: RequestTimeline,
    now_s: float,
    viewer: Viewer = ADMIN,
    found: ExplainedMiss | None = None,
) -> RequestPage:
    """Return the page of one request, live or finished. found: its cache miss, if the viewer may read its text."""
    end_s = request.finished_s or now_s
    lives = request.finished_s is None
    return RequestPage(
        shell=shell,
        id=request.request_id,
        state=request.state if lives else request.finish_reason or "finished",
        segments=_spans(request, end_s, end_s - request.arrived_s),
        moments=_timeline(request),
        facts=(
            Fact("From", source_of(request, viewer)),
            Fact("Prompt", f"{format_count(request.num_prompt_tokens)} tokens"),
            Fact("Cached", format_count(request.num_cached_tokens), "prompt tokens found in the prefix cache"),
            *(
                [Fact("Loaded", format_count(request.num_loaded_tokens), "tokens whose blocks came from RAM or disk")]
                if request.num_loaded_tokens
                else []
            ),
            Fact("Generated", f"{format_count(request.num_output_tokens)} tokens"),
            *([Fact("Drafts", _drafts(request), "tokens guessed ahead that were right")] if _drafts(request) else []),
            Fact("Time to first token", format_seconds(request.ttft_s) if request.ttft_s is not None else "–"),
            Fact("Time per token", format_seconds(request.tpot_s) if request.tpot_s is not None else "–"),
            Fact("Preempted", f"{request.num_preemptions} times", _preempted(request)),
            *([Fact("Blocks", format_count(request.num_blocks), "in use now")] if lives else []),
        ),
        miss=cache_miss(request, found),
        cancel_url=f"{_url(request.request_id)}/cancel" if lives else "",
    )


def _timeline(request: RequestTimeline) -> tuple[TimelineEvent, ...]:
    marks = (
        ("Arrived", request.arrived_s),
        ("First step", request.scheduled_s),
        ("First token", request.first_token_s),
        *request.events,
        ("Ended", request.finished_s),
    )
    known = sorted([(at_s, name) for name, at_s in marks if at_s is not None], key=lambda mark: mark[0])
    return tuple(
        TimelineEvent(name, time.strftime("%H:%M:%S", time.localtime(at_s)), at_s - request.arrived_s)
        for at_s, name in known
    )


def _preempted(request: RequestTimeline) -> str:
    """Return what became of the KV blocks of a request each time that it was preempted."""
    if not request.num_swaps:
        return "KV blocks freed and recomputed later"
    again = request.num_preemptions - request.num_swaps
    return "KV blocks kept in RAM" + (f", but not {again} times" if again else "")
