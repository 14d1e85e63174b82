"""The quick run leaves cases that cost much for other days, so that it ends soon and every case has its turn.

A test whose cases together take more than `A_DAY` seconds of processor time rotates: each day it runs about that much
of them, and each case on at least one day of seven. costs.json has the mean seconds of a case of each such test, on a
CPU and in Triton's interpreter, of the tests that take more than `A_DAY`; `scripts/check --costs` measures them anew.
A test that is not in it runs every day, and so does what holds the whole repository to its rules.
"""

import json
import math
import os
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

COSTS = Path(__file__).with_name("costs.json")
A_DAY = 0.5
MOST_DAYS = 7
EVERY_DAY = tuple(
    f"tests/test_{name}.py" for name in ("layout", "words", "arrows", "docs", "readme", "build", "imports")
)
KIND = "interpreted" if os.environ.get("TRITON_INTERPRET") == "1" else "cpu"


def left_for_other_days(cases: Iterable[str], day: int, costs: dict[str, float]) -> set[str]:
    """Return the cases, by their names, that do not run on this day. costs: mean seconds of a case by test."""
    cases = list(cases)
    counts = Counter(map(name_of, cases))
    numbers: Counter[str] = Counter()
    left = set()
    for case in cases:
        test = name_of(case)
        days = min(math.ceil(costs.get(test, 0.0) * counts[test] / A_DAY), MOST_DAYS) or 1
        if (numbers[test] + zlib.crc32(test.encode()) + day) % days:
            left.add(case)
        numbers[test] += 1
    return left


def name_of(case: str) -> str:
    """Return the name of the test that a case belongs to."""
    return case.partition("[")[0]


class CostRecorder:
    """Measures what cases cost: processor time, also of processes that ended meanwhile, or half the time they took."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._start = (0.0, 0.0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self._start = clocks()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
        if call.when == "teardown":
            (processor, wall), (processor_then, wall_then) = clocks(), self._start
            item.user_properties.append(("cost", max(processor - processor_then, (wall - wall_then) / 2)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            found = [value for name, value in report.user_properties if name == "cost"]
            self.seconds[name_of(report.nodeid)] += [float(str(seconds)) for seconds in found]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        found = {
            test: costs for test, costs in self.seconds.items() if sum(costs) > A_DAY and not test.startswith(EVERY_DAY)
        }
        table = json.loads(COSTS.read_text())
        table[KIND] = {test: round(sum(costs) / len(costs), 3) for test, costs in sorted(found.items())}
        COSTS.write_text(json.dumps(table, indent=1) + "\n")


def clocks() -> tuple[float, float]:
    """Return the seconds of processor time of this process and its ended children, and the seconds of the clock."""
    times = os.times()
    return sum(times[:4]), times.elapsed
