"""The experts and lookup tables that a plan keeps in RAM beside a GPU, and the time of a token that reads both.

The routed experts of whole layers leave the GPU, the last layers first, as few layers as a plan needs; of a dense model
its feed-forward parts, which are as one expert that each token chooses. Everything else stays: attention, KV cache,
router, shared experts and head. Experts in RAM are computed by the CPU where they are, since a desktop's RAM is read
faster than it is copied to a GPU; only long prompts copy them.

Before them go tables of which a token reads one row: an embedding that is not also the head, and per-layer embeddings.
The GPU reads the rows where they are, and the time of a token leaves them out.

    seconds of a token = G / (0.8 B_gpu) + F / (0.78 B_ram) + crossings * x + t0

If RAM does not hold them either, the experts of these layers are on disk, and RAM keeps as many as it has place for:

    + misses * F / B_disk

G, F: bytes of the GPU and of RAM that a token reads. B: bytes/s of both. The two shares and x, what it costs to wait
for the CPU once in a layer, are fitted to published speeds of llama.cpp (docs/lab.md, "speeds with experts in RAM").
Does not know: torch, files, how experts are computed (models/layers/far.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from typing import NamedTuple

from localllm.config.settings import EngineConfig
from localllm.errors import ConfigError, DoesNotFit, UnsupportedOption
from localllm.files.record_file import padded
from localllm.kernels.cpu.native.choice import chosen_set
from localllm.machine.hardware import Gpu
from localllm.models.fit.rank_budget import ResidentBytes
from localllm.models.spec.mixture import STAGING_PLACES, staged_bytes
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.shard import Shard
from localllm.units import format_bytes

GPU_SHARE, RAM_SHARE = 0.8, 0.78  # of the bandwidth that products reach
CROSSING_S = 85e-6  # of one layer that the GPU waits for
STEP_S = 0.003  # launches and sampling
LEAST_SHARE, MOST_SHARE = 0.6, 0.95  # of the bandwidth, for the range that is shown
RECENCY = 0.2
"""The best share of hits is the share of experts in RAM to this power: 0.66 for an eighth of them, 0.87 for half.
Published traces of keeping the latest used experts have 0.44 to 0.95; the worst is the share itself."""
CACHE_SHARE = 0.8  # of the RAM that is left, for experts that are read from disk
SLOW_TOKENS_PER_S = 1.0  # below which a place is not chosen by itself
MOST_TRIED = 20_000  # sets of layers


class LayerExperts(NamedTuple):
    """The routed experts of one layer."""

    layer: int
    gpu_bytes: int  # on the device that was asked for
    ram_bytes: int  # in RAM, in the layout of the CPU


class TableBytes(NamedTuple):
    """A table of which a token reads one row, with the same layout on a GPU and in RAM beside it."""

    name: str  # embedding, or per-layer embeddings
    num_bytes: int


ExpertBytes = Callable[[str, str, str | None], Sequence[LayerExperts]]
"""Returns the layers with experts in ascending order, for a device, a dtype and a quantisation at load."""
LookedUp = Callable[[str, str, str | None], Sequence[TableBytes]]
"""Returns the tables, for the same."""


@dataclass(frozen=True, slots=True)
class CheckpointBytes:
    """`ResidentBytes` of a checkpoint, and the bytes of its experts.

    tables: those that a token reads a row of; None: not known. looked_up: their bytes by device and dtype, where the
    tables themselves are not known; None: not known, counted as read.
    """

    whole: ResidentBytes
    experts: ExpertBytes
    looked_up: Callable[[str, str], float] | None = None
    tables: LookedUp | None = None

    def __call__(
        self, device: str, dtype: str, max_model_len: int, quantization: str | None, shard: Shard | None = None, /
    ) -> int:
        if shard is None:
            return self.whole(device, dtype, max_model_len, quantization)
        return self.whole(device, dtype, max_model_len, quantization, shard)


class LookupTables(NamedTuple):
    """The lookup tables of a model beside a GPU."""

    movable: tuple[TableBytes, ...] = ()  # to RAM
    near_bytes: int | None = None  # of those that stay; None: not known

    def near(self) -> LookupTables:
        """Return the same with all of them on the GPU."""
        moved = sum(each.num_bytes for each in self.movable)
        return LookupTables((), None if self.near_bytes is None else self.near_bytes + moved)


class DiskPlan(NamedTuple):
    """The experts that are read from disk, and how many of them RAM keeps."""

    file_bytes: int  # of all of them
    cache_bytes: int  # of RAM, at most

    @property
    def hits(self) -> tuple[float, float]:
        """The least and the largest share of a token's experts that are expected in RAM."""
        share = min(1.0, self.cache_bytes / self.file_bytes)
        return share, share**RECENCY


@dataclass(frozen=True, slots=True)
class FarPlan:
    """The layers whose experts are in RAM, or on disk, and the tables that are in RAM."""

    layers: tuple[int, ...]
    num_layers: int  # that have experts
    gpu_bytes: int  # that these experts and the tables do not take on the GPU
    ram_bytes: int  # that the tables take, and the experts or their cache
    read_bytes: int  # of RAM, by one token
    idle_bytes: int  # of the weights on the GPU, that one token does not read
    disk: DiskPlan | None = None  # None: none of them are on disk
    staging_bytes: int = 0  # of the GPU, for experts that are copied to it; 0: it computes no prompts with them
    unpacked_bytes: int = 0  # of a step, for the experts that are computed at a time
    stream_from: int = 0  # tokens of a step from which they are; 0: none, or not measured yet
    what: str = "experts"  # or "feed-forward parts", of a dense model
    tables: tuple[TableBytes, ...] = ()  # in RAM

    @property
    def place(self) -> str:
        return "RAM" if self.disk is None else "disk"

    @property
    def expert_bytes(self) -> int:
        """Bytes of RAM that the experts take, or their cache."""
        return self.ram_bytes - sum(each.num_bytes for each in self.tables)

    @property
    def in_ram(self) -> str:
        """Parts in RAM with their bytes, for display: experts in RAM 46.7 GiB, embedding in RAM 1.1 GiB."""
        parts = [f"{self.what} in RAM {format_bytes(self.expert_bytes)}"] if self.layers else []
        return ", ".join([*parts, *(f"{each.name} in RAM {format_bytes(each.num_bytes)}" for each in self.tables)])

    def words(self) -> str:
        """Return what is in RAM or on disk, as sentences for the user."""
        return " ".join(filter(None, (self._words_on_experts() if self.layers else "", self._words_on_tables())))

    def _words_on_tables(self) -> str:
        if not self.tables:
            return ""
        names = " and ".join(f"the {each.name} ({format_bytes(each.num_bytes)})" for each in self.tables)
        verb = "are" if len(self.tables) > 1 or self.tables[0].name.endswith("s") else "is"
        return f"{names[0].upper()}{names[1:]} {verb} in RAM, where the GPU reads a row for each token."

    def _words_on_experts(self) -> str:
        count = (
            "all layers" if len(self.layers) == self.num_layers else f"{len(self.layers)} of {self.num_layers} layers"
        )
        if self.disk is not None:
            return (
                f"The experts of {count} are on disk ({format_bytes(self.disk.file_bytes)}); RAM keeps the latest used "
                f"({format_bytes(self.disk.cache_bytes)}). The first start writes them to a file, and each step of a "
                "prompt reads nearly all of them."
            )
        prompts = ", prompts included" if not self.staging_bytes else "; long prompts are computed by the GPU"
        return (
            f"The {self.what} of {count} are in RAM ({format_bytes(self.expert_bytes)}) and computed by the "
            f"CPU{prompts}: slower than a GPU that holds all of them."
        )


def token_s(
    gpu_bytes: float, gpu_bandwidth: float, ram_bytes: float, ram_bandwidth: float, crossings: int, *,
    gpu_share: float = GPU_SHARE, ram_share: float = RAM_SHARE, step_s: float = STEP_S,
) -> float:  # fmt: skip
    """Return the seconds of one token of a lone answer with a short context. Bytes: that it reads; bandwidths: bytes/s;
    crossings: layers with experts in RAM."""
    reads = gpu_bytes / (gpu_share * gpu_bandwidth) + ram_bytes / (ram_share * ram_bandwidth)
    return reads + crossings * CROSSING_S + step_s


def far_plan(
    experts: Sequence[LayerExperts], layers: Collection[int], spec: ModelSpec, tables: LookupTables, *,
    streams: bool = False,
) -> FarPlan:  # fmt: skip
    """Return the plan with the experts of these layers and the movable tables in RAM. Of tables that are not known, an
    embedding of its own is counted in 16 bits. streams: whether the GPU computes long prompts with the experts."""
    mixture = spec.mixture
    top_k, num_experts = (1, 1) if mixture is None else (mixture.top_k, mixture.num_experts)
    near_tables = tables.near_bytes
    if near_tables is None:
        near_tables = 0 if spec.tie_word_embeddings else spec.vocab_size * spec.hidden_size * 2
    moved = [each for each in experts if each.layer in layers]
    near = [each for each in experts if each.layer not in layers]
    used, in_ram = top_k / num_experts, sum(each.num_bytes for each in tables.movable)
    staged = [staged_bytes(max(1, each.ram_bytes // num_experts), num_experts) for each in moved]
    unpacked = [each.gpu_bytes * size // each.ram_bytes for each, size in zip(moved, staged, strict=True)]
    return FarPlan(
        layers=tuple(each.layer for each in moved),
        num_layers=len(experts),
        gpu_bytes=sum(each.gpu_bytes for each in moved) + in_ram,
        ram_bytes=sum(each.ram_bytes for each in moved) + in_ram,
        read_bytes=int(sum(each.ram_bytes for each in moved) * used),
        idle_bytes=near_tables + int(sum(each.gpu_bytes for each in near) * (1 - used)),
        staging_bytes=STAGING_PLACES * max(staged) if streams else 0,
        unpacked_bytes=max(unpacked) if streams else 0,
        what="feed-forward parts" if mixture is None else "experts",
        tables=tables.movable,
    )


def last_layers(experts: Sequence[LayerExperts], count: int) -> tuple[int, ...]:
    return tuple(each.layer for each in experts[len(experts) - count :])


def quickest_layers(
    experts: Sequence[LayerExperts], least_bytes: int, token_s_of: Callable[[LayerExperts], float]
) -> tuple[int, ...]:
    """Return the layers whose experts free `least_bytes` of the GPU and make a token the least slower: among layers of
    equal size as few as needed, the last ones.

    token_s_of: seconds by which a token becomes slower if a layer's experts leave the GPU. Layers of one checkpoint
    have one to three sizes (Q4_K_M stores some in more bits), so all numbers of each size are tried. With many sizes
    the cheapest layers per byte are taken, at most one more than needed.
    """
    kinds: dict[tuple[int, int], list[LayerExperts]] = {}
    for each in reversed(experts):
        kinds.setdefault((each.gpu_bytes, each.ram_bytes), []).append(each)
    groups = sorted(kinds.values(), key=lambda group: token_s_of(group[0]) / max(1, group[0].gpu_bytes))
    if math.prod(len(group) + 1 for group in groups) > MOST_TRIED:
        chosen = list[LayerExperts]()
        for each in (each for group in groups for each in group):
            if sum(other.gpu_bytes for other in chosen) < least_bytes:
                chosen.append(each)
        return tuple(sorted(each.layer for each in chosen))

    def cost(counts: tuple[int, ...]) -> tuple[float, int]:
        pairs = list(zip(counts, groups, strict=True))
        is_enough = sum(count * group[0].gpu_bytes for count, group in pairs) >= least_bytes
        return sum(count * token_s_of(group[0]) for count, group in pairs) if is_enough else math.inf, sum(counts)

    best = min(product(*(range(len(group) + 1) for group in groups)), key=cost)
    return tuple(sorted(each.layer for count, group in zip(best, groups, strict=True) for each in group[:count]))


LONG_STEPS = (8192, 4096)
"""Tokens of a step, tried in this order where experts are copied to the GPU: a step copies all of them whatever its
size, so that four times as many tokens are up to four times as fast, and only memory speaks against them."""


def most_more(num_layers: int) -> int:
    """Return how many more layers may be in RAM so that steps can be longer: their share of a token's time is small."""
    return 1 + num_layers // 16


def stream_threshold(cpu_s: Mapping[int, float], copy_s: float, most: int) -> int:
    """Return the fewest tokens of a step for which the CPU takes as long as a copy of the same experts; 0: more than
    `most`. cpu_s: seconds of the CPU by tokens, linear in between and beyond."""
    rows = sorted(cpu_s)
    if cpu_s[rows[0]] >= copy_s:
        return max(1, math.ceil(rows[0] * copy_s / cpu_s[rows[0]]))
    for low, high in pairwise(rows):
        each_s = (cpu_s[high] - cpu_s[low]) / (high - low)
        if (cpu_s[high] >= copy_s or high == rows[-1]) and each_s > 0:
            found = low + math.ceil((copy_s - cpu_s[low]) / each_s)
            return found if found <= most else 0
    return 0


def fewest_layers(most: int, fits: Callable[[int], bool]) -> int | None:
    """Return the least count from 1 to `most` that fits, by bisection: one more layer in RAM never takes more of the
    GPU. None: not even all of them."""
    if not most or not fits(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def why_not_dense(spec: ModelSpec) -> str:
    """Return why the feed-forward parts of a dense model cannot be in RAM; empty: they can."""
    if spec.layer_kinds or spec.layer_sparsity or spec.mlp_factors or spec.source is not None:
        return f"{spec.architecture} has a feed-forward part of its own kind"
    if spec.hidden_act in (("silu", "gelu", "gelu_tanh") if spec.mlp_gated else ("relu2",)):
        return ""
    gate = "" if spec.mlp_gated else "out a gate and with"
    return f"{spec.architecture} has a feed-forward part with{gate} {spec.hidden_act}"


@dataclass(frozen=True)
class FarChoice:
    """The experts in RAM or on disk that the settings ask for, and those that a model and this machine allow: beside
    one GPU, or on the CPU."""

    config: EngineConfig
    spec: ModelSpec
    resident: ResidentBytes | None
    gpu: Gpu | None

    @cached_property
    def why_none(self) -> str:
        """The reason why no experts can be in RAM; empty: they can."""
        if self.spec.mixture is None and self.config.weights_on == "disk":
            return f"{self.spec.architecture} has no experts, and each token reads all of a dense model."
        if self.spec.implementation != "localllm":
            return "It runs through transformers' code, whose parts are not localllm's."
        if self.spec.mixture is None and (why := why_not_dense(self.spec)):
            return f"{why}, which stays on the GPU."
        if self.config.deterministic:
            return "--deterministic needs the same bits for any number of rows, and the CPU's products differ."
        if not chosen_set()[0]:
            return f"Weights in RAM beside a GPU need the native library. {chosen_set()[1]}"
        if not isinstance(self.resident, CheckpointBytes):
            return "The sizes of its parts are not known before its files are read."
        return ""

    def tables(self, dtype: str) -> LookupTables:
        """Return the tables, which may leave the GPU unless the settings say otherwise. Raises `UnsupportedOption` if
        the settings ask for tables in RAM and there are none."""
        asked, known = self.config.cpu_embeddings, getattr(self.resident, "tables", None)
        if self.gpu is None:
            return LookupTables()
        why = "The sizes of its parts are not known before its files are read."
        if self.spec.implementation != "localllm":
            why = "It runs through transformers' code, whose parts are not localllm's."
        elif known is not None:
            found = tuple(known(f"cuda:{self.gpu.index}", dtype, self.config.quantization))
            if found or asked != "on":
                return LookupTables(found, 0).near() if asked == "off" else LookupTables(found, 0)
            why = "Its embedding is also its head, of which a token reads all, and it has no per-layer embeddings."
        if asked == "on":
            raise UnsupportedOption(
                "--cpu-embeddings on is not supported for this model.", why, "Leave --cpu-embeddings out.",
                param="cpu_embeddings",
            )  # fmt: skip
        return LookupTables()

    def require_possible(self) -> None:
        """Raise `UnsupportedOption` if the settings ask for what cannot be. On a CPU everything is in RAM."""
        on_disk, flag = self.config.weights_on == "disk", self.config.far_flag
        if on_disk and self.gpu is not None and self.config.cpu_embeddings == "on":
            raise UnsupportedOption(
                "--cpu-embeddings on cannot be combined with --weights-on disk.",
                "RAM does not hold the experts, and tables would take some of what keeps the latest used ones.",
                "Leave one of them out.", param="cpu_embeddings",
            )  # fmt: skip
        hint = f"Leave {flag} out{'' if on_disk else ', or --device cpu'}."
        if self.why_none and ((self.config.far_layers and self.gpu is not None) or on_disk):
            raise UnsupportedOption(
                f"{flag} is not supported for this model.", self.why_none, hint,
                param="weights_on" if on_disk else "n_cpu_moe",
            )  # fmt: skip

    def experts(self, dtype: str) -> Sequence[LayerExperts]:
        assert isinstance(self.resident, CheckpointBytes)
        device = "cpu" if self.gpu is None else f"cuda:{self.gpu.index}"
        return self.resident.experts(device, dtype, self.config.quantization)

    def asked(self, experts: Sequence[LayerExperts]) -> int | None:
        """Return how many layers the settings move; None: as few as needed."""
        gib = self.config.cpu_offload_gb
        if not gib:
            count = self.config.far_layers
            return None if count is None else min(count, len(experts))
        for count in range(1, len(experts) + 1):
            if sum(each.gpu_bytes for each in experts[-count:]) >= gib * 2**30:
                return count
        raise ConfigError(
            f"--cpu-offload-gb {gib:g} is more than can leave the GPU.",
            f"What can leave takes {format_bytes(sum(each.gpu_bytes for each in experts))}; the rest stays on the GPU.",
            "--n-cpu-moe all", param="cpu_offload_gb",
        )  # fmt: skip

    def require_ram(self, far: FarPlan, gpu_bytes: int, free_bytes: int, reserve_bytes: int) -> None:
        """Raise `DoesNotFit` if RAM does not hold the experts. gpu_bytes: that the rest needs of the GPU."""
        assert self.gpu is not None
        room = max(0, free_bytes - reserve_bytes)
        if far.ram_bytes > room:
            raise DoesNotFit(
                "The model does not fit on this GPU and in RAM.",
                f"{format_bytes(gpu_bytes)} on the GPU and {format_bytes(far.ram_bytes)} in RAM are needed; "
                f"{format_bytes(self.gpu.free_bytes)} and {format_bytes(room)} are free.",
                "Close other programs, --weights-on disk (slow), or a smaller model or one with fewer bits per weight.",
                param="n_cpu_moe",
            )  # fmt: skip

    def on_disk(self, far: FarPlan, room: int) -> FarPlan:
        """Return the plan with these experts on disk. room: bytes of RAM that everything else leaves. Raises
        `DoesNotFit` if RAM does not hold the experts that one token needs in one layer."""
        assert self.spec.mixture is not None
        each = padded(far.ram_bytes // (len(far.layers) * self.spec.mixture.num_experts))
        asked, least = int(self.config.expert_cache_gib * 2**30), each * self.spec.mixture.top_k
        cache = min(far.ram_bytes, asked or max(least, int(room * CACHE_SHARE)))
        if not least <= cache <= room:
            raise DoesNotFit(
                "RAM does not hold the cache of the experts on disk.",
                f"{format_bytes(max(0, room))} are left; {format_bytes(cache)} are "
                f"{'set' if asked else 'needed'}, and a token needs {format_bytes(least)} in each layer.",
                "Close other programs, or set another --expert-cache-gib." if asked else "Close other programs.",
                param="expert_cache_gib",
            )  # fmt: skip
        return replace(far, ram_bytes=cache, disk=DiskPlan(far.ram_bytes, cache))
