"""Expensive cases wait for their day, and each has one within a week."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests import rotation
from tests.rotation import COSTS, MOST_DAYS, left_for_other_days

pytest_plugins = ["pytester"]

CASES = [*(f"test_a.py::test_table[{number}]" for number in range(40)), "test_a.py::test_long", "test_b.py::test_short"]
COST = {"test_a.py::test_table": 0.05, "test_a.py::test_long": 30.0, "test_b.py::test_short": 0.2}


@pytest.mark.parametrize("first", [0, 20_786])
def test_every_case_has_its_day_within_a_week(first: int) -> None:
    ran: Counter[str] = Counter()
    for day in range(first, first + MOST_DAYS):
        today = [case for case in CASES if case not in left_for_other_days(CASES, day, COST)]
        assert sum("table" in case for case in today) == 10  # half a second of the two that they take
        ran.update(today)
    assert set(ran) == set(CASES)
    assert ran["test_a.py::test_long"] == 1
    assert ran["test_b.py::test_short"] == MOST_DAYS


def test_what_was_never_measured_runs_every_day() -> None:
    assert not left_for_other_days(CASES, 0, {})


def test_the_table_names_tests_that_exist() -> None:
    for kind in json.loads(COSTS.read_text()).values():
        for test in kind:
            path, _, name = test.partition("::")
            text = (COSTS.parents[1] / path).read_text(encoding="utf-8")
            assert all(part in text for part in name.replace("::runTest", "").split("::")), test


def test_a_run_writes_what_its_tests_cost(
    pytester: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text('{"cpu": {"test_gone.py::test_gone": 9}, "interpreted": {"test_a.py::test_b": 2}}')
    monkeypatch.setattr(rotation, "COSTS", costs)
    monkeypatch.setattr(rotation, "KIND", "cpu")
    pytester.makepyfile(
        test_made="""
        import time, pytest
        @pytest.mark.parametrize("number", [0, 1, 2])
        def test_computes(number):
            until = time.process_time() + 0.2
            while time.process_time() < until: pass
        def test_waits(): time.sleep(1.2)
        def test_little(): pass
        """
    )
    pytester.inline_run("-p", "no:cacheprovider", plugins=[rotation.CostRecorder()]).assertoutcome(passed=5)
    table = json.loads(costs.read_text())
    assert table["interpreted"] == {"test_a.py::test_b": 2}
    assert set(table["cpu"]) == {"test_made.py::test_computes", "test_made.py::test_waits"}
    assert 0.2 <= table["cpu"]["test_made.py::test_computes"] <= 3
    assert 0.6 <= table["cpu"]["test_made.py::test_waits"] <= 3
