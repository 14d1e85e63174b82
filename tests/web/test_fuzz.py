"""A share of what tests/web/fuzz.py asks: no request made from /openapi.json gets an answer that is not in it."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.web import fuzz_many
from tests.web.fuzz import Servers, fuzz, operations, server_for
from tests.web.live_server import LiveServer

MANY = 100_000
EXAMPLES = 8  # each; as many as CI has time for


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, LiveServer]]:
    folder = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(folder))  # second names of models go there, and batches, which one server has
        with Servers(folder) as servers:
            yield servers


def test_answers_are_as_the_document_says(servers: Mapping[str, LiveServer]) -> None:
    counts = {}
    for operation in operations(servers["generate"]):
        findings = fuzz(operation, server_for(operation, servers), EXAMPLES, seed=0)
        assert not findings.found, f"{operation.method} {operation.path}"
        counts[operation.path] = findings
    assert len(counts) > 40
    assert sum(each.streams for each in counts.values()) >= 3
    assert {200, 400, 404, 409, 501} <= {status for each in counts.values() for status in each.statuses}


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_hundred_thousand_requests_make_no_mistake_of_the_server(tmp_path: Path) -> None:
    found = fuzz_many.run(tmp_path, MANY, seed=0)
    assert not found.wrong
    assert found.statuses.total() == MANY
    assert found.exit_code == 0
