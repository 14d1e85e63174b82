"""What no client should send, thrown at a server in a process of its own, beside a client that goes on as before.

    python -m tests.web.faults                    1,024 of each kind, one after the other: half an hour
    python -m tests.web.faults --times 8 chains   eight of the kinds whose name has "chains" in it
    python -m tests.web.faults --storm 60         all kinds at once, at random, for a minute

prints for each kind how often it was thrown and what came of it, the longest wait of the bystander for /health and for
the next piece of its stream, the resident memory that is not given back, and how the server ended. The faults
themselves are in fault_kinds.py.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.web.child_server import ChildServer, copy_of_demo
from tests.web.fault_kinds import FAULTS, MOST, Fault, Target, lay_out_files

ANSWER_S = 30.0
"""A fault that is neither answered nor ended by then counts as unanswered."""
GIVES_BACK_S = 20.0
"""How long an idle server may take to give memory back."""
KV_CACHE = "32MiB"
"""A small one: its pages are resident only once they have been used, which would count as memory that a fault keeps."""
ATTACKERS = 6


@dataclass(slots=True)
class Report:
    """Of one kind."""

    kind: str
    came: Counter[str] = field(default_factory=Counter)
    health_s: float = 0.0  # the longest that the bystander waited
    piece_s: float = 0.0
    complaints: list[str] = field(default_factory=list)  # of the bystander
    wrong: list[str] = field(default_factory=list)  # what should not have come
    kept_bytes: int = 0
    exit_code: int | None = None  # of a server that did not survive

    @property
    def is_sound(self) -> bool:
        return not self.wrong and not self.complaints and self.exit_code is None

    def __str__(self) -> str:
        came = " ".join(f"{what}:{count}" for what, count in sorted(self.came.items()))
        ended = "" if self.exit_code is None else f"  ended with {self.exit_code}"
        return (
            f"{self.kind:34} {self.came.total():6} {self.health_s:8.2f} {self.piece_s:8.2f} "
            f"{self.kept_bytes / 2**20:9.0f}  {came}{ended}"
        )


HEADER = f"{'kind':34} {'times':>6} {'/health':>8} {'stream':>8} {'kept MiB':>9}  answers"


@contextmanager
def hostile_files(folder: Path) -> Iterator[ChildServer]:
    """A running server whose cache of models holds broken ones; beside it, checkpoints that nobody should load."""
    lay_out_files(folder / "files", folder / "hub", copy_of_demo)
    with ChildServer(folder, "--kv-cache-memory-bytes", KV_CACHE) as server:
        yield server


async def throw(fault: Fault, target: Target, report: Report) -> None:
    try:
        came = await asyncio.wait_for(fault.throw(target), ANSWER_S)
    except TimeoutError:
        came = "no answer"
    except ConnectionError:
        came = "no server"
    report.came[came] += 1
    if came not in fault.expected:
        report.wrong.append(f"{fault.name}: {came}")


def one_by_one(server: ChildServer, fault: Fault, times: int, seed: int) -> Report:
    """The fault `times` times, each alone beside the bystander. The memory counts from the second one on: the first may
    import what it needs."""
    report = Report(fault.name)
    target = Target(server.port, random.Random(seed), server.folder / "files")
    began_s = time.monotonic()
    asyncio.run(throw(fault, target, report))
    before = server.rss()
    for _ in range(times - 1):
        if server.died is not None or "no answer" in report.came:
            break
        asyncio.run(throw(fault, target, report))
    settled = [server.bystander.settle(time.monotonic(), what) for what in ("health", "stream")]
    if server.died is None and not all(settled):
        report.complaints.append("the bystander gets no answer any more")
    _judge(server, report, began_s)
    deadline_s = time.monotonic() + GIVES_BACK_S
    while (
        (kept := server.rss() - before) > fault.most_kept_bytes
        and time.monotonic() < deadline_s
        and server.died is None
    ):
        time.sleep(0.2)
    report.kept_bytes = kept
    return report


def _judge(server: ChildServer, report: Report, began_s: float) -> None:
    """What the bystander felt since then."""
    report.health_s = server.bystander.longest_s(began_s, "health")
    report.piece_s = server.bystander.longest_s(began_s, "stream")
    felt = [*server.bystander.since(began_s, "health"), *server.bystander.since(began_s, "stream")]
    report.complaints += [f"{each.what}: {each.complaint}" for each in felt if each.complaint]
    report.exit_code = server.died


async def _attack(target: Target, faults: Sequence[Fault], report: Report, until_s: float) -> None:
    while time.monotonic() < until_s:
        await throw(target.random.choice(faults), target, report)


async def _attack_together(
    server: ChildServer, faults: Sequence[Fault], seed: int, report: Report, for_s: float
) -> None:
    files, until_s = server.folder / "files", time.monotonic() + for_s
    targets = [Target(server.port, random.Random(seed + i), files) for i in range(ATTACKERS)]
    await asyncio.gather(*(_attack(target, faults, report, until_s) for target in targets))


def storm(server: ChildServer, faults: Sequence[Fault], for_s: float, seed: int) -> Report:
    """Several attackers at once, each with whatever comes to its mind."""
    report, began_s, before = Report("storm"), time.monotonic(), server.rss()
    asyncio.run(_attack_together(server, faults, seed, report, for_s))
    server.bystander.settle(time.monotonic(), "stream")
    _judge(server, report, began_s)
    report.kept_bytes = server.rss() - before
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help="parts of names; without any: all")
    parser.add_argument("--times", type=int, default=MOST)
    parser.add_argument("--storm", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    faults = [each for each in FAULTS if not options.kinds or any(part in each.name for part in options.kinds)]
    print(f"seed {options.seed}\n{HEADER}", flush=True)
    reports: list[Report] = []
    left = list(faults)
    while left:  # a server that has died, or answers no more, is followed by another one
        with tempfile.TemporaryDirectory() as folder, hostile_files(Path(folder)) as server:
            if options.storm:
                reports.append(storm(server, faults, options.storm, options.seed))
                left.clear()
                print(reports[-1], *reports[-1].wrong[:20], *reports[-1].complaints[:20], sep="\n")
            answers = True
            while left and answers:
                fault = left.pop(0)
                report = one_by_one(server, fault, min(options.times, fault.most), options.seed)
                reports.append(report)
                print(report, *report.complaints[:3], sep="\n    ", flush=True)
                answers = server.died is None and "no answer" not in report.came
            print(f"exit code {server.stop()}", flush=True)
    return int(not all(report.is_sound for report in reports))


if __name__ == "__main__":
    sys.exit(main())
