"""The test of peer access: which pairs, what a copy compares, what is kept, and what ranks inherit."""

import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from localllm.machine.hardware import Gpu
from localllm.machine.links import Link
from localllm.models.fit import RankPlan
from localllm.models.spec.shard import even_heads, shards_of
from localllm.ranks.peer_copy import BAD, GOOD, UNKNOWN, DriverError, copies_agree
from localllm.ranks.peers import Pair, pairs_that_talk, peer_environment, run_copies
from tests.ranks.harness import SPEC


def ranks(shards: int, stages: int, kind: str = "cuda") -> list[RankPlan]:
    cut = shards_of(SPEC, even_heads(SPEC, shards) or [])
    return [
        RankPlan(
            f"cuda:{stage * shards + n}" if kind == "cuda" else "cpu", "GPU", stage, shard, 1, 1, 1, 0, 0, 9, 0
        )
        for stage in range(stages)
        for n, shard in enumerate(cut)
    ]  # fmt: skip


def gpus(count: int, *, driver: str = "570", has_peer_access: bool | None = True) -> list[Gpu]:
    return [
        Gpu(
            n, "GPU", 100, 100, (9, 0), driver, f"GPU-{n}",
            links=tuple(Link(peer, "PIX", has_peer_access) for peer in range(count) if peer != n),
        )
        for n in range(count)
    ]  # fmt: skip


@dataclass
class Probe:
    """Remembers what it was asked; the pairs in `bad` fail, those in `unknown` could not be tested."""

    bad: Sequence[Pair] = ()
    unknown: Sequence[Pair] = ()
    asked: list[Sequence[Pair]] = field(default_factory=list)

    def __call__(self, pairs: Sequence[Pair]) -> Mapping[Pair, bool]:
        self.asked.append(list(pairs))
        return {pair: pair not in self.bad for pair in pairs if pair not in self.unknown}


def test_shards_of_a_stage_and_neighbouring_stages_talk() -> None:
    assert pairs_that_talk(ranks(3, 1)) == [(0, 1), (0, 2), (1, 2)]
    assert pairs_that_talk(ranks(1, 3)) == [(0, 1), (1, 2)]
    assert pairs_that_talk(ranks(2, 2)) == [(0, 1), (0, 2), (1, 3), (2, 3)]
    assert pairs_that_talk([replace(rank, device="cuda:0") for rank in ranks(2, 1)]) == []


def test_nothing_is_tested_on_a_cpu_on_one_gpu_or_against_the_users_word(tmp_path: Path) -> None:
    def read() -> list[Gpu]:
        pytest.fail("the GPUs were read")

    probe = Probe()
    for plan, environ in [(ranks(2, 2, "cpu"), {}), (ranks(1, 1), {}), (ranks(2, 1), {"NCCL_P2P_DISABLE": "0"})]:
        assert peer_environment(plan, read, environ, probe=probe, cache=tmp_path / "peers") == ({}, "")
    # NCCL does not use peer access that the driver denies.
    denied = gpus(2, has_peer_access=False)
    assert peer_environment(ranks(2, 1), lambda: denied, {}, probe=probe, cache=tmp_path / "peers") == ({}, "")
    assert not probe.asked


def test_a_bad_pair_turns_peer_access_off_for_all_ranks_and_says_so(tmp_path: Path) -> None:
    probe = Probe(bad=[(1, 3)])
    added, note = peer_environment(ranks(2, 2), lambda: gpus(4), {}, probe=probe, cache=tmp_path / "peers")
    assert added == {"NCCL_P2P_DISABLE": "1"}
    assert "cuda:1 and cuda:3" in note
    assert "cuda:0" not in note
    assert "longer" in note


def test_a_result_is_kept_until_another_driver_or_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, boot = tmp_path / "new" / "peers.json", tmp_path / "boot"
    boot.write_text("one")
    monkeypatch.setattr("localllm.ranks.peers.BOOT_ID", boot)
    probe = Probe(bad=[(0, 1)], unknown=[(1, 2)])

    def run(shards: int, driver: str = "570") -> bool:
        added, _ = peer_environment(ranks(shards, 1), lambda: gpus(3, driver=driver), {}, probe=probe, cache=cache)
        return bool(added)

    assert [run(2), run(2)] == [True, True]
    assert probe.asked == [[(0, 1)]]
    assert run(3)
    assert probe.asked[1:] == [[(0, 2), (1, 2)]]
    assert run(3)
    assert probe.asked[2:] == [[(1, 2)]]
    probe.bad = ()
    assert not run(2, driver="580")
    boot.write_text("two")
    assert not run(2, driver="580")
    assert len(probe.asked) == 5
    cache.write_text("{")
    assert not run(2)
    assert len(probe.asked) == 6


# ---- the copy --------------------------------------------------------------------------------------------------------


@dataclass
class FakeMemory:
    """Memory of two GPUs in one process. lost: bytes of copies from the other GPU that do not arrive."""

    shared: dict[bytes, bytearray]
    name: bytes
    lost: int = 0
    opens: bool = True

    def __post_init__(self) -> None:
        self._spaces: list[bytearray] = []

    def allocate(self, size: int) -> int:
        self._spaces.append(bytearray(size))
        return (len(self._spaces) - 1) << 32

    def write(self, address: int, data: bytes) -> None:
        space, start = self._at(address)
        space[start : start + len(data)] = data

    def read(self, address: int, size: int) -> bytes:
        space, start = self._at(address)
        return bytes(space[start : start + size])

    def copy(self, to: int, source: int, size: int) -> None:
        self.write(to, self.read(source, size - self.lost))

    def handle_of(self, address: int) -> bytes:
        self.shared[self.name * 64] = self._spaces[address >> 32]
        return self.name * 64

    def open(self, handle: bytes) -> int:
        if not self.opens:
            raise DriverError("refused")
        self._spaces.append(self.shared[handle])
        return (len(self._spaces) - 1) << 32

    def _at(self, address: int) -> tuple[bytearray, int]:
        return self._spaces[address >> 32], address & 0xFFFFFFFF


def copied(**faults: int | bool) -> list[bool | str]:
    """Return what both sides conclude; the second one has the faults."""
    shared: dict[bytes, bytearray] = {}
    results: list[bool | str] = ["", ""]
    ends = socket.socketpair()

    def run(side: int) -> None:
        memory = FakeMemory(shared, b"ab"[side : side + 1], **(faults if side else {}))  # type: ignore[arg-type]
        try:
            results[side] = copies_agree(memory, ends[side], side)
        except (DriverError, EOFError) as error:
            results[side] = type(error).__name__
        finally:
            ends[side].close()

    threads = [threading.Thread(target=run, args=(side,)) for side in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return results


def test_a_copy_compares_what_is_read_and_what_is_written() -> None:
    assert copied() == [True, True]
    assert copied(lost=1) == [False, False]  # its writes miss a byte at the one, its reads at the other
    assert copied(opens=False) == ["EOFError", "DriverError"]


@pytest.mark.parametrize(
    ("program", "result"),
    [
        (f"sys.exit({GOOD})", {(0, 1): True, (0, 2): True}),
        (f"sys.exit({UNKNOWN} if sys.argv[2] == '2' else {GOOD})", {(0, 1): True}),
        (f"sys.exit({BAD} if sys.argv[2] == '2' else {GOOD})", {(0, 1): True, (0, 2): False}),
        ("time.sleep(60 if sys.argv[2] == '2' else 0)", {(0, 1): True, (0, 2): False}),
    ],
)
def test_all_pairs_copy_at_once_within_the_deadline(program: str, result: Mapping[Pair, bool]) -> None:
    command = [sys.executable, "-S", "-c", f"import sys, time; {program}"]
    assert run_copies([(0, 1), (0, 2)], command, deadline_s=2) == result
