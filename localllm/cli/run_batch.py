"""`localllm run-batch`: answer a file of requests, with vLLM's flags and OpenAI's format of lines.

A running server of this user that serves the model answers through its batches, so that its other requests run first;
without one, the model is loaded in this process. Answers are written in the order of the requests.
Does not know: how a line is answered (web/api/batches), how a model is loaded.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from localllm.cli.server import ServerClient, ServerRefused
from localllm.config.flags import add_engine_flags, settings_from
from localllm.config.settings import SETTINGS, Settings
from localllm.errors import ConfigError, LocalLLMError
from localllm.machine.processes import set_thread_environment
from localllm.machine.running_servers import running_servers

if TYPE_CHECKING:
    import asyncio

    from localllm.web.api.batches.lines import InputIndex, LineRules

POLL_S = 0.5
REPORT_S = 5.0
MAX_LINES = 10_000_000


def run_batch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-i", "--input-file", required=True, metavar="FILE", help="a request a line; -: standard input")
    help = "an answer a line, in the order of the requests; -: standard output"
    parser.add_argument("-o", "--output-file", required=True, metavar="FILE", help=help)
    help = "the model to load, if no running server of this user serves it: " + SETTINGS["model"].allowed
    parser.add_argument("--model", required=True, metavar="MODEL", help=help)
    parser.add_argument("--url", metavar="URL", help="the localllm server that answers; default: see --model")
    parser.add_argument("--api-key", metavar="KEY", help="with a server: its API key")
    help = "load the model in this process even if a server serves it"
    parser.add_argument("--no-server", action="store_true", help=help)
    add_engine_flags(parser)


def run_batch(options: argparse.Namespace) -> int:
    """Answer the requests, and report on standard error."""
    from localllm.web.api.batches.lines import index_of

    settings = settings_from(options)
    with _input(options.input_file) as path, _output(options.output_file) as out:
        index = index_of(path, MAX_LINES)
        server = None if options.no_server else _server_of(options)
        progress = _BatchProgress(len(index))
        if server is not None:
            print(f"{options.model} runs at {server.url}, which answers.", file=sys.stderr)
            for line in _through(server, index, progress):
                out.write(line)
        else:
            import asyncio

            asyncio.run(_in_process(settings, index, out, progress))
        progress.end()
    return 0


class _BatchProgress:
    """Counts of answers, printed to standard error every few seconds."""

    def __init__(self, total: int) -> None:
        self.total, self.num_answered, self.num_failed = total, 0, 0
        self._began_s = self._told_s = time.monotonic()

    def set(self, num_answered: int, num_failed: int) -> None:
        self.num_answered, self.num_failed = num_answered, num_failed
        if time.monotonic() - self._told_s > REPORT_S:
            self._told_s = time.monotonic()
            self._tell("answered")

    def end(self) -> None:
        self._tell(f"done after {time.monotonic() - self._began_s:.1f} s:")

    def _tell(self, what: str) -> None:
        print(f"{what} {self.num_answered} of {self.total} requests, {self.num_failed} with an error", file=sys.stderr)


@contextmanager
def _input(name: str) -> Iterator[Path]:
    """Yield the input file; standard input is copied to a temporary file. Raises `ConfigError`."""
    if name != "-":
        path = Path(name).expanduser()
        if not path.is_file():
            raise ConfigError(f"{path} is not a file.", "", "-i FILE, or -i - for standard input", param="input_file")
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="localllm-", suffix=".jsonl") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
        file.flush()
        yield Path(file.name)


@contextmanager
def _output(name: str) -> Iterator[IO[bytes]]:
    if name == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(name).expanduser()
    try:
        file = path.open("wb")
    except OSError as error:
        raise ConfigError(f"Cannot write {path}.", f"{error.strerror or error}.", param="output_file") from error
    with file:
        yield file


# In this process ----------------------------------------------------------------------------------------------------


async def _in_process(settings: Settings, index: InputIndex, out: IO[bytes], progress: _BatchProgress) -> None:
    """Load the model and answer each line. The endpoints are a server's, without its sockets."""
    set_thread_environment()
    from localllm.cli.hub import fetch_if_missing
    from localllm.serving.manager import ModelManager
    from localllm.web.api.batches.line_runner import LineRunner
    from localllm.web.api.batches.lines import LineRules
    from localllm.web.app import ENDPOINTS, create_app

    fetch_if_missing(settings.engine)
    manager = ModelManager()
    # Keys and limits of a server do not concern its owner's own process.
    server = replace(settings.server, ui=False, api_key=None, otlp_traces_endpoint=None)
    app = create_app(manager, replace(settings, server=server))
    try:
        model = await manager.start(settings)
        if model is not None:
            print(f"{model.name} is loaded.", file=sys.stderr)
        rules = LineRules(frozenset(ENDPOINTS), server.max_body_bytes)
        num_at_once = 2 * settings.engine.max_num_seqs
        answers = _answers(LineRunner(app, ENDPOINTS, is_background=False), index, rules, num_at_once, progress)
        async for line in answers:
            out.write(line)
    finally:
        await manager.close()


async def _answers(
    runner: Any, index: InputIndex, rules: LineRules, num_at_once: int, progress: _BatchProgress
) -> AsyncIterator[bytes]:
    """Yield the answers in the order of the lines; several lines run at once."""
    import asyncio

    running: set[asyncio.Task[tuple[int, bytes, bool]]] = set()
    numbers, ready = iter(index.order), dict[int, bytes]()
    next_out, num_failed = 0, 0

    async def answer(number: int) -> tuple[int, bytes, bool]:
        own = replace(rules, is_repeated=number in index.repeated)
        line, is_error = await runner.written(index.read(number), f"batch_req_{number}", own)
        return number, line, is_error

    try:
        while next_out < len(index):
            while len(running) < num_at_once and (number := next(numbers, None)) is not None:
                running.add(asyncio.create_task(answer(number)))
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number, line, is_error = task.result()
                ready[number], num_failed = line, num_failed + is_error
            while next_out in ready:
                yield ready.pop(next_out)
                next_out += 1
            progress.set(next_out + len(ready), num_failed)
    finally:
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)


# Through a server ---------------------------------------------------------------------------------------------------


def _server_of(options: argparse.Namespace) -> ServerClient | None:
    """Return the server that --url names, or a running server of this user that has the model loaded."""
    if options.url:
        return ServerClient.of(options)
    for server in running_servers():
        client = ServerClient(server.url, server.owner_secret or options.api_key)
        try:
            models = client.ask("GET", "/localllm/v1/models/loaded", timeout_s=5)["data"]
        except (ServerRefused, KeyError):
            continue
        for model in models:
            names = {model.get("name"), model.get("model"), *(model.get("aliases") or ())}
            if options.model in names and model.get("state") in ("ready", "sleeping"):
                return client
    return None


def _through(server: ServerClient, index: InputIndex, progress: _BatchProgress) -> list[bytes]:
    """Run a batch for each endpoint of the file, and return the answers in the order of the lines. Ctrl-C cancels the
    batches. Files and outputs are deleted from the server."""
    groups: dict[str, list[int]] = {}
    for number in range(len(index)):
        groups.setdefault(_url_of(index.read(number)), []).append(number)
    answers: dict[int, bytes] = {}
    for url, numbers in groups.items():
        raw = b"".join(index.read(number).rstrip(b"\r\n") + b"\n" for number in numbers)
        file = server.upload("/v1/files", {"purpose": "batch"}, "requests.jsonl", raw)
        try:
            batch = _run(server, url, file["id"], progress, len(answers))
            for name in ("output_file_id", "error_file_id"):
                if batch[name] is not None:
                    for line in server.read(f"/v1/files/{batch[name]}/content").splitlines(keepends=True):
                        id: str = msgspec.json.decode(line)["id"]
                        answers[numbers[int(id.rpartition("-")[2])]] = line
                    server.ask("DELETE", f"/v1/files/{batch[name]}")
        finally:
            server.ask("DELETE", f"/v1/files/{file['id']}")
    return [answers[number] for number in sorted(answers)]


def _url_of(raw: bytes) -> str:
    """Return the endpoint of a line. A line that cannot be read goes to the batch for chat, which tells its error."""
    try:
        url = msgspec.json.decode(raw)["url"]
    except (msgspec.DecodeError, KeyError, TypeError, UnicodeDecodeError):
        url = None
    return url if isinstance(url, str) and url in _KNOWN else "/v1/chat/completions"


_KNOWN = frozenset({
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/rerank", "/v1/score",
    "/pooling", "/classify",
})  # fmt: skip


def _run(server: ServerClient, url: str, file_id: str, progress: _BatchProgress, num_before: int) -> dict[str, Any]:
    """Create a batch and wait for its end. Raises `LocalLLMError` if it fails."""
    asked = {"input_file_id": file_id, "endpoint": url, "completion_window": "30d"}
    batch = server.ask("POST", "/v1/batches", asked)
    failed_before = progress.num_failed
    try:
        while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
            time.sleep(POLL_S)
            batch = server.ask("GET", f"/v1/batches/{batch['id']}")
            counts = batch["request_counts"]
            num_answered = num_before + counts["completed"] + counts["failed"]
            progress.set(num_answered, failed_before + counts["failed"])
    except BaseException:
        server.ask("POST", f"/v1/batches/{batch['id']}/cancel")
        while server.ask("GET", f"/v1/batches/{batch['id']}")["status"] == "cancelling":
            time.sleep(POLL_S)
        raise
    if batch["status"] != "completed":
        why = " ".join(each["message"] for each in (batch["errors"] or {}).get("data", []))
        raise LocalLLMError(f"The batch {batch['id']} is {batch['status']}.", why)
    return batch
