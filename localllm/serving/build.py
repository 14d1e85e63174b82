"""Build a running engine from a model's name, for the server and for the offline API.

`build_engine` finds the checkpoint, reads its config, fits it into this machine, loads it, and creates the engine.
Each phase is reported through a callback. When a phase fails, the memory that earlier phases took is freed before the
error is raised.
Does not know: which models stay loaded and for how long (manager.py), HTTP, terminals.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from localllm.config.settings import EngineConfig, Settings
from localllm.engine.params import GENERATION_CONFIG, SAMPLING_PARAMS
from localllm.errors import ConfigError, DoesNotFit, UnsupportedOption
from localllm.machine.memory import paused_collection
from localllm.serving.compute import importing_torch, start_torch
from localllm.serving.drafters import check_vocabulary, describe_choice, require_place, with_drafter
from localllm.serving.phases import OnPhase, PhaseReporter, report_phase
from localllm.serving.profiles import fingerprint, from_profile
from localllm.serving.served import NO_LIMITS, LoadLimits, ServedModel, names_of
from localllm.units import format_bytes

if TYPE_CHECKING:
    from localllm.engine.admission import Admission
    from localllm.engine.client import EngineClient
    from localllm.engine.loop import EngineLoop
    from localllm.engine.memory.block_stores import BlockStore
    from localllm.engine.memory.ledger import Ledger
    from localllm.engine.memory.tiers import KVTiers
    from localllm.engine.step import Runner
    from localllm.machine.hardware import Hardware
    from localllm.models.fit import MemoryPlan, MemoryReport
    from localllm.models.library.catalog import ResolvedModel
    from localllm.models.spec.model_spec import ModelSpec
    from localllm.models.weights.source import Progress
    from localllm.runner.executor import Executor
    from localllm.serving.answers.pictures import Sight
    from localllm.serving.answers.sounds import Hearing
    from localllm.text.answers.reader import AnswerFormat
    from localllm.text.chat_template import ChatTemplate
    from localllm.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# The phases ---------------------------------------------------------------------------------------------------------


def build_engine(
    settings: Settings,
    on_phase: OnPhase = lambda phase: None,
    limits: LoadLimits = NO_LIMITS,
    stores: Sequence[BlockStore] = (),
) -> ServedModel:
    """Find, read, fit and load the model that `settings` name. Return its engine, not started.

    stores: behind its KV cache, shared with other engines of the model; (): the stores that the settings ask for.
    Blocks for seconds to minutes. Raises ModelNotFound, UnsupportedModel, CorruptModel, DoesNotFit, ConfigError.
    """
    config, started_s = settings.engine, time.perf_counter()
    found, spec = _find(config, on_phase)
    if isinstance(spec, str):
        from localllm.serving.pooling import build_pooling

        _refuse_adapters(config, found.name)
        if config.profile not in ("auto", "none"):
            what, why = f"{found.name} does not support profiles.", "Only models that generate text are tuned."
            raise UnsupportedOption(what, why, "Leave out --profile.", param="profile")
        if spec == "transcribe":
            from localllm.serving.transcription import build_transcriber

            return _note_unused(build_transcriber(settings, found, on_phase, limits), config)
        return _note_unused(build_pooling(settings, found, spec, on_phase, limits), config)
    from localllm.models.fit.pictures import with_tower
    from localllm.models.fit.speed import predict

    with ExitStack() as undo:
        hardware = start_torch(on_phase, limits)
        spec = with_tower(found.path, spec)
        if config.nodes > 1 or config.distributed_executor_backend not in ("auto", "mp"):
            from localllm.ranks.placement import hardware_of_machines

            with report_phase("machines", on_phase) as report:
                hardware = hardware_of_machines(config, hardware)
                report(f"{config.nodes} nodes" if config.nodes > 1 else config.distributed_executor_backend)
        settings = with_sound_adapter(tuned(settings, found, spec, hardware, on_phase), spec)
        config = settings.engine
        plan = _fit(config, found.path, spec, hardware, on_phase)
        require_place(spec, plan)
        require_context(plan, spec, config, limits, sum(gpu.is_supported for gpu in hardware.gpus))
        with ThreadPoolExecutor(1, "localllm-tokenizer") as thread:  # packing weights lets other threads run
            text = thread.submit(_read_text, found.path, spec, on_phase)
            executor, memory_of = _load(found.path, spec, config, plan, on_phase, text)
            undo.callback(executor.close)
            tokenizer, template = text.result()
        with report_phase("memory", on_phase) as report:
            warning = ""
            if not limits.kv_is_compared:
                warning = _check_kv_cache(executor, config, plan, found.path, spec, hardware, tokenizer, report)
            runner, plan = executor.open_runner(config, plan, hardware, report)
            plan = replace(plan, notes=(*plan.notes, warning)) if warning else plan
            report(f"blocks: {plan.blocks_in_words}")
        undo.callback(runner.close)
        with report_phase("engine", on_phase) as report:
            model = _assemble(settings, found, spec, plan, tokenizer, template, runner, stores)
            executor.when_lost(model.engine[0].lose)
            model = replace(
                model, executor=executor, memory=memory_of(plan), tuned=from_profile(settings),
                speed=predict(plan, hardware), placement=config.placement, load_s=time.perf_counter() - started_s,
            )  # fmt: skip
            report(capacity(plan))
        if config.takes_adapters:
            model = _with_adapters(model, config, on_phase)
        undo.pop_all()
    from localllm.kernels.tuned import table

    table().seal()  # from now on, requests may be waiting: launch settings are measured no more
    return model


SOUND_ADAPTER = "sound"
"""The name of the adapter of a checkpoint that prompts with sound use."""


def with_sound_adapter(settings: Settings, spec: ModelSpec) -> Settings:
    """Return the settings with the adapter that prompts with sound use, if the checkpoint has one (Granite Speech)."""
    folder = "" if spec.hearing is None else spec.hearing.adapter
    if not folder:
        return settings
    from localllm.config.lora_modules import LoraModule
    from localllm.models.weights.lora import open_lora

    engine, rank = settings.engine, open_lora(Path(folder)).rank
    modules = (*engine.lora_modules, LoraModule(SOUND_ADAPTER, folder))
    most = (engine.max_loras if engine.takes_adapters else 0) + 1
    engine = replace(
        engine, lora_modules=modules, max_loras=most,
        max_lora_rank=max(rank, engine.max_lora_rank if engine.takes_adapters else 0),
    )  # fmt: skip
    return replace(settings, engine=engine)


def _refuse_adapters(config: EngineConfig, name: str) -> None:
    if config.takes_adapters:
        why = "Adapters are supported for models that generate text."
        raise UnsupportedOption(
            f"{name} does not support adapters.", why, "Leave out --enable-lora.", param="enable_lora"
        )


def _note_unused(model: ServedModel, config: EngineConfig) -> ServedModel:
    """Name the KV tiers and the experts in RAM that were asked for in the notes of a model that has none of them:
    several models may share the settings, so they are not refused."""
    asked = [name for name in ("kv_offloading_size", "swap_space", "kv_disk_gib") if getattr(config, name)]
    notes = []
    if asked:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in asked)
        notes.append(f"{flags}: not used by {model.name}, which keeps no KV cache between requests.")
    if config.far_layers or config.cpu_embeddings == "on":
        notes.append(f"{config.ram_flag}: not used by {model.name}, which generates no text.")
    for note in notes:
        log.warning("plan note=%r", note)
    return replace(model, plan=replace(model.plan, notes=(*model.plan.notes, *notes))) if notes else model


def _with_adapters(model: ServedModel, config: EngineConfig, on_phase: OnPhase) -> ServedModel:
    from localllm.serving.adapters import Adapters

    slots = None if model.executor is None else model.executor.adapter_slots
    assert slots is not None, "adapters need memory"
    with report_phase("adapters", on_phase) as report:
        adapters = Adapters(slots, (model.name, *model.aliases))
        adapters.load_all(config.lora_modules)
        names = ", ".join(each.name for each in adapters.loaded) or "none yet"
        report(f"{names} · room for {config.max_loras} of rank {config.max_lora_rank}")
    own = adapters.find(SOUND_ADAPTER) if model.spec.hearing is not None and model.spec.hearing.adapter else None
    if model.hearing is not None and own is not None:
        model = replace(model, hearing=replace(model.hearing, adapter=own.adapter))
    return replace(model, adapters=adapters)


def capacity(plan: MemoryPlan) -> str:
    return f"{plan.max_num_seqs} requests at once, {plan.max_model_len} tokens each at most"


def require_context(
    plan: MemoryPlan, spec: ModelSpec, config: EngineConfig, limits: LoadLimits, num_gpus: int = 0
) -> None:
    """Refuse a plan with a very short context, or on the CPU of a machine with GPUs, so that another model is evicted
    instead. num_gpus: that the settings may use."""
    left_gpu = plan.device == "cpu" and config.device == "auto" and num_gpus and spec.source is None
    if limits.min_context and left_gpu:
        raise DoesNotFit(
            "The model fits only on the CPU.",
            "The other models leave too little of the GPU.",
            "Unload another model, or --device cpu.",
        )
    wanted = min(limits.min_context, spec.max_position)
    if config.max_model_len is None and plan.max_model_len < wanted:
        raise DoesNotFit(
            "The model fits only with a short context.",
            f"The other models leave room for {plan.max_model_len} tokens; at least {wanted} are needed.",
            "Unload another model, or ask for a context with max_model_len.",
        )


def _download(name: str, revision: str | None, config: EngineConfig, on_phase: OnPhase) -> None:
    """Download a model or a drafter that is only on the hub. The user asked for it by name."""
    from localllm.models.library.catalog import is_for_the_hub

    if is_for_the_hub(name, revision):
        from localllm.models.library.hub.pull import fetch_model, progress_line

        report = PhaseReporter("download", on_phase)
        report()
        fetch_model(
            name, revision, offline=config.offline, code=config.trust_remote_code,
            prediction_layer=config.speculation.takes_prediction_layer,
            on_progress=lambda progress: report(progress_line(progress), progress.fraction),
        )  # fmt: skip
        report(done=True, fraction=1.0)


def _find(
    config: EngineConfig, on_phase: OnPhase
) -> tuple[ResolvedModel, ModelSpec | Literal["embed", "score", "transcribe"]]:
    """Return the checkpoint and its spec. For a checkpoint that does not generate text, return its task instead of a
    spec: reading the rest needs torch, which has its own phase."""
    from localllm.models.encoders.recipe import task_of
    from localllm.models.library.catalog import resolve_model
    from localllm.models.read_spec import read_spec

    _download(config.model, config.revision, config, on_phase)
    with report_phase("find", on_phase) as report:
        found = resolve_model(config.model, config.revision)
        task = task_of(found.path, config.task)
        if task != "generate":
            report(found.name)
            return found, task
        with importing_torch():  # formats of quantised weights need it
            spec = read_spec(
                found.path, model_impl=config.model_impl, trust_remote_code=config.trust_remote_code,
                mmproj=config.mmproj,
            )  # fmt: skip
        through = "" if spec.implementation == "localllm" else " through transformers"
        report(f"{found.name} · {spec.architecture}{through}")
    return found, _find_drafter(config, found.path, spec, on_phase)


def _find_drafter(config: EngineConfig, path: Path, spec: ModelSpec, on_phase: OnPhase) -> ModelSpec:
    """Return the spec with its drafter, if the settings name one."""
    choice = config.speculation
    if not choice.has_drafter:
        return spec
    if choice.drafter:
        _download(choice.drafter, choice.revision, config, on_phase)
    with report_phase("drafter", on_phase) as report:
        spec = with_drafter(config, path, spec)
        report(describe_choice(choice, spec))
    return spec


def tuned(settings: Settings, found: ResolvedModel, spec: ModelSpec, hardware: Hardware, on_phase: OnPhase) -> Settings:
    """Return the settings with a tuned profile's values wherever the user set nothing, if the profile fits."""
    from localllm.models.fit import plan_memory
    from localllm.models.fit.checkpoint import count_resident_for
    from localllm.models.fit.devices import choose_gpu
    from localllm.models.formats.registry import Headers
    from localllm.serving.profiles import choose, key_of, read_profiles, settings_that_fit

    config = settings.engine
    profiles = read_profiles() if config.profile != "none" else []
    if not profiles and config.profile in ("auto", "none"):
        return settings
    gpu = choose_gpu(config, hardware)
    device = "cpu" if gpu is None else f"cuda:{gpu.index}"
    choice = choose(config.profile, key_of(found.path, config, hardware, device), profiles)
    if choice is None:
        return settings
    headers = Headers(found.path)
    resident = count_resident_for(config, found.path, spec, headers)

    def context_of(settings: Settings) -> int:
        stored = headers.stored_bytes
        return plan_memory(settings.engine, spec, stored, hardware, resident_bytes=resident).max_model_len

    with report_phase("profile", on_phase) as report:
        settings, words = settings_that_fit(settings, choice, context_of)
        report(words)
        log.info("profile %s", words)
    return settings


def _fit(config: EngineConfig, path: Path, spec: ModelSpec, hardware: Hardware, on_phase: OnPhase) -> MemoryPlan:
    from localllm.kernels.cpu.native_product import product_speeds
    from localllm.machine.bandwidth import probed
    from localllm.models.fit import plan_memory
    from localllm.models.fit.checkpoint import count_resident_for
    from localllm.models.formats.registry import Headers

    with report_phase("fit", on_phase) as report:
        headers = Headers(path)
        resident, in_files = count_resident_for(config, path, spec, headers), headers.stored_bytes
        try:
            plan = plan_memory(config, spec, in_files, hardware, resident_bytes=resident)
        except DoesNotFit:
            if spec.mixture is None or config.weights_on != "auto" or hardware.speeds.disk is not None:
                raise
            report("measuring the disk's speed")  # its experts may be on disk, if that is quick enough
            hardware = probed(hardware, product_speeds, disk=True)
            plan = plan_memory(config, spec, in_files, hardware, resident_bytes=resident)
        for note in plan.notes:
            log.info("plan note=%r", note)
        weights, kv = format_bytes(plan.weights_bytes), format_bytes(plan.kv_bytes)
        stored = f" ({plan.quantization})" if plan.quantization else ""
        states = f" · {plan.far.in_ram}" if plan.far else ""
        states += f" of {format_bytes(plan.far.disk.file_bytes)} on disk" if plan.far and plan.far.disk else ""
        states += f" · recurrent states {format_bytes(plan.state_bytes)}" if plan.num_places else ""
        states += f" · KV in RAM up to {format_bytes(plan.kv_ram_bytes)}" if plan.kv_ram_bytes else ""
        states += f" · KV on disk up to {format_bytes(plan.kv_disk_bytes)}" if plan.kv_disk_bytes else ""
        report(f"{plan.place} · {plan.dtype} · weights {weights}{stored} · KV {kv}{states}")
    return plan


def _read_text(path: Path, spec: ModelSpec, on_phase: OnPhase) -> tuple[Tokenizer, ChatTemplate]:
    from localllm.models.vision.families import family_of
    from localllm.models.vision.sound import sound_family_of
    from localllm.text.chat_template import ChatTemplate

    with report_phase("tokenizer", on_phase) as report:
        with paused_collection():  # hundreds of thousands of texts, none of which is garbage
            tokenizer = read_tokenizer(path, () if spec.vision is None else (family_of(spec.vision).frame[1],))
        check_vocabulary(spec, tokenizer, read_tokenizer)
        template = ChatTemplate.of(tokenizer)
        if not template and spec.hearing is not None:
            template = ChatTemplate(sound_family_of(spec.hearing).template or None, tokenizer.special_tokens)
        report(f"{tokenizer.vocab_size} tokens" + ("" if template else " · no chat template"))
    return tokenizer, template


def read_tokenizer(path: Path, more: Sequence[str] = ()) -> Tokenizer:
    """Read the tokenizer of a checkpoint: from a folder's files, or from a GGUF file's metadata. more: special tokens
    that a GGUF file may lack; they are behind its last one."""
    from localllm.models.formats.checkpoint import is_gguf

    if is_gguf(path):
        from localllm.models.formats.gguf.checkpoint import metadata_of
        from localllm.text.gguf_tokenizer import tokenizer_of_gguf

        return tokenizer_of_gguf(metadata_of(path), more)
    from localllm.text.tokenizer import load_tokenizer

    return load_tokenizer(path)


def _load(
    path: Path, spec: ModelSpec, config: EngineConfig, plan: MemoryPlan, on_phase: OnPhase, beside: Future[Any]
) -> tuple[Executor, Callable[[MemoryPlan], MemoryReport]]:
    """Load the weights. Return their owner, and what compares `plan` with the plan in use once a runner is open.

    beside: work whose error ends the load.
    """
    from localllm.kernels.cpu.pack import describe_layout
    from localllm.machine.hardware import process_bytes
    from localllm.models.fit import MemoryReport

    if plan.device != "cpu" and config.kernels != "torch":
        require_kernels(config, plan, on_phase)
    process_before = process_bytes()
    with report_phase("weights", on_phase) as report:

        def progress(loaded: int, total: int) -> None:
            if beside.done():
                beside.result()
            report(f"{format_bytes(loaded)} of {format_bytes(total)}", loaded / total if total else None)

        executor = _executor(path, spec, config, plan, progress, report)
        if plan.device == "cpu" and (config.quantization or spec.quantization):
            report(describe_layout(config.cpu_weights))
    loaded = None if plan.ranks else process_bytes() - process_before  # the ranks' processes hold the weights
    return executor, lambda kept: _log_memory(MemoryReport.of(plan, kept, loaded))


def require_kernels(config: EngineConfig, plan: MemoryPlan, on_phase: OnPhase) -> None:
    """Launch a first kernel and compare what needs no model with PyTorch, so that nothing is loaded for kernels that
    cannot be launched. Raises `ConfigError`, and `DeviceLost` if a check stopped the GPU."""
    import torch

    from localllm.kernels.first_launch import require_launch
    from localllm.runner.opening import launch_options_of
    from localllm.runner.self_check import check_device

    device = torch.device(plan.device)
    require_launch(device)
    if plan.ranks and config.kernels == "checked":
        why = "Models that are split over several GPUs are not compared with PyTorch yet."
        raise ConfigError("--kernels checked serves no model on several GPUs.", why, "--kernels auto", param="kernels")
    with report_phase("kernels", on_phase) as report:
        choice = check_device(config, device, launch_options_of(config, device), report=report)
        report(choice.summary or "as checked before")


def _executor(
    path: Path, spec: ModelSpec, config: EngineConfig, plan: MemoryPlan, progress: Progress, report: PhaseReporter
) -> Executor:
    """Return the owner of the loaded weights: this process, or a process for each rank of the plan."""
    if plan.ranks:
        from localllm.ranks.executor import RankExecutor

        return RankExecutor.load(path, spec, config, plan, progress, report)
    from localllm.runner.executor import LocalExecutor

    return LocalExecutor.load(path, spec, config, plan, progress)


def plan_again(
    executor: Executor, spec: ModelSpec, plan: MemoryPlan, config: EngineConfig, hardware: Hardware
) -> MemoryPlan:
    """Plan another engine on weights that are loaded, which were laid out for `plan`'s devices and dtype. `hardware`
    must count the weights as free memory. Raises `DoesNotFit`."""
    from localllm.models.fit import plan_memory

    config = replace(config, device=plan.device, dtype=plan.dtype)
    again = plan_memory(
        config, spec, executor.weights_bytes, hardware, resident_bytes=executor.resident_bytes, ranks=plan.ranks,
        far=plan.far,
    )  # fmt: skip
    return replace(again, work=plan.work)


def _check_kv_cache(
    executor: Executor, config: EngineConfig, plan: MemoryPlan, path: Path, spec: ModelSpec, hardware: Hardware,
    tokenizer: Tokenizer, report: PhaseReporter,
) -> str:  # fmt: skip
    """Compare the model's answers with a KV cache of 4 bits and with its own, in two small engines one after the other.
    Return a warning; empty: the answers are the same, or the cache has more bits. Raises `UnsupportedOption`."""
    from localllm.kernels.kv_format import KV_FORMATS
    from localllm.serving.guard import ANSWER_LEN, agreement, guard_config, questions, require_agreement

    if not KV_FORMATS[plan.kv_dtype].has_four_bits:
        return ""
    report(f"comparing answers with a KV cache in {plan.kv_dtype}")

    @asynccontextmanager
    async def opened(kv_cache_dtype: str) -> AsyncIterator[EngineClient]:
        small = guard_config(config, plan, kv_cache_dtype)
        runner, kept = executor.open_runner(
            small, plan_again(executor, spec, plan, small, hardware), hardware, lambda text: None
        )
        loop, _, client = engine_parts(small, kept, path, spec, tokenizer, None, runner)
        try:
            await client.start()
            yield client
        finally:
            await client.stop()
            loop.runner.close()

    with ThreadPoolExecutor(1, "localllm-guard") as thread:  # this one may have an event loop
        compared = thread.submit(
            agreement, partial(opened, "auto"), partial(opened, plan.kv_dtype), questions(tokenizer, plan), ANSWER_LEN
        )
        found = compared.result()
    warning = require_agreement(found, plan.kv_dtype)
    log.log(logging.WARNING if warning else logging.INFO, "kv cache dtype=%s agreement: %s", plan.kv_dtype, found)
    return warning


def _log_memory(memory: MemoryReport) -> MemoryReport:
    for part in memory.parts:
        measured = "-" if part.measured_bytes is None else part.measured_bytes
        log.info("memory part=%r predicted=%d measured=%s", part.name, part.predicted_bytes, measured)
    return memory


def _assemble(
    settings: Settings,
    found: ResolvedModel,
    spec: ModelSpec,
    plan: MemoryPlan,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    runner: Runner,
    stores: Sequence[BlockStore],
) -> ServedModel:
    """Build the served model around a loaded runner."""
    from localllm.serving.answers.sounds import Senses
    from localllm.text.answers.detect import answer_format

    config, senses = settings.engine, Senses(_sight(settings, found.path, spec, plan), _hearing(settings, spec, plan))
    template = template.of_seeing(senses.marks) if any(senses) else template
    answers = answer_format(template)
    loop, admission, client = engine_parts(config, plan, found.path, spec, tokenizer, answers, runner, stores)
    name, aliases = names_of(settings, found)
    return ServedModel(
        name=name,
        path=found.path,
        spec=spec,
        plan=plan,
        tokenizer=tokenizer,
        chat_template=template,
        client=client,
        created_s=time.time(),
        loop=loop,
        admission=admission,
        sampling_defaults=sampling_defaults(spec.generation_defaults) if config.generation_config == "auto" else {},
        max_num_queued_reqs=config.max_num_queued_reqs,
        aliases=aliases,
        answers=answers,
        sight=senses.sight,
        hearing=senses.hearing,
    )


def _sight(settings: Settings, path: Path, spec: ModelSpec, plan: MemoryPlan) -> Sight | None:
    """Return what reads pictures; None: the model does not see, or its tower is not loaded."""
    if spec.vision is None or plan.pictures is None:
        return None
    from localllm.media.picture import rgb
    from localllm.media.source import Fetcher
    from localllm.models.vision.processor import PictureProcessor
    from localllm.serving.answers.pictures import Sight

    config = settings.engine
    processor = PictureProcessor(path, spec.vision, rgb, plan.pictures.limits)
    options = json.loads(config.mm_processor_kwargs or "{}")
    fetcher = Fetcher(settings.server.allowed_media_domains)
    return Sight(processor, fetcher, config.most_media("image"), config.max_image_pixels, options)


def _hearing(settings: Settings, spec: ModelSpec, plan: MemoryPlan) -> Hearing | None:
    """Return what reads sound; None: the model does not hear, or its tower is not loaded."""
    if spec.hearing is None or plan.sounds is None:
        return None
    from localllm.media.sound import SoundLimits
    from localllm.media.source import Fetcher
    from localllm.models.vision.sound import SoundProcessor
    from localllm.serving.answers.sounds import Hearing

    server, processor = settings.server, SoundProcessor(spec.hearing, plan.sounds.rows)
    limits = SoundLimits(
        server.largest_audio_bytes, min(server.max_audio_seconds, processor.most_s), damaged_advice="Save it again.",
        advice="Cut it, send it to /v1/audio/transcriptions, or start with a larger --max-model-len.",
    )  # fmt: skip
    fetcher = Fetcher(server.allowed_media_domains, kind="audio", most_bytes=limits.num_bytes)
    return Hearing(processor, fetcher, limits, settings.engine.most_media("audio"))


def engine_parts(
    config: EngineConfig,
    plan: MemoryPlan,
    path: Path,
    spec: ModelSpec,
    tokenizer: Tokenizer,
    answers: AnswerFormat | None,
    runner: Runner,
    stores: Sequence[BlockStore] = (),
) -> tuple[EngineLoop, Admission, EngineClient]:
    """Return an engine's loop, its admission and its client."""
    from localllm.engine.admission import Admission, ModelLimits
    from localllm.engine.client import EngineClient
    from localllm.text.grammar import Grammars
    from localllm.text.reasoning_budget import ReasoningBudgets

    loop = _engine_loop(config, plan, fingerprint(path, plan, config, spec), runner, path, stores)
    request_limits = ModelLimits(
        plan.max_model_len, spec.vocab_size, spec.eos_token_ids, config.max_logprobs, config.enable_prompt_embeds,
        most_media_rows=max((each.rows for each in (plan.pictures, plan.sounds) if each is not None), default=0),
        takes_processors=not plan.ranks,
        source=spec.source, block_size=plan.block_size,
    )  # fmt: skip
    grammars = Grammars(tokenizer, spec.vocab_size, spec.eos_token_ids)
    seed = secrets.randbits(63) if config.seed is None else config.seed
    log.info("seed for requests that bring none seed=%d", seed)
    admission = Admission(request_limits, tokenizer, seed, grammars, ReasoningBudgets(tokenizer, answers))
    return loop, admission, EngineClient(loop, admission, tokenizer)


def _engine_loop(
    config: EngineConfig, plan: MemoryPlan, fingerprint: bytes, runner: Runner, path: Path,
    stores: Sequence[BlockStore],
) -> EngineLoop:  # fmt: skip
    from localllm.engine.loop import EngineLoop
    from localllm.engine.memory.block_names import BlockHasher
    from localllm.engine.memory.cache_manager import CacheManager
    from localllm.engine.memory.ledger import Ledger
    from localllm.engine.memory.state_pool import StatePool
    from localllm.engine.scheduler import Scheduler
    from localllm.engine.scheduler_config import SchedulerConfig
    from localllm.engine.speculation import Speculation
    from localllm.models.fit.cache_sizes import state_interval

    choice, support = config.speculation, runner.drafts
    if choice.method in ("ngram", "draft") and not choice.is_off and not support.most:
        raise UnsupportedOption(
            "Speculation is not supported here.",
            f"Drafts cannot be verified: {support.why_none}.",
            "--speculative auto uses lookup where it is supported.",
            param="speculative",
        )
    speculation = Speculation(support, most=choice.most, why_off="--speculative off" if choice.is_off else "")
    log.info("speculation most_drafts=%d why_off=%r", speculation.most, speculation.why_off)
    limits = SchedulerConfig(
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        block_size=plan.block_size,
        long_prefill_token_threshold=plan.long_prefill_token_threshold,
        target_step_s=plan.target_step_s,
        fixed_chunk=plan.fixed_chunk,
        stream_from=0 if plan.far is None else plan.far.stream_from,
        policy=config.scheduling_policy,
        max_num_queued_reqs=config.max_num_queued_reqs,
        enable_prefix_caching=config.enable_prefix_caching,
        state_interval=state_interval(plan.bytes_per_state, plan.block_size),
        num_stages=runner.num_stages,
        encoder_rows=0 if (encoded := plan.encoder) is None else encoded.kept_rows,
        encoder_budget=0 if encoded is None else encoded.rows,
    )
    ledger = Ledger(plan.num_blocks, plan.block_size, plan.windows, step_tokens=plan.max_num_batched_tokens)
    cache = CacheManager(
        limits,
        ledger,
        BlockHasher(fingerprint, plan.block_size),
        StatePool(plan.num_places) if plan.num_places else None,
        _shared_tiers(runner, ledger, stores) or _kv_tiers(config, plan, fingerprint, runner, ledger, path),
    )
    return EngineLoop(Scheduler(limits, cache, speculation=speculation), runner, depth=plan.async_depth)


def _kv_tiers(
    config: EngineConfig, plan: MemoryPlan, fingerprint: bytes, runner: Runner, ledger: Ledger, path: Path
) -> KVTiers | None:
    """Return what keeps KV blocks outside of the cache; None: nothing is to be kept. Raises `ConfigError` for a folder
    that cannot be written."""
    from localllm.engine.memory.block_stores import DiskStore, RamStore, Transfers, kv_folder
    from localllm.engine.memory.tiers import KVTiers
    from localllm.models.library.catalog import resolve_model

    if not (plan.kv_ram_bytes or plan.kv_disk_bytes):
        return None
    assert runner.block_bytes, "the plan has tiers for blocks that do not move"
    stores: list[BlockStore] = [RamStore(plan.kv_ram_bytes)] if plan.kv_ram_bytes else []
    if plan.kv_disk_bytes:
        folder = kv_folder(config.kv_offload_dir)
        try:
            stores.append(DiskStore(folder, fingerprint, plan.kv_disk_bytes, resolve_model(str(path)).name, str(path)))
        except OSError as error:
            why, hint = f"{error.strerror or error}.", "Choose another --kv-offload-dir."
            raise ConfigError(f"KV blocks cannot be kept in {folder}.", why, hint, param="kv_offload_dir") from error
    log.info("kv tiers ram=%d swap=%d disk=%d", plan.kv_ram_bytes, plan.kv_swap_bytes, plan.kv_disk_bytes)
    return KVTiers(ledger, runner.block_bytes, Transfers(stores), plan.kv_swap_bytes)


def _shared_tiers(runner: Runner, ledger: Ledger, stores: Sequence[BlockStore]) -> KVTiers | None:
    """Return what keeps KV blocks in stores that several engines share. Raises `UnsupportedOption` for a model whose
    blocks cannot move."""
    from localllm.engine.memory.block_stores import Transfers
    from localllm.engine.memory.tiers import SHARED_STEP_BYTES, KVTiers

    if not stores:
        return None
    if not runner.block_bytes:
        what, why = "The KV blocks of this model cannot be handed over.", "Each replica is divided over several ranks."
        raise UnsupportedOption(what, why, "Leave out --prefill-replicas.", param="prefill_replicas")
    return KVTiers(ledger, runner.block_bytes, Transfers(stores), step_bytes=SHARED_STEP_BYTES)


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checkpoint's recommended sampling, as fields of `SamplingParams`; `do_sample: false` means greedy."""
    recommended = {
        ours: value
        for ours, info in SAMPLING_PARAMS.items()
        if (value := generation_config.get(info.spellings.get(GENERATION_CONFIG, ""))) is not None
    }
    if generation_config.get("do_sample") is False:
        recommended["temperature"] = 0.0
    return recommended
