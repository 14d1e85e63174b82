"""A share of what tests/web/faults.py throws for as long as one likes: one bad request harms nobody else."""

import os
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.web.child_server import ChildServer
from tests.web.fault_kinds import FAULTS, PATHS, SCHEMAS, Fault, in_every_dialect
from tests.web.faults import Report, hostile_files, one_by_one, storm
from tests.web.live_server import wait_until

LONGEST_HEALTH_S = 1.0
"""Of another client, beside any single fault, for a machine with nothing else to do: the long run is for it."""
LOADED_HEALTH_S = 3.0
"""The same beside the other tests, which use every core."""
LONG = ("hostile_checkpoints", "idle_connections")
"""Kinds that take seconds each; the long run throws them."""
QUICK = [fault for fault in FAULTS if fault.name not in LONG]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ChildServer]]:
    with hostile_files(tmp_path_factory.mktemp("faults")) as server:
        yield [server]


@pytest.fixture
def server(servers: list[ChildServer]) -> ChildServer:
    """The running one; after one that has died, another."""
    if servers[-1].died is not None:
        servers[-1].__exit__(None, None, None)
        servers[-1].__enter__()
    return servers[-1]


def check(report: Report, fault: Fault, longest_health_s: float = LONGEST_HEALTH_S) -> None:
    assert report.exit_code is None, f"the server ended with {report.exit_code}"
    assert not report.wrong
    assert not report.complaints
    assert report.health_s < longest_health_s
    assert report.kept_bytes < fault.most_kept_bytes


@pytest.mark.parametrize("fault", QUICK, ids=lambda fault: fault.name)
def test_a_fault_is_answered_or_ended_and_disturbs_nobody(server: ChildServer, fault: Fault) -> None:
    check(one_by_one(server, fault, 2, 0), fault, LOADED_HEALTH_S)


def test_a_storm_of_faults_disturbs_nobody(server: ChildServer) -> None:
    report = storm(server, [fault for fault in QUICK if fault.most == 1024], 3.0, 0)
    assert report.exit_code is None
    assert not report.wrong
    assert not report.complaints
    assert server.bystander.since(time.monotonic() - 30, "stream")
    _comes_to_rest(server)


def test_no_path_leads_out_of_the_static_files(server: ChildServer) -> None:
    for path in PATHS:
        answer = server.get(path)  # and as the client writes it
        assert answer.status_code in (400, 404), path
        assert "root:" not in answer.text
        assert "import" not in answer.text


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_schemas_without_end_are_refused_or_kept_to_in_every_dialect(server: ChildServer, number: int) -> None:
    for path, body in in_every_dialect(SCHEMAS[number]):
        assert server.post(path, body).status_code in (200, 400), path


def test_a_server_ends_in_order_after_all_that(server: ChildServer) -> None:
    _comes_to_rest(server)
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200
    assert server.stop() == 0
    assert "Traceback" not in server.log()
    assert not re.search("unhandled fault|stands still", server.log())


def _comes_to_rest(server: ChildServer) -> None:
    """Nothing runs or waits but the bystander's own stream, and no step has failed."""

    def rests() -> bool:
        engine = server.engine()
        return engine["num_running"] <= 1 and engine["num_waiting"] == 0 and engine["used_blocks"] < 32

    wait_until(rests, 30)
    assert server.engine()["num_failed_steps"] == 0


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_thousand_faults_of_a_kind_leave_nothing(server: ChildServer, fault: Fault) -> None:
    is_loaded = "PYTEST_XDIST_WORKER" in os.environ  # other tests use every core, for minutes
    longest_s = 2 * LOADED_HEALTH_S if is_loaded else LONGEST_HEALTH_S
    check(one_by_one(server, fault, fault.most, random.randrange(2**31)), fault, longest_s)


@pytest.mark.slow
def test_stop_strings_count_as_an_answer_that_is_complete(tmp_path: Path) -> None:
    with ChildServer(tmp_path, with_bystander=False) as server:
        body = {"prompt": "Once upon", "max_tokens": 4, "temperature": 0}
        target = server.post("/v1/completions", body).json()
        assert target["choices"][0]["finish_reason"] == "length"
        body |= {"stop": target["choices"][0]["text"].split()[2], "max_tokens": 200}  # stopped long before its limit
        assert server.post("/v1/completions", body).json()["choices"][0]["finish_reason"] == "stop"
        wait_until(lambda: server.engine()["finished"].get("stop") == 1)
        assert "abort" not in server.engine()["finished"]
