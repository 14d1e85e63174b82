"""Every kernel that is checked, with its variants, best first, and its cases. A new kernel is one entry here.

The last variant of a kernel is its twin in plain torch, the measure of the others: it is not checked, and there is
always a right one left. A feature without a twin ends with a variant that does without the feature.
Does not know: how cases are run, what was found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

from localllm.kernels.checks.case import Case, Subject
from localllm.kernels.checks.floats import (
    activation_cases,
    chosen_cases,
    decode_cases,
    norm_cases,
    prefill_cases,
    product_cases,
    rotating_decode_cases,
    rotation_cases,
)
from localllm.kernels.checks.plain import early_launch_cases, graph_cases, tma_cases
from localllm.kernels.checks.steps import draft_cases, sampling_cases, step_cases
from localllm.kernels.choice import TMA_FEATURES, Feature, Kernel

PACKAGE = "localllm.kernels."


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """One way to compute what a kernel computes."""

    name: str
    without: frozenset[Kernel] = frozenset()
    avoids: frozenset[Feature] = frozenset()
    cost: str = ""  # what a person notices who gets this one instead of the first
    least_arch: int = 0  # GPUs before this compute capability never have it: the next variant is their first


@dataclass(frozen=True, slots=True)
class CheckedKernel:
    """A kernel, or a feature of all kernels."""

    name: str
    variants: tuple[KernelVariant, ...]
    cases: Callable[[Subject], Iterator[Case]]
    needs_model: bool = False
    sources: tuple[str, ...] = ()  # modules below `kernels`, or functions of them: whose errors are this kernel's

    def variants_on(self, arch: int) -> tuple[KernelVariant, ...]:
        """Return the variants that a GPU has, best first."""
        return tuple(variant for variant in self.variants if variant.least_arch <= arch)


def _no_cases(subject: Subject) -> Iterator[Case]:
    """Yield nothing: the check of the whole model compares these kernels, if there is anything to compare."""
    yield from ()


def _twin(kernel: Kernel, cost: str) -> KernelVariant:
    return KernelVariant("PyTorch", without=frozenset({kernel}), cost=cost)


def _kernel_or_twin(
    name: str, group: Kernel, cost: str, cases: Callable[[Subject], Iterator[Case]], *sources: str,
    needs_model: bool = True,
) -> CheckedKernel:  # fmt: skip
    return CheckedKernel(name, (KernelVariant("kernel"), _twin(group, cost)), cases, needs_model, sources)


def _avoiding(name: str, cost: str, *features: Feature, least_arch: int = 0) -> KernelVariant:
    return KernelVariant(name, avoids=frozenset(features), cost=cost, least_arch=least_arch)


SLOW = "several times slower, and steps are not recorded as graphs"
COMPILATION, SIDE_BY_SIDE = "compilation", "side by side"

TABLE: tuple[CheckedKernel, ...] = (
    CheckedKernel(
        COMPILATION,
        (KernelVariant(SIDE_BY_SIDE), KernelVariant("one by one", cost="the first start of a model takes longer")),
        _no_cases,
        needs_model=True,
    ),
    CheckedKernel(
        "early launch",
        (KernelVariant("on", least_arch=90), _avoiding("off", "5 to 20 % slower at one request", "early launch")),
        early_launch_cases,
    ),
    CheckedKernel(
        "graphs",
        (
            KernelVariant("recorded"),
            _avoiding("off", "small models are up to three times slower at one request", "graphs"),
        ),
        graph_cases,
    ),
    CheckedKernel(
        "tensor memory accelerator",
        (KernelVariant("on", least_arch=90), _avoiding("off", "about 10 % slower", *sorted(TMA_FEATURES))),
        tma_cases,
    ),
    _kernel_or_twin(
        "inputs of a step",
        "steps",
        SLOW,
        step_cases,
        "prepare_step",
        needs_model=False,
    ),
    CheckedKernel(
        "drafts",
        (KernelVariant("on"), _avoiding("off", "texts that repeat themselves are not faster than others", "drafts")),
        draft_cases,
        sources=("accept_drafts", "propose_lookup"),
    ),
    _kernel_or_twin("sampling", "sampling", SLOW, sampling_cases, "sampling", needs_model=False),
    CheckedKernel(
        "products",
        (
            KernelVariant("TMA", least_arch=90),
            _avoiding("pointers", "about 5 % slower", "product TMA"),
            _avoiding("one program a tile", "about 10 % slower", "product TMA", "product merge"),
            _avoiding("cuBLAS", "about 20 % slower", "product TMA", "product merge", "product kernel"),
            _twin("products", SLOW),
        ),
        product_cases,
        True,
        (
            "skinny_gemm",
            "linear",
            "planar",
            "w8a8_gemm",
            "fp8_linear",
            "int8_linear",
            "int4_linear",
            "quantize",
            "split_sum",
            "gguf_linear",
        ),
    ),
    CheckedKernel(
        "decode attention",
        (
            KernelVariant("TMA", least_arch=90),
            _avoiding("pointers", "about 5 % slower", "decode TMA"),
            _avoiding("merge by a second kernel", "about 5 % slower", "decode TMA", "decode merge"),
            _avoiding("the prefill kernel", "slower with long contexts", "decode TMA", "decode merge", "decode kernel"),
            _twin("attention", SLOW),
        ),
        decode_cases,
        True,
        ("paged_attention.device._launch_decode", "paged_attention.device.filled_list"),
    ),
    CheckedKernel(
        "rotation in decode attention",
        (
            KernelVariant("on", least_arch=80),
            _avoiding("a kernel of its own", "about 5 % slower at one request", "decode rotation"),
        ),
        rotating_decode_cases,
        True,
        ("paged_attention.device._launch_rotating_decode",),
    ),
    CheckedKernel(
        "prefill attention",
        (
            KernelVariant("TMA", least_arch=90),
            _avoiding("pointers", "long prompts about 10 % slower", "prefill TMA"),
            _avoiding("two stages", "long prompts about 20 % slower", "prefill TMA", "prefill stages"),
            _twin("attention", SLOW),
        ),
        prefill_cases,
        True,
        ("paged_attention",),
    ),
    _kernel_or_twin("attention to chosen keys", "indexer", SLOW, chosen_cases, "indexer"),
    _kernel_or_twin("rotation", "rotation", "about 20 % slower", rotation_cases, "rotary_store_kv"),
    _kernel_or_twin("norms", "norms", "about 20 % slower", norm_cases, "rms_norm", "layer_norm"),
    _kernel_or_twin("activations", "activations", "about 10 % slower", activation_cases, "gated"),
    CheckedKernel(
        "experts",
        (
            KernelVariant("TMA", least_arch=90),
            _avoiding("pointers", "about 10 % slower", "expert TMA"),
            _twin("experts", SLOW),
        ),
        _no_cases,
        True,
        ("moe",),
    ),
    _kernel_or_twin(
        "recurrent layers",
        "recurrent",
        SLOW,
        _no_cases,
        "causal_conv",
        "gated_delta",
        "gated_norm",
        "selective_scan",
    ),
    _kernel_or_twin("adapters", "adapters", SLOW, _no_cases, "lora"),
)

SUMS = CheckedKernel(
    "sums over ranks",
    (KernelVariant("one shot"), KernelVariant("NCCL", cost="up to 20 % slower at one request")),
    _no_cases,
    needs_model=True,
)
"""Sums that ranks compare with each other (ranks/one_shot.py). A model on one GPU has none."""


def kernel_of(error: BaseException, table: tuple[CheckedKernel, ...] = TABLE) -> CheckedKernel | None:
    """Return the kernel whose launch or compilation raised an error, by the innermost frame of the kernels' package."""
    found: CheckedKernel | None = None
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        if module.startswith(PACKAGE):
            place = f"{module.removeprefix(PACKAGE)}.{trace.tb_frame.f_code.co_name}"
            found = next((kernel for kernel in table if _is_in(place, kernel.sources)), found)
        trace = trace.tb_next
    return found


def _is_in(place: str, sources: tuple[str, ...]) -> bool:
    return any(place.startswith(f"{source}.") or place == source for source in sources)
