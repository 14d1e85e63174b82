"""The memory plan, which is the sizes of an engine on this machine, and the report of planned and measured memory.

Does not know: how the sizes were found (plan.py, plan_attempt.py), how memory was measured (serving/build.py,
runner/opening.py) or is used (loader.py, runner/kv_cache.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from localllm.models.fit.cache_sizes import KVSplit
from localllm.models.fit.far import FarPlan
from localllm.models.fit.pictures import EncoderSizes, PictureSizes, SoundSizes, SourceSizes
from localllm.models.fit.rank_budget import RankPlan
from localllm.models.spec.model_spec import main_group
from localllm.units import format_count


@dataclass(frozen=True, slots=True)
class TokenWork:
    """The bytes of the weights that one token reads, and its multiply-adds without the head."""

    dense_bytes: float  # of the device, that every token reads
    expert_bytes: float  # of the device: the experts that a token chooses
    far_bytes: float  # of RAM or disk: the same
    multiplies: float  # on the device
    far_multiplies: float  # of experts in RAM
    context: tuple[tuple[int | None, float], ...]
    """(window, multiply-adds of a token with each position that it sees) of layers with attention. None: no window."""
    chosen_share: float = 1.0  # of a layer's experts, that a token chooses; 1: there are none

    @property
    def is_mixture(self) -> bool:
        return self.chosen_share < 1

    def distinct(self, rows: int) -> float:
        """Return how many times the experts of one token `rows` tokens read, if experts are chosen evenly."""
        return (1 - (1 - self.chosen_share) ** rows) / self.chosen_share


@dataclass(frozen=True, slots=True)
class SpeechWork:
    """The multiply-adds of encoding a window of sound, and the bytes that a token of its text reads."""

    padded_s: float  # seconds to which every window is padded; 0: it is as long as its sound
    multiplies_per_s: float  # of a second of sound
    attention: float  # multiply-adds between the states of sound, times the square of its seconds
    token_bytes: float  # of weights; 0: the text is read off the states
    sound_bytes: float = 0.0  # keys and values of a second of sound, which every token reads
    passes: int = 0  # of the decoder before the first token
    is_narrow: bool = False  # the encoder multiplies bytes

    def multiplies(self, seconds: float) -> float:
        read_s = max(seconds, self.padded_s)
        return self.multiplies_per_s * read_s + self.attention * read_s**2

    def bytes_per_token(self, seconds: float) -> float:
        return self.token_bytes + self.sound_bytes * max(seconds, self.padded_s)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The sizes of an engine on this machine. The engine uses every number as it is.

    With several ranks, bytes are sums over all of them; on a CPU, where ranks share the memory, free_bytes and
    reserve_bytes count the machine's memory once.
    """

    device: str  # cpu, cuda:0, ...; of the first rank
    dtype: str  # of weights and activations
    kv_dtype: str  # of the KV cache
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    num_blocks: tuple[int, ...]  # of each KV group of the model, the null block 0 included
    block_size: int
    weights_bytes: int  # on the device, in `dtype`
    kv_bytes: int  # num_blocks blocks of each group, exactly
    activation_bytes: int
    reserve_bytes: int  # left free: device context, libraries, other programs
    free_bytes: int  # free memory of the device when the plan was made
    async_depth: int  # steps in flight, 1 or 2
    graph_bytes: int = 0  # kept for CUDA graphs
    num_places: int = 0  # of recurrent states, the null place 0 included; 0: the model has none
    state_bytes: int = 0  # of all places, exactly
    sampler_bytes: int = 0  # part of activation_bytes: what sampling needs beyond the layers
    is_measured: bool = False  # weights and activations come from the allocator, not from arithmetic
    quantization: str = ""  # how matrices are stored and run, for display; empty: not quantised
    notes: tuple[str, ...] = ()  # decisions to show to the user, one sentence each
    comm_bytes: int = 0  # of the exchange between ranks
    target_step_s: float = 0.0  # longest step with prompts while requests decode; 0: tokens alone limit it
    fixed_chunk: int = 0  # tokens of each chunk of a prompt in deterministic mode on a CPU; 0: chunks of any length
    windows: tuple[int | None, ...] = (None,)  # of each KV group, as in kernels/kv_format.py
    pictures: PictureSizes | None = None  # None: the model does not see, or its tower is not loaded
    sources: SourceSizes | None = None  # None: not an encoder-decoder
    sounds: SoundSizes | None = None  # None: the model does not hear, or its tower is not loaded
    kv_ram_bytes: int = 0  # of the machine's memory, for KV blocks that have left the cache, at most
    kv_swap_bytes: int = 0  # of them, what preempted requests may hold
    kv_disk_bytes: int = 0  # of a disk, for the same
    far: FarPlan | None = None  # experts and tables in RAM; None: all weights are on the device
    work: TokenWork | None = None  # of one token; None: unknown
    speech: SpeechWork | None = None  # None: the model does not transcribe, or hears as a model that generates
    ranks: tuple[RankPlan, ...] = ()  # stage after stage; empty: one device, in this process

    @property
    def encoder(self) -> EncoderSizes | None:
        """The memory of the model's encoders; None: it has none, or its towers are not loaded."""
        return EncoderSizes.of([each for each in (self.pictures, self.sounds, self.sources) if each is not None])

    @property
    def place(self) -> str:
        """Return where the model runs, for display: its device, or its number of ranks and their devices."""
        if not self.ranks:
            return self.device if self.far is None else f"{self.device} + {self.far.place}"
        return f"{len(self.ranks)} ranks on {', '.join(dict.fromkeys(rank.device for rank in self.ranks))}"

    @property
    def num_kv_tokens(self) -> int:
        """Token positions that requests can hold at the same time in the group that keeps the most of them."""
        return (self.num_blocks[main_group(self.windows)] - 1) * self.block_size

    @property
    def blocks_in_words(self) -> str:
        """Return the blocks that requests can hold, for display; of several KV groups the largest one's first."""
        main = main_group(self.windows)
        counts = list(zip(self.windows, self.num_blocks, strict=True))
        others = [
            f"{format_count(count - 1)} for layers that see {'all' if window is None else format_count(abs(window))}"
            for group, (window, count) in enumerate(counts) if group != main
        ]  # fmt: skip
        return ", ".join([f"{format_count(self.num_blocks[main] - 1)} of {self.block_size} tokens", *others])

    @property
    def total_bytes(self) -> int:
        """Bytes that the model is expected to use."""
        parts = self.weights_bytes + self.kv_bytes + self.activation_bytes + self.graph_bytes + self.comm_bytes
        return parts + self.state_bytes + (0 if self.far is None else self.far.staging_bytes)

    @property
    def bytes_per_state(self) -> int:
        """Bytes of the recurrent state of one request; 0: the model has none."""
        return self.state_bytes // self.num_places if self.num_places else 0

    @property
    def unused_bytes(self) -> int:
        """Free memory that the plan leaves unused, besides the reserve."""
        return max(0, self.free_bytes - self.reserve_bytes - self.total_bytes)

    def concurrency(self, length: int) -> int:
        """Return how many requests of this length run at the same time; 0: too long for the context."""
        if length > self.max_model_len:
            return 0
        split = KVSplit(self.windows, self.block_size, self.max_num_batched_tokens, self.max_num_seqs)
        return min(self.max_num_seqs, split.concurrency(self.num_blocks, length))


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One use of memory."""

    name: str  # weights, KV cache, activations
    predicted_bytes: int
    measured_bytes: int | None  # None: not measured

    @property
    def error(self) -> float | None:
        """Relative error of the prediction."""
        return self.predicted_bytes / self.measured_bytes - 1 if self.measured_bytes else None


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Predicted and measured memory of one loaded model."""

    parts: tuple[MemoryPart, ...]

    @classmethod
    def of(cls, predicted: MemoryPlan, kept: MemoryPlan, loaded_bytes: int | None) -> Self:
        """Build the report. predicted: the plan before the load; kept: the plan in use; loaded_bytes: growth of the
        process.

        On a GPU all values come from the allocator. On a CPU only the weights are measured, by the growth of the
        process during the load: the KV cache is not touched before it is used, and no step has run yet.
        """
        seen = kept.is_measured
        states = [MemoryPart("recurrent states", predicted.state_bytes, kept.state_bytes if seen else None)]
        states = states if predicted.num_places else []
        return cls(
            (
                MemoryPart("weights", predicted.weights_bytes, kept.weights_bytes if seen else loaded_bytes),
                MemoryPart("KV cache", predicted.kv_bytes, kept.kv_bytes if seen else None),
                *states,
                MemoryPart("activations", predicted.activation_bytes, kept.activation_bytes if seen else None),
            )
        )
