"""The model that a person without one should try: one that is installed, else the suggested one that fits; and what
`localllm doctor` says of the suggested ones.

Does not know: how it is shown (start_lines.py, run.py), how the fit is computed (models/library/picks.py), the network.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING

from localllm.cli.findings import Finding
from localllm.config.resolve import resolve
from localllm.config.settings import Settings
from localllm.errors import LocalLLMError
from localllm.machine.bandwidth import memory_bandwidth, with_kept_speeds
from localllm.machine.hardware import Hardware, read_hardware
from localllm.models.encoders.recipe import task_of
from localllm.models.library.catalog import DEMO_NAME, ResolvedModel, list_models
from localllm.models.library.picks import FittingPick, fitting_picks
from localllm.units import format_bytes, format_count

if TYPE_CHECKING:
    from localllm.models.library.picks import FittingPick


def installed_model() -> str | None:
    """Return the first model on this machine that generates, besides the demo; None: there is none."""
    return next((model.name for model in list_models() if model.name != DEMO_NAME and _generates(model)), None)


def best_pick(settings: Settings, hardware: Hardware | None = None) -> FittingPick | None:
    """Return the best suggested model that fits. Raises `ConfigError` for a wrong list in the config file."""
    hardware = hardware or read_hardware()
    return next(iter(fitting_picks(hardware, settings, memory_bandwidth(hardware), count=1)), None)


def _generates(model: ResolvedModel) -> bool:
    try:
        return task_of(model.path) == "generate"
    except LocalLLMError:  # a damaged checkpoint
        return False


def check_fit() -> Iterator[Finding]:
    """Report the memory's bandwidth, and the suggested models that fit, the best first."""
    from localllm.models.library.picks import fitting_picks

    settings, hardware = resolve({}), read_hardware()
    bandwidth = memory_bandwidth(hardware)
    if bandwidth is not None:
        yield Finding("bandwidth", "ok", f"{bandwidth / 1e9:.0f} GB/s from memory to the processor, measured once")
    found = fitting_picks(hardware, settings, bandwidth)
    for each in found:
        yield Finding("fits", "ok", f"{each.pick.title}: {fit_in_words(each)}", f"localllm up {each.name}")
    if not found:
        text = "none of the suggested models fits with a useful context and speed"
        yield Finding("fits", "note", text, "localllm fit ORG/NAME, for any model; closing programs frees memory")
    yield from old_list(date.today())


def check_speech() -> Iterator[Finding]:
    """Report the best suggested model that transcribes and fits beside a chat model, if none is chosen."""
    from localllm.models.library.pick_list import read_picks

    settings, hardware = resolve({}), read_hardware()
    found = [pick for pick in read_picks(settings.picks).speech if pick.fits(hardware)]
    if found and settings.server.speech_model is None:
        best = found[0]
        known = with_kept_speeds(hardware)
        expected = best.speed_on(replace(known, speeds=known.speeds._replace(ram=memory_bandwidth(hardware))))
        text = f"{best.title} transcribes: {format_bytes(best.bytes)} to download, license {best.license}"
        text += f"; {expected} on the CPU" if expected else ""
        yield Finding("speech", "ok", text, f"localllm pull {best.name}, then start with --speech-model {best.name}")


def fit_in_words(found: FittingPick) -> str:
    """Return a model's download, speed and context: `1.9 GiB to download · 6 to 12 tokens/s · 33,536 tokens`."""
    parts = (
        f"{format_bytes(found.bytes)} to download",
        found.speed,
        f"{format_count(found.max_model_len)} tokens of context",
    )
    return " · ".join(part for part in parts if part)


def old_list(today: date) -> Iterator[Finding]:
    """Report a list of suggestions that is a year old."""
    from localllm.models.library.pick_list import read_picks

    picks = read_picks(resolve({}).picks)
    if picks.is_old(today):
        text = f"{picks.source} is {picks.age_months(today)} months old: newer models may answer better"
        yield Finding("suggestions", "note", text, "localllm update, or a list of your own: [picks] in config.toml")
