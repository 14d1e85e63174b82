"""The bytes of a model on a CPU, and the speed at which it would generate on this machine: a range, before any load.

On a CPU quantised matrices keep their bits with the native library, but types of 8 bits lose their scales, and Q5 and
Q6 get 8 bits on a processor with products of bytes; without the library all of them get 8 bits (kernels/cpu/pack.py).
The file name gives the main block type; the bits per parameter give the share of the second type. A tied
head in 8 bits is a second copy: the embedding stays as stored.

The speed is a range around bandwidth / bytes that a token reads. docs/lab.md, "a lone stream on a CPU beside
llama.cpp", has steps of five kinds of weights, which read at 0.53 to 0.86 of a plain sum's speed with everything
included, and says what a step costs besides: 5 ms. The bandwidth of machine/bandwidth.py is between 1.0 and 1.2 times a
plain sum's. A hybrid's step takes up to 1.23 of a model's with attention in all layers. Without the library a step read
at 0.27 of the sum. Experts, and all of a GPU, were not measured: their ranges are wider.
Does not know: which models there are, how the bandwidth was measured.
"""

from __future__ import annotations

from typing import NamedTuple

from localllm.config.settings import EngineConfig
from localllm.kernels.cpu.native.choice import chosen_set
from localllm.machine.hardware import Hardware
from localllm.models.fit.far import far_speed
from localllm.models.fit.memory_plan import MemoryPlan
from localllm.models.library.names import parse_name
from localllm.models.spec.model_spec import ModelSpec

FOUR_BITS = {"Q4_0": (4.5, 4.5), "Q4_1": (5.0, 5.0), "Q4_K": (4.5, 5.0)}
"""Main type of a file -> bits per weight in the file, and in RAM with the native library (kernels/cpu/q4.py)."""
OTHER_BITS = 6.5625  # Q6_K, the type of the other matrices of a 4-bit file
BYTE = 8
SETS_WITHOUT_BYTES = ("avx2",)  # instruction sets without a dot product of bytes


class Speed(NamedTuple):
    """The time of a step, relative to reading its weights at full bandwidth."""

    share: tuple[float, float]  # of the bandwidth, worst and best
    extra_s: tuple[float, float]  # beside the weights, worst and best


CPU = Speed((0.4, 0.95), (0.005, 0.001))
CPU_WITHOUT_LIBRARY = Speed((0.2, 0.5), (0.010, 0.002))
GPU = Speed((0.4, 0.9), (0.010, 0.002))
MIXTURE_SHARE = 0.3  # worst share of experts, which are read here and there


def cpu_weight_bytes(
    name: str, stored_bytes: int, parameters: int, spec: ModelSpec, config: EngineConfig, dtype: str
) -> int:
    """Return the bytes of the weights in RAM. dtype: of the activations."""
    return _body_bytes(name, stored_bytes, parameters, config, dtype) + _copied_head(name, spec, config)


def cpu_read_bytes(
    name: str, stored_bytes: int, parameters: int, bytes_per_token: int, config: EngineConfig, dtype: str
) -> float:
    """Return the weight bytes that one token reads from RAM. bytes_per_token: the same in the stored layout."""
    return _body_bytes(name, stored_bytes, parameters, config, dtype) * bytes_per_token / stored_bytes


def tokens_per_s(read_bytes: float, bandwidth: float, speed: Speed, *, is_mixture: bool) -> tuple[float, float]:
    """Return the least and the most tokens per second of one answer with a short context."""
    least, most = speed.share
    least = min(least, MIXTURE_SHARE) if is_mixture else least
    slow, fast = speed.extra_s
    return 1 / (read_bytes / (bandwidth * least) + slow), 1 / (read_bytes / (bandwidth * most) + fast)


def cpu_speed() -> Speed:
    return CPU if has_library() else CPU_WITHOUT_LIBRARY


def has_library() -> bool:
    """Return whether there is a native library for this processor."""
    return bool(chosen_set()[0])


def has_byte_products() -> bool:
    """Return whether this processor has a dot product of bytes."""
    return chosen_set()[0] not in SETS_WITHOUT_BYTES


def _body_bytes(name: str, stored_bytes: int, parameters: int, config: EngineConfig, dtype: str) -> int:
    """Return the bytes of all weights without a second copy of the head."""
    quant = _quant(name)
    if quant is None:
        is_half = dtype != "float32" or (has_library() and config.keeps_half_weights)
        return stored_bytes if is_half else 2 * stored_bytes
    if config.cpu_weights == "exact":
        return stored_bytes
    if _gets_bytes(quant, config):
        return parameters
    four = next((found for kind, found in FOUR_BITS.items() if quant.startswith(kind)), None)
    if four is None:
        return stored_bytes
    stored, held = four
    bits = BYTE * stored_bytes / parameters
    others = min(1.0, max(0.0, (bits - stored) / (OTHER_BITS - stored)))
    held_others = BYTE if _gets_bytes("Q6_K", config) else OTHER_BITS
    return int(parameters * (held * (1 - others) + held_others * others) / BYTE)


def _copied_head(name: str, spec: ModelSpec, config: EngineConfig) -> int:
    quant = _quant(name)
    head = "Q6_K" if quant is not None and quant.startswith(tuple(FOUR_BITS)) else quant  # as llama.cpp stores it
    is_copied = head is not None and _gets_bytes(head, config) and config.cpu_weights != "exact"
    return spec.vocab_size * spec.hidden_size if is_copied and spec.tie_word_embeddings else 0


def _gets_bytes(quant: str, config: EngineConfig) -> bool:
    """Return whether matrices of a type have 8 bits in RAM."""
    is_rounded = config.cpu_weights == "fast" and has_byte_products()
    return not has_library() or quant.startswith(("Q8", "Q5", "Q6") if is_rounded else "Q8")


def _quant(name: str) -> str | None:
    """Return the type in a name, as Q4_K_M; None: the checkpoint has 16 bits."""
    quant = (parse_name(name).quant or "").upper().removeprefix("UD-")
    return None if quant in ("", "BF16", "F16", "FP16") else quant


SpeedRange = tuple[float, float]
"""Least and most tokens per second of one answer with a short context."""


def speed_range(
    read_bytes: float, plan: MemoryPlan, hardware: Hardware, cpu_bandwidth: float | None, *, is_mixture: bool
) -> SpeedRange | None:
    """Return the speed if each token reads `read_bytes` bytes; None without a bandwidth, and for several ranks, whose
    exchange has not been measured. cpu_bandwidth: bytes/s; None: unknown.
    """
    if plan.ranks:
        return None
    if plan.device == "cpu":
        bandwidth, speed = cpu_bandwidth, cpu_speed()
    else:
        gpu = next(gpu for gpu in hardware.gpus if f"cuda:{gpu.index}" == plan.device)
        bandwidth, speed = gpu.place.bandwidth, GPU
    return None if bandwidth is None else tokens_per_s(read_bytes, bandwidth, speed, is_mixture=is_mixture)


def checkpoint_speed(
    spec: ModelSpec, plan: MemoryPlan, hardware: Hardware, cpu_bandwidth: float | None, read_bytes: int | None,
    disk_bandwidth: float | None = None,
) -> SpeedRange | None:  # fmt: skip
    """Return the speed of a checkpoint; None for a model that does not generate text. read_bytes: of its weights, that
    one token reads, as in `Estimate`; None: unknown. Of a mixture with experts in RAM or on disk the plan tells what is
    read. Bandwidths: bytes/s; None: unknown.
    """
    if plan.far is not None:
        on_gpu = [gpu.place.bandwidth for gpu in hardware.gpus if f"cuda:{gpu.index}" == plan.device]
        bandwidth = on_gpu[0] if on_gpu else cpu_bandwidth
        return far_speed(plan.far, plan.weights_bytes, bandwidth, cpu_bandwidth, disk_bandwidth)
    if read_bytes is None or spec.task != "generate":
        return None
    return speed_range(read_bytes, plan, hardware, cpu_bandwidth, is_mixture=spec.mixture is not None)


def speed_in_words(speed: SpeedRange | None) -> str:
    """Return the range for display, "" if unknown: `11 to 24 tokens/s`."""
    if speed is None:
        return ""
    least, most = (f"{round_speed(each):,g}" for each in speed)
    return f"about {least} tokens/s" if least == most else f"{least} to {most} tokens/s"


def round_speed(speed: float) -> float:
    """Return tokens/s with two significant digits, since more would claim too much."""
    return float(f"{speed:.2g}")
