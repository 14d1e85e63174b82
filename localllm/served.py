"""A model that is served, and what is said about one: plain values and the way in.

Does not know: how it was loaded (build.py), which ones are kept (manager/), HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from localllm.config import Task
from localllm.engine.params import SamplingParams
from localllm.errors import InvalidParameter, QueueFull, RequestError, UnsupportedOption
from localllm.units import format_count

if TYPE_CHECKING:
    from localllm.adapters import Adapters, LoadedAdapter
    from localllm.engine.adapter import Adapter
    from localllm.engine.admission import Admission
    from localllm.engine.client import EngineClient
    from localllm.engine.loop import EngineLoop
    from localllm.engine.pooling import PoolingLoop
    from localllm.engine.pooling_client import PoolingClient
    from localllm.models.fit import MemoryPlan, MemoryReport
    from localllm.models.prompt_embeds import PromptEmbedsReader
    from localllm.models.spec import ModelSpec
    from localllm.text.answers.reader import AnswerFormat
    from localllm.text.chat_template import ChatTemplate
    from localllm.text.tokenizer import Tokenizer


DOES: Mapping[Task, tuple[str, str]] = {
    "generate": ("generates text", "/v1/chat/completions"),
    "embed": ("embeds", "/v1/embeddings"),
    "score": ("scores pairs of texts", "/v1/rerank"),
}
"""What a model does, and where to ask for it."""


class WrongTask(RequestError):
    """The model can do one thing and was asked for another."""

    code = "wrong_task"


@dataclass(frozen=True, slots=True)
class Phase:
    """Where the load is. A phase is reported when it begins, as it goes on, and once with `done`."""

    name: str  # find, fit, torch, profile, tokenizer, weights, memory, engine, adapters
    detail: str = ""  # one line: what was found or decided
    seconds: float = 0.0  # since the phase began
    fraction: float | None = None  # 0 to 1 where it can be told
    done: bool = False


OnPhase = Callable[[Phase], None]


@dataclass(frozen=True, slots=True)
class Beside:
    """What a load has to leave to the models that are there already."""

    promised_bytes: int = 0  # RAM that others were promised and have not touched yet: the system counts it as free
    min_context: int = 0  # a shorter context than this (or the model's own) is a reason to make room first


ALONE = Beside()


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What is known of a model without holding any of it: plain values."""

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
    """One loaded model with its engine. `client` is the way in; `loop` is for callers without an event loop."""

    name: str  # what clients call it
    path: Path
    spec: ModelSpec
    plan: MemoryPlan
    tokenizer: Tokenizer
    chat_template: ChatTemplate  # false where the model has none
    client: EngineClient | PoolingClient
    created_s: float
    loop: EngineLoop | PoolingLoop
    sampling_defaults: Mapping[str, Any]  # of generation_config, in SamplingParams' names
    max_num_queued_reqs: int
    aliases: frozenset[str] = frozenset()  # other names that clients may use
    admission: Admission | None = None  # of a model that generates
    memory: MemoryReport | None = None  # what was predicted and seen at the load
    adapters: Adapters | None = None  # None: it takes none
    answers: AnswerFormat | None = None  # how it writes tool calls and reasoning; None: it writes text
    tuned: Mapping[str, Any] = field(default_factory=dict)  # settings that came from a profile
    chosen: LoadedAdapter | None = None  # the adapter that a request named, in that request's view of the model
    prefix_owner: str = ""  # with whom it shares cached prefixes, in the same view; empty: with all who have no owner

    @property
    def default_params(self) -> SamplingParams:
        """What is used for whatever a caller leaves open: the checkpoint's recommendation, else neutral values."""
        return SamplingParams(**self.sampling_defaults)

    @property
    def card(self) -> ModelCard:
        return ModelCard(self.name, self.path, self.spec, self.plan, self.sampling_defaults, self.created_s)

    @property
    def generator(self) -> EngineClient:
        """The way in for whoever wants text. Raises `WrongTask`."""
        self.require("generate")
        return cast("EngineClient", self.client)

    @property
    def engine(self) -> tuple[EngineLoop, Admission]:
        """The engine itself, for whoever drives it step by step. Raises `WrongTask`."""
        self.require("generate")
        return cast("EngineLoop", self.loop), cast("Admission", self.admission)

    @property
    def pooler(self) -> PoolingClient:
        """The way in for whoever wants vectors or scores. Raises `WrongTask`."""
        self.require("embed", "score")
        return cast("PoolingClient", self.client)

    @property
    def prompt_embeds_reader(self) -> PromptEmbedsReader:
        """For embeddings in place of a prompt's tokens."""
        import torch

        from localllm.models.prompt_embeds import PromptEmbedsReader

        return PromptEmbedsReader(self.spec.hidden_size, getattr(torch, self.plan.dtype), self.plan.max_model_len)

    def require(self, *tasks: Task) -> None:
        if self.spec.task not in tasks:
            what, where = DOES[self.spec.task]
            raise WrongTask(f"{self.name} {what}; it supports no other task.", hint=f"POST {where}", param="model")

    def as_asked(self, name: str | None, prefix_owner: str = "") -> ServedModel:
        """As a request sees it that gave this name: one of the model's own, or an adapter's."""
        if self.adapters is None and not prefix_owner:
            return self
        chosen = self.adapters.find(name) if self.adapters is not None else None
        return replace(self, chosen=chosen, prefix_owner=prefix_owner)

    @property
    def adapter(self) -> Adapter | None:
        return self.chosen.adapter if self.chosen is not None else None

    @property
    def shown_name(self) -> str:
        """What answers are signed with."""
        return self.name if self.chosen is None else self.chosen.name

    def require_adapters(self) -> Adapters:
        """Where adapters go. Raises `UnsupportedOption` where the model was loaded without room for them."""
        if self.adapters is None:
            raise UnsupportedOption(
                f"{self.name} does not support adapters.",
                "It was loaded without memory for adapters.",
                f"localllm up {self.name} --enable-lora",
                param="lora_name",
            )
        return self.adapters

    def answers_to(self, name: str) -> bool:
        return name == self.name or name in self.aliases

    def require_queue_room(self, num_requests: int) -> None:
        """Raise `QueueFull`, or `InvalidParameter` where an empty queue would not have that room either.

        Ask before anything is made for each request: an object for each takes the memory and the time that the bound
        is to save. The engine checks again.
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
        """Stop the engine (its requests get an error), then give the memory back. Idempotent."""
        self.loop.stop()
        self.loop.runner.close()
