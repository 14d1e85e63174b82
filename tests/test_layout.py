"""The bars of the package's layout: what was reached stays reached. scripts/count_layout prints the counts."""

import runpy
from pathlib import Path
from statistics import median, quantiles

import pytest

from scripts.layout import ROOT

COUNTS = runpy.run_path(str(ROOT / "scripts" / "count_layout"))


def test_the_top_of_the_package_has_few_modules() -> None:
    assert len(COUNTS["root_modules"]()) <= 10


def written(folder: Path, code: str) -> Path:
    (folder / "module.py").write_text(code, encoding="utf-8")
    return folder / "module.py"


def test_functions_change_no_value_of_a_module() -> None:
    assert COUNTS["written_after_import"]() == []


@pytest.mark.parametrize(
    "code",
    [
        "x = 0\ndef f():\n    global x\n    x = 1",
        "x = {}\ndef f():\n    x['a'] = 1",
        "x = []\ndef f():\n    x.append(1)",
        "x = C()\ndef f():\n    x.y.z = 1",
        "class x: pass\ndef f():\n    x.count += 1",
        "from localllm.kernels import x\ndef f():\n    x.flag = True",
        "def f():\n    from localllm.kernels.launch import x\n    x.flag = True",
    ],
)
def test_a_changed_value_is_found(code: str, tmp_path: Path) -> None:
    assert set(COUNTS["_changed"](written(tmp_path, code))) == {"x"}


@pytest.mark.parametrize(
    "code",
    [
        "x = {}\ndef f(x):\n    x['a'] = 1",
        "x = {}\ndef f():\n    x = {}\n    x['a'] = 1",
        "import threading\nx = threading.local()\ndef f():\n    x.y = 1",
        "import os\ndef f():\n    os.environ['A'] = 'b'",
    ],
)
def test_what_belongs_to_a_call_a_thread_or_another_package_is_left_alone(code: str, tmp_path: Path) -> None:
    assert not set(COUNTS["_changed"](written(tmp_path, code)))


def test_few_class_names_are_used_twice() -> None:
    assert len(COUNTS["repeated_class_names"]()) < 9


def test_functions_are_short() -> None:
    lengths = [length for length, _ in COUNTS["function_lengths"]()]
    assert median(lengths) <= 8
    assert quantiles(lengths, n=10)[-1] <= 22
    assert lengths[-1] <= 72


@pytest.mark.parametrize("name", COUNTS["BARS"])
def test_what_was_reached_stays_reached(name: str) -> None:
    most, _ = COUNTS["BARS"][name]
    assert COUNTS["bar_counts"]()[name] <= most


def test_rooms_keep_their_budgets() -> None:
    budgets = COUNTS["ROOM_LINES"]
    over = {room: lines for room, lines in COUNTS["room_lines"]().items() if lines > budgets.get(room, 0)}
    assert not over, f"of {budgets}"
