"""A moment of what tests/web/faults.py does for as long as one likes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.web.fault_kinds import FAULTS, PATHS, SCHEMAS, Fault, Target, in_every_dialect, sent
from tests.web.faults import Report, run, throw
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings

QUICK = [fault for fault in FAULTS if fault.name not in ("half_a_million_biases", "megabytes_of_stops")]
"""The others stand in test_bounds.py."""


@pytest.fixture(scope="module")
def with_pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(fake_model(tmp_path_factory.mktemp("tiny"), PacedRunner()), settings(ui=True)) as server:
        yield server


def target_of(server: LiveServer) -> Target:
    return Target(int(server.url.rpartition(":")[2]), random.Random(0))


@pytest.mark.parametrize("fault", QUICK, ids=lambda fault: fault.name)
def test_each_fault_is_answered_or_ended(with_pages: LiveServer, fault: Fault) -> None:
    report = Report()
    for _ in range(2):
        asyncio.run(throw(fault, target_of(with_pages), report))
    assert not report.wrong
    with_pages.wait_idle()


def test_no_path_leads_out_of_the_static_files(with_pages: LiveServer) -> None:
    for path in PATHS:
        answer = with_pages.http.get(f"{with_pages.url}{path}")  # and as the client writes it
        assert answer.status_code in (400, 404), path
        assert "root:" not in answer.text
        assert "import" not in answer.text


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_schemas_without_end_are_refused_or_kept_to_in_every_dialect(with_pages: LiveServer, number: int) -> None:
    for path, body in in_every_dialect(SCHEMAS[number]):
        assert asyncio.run(sent(target_of(with_pages), path, body)) in ("200", "400"), path


def test_a_storm_of_faults_disturbs_nobody(tmp_path: Path) -> None:
    report = run(tmp_path, 2.0, 0, QUICK)
    assert not report.wrong
    assert report.right > 5
    assert report.engine.startswith("engine: 0 running, 0 waiting, 0 blocks held")
    assert report.engine.endswith("200")
    assert report.rss_bytes[2] - report.rss_bytes[1] < 100 * 2**20
