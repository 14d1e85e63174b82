"""The number of ranks: as asked, or as few GPUs as hold the model, and what is possible for it.

Does not know: sizes of a plan (plan.py), how shares are found (shares.py, split.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from localllm.config.settings import EngineConfig
from localllm.errors import ConfigError, UnsupportedOption
from localllm.machine.hardware import Gpu
from localllm.models.fit.devices import NVLINK, PCIE, PEERS, UNKNOWN, connection, ranges_in_words
from localllm.models.fit.shares import Division
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.shard import divides_by_heads, even_heads

USEFUL_CONTEXT = 8192
"""One GPU is enough if it holds this context, or the model's own where that is shorter."""
EXCHANGE_S = {NVLINK: 10e-6, PEERS: 25e-6, PCIE: 60e-6, UNKNOWN: 60e-6}
"""Seconds of one all-reduce of one token's hidden state, of others' measurements with NCCL: one token at a time."""


def asked_division(config: EngineConfig) -> Division | None:
    """Return the sizes that the settings name; None: automatic. Raises `ConfigError` if two settings disagree."""
    tensor, pipeline = config.tensor_parallel_size, config.pipeline_parallel_size
    _require_length("tensor_split", config.tensor_split, "tensor_parallel_size", tensor)
    _require_length("pipeline_layer_partition", config.pipeline_layer_partition, "pipeline_parallel_size", pipeline)
    tensor = tensor or len(config.tensor_split) or None
    pipeline = pipeline or len(config.pipeline_layer_partition) or None
    if tensor is None and pipeline is None:
        return None
    return division_of(config, tensor or 1, pipeline or 1)


def division_of(config: EngineConfig, tensor: int, pipeline: int) -> Division:
    """Return these sizes with the shares that the settings fix."""
    return Division(
        tensor, pipeline, config.tensor_split, config.pipeline_layer_partition, config.enable_expert_parallel
    )


def _require_length(name: str, values: Sequence[float], size_name: str, size: int | None) -> None:
    if values and size is not None and len(values) != size:
        flag, size_flag = ("--" + each.replace("_", "-") for each in (name, size_name))
        raise ConfigError(
            f"{flag} has {len(values)} {'value' if len(values) == 1 else 'values'}, and {size_flag} is {size}.",
            "Each rank of a layer needs a share." if name == "tensor_split" else "Each stage needs its layers.",
            f"{size_flag} {len(values)}, or leave one of the flags out.",
            param=name,
        )


# ---- what is possible ------------------------------------------------------------------------------------------------


def require_possible(spec: ModelSpec, division: Division, num_gpus: int) -> None:
    """Raise `UnsupportedOption` or `ConfigError` if this model cannot be divided so."""
    if division.whole_experts and spec.mixture is None:
        raise UnsupportedOption(
            f"--enable-expert-parallel does not apply to {spec.architecture}.",
            "This model has no experts.",
            "Leave the flag out.",
            param="enable_expert_parallel",
        )
    if division.num_ranks == 1:
        return
    if spec.implementation != "localllm":
        raise several_ranks_refused(spec.architecture, "It runs through transformers' code, which is not divided.")
    if spec.recurrent is not None:
        raise several_ranks_refused(spec.architecture, "The states of its recurrent layers are not divided over ranks.")
    if even_heads(spec, division.tensor) is None:
        raise _heads_refused(spec, division.tensor, num_gpus)
    mixture = spec.mixture
    if division.whole_experts and mixture is not None and mixture.num_experts < division.tensor:
        raise ConfigError(
            f"--enable-expert-parallel needs an expert for each of {division.tensor} ranks.",
            f"This model has {mixture.num_experts} experts.",
            f"-tp {mixture.num_experts}, or leave the flag out.",
            param="enable_expert_parallel",
        )
    _require_layers(spec, division)


def several_ranks_refused(architecture: str, why: str) -> UnsupportedOption:
    """Return the error for a model that runs on one device only."""
    return UnsupportedOption(
        f"{architecture} does not run on several ranks.",
        why,
        "Leave out --tensor-parallel-size and --pipeline-parallel-size.",
        param="tensor_parallel_size",
    )


def _require_layers(spec: ModelSpec, division: Division) -> None:
    if division.pipeline > spec.num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size {division.pipeline} is larger than the number of layers.",
            f"This model has {spec.num_layers} layers.",
            f"-pp {spec.num_layers} or less",
            param="pipeline_parallel_size",
        )
    given = division.layers
    if given and sum(given) != spec.num_layers:
        raise ConfigError(
            f"--pipeline-layer-partition {','.join(map(str, given))} adds up to {sum(given)} layers.",
            f"This model has {spec.num_layers}.",
            "Leave the flag out: the layers are then divided by memory and bandwidth.",
            param="pipeline_layer_partition",
        )


def _heads_refused(spec: ModelSpec, size: int, num_gpus: int) -> ConfigError:
    works = [n for n in range(1, spec.num_heads + 1) if even_heads(spec, n) is not None]
    kv = spec.num_heads if spec.latent is not None else spec.num_kv_heads
    whole = [n for n in works if n > 1 and kv % n == 0 and n <= kv]
    group = spec.num_heads // spec.num_kv_heads
    has = f"It has {spec.num_heads} heads"
    if spec.latent is None:
        has = f"It has {kv} KV {'group' if kv == 1 else 'groups'} of {group} {'head' if group == 1 else 'heads'}"
    why = f"{has}; {ranges_in_words(works)} ranks work"
    why += f", {ranges_in_words(whole)} without repeated KV heads or idle time." if whole else "."
    if num_gpus:
        why += f" There {'is' if num_gpus == 1 else 'are'} {num_gpus} {'GPU' if num_gpus == 1 else 'GPUs'}."
    best = max(n for n in (1, *whole) if n <= (min(size, num_gpus) if num_gpus > 1 else size))
    return ConfigError(
        f"--tensor-parallel-size {size} cannot split this model.", why, f"-tp {best}", param="tensor_parallel_size"
    )


# ---- automatic -------------------------------------------------------------------------------------------------------


def choose_kind(
    spec: ModelSpec, gpus: Sequence[Gpu], weights_bytes: float, config: EngineConfig
) -> tuple[Division, str]:
    """Return tensor parallelism where these GPUs gain by it, else a pipeline, and why in one sentence."""
    size, links = len(gpus), connection(gpus)
    if even_heads(spec, size) is None:
        why = f"{spec.num_kv_heads} KV heads cannot be divided by {size}"
        why = why if divides_by_heads(spec) else "the layers of this model are not divided by heads"
        return division_of(config, 1, size), f"Pipeline of {size} stages: {why}."
    times = exchange_times(spec, gpus, weights_bytes, size)
    if links in (NVLINK, PEERS) and (links == NVLINK if times is None else times[0] > times[1]):
        return division_of(config, size, 1), f"Tensor parallelism over {size} GPUs, connected by {links}."
    return division_of(config, 1, size), f"Pipeline of {size} stages: the GPUs are connected by {links}."


def exchange_times(
    spec: ModelSpec, gpus: Sequence[Gpu | None], weights_bytes: float, size: int
) -> tuple[float, float] | None:
    """Return the seconds per token that tensor parallelism of this size saves and costs; None: bandwidth unknown.

    A token reads every weight once, and each layer adds up the ranks' results twice.
    """
    speeds = [gpu.place.bandwidth if gpu is not None else None for gpu in gpus]
    known = [speed for speed in speeds if speed is not None]
    if len(known) < len(speeds) or not known:
        return None
    saved = weights_bytes / min(known) * (1 - 1 / size)
    return saved, 2 * spec.num_layers * EXCHANGE_S[connection(gpus)]


def exchange_note(spec: ModelSpec, gpus: Sequence[Gpu | None], weights_bytes: float, division: Division) -> str:
    """Return what the exchanges of tensor parallelism cost, and a better flag where they cost more than they save."""
    times = exchange_times(spec, gpus, weights_bytes, division.tensor) if division.tensor > 1 else None
    if times is None:
        return ""
    saved, cost = (f"{seconds * 1000:.1f}" for seconds in times)
    text = (
        f"Tensor parallelism of {division.tensor} over {connection(gpus)} saves about {saved} ms a token and costs "
        f"about {cost} ms for {2 * spec.num_layers} exchanges."
    )
    return text if times[0] > times[1] else f"{text} -pp {division.num_ranks} may be faster."
