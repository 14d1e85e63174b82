"""Verbs that contact the hub: `search`, `pull`, `login`, `logout`.

`pull` shows a progress bar at a terminal, prints a line every few seconds otherwise, and JSON objects with --json.
Does not know: how files are downloaded (models/hub).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from localllm.config.flags import add_json
from localllm.errors import ConfigError
from localllm.terminal import print_table
from localllm.units import format_bytes, format_parameters, format_seconds

if TYPE_CHECKING:
    from localllm.config.settings import EngineConfig
    from localllm.models.library.hub.plan import DownloadPlan
    from localllm.models.library.hub.pull import PullProgress

_LINE_EVERY_S = 5.0


def search_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("query", nargs="+", metavar="QUERY", help="part of a name")
    parser.add_argument("--format", choices=("safetensors", "gguf"), help="only models in this format")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="maximum number of results")
    add_json(parser)


def search(options: argparse.Namespace) -> int:
    """List the models on the hub that match a query and are supported."""
    from localllm.models.library.hub.repository import search as search_hub

    found = search_hub(" ".join(options.query), limit=options.limit, format=options.format)
    if options.json:
        print(json.dumps([asdict(each) for each in found], indent=2))
        return 0
    if not found:
        print("No supported model found.", file=sys.stderr)
        return 0
    rows = [
        (
            each.repo_id,
            format_parameters(each.num_parameters),
            each.format,
            f"{each.downloads:,}",
            each.updated,
            each.license + (" (gated)" if each.gated else ""),
        )
        for each in found
    ]
    print_table([("MODEL", "PARAMETERS", "FORMAT", "DOWNLOADS", "UPDATED", "LICENSE"), *rows])
    return 0


def pull_arguments(parser: argparse.ArgumentParser) -> None:
    help = "ORG/NAME; :QUANT selects one of several GGUF files, @NAME a revision"
    parser.add_argument("model", metavar="MODEL", help=help)
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit; default: main")
    parser.add_argument(
        "--include", action="append", metavar="PATTERN", help="download these files instead of those that a load needs"
    )
    parser.add_argument("--verify", action="store_true", help="check downloaded files, and download damaged ones again")
    parser.add_argument("--dry-run", action="store_true", help="only show what would be downloaded")
    add_json(parser)


def pull(options: argparse.Namespace) -> int:
    """Download the files that a load of the model needs, resuming an earlier attempt."""
    from localllm.models.library.hub.plan import plan_download
    from localllm.models.library.hub.pull import drop_damaged
    from localllm.models.library.names import parse_name

    asked = parse_name(options.model)
    if not asked.base or asked.program or options.model.startswith((".", "/", "~")):
        raise ConfigError(f"{options.model!r} is not a repository.", "", "localllm pull ORG/NAME", param="model")
    plan = plan_download(asked, options.revision, options.include or ())
    if options.dry_run:
        _tell_plan(plan, options)
        return 0
    say = _output(options.json)
    if options.verify:
        say.checking(plan)
        damaged = drop_damaged(plan)
        say.checked(damaged)
        if damaged:
            plan = plan_download(asked, options.revision, options.include or ())
    fetch(plan, say)
    return 0


def fetch(plan: DownloadPlan, say: PullOutput) -> None:
    """Download and report progress to `say`. Ctrl-C cancels, and the downloaded part is kept."""
    from localllm.models.library.hub.pull import pull as pull_files

    stop = threading.Event()
    started_s = time.perf_counter()
    say.begins(plan)
    with _ctrl_c_sets(stop), say:
        path = pull_files(plan, say.progress, stop)
    say.done(plan, str(path), time.perf_counter() - started_s)


def fetch_if_missing(config: EngineConfig) -> None:
    """Download a model that is only on the hub, reporting on standard error, since standard output is for answers."""
    from localllm.models.library.catalog import is_for_the_hub

    if is_for_the_hub(config.model, config.revision):
        from localllm.models.library.hub.pull import plan_fetch

        plan = plan_fetch(
            config.model, config.revision, offline=config.offline, code=config.trust_remote_code,
            prediction_layer=config.speculation.takes_prediction_layer,
        )  # fmt: skip
        fetch(plan, _output(False, sys.stderr))


def login_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--token", metavar="TOKEN", help="default: prompt for it, or read standard input")
    add_json(parser)


def login(options: argparse.Namespace) -> int:
    """Store a token for gated and private repositories."""
    from localllm.models.library.hub import client

    token = options.token or _ask_token(client.endpoint())
    found = client.login(token)
    if options.json:
        print(json.dumps({"user": found.user, "token_path": str(found.token_path)}))
        return 0
    print(
        f"Logged in as {found.user}. The token is stored in {found.token_path} and is sent only to {client.endpoint()}."
    )
    if found.environment_wins:
        print("HF_TOKEN is set and takes precedence until you unset it.")
    return 0


def logout_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def logout(options: argparse.Namespace) -> int:
    """Delete the token."""
    from localllm.models.library.hub import client

    was_there = client.logout()
    if options.json:
        print(json.dumps({"removed": was_there, "path": str(client.token_path())}))
        return 0
    print(f"The token is removed from {client.token_path()}." if was_there else "There was no token to remove.")
    if os.environ.get("HF_TOKEN"):
        print("HF_TOKEN is set in the environment and still in use.")
    return 0


# Progress output ----------------------------------------------------------------------------------------------------


class PullOutput(Protocol):
    """Displays the progress of a pull. A context manager around the download itself."""

    def checking(self, plan: DownloadPlan) -> None: ...
    def checked(self, damaged: list[str]) -> None: ...
    def begins(self, plan: DownloadPlan) -> None: ...
    def progress(self, progress: PullProgress) -> None: ...
    def done(self, plan: DownloadPlan, path: str, seconds: float) -> None: ...
    def __enter__(self) -> object: ...
    def __exit__(self, *exc: object) -> None: ...


class PullLines:
    """Plain lines: the plan, then the progress every few seconds."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout

    def checking(self, plan: DownloadPlan) -> None:
        self._say(f"Checking the downloaded files of {plan.name} ({format_bytes(plan.cached_bytes)}).")

    def checked(self, damaged: list[str]) -> None:
        self._say(f"Damaged, downloading again: {', '.join(damaged)}." if damaged else "All files are intact.")

    def begins(self, plan: DownloadPlan) -> None:
        self._last_s = time.monotonic()
        if plan.needed_bytes:
            here = f", {format_bytes(plan.cached_bytes)} already downloaded" if plan.cached_bytes else ""
            files = f"{len(plan.files)} file" + ("s" if len(plan.files) > 1 else "")
            self._say(f"{plan.name}: {files}, {format_bytes(plan.total_bytes)}{here}.")

    def progress(self, progress: PullProgress) -> None:
        if time.monotonic() - self._last_s >= _LINE_EVERY_S:
            self._last_s = time.monotonic()
            self._say(_line(progress))

    def done(self, plan: DownloadPlan, path: str, seconds: float) -> None:
        fetched = f"{format_bytes(plan.needed_bytes)} in {format_seconds(seconds)}"
        self._say(f"{plan.name} is complete ({fetched if plan.needed_bytes else 'nothing was missing'}): {path}")

    def __enter__(self) -> PullLines:
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing to undo."""

    def _say(self, line: str) -> None:
        print(line, file=self._out, flush=True)


class PullBar(PullLines):
    """Download progress as a bar, at a terminal."""

    def __init__(self, out: TextIO | None = None) -> None:
        super().__init__(out)
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bars

        self._bars = Bars(
            BarColumn(24),
            TextColumn("{task.fields[line]}"),
            console=Console(file=self._out, highlight=False),
            transient=True,
        )
        self._task = self._bars.add_task("", total=1.0, line="")

    def progress(self, progress: PullProgress) -> None:
        self._bars.update(self._task, completed=progress.fraction, line=_line(progress))

    def __enter__(self) -> PullLines:
        self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bars.stop()


class PullJson(PullLines):
    """Output for programs: one JSON object per line."""

    def checking(self, plan: DownloadPlan) -> None:
        self._tell("checking", bytes=plan.cached_bytes)

    def checked(self, damaged: list[str]) -> None:
        self._tell("checked", damaged=damaged)

    def begins(self, plan: DownloadPlan) -> None:
        from localllm.models.library.hub.pull import plan_facts

        self._tell("plan", **plan_facts(plan))

    def progress(self, progress: PullProgress) -> None:
        from localllm.models.library.hub.pull import progress_facts

        self._tell("progress", **progress_facts(progress))

    def done(self, plan: DownloadPlan, path: str, seconds: float) -> None:
        self._tell("done", model=plan.name, path=path, seconds=round(seconds, 3))

    def _tell(self, event: str, **facts: Any) -> None:
        self._say(json.dumps({"event": event, **facts}))


def _output(as_json: bool, out: TextIO | None = None) -> PullOutput:
    return PullJson() if as_json else (PullBar if (out or sys.stdout).isatty() else PullLines)(out)


@contextmanager
def _ctrl_c_sets(stop: threading.Event) -> Iterator[None]:
    """Let the first Ctrl-C set `stop`; the second one interrupts as usual."""
    before = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: object) -> None:
        stop.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# Words ----------------------------------------------------------------------------------------------------------------


def _tell_plan(plan: DownloadPlan, options: argparse.Namespace) -> None:
    if options.json:
        from localllm.models.library.hub.pull import plan_facts

        print(json.dumps(plan_facts(plan), indent=2))
        return
    rows = []
    for file in plan.files:
        cached = format_bytes(file.cached_bytes) if file.cached_bytes else "no"
        rows.append((file.name, format_bytes(file.size), "yes" if file.cached_bytes == file.size else cached))
    print_table([("FILE", "SIZE", "HERE"), *rows])
    room = f"{format_bytes(plan.free_bytes)} are free" + ("" if plan.fits else ": not enough")
    print(f"{plan.name}: {format_bytes(plan.needed_bytes)} of {format_bytes(plan.total_bytes)} to download; {room}.")
    if plan.gated:
        print("It is gated: accept its terms on the hub, then run localllm login.")


def _line(progress: PullProgress) -> str:
    from localllm.models.library.hub.pull import progress_line

    return progress_line(progress)


def _ask_token(endpoint: str) -> str:
    if sys.stdin.isatty():
        import getpass

        print(f"Create a token with read access at {endpoint}/settings/tokens and paste it here (it is not shown).")
        token = getpass.getpass("Token: ").strip()
    else:
        token = sys.stdin.readline().strip()
    if not token:
        raise ConfigError("No token was given.", "", "localllm login, or: localllm login < FILE", param="token")
    return token
