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
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from localllm.cli.borrowed_files import borrowed, merged, restore_ended
from localllm.cli.programs import (
    CATALOG,
    CATALOG_PATH,
    PROGRAMS,
    Program,
    Served,
    arguments_of,
    environ_of,
    filled,
    lacks,
)
from localllm.cli.running import ROOT, model_argument
from localllm.cli.server import ServerClient, ServerRefused
from localllm.config.flags import add_debug_flag
from localllm.config.resolve import resolve
from localllm.errors import ConfigError
from localllm.machine.running_servers import running_servers

NO_KEY = "localllm"
"""The key for programs that insist on one, where the server needs none."""
SHOWN_KEY, SHOWN_CATALOG = "$LOCALLLM_API_KEY", "/tmp/localllm-models.json"
STOP_S = 30.0
MAY_NOT_LOAD = ("missing_scope", "forbidden")
"""Errors for a key that may send requests and may not load models; such a request loads its model."""
IS_LINUX = sys.platform == "linux"


def launch_arguments(parser: argparse.ArgumentParser) -> None:
    help = "claude, codex, opencode, copilot, cline, qwen, zed or vscode; arguments after -- go to the program"
    parser.add_argument("program", choices=tuple(PROGRAMS), metavar="PROGRAM", help=help)
    parser.add_argument("--model", metavar="NAME", help="a model of the server, or a folder; default: the first")
    parser.add_argument("--print", action="store_true", help="only print what would be set; start nothing")
    parser.add_argument(
        "--url", metavar="URL", help="the server; default: the one running on this machine, or a new one"
    )
    parser.add_argument("--api-key", metavar="KEY", help="the server's API key")
    add_debug_flag(parser)


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
        _print(program, _served(ServerClient.of(options), options, options.model), options.passed)
        return 0
    with _server(options) as (client, model):
        served = _served(client, options, model)
        if any(lacks(served, json.dumps(file.content)) for file in program.files):
            raise ConfigError(
                f"{program.title} needs the context of {served.model}.", f"{client.url} does not list it.",
                f"localllm load {served.model}",
            )  # fmt: skip
        _warn(program, served)
        context = f", context {served.context:,}" if served.context else ""
        print(f"{program.title} with {served.model} at {served.url}{context}.", file=sys.stderr)
        with _catalog(program, client) as catalog:
            served = replace(served, catalog=catalog)
            files = [(file.path, filled(file.content, served)) for file in program.files]
            command = [binary or program.binary, *arguments_of(program, served, options.passed)]
            with borrowed(files):
                return _run(command, {**os.environ, **environ_of(program, served)})


@contextmanager
def _server(options: argparse.Namespace) -> Iterator[tuple[ServerClient, str | None]]:
    """Yield a client of the running server; where none runs, of one that is started for the block. With it comes the
    chosen model, under the name that a started server gives it."""
    client = ServerClient.of(options)
    if options.url or running_servers() or _answers(client):
        yield client, options.model
        return
    model = options.model or _installed(options.program)
    command = [sys.executable, "-m", "localllm", "serve", model, "--port", "0", "--json"]
    print(f"No server is running; starting one with {model}.", file=sys.stderr)
    # In a group of its own, since Ctrl-C at the terminal is meant for the program.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
                               start_new_session=True, preexec_fn=_ends_with_parent if IS_LINUX else None)  # fmt: skip
    try:
        ready = next((told for told in _events(process) if told.get("event") == "ready"), None)
        if ready is None:
            raise ServerRefused("The server did not start.", f"It ended with code {process.wait()}.", " ".join(command))
        url = ready["url"]
        secret = next((server.owner_secret for server in running_servers() if server.url == url), None)
        yield ServerClient(url, client.key or secret), ready["model"]
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


def _served(client: ServerClient, options: argparse.Namespace, model: str | None) -> Served:
    """Return the server's address, key and model, which is loaded unless only printed: the context of a loaded model
    may be shorter than the one it was trained with. The key is passed on only where the server needs one."""
    try:
        open_client = ServerClient(client.url)
        listed = open_client.ask("GET", "/v1/models", timeout_s=30)
        key = options.api_key or NO_KEY
    except ServerRefused as refused:
        if not client.key:
            raise
        open_client = client
        listed = client.ask("GET", "/v1/models", timeout_s=30)
        key = options.api_key or resolve({}).server.client_key
        if not key:
            raise ConfigError(
                f"{client.url} needs a key, and this user's settings have none.", "", "--api-key KEY", param="api_key"
            ) from refused
    models = _models(listed)
    name = model_argument(model) if model else next(iter(models), "")
    is_folder = Path(name).is_absolute()
    if name not in models and not (is_folder and not options.print):
        raise ConfigError(
            f"{client.url} has no model {name!r}." if name else f"{client.url} lists no model.",
            f"It has {', '.join(models)}." if models else "", "localllm pull NAME", param="model",
        )  # fmt: skip
    if not options.print and (is_folder or models[name].get("status", {}).get("value", "loaded") != "loaded"):
        name = _load(client, name)
        models = _models(open_client.ask("GET", "/v1/models", timeout_s=30))
    return Served(client.url, key, name, models[name].get("context_length"), models[name].get("capabilities"))


def _models(listed: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the models of a list that generate text, by name."""
    models = {str(each["id"]): each for each in listed.get("data") or ()}
    return {name: each for name, each in models.items() if "completion" in each.get("capabilities", ["completion"])}


def _load(client: ServerClient, name: str) -> str:
    """Load a model, and return its name. With a key that may not do so, the first request will load it."""
    print(f"Loading {name}.", file=sys.stderr)
    try:
        return str(client.ask("POST", f"{ROOT}/load", {"model": name, "wait": True})["name"])
    except ServerRefused as refused:
        if refused.code not in MAY_NOT_LOAD or Path(name).is_absolute():
            raise
    return name


@contextmanager
def _catalog(program: Program, client: ServerClient) -> Iterator[str | None]:
    """Write the server's list of models to a temporary file for a program that reads one. Yield its path."""
    if not _reads_catalog(program):
        yield None
        return
    listed = client.ask("GET", CATALOG_PATH, timeout_s=30)
    with tempfile.TemporaryDirectory(prefix="localllm-") as folder:
        path = Path(folder) / "models.json"
        path.write_text(json.dumps(listed), encoding="utf-8")
        yield path.as_posix() if listed.get("models") else None


def _reads_catalog(program: Program) -> bool:
    return any(CATALOG in word for word in program.arguments)


def _warn(program: Program, served: Served) -> None:
    """Say what the model is too small for, which programs say in words of their own or not at all, and what to do."""
    if served.context and served.context < program.prompt_tokens:
        print(
            f"{program.title} sends about {program.prompt_tokens:,} tokens with each question, and the context of "
            f"{served.model} is {served.context:,}. Choose another with --model.", file=sys.stderr,
        )  # fmt: skip
    if served.capabilities is not None and "tools" not in served.capabilities:
        print(f"{served.model} has no template for tool calls, so {program.title} can only talk.", file=sys.stderr)
    if program.hint:
        print(program.hint, file=sys.stderr)


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
    authorization = ""
    if served.key != NO_KEY:
        served = replace(served, key=SHOWN_KEY)
        authorization = f' -H "Authorization: Bearer {SHOWN_KEY}"'
    if _reads_catalog(program):
        served = replace(served, catalog=SHOWN_CATALOG)
        print(f"curl -sf{authorization} {shlex.quote(served.url + CATALOG_PATH)} -o {SHOWN_CATALOG}")
    for name, value in environ_of(program, served).items():
        print(f"export {name}={_quoted(value)}")
    for file in program.files:
        before = file.path.read_text(encoding="utf-8") if file.path.exists() else None
        print(f"# {file.path} has to hold this; `launch` writes it, and undoes it when the program ends:")
        print("".join(f"#   {line}\n" for line in merged(before, filled(file.content, served)).splitlines()), end="")
    print(" ".join(map(_quoted, [program.binary, *arguments_of(program, served, passed)])))


def _quoted(text: str) -> str:
    if SHOWN_KEY not in text:
        return shlex.quote(text)
    escaped = "".join(f"\\{letter}" if letter in '"\\`' else letter for letter in text)
    return f'"{escaped}"'
