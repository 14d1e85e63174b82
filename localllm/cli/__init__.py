"""The command line: parse the arguments, call the verb, print an error as three lines with an exit code.

A verb's file has its function and its arguments; it is imported when the verb is used, so that `--help` answers at
once.
Does not know: how a server is built (up.py), what a setting means (config/settings.py).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn, TextIO

from localllm.config.flags import help_of, refuse_unknown
from localllm.errors import ConfigError, DoesNotFit, LocalLLMError
from localllm.version import __version__

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells expect: 128 + SIGINT."""


class HelpWithDefaults(argparse.HelpFormatter):
    """Adds the default to the help of each argument, and fills the terminal's width."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_terminal_columns() - 2)  # argparse would import shutil to ask for the width

    def _get_help_string(self, action: argparse.Action) -> str:
        return help_of(action)


def _terminal_columns() -> int:
    """Return $COLUMNS, or the width of the terminal, or 80 where there is none."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size(sys.__stdout__.fileno()).columns or 80 if sys.__stdout__ is not None else 80
    except (OSError, ValueError):
        return 80


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises `ConfigError` instead of exiting."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__(allow_abbrev=False, formatter_class=HelpWithDefaults, **kwargs)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message[:1].upper() + message[1:] + ".", "", f"{self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        options = parse(words)
        code: int = options.handler(options)
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `localllm list | head`: the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return report_error(error, debug="--debug" in words)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the verb's options, with `handler` set. Raises `ConfigError` for an unknown verb, flag or value."""
    words = _with_verb(list(words))
    parser, verbs = build_parser(words[0])
    if words[0] not in verbs:  # --help or --version, which print and exit
        return parser.parse_args(words)
    verb = verbs[words[0]]
    passed: list[str] = []
    if words[0] == "launch" and "--" in words:  # the rest is the program's
        words, passed = words[: words.index("--")], words[words.index("--") + 1 :]
    # Intermixed: `localllm run demo --temperature 0 "a prompt"` has a flag between its two positionals.
    options, leftover = verb.parse_known_intermixed_args(words[1:])
    if leftover:
        refuse_unknown(leftover, verb._option_string_actions, f"{verb.prog} --help")
    options.passed = passed
    return options


VERBS = {
    "up": ("cli.serving:up", "serve a model on this machine, with a chat page"),
    "serve": ("cli.serving:serve", "serve a model as a service does: no browser, plain log lines"),
    "run": ("cli.run:run", "answer a prompt, or chat, in this terminal"),
    "chat": ("cli.chat:chat", "answer a prompt, or chat, through a running OpenAI-compatible server"),
    "complete": ("cli.chat:complete", "continue a text through a running OpenAI-compatible server"),
    "run-batch": ("cli.run_batch:run_batch", "answer a file of requests, in OpenAI's batch format"),
    "transcribe": ("cli.transcribe:transcribe", "write the text of sound files"),
    "launch": ("cli.launch:launch", "start a coding program with a model of this machine"),
    "bench": ("cli.bench:bench", "measure how fast this machine serves"),
    "tune": ("cli.tune:tune", "find settings for a goal by trying them on this machine"),
    "doctor": ("cli.doctor:doctor", "check that this machine has what localllm needs"),
    "search": ("cli.hub:search", "search for models on the hub"),
    "pull": ("cli.hub:pull", "download a model from the hub, or resume a download"),
    "list": ("cli.models:list_models", "list models that can be served without a download"),
    "show": ("cli.models:show_model", "show a checkpoint's facts, on this machine or on the hub"),
    "fit": ("cli.fit:fit", "check whether a local or hub model fits into this machine's memory; takes up's flags"),
    "cp": ("cli.models:copy_model", "give a model a second name"),
    "rm": ("cli.models:remove_model", "delete a model from the Hugging Face cache, or a second name"),
    "login": ("cli.hub:login", "store a token for gated and private models"),
    "logout": ("cli.hub:logout", "delete the token"),
    "link": ("cli.running:link", "print a one-time link that logs a browser in as the server's owner"),
    "ps": ("cli.running:ps", "list the models of a running server and their states"),
    "top": ("cli.top:top", "show a running server's activity, live"),
    "service": ("setup.service:service", "run the server as a service of systemd or launchd"),
    "logs": ("cli.logs:logs", "show the log of a server on this machine"),
    "load": ("cli.running:load", "load a model on a running server, or wake it"),
    "unload": ("cli.running:unload", "unload a model of a running server and free its memory"),
    "stop": ("cli.running:unload", "unload a model of a running server and free its memory"),
    "sleep": ("cli.running:sleep", "put a model to sleep, keeping only its weights, in host memory"),
    "wake": ("cli.running:wake", "serve a sleeping model again"),
    "pin": ("cli.running:pin", "pin a model, so that it is never unloaded for another"),
    "keys": ("cli.keys:keys", "manage API keys of this machine's server, each with a name and a scope"),
    "kv": ("cli.kv:kv", "list or delete the KV blocks of models that are kept on disk"),
    "experts": ("cli.kv:experts", "list or delete the experts that models read from disk"),
    "config": ("cli.config:show_config", "show the settings in force, and where each comes from"),
    "version": ("cli.config:show_versions", "show the versions of localllm and its main packages"),
    "completion": ("setup.completion:print_script", "print or install a shell completion script"),
    "man": ("setup.man_page:show_man", "show the manual page"),
    "update": ("setup.installers:update", "install another release of localllm, or go back to the one before"),
    "uninstall": ("setup.uninstall:uninstall", "remove localllm, and what it stored"),
}
"""Each verb's function, as `module:function`, and its help. The function that adds its arguments to a parser is beside
it and has its name with `_arguments`."""


def build_parser(only: str | None = None) -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of the whole command line, and each verb's parser by name.

    only: the verb whose arguments are added, so that no file of another verb is imported; None: all verbs.
    """
    parser = Parser(
        prog="localllm",
        description="A local LLM server. Without a verb: up.",
        epilog="localllm VERB --help lists a verb's arguments.",
    )
    parser.add_argument("--version", action="version", version=f"localllm {__version__}")
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", parser_class=Parser, required=True)
    verbs: dict[str, Parser] = {}
    for name, (where, help) in VERBS.items():
        verb = verbs[name] = subparsers.add_parser(name, help=help, description=help[:1].upper() + help[1:] + ".")
        if only in (None, name):
            module, function = where.split(":")
            file = import_module(f"localllm.{module}")
            getattr(file, f"{function}_arguments")(verb)
            verb.set_defaults(handler=getattr(file, function), all_parsers=build_parser)
    return parser, verbs


def _with_verb(words: list[str]) -> list[str]:
    """Put `up` before arguments that name no verb: `localllm`, `localllm --port 9000`, `localllm ./folder`."""
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help", "--version")):
        return ["up", *words]
    first = words[0]
    if first.startswith("-") or first in VERBS:
        return words
    if first == "demo" or "/" in first or Path(first).is_dir():
        return ["up", *words]
    from difflib import get_close_matches

    near = get_close_matches(first, VERBS, n=1)
    hint = f"localllm {near[0]}" if near else f"localllm up {first}  (if that is a model), or localllm --help"
    raise ConfigError(f"Unknown verb {first!r}.", f"Verbs: {', '.join(VERBS)}.", hint)


def report_error(error: Exception, *, debug: bool, out: TextIO | None = None) -> int:
    """Print what happened, why, and what to try on standard error. Return the exit code."""
    out = out or sys.stderr
    if debug:
        import traceback

        traceback.print_exception(error, file=out)
    if not isinstance(error, LocalLLMError):
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        error = LocalLLMError("localllm failed with an unexpected error.", what, "the same command with --debug")
    for line in (error.what, error.why, error.hint and f"Try: {error.hint}"):
        if line:
            print(line, file=out)
    if isinstance(error, DoesNotFit) and error.options:
        _print_options(error, out)
    return error.exit_code


def _print_options(error: DoesNotFit, out: TextIO) -> None:
    from localllm.models.fit import option_rows
    from localllm.terminal import print_table

    print("\nThe model would fit with", file=out)
    print_table(option_rows(error.options), out)
