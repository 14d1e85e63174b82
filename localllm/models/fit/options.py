"""Alternatives when a model does not fit: other flags for the same model, each with the context that it would get.

They are ordered by what a user loses. Fewer requests and smaller steps only cost speed under load; an 8-bit cache and
a shorter context cost little; a cache of 4 bits and quantised weights cost more, and another device most. Every
alternative was planned by the function that also plans a start. One that gives no longer context than the user's
settings is left out.
Does not know: torch, files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from localllm.config.settings import EngineConfig
from localllm.errors import DoesNotFit, LocalLLMError
from localllm.machine.hardware import Hardware
from localllm.models.fit.devices import USEFUL_CONTEXT
from localllm.models.fit.far import FarPlan, fewest_layers, why_not_dense
from localllm.models.fit.memory_plan import MemoryPlan
from localllm.models.fit.plan import make_plan
from localllm.models.fit.rank_budget import Measured, RankPlan, ResidentBytes
from localllm.models.fit.speed import predict, speed_in_words
from localllm.models.spec.model_spec import ModelSpec
from localllm.units import format_count

SEQS = (32, 16, 8, 4, 2, 1)
TOKENS = (1024, 512, 256, 128)
UTILIZATIONS = (0.95, 0.98)
QUANTIZATIONS = ("int8", "fp8", "int4")
FOUR_BITS = {"k8v4": "keys in 8 bits, values in 4", "int4": "keys and values in 4 bits"}
BALANCED = 4  # times the useful context, of the placement in the middle
PARTS = 8
SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
"""Both at once, for when neither alone is enough."""

Plan = Callable[[EngineConfig], MemoryPlan]


@dataclass(frozen=True, slots=True)
class FitOption:
    """Settings under which the model fits."""

    changes: Mapping[str, Any]  # fields of EngineConfig; None: leave the given flag out
    plan: MemoryPlan
    cost: str  # what the user loses

    @property
    def flags(self) -> str:
        """The flags to type instead of the given ones; empty if a flag only has to be left out."""
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in self.changes.items() if value)

    @property
    def words(self) -> str:
        dropped = [name for name, value in self.changes.items() if value is None]
        without = "".join(f"without --{name.replace('_', '-')} " for name in dropped)
        return f"{without}{self.flags}".strip()

    @property
    def context(self) -> int:
        return self.plan.max_model_len

    @property
    def concurrency(self) -> float:
        """Requests of the full context that the KV cache holds at the same time."""
        return self.plan.num_kv_tokens / self.plan.max_model_len


def plan_memory(
    config: EngineConfig,
    spec: ModelSpec,
    weights_bytes: int,
    hardware: Hardware,
    *,
    resident_bytes: ResidentBytes | None = None,
    measured: Measured | Sequence[Measured] | None = None,
    ranks: Sequence[RankPlan] = (),
    far: FarPlan | None = None,
) -> MemoryPlan:
    """Call `make_plan`; add the alternatives to its `DoesNotFit`, unless the model is already loaded."""

    def plan(config: EngineConfig) -> MemoryPlan:
        return make_plan(config, spec, weights_bytes, hardware, resident_bytes=resident_bytes)

    try:
        return make_plan(
            config, spec, weights_bytes, hardware, resident_bytes=resident_bytes, measured=measured, ranks=ranks,
            far=far,
        )  # fmt: skip
    except DoesNotFit as error:
        if measured is None and not ranks and far is None:
            error.options = fit_options(config, spec, hardware, plan)
        raise


def fit_options(
    config: EngineConfig, spec: ModelSpec, hardware: Hardware, plan: Plan, best: MemoryPlan | None = None
) -> tuple[FitOption, ...]:
    """Return the alternatives to `config`. best: its own plan, None if it does not fit."""
    return _OptionSearch(config, spec, hardware, plan, best).options()


def placements(
    config: EngineConfig, spec: ModelSpec, hardware: Hardware, plan: Plan, best: MemoryPlan
) -> tuple[FitOption, ...]:
    """Return three numbers of layers whose experts are in RAM, from the longest context to the fastest answers: more
    layers leave more of the GPU to the context. Fewer if they coincide; none if the plan has no experts in RAM, or if
    the settings name a place or a context.

    best: the plan of `config`, which is the fastest.
    """
    far = best.far
    named = config.n_cpu_moe != "auto" or config.moves_experts or config.max_model_len is not None
    if far is None or not far.layers or far.disk is not None or named:
        return ()
    found: dict[int, MemoryPlan] = {len(far.layers): best}

    def with_layers(count: int) -> MemoryPlan | None:
        if count not in found:
            with suppress(LocalLLMError):  # RAM does not hold them
                found[count] = plan(replace(config, device=best.device, n_cpu_moe=str(count)))
        return found.get(count)

    def fewest(context: int) -> int:
        """Return the fewest layers that leave this context, or as much as more layers leave."""
        start = len(far.layers) - 1

        def leaves(more: int) -> bool:
            made = with_layers(start + more)
            return made is not None and made.max_model_len >= context

        found = fewest_layers(most - start, leaves)
        return most if found is None else start + found

    most = far.num_layers
    while most > len(far.layers) and with_layers(most) is None:
        most -= 1
    longest = max(made.max_model_len for made in found.values())
    middle = min(longest, max(BALANCED * USEFUL_CONTEXT, best.max_model_len))
    rows = {len(far.layers): "fastest", fewest(middle): "balanced", fewest(longest): "longest context"}
    return tuple(
        FitOption({"n_cpu_moe": str(count)}, found[count], _with_speed(name, found[count], hardware))
        for count, name in sorted(rows.items(), reverse=True)
    )


def _with_speed(cost: str, plan: MemoryPlan, hardware: Hardware) -> str:
    """Return what an option costs, with the predicted speed where it is known."""
    speed = predict(plan, hardware)
    return cost if speed is None else f"{cost}: {speed_in_words(speed.decode)}"


@dataclass(slots=True)
class _OptionSearch:
    config: EngineConfig
    spec: ModelSpec
    hardware: Hardware
    plan: Plan
    best: MemoryPlan | None
    found: list[FitOption] = field(default_factory=list)

    def options(self) -> tuple[FitOption, ...]:
        for changes, cost in self._alternatives():
            self._try(changes, cost)
        return tuple(self.found)

    @property
    def goal(self) -> int:
        """The context that the user wants."""
        return self.config.max_model_len or self.spec.max_position

    def _alternatives(self) -> Iterator[tuple[Iterable[dict[str, Any]], str]]:
        """Yield groups of alternatives with their cost, the mildest first; at most one of each group is offered."""
        config, on_gpu = self.config, bool(self.hardware.gpus) and self.config.device != "cpu"
        if config.max_model_len is not None:
            yield [{}], "a shorter context"
        if on_gpu:
            more = [
                {"gpu_memory_utilization": share} for share in UTILIZATIONS if share > config.gpu_memory_utilization
            ]
            yield more, "less room for other programs on the GPU"
        if config.kv_cache_memory_bytes is not None:
            yield [{"kv_cache_memory_bytes": None}], "more memory for the KV cache"
        seqs = [{"max_num_seqs": n} for n in SEQS if n < config.max_num_seqs]
        yield seqs, "fewer concurrent requests"
        step = config.max_num_batched_tokens or (2048 if on_gpu else 1024)
        yield [{"max_num_batched_tokens": n} for n in TOKENS if n < step], "smaller steps: long prompts take longer"
        small = {name: value for name, value in SMALL.items() if value < (getattr(config, name) or step)}
        eight_bits = {"kv_cache_dtype": "fp8"} if config.kv_cache_dtype == "auto" else {}
        if eight_bits:
            yield [eight_bits], "keys and values in 8 bits"
            yield [{"kv_cache_dtype": "int8"}], "keys and values in 8 bits, a scale for each head and token"
        for name, cost in FOUR_BITS.items():
            if config.kv_cache_dtype not in (name, "int4", "int4_per_token_head"):
                yield [{"kv_cache_dtype": name}], f"{cost}; refused at load if the model's answers change"
        if small and eight_bits:
            yield [{**small, **eight_bits}], "fewer requests, smaller steps, keys and values in 8 bits"
        may_move = self.spec.mixture is not None or not why_not_dense(self.spec)
        if on_gpu and may_move and config.n_cpu_moe != "auto":
            yield [{"n_cpu_moe": "auto"}], "more layers in RAM"
        if on_gpu and config.cpu_embeddings == "off":
            yield [{"cpu_embeddings": "auto"}], "lookup tables in RAM"
        if on_gpu and may_move and config.weights_on != "disk":
            yield self._more_layers(), "more layers in RAM"
        if config.dtype in ("auto", "float32"):
            yield [{"dtype": "bfloat16"}], "weights and activations in 16 bits: fewer digits"
        if config.quantization is None:
            for name in QUANTIZATIONS:
                yield [{"quantization": name}, {"quantization": name, **small, **eight_bits}], f"weights in {name}"
        devices = [*(f"cuda:{gpu.index}" for gpu in self.hardware.gpus if gpu.is_supported), "cpu"]
        here = self.config.device if self.config.device != "auto" else (self.best.device if self.best else "")
        for device in devices if self.hardware.gpus else ():
            if device == here:
                continue
            yield [{"device": device}], "another device" if device != "cpu" else "slow: the model runs on the CPU"

    def _more_layers(self) -> Iterator[dict[str, Any]]:
        """Yield numbers of layers whose experts are in RAM, about an eighth more each time."""
        far = self.best.far if self.best is not None else None
        count = self.spec.num_layers if far is None or not far.layers else far.num_layers
        moved = 0 if far is None else len(far.layers)
        tried = sorted({moved + -(-(count - moved) * part // PARTS) for part in range(1, PARTS + 1)} - {moved})
        yield from ({"n_cpu_moe": str(each), "cpu_moe": False, "cpu_offload_gb": 0.0} for each in tried)

    def _try(self, alternatives: Iterable[dict[str, Any]], cost: str) -> None:
        """Keep the first alternative that reaches the wanted context, else the one with the longest context."""
        longest: FitOption | None = None
        for changes in alternatives:
            option = self._option(changes, cost)
            if option is None:
                continue
            if option.context >= self.goal:
                longest = option
                break
            if longest is None or option.context > longest.context:
                longest = option
        if longest is not None and self._is_worth_it(longest):
            if longest.plan.far is not None and longest.plan.far != (self.best and self.best.far):
                longest = replace(longest, cost=_with_speed(longest.cost, longest.plan, self.hardware))
            self.found.append(longest)

    def _option(self, changes: dict[str, Any], cost: str) -> FitOption | None:
        """Return the option with the requested context, else with the longest that fits; None if neither fits."""
        try:
            return FitOption(changes, self.plan(replace(self.config, **changes)), cost)
        except LocalLLMError:  # does not fit either, or is not possible for this model
            if self.config.max_model_len is None:
                return None
        try:
            plan = self.plan(replace(self.config, **{**changes, "max_model_len": None}))
        except LocalLLMError:
            return None
        return FitOption({**changes, "max_model_len": plan.max_model_len}, plan, cost)

    def _is_worth_it(self, option: FitOption) -> bool:
        """Return whether its context is longer than without it, and longer than with some of its flags alone."""
        if self.best is not None and option.context <= self.best.max_model_len:
            return False
        return not any(other.context >= option.context and _asked(other) <= _asked(option) for other in self.found)


def _asked(option: FitOption) -> set[tuple[str, Any]]:
    return {(name, value) for name, value in option.changes.items() if name != "max_model_len"}


def option_rows(options: Iterable[FitOption]) -> list[tuple[str, str, str, str]]:
    """Return a table with a header row; [] if there are no options."""
    rows = [
        (option.words, f"{format_count(option.context)} tokens", f"{option.concurrency:.1f}", option.cost)
        for option in options
    ]
    return [("FLAGS", "CONTEXT", "AT A TIME", "COST"), *rows] if rows else []
