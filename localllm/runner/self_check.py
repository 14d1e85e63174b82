"""Compare what a GPU will be served with against plain torch, and fall back by name where a kernel is wrong.

    check_device(...)      before any weights are read: early launches, graphs, TMA, inputs of a step, drafts, sampling
    check_model(...)       with the model's own matrices and shapes, then the whole model against its twins
    next_choice(...)       after an error of a kernel in the warm-up: the next variant of the kernel that raised it

Each comparison is made once for a GPU, driver, torch, Triton and source of the kernels (kernels/checks/record.py);
later starts read a file. One check runs at a time in a process.
Does not know: the kernels and their variants (kernels/checks/table.py), who starts again after a lost GPU.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from localllm.config.settings import EngineConfig
from localllm.engine.params import SamplingParams
from localllm.engine.step import KernelFallBack, NewSlot, Row, StateUse, StepPlan
from localllm.errors import ConfigError, DeviceLost
from localllm.kernels.checks.case import Case, CheckedProduct, IndexReads, Judgement, Subject
from localllm.kernels.checks.choose import Chooser, FallBack, KernelChoice, without_failed
from localllm.kernels.checks.record import CheckRecord, RecordKey, VariantFailure, folder_of
from localllm.kernels.checks.table import COMPILATION, SIDE_BY_SIDE, TABLE, CheckedKernel, KernelVariant, kernel_of
from localllm.kernels.choice import ALL_KERNELS
from localllm.kernels.launch import DEFAULTS, INTERPRETED, LaunchOptions, launch_options
from localllm.kernels.layer_cache import kv_of
from localllm.kernels.paged_attention import KVReads
from localllm.kernels.triton_build import compile_ahead, compiled_mark
from localllm.machine.hardware import count_cores
from localllm.models.fit import MemoryPlan
from localllm.models.inputs import CausalModel
from localllm.models.layers.linear import Linear
from localllm.models.layers.mlp import GatedMLP
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.weights.parameters import parts_of_kind
from localllm.runner.graphs import CudaCapture
from localllm.runner.kv_cache import KVCache
from localllm.runner.runner import TorchRunner

log = logging.getLogger(__name__)

MOST_OUTPUTS = 4096
"""Outputs of a matrix that are compared: the others are computed in the same way."""
PROMPT_TOKENS, DECODES = 80, 4
MOST_DIVERGENCE, LEAST_AGREEMENT = 0.01, 0.95
"""Mean KL divergence of a whole model's tokens from its twins', and the share of tokens with the same argmax."""
QUANTISED_DIVERGENCE, QUANTISED_AGREEMENT = 0.1, 0.8
"""The same for a model whose kernels round the inputs of products to 8 bits, which the twins do not."""
OpenRunner = Callable[[LaunchOptions], TorchRunner]
Report = Callable[[str], None]


class OpenOnCache(Protocol):
    """Opens a runner over a KV cache."""

    def __call__(self, kv: KVCache, options: LaunchOptions, *, has_drafts: bool = False) -> TorchRunner: ...


def _to_nobody(text: str) -> None:
    """Report to nobody."""


_one_at_a_time = threading.Lock()


def is_checked(config: EngineConfig, device: torch.device) -> bool:
    """Return whether kernels compute on this device, so that there is something to check."""
    return device.type == "cuda" and config.kernels != "torch"


def read_record(device: torch.device) -> CheckRecord:
    return CheckRecord.read(folder_of(device), RecordKey.here())


def known_choice(
    config: EngineConfig, device: torch.device, base: LaunchOptions = DEFAULTS, table: Sequence[CheckedKernel] = TABLE
) -> KernelChoice:  # fmt: skip
    """Return the best variants that have not failed on this GPU, without any comparison."""
    if not is_checked(config, device):
        return KernelChoice()
    return without_failed(read_record(device), Subject(device).arch, base, table)


def check_device(
    config: EngineConfig, device: torch.device, base: LaunchOptions, subject: Subject | None = None,
    report: Report = _to_nobody,
) -> KernelChoice:  # fmt: skip
    """Compare what needs no model. Raises `CheckStoppedDevice`, and `ConfigError` where `--kernels checked` asks for
    more than could be compared."""
    if config.check_kernels == "off":
        return known_choice(config, device, base)
    record = None if config.enforce_eager else CudaCapture(device) if device.type == "cuda" else None
    subject = subject or Subject(device, record=record)
    with _one_at_a_time:
        chooser = Chooser(subject, read_record(device), base, again=config.check_kernels == "always")
        _compile_ahead(chooser.record, "no model", lambda: chooser.rehearse(with_model=False), report)
        return _chosen(config, chooser, lambda: chooser.choose(with_model=False))


def check_model(
    model: CausalModel, spec: ModelSpec, config: EngineConfig, plan: MemoryPlan, device: torch.device,
    base: LaunchOptions, before: KernelChoice, open_runner: OpenOnCache, report: Report = _to_nobody,
) -> KernelChoice:  # fmt: skip
    """Compile what a model launches, then compare the kernels at its shapes and the whole model. before: what
    `check_device` chose. open_runner: opens a runner over a small cache. Raises as `check_device` does."""
    subject, record = subject_of(model, spec, plan, device), read_record(device)
    dynamic = any(product.quantises_inputs for product in subject.products)

    def opened(options: LaunchOptions) -> TorchRunner:
        return open_runner(small_cache(spec, plan, device), options)

    table = (*TABLE, whole_model(spec, plan, opened, dynamic))
    chooser = Chooser(subject, record, base, again=config.check_kernels == "always", table=table)

    def rehearse() -> None:
        if config.check_kernels != "off":
            chooser.rehearse(with_model=True)
        options = without_failed(record, subject.arch, base).options(base)
        runner = open_runner(small_cache(spec, plan, device), options, has_drafts=has_drafts(config, options))
        try:
            runner.warm_up()
        finally:
            runner.close()

    with _one_at_a_time:
        _compile_ahead(record, served_as(spec, config, plan, base), rehearse, report)
        if config.check_kernels == "off":
            return before
        report("checking kernels")
        return _chosen(config, chooser, lambda: chooser.choose(with_model=True, before=before), before)


def has_drafts(config: EngineConfig, options: LaunchOptions) -> bool:
    """Return whether steps of a runner may have drafts, as far as the settings and the kernels go."""
    return not config.speculation.is_off and "drafts" not in options.avoids


def served_as(spec: ModelSpec, config: EngineConfig, plan: MemoryPlan, base: LaunchOptions) -> str:
    """Return what decides which kernels a model launches."""
    return repr((
        spec, plan.dtype, plan.kv_dtype, plan.max_num_seqs, plan.max_num_batched_tokens, plan.max_model_len,
        plan.block_size, base.deterministic, base.programmatic_launch, sorted(base.without), sorted(base.avoids),
        config.speculation, config.enable_lora, config.check_kernels,
    ))  # fmt: skip


SPEED = "speed of graphs"


def slower_graphs(served: str, device: torch.device, runner: TorchRunner | None = None) -> str:
    """Return why steps of a model are better launched than replayed, as measured at its first start on this GPU; empty
    if they are not. runner: measures where no start has; None: nothing is measured."""
    record, case = read_record(device), hashlib.blake2b(served.encode(), digest_size=8).hexdigest()
    if (known := record.failed_with(SPEED, "recorded", case)) is not None:
        return known.why
    if runner is None or record.passed_with(SPEED, "recorded", case):
        return ""
    replayed, launched = (runner.step_s(replayed=each) for each in (True, False))
    if replayed is None or launched is None:
        return ""
    why = ""
    if replayed <= launched:
        record.pass_(SPEED, "recorded", case, replayed / launched)
    else:
        why = f"a step takes {replayed * 1e3:.2f} ms as a graph, and {launched * 1e3:.2f} ms kernel by kernel"
        record.fail(VariantFailure(SPEED, "recorded", case, why))
    log.info("step of one request replayed=%.3fms launched=%.3fms", replayed * 1e3, launched * 1e3)
    record.write()
    return why


def compile_ahead_of_rank(
    config: EngineConfig, device: torch.device, served: str, launch: Callable[[], None], report: Report,
    share: tuple[int, int],
) -> None:  # fmt: skip
    """Compile what a rank launches, side by side. share: its number, and how many ranks there are on this machine: they
    divide the cores and the kernels."""
    if is_checked(config, device):
        with _one_at_a_time:
            _compile_ahead(read_record(device), served, launch, report, share)


def _compile_ahead(
    record: CheckRecord, served: str, launch: Callable[[], None], report: Report, share: tuple[int, int] = (0, 1)
) -> None:
    """Compile what `launch` launches side by side, unless this was done before, or has stopped an earlier start."""
    if INTERPRETED or record.failed_with(COMPILATION, SIDE_BY_SIDE):
        return
    mark = compiled_mark(f"{record.key} {served}")
    if mark.exists():
        return
    begun, count = time.monotonic(), 0
    record.begin(COMPILATION, SIDE_BY_SIDE, "all kernels")  # a compiler can end the process
    try:
        count = compile_ahead(
            launch, max(1, count_cores() // share[1]),
            lambda count: report(f"compiling {count} kernels for this GPU, once"), share,
        )  # fmt: skip
    except TimeoutError as error:
        record.fail(VariantFailure(COMPILATION, SIDE_BY_SIDE, "all kernels", str(error)))
        record.write()
    except Exception:  # each kernel is compiled at its launch, and an error is raised there again
        log.exception("kernels could not be compiled ahead")
    record.end()
    log.info("kernels compiled ahead count=%d seconds=%.1f", count, time.monotonic() - begun)
    with suppress(OSError):
        mark.touch()


def _chosen(
    config: EngineConfig, chooser: Chooser, choose: Callable[[], KernelChoice], before: KernelChoice | None = None
) -> KernelChoice:
    """Make the choice. A fault of the checks themselves does not end a load, unless checks were demanded."""
    try:
        choice = choose()
    except DeviceLost:
        raise
    except Exception as error:
        if config.kernels == "checked":
            raise ConfigError("The kernels could not be checked.", f"{type(error).__name__}: {error}", HINT) from error
        log.exception("kernels could not be checked")
        return before or without_failed(chooser.record, chooser.subject.arch, chooser.base)
    if choice.unverified and config.kernels == "checked":
        raise ConfigError("A kernel could not be checked.", f"Too little memory for {choice.unverified[0]}.", HINT)
    for fall_back in choice.fall_backs:
        log.warning("kernel fall-back %s", fall_back)
    if choice.summary:
        log.info("kernels %s", choice.summary)
    return choice


HINT = "--kernels auto serves kernels that were not checked, --kernels torch serves none"


def next_choice(choice: KernelChoice, error: Exception, device: torch.device) -> KernelChoice | None:
    """Return the choice with the next variant of the kernel that raised an error; None if there is none left. The
    variant counts as failed from now on. An error of no known kernel leaves PyTorch alone."""
    subject, record = Subject(device), read_record(device)
    kernel = kernel_of(error)
    why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if kernel is None:
        if choice.chosen.get(WHOLE) == ALONE:
            return None
        log.warning("warm-up failed, and no kernel is known to be the reason: PyTorch computes alone", exc_info=error)
        fall_back = FallBack(WHOLE, ALONE, (VariantFailure(WHOLE, "kernels", "warm-up", why),))
        return replace(choice, chosen={**choice.chosen, WHOLE: ALONE}, fall_backs=(*choice.fall_backs, fall_back))
    variants = kernel.variants_on(subject.arch)
    now = choice.chosen.get(kernel.name, variants[0])
    later = variants[variants.index(now) + 1 :] if now in variants else ()
    if not later:
        return None
    failure = VariantFailure(kernel.name, now.name, "warm-up", why)
    record.fail(failure)
    record.write()
    others = tuple(each for each in choice.fall_backs if each.kernel != kernel.name)
    earlier = next((each.failures for each in choice.fall_backs if each.kernel == kernel.name), ())
    fall_back = FallBack(kernel.name, later[0], (*earlier, failure))
    log.warning("kernel fall-back %s", fall_back)
    return replace(choice, chosen={**choice.chosen, kernel.name: later[0]}, fall_backs=(*others, fall_back))


def fall_backs_of(choice: KernelChoice) -> tuple[KernelFallBack, ...]:
    """Return the fall-backs as the engine's statistics have them."""
    return tuple(KernelFallBack(each.kernel, each.variant.name, str(each)) for each in choice.fall_backs)


# ---- the model's shapes ----------------------------------------------------------------------------------------------


def subject_of(model: CausalModel, spec: ModelSpec, plan: MemoryPlan, device: torch.device) -> Subject:
    """Return the shapes of a model, and one matrix of each kind."""
    cache = small_cache(spec, plan, device)
    gates = {each.gate_up for each in parts_of_kind(model, GatedMLP) if isinstance(each.activation, str)}
    widths = {each.weight.shape[0] // 2 for each in gates if isinstance(each, Linear)}
    index, indexer = spec.index, None
    if index is not None and spec.latent is not None:
        kept = next(kv for kv in map(kv_of, cache.layers) if kv is not None and kv.index_keys is not None)
        assert kept.index_keys is not None
        reads = KVReads(spec.num_heads, tuple(kept.k.shape), kept.k.dtype, None)
        indexer = IndexReads(
            reads, spec.latent.rope_size, index.topk, index.num_heads, index.head_dim, kept.index_keys.dtype
        )
    return Subject(
        device, getattr(torch, plan.dtype), spec.vocab_size, plan.max_model_len,
        products=tuple(_products(model)), attention=tuple(dict.fromkeys(cache.reads)), block_size=plan.block_size,
        indexer=indexer, hidden_size=spec.hidden_size, widths=tuple(sorted(widths)),
    )  # fmt: skip


def _products(model: CausalModel) -> Iterator[CheckedProduct]:
    """Yield a product with one matrix of each shape and kind."""
    seen = set()
    for layer in parts_of_kind(model, Linear):
        weight = layer.weight
        n, k = weight.shape
        kind = str(weight.dtype) if isinstance(weight, Tensor) else _kind(weight)
        if (n, k, kind) in seen or (isinstance(weight, Tensor) and weight.is_mkldnn):
            continue
        seen.add((n, k, kind))
        rows = slice(0, min(n, MOST_OUTPUTS))
        if not isinstance(weight, Tensor) and n > 8 * MOST_OUTPUTS and not hasattr(weight, "dequantize_rows"):
            continue  # a quantised head of which no part can be dequantised would take gigabytes

        def dequantized(weight: Any = weight, rows: slice = rows) -> Tensor:
            if isinstance(weight, Tensor):
                return weight[rows].float()
            if hasattr(weight, "dequantize_rows"):
                at = torch.arange(rows.start, rows.stop, device=next((each.device for each in _tensors(weight)), None))
                return torch.as_tensor(weight.dequantize_rows(at, torch.float32))
            return torch.as_tensor(weight.dequantize(torch.float32))[rows]

        yield CheckedProduct(
            f"{n} x {k} {kind}", k, layer.__call__, dequantized, rows, layer.bias,
            "dynamic" in kind or "static" in kind,
        )  # fmt: skip


def _kind(weight: object) -> str:
    """Return the format of a quantised matrix: its class, bits, group and how activations are rounded."""
    parts = getattr(weight, "parts", None)
    if isinstance(parts, Sequence):
        return "+".join(sorted({str(p.dtype) if isinstance(p, Tensor) else _kind(p) for p in parts}))
    facts = (getattr(weight, name, None) for name in ("bits", "group", "activations", "type"))
    return " ".join([type(weight).__name__, *(str(fact) for fact in facts if isinstance(fact, int | str))])


def _tensors(weight: object) -> Iterator[Tensor]:
    names = getattr(type(weight), "__slots__", ()) or vars(weight)
    yield from (value for name in names if isinstance(value := getattr(weight, name, None), Tensor))


def small_cache(spec: ModelSpec, plan: MemoryPlan, device: torch.device) -> KVCache:
    """Return a cache for the requests of the whole model's check."""
    blocks = 1 + (1 + DECODES) * _blocks(plan)
    return KVCache(spec, (blocks,) * len(plan.num_blocks), plan.block_size, device, plan.kv_dtype)


def _blocks(plan: MemoryPlan) -> int:
    return -(-(PROMPT_TOKENS + DECODES) // plan.block_size)


# ---- the whole model -------------------------------------------------------------------------------------------------

WHOLE = "whole model"
ALONE = KernelVariant("PyTorch alone", without=ALL_KERNELS, cost="ten times slower or more")


def whole_model(spec: ModelSpec, plan: MemoryPlan, opened: OpenRunner, quantises: bool) -> CheckedKernel:
    """Return the check of the whole model. Its variants replace one group of kernels each, then all."""
    groups = (KernelVariant(f"PyTorch for {group}", without=frozenset({group})) for group in sorted(ALL_KERNELS))
    stored = spec.quantization or plan.dtype
    name = (
        f"{spec.architecture}, {spec.num_layers} layers of {spec.hidden_size}, {stored} as {plan.dtype}, "
        f"cache {plan.kv_dtype} in blocks of {plan.block_size}"
    )
    kl, agreement = (
        (QUANTISED_DIVERGENCE, QUANTISED_AGREEMENT) if quantises else (MOST_DIVERGENCE, LEAST_AGREEMENT)
    )  # fmt: skip

    def judge(results: Sequence[Tensor]) -> Judgement:
        (got,) = results
        right = logits_of(opened(LaunchOptions(without=ALL_KERNELS)), spec, plan)
        ours, theirs = got.float().log_softmax(-1), right.float().log_softmax(-1)
        divergence = float((theirs.exp() * (theirs - ours)).nansum(-1).mean())
        differing = float((ours.argmax(-1) != theirs.argmax(-1)).float().mean())
        if not bool(got.isfinite().any(-1).all()):
            divergence = float("nan")
        return max(Judgement(divergence / kl, 1), Judgement(differing / (1 - agreement) / 4, 1), key=_or_worse)

    def cases(subject: Subject) -> Iterator[Case]:
        yield Case(name, lambda: [logits_of(opened(launch_options()), spec, plan)], judge)

    return CheckedKernel(WHOLE, (KernelVariant("kernels"), *groups, ALONE), cases, needs_model=True)


def _or_worse(judged: Judgement) -> float:
    return judged.error if judged.error == judged.error else float("inf")


def logits_of(runner: TorchRunner, spec: ModelSpec, plan: MemoryPlan) -> Tensor:
    """Return the logits behind a prompt and behind DECODES longer ones whose last token is computed alone, with the
    same tokens whatever is computed."""
    watched = runner.model
    kept: list[Tensor] = []
    compute = watched.compute_logits

    def keep(hidden: Tensor, out: Tensor | None = None) -> Tensor | None:
        logits = compute(hidden, out)
        if logits is not None:
            kept.append(logits.clone())
        return logits

    try:
        object.__setattr__(watched, "compute_logits", keep)
        for step in _steps(spec, plan):
            kept.clear() if step.step_id == 2 else None
            runner.forward(step)
            runner.sample(step).result()
    finally:
        object.__delattr__(watched, "compute_logits")
        runner.close()
    return torch.cat(kept)


def _steps(spec: ModelSpec, plan: MemoryPlan) -> list[StepPlan]:
    """Return the prefill of all prompts but for their last tokens, and a step with those."""
    greedy = SamplingParams(temperature=0.0)
    most = min(PROMPT_TOKENS, plan.max_model_len - DECODES - 1, plan.max_num_batched_tokens // (1 + DECODES) - DECODES)
    count = min(1 + DECODES, plan.max_num_seqs)
    dice = torch.Generator().manual_seed(7)
    tokens = torch.randint(spec.vocab_size, (count, most + DECODES), generator=dice).tolist()
    groups, blocks = len(plan.num_blocks), _blocks(plan)

    def row(slot: int, computed: int, scheduled: int, *, samples: bool) -> Row:
        new = ((tuple(range(1 + slot * blocks, 1 + (slot + 1) * blocks)),) * groups) if not computed else ()
        state = StateUse(1 + slot if computed else -1, 1 + slot) if spec.layer_kinds else None
        return Row(slot, f"check{slot}", computed, scheduled, new, samples, (), state)

    lengths = [most + slot for slot in range(count)]
    news = tuple(
        NewSlot(slot, f"check{slot}", tokens[slot][:length], length, greedy, (), 0)
        for slot, length in enumerate(lengths)
    )
    begun = tuple(row(slot, 0, length - 1, samples=False) for slot, length in enumerate(lengths))
    ends = tuple(row(slot, length - 1, 1, samples=True) for slot, length in enumerate(lengths))
    return [StepPlan(1, begun, news), StepPlan(2, ends)]
