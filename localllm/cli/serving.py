"""`up` and `serve`: read the settings, set up the output and the log, and start the server.

`up` at a terminal prints for a person; otherwise log lines are written, or JSON with --json.
Does not know: how the server starts (up.py), how events are displayed (announce.py).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import time
from dataclasses import replace

from localllm.cli.flags import settings_from
from localllm.config.resolve import unknown_variables
from localllm.config.settings import Settings
from localllm.logs.log_file import LogFile, log_path
from localllm.logs.recent_logs import RecentLogs
from localllm.machine.memory import paused_collection
from localllm.machine.restart import can_restart, restart, was_restarted
from localllm.machine.systemd import inherited_socket
from localllm.machine.threads import set_thread_environment

log = logging.getLogger("localllm")

STARTED_S = time.perf_counter()
"""Start of the command. This file is imported after the command line is parsed, about 50 ms after the interpreter
started."""


def up(options: argparse.Namespace) -> int:
    return _serve(options, at_terminal=sys.stdout.isatty())


def serve(options: argparse.Namespace) -> int:
    return _serve(options, at_terminal=False)


def _serve(options: argparse.Namespace, *, at_terminal: bool) -> int:
    environ, again = dict(os.environ), was_restarted()
    settings, passed = settings_from(options), inherited_socket()
    if again:  # the page that asked for the restart is still open
        settings = replace(settings, server=replace(settings.server, open_browser=False))
    if passed is not None:  # keys, host names and the log depend on the address of the socket
        settings = replace(settings, server=settings.server.at(passed.getsockname()[:2]))
    set_thread_environment()
    talks = at_terminal and not options.json
    set_up_logging(settings, quiet=talks or options.json)
    for sentence in unknown_variables(environ):
        log.warning("%s", sentence)
    if passed is not None:
        log.info("socket of systemd host=%s port=%d", settings.server.host, settings.server.port)
    with paused_collection():
        from localllm.cli.announce import Announcers, JsonAnnouncer, LogAnnouncer, TerminalAnnouncer
        from localllm.cli.announce_service import ServiceAnnouncer
        from localllm.up import up as go_up

    said = [TerminalAnnouncer(verbose=options.verbose)] if talks else [JsonAnnouncer()] if options.json else []
    announcer = Announcers(*said, LogAnnouncer(), ServiceAnnouncer())
    try:
        with contextlib.closing(announcer):
            restarts = passed is None and can_restart()
            again = go_up(settings, announcer, started_s=STARTED_S, passed=passed, can_restart=restarts)
    except Exception as error:
        log.info("ended error=%r", str(error))  # cli/__init__.py prints it at the terminal
        raise
    log.info("ended, and starts again" if again else "ended")
    if again:
        logging.shutdown()
        restart(environ)
    return 0


def set_up_logging(settings: Settings, *, quiet: bool) -> None:
    """Configure logging to standard error, a file and memory; no other code does. With `quiet`, standard error shows
    only warnings unless a level was set, because an announcer displays the facts."""
    level = settings.server.log_level.upper()
    if level != "DEBUG":
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # its info lines repeat the announced facts
    shown = logging.StreamHandler(sys.stderr)
    shown.setLevel(level if settings.source("log_level") != "default" or not quiet else "WARNING")
    handlers: list[logging.Handler] = [shown, LogFile(log_path(settings.server.port)), RecentLogs()]
    logging.basicConfig(level=level, handlers=handlers, format="%(asctime)s %(levelname)-7s %(name)s %(message)s")
