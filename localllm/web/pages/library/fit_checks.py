"""The fit of a model on this machine, as a line and as a table: the memory plan in words.

For a model on the hub the headers are downloaded. Only a few checks run at a time, and results are cached for a while:
a page of search results asks for twenty.
Does not know: HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from localllm.config.settings import SETTINGS, EngineConfig, Settings
from localllm.errors import AccessDenied, HubOffline, HubUnreachable, LocalLLMError
from localllm.machine.bandwidth import memory_bandwidth, with_kept_speeds
from localllm.machine.hardware import Hardware, read_hardware
from localllm.models.fit import Estimate, MemoryPlan, option_rows
from localllm.models.fit.checkpoint import estimate_measured
from localllm.models.fit.conversation_bytes import needs, needs_in_words
from localllm.models.fit.estimate import fit_rows, rank_columns, rank_rows
from localllm.models.fit.speed import predict
from localllm.models.library.about import InspectedCheckpoint, gguf_rows, inspect_checkpoint, spec_rows
from localllm.models.library.hub import client
from localllm.models.library.names import parse_name
from localllm.models.library.pick_list import Pick
from localllm.models.spec.model_spec import ModelSpec
from localllm.serving.eviction import hardware_once_free
from localllm.serving.manager import ModelManager
from localllm.units import format_bytes, format_count, format_parameters
from localllm.web.pages.frame.views import Fact, Segment, View, stacked, view

FitKind = Literal["fits", "shorter", "offload", "no", "unknown"]


@view("library/_fit.html")
class FitVerdict(View):
    """The answer whether a model fits on this machine, with the numbers, or why this is unknown."""

    kind: FitKind
    title: str  # Fits, ...
    numbers: str
    hint: str = ""
    download: str = ""  # 5.0 GiB to download
    terms_url: str = ""  # for a gated repository: the page where its terms are accepted


@dataclass(frozen=True, slots=True)
class FileRow:
    """A file of a model or of a download."""

    name: str
    size: str
    fraction: float | None = None  # 0 to 1 while it is downloaded; None: no bar


@dataclass(frozen=True, slots=True)
class FitTable:
    """The fit of a model on each device of the machine."""

    segments: tuple[Segment, ...]  # shares of the first device's free memory
    devices: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    notes: tuple[str, ...]
    options: tuple[tuple[str, ...], ...]  # flags, context, requests at a time, cost
    ranks: tuple[str, ...] = ()  # headings of the table per rank; empty: the model runs on one device
    rank_rows: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class LoadOption:
    """A setting that is chosen for the load of a model: one of `choices`, or a number up to `high`."""

    name: str
    label: str
    value: str
    choices: tuple[str, ...] = ()
    high: int = 0


@view("library/_load_estimate.html")
class LoadEstimate(View):
    """The memory of a load with the chosen options, and whether it fits."""

    verdict: FitVerdict
    segments: tuple[Segment, ...] = ()


@view("library/_load_options.html")
class LoadOptions(View):
    """The form that loads a model with options. What they need is counted while they are chosen."""

    model: str
    options: tuple[LoadOption, ...]
    estimate: LoadEstimate
    is_loaded: bool = False  # it is unloaded first


CHOSEN = {
    "max_model_len": "Context, tokens",
    "kv_cache_dtype": "KV cache",
    "max_num_seqs": "Concurrent requests",
    "n_cpu_moe": "CPU experts",
    "tensor_parallel_size": "GPUs",
}
"""The settings that the page of a model offers for a load, with their labels."""
KV_TYPES = ("auto", "fp8", "int8", "k8v4", "int4")

AT_ONCE = 2
HOLDS_S = 120.0
KEPT = 200

TITLES: dict[FitKind, str] = {
    "fits": "Fits",
    "shorter": "Fits with a shorter context",
    "offload": "Fits on the CPU only",
    "no": "Does not fit",
    "unknown": "Unknown",
}


@dataclass(frozen=True, slots=True)
class FitResult:
    """The result of checking a model."""

    name: str
    verdict: FitVerdict
    table: FitTable | None = None
    facts: tuple[Fact, ...] = ()
    files: tuple[FileRow, ...] = ()
    download_bytes: int | None = None  # None: the model is on this machine
    error: LocalLLMError | None = None
    context: int = 0  # tokens that the plan has room for; 0: the model does not fit
    trained: int = 0  # tokens that the checkpoint allows
    num_gpus: int = 0  # of the machine
    has_experts: bool = False  # in its layers


class FitChecks:
    """Checks models and caches the results."""

    def __init__(self, manager: ModelManager, settings: Settings) -> None:
        self._manager, self._settings = manager, settings
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._known: dict[str, tuple[float, FitResult]] = {}

    async def of(self, name: str, path: str | None = None, *, anew: bool = False) -> FitResult:
        """Return the fit of a model. `path`: its location, if known. Errors become part of the result."""
        async with self._slots:
            known = self._known.get(name)
            if known is not None and time.monotonic() - known[0] < HOLDS_S and not anew:
                return known[1]
            fit = await self.with_options(name, path, {})
            if not isinstance(fit.error, HubUnreachable | HubOffline):
                self._known[name] = time.monotonic(), fit
            if len(self._known) > KEPT:
                del self._known[next(iter(self._known))]
            return fit

    async def with_options(self, name: str, path: str | None, options: Mapping[str, Any]) -> FitResult:
        """Return the fit of a model that is loaded with these settings of the engine."""
        hardware = await self.hardware()
        config = replace(self.config(name), **options)
        return await asyncio.to_thread(check_fit, path or name, config, hardware, paths=path is not None)

    async def of_pick(self, pick: Pick) -> FitResult:
        """Return the fit of a suggested model by the sizes in the list, without asking the hub."""
        hardware = await self.hardware()
        return await asyncio.to_thread(check_pick, pick, self.config(pick.name), hardware)

    async def hardware(self) -> Hardware:
        return hardware_once_free(await asyncio.to_thread(read_hardware), self._manager.entries)

    def config(self, name: str) -> EngineConfig:
        """Return the settings with which a model of that name would be loaded."""
        entry = self._manager.register.find(name)
        settings = entry.settings if entry is not None and entry.settings is not None else self._settings.of_model(name)
        return settings.engine


def check_fit(name: str, config: EngineConfig, hardware: Hardware, *, paths: bool = True) -> FitResult:
    """Check a model by its headers, on disk or on the hub. Blocking. paths: the name may be a path on this machine."""
    try:
        with inspect_checkpoint(name, paths=paths) as looked:
            try:
                spec, estimates = estimate_measured(looked.path, config, hardware)
            except LocalLLMError as error:
                return _fit_result(looked, _refused(error, name, looked), None, None, error)
            chosen = estimates[0]
            said = verdict(looked.download_bytes, estimates)
            context = chosen.plan.max_model_len if chosen.plan is not None else 0
            found = _fit_result(looked, said, table(estimates), spec, None)
            return replace(
                found,
                context=context,
                trained=spec.max_position,
                num_gpus=len(hardware.gpus),
                has_experts=spec.mixture is not None,
            )
    except LocalLLMError as error:
        return FitResult(name, _refused(error, name, None), error=error)


def load_options(name: str, fit: FitResult, config: EngineConfig, *, is_loaded: bool) -> LoadOptions:
    """Return the form for loading a model that fits."""
    options = [
        LoadOption("max_model_len", CHOSEN["max_model_len"], str(fit.context), high=max(fit.trained, fit.context)),
        LoadOption("kv_cache_dtype", CHOSEN["kv_cache_dtype"], config.kv_cache_dtype, KV_TYPES),
        LoadOption("max_num_seqs", CHOSEN["max_num_seqs"], str(config.max_num_seqs), high=4096),
    ]
    if fit.num_gpus and fit.has_experts:
        layers = tuple(dict.fromkeys(("auto", "0", config.n_cpu_moe, "all")))
        options.append(LoadOption("n_cpu_moe", CHOSEN["n_cpu_moe"], config.n_cpu_moe, layers))
    if fit.num_gpus > 1:
        size = str(config.tensor_parallel_size or "auto")
        sizes = ("auto", *map(str, range(1, fit.num_gpus + 1)))
        options.append(LoadOption("tensor_parallel_size", CHOSEN["tensor_parallel_size"], size, sizes))
    return LoadOptions(name, tuple(options), load_estimate(fit), is_loaded)


def load_estimate(fit: FitResult) -> LoadEstimate:
    return LoadEstimate(fit.verdict, fit.table.segments if fit.table is not None else ())


def chosen_options(form: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of the engine that a form chooses, checked as a flag's are. Raises `ConfigError`."""
    chosen = {}
    for name, label in CHOSEN.items():
        text = form.get(name, "").strip()
        if text:
            said = f"{label}: {text[:80]!r}"
            chosen[name] = SETTINGS[name].parse(text, said)
            SETTINGS[name].check(chosen[name], said)
    return chosen


def check_pick(pick: Pick, config: EngineConfig, hardware: Hardware) -> FitResult:
    """Check a suggested model by the sizes in the list. Blocking: it measures the memory's bandwidth once."""
    about = {"parameters": format_parameters(pick.parameters), "license": pick.license or "not stated"}
    facts = tuple(_fact(name, value) for name, value in {**spec_rows(pick.spec), **about}.items())
    hardware = with_kept_speeds(hardware)
    hardware = replace(hardware, speeds=hardware.speeds._replace(ram=memory_bandwidth(hardware)))
    try:
        plan = pick.plan(config, hardware)
    except LocalLLMError as error:
        said = FitVerdict("no", TITLES["no"], error.why, error.hint, _download_words(pick.bytes))
        return FitResult(pick.name, said, facts=facts, download_bytes=pick.bytes)
    alone = needs(lambda one: pick.plan(one, hardware), config, pick.spec, plan.max_model_len)
    speed = predict(plan, hardware)
    numbers = " · ".join(filter(None, (needs_in_words(alone), _free(plan), speed.words() if speed else "")))
    kind: FitKind = "fits" if plan.max_model_len >= (config.max_model_len or pick.spec.max_position) else "shorter"
    said = FitVerdict(kind, TITLES[kind], numbers, pick.says, _download_words(pick.bytes))
    return FitResult(pick.name, said, facts=facts, download_bytes=pick.bytes)


def verdict(download_bytes: int | None, estimates: Sequence[Estimate]) -> FitVerdict:
    """Return the verdict for the device that a load would use, else for one that could hold the model."""
    chosen = estimates[0]
    other = next((each for each in estimates[1:] if each.plan is not None), None)
    download = _download_words(download_bytes)
    if chosen.plan is not None:
        kind: FitKind = "fits" if chosen.verdict == "fits" else "shorter"
        hint = "" if kind == "fits" else _context_hint(chosen)
        is_left = chosen.device == "cpu" and any(each.device.startswith("cuda") for each in estimates)
        if is_left:
            why = next((each.error.why for each in estimates if each.error is not None), "")
            kind, hint = "offload", f"The GPU cannot hold it, nor a part of it beside the rest in RAM: {why}"
        return FitVerdict(kind, TITLES[kind], _memory_line(chosen), hint, download)
    why = f"{chosen.error.why}" if chosen.error is not None else ""
    if other is not None and other.device == "cpu":
        hint = f"The GPU cannot hold it, nor a part of it beside the rest in RAM: {why} --device cpu runs "
        return FitVerdict(
            "offload", TITLES["offload"], _memory_line(other), f"{hint}all of it on the CPU, slower.", download
        )
    if other is not None and other.plan is not None and other.plan.far is not None and other.plan.far.disk is not None:
        title, hint = "Runs with its experts on disk", f"{why} --weights-on disk reads them for each token: slow."
        return FitVerdict("offload", title, _memory_line(other), hint, download)
    if other is not None:
        return FitVerdict(
            "offload", f"Fits on {other.device} only", _memory_line(other), f"--device {other.device}", download
        )
    return FitVerdict("no", TITLES["no"], why, _context_hint(chosen), download)


def table(estimates: Sequence[Estimate]) -> FitTable:
    """Return the fit on every device of the machine, side by side."""
    devices = tuple(each.name if each.device == "cpu" else f"{each.device} {each.name}" for each in estimates)
    rows = tuple((name, tuple(cells)) for name, cells in fit_rows(estimates))
    notes = tuple(note for each in estimates[:1] if each.plan is not None for note in each.plan.notes)
    notes += tuple(each.speech.why for each in estimates[:1] if each.speech is not None)
    ranks = estimates[0].needs.ranks
    options = option_rows([*estimates[0].placements, *estimates[0].options])[1:]
    return FitTable(
        _parts(estimates[0].needs), devices, rows, notes, tuple(options),
        tuple(rank_columns(ranks)), tuple((name, tuple(cells)) for name, cells in rank_rows(ranks)) if ranks else (),
    )  # fmt: skip


def _parts(needs: MemoryPlan) -> tuple[Segment, ...]:
    """Return the free memory, split by use."""
    other = needs.activation_bytes + needs.graph_bytes + needs.comm_bytes
    parts = [
        ("Weights", "weights", needs.weights_bytes),
        ("KV cache", "used", needs.kv_bytes),
        *([("Recurrent states", "cached", needs.state_bytes)] if needs.num_places else []),
        ("Other", "prefill", other),
        ("Reserve", "queue", needs.reserve_bytes),
        ("Unused", "free", max(0, needs.free_bytes - needs.reserve_bytes - needs.total_bytes)),
    ]
    return stacked([(name, kind, float(size), format_bytes(size)) for name, kind, size in parts])


def _fit_result(
    looked: InspectedCheckpoint,
    said: FitVerdict,
    shown: FitTable | None,
    spec: ModelSpec | None,
    error: LocalLLMError | None,
) -> FitResult:
    facts = {} if spec is None else dict(spec_rows(spec))
    if looked.plan is not None:
        facts = {"revision": f"{looked.plan.revision} ({looked.plan.commit[:12]})", **facts}
        facts |= {"license": looked.plan.license or "not stated"}
        files = [(file.name, file.size) for file in looked.plan.files]
    else:
        assert looked.model is not None
        if looked.model.format == "gguf":
            facts |= gguf_rows(looked.path)
        facts |= {"path": str(looked.path)}
        parent = looked.path if looked.path.is_dir() else looked.path.parent
        files = [(str(file.relative_to(parent)), file.stat().st_size) for file in looked.model.files]
    told = tuple(_fact(name, value) for name, value in facts.items())
    rows = tuple(FileRow(name, format_bytes(size)) for name, size in sorted(files))
    return FitResult(looked.name, said, shown, told, rows, looked.download_bytes, error)


def _refused(error: LocalLLMError, name: str, looked: InspectedCheckpoint | None) -> FitVerdict:
    download = _download_words(looked.download_bytes if looked else None)
    if isinstance(error, AccessDenied):
        return FitVerdict("unknown", "Gated", error.what, terms_url=terms_url(name))
    title = "Not supported" if looked is not None else TITLES["unknown"]
    return FitVerdict("unknown", title, f"{error.what} {error.why}".strip(), error.hint, download)


def _fact(name: str, value: str) -> Fact:
    return Fact(name.capitalize() if name.islower() else name, value)


def _download_words(size: int | None) -> str:
    return f"{format_bytes(size)} to download" if size else ""


def terms_url(name: str) -> str:
    """Return the repository's page on the hub, where its terms can be accepted."""
    return f"{client.endpoint()}/{parse_name(name).base}"


def _memory_line(each: Estimate) -> str:
    """5.5 GiB at 4,096 tokens (9.0 GiB at its longest, 33,408) · 11.5 GiB free on RTX · 11 to 24 tokens/s"""
    plan = each.plan
    assert plan is not None
    need = needs_in_words(each.one_request) or f"{format_bytes(plan.total_bytes)} in all"
    cut = plan.max_model_len < each.wanted
    context = f"context {format_count(plan.max_model_len)} of {format_count(each.wanted)} tokens" if cut else ""
    speed = each.speed or each.speech
    free = _free(plan, "" if each.device == "cpu" else each.name)
    far = plan.far.in_ram if plan.far else ""
    return " · ".join(filter(None, (need, far, context, free, speed.words() if speed else "")))


def _free(plan: MemoryPlan, device: str = "") -> str:
    return f"{format_bytes(plan.free_bytes)} free {f'on {device}' if device else 'in memory'}"


def _context_hint(each: Estimate) -> str:
    """Return the mildest of the options that allow the longest context."""
    best = max(each.options, key=lambda option: min(option.context, each.wanted), default=None)
    if best is None:
        return ""
    words = best.words if best.words.startswith("without") else f"with {best.words}"
    return f"{words[0].upper()}{words[1:]}: context {format_count(best.context)} tokens ({best.cost})."
