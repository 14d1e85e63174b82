"""Launch settings: what was measured wins over what ships, that over the heuristic; a failing cache is told once."""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from localllm.kernels import tuned
from localllm.kernels.launch import LaunchOptions, launching_with
from localllm.kernels.tuned import Table, ensure_triton_cache, source_hash
from localllm.kernels.tuned.measure import num_copies, tune


class Tile(NamedTuple):
    rows: int
    num_warps: int


def heuristic(head_dim: int, batch: int) -> Tile:
    return Tile(rows=16 if batch <= 16 else 64, num_warps=4)


KEY = (128, 16)


def table(folder: Path | None, gpu: str | None = "NVIDIA H200", triton: str = "3.6.0") -> Table:
    return Table(folder, gpu, triton)


def test_without_anything_measured_the_heuristic_decides(tmp_path: Path) -> None:
    assert table(tmp_path).settings_for("attention", KEY, heuristic) == Tile(16, 4)
    assert not list(tmp_path.iterdir())  # asking writes nothing


def test_a_lookup_asks_the_heuristic_once(tmp_path: Path) -> None:
    asked = []

    def counting(head_dim: int, batch: int) -> Tile:
        asked.append(batch)
        return Tile(1, 1)

    known = table(tmp_path)
    for _ in range(3):
        known.settings_for("attention", KEY, counting)
    assert asked == [16]


def test_what_was_measured_holds_in_this_process_and_the_next(tmp_path: Path) -> None:
    first = table(tmp_path)
    assert first.settings_for("attention", KEY, heuristic) == Tile(16, 4)
    first.record("attention", KEY, Tile(32, 8), 1.5, heuristic)
    assert first.settings_for("attention", KEY, heuristic) == Tile(32, 8)
    later = table(tmp_path)
    assert later.settings_for("attention", KEY, heuristic) == Tile(32, 8)
    assert later.settings_for("attention", (128, 32), heuristic) == Tile(64, 4)


@pytest.mark.parametrize("other", [{"gpu": "NVIDIA A100"}, {"triton": "3.7.0"}, {"gpu": None}], ids=str)
def test_another_gpu_or_triton_does_not_see_it(tmp_path: Path, other: dict[str, str]) -> None:
    table(tmp_path).record("attention", KEY, Tile(32, 8), 1.5, heuristic)
    assert table(tmp_path, **other).settings_for("attention", KEY, heuristic) == Tile(16, 4)


def test_a_changed_kernel_forgets_its_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table(tmp_path).record("attention", KEY, Tile(32, 8), 1.5, heuristic)
    monkeypatch.setattr(tuned, "source_hash", lambda module: "another")
    assert table(tmp_path).settings_for("attention", KEY, heuristic) == Tile(16, 4)


def test_deterministic_mode_takes_the_heuristic(tmp_path: Path) -> None:
    known = table(tmp_path)
    known.record("attention", KEY, Tile(32, 8), 1.5, heuristic)
    assert known.settings_for("attention", KEY, heuristic) == Tile(32, 8)
    with launching_with(LaunchOptions(deterministic=True)):
        assert known.settings_for("attention", KEY, heuristic) == Tile(16, 4)


def test_this_machine_wins_over_what_ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = {"kernels": {"attention": [{"key": list(KEY), "settings": {"rows": 8, "num_warps": 2}, "us": 3.0}]}}
    (tmp_path / "NVIDIA_H200.json").write_text(json.dumps(shipped))
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path)
    assert table(tmp_path / "cache").settings_for("attention", KEY, heuristic) == Tile(8, 2)
    table(tmp_path / "cache").record("attention", KEY, Tile(32, 8), 1.5, heuristic)
    assert table(tmp_path / "cache").settings_for("attention", KEY, heuristic) == Tile(32, 8)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"entries": 3}', '{"entries": [1, {"key": 2}]}',
     '{"entries": [{"key": [128, 16], "settings": {"rows": "8", "num_warps": 2}}]}',
     '{"entries": [{"key": [128, 16], "settings": {"rows": 8}}]}'],
)  # fmt: skip
def test_a_file_that_is_not_ours_changes_nothing(tmp_path: Path, text: str) -> None:
    path = table(tmp_path)._path("attention", heuristic)
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert table(tmp_path).settings_for("attention", KEY, heuristic) == Tile(16, 4)


def test_a_cache_that_cannot_be_written_is_told_once_and_harmless(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    known = table(tmp_path / "file" / "below")
    with caplog.at_level(logging.WARNING):
        known.record("attention", KEY, Tile(32, 8), 1.5, heuristic)
        known.record("attention", (128, 32), Tile(32, 8), 1.5, heuristic)
    assert known.settings_for("attention", KEY, heuristic) == Tile(32, 8)
    assert [record.message.split(" path=")[0] for record in caplog.records] == [
        "measured kernel settings cannot be written"
    ]


def test_the_fastest_candidate_that_runs_is_recorded(tmp_path: Path) -> None:
    known = table(tmp_path)
    asked = []

    def cost(settings: Tile) -> float:
        asked.append(settings.rows)
        if settings.rows == 256:
            raise MemoryError("out of shared memory")
        return {16: 5.0, 32: 2.0, 64: 3.0}[settings.rows]

    candidates = [Tile(256, 8), Tile(64, 4), Tile(32, 4), Tile(16, 4)]
    assert tune("attention", KEY, candidates, cost, heuristic, into=known) == Tile(32, 4)
    assert known.settings_for("attention", KEY, heuristic) == Tile(32, 4)
    assert asked == [16, 256, 64, 32]  # the heuristic's first, and once


def test_nothing_is_measured_while_serving(tmp_path: Path) -> None:
    known = table(tmp_path)
    known.seal()
    with pytest.raises(AssertionError, match="while serving"):
        tune("attention", KEY, [Tile(1, 1)], lambda settings: 1.0, heuristic, into=known)


def test_no_candidate_at_all_is_an_error(tmp_path: Path) -> None:
    def cost(settings: Tile) -> float:
        raise ValueError("no")

    with pytest.raises(RuntimeError, match="not one of 1"):
        tune("attention", KEY, [Tile(1, 1)], cost, heuristic, into=table(tmp_path))


@pytest.mark.parametrize(("nbytes", "copies"), [(1, 120_000_001), (10_000_000, 13), (10**9, 2)])
def test_a_measurement_turns_through_more_than_the_cache_holds(nbytes: int, copies: int) -> None:
    assert num_copies(nbytes, 60_000_000) == copies
    assert (copies - 1) * nbytes >= 2 * 60_000_000


def test_a_source_hash_follows_the_text(tmp_path: Path) -> None:
    assert len(source_hash("localllm.kernels.launch")) == 12
    assert source_hash("localllm.kernels.launch") != source_hash("localllm.kernels.rms_norm")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    before = dict(os.environ)
    yield monkeypatch
    for name in set(os.environ) - set(before):
        del os.environ[name]


def test_a_triton_cache_that_cannot_be_written_is_replaced(
    tmp_path: Path, environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    environment.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "triton"))
    environment.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    instead = ensure_triton_cache()
    assert instead == tmp_path / "home" / "localllm" / "triton"
    assert os.environ["TRITON_CACHE_DIR"] == str(instead)
    assert "cannot be written" in caplog.text
    assert ensure_triton_cache() == instead
    assert len(caplog.records) == 1


def test_a_good_triton_cache_is_left_alone(tmp_path: Path, environment: pytest.MonkeyPatch) -> None:
    environment.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert ensure_triton_cache() == tmp_path
    assert not list(tmp_path.iterdir())


def test_what_ships_is_well_formed() -> None:
    for path in tuned.SHIPPED.glob("*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        assert content["measured"], path
        for name, entries in content["kernels"].items():
            assert len(tuned._entries_of(entries)) == len(entries), (path, name)
