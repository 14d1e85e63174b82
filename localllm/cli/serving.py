"""`up` and `serve`: settings from the command line, a voice, a log, and the house goes up.

`up` at a terminal talks to a person; everything else writes log lines, or JSON when asked.
Does not know: what is built (up.py), how it is said (announce.py).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import time

from localllm.cli.flags import settings_from
from localllm.config import Settings
from localllm.threads import set_thread_environment

STARTED_S = time.perf_counter()
"""This file is imported once the command line is understood, some 50 ms after the interpreter began."""


def up(options: argparse.Namespace) -> int:
    return _serve(options, at_terminal=sys.stdout.isatty())


def serve(options: argparse.Namespace) -> int:
    return _serve(options, at_terminal=False)


def _serve(options: argparse.Namespace, *, at_terminal: bool) -> int:
    settings = settings_from(options)
    set_thread_environment()
    talks = at_terminal and not options.json
    set_up_logging(settings, quiet=talks or options.json)
    from localllm.cli.announce import JsonLines, LogLines, Terminal
    from localllm.up import up as go_up

    announcer = Terminal() if talks else JsonLines() if options.json else LogLines()
    with contextlib.closing(announcer):
        go_up(settings, announcer, started_s=STARTED_S)
    return 0


def set_up_logging(settings: Settings, *, quiet: bool) -> None:
    """The only place that configures logging. Where facts are announced otherwise, the log repeats only warnings,
    unless a level was asked for."""
    asked = settings.source("log_level") != "default"
    level = settings.server.log_level.upper() if asked or not quiet else "WARNING"
    if level != "DEBUG":
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # its info lines repeat what we announce
    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(levelname)-7s %(name)s %(message)s")
