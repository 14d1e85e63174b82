"""A served model and its facts: plain values, and the client of its engine.

Does not know: how it was loaded (build.py), which models stay loaded (manager.py), HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from localllm.config.settings import Settings, Task
from localllm.engine.params import SamplingParams
from localllm.errors import InvalidParameter, QueueFull, RequestError, UnsupportedOption
from localllm.models.formats.gguf.file_names import whole_stem
from localllm.models.library.names import looks_like_path
from localllm.units import format_count

if TYPE_CHECKING:
    from localllm.engine.adapter import Adapter
    from localllm.engine.admission import Admission
    from localllm.engine.client import EngineClient
    from localllm.engine.loop import EngineLoop
    from localllm.engine.pooling import PoolingLoop
    from localllm.engine.pooling_client import BatchClient, PoolingClient
    from localllm.engine.step import Profiler
    from localllm.models.fit import MemoryPlan, MemoryReport
    from localllm.models.fit.speed import PlanSpeeds
    from localllm.models.library.catalog import ResolvedModel
    from localllm.models.prompt_embeds import PromptEmbedsReader
    from localllm.models.spec.model_spec import ModelSpec
    from localllm.runner.executor import Executor
    from localllm.serving.adapters import Adapters, LoadedAdapter
    from localllm.serving.answers.pictures import Sight
    from localllm.serving.answers.sounds import Hearing, Senses
    from localllm.text.answers.reader import AnswerFormat
    from localllm.text.chat_template import ChatTemplate
    from localllm.text.tokenizer import Tokenizer


DOES: Mapping[Task, tuple[str, str]] = {
    "generate": ("generates text", "/v1/chat/completions"),
    "embed": ("embeds", "/v1/embeddings"),
    "score": ("scores pairs of texts", "/v1/rerank"),
    "transcribe": ("transcribes speech", "/v1/audio/transcriptions"),
}
"""What a model of each task does, and the endpoint for it."""


class WrongTask(RequestError):
    """The request needs a task that the model does not support."""

    code = "wrong_task"


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """Limits of a load: the memory and the context that other loaded models leave to it, and what it need not check."""

    reserved_bytes: int = 0  # RAM reserved for other models but not touched yet, which the system counts as free
    min_context: int = 0  # with a shorter context than this (or the model's own), other models are evicted first
    kv_is_compared: bool = False  # a replica of the model has compared its answers with a KV cache of 4 bits


NO_LIMITS = LoadLimits()


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The facts of a model, as plain values that keep no weights alive."""

    name: str
    path: Path
    spec: ModelSpec
    plan: MemoryPlan
    sampling_defaults: Mapping[str, Any]
    created_s: float

    @property
    def default_params(self) -> SamplingParams:
        return SamplingParams(**self.sampling_defaults)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One loaded model with its engine. Requests go to `client`; `loop` is for callers without an event loop."""

    name: str  # the name that clients use
    path: Path
    spec: ModelSpec
    plan: MemoryPlan
    tokenizer: Tokenizer
    chat_template: ChatTemplate  # false where the model has none
    client: EngineClient | BatchClient
    created_s: float
    loop: EngineLoop | PoolingLoop
    sampling_defaults: Mapping[str, Any]  # from generation_config, as fields of SamplingParams
    max_num_queued_reqs: int
    aliases: frozenset[str] = frozenset()  # other names that clients may use
    admission: Admission | None = None  # None unless the model generates text
    executor: Executor | None = None  # owner of the weights; None unless the model generates text
    memory: MemoryReport | None = None  # predicted and measured memory of the load
    adapters: Adapters | None = None  # None: adapters are not supported
    answers: AnswerFormat | None = None  # format of tool calls and reasoning; None: plain text
    sight: Sight | None = None  # reads pictures; None: the model does not see
    hearing: Hearing | None = None  # reads sound; None: the model does not hear
    tuned: Mapping[str, Any] = field(default_factory=dict)  # settings taken from a profile
    speed: PlanSpeeds | None = None  # predicted; None: unknown
    placement: tuple[str | float, ...] = ()  # of the settings that the weights were loaded with
    load_s: float = 0.0  # seconds that the load took
    chosen: LoadedAdapter | None = None  # the adapter that a request named, in that request's view of the model
    prefix_owner: str = ""  # owner of cached prefixes in the same view; empty: shared by all requests without an owner
    owner: str = ""  # whose request it is, in the same view
    source: str = ""  # of the request in the same view, for display: playground, API
    key_name: str = ""  # of the key that the request was sent with; empty: none
    replica: int | None = None  # the only replica that may answer, in the same view
    hearing_models: tuple[str, ...] = ()  # names of the loaded models that hear, in the same view
    is_background: bool = False  # the request is a line of a batch, before which every other request runs

    @property
    def senses(self) -> Senses:
        """The parts that read pictures and sound."""
        from localllm.serving.answers.sounds import Senses

        return Senses(self.sight, self.hearing)

    @property
    def default_params(self) -> SamplingParams:
        """Defaults of sampling parameters: the checkpoint's recommendation, else neutral values."""
        return SamplingParams(**self.sampling_defaults)

    @property
    def card(self) -> ModelCard:
        return ModelCard(self.name, self.path, self.spec, self.plan, self.sampling_defaults, self.created_s)

    @property
    def generator(self) -> EngineClient:
        """The client for text generation. Raises `WrongTask`."""
        self.require("generate")
        return cast("EngineClient", self.client)

    @property
    def engine(self) -> tuple[EngineLoop, Admission]:
        """The engine's loop, for callers that run it step by step. Raises `WrongTask`."""
        self.require("generate")
        return cast("EngineLoop", self.loop), cast("Admission", self.admission)

    @property
    def profiler(self) -> Profiler:
        """The recorder of traces of the engine's steps, called on their thread. Raises `UnsupportedOption` if
        nothing does, and `WrongTask`."""
        profiler = self.engine[0].runner.profiler
        if self.plan.ranks:
            why = f"{len(self.plan.ranks)} other processes run its steps."
            raise UnsupportedOption(f"{self.name} is split over several GPUs: its steps cannot be recorded.", why)
        if profiler is None:
            what, why = f"Steps of {self.name} cannot be recorded.", "--torch-profiler-dir is not set."
            raise UnsupportedOption(what, why, "Start with --torch-profiler-dir DIR.", param="torch_profiler_dir")
        return profiler

    @property
    def pooler(self) -> PoolingClient:
        """The client for vectors and scores. Raises `WrongTask`."""
        self.require("embed", "score")
        return cast("PoolingClient", self.client)

    @property
    def prompt_embeds_reader(self) -> PromptEmbedsReader:
        """The reader of prompt embeddings."""
        import torch

        from localllm.models.prompt_embeds import PromptEmbedsReader

        return PromptEmbedsReader(self.spec.hidden_size, getattr(torch, self.plan.dtype), self.plan.max_model_len)

    def require(self, *tasks: Task) -> None:
        if self.spec.task not in tasks:
            what, where = DOES[self.spec.task]
            raise WrongTask(f"{self.name} {what}; it supports no other task.", hint=f"POST {where}", param="model")

    def as_asked(
        self,
        name: str | None,
        prefix_owner: str = "",
        *,
        owner: str = "",
        source: str = "",
        key_name: str = "",
        is_background: bool = False,
        replica: int | None = None,
        hearing_models: Sequence[str] = (),
    ) -> ServedModel:
        """Return this model as seen by a request for `name`, which is one of the model's names or an adapter's."""
        chosen = self.adapters.find(name) if self.adapters is not None else None
        return replace(
            self,
            chosen=chosen,
            prefix_owner=prefix_owner,
            owner=owner,
            source=source,
            key_name=key_name,
            is_background=is_background,
            replica=replica,
            hearing_models=tuple(hearing_models),
        )

    @property
    def adapter(self) -> Adapter | None:
        return self.chosen.adapter if self.chosen is not None else None

    @property
    def shown_name(self) -> str:
        """The model name in answers."""
        return self.name if self.chosen is None else self.chosen.name

    def require_adapters(self) -> Adapters:
        """Return the model's adapters. Raises `UnsupportedOption` if the model was loaded without memory for them."""
        if self.adapters is None:
            raise UnsupportedOption(
                f"{self.name} does not support adapters.",
                "It was loaded without memory for adapters.",
                f"localllm up {self.name} --enable-lora",
                param="lora_name",
            )
        return self.adapters

    def require_queue_room(self, num_requests: int) -> None:
        """Raise `QueueFull`, or `InvalidParameter` if even an empty queue would be too small.

        Call this before creating an object for each request, since those objects would take the memory and time that
        the limit saves. The engine checks again.
        """
        most = self.plan.max_num_seqs + self.max_num_queued_reqs
        if num_requests > most:
            raise InvalidParameter(
                f"The request asks for {format_count(num_requests)} outputs.",
                f"At most {format_count(most)} are possible: {format_count(self.plan.max_num_seqs)} run at a time, and "
                f"{format_count(self.max_num_queued_reqs)} may wait.",
                "Send fewer prompts or a smaller n, or start with a larger --max-num-queued-reqs.",
                param="n",
            )
        waiting = self.client.stats().num_waiting
        if waiting and waiting + num_requests > self.max_num_queued_reqs:
            raise QueueFull(
                f"{waiting} requests are waiting already.",
                f"At most {self.max_num_queued_reqs} may wait.",
                "Retry in a moment, or start with a larger --max-num-queued-reqs.",
            )

    def close(self) -> None:
        """Stop the engine (its requests get an error), then free the memory. Idempotent."""
        self.close_engine()
        if self.executor is not None:
            self.executor.close()

    def close_engine(self) -> None:
        """Stop the engine (its requests get an error), and keep the weights. Idempotent."""
        self.loop.stop()
        self.loop.runner.close()


def names_of(settings: Settings, found: ResolvedModel) -> tuple[str, frozenset[str]]:
    """Return the model's displayed name, and the other names that clients may use."""
    names = settings.server.served_model_name
    aliases = frozenset(names) if names else frozenset({found.name, settings.engine.model})
    return (names[0] if names else short_name(found.name)), aliases


def expected_name(asked: str) -> str:
    """Return the displayed name that a model will have once it has loaded. A name is never a path: every client of the
    server can see it.
    """
    if not looks_like_path(asked):
        return short_name(asked)
    path = Path(asked).expanduser().absolute()
    if path.suffix == ".gguf":
        return whole_stem(path.name)
    is_snapshot = path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--")
    return path.parent.parent.name.rpartition("--")[2] if is_snapshot else short_name(str(path))


def short_name(name: str) -> str:
    """Return the last part of a repository's or a folder's name."""
    return Path(name).name or name
