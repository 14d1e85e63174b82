"""The models in `localllm doctor`: which suggested ones fit, how fast they would be, and what to type.

Does not know: how the fit is computed (models/library/picks.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from typing import TYPE_CHECKING

from localllm.cli.findings import Finding
from localllm.config.resolve import resolve
from localllm.machine.bandwidth import memory_bandwidth
from localllm.machine.hardware import read_hardware
from localllm.units import format_bytes, format_count

if TYPE_CHECKING:
    from localllm.models.library.picks import FittingPick


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
