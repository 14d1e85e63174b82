"""The devices that a model may use, the number of its ranks (as asked, or as few GPUs as hold the model), and the types
that the devices compute in.

Does not know: sizes of a plan (plan.py), how shares are found (shard_sizes.py, balance.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise

from localllm.config.settings import EngineConfig
from localllm.errors import ConfigError, UnsupportedOption
from localllm.kernels.kv_format import KV_FORMATS, UNIT
from localllm.machine.hardware import MIN_COMPUTE_CAPABILITY, Gpu, Hardware
from localllm.models.fit.rank_budget import ResidentBytes
from localllm.models.fit.shard_sizes import Division
from localllm.models.spec.model_spec import ModelSpec, kv_groups
from localllm.models.spec.shard import even_heads, stage_starts
from localllm.units import format_bytes

GIB = 1024**3
SHM_BYTES_PER_RANK = 64 * 1024**2  # NCCL's buffers between GPUs without peer access
MOST_GROUPS = 1000  # groups of GPUs that are compared
MUCH_LESS = 0.7  # a better connected group needs at least this share of the free memory of the largest one

ONE_GPU, PCIE, PEERS, NVLINK = "one GPU", "PCIe without peer access", "PCIe", "NVLink"
UNKNOWN = "links that the driver does not describe"
CONNECTIONS = (UNKNOWN, PCIE, PEERS, NVLINK, ONE_GPU)
"""Connections of a group of GPUs, worst first."""

KV_DTYPES = {
    "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "int8": "int8", "int8_per_token_head": "int8",
    "k8v4": "k8v4", "int4": "int4", "int4_per_token_head": "int4",
}  # fmt: skip
"""The names of kernels/kv_format.py by the values of the setting; others mean the model's type."""
MIN_CONTEXT = 256  # the smallest context worth starting with
WORTH_BFLOAT16 = 0.8  # computing in bfloat16 must leave at most this share of the weights in float32


def choose_gpu(config: EngineConfig, hardware: Hardware) -> Gpu | None:
    """Return the GPU to use, None for the CPU. 'auto' takes the GPU with the most free memory."""
    device = config.device
    kind, _, index = device.partition(":")
    gpus = gpus_of(config, hardware)
    if device == "cpu" or (device == "auto" and not gpus):
        return None
    if kind not in ("auto", "cuda") or (index and not index.isdigit()) or (kind == "auto" and index):
        raise ConfigError(
            f"--device {device} is not known.", "Known: auto, cpu, cuda, cuda:N.", "--device auto", param="device"
        )
    if not gpus:
        raise _no_gpu(f"--device {device} asks for a GPU", "device")
    if device == "auto" or (config.device_ids and not index):
        usable = [gpu for gpu in gpus if gpu.is_supported]
        return max(usable, key=lambda gpu: gpu.free_bytes) if usable else None
    found = next((gpu for gpu in gpus if gpu.index == int(index or 0)), None)
    if found is None:
        raise ConfigError(f"--device {device} does not exist.", f"There is {_names(gpus)}.", param="device")
    if not found.is_supported:
        raise ConfigError(
            f"--device {device} is too old.", too_old(found), "--device cpu, or leave the flag out.", param="device"
        )
    return found


def choose_gpus(config: EngineConfig, hardware: Hardware, count: int) -> tuple[Gpu, ...]:
    """Return the GPUs of `count` ranks, in their order; empty: all ranks run on the CPU.

    Raises `ConfigError` if there are not enough, or if one of them is too old.
    """
    kind, _, index = config.device.partition(":")
    if index:
        raise ConfigError(
            f"--device {config.device} names one GPU, and there are {count} ranks.",
            "--device-ids names the GPUs of several ranks.",
            f"--device-ids {','.join(str(gpu.index) for gpu in hardware.gpus[:count]) or '0,1'}",
            param="device",
        )
    gpus = gpus_of(config, hardware)
    if config.device == "cpu" or (kind == "auto" and not hardware.gpus):
        return ()
    usable = [gpu for gpu in gpus if gpu.is_supported]
    if len(usable) < count:
        there = f"There is {_names(usable)}." if usable else "There is no GPU that the kernels support."
        hint = f"-tp {len(usable)}, or --device cpu" if len(usable) > 1 else "Leave the sizes out, or --device cpu"
        raise ConfigError(f"{count} ranks need {count} GPUs.", there, hint, param="tensor_parallel_size")
    return tuple(usable[:count]) if config.device_ids else _best_group(usable, count)


def gpus_of(config: EngineConfig, hardware: Hardware) -> tuple[Gpu, ...]:
    """Return the GPUs named by --device-ids, in that order; without the flag all of them."""
    if not config.device_ids:
        return hardware.gpus
    if config.device == "cpu":
        raise ConfigError(
            "--device-ids names GPUs, and --device is cpu.", "", "Leave out one of the two.", param="device_ids"
        )
    if not hardware.gpus:
        raise _no_gpu("--device-ids names a GPU", "device_ids")
    found = tuple(_named(name, hardware) for name in config.device_ids)
    for one, other in combinations(zip(config.device_ids, found, strict=True), 2):
        if one[1].index == other[1].index:
            raise ConfigError(
                f"--device-ids names cuda:{one[1].index} twice.",
                f"{one[0]} and {other[0]} are the same GPU; each rank needs one of its own.",
                param="device_ids",
            )
    return found


def _named(name: str, hardware: Hardware) -> Gpu:
    """Return the GPU with this index, or whose UUID begins with this text."""
    if name.isdigit():
        matches = [gpu for gpu in hardware.gpus if gpu.index == int(name)]
    else:
        matches = [gpu for gpu in hardware.gpus if (gpu.uuid or "").startswith(name)]
    if len(matches) != 1:
        what = "does not exist" if not matches else f"may mean {len(matches)} GPUs"
        why = f"There is {_names(hardware.gpus)}."
        raise ConfigError(f"--device-ids {name} {what}.", why, "localllm doctor lists UUIDs", param="device_ids")
    return matches[0]


def connection(gpus: Sequence[Gpu | None]) -> str:
    """Return the worst connection between two of these GPUs, one of `CONNECTIONS`."""
    there = [gpu for gpu in gpus if gpu is not None]
    pairs = [(one, other) for one, other in combinations(there, 2)]
    return min((_pair(one, other) for one, other in pairs), key=CONNECTIONS.index, default=ONE_GPU)


def _pair(one: Gpu, other: Gpu) -> str:
    link = next((link for link in one.links if link.peer == other.index), None)
    if link is None or (link.has_peer_access is None and not link.is_nvlink):
        return UNKNOWN
    if not link.has_peer_access and link.has_peer_access is not None:
        return PCIE
    return NVLINK if link.is_nvlink else PEERS


def _best_group(gpus: Sequence[Gpu], count: int) -> tuple[Gpu, ...]:
    """Return the best connected group of GPUs, unless another one has much more free memory."""
    if math.comb(len(gpus), count) > MOST_GROUPS:
        gpus = sorted(gpus, key=lambda gpu: -gpu.free_bytes)[:count]
    groups = [tuple(sorted(group, key=lambda gpu: gpu.index)) for group in combinations(gpus, count)]
    most = max(map(_free, groups))
    large = [group for group in groups if _free(group) >= MUCH_LESS * most]
    return max(large, key=lambda group: (CONNECTIONS.index(connection(group)), _free(group)))


def _free(gpus: Sequence[Gpu]) -> int:
    return sum(gpu.free_bytes for gpu in gpus)


def require_shared_memory(hardware: Hardware, count: int) -> None:
    """Raise `ConfigError` if /dev/shm is too small for NCCL to exchange data between `count` GPUs."""
    free, need = hardware.shm_free_bytes, count * SHM_BYTES_PER_RANK
    if free is not None and free < need:
        raise ConfigError(
            f"/dev/shm is too small for {count} GPUs.",
            f"{format_bytes(free)} are free, and NCCL needs {format_bytes(SHM_BYTES_PER_RANK)} for each rank. "
            "A container gets 64 MiB unless told otherwise.",
            "docker run --ipc=host, or --shm-size=1g",
            param="tensor_parallel_size",
        )


def free_and_reserve(hardware: Hardware, gpu: Gpu | None) -> tuple[int, int]:
    """Return the free bytes, and the reserve that is left alone.

    GPU: the reserve is for the device context, library workspaces, fragmentation, and a desktop that may grow.
    CPU: for the interpreter and its libraries, the page cache of the weights file, and other programs.
    """
    if gpu is not None:
        return gpu.free_bytes, max(GIB // 2, int(0.03 * gpu.total_bytes))
    return hardware.ram_available_bytes, max(GIB // 2, int(0.05 * hardware.ram_total_bytes))


def too_old(gpu: Gpu) -> str:
    """Return why the kernels do not support this GPU."""
    has, needs = (".".join(map(str, capability)) for capability in (gpu.compute_capability, MIN_COMPUTE_CAPABILITY))
    return f"{gpu.name} has compute capability {has}; the kernels need {needs} (Turing) or newer."


def _no_gpu(what: str, param: str) -> ConfigError:
    return ConfigError(
        f"{what} and none is usable here.",
        "There is no GPU, or its driver does not match this build of torch.",
        "localllm doctor, or --device cpu",
        param=param,
    )


def _names(gpus: Sequence[Gpu]) -> str:
    return ", ".join(f"cuda:{gpu.index} ({gpu.name})" for gpu in gpus)


def ranges_in_words(numbers: Sequence[int]) -> str:
    """Return ascending numbers in words: 1 to 8, 16 and 32."""
    starts = [numbers[0], *(b for a, b in pairwise(numbers) if b != a + 1)]
    ends = [*(a for a, b in pairwise(numbers) if b != a + 1), numbers[-1]]
    runs = [
        text
        for a, b in zip(starts, ends, strict=True)
        for text in ([f"{a} to {b}"] if b > a + 1 else map(str, range(a, b + 1)))
    ]
    return " and ".join(filter(None, (", ".join(runs[:-1]), runs[-1])))


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
    if why := why_no_ranks(spec) or (why_no_stages(spec) if division.pipeline > 1 else ""):
        raise several_ranks_refused(spec.architecture, why)
    if division.pipeline > 1 and spec.recurrent is not None and spec.drafter is not None:
        raise UnsupportedOption(
            f"A drafter of {spec.architecture} cannot be combined with --pipeline-parallel-size.",
            "A recurrent state of an earlier stage cannot take back a wrong guess.",
            "--tensor-parallel-size instead, or leave out --speculative and --draft.",
            param="speculative",
        )
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


def require_replicable(spec: ModelSpec, config: EngineConfig) -> None:
    """Raise `UnsupportedOption` for a model whose replicas have not been tested in processes of their own, or whose
    prompts cannot be handed from one replica to another."""
    if config.prefill_replicas and spec.recurrent is not None:
        what = f"--prefill-replicas is not supported for {spec.architecture}."
        why = "It keeps recurrent states, which are not moved with the KV blocks."
        raise UnsupportedOption(what, why, "Leave out --prefill-replicas.", param="prefill_replicas")
    if why := why_no_replicas(spec):
        what = f"--data-parallel-size is not supported for {spec.architecture}."
        hint = "Start a server for each replica, and one with --upstream in front of them."
        raise UnsupportedOption(what, why, hint, param="data_parallel_size")


def why_no_ranks(spec: ModelSpec) -> str:
    """Return why a model runs on one device only, as a sentence; empty: it is divided by heads."""
    return "" if spec.implementation == "localllm" else "It runs through transformers' code, which is not divided."


def why_no_stages(spec: ModelSpec) -> str:
    """Return why no pipeline can be cut between the layers of a model that is divided by heads; empty: one can."""
    if spec.source is not None:
        return "What its layers read of a prompt is divided by heads alone."
    if stage_starts(spec):
        return ""
    reads = "read K and V" if spec.kv_source else "attend to keys"
    return f"Its layers {reads} that a layer of an earlier stage has {'made' if spec.kv_source else 'chosen'}."


def why_no_replicas(spec: ModelSpec) -> str:
    """Return why a model does not run several times in processes of their own; empty: it does."""
    if spec.implementation != "localllm":
        return "It runs through transformers' code."
    return "" if spec.source is None else "It has an encoder."


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
    starts = stage_starts(spec)
    if division.pipeline > len(starts) + 1:
        raise ConfigError(
            f"--pipeline-parallel-size {division.pipeline} is more than the stages that this model divides into.",
            f"Later layers use what earlier ones have computed: a stage can begin at layer {_listed(starts)}.",
            f"-pp {len(starts) + 1} or less",
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
    wrong = sorted({*accumulate(given[:-1])} - {*starts})
    if wrong:
        raise ConfigError(
            f"--pipeline-layer-partition {','.join(map(str, given))} begins a stage at layer {_listed(wrong)}.",
            f"Later layers use what earlier ones have computed: a stage can begin at layer {_listed(starts)}.",
            "Leave the flag out: the layers are then divided by memory and bandwidth.",
            param="pipeline_layer_partition",
        )


def _listed(layers: Sequence[int]) -> str:
    """Return layers as words: 1 to 9, 12."""
    runs = list[list[int]]()
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _heads_refused(spec: ModelSpec, size: int, num_gpus: int) -> ConfigError:
    works = [n for n in range(1, spec.num_heads + 1) if even_heads(spec, n) is not None]
    kv = min((heads for heads, _ in spec.layer_kv_shapes), default=spec.num_kv_heads)
    kv = spec.num_heads if spec.latent is not None else kv
    whole = [n for n in works if n > 1 and kv % n == 0 and n <= kv]
    group = spec.num_heads // (1 if spec.latent is not None else kv)
    has = f"It has {spec.num_heads} heads"
    if spec.latent is None:
        has = f"It has {kv} KV {'group' if kv == 1 else 'groups'} of {group} {'head' if group == 1 else 'heads'}"
    recurrent = spec.recurrent
    if recurrent is not None and recurrent.num_groups:
        states = recurrent.num_groups, recurrent.num_heads // recurrent.num_groups
        has += (
            f", and in its recurrent layers {states[0]} {'group' if states[0] == 1 else 'groups'} of {states[1]} heads"
        )
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
        why = f"its heads cannot be divided by {size}"
        return division_of(config, 1, size), f"Pipeline of {size} stages: {why}."
    times = exchange_times(spec, gpus, weights_bytes, size)
    if links in (NVLINK, PEERS) and (links == NVLINK if times is None else times[0] > times[1]):
        return division_of(config, size, 1), f"Tensor parallelism over {size} GPUs, connected by {links}."
    return division_of(config, 1, size), f"Pipeline of {size} stages: the GPUs are connected by {links}."


def bandwidths(gpus: Sequence[Gpu | None]) -> list[float]:
    """Return the memory bandwidth of each rank; none at all if one is not known."""
    known = [gpu.place.bandwidth for gpu in gpus if gpu is not None and gpu.place.bandwidth is not None]
    return known if len(known) == len(gpus) else []


def exchange_times(
    spec: ModelSpec, gpus: Sequence[Gpu | None], weights_bytes: float, size: int
) -> tuple[float, float] | None:
    """Return the seconds per token that tensor parallelism of this size saves and costs; None: bandwidth unknown.

    A token reads every weight once, and each layer adds up the ranks' results twice.
    """
    speeds = bandwidths(gpus)
    if not speeds:
        return None
    saved = weights_bytes / min(speeds) * (1 - 1 / size)
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


# ---- types -----------------------------------------------------------------------------------------------------------


def choose_dtype(
    config: EngineConfig, spec: ModelSpec, gpu: Gpu | None, resident_bytes: ResidentBytes, budget: int
) -> tuple[str, str]:
    """Return the type of weights and activations, and a note if it is not the expected one.

    gpu: the oldest one; None: the CPU. budget: bytes for the model on a CPU. Raises `UnsupportedOption`.
    """
    if gpu is None:
        return _of_cpu(config, resident_bytes, budget) if config.dtype == "auto" else (config.dtype, "")
    dtype, note = spec.dtype if config.dtype == "auto" else config.dtype, ""
    has = f"this GPU has {'.'.join(map(str, gpu.compute_capability))}"
    if dtype == "bfloat16" and not gpu.supports_bfloat16:
        if config.dtype == "bfloat16":
            what = f"--dtype bfloat16 is not supported by {gpu.name}."
            raise UnsupportedOption(what, f"It needs compute capability 8.0; {has}.", "--dtype float16", param="dtype")
        dtype = "float16"
        note = f"float16 instead of the checkpoint's bfloat16, which needs compute capability 8.0; {has}."
    if spec.latent is None:
        return dtype, note
    if gpu.compute_capability < (8, 0):  # its long rows need 16-bit matrix units
        what = f"Latent attention is not supported by {gpu.name}."
        why = f"Its kernels need compute capability 8.0; {has}."
        raise UnsupportedOption(what, why, "--device cpu", param="device")
    if dtype == "float32":
        raise UnsupportedOption(
            "Latent attention does not run in float32 on a GPU.",
            "A float32 tile of the keys takes more shared memory and registers than most GPUs have.",
            "--dtype bfloat16", param="dtype",
        )  # fmt: skip
    return dtype, note


def _of_cpu(config: EngineConfig, resident_bytes: ResidentBytes, budget: int) -> tuple[str, str]:
    """Choose float32, or bfloat16 where it halves the weights: without the native library, which keeps 16-bit weights
    16 bits wide whatever the type of the activations."""
    as_float32 = resident_bytes("cpu", "float32", MIN_CONTEXT, config.quantization)
    if 2 * as_float32 <= budget:
        return "float32", ""
    if resident_bytes("cpu", "bfloat16", MIN_CONTEXT, config.quantization) > WORTH_BFLOAT16 * as_float32:
        return "float32", ""
    return "bfloat16", (
        f"bfloat16 instead of float32: in float32 the weights would take {format_bytes(as_float32)}, more than half of "
        f"the usable {format_bytes(budget)}. --dtype float32 forces float32."
    )


def choose_kv_dtype(config: EngineConfig, spec: ModelSpec, dtype: str) -> tuple[str, str]:
    """Return the type of K and V, and a note if some layers have another one. dtype: of the activations.

    Raises `UnsupportedOption` for a cache of 4 bits where the heads do not fit.
    """
    kv_dtype = KV_DTYPES.get(config.kv_cache_dtype, dtype)
    if not KV_FORMATS[kv_dtype].has_four_bits:
        return kv_dtype, ""
    groups = [*kv_groups(spec), *(kv_groups(spec.drafter.spec) if spec.drafter else ())]
    full = [group for group in groups if group.window is None]
    unfit = next((group.head_dim for group in full if group.head_dim % UNIT), 0)
    why = ""
    if spec.latent is not None:
        why = "Its cache holds one latent for keys and values: rotating the keys would rotate the values too."
    elif unfit:
        why = f"Heads must be a multiple of {UNIT} numbers; this model has heads of {unfit}."
    elif not full:
        why = "All its layers see a window of tokens, and such layers keep 8 bits."
    if why:
        what = f"--kv-cache-dtype {kv_dtype} is not supported for {spec.architecture}."
        raise UnsupportedOption(what, why, "--kv-cache-dtype int8", param="kv_cache_dtype")
    if len(full) < len(groups):
        return kv_dtype, "Layers with a window keep keys and values in 8 bits: they hold few tokens."
    return kv_dtype, ""
