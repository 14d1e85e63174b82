"""Requests by the hundred thousand: real bodies whose parts are crossed, replaced, doubled and taken out, for a server
in a process of its own. Each answer has a status that /openapi.json knows for its operation, and none is a 500.

    python -m tests.web.fuzz_many 100000

prints how many answers of which status there were, how fast, and each finding with the request that made it. fuzz.py
looks at fewer answers and at all that is in them.
Does not know: what an answer holds.
"""

import json
import re
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from random import Random
from typing import Any

from tests.web.child_server import ChildServer
from tests.web.fuzz_bodies import BODIES, SCHEMA, crossed, places_of, with_changes

AT_ONCE = 8
FLAGS = ("--max-model-len", "96", "--no-ui")
"""Short, so that an answer without a bound is short, too."""
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 0.5, -0.0, 2**31, 2**53 + 1, 2**63, -(2**63), 2**64, 10**40, 1e308, 1e-308,
    "", " ", "a", "\x00", "/", "..", "a" * 300, "${x}", "{{ x }}", "\U0001f600", "\ufffe", "null", "1", "demo", "5m",
    [], {}, [[]], [None], ["a", 1], {"a": {}}, {"": None}, {"type": "text"}, {"$ref": "#"}, SCHEMA, "assistant",
    [{"role": "user", "content": "a"}],
)  # fmt: skip
HOWS = ("replace", "replace", "remove", "double", "add")


@dataclass(slots=True)
class Found:
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: dict[str, str] = field(default_factory=dict)  # complaint -> the first request that made it
    seconds: float = 0.0
    exit_code: int | None = None

    def __str__(self) -> str:
        count = self.statuses.total()
        told = [f"{count} requests in {self.seconds:.0f} s: {dict(sorted(self.statuses.items()))}"]
        told += [f"{complaint}\n    {sent[:2000]}" for complaint, sent in self.wrong.items()]
        return "\n".join([*told, f"{len(self.wrong)} findings, exit code {self.exit_code}"])


class Asker:
    """A client with one connection."""

    def __init__(self, server: ChildServer, operations: list[tuple[str, list[dict[str, Any]], set[int]]]) -> None:
        self._server, self._operations = server, operations
        self._connection = HTTPConnection("127.0.0.1", server.port, timeout=60)

    def close(self) -> None:
        self._connection.close()

    def ask(self, seed: int, found: Found) -> None:
        random = Random(seed)
        path, bodies, known = random.choice(self._operations)
        sent = json.dumps(self._body(random, bodies))
        try:
            self._connection.request("POST", path, sent, {"content-type": "application/json"})
            answer = self._connection.getresponse()
            answer.read()
        except (OSError, HTTPException) as error:
            self._connection.close()
            found.wrong.setdefault(f"{path}: {error!r}", sent)
            return
        found.statuses[answer.status] += 1
        if answer.status not in known:
            found.wrong.setdefault(f"{path}: {answer.status}", sent)

    def _body(self, random: Random, bodies: list[dict[str, Any]]) -> dict[str, Any]:
        body = crossed(random.choice(bodies), random.choice(bodies), random)
        if random.random() < 0.2:
            return body
        places = list(places_of(body))
        changes = [
            (random.choice(places), random.choice(HOWS), str(random.choice(ODD))[:50], random.choice(ODD))
            for _ in range(random.randrange(1, 4) if places else 0)
        ]
        return with_changes(body, changes)


def operations_of(server: ChildServer) -> list[tuple[str, list[dict[str, Any]], set[int]]]:
    """Path, real bodies, and the statuses that the document knows of every operation that reads a body."""
    made = []
    for path, methods in server.get("/openapi.json").json()["paths"].items():
        operation, name = methods.get("post", {}), re.search(r"(chat/)?[^/]+$", path)
        bodies = name and BODIES.get((operation.get("tags", [""])[0], name[0]))
        if bodies and "{" not in path:
            renamed = json.loads(json.dumps(list(bodies)).replace('"tiny', '"demo'))
            made.append((path, renamed, {int(status) for status in operation["responses"]} - {500}))
    return made


def run(folder: Path, times: int, seed: int) -> Found:
    found = Found()
    with ChildServer(folder, *FLAGS, with_bystander=False) as server:
        operations, began_s = operations_of(server), time.monotonic()

        def ask_all(first: int) -> None:
            with closing(Asker(server, operations)) as asker:
                for number in range(first, times, AT_ONCE):
                    if server.died is not None:
                        return
                    asker.ask(seed + number, found)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(ask_all, range(AT_ONCE)))
        found.seconds = time.monotonic() - began_s
        found.exit_code = server.stop()
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), int(sys.argv[1]), int(time.time()))
    print(found)
    sys.exit(bool(found.wrong or found.exit_code))
