"""Builds a ready runner from a loaded model and a memory plan.

On a CPU the plan is used unchanged. On a GPU it is made again from measurements: the weights by the allocator's
counter, the activations by running the largest step once over a KV cache of a few blocks. If another program has taken
memory meanwhile, the plan shrinks with a note, or is refused with the numbers.
Does not know: where the model came from, requests.
"""

from __future__ import annotations

import ctypes
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from localllm.config.settings import EngineConfig
from localllm.engine.params import SamplingParams
from localllm.engine.step import NewSlot, Row, StateUse, StepPlan
from localllm.errors import DoesNotFit, LocalLLMError
from localllm.files.folders import cache_folder, write_whole
from localllm.kernels.checks.choose import KernelChoice
from localllm.kernels.choice import ALL_KERNELS, RECORDED_TWINS, Feature
from localllm.kernels.launch import LaunchOptions
from localllm.machine.gpu_support import read_nvidia
from localllm.machine.hardware import Hardware, read_hardware
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.drafters.drafter import Drafter
from localllm.models.encoders.source import SourceEncoder, SourcePool
from localllm.models.fit import Measured, MemoryPlan, plan_memory
from localllm.models.fit.far import stream_threshold
from localllm.models.inputs import CausalModel
from localllm.models.layers.arena import PINNED_SHARE, Arena
from localllm.models.layers.embedding import RamTable
from localllm.models.layers.far import FarExperts, FarStream, streamable
from localllm.models.layers.group import Group
from localllm.models.prompt_embeds import PromptEmbedsTensor
from localllm.models.spec.model_spec import ModelSpec, kv_groups, main_group
from localllm.models.vision.tower import Towers
from localllm.models.weights.parameters import parts_of_kind
from localllm.runner.device_drafts import DRAFT_WIDTHS
from localllm.runner.device_errors import check_device as check_device_answers
from localllm.runner.device_errors import is_device_loss, translated
from localllm.runner.device_memory import empty_cache, make_current
from localllm.runner.drafter_steps import OpenDrafter
from localllm.runner.graphs import AgreedCapture, Capture, CudaCapture
from localllm.runner.kv_cache import KVCache, StateCache
from localllm.runner.pictures import PictureEncoder
from localllm.runner.profiling import ProfiledRunner, StepProfiler
from localllm.runner.runner import TorchRunner, crossing_of
from localllm.runner.self_check import (
    check_device,
    check_model,
    compile_ahead_of_rank,
    fall_backs_of,
    has_drafts,
    is_checked,
    known_choice,
    next_choice,
    served_as,
    slower_graphs,
    small_cache,
)
from localllm.units import format_bytes, format_count

log = logging.getLogger(__name__)

CAPTURE_S = 5.0  # seconds spent on graphs before the server is ready; the rest are recorded while idle
TRIES = 3  # attempts to find a KV cache size that fits while other programs take memory
RECORDS_EARLY_LAUNCHES = (12, 3)
"""The CUDA version of a driver that records early launches in graphs. Older ones only launch early."""
UNPROVEN_EARLY_LAUNCH = (12, 0)
"""No GPU of this compute capability or later has run the kernels with early launches yet."""
UNKIND = SamplingParams(temperature=1.0, top_p=0.9, min_p=0.01)  # these need the most memory for sampling

STREAM_FILE = "stream_prompts.json"

ReportDetail = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Parallel:
    """The place of a rank among the others of its model."""

    group: Group  # the shards of its pipeline stage
    world: Group  # the ranks of all stages
    samples: bool  # whether its stage is the last one


def launch_options_of(config: EngineConfig, device: torch.device) -> LaunchOptions:
    """Return the options of kernel launches that the settings choose for a device."""
    early = config.programmatic_launch
    if early is None:
        early = device.type != "cuda" or launches_early_by_default(
            torch.cuda.get_device_capability(device), read_nvidia().cuda
        )
    without = ALL_KERNELS if config.kernels == "torch" else frozenset()
    return LaunchOptions(config.deterministic, early, without)


def launches_early_by_default(capability: tuple[int, int], driver: tuple[int, int] | None) -> bool:
    """Return whether kernels start early unless the settings say otherwise. driver: the newest CUDA version that it
    runs; None: unknown."""
    return capability < UNPROVEN_EARLY_LAUNCH and (driver is None or driver >= RECORDS_EARLY_LAUNCHES)


def open_runner(
    model: CausalModel,
    spec: ModelSpec,
    config: EngineConfig,
    plan: MemoryPlan,
    hardware: Hardware,
    report: ReportDetail,
    held_before: int = 0,
    drafter: Drafter | None = None,
    tower: Towers | SourceEncoder | None = None,
) -> tuple[TorchRunner, MemoryPlan]:
    """Return the runner, warmed up, and the plan it was built with. `hardware`: as it was before the model was loaded;
    held_before: GPU bytes that torch had allocated for other models by then."""
    device = torch.device(plan.device)
    base = launch_options_of(config, device)
    make_current(device)
    plan = open_stream(model, spec, config, open_tables(model, plan, device, hardware), hardware, report)
    choice = KernelChoice()
    if is_checked(config, device):
        choice = _check(model, spec, config, plan, device, base, report, drafter)

    compares = is_checked(config, device) and config.check_kernels != "off"
    served = served_as(spec, config, plan, base)
    slower = slower_graphs(served, device) if compares else ""

    encoder = encoder_of(tower, model, spec, plan)

    def attempt() -> tuple[TorchRunner, MemoryPlan]:
        avoids: frozenset[Feature] = base.avoids | frozenset({"graphs"}) if slower else base.avoids
        fitting, options = plan, choice.options(replace(base, avoids=avoids))
        if device.type == "cuda":
            report("measuring one full step")
            measured = measure(
                model, spec, plan, device, held_before, options, config.enable_prompt_embeds, drafter=drafter,
                encoder=encoder,
            )  # fmt: skip
            fitting = replan(spec, config, plan, hardware, measured)
        kv, states, fitting = _allocate(spec, config, fitting, hardware, device, held_before)
        opened = with_cache(drafter, spec, fitting, device, fitting.num_blocks)
        runner = open_on(
            kv, model, spec, config, fitting, report, states=states, drafter=opened, options=options,
            encoder=encoder,
        )  # fmt: skip
        return runner, fitting

    while True:
        try:
            runner, fitting = attempt()
            break
        except (LocalLLMError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            later = _after(error, choice, config, device)
        choice = later  # outside the handler: until its end the error holds the tensors of the attempt
        empty_cache()
    if compares and not slower and (slower := slower_graphs(served, device, runner)):
        runner.close()
        runner, fitting = attempt()
    runner.tell_of_kernels(fall_backs_of(choice), choice.summary)
    told = [f"Steps are not recorded as CUDA graphs: {slower}." if slower else "", choice.summary]
    notes = [*fitting.notes, *map(str, choice.fall_backs), *_notes_on_graphs(runner), *filter(None, told)]
    return runner, replace(fitting, notes=tuple(dict.fromkeys(notes)))


def open_tables(model: CausalModel, plan: MemoryPlan, device: torch.device, hardware: Hardware) -> MemoryPlan:
    """Let the device read tables that are in RAM by itself, from page-locked memory. If it cannot, the host looks rows
    up. Return the plan, with a note on that."""
    notes, room = list[str](), int(PINNED_SHARE * hardware.ram_total_bytes)
    for table in parts_of_kind(model, RamTable):
        if table.is_mapped:
            continue
        fits = table.nbytes <= room
        room -= table.nbytes if fits else 0
        why = f"{PINNED_SHARE:.0%} of RAM is page-locked at most"
        with torch.inference_mode():
            why = table.map(partial(view_in_ram, device)) if fits else why
        if why:
            notes.append(
                f"The CPU looks up the rows of a table in RAM ({format_bytes(table.nbytes)}), because the GPU "
                f"cannot read them by itself: {why}. Steps wait for each other; --cpu-embeddings off keeps tables on "
                "the GPU."
            )
    return replace(plan, notes=(*plan.notes, *notes)) if notes else plan


MAPPED_FOR_ALL = 1 | 2
"""Flags of cudaHostRegister: portable and mapped."""


def view_in_ram(device: torch.device, held: Tensor) -> Tensor | None:
    """Return a tensor of the device over the memory of one in RAM, which is page-locked for that; None: the system does
    not allow it. `close_tables` ends the page-locking."""
    if device.type != "cuda":
        return held
    cudart: Any = torch.cuda.cudart()
    address = held.data_ptr()
    if not page_lock(address, held.nbytes, MAPPED_FOR_ALL, device):
        return None
    mapped = ctypes.c_uint64()
    driver = driver_library()
    if driver is None or driver.cuMemHostGetDevicePointer_v2(ctypes.byref(mapped), ctypes.c_void_p(address), 0) != 0:
        cudart.cudaHostUnregister(address)
        return None
    return torch.as_tensor(_Addressed(mapped.value, held.nbytes), device=device).view(held.dtype).view(held.shape)


class _Addressed:
    """Some bytes that a device can address, as torch reads them."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 2
        }  # fmt: skip


def driver_library() -> ctypes.CDLL | None:
    """Return NVIDIA's driver library; None: there is none, or it is another maker's."""
    with suppress(OSError):
        found = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        return found if hasattr(found, "cuMemHostGetDevicePointer_v2") else None
    return None


def page_lock(address: int, num_bytes: int, flags: int, device: torch.device) -> bool:
    """Page-lock some bytes of RAM, and return whether the system allows it. An error that CUDA remembers is cleared,
    since the next launch would raise it."""
    cudart: Any = torch.cuda.cudart()
    if int(cudart.cudaHostRegister(address, num_bytes, flags)) == 0:
        return True
    with suppress(RuntimeError):
        torch.zeros(1, device=device)
    return False


def close_tables(model: CausalModel) -> None:
    """End the page-locking of tables in RAM. No runner may be open."""
    for table in parts_of_kind(model, RamTable):
        for address in table.unmap():
            torch.cuda.cudart().cudaHostUnregister(address)


def open_stream(
    model: CausalModel,
    spec: ModelSpec,
    config: EngineConfig,
    plan: MemoryPlan,
    hardware: Hardware,
    report: ReportDetail,
) -> MemoryPlan:
    """Let the device compute long prompts with experts that are in RAM, if the plan has memory for it and its results
    equal the CPU's. Return the plan with the tokens from which it does, and what to know about it."""
    crossing = crossing_of(model)
    if crossing is None or plan.far is None or not plan.far.staging_bytes:
        return plan
    parts = streamable(parts_of_kind(model, FarExperts))
    why, threshold, notes = "", 0, list[str]()
    if not parts:
        why = "no kernel of a GPU reads their type as it is in RAM"
    else:
        device, top_k = torch.device(plan.device), 1 if spec.mixture is None else spec.mixture.top_k
        stream = FarStream(parts, crossing, getattr(torch, plan.dtype), top_k)
        tables = sum(table.nbytes for table in parts_of_kind(model, RamTable) if table.is_mapped)
        notes += pin_arena(crossing.arena, device, int(PINNED_SHARE * hardware.ram_total_bytes) - tables)
        report("comparing experts on the GPU with the CPU")
        with torch.inference_mode():
            why = stream.check()
            if not why and config.stream_prompts == "auto":
                cpu_s, copy_s = timed_stream(stream, hardware, plan, report)
                threshold = stream_threshold(cpu_s, copy_s, plan.max_num_batched_tokens)
                log.info("experts in RAM cpu_s=%s copy_s=%.4f stream_from=%d", cpu_s, copy_s, threshold)
                why = "" if threshold else f"copying the experts takes longer ({copy_s * 1e3:.0f} ms a layer)"
                note = (
                    f"Prompts from {format_count(threshold)} tokens on are computed by the GPU: each step copies "
                    f"{format_bytes(stream.step_bytes)} and takes at least {copy_s * len(parts):.2g} s, for which "
                    "answers wait."
                )
                notes += [] if why else [note]
            elif not why:
                threshold, most = int(config.stream_prompts), plan.max_num_batched_tokens
                why = (
                    f"--stream-prompts {threshold} is more than the {most} tokens of a step" if threshold > most else ""
                )
    if why:
        notes.append(f"The CPU computes prompts with the experts in RAM, too: {why}.")
        far = replace(plan.far, staging_bytes=0, unpacked_bytes=0, stream_from=0)
        return replace(plan, far=far, notes=(*plan.notes, *notes))
    crossing.stream, stream.from_tokens = stream, threshold
    return replace(plan, far=replace(plan.far, stream_from=threshold), notes=(*plan.notes, *notes))


def pin_arena(arena: Arena | None, device: torch.device, most_bytes: int) -> list[str]:
    """Page-lock the experts in RAM, so that a device copies them without the processor. Return a note if the system
    allows less than all of them."""
    if arena is None or device.type != "cuda":
        return []
    cudart: Any = torch.cuda.cudart()
    pinned = arena.pin(lambda address, size: page_lock(address, size, 0, device), cudart.cudaHostUnregister, most_bytes)
    note = (
        f"{format_bytes(arena.used_bytes - pinned)} of the {format_bytes(arena.used_bytes)} in RAM could not be "
        "page-locked: long prompts take about twice as long."
    )
    return [] if pinned >= arena.used_bytes else [note]


def timed_stream(
    stream: FarStream, hardware: Hardware, plan: MemoryPlan, report: ReportDetail
) -> tuple[dict[int, float], float]:  # fmt: skip
    """Return `FarStream.timed`, measured once for a processor, a GPU and a form of experts, and then kept."""
    path = cache_folder() / STREAM_FILE
    gpu = next((gpu.name for gpu in hardware.gpus if plan.device == f"cuda:{gpu.index}"), plan.device)
    key = f"{hardware.cpu_name} | {hardware.cpu_cores} | {torch.get_num_threads()} | {gpu} | {stream.form}"
    kept: dict[str, Any] = {}
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # missing, or not ours
        kept = json.loads(path.read_text(encoding="utf-8"))
        cpu_s, copy_s = kept[key]
        return {int(rows): float(seconds) for rows, seconds in cpu_s.items()}, float(copy_s)
    report("measuring the copy of experts to the GPU")
    found = stream.timed()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({**(kept if isinstance(kept, dict) else {}), key: found}))
    return found


def _check(
    model: CausalModel, spec: ModelSpec, config: EngineConfig, plan: MemoryPlan, device: torch.device,
    base: LaunchOptions, report: ReportDetail, drafter: Drafter | None,
) -> KernelChoice:  # fmt: skip
    """Compile the kernels of a model, and compare them with plain torch. What needs no model was compared before its
    weights were read, and is only read here."""
    first = replace(config, check_kernels="first") if config.check_kernels == "always" else config

    def opened(kv: KVCache, options: LaunchOptions, *, has_drafts: bool = False) -> TorchRunner:
        states = StateCache(spec, 1 + plan.max_num_seqs, device, getattr(torch, plan.dtype))
        drafts = with_cache(drafter if has_drafts else None, spec, plan, device, kv.num_blocks)
        return _runner(model, spec, plan, kv, device, None, options, None, states, drafts, has_drafts)

    before = check_device(first, device, base, report=report)
    choice = check_model(model, spec, config, plan, device, base, before, opened, report)
    empty_cache()
    return choice


def compile_for_rank(
    model: CausalModel, spec: ModelSpec, config: EngineConfig, plan: MemoryPlan, parallel: Parallel,
    report: ReportDetail, drafter: Drafter | None = None,
) -> None:  # fmt: skip
    """Compile the kernels of a rank before it launches them. Its groups must exchange nothing meanwhile."""
    device = torch.device(plan.device)
    options = launch_options_of(config, device)
    options = known_choice(config, device, options).options(options)

    def rehearse() -> None:
        kv = small_cache(spec, plan, device)
        states = StateCache(spec, 1 + plan.max_num_seqs, device, getattr(torch, plan.dtype))
        opened = with_cache(drafter, spec, plan, device, kv.num_blocks)
        runner = _runner(model, spec, plan, kv, device, None, options, parallel, states, opened)
        try:
            runner.warm_up()
        finally:
            runner.close()

    served = f"{served_as(spec, config, plan, options)} {parallel.group.size} {parallel.samples}"
    share = parallel.world.index, parallel.world.size
    compile_ahead_of_rank(config, device, served, rehearse, report, share)
    empty_cache()


def _after(error: Exception, choice: KernelChoice, config: EngineConfig, device: torch.device) -> KernelChoice:
    """Return the next choice after an error of a first step or the warm-up. Raises the error if nothing is left to
    try, and `DeviceLost` if the device does not answer."""
    if is_device_loss(error) or not is_checked(config, device):
        with translated():
            raise error
    check_device_answers(device)
    later = next_choice(choice, error, device)
    if later is None:
        raise error
    return later


def _notes_on_graphs(runner: TorchRunner) -> Iterator[str]:
    """Yield what to know about steps that are not recorded although the settings ask for it."""
    stats = runner.stats()
    if stats.failed_graphs:
        yield (
            f"{stats.failed_graphs} of {stats.wanted_graphs} kinds of steps could not be recorded as CUDA graphs: they "
            f"are launched kernel by kernel, which is slower for small models. {stats.graph_failure}"
        )


def open_on(
    kv: KVCache, model: CausalModel, spec: ModelSpec, config: EngineConfig, plan: MemoryPlan, report: ReportDetail,
    parallel: Parallel | None = None, states: StateCache | None = None, drafter: OpenDrafter | None = None,
    options: LaunchOptions | None = None, encoder: PictureEncoder | SourcePool | None = None,
) -> TorchRunner:  # fmt: skip
    """Return a runner over a KV cache, warmed up. spec: with the sizes that this rank holds. states: of a model with
    recurrent layers. options: of kernel launches; None: what the settings and earlier checks of this GPU say. Raises
    `DoesNotFit`."""
    device = torch.device(plan.device)
    if options is None:
        options = launch_options_of(config, device)
        options = known_choice(config, device, options).options(options)
    if spec.index is None and options.without != ALL_KERNELS:  # without an indexer there is nothing to replace
        options = replace(options, without=options.without - {"indexer"})
    recorded = device.type == "cuda" and not config.enforce_eager and getattr(model, "capturable", True)
    recorded = recorded and "graphs" not in options.avoids
    recorded = recorded and options.without <= RECORDED_TWINS  # others wait for the device, which a recording cannot
    capture: Capture | None = CudaCapture(device, crossing_of(model)) if recorded else None
    if isinstance(capture, CudaCapture) and parallel is not None:
        capture = AgreedCapture(capture, parallel.world, device)
    traces = config.torch_profiler_dir
    profiler = None if traces is None else StepProfiler(Path(traces).expanduser(), device)
    drafts = has_drafts(config, options)
    runner = _runner(
        model, spec, plan, kv, device, capture, options, parallel, states, drafter, drafts, profiler, encoder
    )
    if capture is not None:
        report("capturing CUDA graphs")
    try:
        runner.warm_up(CAPTURE_S if parallel is None else 0.0)  # ranks would record unlike numbers in the same time
    except torch.OutOfMemoryError as error:
        runner.close()
        raise DoesNotFit(
            "There is not enough memory to capture CUDA graphs.",
            f"{format_bytes(plan.graph_bytes)} were reserved for them. {str(error).splitlines()[0]}",
            "--enforce-eager runs without CUDA graphs; a lower --gpu-memory-utilization leaves more memory.",
        ) from error
    return runner


def replan(
    spec: ModelSpec, config: EngineConfig, plan: MemoryPlan, hardware: Hardware, measured: Measured | Sequence[Measured]
) -> MemoryPlan:
    """Return the plan made from measured numbers; its context is never longer than the model was loaded for.

    measured: one for each rank of the plan, if it has ranks.
    """
    loaded = replace(spec, max_position=plan.max_model_len)
    config = replace(
        config, device=plan.device, dtype=plan.dtype, max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
    )  # fmt: skip
    again = plan_memory(config, loaded, plan.weights_bytes, hardware, measured=measured, ranks=plan.ranks, far=plan.far)
    kept = [note for note in plan.notes if note not in again.notes]
    log.info(
        "memory predicted_weights=%d predicted_activations=%d measured=%s",
        plan.weights_bytes, plan.activation_bytes, measured,
    )  # fmt: skip
    return replace(again, notes=(*kept, *again.notes), work=plan.work)


def measure(
    model: CausalModel, spec: ModelSpec, plan: MemoryPlan, device: torch.device, held_before: int,
    launch_options: LaunchOptions, prompt_embeds: bool = False, parallel: Parallel | None = None,
    drafter: Drafter | None = None, encoder: PictureEncoder | SourcePool | None = None,
) -> Measured:  # fmt: skip
    """Run the largest prefill step and the largest decode step over a small KV cache, and read the allocator's peak.

    spec: with the sizes that this rank holds. All ranks of a model must call this at once.
    """
    allocated = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    tokens = min(plan.max_num_batched_tokens, plan.max_model_len)
    num_blocks = 2 + max(-(-tokens // plan.block_size), plan.max_num_seqs)
    blocks = (num_blocks,) * len(plan.num_blocks)
    kv = KVCache(spec, blocks, plan.block_size, device, plan.kv_dtype)
    states = StateCache(spec, 1 + plan.max_num_seqs, device, getattr(torch, plan.dtype))
    opened = with_cache(drafter, spec, plan, device, blocks)
    runner = _runner(model, spec, plan, kv, device, None, launch_options, parallel, states, opened, encoder=encoder)
    embeds = torch.zeros(tokens, spec.hidden_size, dtype=getattr(torch, plan.dtype)) if prompt_embeds else None
    given = None if embeds is None else PromptEmbedsTensor(embeds, "")
    for step in largest_steps(
        plan, tokens, given, has_states=states.num_places > 0, draft_tokens=runner.drafts.step_tokens
    ):
        runner.forward(step)
        runner.sample(step).result()
    peak = torch.cuda.max_memory_allocated(device)
    caches = kv.allocated_bytes + states.allocated_bytes + (0 if opened is None else opened.kv.allocated_bytes)
    activations = peak - allocated - caches
    if (encoded := plan.encoder) is not None:  # by arithmetic: the largest picture's pixels are not at hand
        activations = max(activations, encoded.encode_bytes) + encoded.kept_bytes
    runner.close()
    staging = 0 if plan.far is None else plan.far.staging_bytes  # which the plan counts besides
    return Measured(allocated - held_before - staging, activations)


def largest_steps(
    plan: MemoryPlan, tokens: int, embeds: PromptEmbedsTensor | None = None, *, has_states: bool = False,
    draft_tokens: int = 0,
) -> list[StepPlan]:  # fmt: skip
    """Return the largest steps: one prompt that fills a step; then every slot with one token, all of them sampling;
    then slots with drafts, where `draft_tokens`, the most tokens of a step with drafts, are more than the slots."""

    def state(slot: int) -> StateUse | None:
        return StateUse(-1, 1 + slot) if has_states else None

    blocks, groups = -(-tokens // plan.block_size), len(plan.num_blocks)
    prompt = NewSlot(0, "prompt", [0] * tokens, tokens, UNKIND, (), 0, prompt_embeds=embeds)
    rows = [Row(0, "prompt", 0, tokens, (tuple(range(1, blocks + 1)),) * groups, True, (), state(0))]
    singles = min(plan.max_num_seqs, plan.max_num_batched_tokens)
    news = tuple(NewSlot(slot, f"r{slot}", [0], 1, UNKIND, (), 0) for slot in range(singles))
    decodes = tuple(
        Row(slot, f"r{slot}", 0, 1, ((1 + slot,),) * groups, True, (), state(slot)) for slot in range(singles)
    )
    steps = [StepPlan(1, tuple(rows), (prompt,)), StepPlan(2, decodes, news, (0,))]
    width = min(DRAFT_WIDTHS[-1], plan.max_model_len - 2)
    if width > 0 and draft_tokens > max(width, singles):  # drafts need not exist to take their memory
        more = ((1,) * (-(-(2 + width) // plan.block_size) - 1),) * groups
        drafted = tuple(
            Row(slot, f"r{slot}", 1, 1 + width, more if more[0] else (), True, state=state(slot), num_drafts=width)
            for slot in range(min(singles, draft_tokens // (1 + width)))
        )
        steps.append(StepPlan(3, drafted))
    return steps


def _allocate(
    spec: ModelSpec,
    config: EngineConfig,
    plan: MemoryPlan,
    hardware: Hardware,
    device: torch.device,
    held_before: int = 0,
) -> tuple[KVCache, StateCache, MemoryPlan]:
    """Return the KV cache, the recurrent states and their plan.
    On a GPU they may be smaller than planned, with a note, if another program took memory."""
    dtype = getattr(torch, plan.dtype)
    for left in reversed(range(TRIES)):
        try:
            states = StateCache(spec, plan.num_places, device, dtype)
            return KVCache(spec, plan.num_blocks, plan.block_size, device, plan.kv_dtype), states, plan
        except DoesNotFit:
            if device.type != "cuda" or not left:
                raise
            plan = _plan_for_free_memory(spec, config, plan, hardware, held_before)
    raise AssertionError("unreachable")


def with_cache(
    drafter: Drafter | None, spec: ModelSpec, plan: MemoryPlan, device: torch.device, num_blocks: Sequence[int]
) -> OpenDrafter | None:
    """Return the drafter, if there is one, with keys and values for each block of the model's main KV group.
    num_blocks: of each group of the model. Raises `DoesNotFit`."""
    if drafter is None:
        return None
    assert spec.drafter is not None
    group = main_group(plan.windows)
    blocks = (num_blocks[group],) * len(kv_groups(drafter.spec))
    cache = KVCache(drafter.spec, blocks, plan.block_size, device, plan.kv_dtype)
    return OpenDrafter(drafter, cache, spec.drafter.num_drafts, group)


def encoder_of(
    tower: Towers | SourceEncoder | None, model: CausalModel, spec: ModelSpec, plan: MemoryPlan
) -> PictureEncoder | SourcePool | None:
    """Return the encoder of a model that sees, or of an encoder-decoder; None: its tower is not loaded."""
    if isinstance(tower, SourceEncoder):
        assert plan.sources is not None, "an encoder that is not planned"
        assert isinstance(model, DecoderModel), "an encoder-decoder's decoder is localllm's own"
        blocks = 1 + plan.sources.kept_rows // plan.block_size
        kept = KVCache(spec, (blocks,), plan.block_size, tower.device, plan.dtype).layers
        return SourcePool(tower, model, [kv for kv in kept if kv is not None])
    return None if tower is None else PictureEncoder(tower, spec.hidden_size, getattr(torch, plan.dtype))


def _plan_for_free_memory(
    spec: ModelSpec, config: EngineConfig, plan: MemoryPlan, hardware: Hardware, held_before: int
) -> MemoryPlan:
    """Return the plan for the memory that is free now. Our own use counts as free, as before the model was loaded."""
    empty_cache()
    ours = torch.cuda.memory_reserved(plan.device) - held_before
    now = {gpu.index: gpu.free_bytes + ours for gpu in read_hardware().gpus}
    index = torch.device(plan.device).index or 0
    missing = plan.free_bytes - now[index]
    gpus = tuple(replace(gpu, free_bytes=min(gpu.free_bytes, now[gpu.index])) for gpu in hardware.gpus)
    measured = Measured(plan.weights_bytes, plan.activation_bytes)
    shrunk = replan(spec, config, plan, replace(hardware, gpus=gpus), measured)
    note = (
        f"Another program took {format_bytes(max(0, missing))} of the GPU while the model was loading: the KV cache "
        f"holds {shrunk.num_kv_tokens} tokens instead of {plan.num_kv_tokens}."
    )
    return replace(shrunk, notes=(*shrunk.notes, note))


def _runner(
    model: CausalModel, spec: ModelSpec, plan: MemoryPlan, kv: KVCache, device: torch.device,
    capture: Capture | None, launch_options: LaunchOptions, parallel: Parallel | None,
    states: StateCache | None = None, drafter: OpenDrafter | None = None, has_drafts: bool = True,
    profiler: StepProfiler | None = None, encoder: PictureEncoder | SourcePool | None = None,
) -> TorchRunner:  # fmt: skip
    opened = TorchRunner if profiler is None else partial(ProfiledRunner, profiler=profiler)
    if isinstance(encoder, SourcePool):
        kv.sources = encoder
    runner = opened(
        model,
        spec,
        kv,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        block_size=plan.block_size,
        device=device,
        capture=capture,
        staged=False if launch_options.without >= ALL_KERNELS else None,  # nothing is left to unpack inputs
        launch_options=launch_options,
        group=None if parallel is None else parallel.group,
        samples=parallel is None or parallel.samples,
        states=states,
        drafter=drafter,
        has_drafts=has_drafts,
    )
    if isinstance(encoder, PictureEncoder):
        runner.see_with(encoder)
    return runner
