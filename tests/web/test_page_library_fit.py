"""The four answers to "does it fit?", with the numbers of the very plan that a load would make."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.config.settings import EngineConfig, ModelTable, Settings
from localllm.machine.hardware import Gpu, Hardware
from localllm.web.pages.library import fit_checks
from localllm.web.pages.library.fit_checks import FitChecks, check_fit

MIB, GIB = 1024**2, 1024**3


def machine(ram: int, gpu: int = 0) -> Hardware:
    gpus = (Gpu(0, "RTX", gpu, gpu, (8, 9)),) if gpu else ()
    return Hardware(gpus, "CPU", 4, ram, ram)


@pytest.mark.parametrize(
    ("hardware", "kind", "said"),
    [
        (machine(8 * GIB), "fits", "at 2,048 tokens · 8.0 GiB free in memory"),
        (machine(8 * GIB, 8 * GIB), "fits", "free on RTX"),
        (machine(8 * GIB, 600 * MIB), "offload", "free in memory"),
        (machine(515 * MIB, 0), "no", "the budget is"),
    ],
)
def test_fits_in_words(tiny_llama_path: Path, hardware: Hardware, kind: str, said: str) -> None:
    fit = check_fit(str(tiny_llama_path), EngineConfig(), hardware)
    assert fit.verdict.kind == kind
    assert said in fit.verdict.numbers
    assert fit.table is not None
    assert sum(segment.width for segment in fit.table.segments) == pytest.approx(100, abs=0.1)
    if kind == "offload":
        assert "--device cpu" in fit.verdict.hint
        assert "does not split a model" in fit.verdict.hint


def test_a_context_that_has_to_be_cut_is_told_with_what_would_give_more(tiny_llama_path: Path) -> None:
    fit = check_fit(str(tiny_llama_path), EngineConfig(kv_cache_memory_bytes=300_000), machine(8 * GIB))
    assert fit.verdict.kind == "shorter"
    assert " of 2,048 tokens" in fit.verdict.numbers
    assert fit.verdict.hint.startswith("Without --kv-cache-memory-bytes: context 2,048 tokens")


async def test_each_model_is_looked_at_with_settings_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, str] = {}

    def note(name: str, config: EngineConfig, *others: Any, **named: Any) -> SimpleNamespace:
        asked[name] = config.cpu_weights
        return SimpleNamespace(error=None)

    monkeypatch.setattr(fit_checks, "check_fit", note)
    tables = {"exact-one": ModelTable("exact-one", {"cpu_weights": "exact"})}
    known = FitChecks(SimpleNamespace(entries=[]), Settings(EngineConfig(cpu_weights="small"), models=tables))  # type: ignore[arg-type]
    await asyncio.gather(known.of("exact-one"), known.of("another"))
    assert asked == {"exact-one": "exact", "another": "small"}
