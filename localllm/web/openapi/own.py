"""What our own routes read and answer: probes, metrics, models of this machine, downloads, this document.

Does not know: how answers are made (api/).
"""

from __future__ import annotations

from typing import Any, Literal

from localllm.models.hub.downloads import State
from localllm.models.hub.repository import Found
from localllm.web.api import health, hub, running
from localllm.web.metrics import metrics
from localllm.web.openapi import openapi_json
from localllm.web.openapi.bodies import Body
from localllm.web.openapi.document import OF_MODELS, TEXT, OpenAIProblem, Operation, Shape, Table


class PartOfServer(Shape):
    """A part of the server that does not get on as usual. `seconds`: how long it has stood still, or stood."""

    part: str
    state: Literal["ok", "slow", "stuck", "dead"]
    seconds: float
    why: str


class Health(Shape):
    """`parts` where one is slow."""

    status: Literal["ok", "slow"]
    parts: tuple[PartOfServer, ...] = ()


class Server(Shape):
    """What the watchdog knows of the process."""

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
    """A line of `localllm ps`."""

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
    health.health: Operation("Whether requests are answered.", Health, also=(503,)),
    health.server: Operation("How the parts of the server get on.", Server),
    health.version: Operation("The version.", Version),
    health.root: Operation("That the server runs.", TEXT),
    health.knock: Operation("That the server runs."),
    metrics: Operation("Metrics for Prometheus.", TEXT),
    openapi_json: Operation("This document.", dict),
    running.loaded: Operation("Each model that is or was loaded.", Statuses),
    running.stats: Operation("The same, with what its engine does.", Stats),
    running.load: Operation("Load or wake a model.", Status, _LOAD, also=OF_MODELS, success=(200, 202)),
    running.unload: Operation("Give all memory of a model back.", Status, _MODEL, also=OF_MODELS),
    running.sleep: Operation("Keep a model's weights in host memory and nothing else.", Status, _MODEL, also=OF_MODELS),
    running.wake: Operation("Serve a sleeping model again.", Status, _MODEL, also=OF_MODELS),
    running.pin: Operation("A pinned model gives way to no other.", Status, _PIN, also=OF_MODELS),
    hub.installed: Operation("The models on this machine.", AllInstalled),
    hub.remove: Operation(
        "Delete a model from the Hugging Face cache.", Removed, query=hub.RevisionQuery, also=(404, 409)
    ),
    hub.search: Operation("Models on the hub.", AllFound, query=hub.SearchQuery, also=OF_MODELS),
    hub.plan: Operation("What a download would fetch.", Plan, query=hub.PlanQuery, also=OF_MODELS),
    hub.list_downloads: Operation("Downloads of this server.", Downloads),
    hub.start_download: Operation("Start a download.", Download, _DOWNLOAD, also=OF_MODELS),
    hub.show_download: Operation("One download.", Download, also=(404,)),
    hub.cancel_download: Operation("Stop a download; what arrived is kept.", Download, also=(404,)),
}
