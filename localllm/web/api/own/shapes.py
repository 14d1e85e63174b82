"""Answers of localllm's own routes and of the model management routes of other servers, as they are sent.

Does not know: where the values come from.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from localllm.engine.stats import EngineStats
from localllm.models.fit.speed import PlanSpeeds
from localllm.models.library.hub.downloads import State
from localllm.models.library.hub.repository import Found
from localllm.serving import entry
from localllm.serving.phases import Phase
from localllm.web.errors import OpenAIProblem
from localllm.web.shape import Shape
from localllm.web.watchdog import PartOfServer


class Health(Shape):
    """`parts` lists the parts that are slow."""

    status: Literal["ok", "slow"]
    parts: list[PartOfServer] | UnsetType = UNSET


class Version(Shape):
    version: str


class OllamaVersion(Shape):
    version: str  # of Ollama's API
    localllm: str  # of this server


class Status(Shape):
    """One line of `localllm ps`."""

    id: str
    object: Literal["model"]
    name: str
    state: entry.State
    pinned: bool
    size_bytes: int
    device: str
    max_model_len: int | None
    kv_usage: float | None
    num_requests: int
    expires_in_s: float | None
    idle_s: float | None
    phase: Phase | None
    error: str | None


class Statuses(Shape):
    object: Literal["list"]
    data: list[Status]


class FarFacts(Shape):
    """The experts and lookup tables that are not on the GPU."""

    layers: list[int]  # whose experts these are
    ram_bytes: int  # of them, or of the cache of experts on disk, and of the tables
    disk_bytes: int  # 0: none of them are on disk
    tables: dict[str, int]  # name -> bytes


class StatusWithStats(Status):
    """`predicted` and `measured_tokens_per_s` are of one answer with a short context: expected before the load, and the
    median of the last 200 steps that had one token of one answer."""

    stats: EngineStats | None
    far: FarFacts | None = None
    predicted: PlanSpeeds | None = None
    measured_tokens_per_s: float | None = None


class Stats(Shape):
    object: Literal["list"]
    data: list[StatusWithStats]


class InstalledModel(Shape):
    id: str
    object: Literal["model"]
    source: str
    format: str
    size_bytes: int
    revision: str | None
    last_read: int


class AllInstalled(Shape):
    object: Literal["list"]
    data: list[InstalledModel]


class DeletedModel(Shape):
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


class Fit(Shape):
    """Each device has the verdict, the plan with its bytes (`far`: experts in RAM or on disk), the predicted speeds
    (`predicted`: `decode` and `streams` in tokens/s, `first_token_s` by tokens of a prompt; `speech`: of a model that
    transcribes), and other settings."""

    model: str
    architecture: str
    max_position: int
    download_bytes: int
    devices: list[dict[str, Any]]


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


class DownloadStatuses(Shape):
    object: Literal["list"]
    data: list[Download]


class Slot(Shape):
    """A sequence that is running or waiting."""

    id: int
    id_task: str
    model: str
    n_ctx: int
    is_processing: bool
    state: str
    n_prompt_tokens: int
    n_prompt_tokens_cache: int
    next_token: list[dict[str, int]]
    n_blocks: int
    started: float


class Success(Shape):
    success: bool


class RouterDeletedModel(DeletedModel):
    success: bool


class Sleeping(Shape):
    is_sleeping: bool


class WrittenTrace(Shape):
    model: str
    file: str  # on the server's machine
