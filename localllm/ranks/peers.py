"""Tests whether the GPUs of a model can read and write each other's memory, before NCCL relies on it.

Drivers exist that promise peer access and then hang or copy other bytes: an IOMMU that translates, a consumer card.
Each pair of GPUs that will exchange data copies 1 MB both ways in two short-lived processes, all pairs at once. The
result is kept in the cache folder until the next boot. A pair that fails turns peer access off for all ranks.
Does not know: how a copy is made (peer_copy.py), what ranks exchange.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path

from localllm.files.folders import cache_folder, write_whole
from localllm.machine.hardware import Gpu
from localllm.models.fit import RankPlan
from localllm.ranks.peer_copy import BAD, GOOD, UNKNOWN

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "localllm.ranks.peer_copy")
START_S = 20.0  # for all processes to have a context, copy and end; the copies have COPY_S
DISABLE = "NCCL_P2P_DISABLE"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Pair = tuple[int, int]
"""Two of torch's indices, ascending."""
Probe = Callable[[Sequence[Pair]], Mapping[Pair, bool]]
"""Returns whether each pair can copy; a pair that could not be tested is missing."""


def peer_environment(
    ranks: Sequence[RankPlan], read_gpus: Callable[[], Sequence[Gpu]], environ: Mapping[str, str], *,
    probe: Probe | None = None, cache: Path | None = None,
) -> tuple[dict[str, str], str]:  # fmt: skip
    """Return what to add to the environment of the ranks, and a note about it; both are empty where peer access works.

    Nothing is tested on a CPU, on a single GPU, or if the user has set NCCL_P2P_DISABLE.
    """
    pairs = pairs_that_talk(ranks)
    if not pairs or DISABLE in environ:
        return {}, ""
    gpus = {gpu.index: gpu for gpu in read_gpus()}
    promised = [pair for pair in pairs if all(index in gpus for index in pair) and _is_promised(gpus, pair)]
    failed = _failed(promised, gpus, probe or run_copies, cache or cache_folder() / "peers.json")
    if not failed:
        return {}, ""
    names = ", ".join(f"cuda:{one} and cuda:{other}" for one, other in failed)
    note = (
        f"Peer access between {names} does not work, although the driver promises it: {DISABLE}=1 is set. "
        "Ranks exchange data through the memory of the machine, which takes longer in every layer."
    )
    log.warning("%s", note)
    return {DISABLE: "1"}, note


def pairs_that_talk(ranks: Sequence[RankPlan]) -> list[Pair]:
    """Return the pairs of GPUs that exchange data: the shards of a stage, and the same shard of stages in a row."""
    pairs = set()
    for one, other in combinations(ranks, 2):
        are_neighbours = abs(one.stage - other.stage) == 1 and one.shard.index == other.shard.index
        if one.device != other.device and (one.stage == other.stage or are_neighbours):
            pairs.add(tuple(sorted((_index(one), _index(other)))))
    return sorted((one, other) for one, other in pairs if one >= 0)


def run_copies(
    pairs: Sequence[Pair], command: Sequence[str] = COMMAND, deadline_s: float = START_S
) -> dict[Pair, bool]:
    """Copy between all pairs at once. A pair that has not ended within the deadline has failed."""
    started: dict[Pair, list[subprocess.Popen[bytes]]] = {}
    until_s = time.monotonic() + deadline_s
    try:
        for pair in pairs:
            started[pair] = list(_processes(pair, command))
        codes = {pair: [_code(process, until_s) for process in both] for pair, both in started.items()}
    finally:
        for process in (process for both in started.values() for process in both):
            process.kill()
            process.wait()
    return {pair: set(both) == {GOOD} for pair, both in codes.items() if UNKNOWN not in both}


def _processes(pair: Pair, command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start the two processes of a pair."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONSAFEPATH": "1"}
    ends = socket.socketpair()
    with ends[0], ends[1]:
        for side, (end, device) in enumerate(zip(ends, pair, strict=True)):
            arguments = map(str, (end.fileno(), device, side, os.getpid()))
            yield subprocess.Popen(
                [*command, *arguments], pass_fds=(end.fileno(),), env=environ, stdin=subprocess.DEVNULL
            )


def _code(process: subprocess.Popen[bytes], until_s: float) -> int:
    try:
        return process.wait(max(0, until_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        return BAD


def _failed(pairs: Sequence[Pair], gpus: Mapping[int, Gpu], probe: Probe, cache: Path) -> list[Pair]:
    """Return the pairs that cannot copy, from the file where it has them."""
    boot = _boot_id()
    keys = {pair: " ".join(str(gpus[index].uuid) for index in pair) for pair in pairs}
    group = f"{boot} {gpus[pairs[0][0]].driver_version}" if pairs else ""
    known = _read(cache, group)
    new = [pair for pair in pairs if keys[pair] not in known]
    if new:
        known = {**known, **{keys[pair]: works for pair, works in probe(new).items()}}
        _write(cache, group, known)
    return [pair for pair in pairs if known.get(keys[pair]) is False]


def _read(cache: Path, group: str) -> dict[str, bool]:
    """Return the results of this boot and this driver, by the UUIDs of a pair."""
    try:
        kept = json.loads(cache.read_text("utf-8"))
        return dict(kept["pairs"]) if kept["of"] == group else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _write(cache: Path, group: str, pairs: Mapping[str, bool]) -> None:
    try:
        cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(cache, json.dumps({"of": group, "pairs": pairs}))
    except OSError as error:
        log.warning("peer access is tested again at the next start: %s", error)


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _is_promised(gpus: Mapping[int, Gpu], pair: Pair) -> bool:
    """Return whether the driver says that the GPUs reach each other; NCCL uses no peer access otherwise."""
    links = [link for link in gpus[pair[0]].links if link.peer == pair[1]]
    return all(link.has_peer_access is not False for link in links)


def _index(rank: RankPlan) -> int:
    """Return torch's index of a rank's GPU; -1: it runs on the CPU."""
    kind, _, index = rank.device.partition(":")
    return int(index or 0) if kind == "cuda" else -1
