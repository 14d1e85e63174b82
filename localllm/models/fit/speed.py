"""The speed of a model on a machine, before any load: how fast it generates, alone and several answers at once, and how
long a prompt takes.

    work_of        what one token of a plan reads and multiplies
    predict        the speeds of that plan on a machine whose own speeds are measured (machine/bandwidth.py)
    speech_work    what a window of sound multiplies, and a token of its text reads, in a model that transcribes
    predict_speech the speed of that

A token of a lone answer takes the time in which its weights are read, as the formula of far.py says for any place. The
speed that is shown is a range around that. docs/lab.md, "a lone stream on a CPU beside llama.cpp", has steps of five
kinds of weights, which read at 0.53 to 0.86 of a plain sum's speed with everything included, and says what a step costs
besides: 5 ms. The bandwidth of machine/bandwidth.py is between 1.0 and 1.2 times a plain sum's. A hybrid's step takes
up to 1.23 of a model's with attention in all layers. Without the library a step read at 0.27 of the sum. Experts, and
all of a GPU, were not measured: their ranges are wider.

Tokens that are computed together read each expert once, and choose almost as many different ones as there are tokens.
Prompts and many answers at once are bounded by multiplications, where these take longer than reading.
Does not know: which models there are, how the machine was measured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from localllm.kernels.cpu.native.choice import chosen_set
from localllm.machine.hardware import Hardware
from localllm.machine.links import Place
from localllm.models.fit.far import (
    CROSSING_S,
    GPU_SHARE,
    LEAST_SHARE,
    MOST_SHARE,
    RAM_SHARE,
    STEP_S,
    CheckpointBytes,
)
from localllm.models.fit.memory_plan import MemoryPlan, SpeechWork, TokenWork
from localllm.models.fit.rank_budget import ResidentBytes
from localllm.models.fit.shard_sizes import layer_multiplies
from localllm.models.spec.model_spec import ModelSpec, layer_window, query_heads
from localllm.units import format_count, format_seconds

SpeedRange = tuple[float, float]
"""Least and most tokens per second of one answer with a short context."""


class Speed(NamedTuple):
    """The time of a step, relative to reading its weights at full bandwidth."""

    share: tuple[float, float]  # of the bandwidth, worst and best
    extra_s: tuple[float, float]  # beside the weights, worst and best


CPU = Speed((0.4, 0.95), (0.005, 0.001))
CPU_WITHOUT_LIBRARY = Speed((0.2, 0.5), (0.010, 0.002))
GPU = Speed((0.4, 0.9), (0.010, 0.002))
MIXTURE_SHARE = 0.3  # worst share of experts, which are read here and there
CPU_PRODUCTS, GPU_PRODUCTS = 0.6, 0.5  # of the multiply-adds/s that prompts reach (docs/lab.md)
LINK_SHARE = 0.79  # of a PCIe connection's bytes/s: 25 of 31.5 GB/s for 16 lanes of PCIe 4, from page-locked memory
SETS_WITHOUT_BYTES = ("avx2",)  # instruction sets without a dot product of bytes
NARROW_BYTES = 1.6  # per weight, up to which the CPU multiplies bytes
PROMPTS = (1000, 8000)
AT_ONCE = (1, 4, 8)
SPOKEN_TOKENS = 4.0
"""Tokens of a second of speech, assumed: 180 English words a minute of 1.3 tokens each. Other languages have more."""
CPU_ENCODER = 0.8  # of the multiply-adds/s with wide weights, that encoding sound reaches (docs/lab.md)
WINDOW_S, DICTATION_S = 30.0, 5.0  # of sound, whose times are shown
ANSWER_TOKENS = 256  # of the answer to a prompt of 1,000 tokens, by which places are compared


@dataclass(frozen=True, slots=True)
class PlanSpeeds:
    """The expected speeds of a plan. Ranges are least and most, other numbers lie between."""

    decode: SpeedRange
    streams: dict[int, float]  # answers at once -> tokens/s of each
    prompt: float | None  # tokens/s of a prompt of 1,000 tokens; None: the machine's products were not measured
    first_token_s: dict[int, float]  # tokens of a prompt, up to the context -> seconds until the first token
    why: str  # what it was computed from
    ram_bandwidth: float | None = None  # bytes/s that were measured, where RAM holds a part of the model

    @property
    def answer_s(self) -> float:
        """Seconds of an answer of usual length to a prompt of 1,000 tokens; without the prompt where it is unknown."""
        return self.first_token_s.get(PROMPTS[0], 0.0) + ANSWER_TOKENS / self.streams[1]

    def words(self) -> str:
        """Return the speeds for display: 24 to 34 tokens/s; a prompt of 8,000 tokens about 4 s; ..."""
        most, together = max(self.first_token_s, default=0), max(self.streams)
        parts = [speed_in_words(self.decode)]
        if most:
            parts.append(f"a prompt of {format_count(most)} tokens about {format_seconds(self.first_token_s[most])}")
        if together > 1:
            parts.append(f"{together} answers at once about {round_speed(self.streams[together]):,g} tokens/s each")
        return "; ".join(parts)


def work_of(
    plan: MemoryPlan, spec: ModelSpec, resident: ResidentBytes | None, quantization: str | None
) -> TokenWork | None:
    """Return what one token reads and multiplies. None: the model generates no text, is on several devices, or the
    sizes of its experts are not known. quantization: at load."""
    mixture, far = spec.mixture, plan.far
    if plan.ranks or spec.task != "generate":
        return None
    near, share = 0, 1.0
    far_layers = frozenset(() if far is None else far.layers)
    if mixture is not None:
        if spec.implementation != "localllm" or not isinstance(resident, CheckpointBytes):
            return None
        experts = resident.experts(plan.device, plan.dtype, quantization)
        near = sum(each.gpu_bytes for each in experts if each.layer not in far_layers)
        share = mixture.top_k / mixture.num_experts
    read = plan.weights_bytes - (near * (1 - share) if far is None else far.idle_bytes)
    if far is None and isinstance(resident, CheckpointBytes):
        if resident.looked_up is not None:
            read -= resident.looked_up(plan.device, plan.dtype)
        elif resident.tables is not None:
            read -= sum(each.num_bytes for each in resident.tables(plan.device, plan.dtype, quantization))
    parts = [layer_multiplies(spec, layer) for layer in range(spec.num_layers)]
    moved = sum(parts[layer][1] for layer in far_layers)
    return TokenWork(
        dense_bytes=max(0.0, read - near * share),
        expert_bytes=near * share,
        far_bytes=0.0 if far is None else float(far.read_bytes),
        multiplies=sum(map(sum, parts)) - moved,
        far_multiplies=moved,
        context=_context_multiplies(spec),
        chosen_share=share,
    )


def _context_multiplies(spec: ModelSpec) -> tuple[tuple[int | None, float], ...]:
    """Return (window, multiply-adds of a token with each position that it sees) of the layers with attention."""
    heads: Counter[int | None] = Counter()
    for layer in range(spec.num_layers):
        if spec.has_attention(layer):
            heads[layer_window(spec, layer)] += query_heads(spec, layer)
    return tuple((window, 2.0 * count * spec.head_dim) for window, count in heads.items())


def predict(plan: MemoryPlan, hardware: Hardware) -> PlanSpeeds | None:
    """Return the speeds of a plan. None: what its tokens read is unknown, or a bandwidth is, or it has several ranks,
    whose exchange has not been measured."""
    steps = _Steps.of(plan, hardware)
    if steps is None:
        return None
    slow, fast = (1 / steps.decode_s(1, side) for side in (0, 1))
    lengths = [length for length in PROMPTS if length <= plan.max_model_len]
    prompts = {length: seconds for length in lengths if (seconds := steps.prompt_s(length)) is not None}
    streams = {rows: 1 / steps.usual_s(rows) for rows in AT_ONCE if rows <= max(1, plan.max_num_seqs)}
    usual = steps.prompt_s(PROMPTS[0])
    return PlanSpeeds(
        decode=(slow, fast),
        streams=streams,
        prompt=None if usual is None else PROMPTS[0] / usual,
        first_token_s={length: seconds + steps.usual_s(1) for length, seconds in prompts.items()},
        why=steps.why,
        ram_bandwidth=hardware.speeds.ram if plan.far is not None and plan.far.layers else None,
    )


def predict_each(plan: MemoryPlan, hardware: Hardware, answers: int) -> SpeedRange | None:
    """Return the least and most tokens/s of each of several answers at once, with short contexts. None: as of
    `predict`."""
    steps = _Steps.of(plan, hardware)
    return None if steps is None else (1 / steps.decode_s(answers, 0), 1 / steps.decode_s(answers, 1))


@dataclass(frozen=True, slots=True)
class _Steps:
    """The seconds of steps of a plan."""

    plan: MemoryPlan
    work: TokenWork
    hardware: Hardware
    bandwidth: float  # of the device, bytes/s
    gpu_multiplies: float | None  # per second; None: unknown, or the device is the CPU
    link: float | None  # from RAM to the device, bytes/s

    @classmethod
    def of(cls, plan: MemoryPlan, hardware: Hardware) -> _Steps | None:
        far, speeds = plan.far, hardware.speeds
        gpu = next((gpu for gpu in hardware.gpus if f"cuda:{gpu.index}" == plan.device), None)
        bandwidth = speeds.ram if gpu is None else gpu.place.bandwidth
        is_far = far is not None and bool(far.layers)
        is_unknown = (is_far and speeds.ram is None) or (far is not None and far.disk and speeds.disk is None)
        if plan.ranks or plan.work is None or bandwidth is None or is_unknown:
            return None
        place = Place() if gpu is None else gpu.place
        return cls(plan, plan.work, hardware, bandwidth, place.multiplies, place.link)

    @property
    def on_cpu(self) -> bool:
        return self.plan.device == "cpu"

    @property
    def why(self) -> str:
        """The bytes and bandwidths that the speeds were computed from, as a sentence."""
        work, far, speeds = self.work, self.plan.far, self.hardware.speeds
        near = _giga(work.dense_bytes + work.expert_bytes)
        parts = [f"{near} GB at {_giga(self.bandwidth)} GB/s of {self.plan.device}"]
        if far is not None and far.layers:
            far_at = f"{_giga(speeds.ram or 0)} GB/s of RAM in {len(far.layers)} layers"
            parts.append(f"{_giga(work.far_bytes)} GB at {far_at}")
        if far is not None and far.disk is not None:
            parts.append(f"what is not in RAM at {_giga(speeds.disk or 0)} GB/s of the disk")
        return f"A token reads {', '.join(parts)}."

    def decode_s(self, rows: int, side: int) -> float:
        """Return the seconds of a step of `rows` answers with short contexts. side: 0 at worst, 1 at best."""
        if self.plan.far is None or not self.plan.far.layers:
            speed = cpu_speed() if self.on_cpu else GPU
            share = min(speed.share[side], MIXTURE_SHARE if self.work.is_mixture and side == 0 else 1.0)
            return self._step_s(rows, share, share, speed.extra_s[side], side)
        share = (LEAST_SHARE, MOST_SHARE)[side]
        return self._step_s(rows, min(share, GPU_SHARE), share, STEP_S, side)

    def usual_s(self, rows: int) -> float:
        """Return the seconds of such a step between the two: the formula of far.py, for any place."""
        if self.on_cpu and not has_library():
            return math.sqrt(self.decode_s(rows, 0) * self.decode_s(rows, 1))
        return self._step_s(rows, RAM_SHARE if self.on_cpu else GPU_SHARE, RAM_SHARE, STEP_S)

    def _step_s(self, rows: int, share: float, ram_share: float, extra_s: float, side: int | None = None) -> float:
        """share: of the device's bandwidth. side: which share of a token's experts is found in RAM; None: between."""
        work, far, speeds = self.work, self.plan.far, self.hardware.speeds
        near = work.dense_bytes + work.expert_bytes * work.distinct(rows)
        far_s = 0.0
        if far is not None and far.layers and speeds.ram is not None:
            distinct = work.far_bytes * work.distinct(rows)
            products_s = _ratio(rows * work.far_multiplies, self._cpu_rate(work.far_bytes, work.far_multiplies)) or 0.0
            far_s = max(distinct / (ram_share * speeds.ram), products_s) + len(far.layers) * CROSSING_S
            if far.disk is not None and speeds.disk is not None:
                least, most = far.disk.hits
                missed = math.sqrt((1 - least) * (1 - most)) if side is None else 1 - (least, most)[side]
                far_s += missed * distinct / speeds.disk
        return max(near / (self.bandwidth * share), self._multiplies_s(rows, 1.0) or 0.0) + far_s + extra_s

    def prompt_s(self, tokens: int) -> float | None:
        """Return the seconds of a lone prompt; None: the speed of products is unknown."""
        size, whole = self.plan.max_num_batched_tokens, 0.0
        for start in range(0, tokens, size):
            step_s = self._chunk_s(start, min(size, tokens - start))
            if step_s is None:
                return None
            whole += step_s
        return whole

    def _chunk_s(self, start: int, rows: int) -> float | None:
        """Return the seconds of a step with `rows` tokens of a prompt behind `start` others."""
        work, far, speeds = self.work, self.plan.far, self.hardware.speeds
        products_s = self._multiplies_s(rows, CPU_PRODUCTS if self.on_cpu else GPU_PRODUCTS)
        seen = sum(each * min(start + rows / 2, window or math.inf) for window, each in work.context)
        attention_s = _ratio(rows * seen, speeds.wide if self.on_cpu else self.gpu_multiplies)
        if products_s is None or attention_s is None:
            return None
        near = work.dense_bytes + work.expert_bytes * work.distinct(rows)
        read_s = near / (self.bandwidth * (RAM_SHARE if self.on_cpu else GPU_SHARE))
        if far is None or not far.layers:
            return STEP_S + max(products_s, read_s) + attention_s
        far_s = _ratio(rows * work.far_multiplies, self._cpu_rate(work.far_bytes, work.far_multiplies))
        if far_s is None or speeds.ram is None:
            return None
        distinct = work.far_bytes * work.distinct(rows)
        far_s = max(far_s / CPU_PRODUCTS, distinct / (RAM_SHARE * speeds.ram)) + len(far.layers) * CROSSING_S
        if far.disk is not None and speeds.disk is not None:
            far_s = max(far_s, (1 - far.disk.hits[0]) * distinct / speeds.disk)
        if far.staging_bytes and self.link is not None:  # a step copies all of them, and takes the earlier of both ways
            on_gpu_s = _ratio(rows * work.far_multiplies, self.gpu_multiplies and self.gpu_multiplies * GPU_PRODUCTS)
            far_s = min(far_s, max(far.expert_bytes / (LINK_SHARE * self.link), on_gpu_s or 0.0))
        return STEP_S + max(products_s, read_s) + attention_s + far_s

    def _multiplies_s(self, rows: int, share: float) -> float | None:
        """Return the seconds of the device's products with `rows` rows at this share of its multiply-adds/s."""
        work, rate = self.work, self.gpu_multiplies
        if self.on_cpu:
            rate = self._cpu_rate(work.dense_bytes + work.expert_bytes, work.multiplies)
        return _ratio(rows * work.multiplies, None if rate is None else rate * share)

    def _cpu_rate(self, num_bytes: float, multiplies: float) -> float | None:
        narrow = num_bytes <= NARROW_BYTES * multiplies
        return self.hardware.speeds.narrow if narrow else self.hardware.speeds.wide


def _ratio(work: float, rate: float | None) -> float | None:
    return None if rate is None else work / rate


def _giga(number: float) -> str:
    return f"{number / 1e9:.2g}" if number < 1e11 else f"{number / 1e9:.0f}"


@dataclass(frozen=True, slots=True)
class SpeechSpeeds:
    """The expected speed of a transcription, one window after the other."""

    times_real_time: float  # seconds of sound in a second, in windows of 30 s
    dictation_s: float  # seconds of processing for 5 s of sound
    why: str  # what it was computed from

    def words(self) -> str:
        """Return the speed for display: about 9 times real time; 5 s of dictation about 1.3 s."""
        dictation = f"{DICTATION_S:g} s of dictation about {format_seconds(self.dictation_s)}"
        return f"about {round_speed(self.times_real_time):,g} times real time; {dictation}"


def speech_work(
    config: Mapping[str, Any], weight_bytes: float, sound_bytes: int, *, head_bytes: float | None = None
) -> SpeechWork | None:
    """Return the work of a model that transcribes, by the sizes in its config.json: Whisper, Moonshine or Parakeet.

    weight_bytes, sound_bytes: of a number of the weights, and of keys and values of the sound. head_bytes: of a number
    of the decoder's head; None: of any weight. None: another model, or a size is missing.
    """
    architecture = str((config.get("architectures") or [""])[0])
    sound = config.get("encoder_config") or config
    try:
        if architecture.startswith("Parakeet"):
            return _parakeet_work(config, sound, weight_bytes)
        if architecture.startswith("Whisper"):
            width, wide, layers = sound["d_model"], sound["encoder_ffn_dim"], sound["encoder_layers"]
            own, own_wide, decoders = width, 2 * config["decoder_ffn_dim"], config["decoder_layers"]
            rate, padded_s, passes = 50.0, WINDOW_S, 2  # the language is found before the prompt is read
            front = 2 * 3 * sound["num_mel_bins"] * width + 3 * width**2
        elif architecture.startswith("Moonshine"):
            width, wide = sound["hidden_size"], sound["intermediate_size"]
            is_streaming = sound is not config
            layers = sound["num_hidden_layers" if is_streaming else "encoder_num_hidden_layers"]
            decoders = config["num_hidden_layers" if is_streaming else "decoder_num_hidden_layers"]
            own, own_wide = config["hidden_size"], 3 * config["intermediate_size"]  # gated
            rate, padded_s, passes = 50.0 if is_streaming else 16_000 / 384, 0.0, 1
            # Each state has 6 positions of 127 samples, 2 of 7 neighbours and 1 of 3; in the second series 4 of 80
            # samples, then 2 and 1 of 5 neighbours.
            front = (6 * 127 + 2 * 7 * 2 * width + 3 * 2 * width) * width
            if is_streaming:
                front = (4 * 80 + 2 * 5 * 2 * width + 5 * 2 * width + own) * width
        else:
            return None
        sources = 2 * width * own * decoders  # keys and values of a state, for every layer of the decoder
        each = layers * (4 * width**2 + 2 * width * wide) + front + sources
        head = config["vocab_size"] * own * (weight_bytes if head_bytes is None else head_bytes)
        token_bytes = decoders * (6 * own**2 + own * own_wide) * weight_bytes + head
    except (KeyError, TypeError):
        return None
    return SpeechWork(
        padded_s=padded_s,
        multiplies_per_s=rate * each,
        attention=2 * layers * width * rate**2,
        token_bytes=token_bytes,
        sound_bytes=2 * decoders * own * rate * sound_bytes,
        passes=passes,
    )


def _parakeet_work(config: Mapping[str, Any], sound: Mapping[str, Any], weight_bytes: float) -> SpeechWork:
    width, layers, channels = sound["hidden_size"], sound["num_hidden_layers"], sound["subsampling_conv_channels"]
    rate = 100 / sound["subsampling_factor"]
    # Two feed-forward parts, attention with projected positions (two for each state), and a convolution with its gate.
    layer = 4 * width * sound["intermediate_size"] + 6 * width**2 + 3 * width**2
    # The first convolution makes 4 by `mels / 2` positions of a state, the next ones a quarter and a sixteenth of them.
    mels = sound["num_mel_bins"]
    front = 4 * mels / 2 * 9 * channels + (2 * mels / 4 + mels / 8) * channels**2 + channels * mels / 8 * width
    token_bytes, each = 0.0, layers * layer + front
    if (own := config.get("decoder_hidden_size")) is None:
        each += width * config["vocab_size"]
    else:
        # The joint network is computed once for a token and once for a blank, the prediction network for a token.
        joint = 2 * own * (config["vocab_size"] + len(config.get("durations", ())))
        token_bytes = (joint + 8 * own**2 * config.get("num_decoder_layers", 2)) * weight_bytes
    return SpeechWork(
        padded_s=0.0,
        multiplies_per_s=rate * each,
        attention=4 * layers * width * rate**2,  # scores of states and of positions, of which there are twice as many
        token_bytes=token_bytes,
    )


def predict_speech(work: SpeechWork | None, device: str, hardware: Hardware) -> SpeechSpeeds | None:
    """Return the speed of a transcription on `device`. None: there is no work, or a speed of the machine is unknown.

    A window is encoded at a share of the measured multiply-adds/s; then each token of the text reads the decoder at a
    share of the measured bandwidth. Finding speech and windows that are written at once do not count.
    """
    gpu = next((gpu for gpu in hardware.gpus if f"cuda:{gpu.index}" == device), None)
    speeds = hardware.speeds
    rate, bandwidth = (speeds.wide, speeds.ram) if gpu is None else (gpu.place.multiplies, gpu.place.bandwidth)
    rate = speeds.narrow if gpu is None and work is not None and work.is_narrow else rate
    if work is None or rate is None or bandwidth is None:
        return None
    products, steps = (CPU_ENCODER, RAM_SHARE) if gpu is None else (GPU_PRODUCTS, GPU_SHARE)

    def window_s(seconds: float) -> float:
        token_s = work.bytes_per_token(seconds) / (bandwidth * steps) + STEP_S if work.token_bytes else 0.0
        tokens = SPOKEN_TOKENS * seconds + work.passes
        return work.multiplies(seconds) / (rate * products) + tokens * token_s + STEP_S

    why = (
        f"{_giga(work.multiplies(WINDOW_S))} billion multiply-adds for {WINDOW_S:g} s of sound at {products:.0%} of "
        f"{_giga(rate)} billion a second of {device}"
    )
    if work.token_bytes:
        read = _giga(work.bytes_per_token(WINDOW_S))
        why += (
            f"; {SPOKEN_TOKENS:g} tokens a second of speech, each reading {read} GB at {steps:.0%} of "
            f"{_giga(bandwidth)} GB/s"
        )
    return SpeechSpeeds(WINDOW_S / window_s(WINDOW_S), window_s(DICTATION_S), f"{why}. The shares are assumed.")


def tokens_per_s(read_bytes: float, bandwidth: float, speed: Speed, *, is_mixture: bool) -> SpeedRange:
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


def quickest(plans: Sequence[MemoryPlan], hardware: Hardware) -> MemoryPlan:
    """Return the plan whose answers are expected first; the first of them if one speed is unknown. Prompts count where
    their time is known for all."""
    found = [predict(plan, hardware) for plan in plans]
    known = [each for each in found if each is not None]
    if len(known) < len(plans):
        return plans[0]
    has_prompts = all(each.first_token_s for each in known)
    times = [each.answer_s if has_prompts else 1 / each.streams[1] for each in known]
    return plans[times.index(min(times))]


def speed_in_words(speed: SpeedRange | None) -> str:
    """Return the range for display, "" if unknown: `11 to 24 tokens/s`."""
    if speed is None:
        return ""
    least, most = (f"{round_speed(each):,g}" for each in speed)
    return f"about {least} tokens/s" if least == most else f"{least} to {most} tokens/s"


def round_speed(speed: float) -> float:
    """Return tokens/s with two significant digits, since more would claim too much."""
    return float(f"{speed:.2g}")
