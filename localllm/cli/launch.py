"""`localllm launch PROGRAM`: start a coding program with a model of a running server, or of one that it starts.

Files that it changes are restored when the program ends, and at the next launch if this process was killed.
Does not know: what each program needs (programs.py), how files are restored (borrowed_files.py).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from localllm.cli.borrowed_files import borrowed, merged, restore_ended
from localllm.cli.programs import PROGRAMS, Program, Served, arguments_of, environ_of, filled
from localllm.cli.server import ServerClient, ServerRefused
from localllm.config.resolve import resolve
from localllm.errors import ConfigError
from localllm.machine.running_servers import running_servers

NO_KEY = "localllm"
"""The key for programs that insist on one, where the server needs none."""
SHOWN_KEY = "$LOCALLLM_API_KEY"
STOP_S = 30.0
IS_LINUX = sys.platform == "linux"


def launch(options: argparse.Namespace) -> int:
    """Start the program and return its exit code."""
    program = PROGRAMS[options.program]
    for path in restore_ended():
        print(f"Restored {path}, which an earlier launch left changed.", file=sys.stderr)
    binary = shutil.which(program.binary)
    if binary is None and not options.print:
        raise ConfigError(
            f"{program.title} is not installed.", f"There is no program {program.binary} on the PATH.", program.install
        )
    if options.print:
        _print(program, _served(ServerClient.of(options), options), options.passed)
        return 0
    with _server(options) as client:
        served = _served(client, options)
        files = [(file.path, filled(file.content, served)) for file in program.files]
        command = [binary or program.binary, *arguments_of(program, served, options.passed)]
        context = f", context {served.context:,}" if served.context else ""
        print(f"{program.title} with {served.model} at {served.url}{context}.", file=sys.stderr)
        with borrowed(files):
            return _run(command, {**os.environ, **environ_of(program, served)})


@contextmanager
def _server(options: argparse.Namespace) -> Iterator[ServerClient]:
    """Yield a client of the running server; where none runs, of one that is started for the block."""
    client = ServerClient.of(options)
    if options.url or running_servers() or _answers(client):
        yield client
        return
    model = options.model or _installed(options.program)
    command = [sys.executable, "-m", "localllm", "serve", model, "--port", "0", "--json"]
    print(f"No server is running; starting one with {model}.", file=sys.stderr)
    # In a group of its own, since Ctrl-C at the terminal is meant for the program.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
                               start_new_session=True, preexec_fn=_ends_with_parent if IS_LINUX else None)  # fmt: skip
    try:
        url = next((told["url"] for told in _events(process) if told.get("event") == "ready"), None)
        if url is None:
            raise ServerRefused("The server did not start.", f"It ended with code {process.wait()}.", " ".join(command))
        yield ServerClient(url, client.key or next((s.owner_secret for s in running_servers() if s.url == url), None))
    finally:
        process.terminate()
        try:
            process.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ends_with_parent() -> None:
    """Let Linux end this process when its parent is killed."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _events(process: subprocess.Popen[str]) -> Iterator[Mapping[str, str]]:
    """Yield the JSON lines of a server that starts, until it ends."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            yield json.loads(line)


def _answers(client: ServerClient) -> bool:
    """Return whether a server answers that has published no file, for example the service of another user."""
    try:
        client.ask("GET", "/v1/models", timeout_s=2)
    except ServerRefused as error:
        return error.code != "server_refused"
    return True


def _installed(program: str) -> str:
    from localllm.cli.suggestion import installed_model

    if (model := installed_model()) is None:
        raise ConfigError(
            "No server is running, and no model is on this machine.", "The demo is a toy, so it is not chosen.",
            f"localllm up, or localllm launch {program} --model demo for the toy", param="model",
        )  # fmt: skip
    return model


def _served(client: ServerClient, options: argparse.Namespace) -> Served:
    """Return the server's address, key and model. The key is passed on only where the server needs one."""
    try:
        listed = ServerClient(client.url).ask("GET", "/v1/models", timeout_s=30)
        key = options.api_key or NO_KEY
    except ServerRefused as refused:
        if not client.key:
            raise
        listed = client.ask("GET", "/v1/models", timeout_s=30)
        key = options.api_key or resolve({}).server.client_key
        if not key:
            raise ConfigError(
                f"{client.url} needs a key, and this user's settings have none.", "", "--api-key KEY", param="api_key"
            ) from refused
    models = {str(each["id"]): each for each in listed.get("data") or ()}
    name = options.model or next(iter(models), "")
    if name not in models:
        raise ConfigError(
            f"{client.url} has no model {name!r}." if name else f"{client.url} lists no model.",
            f"It has {', '.join(models)}." if models else "", "localllm pull NAME", param="model",
        )  # fmt: skip
    return Served(client.url, key, name, models[name].get("context_length"))


def _run(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the program in the foreground and return its exit code. Ctrl-C is its own; SIGTERM and SIGHUP are passed on,
    so that the files are restored after it."""
    try:
        process = subprocess.Popen(command, env=environ)
    except OSError as error:
        raise ConfigError(f"{command[0]} cannot be started.", f"{error.strerror or error}.") from error

    def pass_on(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    before = {signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN)}  # after the start: children inherit it
    for number in (signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])):
        before[number] = signal.signal(number, pass_on)
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _print(program: Program, served: Served, passed: Sequence[str]) -> None:
    """Print what `launch` would set, as lines for a shell. A real key is not printed."""
    if served.key != NO_KEY:
        served = Served(served.url, SHOWN_KEY, served.model, served.context)
    for name, value in environ_of(program, served).items():
        print(f"export {name}={_quoted(value)}")
    for file in program.files:
        before = file.path.read_text(encoding="utf-8") if file.path.exists() else None
        print(f"# {file.path}, until the program ends:")
        print("".join(f"#   {line}\n" for line in merged(before, filled(file.content, served)).splitlines()), end="")
    print(" ".join(map(_quoted, [program.binary, *arguments_of(program, served, passed)])))


def _quoted(text: str) -> str:
    if SHOWN_KEY not in text:
        return shlex.quote(text)
    escaped = "".join(f"\\{letter}" if letter in '"\\`' else letter for letter in text)
    return f'"{escaped}"'
