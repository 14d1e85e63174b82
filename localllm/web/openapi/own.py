"""Requests and answers of localllm's own routes: probes, metrics, models on this machine, downloads, this document.

Does not know: how answers are made (api/).
"""

from __future__ import annotations

from typing import Any, Literal

from localllm.models.library.hub.downloads import State
from localllm.models.library.hub.repository import Found
from localllm.web.api.own import health, hub, running
from localllm.web.metrics import metrics
from localllm.web.openapi import openapi_json
from localllm.web.openapi.bodies import Body
from localllm.web.openapi.document import OF_MODELS, TEXT, OpenAIProblem, Operation, Shape, Table


class PartOfServer(Shape):
    """A part of the server and its state. `seconds`: how long it has been stalled, or was stalled last."""

    part: str
    state: Literal["ok", "slow", "stuck", "dead"]
    seconds: float
    why: str


class Health(Shape):
    """`parts` lists the parts that are slow."""

    status: Literal["ok", "slow"]
    parts: tuple[PartOfServer, ...] = ()


class Server(Shape):
    """The watchdog's report about the process."""

    object: Literal["server"]
    version: str
    pid: int
    uptime_s: float
    status: Literal["ok", "slow", "stuck", "dead"]
    parts: list[PartOfServer]
    engines: dict[str, Any]
    loop_lag_s: float
    longest_loop_lag_s: float
    rss_bytes: int
    num_threads: int
    open_requests: int
    num_faults: int
    last_fault: dict[str, Any] | None
    fault_file: str | None


class Version(Shape):
    version: str


class Status(Shape):
    """One line of `localllm ps`."""

    id: str
    object: Literal["model"]
    name: str
    state: str
    pinned: bool
    size_bytes: int
    device: str
    max_model_len: int | None
    kv_usage: float | None
    num_requests: int
    expires_in_s: float | None
    idle_s: float | None
    phase: dict[str, Any] | None
    error: str | None


class Statuses(Shape):
    object: Literal["list"]
    data: list[Status]


class StatusWithStats(Status):
    stats: dict[str, Any] | None


class Stats(Shape):
    object: Literal["list"]
    data: list[StatusWithStats]


class Installed(Shape):
    id: str
    object: Literal["model"]
    source: str
    format: str
    size_bytes: int
    revision: str | None
    last_read: int


class AllInstalled(Shape):
    object: Literal["list"]
    data: list[Installed]


class Removed(Shape):
    id: str
    object: Literal["model"]
    deleted: bool
    freed_bytes: int


class AllFound(Shape):
    object: Literal["list"]
    data: list[Found]


class File(Shape):
    name: str
    size: int
    cached_bytes: int


class Plan(Shape):
    model: str
    repo_id: str
    revision: str
    commit: str
    total_bytes: int
    cached_bytes: int
    needed_bytes: int
    free_bytes: int
    fits_on_disk: bool
    gated: bool
    license: str
    files: list[File]


class Download(Shape):
    id: str
    model: str
    state: State
    started: int
    bytes_done: int
    bytes_total: int
    files_done: int
    files_total: int
    bytes_per_s: int
    eta_s: float | None
    note: str
    error: OpenAIProblem | None


class Downloads(Shape):
    object: Literal["list"]
    data: list[Download]


_MODEL = Body(running.ModelBody, example={"model": "demo"})
_LOAD = Body(running.LoadBody, example={"model": "demo"})
_PIN = Body(running.PinBody, example={"model": "demo"})
_DOWNLOAD = Body(hub.PullBody, example={"model": "org/model"})

TABLE: Table = {
    health.health: Operation("Report whether the server answers requests.", Health, also=(503,)),
    health.server: Operation("Report the state of the server's parts.", Server),
    health.version: Operation("Show the version.", Version),
    health.root: Operation("Report that the server is running.", TEXT),
    health.knock: Operation("Report that the server is running."),
    metrics: Operation("Metrics for Prometheus.", TEXT),
    openapi_json: Operation("This document.", dict),
    running.loaded: Operation("List each model that is or was loaded.", Statuses),
    running.stats: Operation("List the same models with the statistics of their engines.", Stats),
    running.load: Operation("Load or wake a model.", Status, _LOAD, also=OF_MODELS, success=(200, 202)),
    running.unload: Operation("Unload a model and free all its memory.", Status, _MODEL, also=OF_MODELS),
    running.sleep: Operation(
        "Put a model to sleep: keep its weights in host memory and free the rest.", Status, _MODEL, also=OF_MODELS
    ),
    running.wake: Operation("Wake a sleeping model.", Status, _MODEL, also=OF_MODELS),
    running.pin: Operation("Pin or unpin a model; a pinned model is never evicted.", Status, _PIN, also=OF_MODELS),
    hub.installed: Operation("List the models on this machine.", AllInstalled),
    hub.remove: Operation(
        "Delete a model from the Hugging Face cache.", Removed, query=hub.RevisionQuery, also=(404, 409)
    ),
    hub.search: Operation("Search for models on the hub.", AllFound, query=hub.SearchQuery, also=OF_MODELS),
    hub.plan: Operation(
        "List the files and bytes of a download before it starts.", Plan, query=hub.PlanQuery, also=OF_MODELS
    ),
    hub.list_downloads: Operation("List the downloads of this server.", Downloads),
    hub.start_download: Operation("Start a download.", Download, _DOWNLOAD, also=OF_MODELS),
    hub.show_download: Operation("Show one download.", Download, also=(404,)),
    hub.cancel_download: Operation("Stop a download; downloaded bytes are kept.", Download, also=(404,)),
}
