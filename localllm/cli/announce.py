"""The output of `up` and `serve` while a server starts: for a terminal, a log, a service manager, or as JSON.

All show the same facts, which are measured or read, never guessed. At a terminal most of them only with
--verbose; the lines without it are made in start_lines.py.
Does not know: how a server is built (up.py).
"""

from __future__ import annotations

import json
import logging
import platform
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

from localllm.cli.config import package_versions
from localllm.cli.start_lines import StartedServer, first_line, machine_in_words, ready_lines
from localllm.cli.suggestion import best_pick, installed_model
from localllm.config.settings import Settings
from localllm.engine.stats import NO_SPECULATION
from localllm.errors import LocalLLMError
from localllm.machine.hardware import Hardware, may_have_gpu, read_hardware
from localllm.machine.systemd import notify
from localllm.models.library.catalog import DEMO_NAME
from localllm.serving.phases import DRAIN_S, Phase
from localllm.serving.served import ServedModel
from localllm.units import format_bytes, format_count, format_seconds
from localllm.up import Ready
from localllm.version import __version__

if TYPE_CHECKING:
    from rich.progress import TaskID

    from localllm.models.fit import MemoryPart


log = logging.getLogger("localllm")

DOWNLOAD_LINE_EVERY_S = 10.0


class TerminalAnnouncer:
    """Output for people: what they need to begin, and a progress bar while weights load; `verbose`: a line per fact."""

    def __init__(self, out: TextIO | None = None, *, verbose: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._verbose = verbose
        self._console = Console(file=out or sys.stdout, highlight=False, soft_wrap=True)
        self._bars = Progress(
            TextColumn(" {task.description:<10}"),
            BarColumn(20),
            TextColumn("{task.fields[detail]}"),
            console=self._console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._settings = Settings()
        self._hardware: Hardware | None = None

    def starting(self, settings: Settings) -> None:
        self._settings = settings
        if self._verbose:
            torch = package_versions()["torch"]
            python = platform.python_version()
            self._say(f"localllm {__version__} · Python {python} · torch {torch} · no telemetry", style="bold")
            return
        if not may_have_gpu():  # else torch is asked, and `found` says it
            self._hardware = read_hardware()
        self._say(first_line(__version__, self._hardware), style="bold")

    def found(self, hardware: Hardware) -> None:
        was_said, self._hardware = self._hardware is not None, hardware
        if self._verbose:
            for line in hardware_lines(hardware):
                self._say(line)
        elif not was_said:
            self._say(machine_in_words(hardware))

    def phase(self, phase: Phase) -> None:
        if phase.done:
            self._forget(phase.name)
            if self._verbose:
                self._say(f" {phase.name:<10} {format_seconds(phase.seconds):>8}  {phase.detail}")
        elif phase.fraction is not None:
            self._bars.start()
            if phase.name not in self._tasks:
                self._tasks[phase.name] = self._bars.add_task(phase.name, total=1.0, detail="")
            self._bars.update(self._tasks[phase.name], completed=phase.fraction, detail=phase.detail)

    def ready(self, ready: Ready) -> None:
        self._bars.stop()
        if not self._verbose:
            for number, line in enumerate(ready_lines(started_facts(ready, self._settings, self._hardware))):
                self._say(line, style="bold green" if number == 0 else None)
            return
        if ready.model is None:
            self._say(f"The first request loads {ready.name}.")
        else:
            for note in ready.model.plan.notes:
                self._say(f"Note: {note}")
            self._say(f"Memory  {memory_line(ready.model)}")
            self._say(f"Context {context_line(ready.model)}")
            if ready.model.spec.task == "generate":
                self._say(f"Drafts  {drafts_line(ready.model)}")
        self._say(f"Ready in {format_seconds(ready.seconds)}", style="bold green")
        for name, text in doors(ready):
            self._say(f"  {name:<10} {text}")
        self._say(f"Ctrl+C stops (running requests get up to {DRAIN_S:.0f} s); twice to force.")

    def stopping(self, num_requests: int) -> None:
        self._bars.stop()
        if num_requests:
            self._say(f"\nStopping: waiting for {count(num_requests, 'request')}. Ctrl+C again to force.")
        else:
            self._say("\nStopped.")

    def close(self) -> None:
        """Restore the terminal, also after an error."""
        self._bars.stop()

    def _say(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False)  # a model's name may contain brackets

    def _forget(self, name: str) -> None:
        if name in self._tasks:
            self._bars.remove_task(self._tasks.pop(name))
        if not self._tasks:
            self._bars.stop()


def started_facts(ready: Ready, settings: Settings, hardware: Hardware | None) -> StartedServer:
    """Return the facts for start_lines.py; with the demo, the model to try instead."""
    is_demo = settings.engine.model == DEMO_NAME
    installed = installed_model() if is_demo else None
    pick = None
    if is_demo and installed is None:
        try:
            pick = best_pick(settings, hardware)
        except LocalLLMError as error:  # a wrong list in the config file must not end a start
            log.warning("no suggested model reason=%s", error)
    facts = StartedServer(
        ready.url, ready.seconds, ready.name, is_demo, has_pages=ready.has_pages, needs_key=ready.needs_key,
        installed=installed, pick=pick, link=ready.link,
    )  # fmt: skip
    if ready.model is None:
        return facts
    plan, generates = ready.model.plan, ready.model.spec.task == "generate"
    return replace(facts, max_model_len=plan.max_model_len, generates=generates, notes=tuple(plan.notes))


class LogAnnouncer:
    """Output for logs: one line per event, as key=value pairs."""

    def __init__(self, open_log_file: Callable[[], object] | None = None) -> None:
        """`open_log_file` is called once the port is bound."""
        self._open_log_file = open_log_file
        self._download_told_s = 0.0

    def starting(self, settings: Settings) -> None:
        if self._open_log_file is not None:
            self._open_log_file()
        log.info(
            "starting version=%s python=%s model=%s", __version__, platform.python_version(), settings.engine.model
        )

    def found(self, hardware: Hardware) -> None:
        for line in hardware_lines(hardware):
            log.info("hardware %s", line)

    def phase(self, phase: Phase) -> None:
        if phase.done:
            log.info("loaded phase=%s seconds=%.2f detail=%r", phase.name, phase.seconds, phase.detail)
        elif phase.name == "download" and phase.seconds - self._download_told_s >= DOWNLOAD_LINE_EVERY_S:
            self._download_told_s = phase.seconds
            log.info("download %s", phase.detail)

    def ready(self, ready: Ready) -> None:
        link = "localllm link"  # the verb: a link itself does not belong into a log
        log.info("ready url=%s model=%s seconds=%.1f manage=%r", ready.url, ready.name, ready.seconds, link)

    def stopping(self, num_requests: int) -> None:
        log.info("stopping requests=%d limit_s=%.0f", num_requests, DRAIN_S)

    def close(self) -> None:
        """Nothing to undo."""


class ServiceAnnouncer:
    """Output for systemd: READY=1 once the model is served, STATUS=loading ... before."""

    def __init__(self) -> None:
        self._told = ""

    def starting(self, settings: Settings) -> None:
        self._tell(f"starting {settings.engine.model}")

    def found(self, hardware: Hardware) -> None:
        """The log has the hardware."""

    def phase(self, phase: Phase) -> None:
        share = "" if phase.fraction is None or phase.done else f" {phase.fraction:.0%}"
        self._tell(f"loading: {phase.name}{share}")

    def ready(self, ready: Ready) -> None:
        doing = "serving" if ready.model is not None else "the first request loads"
        notify("READY=1", f"STATUS={doing} {ready.name} at {ready.url}")

    def stopping(self, num_requests: int) -> None:
        notify("STOPPING=1", f"STATUS=stopping: {num_requests} running requests")

    def close(self) -> None:
        """Nothing to undo."""

    def _tell(self, status: str) -> None:
        """Send a status that differs from the last one: a load reports its progress many times per percent."""
        if status != self._told:
            self._told = status
            notify(f"STATUS={status}")


class Announcers:
    """Passes every event on to several announcers."""

    def __init__(self, *announcers: TerminalAnnouncer | LogAnnouncer | JsonAnnouncer | ServiceAnnouncer) -> None:
        self._announcers = announcers

    def starting(self, settings: Settings) -> None:
        for announcer in self._announcers:
            announcer.starting(settings)

    def found(self, hardware: Hardware) -> None:
        for announcer in self._announcers:
            announcer.found(hardware)

    def phase(self, phase: Phase) -> None:
        for announcer in self._announcers:
            announcer.phase(phase)

    def ready(self, ready: Ready) -> None:
        for announcer in self._announcers:
            announcer.ready(ready)

    def stopping(self, num_requests: int) -> None:
        for announcer in self._announcers:
            announcer.stopping(num_requests)

    def close(self) -> None:
        for announcer in self._announcers:
            announcer.close()


class JsonAnnouncer:
    """Output for programs: one JSON object per event on standard output."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout

    def starting(self, settings: Settings) -> None:
        self._say("starting", version=__version__, model=settings.engine.model)

    def found(self, hardware: Hardware) -> None:
        gpus = [
            {"name": gpu.name, "total_bytes": gpu.total_bytes, "free_bytes": gpu.free_bytes} for gpu in hardware.gpus
        ]
        self._say("hardware", gpus=gpus, cpu_cores=hardware.cpu_cores, ram_available_bytes=hardware.ram_available_bytes)

    def phase(self, phase: Phase) -> None:
        if phase.done:
            self._say("phase", phase=phase.name, seconds=round(phase.seconds, 4), detail=phase.detail)

    def ready(self, ready: Ready) -> None:
        facts = {} if ready.model is None else _facts_of(ready.model)
        self._say("ready", url=ready.url, model=ready.name, seconds=round(ready.seconds, 3), **facts)

    def stopping(self, num_requests: int) -> None:
        self._say("stopping", requests=num_requests)

    def close(self) -> None:
        """Nothing to undo."""

    def _say(self, event: str, **facts: Any) -> None:
        print(json.dumps({"event": event, **facts}), file=self._out, flush=True)


def _facts_of(model: ServedModel) -> dict[str, Any]:
    plan = model.plan
    return {
        "max_model_len": plan.max_model_len,
        "kv_tokens": plan.num_kv_tokens,
        "weights_bytes": plan.weights_bytes,
        "kv_bytes": plan.kv_bytes,
        "memory": {
            part.name: {"predicted_bytes": part.predicted_bytes, "measured_bytes": part.measured_bytes}
            for part in (model.memory.parts if model.memory else ())
        },
        "notes": list(plan.notes),
    }


def hardware_lines(hardware: Hardware) -> list[str]:
    ram = f"{format_bytes(hardware.ram_available_bytes)} of {format_bytes(hardware.ram_total_bytes)} RAM free"
    if not hardware.gpus:
        return [
            f"No GPU: the model runs on the CPU · {hardware.cpu_name} · {count(hardware.cpu_cores, 'core')} · {ram}"
        ]
    return [
        f"GPU {gpu.index}  {gpu.name} {format_bytes(gpu.total_bytes)}"
        + (f" · driver {gpu.driver_version}" if gpu.driver_version else "")
        + f" · {format_bytes(gpu.free_bytes)} free"
        for gpu in hardware.gpus
    ]


def memory_line(model: ServedModel) -> str:
    """Return the planned memory of each part, and the measured memory where the load measured it."""
    plan = model.plan
    parts = {"weights": plan.weights_bytes, "KV cache": plan.kv_bytes}
    parts |= {"recurrent states": plan.state_bytes} if plan.num_places else {}
    parts["activations"] = plan.activation_bytes
    seen = {} if model.memory is None else {part.name: part for part in model.memory.parts}
    shown = [_memory_part(name, size, seen.get(name)) for name, size in parts.items()]
    return " · ".join([*shown, f"reserve {format_bytes(plan.reserve_bytes)}"])


def _memory_part(name: str, planned_bytes: int, seen: MemoryPart | None) -> str:
    if seen is None or seen.measured_bytes is None:
        return f"{name} {format_bytes(planned_bytes)} planned"
    return f"{name} {format_bytes(seen.predicted_bytes)} predicted, {format_bytes(seen.measured_bytes)} measured"


def context_line(model: ServedModel) -> str:
    """Return the longest context, and how many chats of this length fit at the same time."""
    plan = model.plan
    if model.spec.task != "generate":
        return f"inputs of {format_count(plan.max_model_len)} tokens at most"
    limit = " (model limit)" if plan.max_model_len == model.spec.max_position else ""
    chats = plan.num_kv_tokens / plan.max_model_len
    return f"{format_count(plan.max_model_len)} tokens{limit} × {chats:.1f} full-length chats"


def drafts_line(model: ServedModel) -> str:
    """Return how many tokens of a request are guessed ahead in a step, or why none are."""
    speculation = model.engine[0].scheduler.speculation
    if speculation is None:
        return f"off: {NO_SPECULATION.why_off}"
    if not speculation.most:
        return f"off: {speculation.why_off}"
    return f"{count(speculation.most, 'token')} of a request guessed ahead in a step at most"


def doors(ready: Ready) -> list[tuple[str, str]]:
    """Return the names and URLs of the server's pages and APIs, and a first command to try."""
    key = "with your API key" if ready.needs_key else "no key needed on loopback"
    rows = [("OpenAI", f"{ready.url}/v1     {key}"), ("Metrics", f"{ready.url}/metrics")]
    if ready.has_pages:
        rows = [("Chat", ready.url), ("Dashboard", f"{ready.url}/dashboard"), ("Manage", ready.link), *rows]
    body = json.dumps({"model": ready.name, "messages": [{"role": "user", "content": "hi"}]})
    auth = " -H 'Authorization: Bearer YOUR-KEY'" if ready.needs_key else ""
    return [
        *rows,
        ("Try", f"curl -s {ready.url}/v1/chat/completions -H 'content-type: application/json'{auth} -d '{body}'"),
    ]


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
