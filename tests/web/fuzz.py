"""Requests made from the server's own /openapi.json: as it says, against what it says, and real ones with one part
turned into something else. Each answer has to be one that the document knows, in its shape; none may be a 5xx.

    python -m tests.web.fuzz 1000

prints for every operation how many answers of which status there were, and each finding with the request that made it.
"""

import json
import os
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import jsonschema
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis import checks as standard

from localllm.config.settings import EngineConfig, ServerConfig, Settings
from localllm.units import parse_keep_alive
from tests.text.templates import CHATML
from tests.web.fuzz_bodies import BODIES, crossed, mutated
from tests.web.live_server import LiveServer, PacedRunner, fake_model

CHECKS = [
    standard.status_code_conformance,
    standard.content_type_conformance,
    standard.response_headers_conformance,
    standard.response_schema_conformance,
]
OTHER_MODELS = {
    "embed": ("Embeddings", "Embedded", "OneEmbedding", "Pooled"),
    "score": ("Ranking", "Scores", "Classes"),
}
"""Task by the answers that need a model for it."""
SLOW_S = 5.0  # on a machine that has other things to do
LAST = {"message_stop", "response.completed", "response.incomplete", "response.failed", "error"}


@dataclass(slots=True)
class Findings:
    """Of one operation."""

    statuses: Counter[int] = field(default_factory=Counter)
    streams: int = 0
    slowest_s: float = 0.0
    found: dict[str, str] = field(default_factory=dict)  # complaint -> the first request that made it

    def __str__(self) -> str:
        counts = " ".join(f"{status}:{count}" for status, count in sorted(self.statuses.items()))
        return f"{self.statuses.total():6} {self.streams:6} {self.slowest_s * 1e3:7.0f} ms  {counts}"


class Servers:
    """One live server for each task, offline, with nobody's models."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stack = folder, ExitStack()

    def __enter__(self) -> Mapping[str, LiveServer]:
        from localllm.serving.build import build_engine  # here: whose cache it is was read by then
        from tests.models.pooling.checkpoints import save_bert, save_cross_encoder

        asked = Settings(EngineConfig(offline=True), ServerConfig(port=0, ui=False))
        generating = fake_model(self._folder / "tiny", PacedRunner(), max_num_queued_reqs=100_000, chat_template=CHATML)
        generating.sampling_defaults["max_tokens"] = 8  # type: ignore[index]
        models = {"generate": generating}
        for task, save in (("embed", save_bert), ("score", save_cross_encoder)):
            models[task] = build_engine(Settings(EngineConfig(model=str(save(self._folder / task)), device="cpu")))
        return {task: self._stack.enter_context(LiveServer(model, asked)) for task, model in models.items()}

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()


def operations(server: LiveServer) -> Iterator[APIOperation]:
    """Once where several paths lead to one handler."""
    schema = schemathesis.openapi.from_dict(server.get("/openapi.json").json())
    seen = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        name = (operation.method, *operation.definition.raw["tags"], operation.definition.raw["summary"])
        if name not in seen:
            seen.add(name)
            yield operation


def server_for(operation: APIOperation, servers: Mapping[str, LiveServer]) -> LiveServer:
    answer = json.dumps(operation.definition.raw["responses"].get("200", {}))
    task = next((task for task, names in OTHER_MODELS.items() if any(f'.{name}"' in answer for name in names)), None)
    return servers[task or "generate"]


def cases(operation: APIOperation) -> st.SearchStrategy[tuple[Case, bool]]:
    """With whether it is to be refused."""
    kinds = [operation.as_strategy(GenerationMode.POSITIVE).map(lambda case: (case, False))]
    takes_body = bool(list(operation.body))
    if takes_body or len(list(operation.query)):
        kinds.append(operation.as_strategy(GenerationMode.NEGATIVE).map(lambda case: (case, True)))
    if any(body.media_type == "application/json" for body in operation.body):
        made = operation.as_strategy(GenerationMode.POSITIVE)
        name = re.search(r"(chat/)?[^/]+$", operation.path)
        assert name is not None
        real = st.sampled_from(BODIES[operation.definition.raw["tags"][0], name[0]])
        kinds += [
            st.builds(_with_body, made, st.builds(crossed, real, real, st.randoms())).map(lambda case: (case, False))
        ] * 2
        kinds.append(st.builds(_with_fields, made, real, st.integers(1, 3)).map(lambda case: (case, False)))
        kinds.append(st.builds(_with_body, made, real.flatmap(mutated)).map(lambda case: (case, False)))
    return st.one_of(kinds)


def _with_fields(case: Case, real: Mapping[str, Any], count: int) -> Case:
    """A real body with a few of the fields that were made."""
    case.body = {**real, **dict(list(case.body.items())[:count])} if isinstance(case.body, dict) else case.body
    return case


def _with_body(case: Case, body: Any) -> Case:
    case.body = body
    return case


def fuzz(operation: APIOperation, server: LiveServer, examples: int, seed: int) -> Findings:
    findings = Findings()
    check_stream = _stream_checker(operation)
    session = requests.Session()
    session.trust_env = False

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @hypothesis.given(cases(operation), st.booleans())
    def ask(asked: tuple[Case, bool], known: bool) -> None:
        case, is_wrong = asked
        if operation.path == "/sleep":
            case.query["model"] = "nobody"  # without a name it is the model that the others are asked of
        if not is_wrong:
            _bound(case.body)
            if known:
                _name_what_is_there(case, server)
        started_s = time.perf_counter()
        try:
            # Not case.call: that hears twenty pieces of a stream and hangs up.
            response = session.request(**case.as_transport_kwargs(base_url=server.url), timeout=30)
        except Exception as error:
            _note(findings, case, error)
            return
        took_s = time.perf_counter() - started_s
        findings.statuses[response.status_code] += 1
        findings.slowest_s = max(findings.slowest_s, took_s)
        try:
            assert response.status_code < 500 or response.status_code == 501, f"status {response.status_code}"
            assert took_s < SLOW_S, "slow"
            checks = [*CHECKS, standard.negative_data_rejection] if is_wrong else CHECKS
            case.validate_response(response, checks=checks)
            findings.streams += check_stream(response.headers["content-type"], response.content)
        except (Exception, BaseExceptionGroup) as error:
            _note(findings, case, error)

    ask()
    session.close()
    server.wait_idle()
    return findings


def _note(findings: Findings, case: Case, error: BaseException) -> None:
    errors = error.exceptions if isinstance(error, BaseExceptionGroup) else [error]
    for each in errors:
        told = f"{type(each).__name__}: {str(each)[:400]}"
        sent = json.dumps(case.body, default=repr)[:3000]
        findings.found.setdefault(told, f"{case.method} {case.formatted_path} {case.query or ''} {sent}")


def _bound(body: Any) -> None:
    """Nothing that unloads the model, which nobody could load again."""
    if isinstance(body, dict) and "keep_alive" in body:
        try:
            parse_keep_alive(body["keep_alive"])
        except (ValueError, TypeError, AttributeError):
            return
        body["keep_alive"] = -1


def _name_what_is_there(case: Case, server: LiveServer) -> None:
    if case.path.startswith("/v1/models/{"):
        case.path_parameters["name"] = "tiny"
    elif case.path.startswith("/v1/responses/{"):
        made = server.post("/v1/responses", BODIES["responses", "responses"][1] | {"stream": False})
        case.path_parameters["id"] = made.json()["id"]


def _stream_checker(operation: APIOperation) -> Callable[[str, bytes], bool]:
    """Of a media type and a body: whether it was a stream. Raises where an item is not of its shape."""
    raw = operation.schema.raw_schema
    content = operation.definition.raw["responses"].get("200", {}).get("content", {})
    validators = {
        media_type: jsonschema.Draft202012Validator(each["x-item-schema"] | {"components": raw["components"]})
        for media_type, each in content.items()
        if "x-item-schema" in each
    }

    def check(content_type: str, body: bytes) -> bool:
        validator = validators.get(content_type.partition(";")[0])
        if validator is None:
            return False
        items = list(_items(content_type, body))
        assert items, "an empty stream"
        for item in items:
            if item != "[DONE]":
                validator.validate(item)
        last = items[-1]
        assert last == "[DONE]" or last.keys() & {"error", "done"} or last["type"] in LAST, (
            f"a stream without an end: {last}"
        )
        return True

    return check


def _items(content_type: str, body: bytes) -> Iterator[Any]:
    if content_type.startswith("application/x-ndjson"):
        yield from map(json.loads, body.splitlines())
        return
    for event in body.decode().split("\n\n"):
        for line in event.split("\n"):  # splitlines() also ends a line at what JSON may hold
            if line.startswith("data: "):
                yield "[DONE]" if line == "data: [DONE]" else json.loads(line[6:])


def main(examples: int, only: str = "") -> int:
    warnings.simplefilter("ignore")
    seed, found = int(time.time()), 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"HF_HUB_CACHE": folder, "XDG_DATA_HOME": folder, "HF_HUB_OFFLINE": "1"}
        with Servers(Path(folder)) as servers:
            print(f"seed {seed}, {examples} examples each\n requests streams   slowest  answers")
            for operation in operations(servers["generate"]):
                if only not in operation.path:
                    continue
                findings = fuzz(operation, server_for(operation, servers), examples, seed)
                print(f"{findings}  {operation.method.upper()} {operation.path}", flush=True)
                for told, curl in findings.found.items():
                    print(f"    {told}\n      {curl}", flush=True)
                found += len(findings.found)
    print(f"{found} findings")
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
