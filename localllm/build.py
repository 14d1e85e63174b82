"""From a model's name to an engine that answers: the road for the server and for the offline API.

`build_engine` finds the checkpoint, reads what it says, fits it into this machine, loads it, and puts an engine around
it. Each phase is reported through a callback. When a phase fails, what the earlier ones took is given back before the
error goes up.
Does not know: which models are kept and for how long (manager.py), HTTP, terminals.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.config import EngineConfig, Settings
from localllm.engine.params import SamplingParams
from localllm.errors import QueueFull
from localllm.units import format_bytes

if TYPE_CHECKING:
    from localllm.engine.admission import Admission
    from localllm.engine.client import EngineClient
    from localllm.engine.loop import EngineLoop
    from localllm.engine.step import Runner
    from localllm.hardware import Hardware
    from localllm.models.catalog import ResolvedModel
    from localllm.models.fit import MemoryPlan
    from localllm.models.spec import ModelSpec
    from localllm.text.chat_template import ChatTemplate
    from localllm.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Phase:
    """Where the load is. A phase is reported when it begins, as it goes on, and once with `done`."""

    name: str  # find, fit, torch, tokenizer, weights, memory, engine
    detail: str = ""  # one line: what was found or decided
    seconds: float = 0.0  # since the phase began
    fraction: float | None = None  # 0 to 1 where it can be told
    done: bool = False


OnPhase = Callable[[Phase], None]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One loaded model with its engine. `client` is the way in; `loop` is for callers without an event loop."""

    name: str  # what clients call it
    path: Path
    spec: ModelSpec
    plan: MemoryPlan
    tokenizer: Tokenizer
    chat_template: ChatTemplate  # false where the model has none
    client: EngineClient
    created_s: float
    loop: EngineLoop
    admission: Admission
    sampling_defaults: Mapping[str, Any]  # of generation_config, in SamplingParams' names
    max_num_queued_reqs: int
    aliases: frozenset[str] = frozenset()  # other names that clients may use

    @property
    def default_params(self) -> SamplingParams:
        """What is used for whatever a caller leaves open: the checkpoint's recommendation, else neutral values."""
        return SamplingParams(**self.sampling_defaults)

    def answers_to(self, name: str) -> bool:
        return name == self.name or name in self.aliases

    def require_queue_room(self, num_requests: int) -> None:
        """Raises `QueueFull`. The engine checks again; asked early, the refusal can still be a status code."""
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


# The road -----------------------------------------------------------------------------------------------------------


def build_engine(settings: Settings, on_phase: OnPhase = lambda phase: None) -> ServedModel:
    """Find, read, fit and load the model that `settings` ask for; the engine is ready and not started.

    Blocking; seconds to minutes. Raises ModelNotFound, UnsupportedModel, CorruptModel, DoesNotFit, ConfigError.
    """
    config = settings.engine
    with ExitStack() as undo:
        found, spec = _find(config, on_phase)
        hardware = _start_torch(on_phase)
        plan = _fit(config, found.path, spec, hardware, on_phase)
        tokenizer, template = _read_text(found.path, on_phase)
        runner, plan = _load(found.path, spec, config, plan, hardware, on_phase)
        undo.callback(runner.close)
        with _phase("engine", on_phase) as tell:
            model = _assemble(settings, found, spec, plan, tokenizer, template, runner)
            tell(f"{plan.max_num_seqs} requests at once, {plan.max_model_len} tokens each at most")
        undo.pop_all()
    _seal_kernel_settings()
    return model


def _seal_kernel_settings() -> None:
    """From here on somebody may be waiting: no launch setting is measured any more."""
    from localllm.kernels.tuned import table

    table().seal()


class _Teller:
    """Reports one phase: call it with the detail, or with a fraction."""

    def __init__(self, name: str, on_phase: OnPhase) -> None:
        self.name, self.on_phase = name, on_phase
        self.started_s, self.detail = time.perf_counter(), ""

    def __call__(self, detail: str = "", fraction: float | None = None, *, done: bool = False) -> None:
        self.detail = detail or self.detail
        self.on_phase(Phase(self.name, self.detail, time.perf_counter() - self.started_s, fraction, done))


@contextmanager
def _phase(name: str, on_phase: OnPhase) -> Iterator[_Teller]:
    tell = _Teller(name, on_phase)
    tell()
    yield tell
    tell(fraction=1.0, done=True)


def _fetch(config: EngineConfig, on_phase: OnPhase) -> None:
    """Download what only the hub has: it was asked for by name."""
    from localllm.models.catalog import is_for_the_hub

    if is_for_the_hub(config.model, config.revision):
        from localllm.models.hub.fetch import fetch_model, progress_line

        tell = _Teller("download", on_phase)
        tell()
        fetch_model(
            config.model, config.revision, offline=config.offline, code=config.trust_remote_code,
            on_progress=lambda progress: tell(progress_line(progress), progress.fraction),
        )  # fmt: skip
        tell(done=True, fraction=1.0)


def _find(config: EngineConfig, on_phase: OnPhase) -> tuple[ResolvedModel, ModelSpec]:
    from localllm.models.catalog import resolve_model
    from localllm.models.spec import read_spec

    _fetch(config, on_phase)
    with _phase("find", on_phase) as tell:
        found = resolve_model(config.model, config.revision)
        spec = read_spec(found.path)
        tell(f"{found.name} · {spec.architecture}")
    return found, spec


def _start_torch(on_phase: OnPhase) -> Hardware:
    """Importing torch takes seconds on a cold disk, which belong to no other phase; it also knows the GPUs."""
    from localllm.hardware import read_hardware

    with _phase("torch", on_phase) as tell:
        import torch

        hardware = read_hardware()
        if hardware.gpus:
            from localllm.kernels.tuned import ensure_triton_cache

            ensure_triton_cache()
        set_compute_threads(hardware)
        tell(f"torch {torch.__version__} · {torch.get_num_threads()} compute threads")
    return hardware


def _fit(config: EngineConfig, path: Path, spec: ModelSpec, hardware: Hardware, on_phase: OnPhase) -> MemoryPlan:
    import torch

    from localllm.models.fit import plan_memory
    from localllm.models.loader import resident_bytes
    from localllm.models.spec import weights_bytes

    def resident(device: str, dtype: str, max_model_len: int, quantization: str | None) -> int:
        assert quantization is None, "refused by the plan"
        where = torch.device(device)
        return resident_bytes(path, spec, where, getattr(torch, dtype), max_model_len=max_model_len)

    with _phase("fit", on_phase) as tell:
        plan = plan_memory(config, spec, weights_bytes(path), hardware, resident_bytes=resident)
        for note in plan.notes:
            log.info("plan note=%r", note)
        weights, kv = format_bytes(plan.weights_bytes), format_bytes(plan.kv_bytes)
        tell(f"{plan.device} · {plan.dtype} · weights {weights} · KV {kv}")
    return plan


def _read_text(path: Path, on_phase: OnPhase) -> tuple[Tokenizer, ChatTemplate]:
    from localllm.text.chat_template import ChatTemplate
    from localllm.text.tokenizer import load_tokenizer

    with _phase("tokenizer", on_phase) as tell:
        tokenizer = load_tokenizer(path)
        template = ChatTemplate.of(tokenizer)
        tell(f"{tokenizer.vocab_size} tokens" + ("" if template else " · no chat template"))
    return tokenizer, template


def _load(
    path: Path, spec: ModelSpec, config: EngineConfig, plan: MemoryPlan, hardware: Hardware, on_phase: OnPhase
) -> tuple[Runner, MemoryPlan]:
    import torch

    from localllm.models.loader import load_model
    from localllm.runner.opening import open_runner

    device, dtype = torch.device(plan.device), getattr(torch, plan.dtype)
    with _phase("weights", on_phase) as tell:

        def progress(loaded: int, total: int) -> None:
            tell(f"{format_bytes(loaded)} of {format_bytes(total)}", loaded / total if total else None)

        model = load_model(path, spec, device, dtype, progress, max_model_len=plan.max_model_len)
    with _phase("memory", on_phase) as tell:
        runner, plan = open_runner(model, spec, config, plan, hardware, tell)
        tell(f"{plan.num_blocks - 1} blocks of {plan.block_size} tokens")
    return runner, plan


def _assemble(
    settings: Settings,
    found: ResolvedModel,
    spec: ModelSpec,
    plan: MemoryPlan,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    runner: Runner,
) -> ServedModel:
    """An engine around a runner."""
    from localllm.engine.admission import Admission, Limits
    from localllm.engine.client import EngineClient

    config = settings.engine
    loop = _engine_loop(config, plan, fingerprint(found.path, plan), runner)
    admission = Admission(Limits(plan.max_model_len, spec.vocab_size, spec.eos_token_ids), tokenizer, config.seed)
    name = settings.server.served_model_name or short_name(found.name)
    aliases = frozenset() if settings.server.served_model_name else frozenset({found.name, config.model})
    return ServedModel(
        name=name,
        path=found.path,
        spec=spec,
        plan=plan,
        tokenizer=tokenizer,
        chat_template=template,
        client=EngineClient(loop, admission, tokenizer),
        created_s=time.time(),
        loop=loop,
        admission=admission,
        sampling_defaults=sampling_defaults(spec.generation_defaults) if config.generation_config == "auto" else {},
        max_num_queued_reqs=config.max_num_queued_reqs,
        aliases=aliases,
    )


def _engine_loop(config: EngineConfig, plan: MemoryPlan, fingerprint: bytes, runner: Runner) -> EngineLoop:
    from localllm.engine.block_hash import BlockHasher
    from localllm.engine.block_pool import BlockPool
    from localllm.engine.loop import EngineLoop
    from localllm.engine.scheduler import Scheduler, SchedulerConfig

    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            max_model_len=plan.max_model_len,
            block_size=plan.block_size,
            long_prefill_token_threshold=plan.long_prefill_token_threshold,
            policy=config.scheduling_policy,
            max_num_queued_reqs=config.max_num_queued_reqs,
            enable_prefix_caching=config.enable_prefix_caching,
        ),
        BlockPool(plan.num_blocks),
        BlockHasher(fingerprint, plan.block_size),
    )
    return EngineLoop(scheduler, runner, depth=plan.async_depth)


# Small decisions ----------------------------------------------------------------------------------------------------


def set_compute_threads(hardware: Hardware) -> None:
    """One compute thread per physical core: two on one core share its vector units and only get in each other's way.

    A user's OMP_NUM_THREADS stays in force; torch has read it.
    """
    import torch

    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(hardware.cpu_cores)
    log.info("compute threads=%d physical_cores=%d", torch.get_num_threads(), hardware.cpu_cores)


def fingerprint(path: Path, plan: MemoryPlan) -> bytes:
    """What the values in the KV cache depend on beside the tokens: which files, in which dtype and block size."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(path.glob("*.json")) + sorted(path.glob("*.safetensors")):
        status = file.stat()
        digest.update(f"{file.name}:{status.st_size}:{status.st_mtime_ns};".encode())
    digest.update(f"{path.resolve()}:{plan.dtype}:{plan.kv_dtype}:{plan.block_size}".encode())
    return digest.digest()


def short_name(name: str) -> str:
    """The last part of a repository's or a folder's name."""
    return Path(name).name or name


GENERATION_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""generation_config.json's names, and ours."""


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """What the checkpoint recommends, in `SamplingParams`' names; `do_sample: false` recommends the likeliest token."""
    recommended = {
        ours: generation_config[theirs]
        for theirs, ours in GENERATION_DEFAULTS.items()
        if generation_config.get(theirs) is not None
    }
    if generation_config.get("do_sample") is False:
        recommended["temperature"] = 0.0
    return recommended
