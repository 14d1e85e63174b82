"""The devices that a model may use: one, or several in the order of its ranks.

Does not know: models, how memory is divided (plan.py, split.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, pairwise

from localllm.config.settings import EngineConfig
from localllm.errors import ConfigError
from localllm.machine.hardware import MIN_COMPUTE_CAPABILITY, Gpu, Hardware
from localllm.units import format_bytes

GIB = 1024**3
SHM_BYTES_PER_RANK = 64 * 1024**2  # NCCL's buffers between GPUs without peer access
MOST_GROUPS = 1000  # groups of GPUs that are compared
MUCH_LESS = 0.7  # a better connected group needs at least this share of the free memory of the largest one

ONE_GPU, PCIE, PEERS, NVLINK = "one GPU", "PCIe without peer access", "PCIe", "NVLink"
UNKNOWN = "links that the driver does not describe"
CONNECTIONS = (UNKNOWN, PCIE, PEERS, NVLINK, ONE_GPU)
"""Connections of a group of GPUs, worst first."""


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
    """Return the GPUs of so many ranks, in their order; empty: all ranks run on the CPU.

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
    """Raise `ConfigError` if /dev/shm is too small for NCCL to exchange data between so many GPUs."""
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
