"""The lines that a person reads at the terminal when a server starts, made from facts by pure functions.

    localllm 0.2.0 · CPU, 4 cores, 5.0 GiB of 8.0 GiB free · no telemetry
    Ready after 1.9 s: http://127.0.0.1:8000   (Ctrl+C stops)

Everything else that is known about a start is shown with --verbose (announce.py).
Does not know: where the facts come from, the terminal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from localllm.cli.suggestion import fit_in_words
from localllm.machine.hardware import Hardware
from localllm.models.library.picks import FittingPick
from localllm.units import format_bytes, format_count, format_seconds


@dataclass(frozen=True, slots=True)
class StartedServer:
    """The facts of a server that is ready."""

    url: str
    seconds: float
    model: str
    is_demo: bool
    max_model_len: int | None = None  # None: the first request loads the model
    generates: bool = True  # else the model embeds or scores
    has_pages: bool = True
    needs_key: bool = False
    notes: tuple[str, ...] = ()  # decisions of the memory plan
    installed: str | None = None  # with the demo: a model on this machine to serve instead
    pick: FittingPick | None = None  # with the demo: a model to download that fits
    link: str = field(default="", repr=False)  # logs a browser in as the owner, once


def first_line(version: str, hardware: Hardware | None) -> str:
    """Return the version and the machine. None: the hardware is not known yet."""
    machine = [] if hardware is None else [machine_in_words(hardware)]
    return " · ".join([f"localllm {version}", *machine, "no telemetry"])


def machine_in_words(hardware: Hardware) -> str:
    """Return the device that will run models, and its free memory."""
    usable = [gpu for gpu in hardware.gpus if gpu.is_supported]
    if usable:
        return "; ".join(
            f"{gpu.name}, {format_bytes(gpu.free_bytes)} of {format_bytes(gpu.total_bytes)} free" for gpu in usable
        )
    cores = f"{hardware.cpu_cores} core{'' if hardware.cpu_cores == 1 else 's'}"
    memory = f"{format_bytes(hardware.ram_available_bytes)} of {format_bytes(hardware.ram_total_bytes)} free"
    return f"CPU, {cores}, {memory}"


def ready_lines(started: StartedServer) -> Iterator[str]:
    """Yield what a person needs: the address, what the model is, a better one that fits, and where to read more."""
    address = started.url if started.has_pages else f"{started.url}/v1"
    opens = "--open opens a browser, Ctrl+C stops" if started.has_pages else "Ctrl+C stops"
    yield f"Ready after {format_seconds(started.seconds)}: {address}   ({opens})"
    if started.is_demo:
        yield from _demo_lines(started)
    else:
        yield _model_line(started)
    yield from (f"Note: {note}" for note in started.notes)
    if started.has_pages and started.link:
        yield f"To manage it in a browser, open once: {started.link}"
    key = ", with your API key" if started.needs_key else ""
    yield f"For programs: {started.url}/v1{key}"
    dashboard = f", or {started.url}/dashboard" if started.has_pages else ""
    yield f"All figures: localllm up --verbose{dashboard}"


def _model_line(started: StartedServer) -> str:
    if started.max_model_len is None:
        return f"Model {started.model}: loaded by the first request that needs it"
    context = "of context" if started.generates else "for each input at most"
    return f"Model {started.model}: {format_count(started.max_model_len)} tokens {context}"


def _demo_lines(started: StartedServer) -> Iterator[str]:
    toy = "This is the demo, a toy that was trained to answer questions about localllm."
    pick = started.pick
    if started.installed is not None:
        yield f"{toy} A real model is on this machine:"
        yield f"  localllm up {started.installed}"
    elif pick is not None:
        yield f"{toy} A real model that fits here:"
        yield f"  localllm up {pick.name}   {fit_in_words(pick)}"
        if pick.gpus:
            yield f"  {pick.gpus}"
    else:
        yield f"{toy} None of the suggested real models fits here: localllm doctor says why."


def offer_lines(installed: str | None, pick: FittingPick | None) -> Iterator[str]:
    """Yield what `localllm run` offers to a person who named no model: the installed one, else the one to download."""
    if installed is not None:
        yield f"No model was named. {installed} is on this machine."
    elif pick is not None:
        yield f"No model was named, and none is on this machine. This one fits: {pick.pick.title}, {pick.name}"
        yield f"  {fit_in_words(pick)}"
        if pick.pick.says:
            yield f"  {pick.pick.says}"
        if pick.gpus:
            yield f"  {pick.gpus}"
