"""`up` and `serve`: read the settings, set up the output and the log, and start the server.

`up` at a terminal prints for a person; otherwise log lines are written, or JSON with --json.
Does not know: how the server starts (up.py), how events are displayed (announce.py).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from localllm.config.flags import add_model, add_server_flags, settings_from
from localllm.config.resolve import unknown_variables
from localllm.config.settings import Settings
from localllm.errors import CheckStoppedDevice, PortInUse

log = logging.getLogger("localllm")

CHECK_RESTARTED = "LOCALLLM_CHECK_RESTARTED"
"""Environment variable of a process that was started again because a check of a kernel had stopped the GPU: once."""
STARTED_S = time.perf_counter()
"""Start of the command. This file is imported after the command line is parsed, about 50 ms after the interpreter
started."""


def up_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, required=False)
    add_server_flags(parser)
    parser.add_argument("--verbose", action="store_true", help="show the phases, sizes and addresses of the start")


def up(options: argparse.Namespace) -> int:
    return _serve(options, "up", at_terminal=sys.stdout.isatty())


def serve_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, required=False)
    add_server_flags(parser)


def serve(options: argparse.Namespace) -> int:
    return _serve(options, "serve", at_terminal=False)


def _serve(options: argparse.Namespace, verb: str, *, at_terminal: bool) -> int:
    from localllm.machine.memory import permanent_objects
    from localllm.machine.processes import (
        ShortTorchImport,
        can_restart,
        restart,
        set_thread_environment,
        was_restarted,
    )
    from localllm.machine.systemd import inherited_socket

    environ, again = dict(os.environ), was_restarted()
    settings, passed = settings_from(options), inherited_socket()
    if settings.engine.distributed_executor_backend == "external_launcher":
        from localllm.ranks.placement import run_under_torchrun

        if run_under_torchrun(environ):
            return 0
    if again:  # the page that asked for the restart is still open
        settings = replace(settings, server=replace(settings.server, open_browser=False))
    if passed is not None:  # keys, host names and the log depend on the address of the socket
        settings = replace(settings, server=settings.server.at(passed.getsockname()[:2]))
    set_thread_environment()
    ShortTorchImport().install()
    talks = at_terminal and not options.json
    open_log_file = set_up_logging(settings, quiet=talks or options.json)
    for sentence in unknown_variables(environ):
        log.warning("%s", sentence)
    if passed is not None:
        log.info("socket of systemd host=%s port=%d", settings.server.host, settings.server.port)
    with permanent_objects():
        from localllm.cli.announce import Announcers, JsonAnnouncer, LogAnnouncer, ServiceAnnouncer, TerminalAnnouncer
        from localllm.up import up as go_up

    said = [TerminalAnnouncer(verbose=options.verbose)] if talks else [JsonAnnouncer()] if options.json else []
    announcer = Announcers(*said, LogAnnouncer(open_log_file), ServiceAnnouncer())
    try:
        with contextlib.closing(announcer):
            restarts = passed is None and can_restart()
            again = go_up(settings, announcer, started_s=STARTED_S, passed=passed, can_restart=restarts)
    except CheckStoppedDevice as error:
        log.warning("ended error=%r", str(error))
        if passed is not None or not can_restart() or CHECK_RESTARTED in environ:
            raise
        print(f"{error} Starting again without it.", file=sys.stderr)
        logging.shutdown()
        restart({**environ, CHECK_RESTARTED: "1"})
    except Exception as error:
        if isinstance(error, PortInUse):
            error.hint = shlex.join(["localllm", verb, *filter(None, [options.model])]) + f" {error.hint}"
        log.info("ended error=%r", str(error))  # cli/__init__.py prints it at the terminal
        raise
    log.info("ended, and starts again" if again else "ended")
    if again:
        logging.shutdown()
        restart(environ)
    return 0


def set_up_logging(settings: Settings, *, quiet: bool) -> Callable[[], None]:
    """Configure logging to standard error, a file and memory; no other code does. With `quiet`, standard error shows
    only warnings unless a level was set, because an announcer displays the facts.

    Return the function that writes the lines so far to the file, and those that follow. It is called once the port is
    bound: until then, the file of that port may be the one of a running server.
    """
    from logging.handlers import MemoryHandler

    from localllm.logs.log_file import LogFile, log_path
    from localllm.logs.recent_logs import RecentLogs

    level = settings.server.log_level.upper()
    if level != "DEBUG":
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # its info lines repeat the announced facts
    shown = logging.StreamHandler(sys.stderr)
    shown.setLevel(level if settings.source("log_level") != "default" or not quiet else "WARNING")
    file = LogFile(log_path(settings.server.port))
    held = MemoryHandler(1000, logging.CRITICAL + 1)  # without a target, so that an exit drops its lines
    format = "%(asctime)s %(levelname)-7s %(name)s %(message)s"
    file.setFormatter(logging.Formatter(format))
    logging.basicConfig(level=level, handlers=[shown, held, RecentLogs()], format=format)

    def open_file() -> None:
        held.setTarget(file)
        held.flush()
        logging.getLogger().addHandler(file)
        logging.getLogger().removeHandler(held)

    return open_file
