"""The search space: the settings that may matter for a goal on this machine, each with the values worth a trial.

Settings that the user set are left alone. The planner decides on memory: `max_model_len` and the size of the KV cache
follow from the other settings, unless the goal is about them. So there are few axes, and each affects the measurement.
Does not know: how the space is searched (search.py), torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from localllm.config.settings import PLACEMENT, EngineConfig, Settings
from localllm.errors import UnsupportedOption
from localllm.tuning.goals import Goal
from localllm.tuning.search import Axis, Space

if TYPE_CHECKING:
    from localllm.models.fit import MemoryPlan

TOKENS_CPU = (128, 256, 512, 1024, 2048)
TOKENS_GPU = (512, 1024, 2048, 4096, 8192)
SEQS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ENOUGH_SEQS = 64  # the most on a CPU, and on a GPU for goals with fewer streams
UTILIZATIONS = (0.90, 0.95, 0.98)
LEAST_CONTEXT = 2048  # the shortest context that long-context tries
EIGHT_BITS = {"cpu": "int8", "cuda": "fp8"}
LARGER_CACHES = (0.5, 0.9)  # shares of the memory that a CPU plan leaves unused, to add to the KV cache
LARGER_TIER = 2.0  # times the default RAM for KV blocks
TUNABLE = (
    "max_num_seqs", "max_num_batched_tokens", "kv_cache_dtype", "gpu_memory_utilization", "kv_cache_memory_bytes",
    "enforce_eager", "max_model_len", "speculative", "kv_offloading_size",
)  # fmt: skip
"""Settings that a trial may change: all that do not affect the loaded weights."""
LAYERS_ASIDE = (-2, -1, 1, 2)  # layers with experts in RAM, more than the plan's
CACHES = (0.5, 1.25)  # RAM for experts on disk, times the plan's
AskedPlaces = Literal["auto", "on", "off"]


def space_of(goal: Goal, plan: MemoryPlan, config: EngineConfig, fixed: Collection[str], max_position: int) -> Space:
    """Return the space. plan: the planner's plan for `config`. fixed: fields that the user has set."""
    kind = "cpu" if plan.device == "cpu" else "cuda"
    axes = [_seqs(goal, kind), Axis("max_num_batched_tokens", TOKENS_CPU if kind == "cpu" else TOKENS_GPU)]
    axes.append(Axis("kv_cache_dtype", ("auto", EIGHT_BITS[kind], "k8v4")))
    if kind == "cuda":
        axes += [Axis("gpu_memory_utilization", UTILIZATIONS), Axis("enforce_eager", (False, True))]
    elif _is_tight(goal, plan, max_position):
        more = tuple(plan.kv_bytes + int(share * plan.unused_bytes) for share in LARGER_CACHES)
        axes.append(Axis("kv_cache_memory_bytes", (None, *more)))
    if goal.fills_context:
        axes.append(Axis("max_model_len", _lengths(plan.max_model_len)))
    if goal.repeats and config.speculative_config is None:
        axes.append(Axis("speculative", ("auto", "off")))
    if goal.shared_len and kind == "cuda" and plan.kv_ram_bytes:  # a CPU's cache is in RAM already
        axes.append(Axis("kv_offloading_size", (None, 0.0, LARGER_TIER * plan.kv_ram_bytes / 2**30)))
    open_axes = [axis for axis in axes if axis.name not in fixed]
    return Space(tuple(axis for axis in open_axes if axis.values != (getattr(config, axis.name),)))


@dataclass(frozen=True, slots=True)
class Placements:
    """Places of experts in a run, as settings. Each of `others` needs another load of the model."""

    loaded: Mapping[str, Any]  # of the weights in memory; empty: they are where the settings of the run say
    others: tuple[Mapping[str, Any], ...] = ()


NO_PLACEMENTS = Placements({})


def placements_of(
    plan: MemoryPlan, config: EngineConfig, fixed: Collection[str], running: Mapping[str, Any], asked: AskedPlaces, *,
    is_mixture: bool,
) -> Placements:  # fmt: skip
    """Return the places of experts to try: on both sides of the plan's number of layers in RAM, and all of them; for
    experts on disk, RAM, and other sizes of their cache.

    plan: of the loaded weights. running: settings of a profile in use. asked: auto is what `fixed` leaves open; on also
    tries other values of the settings in `fixed`, and the disk for a mixture in RAM. Raises `UnsupportedOption` if on
    is asked for and no experts can move.
    """
    loaded = {name: running.get(name, getattr(config, name)) for name in PLACEMENT}
    far, found = plan.far, list[dict[str, Any]]()
    can_move = asked != "off" and not (plan.ranks or config.takes_adapters or config.cpu_moe or config.cpu_offload_gb)
    if can_move and far is not None and far.disk is not None:
        gib, most = far.disk.cache_bytes / 2**30, far.disk.file_bytes / 2**30
        found = [{"weights_on": "ram", "expert_cache_gib": 0.0}]
        sizes = [round(min(most, share * gib), 3) for share in CACHES if share < 1 or gib < most]
        found += [{"weights_on": "disk", "expert_cache_gib": size} for size in sizes if size > 0]
    elif can_move and far is not None and far.layers:
        count, every = len(far.layers), far.num_layers
        numbers = {count + more for more in LAYERS_ASIDE if 0 <= count + more < every}
        found = [{"n_cpu_moe": f"{number}"} for number in sorted(numbers)]
        found += [{"n_cpu_moe": "all"}] if count < every else []
    elif can_move and asked == "on" and plan.device == "cpu" and is_mixture:
        found = [{"weights_on": "disk"}]
    if asked == "auto":
        found = [each for each in found if not any(name in fixed and loaded[name] != each[name] for name in each)]
    if asked == "on" and not found:
        why = f"The model is on {plan.place}, and none of its experts can be elsewhere."
        if not can_move:
            why = "Several ranks, adapters, --cpu-moe and --cpu-offload-gb leave experts where they are."
        raise UnsupportedOption("--placements on is not supported here.", why, "Leave it out.", param="placements")
    names = {name for each in found for name in each} | {name for name in PLACEMENT if name in running}
    own = {name: loaded[name] for name in PLACEMENT if name in names}
    return Placements(own, tuple({**own, **each} for each in found))


def start_of(space: Space, plan: MemoryPlan, config: EngineConfig) -> dict[str, Any]:
    """Return the planner's guess as values of the axes. If no context is set, it is the longest that fits."""
    guess = {name: getattr(config, name) for name in TUNABLE}
    guess["max_num_batched_tokens"] = plan.max_num_batched_tokens
    names = {axis.name for axis in space.axes}
    return {name: value for name, value in guess.items() if name in names}


def with_values(space: Space, values: Mapping[str, Any]) -> Space:
    """Return the space with these values on its axes as well, so that a search can start from them."""
    return Space(tuple(_with_value(axis, values.get(axis.name)) for axis in space.axes))


def _with_value(axis: Axis, value: Any) -> Axis:
    if value is None or value in axis.values:
        return axis
    unset = [each for each in axis.values if each is None]
    return Axis(axis.name, (*unset, *sorted([value, *(each for each in axis.values if each is not None)])))


def fixed_by(settings: Settings) -> frozenset[str]:
    """Return the tunable settings that the user has set."""
    table = settings.table(settings.engine.model)
    said = set(table.engine) if table is not None else set()
    names = (*TUNABLE, *PLACEMENT)
    return frozenset(name for name in names if name in said or settings.source(name) != "default")


def _seqs(goal: Goal, kind: str) -> Axis:
    """Return the axis of max_num_seqs: fewer values if there are fewer streams, as unused slots only cost memory."""
    most = ENOUGH_SEQS if kind == "cpu" or goal.streams < ENOUGH_SEQS else SEQS[-1]
    values = [n for n in SEQS if goal.least_seqs <= n <= most] or [goal.least_seqs]
    return Axis("max_num_seqs", tuple(values if goal.streams >= most else values[::-2][::-1]))


def _is_tight(goal: Goal, plan: MemoryPlan, max_position: int) -> bool:
    """Return whether a larger KV cache would help: for a longer context, or because the streams do not all fit."""
    need = goal.streams * (goal.prompt_len + goal.shared_len + goal.output_len)
    return plan.max_model_len < max_position or plan.num_kv_tokens < need


def _lengths(longest: int) -> tuple[int | None, ...]:
    """Return the longest context (None), and half, a quarter and so on of it."""
    lengths: list[int | None] = [None]
    length = longest // 2
    while length >= LEAST_CONTEXT and len(lengths) < 5:
        lengths.append(length)
        length //= 2
    return tuple(lengths)
