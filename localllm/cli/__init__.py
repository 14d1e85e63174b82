"""The command line: parse the arguments, call the verb, print an error as three lines with an exit code.

Each verb has its own file, imported when the verb is used, so that `--help` answers at once.
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

from localllm.cli.flags import ADAPTER_FLAGS, add_debug_flag, add_engine_flags, add_server_flags, refuse_unknown
from localllm.cli.install_words import add_completion, add_uninstall, add_update
from localllm.cli.words import (
    add_chat,
    add_json,
    add_launch,
    add_link,
    add_logs,
    add_sampling,
    add_server,
    add_service,
    add_top,
)
from localllm.config.settings import SETTINGS
from localllm.errors import ConfigError, DoesNotFit, LocalLLMError
from localllm.version import __version__

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells expect: 128 + SIGINT."""


def help_of(action: argparse.Action) -> str:
    """Return the help of an argument with its default, if it has one."""
    default = "" if action.default in (None, False, argparse.SUPPRESS) else f"; default: {action.default}"
    return f"{action.help or ''}{default}"


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
        return _report(error, debug="--debug" in words)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the verb's options, with `handler` set. Raises `ConfigError` for an unknown verb, flag or value."""
    parser, verbs = build_parser()
    words = _with_verb(list(words), verbs)
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


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of the whole command line, and each verb's parser by name."""
    parser = Parser(
        prog="localllm",
        description="A local LLM server. Without a verb: up.",
        epilog="localllm VERB --help lists a verb's arguments.",
    )
    parser.add_argument("--version", action="version", version=f"localllm {__version__}")
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", parser_class=Parser, required=True)
    verbs: dict[str, Parser] = {}

    def verb(name: str, help: str, where: str) -> Parser:
        verbs[name] = subparsers.add_parser(name, help=help, description=help[:1].upper() + help[1:] + ".")
        verbs[name].set_defaults(handler=_Later(where))
        return verbs[name]

    up = verb("up", "serve a model on this machine, with a chat page", "serving:up")
    _model_argument(up, required=False)
    add_server_flags(up)
    up.add_argument("--verbose", action="store_true", help="show the phases, sizes and addresses of the start")
    serve = verb("serve", "serve a model as a service does: no browser, plain log lines", "serving:serve")
    _model_argument(serve, required=False)
    add_server_flags(serve)
    _add_run(verb("run", "answer a prompt, or chat, in this terminal", "run:run"))
    add_chat(verb("chat", "answer a prompt, or chat, through a running OpenAI-compatible server", "chat:chat"))
    add_chat(
        verb("complete", "continue a text through a running OpenAI-compatible server", "chat:complete"), chats=False
    )
    _add_run_batch(verb("run-batch", "answer a file of requests, in OpenAI's batch format", "run_batch:run_batch"))
    add_launch(verb("launch", "start a coding program with a model of this machine", "launch:launch"))
    _add_bench(verb("bench", "measure how fast this machine serves", "bench:bench"))
    _add_tune(verb("tune", "find settings for a goal by trying them on this machine", "tune:tune"))
    _add_doctor(verb("doctor", "check that this machine has what localllm needs", "doctor:doctor"))
    _add_search(verb("search", "search for models on the hub", "hub:search"))
    _add_pull(verb("pull", "download a model from the hub, or resume a download", "hub:pull"))
    listed = verb("list", "list models that can be served without a download", "models:list_models")
    listed.add_argument("--names", action="store_true", help="only the names, one per line")
    add_json(listed)
    _add_show(verb("show", "show a checkpoint's facts, on this machine or on the hub", "models:show_model"))
    help = "check whether a local or hub model fits into this machine's memory; takes up's flags"
    _add_fit(verb("fit", help, "fit:fit"))
    _add_copy(verb("cp", "give a model a second name", "models:copy_model"))
    _add_remove(verb("rm", "delete a model from the Hugging Face cache, or a second name", "models:remove_model"))
    login = verb("login", "store a token for gated and private models", "hub:login")
    login.add_argument("--token", metavar="TOKEN", help="default: prompt for it, or read standard input")
    add_json(login)
    add_json(verb("logout", "delete the token", "hub:logout"))
    add_link(verb("link", "print a one-time link that logs a browser in as the server's owner", "running:link"))
    add_server(verb("ps", "list the models of a running server and their states", "running:ps"))
    add_top(verb("top", "show a running server's activity, live", "top:top"))
    add_service(verb("service", "run the server as a service of systemd or launchd", "service:service"))
    add_logs(verb("logs", "show the log of a server on this machine", "logs:logs"))
    _add_load(verb("load", "load a model on a running server, or wake it", "running:load"))
    for name in ("unload", "stop"):
        unload = verb(name, "unload a model of a running server and free its memory", "running:unload")
        add_server(unload, model="the model's name")
    add_server(
        verb("sleep", "put a model to sleep, keeping only its weights, in host memory", "running:sleep"),
        model="the model's name",
    )
    add_server(verb("wake", "serve a sleeping model again", "running:wake"), model="the model's name")
    pin = verb("pin", "pin a model, so that it is never unloaded for another", "running:pin")
    add_server(pin, model="the model's name")
    pin.add_argument("--off", action="store_true", help="remove the pin")
    _add_keys(verb("keys", "manage API keys of this machine's server, each with a name and a scope", "keys:keys"))
    _add_config(verb("config", "show the settings in force, and where each comes from", "tell:tell_config"))
    add_json(verb("version", "show the versions of localllm and its main packages", "tell:tell_versions"))
    add_completion(verb("completion", "print or install a shell completion script", "completion:print_script"))
    add_debug_flag(verb("man", "show the manual page", "man_page:show_man"))
    add_update(verb("update", "install another release of localllm, or go back to the one before", "update:update"))
    add_uninstall(verb("uninstall", "remove localllm, and what it stored", "uninstall:uninstall"))
    return parser, verbs


def _with_verb(words: list[str], verbs: dict[str, Parser]) -> list[str]:
    """Put `up` before arguments that name no verb: `localllm`, `localllm --port 9000`, `localllm ./folder`."""
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help", "--version")):
        return ["up", *words]
    first = words[0]
    if first.startswith("-") or first in verbs:
        return words
    if first == "demo" or "/" in first or Path(first).is_dir():
        return ["up", *words]
    from difflib import get_close_matches

    near = get_close_matches(first, verbs, n=1)
    hint = f"localllm {near[0]}" if near else f"localllm up {first}  (if that is a model), or localllm --help"
    raise ConfigError(f"Unknown verb {first!r}.", f"Verbs: {', '.join(verbs)}.", hint)


def _model_argument(parser: Parser, *, required: bool) -> None:
    help = SETTINGS["model"].allowed
    parser.add_argument("model", nargs=None if required else "?", metavar="MODEL", help=help)


def _add_fit(parser: Parser) -> None:
    _model_argument(parser, required=True)
    add_engine_flags(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_search(parser: Parser) -> None:
    parser.add_argument("query", nargs="+", metavar="QUERY", help="part of a name")
    parser.add_argument("--format", choices=("safetensors", "gguf"), help="only models in this format")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="maximum number of results")
    add_json(parser)


def _add_pull(parser: Parser) -> None:
    help = "ORG/NAME; :QUANT selects one of several GGUF files, @NAME a revision"
    parser.add_argument("model", metavar="MODEL", help=help)
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit; default: main")
    parser.add_argument(
        "--include", action="append", metavar="PATTERN", help="download these files instead of those that a load needs"
    )
    parser.add_argument("--verify", action="store_true", help="check downloaded files, and download damaged ones again")
    parser.add_argument("--dry-run", action="store_true", help="only show what would be downloaded")
    add_json(parser)


def _add_show(parser: Parser) -> None:
    _model_argument(parser, required=True)
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a repository")
    add_json(parser)


def _add_copy(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a name that `localllm list` shows")
    parser.add_argument("name", metavar="NAME", help="the second name")
    add_json(parser)


def _add_load(parser: Parser) -> None:
    add_server(parser, model="a name that `localllm list` shows, or a folder")
    parser.add_argument("--pin", action="store_true", help="pin the model, so that it is never unloaded for another")
    parser.add_argument(
        "--keep-alive", metavar="TIME", help="how long it stays loaded without a request: 5m, 90s; -1: for ever"
    )
    parser.add_argument("--no-wait", action="store_true", help="return at once; `localllm ps` shows the progress")


def _add_remove(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="ORG/NAME, ORG/NAME:QUANT, ORG/NAME@REVISION, or a second name")
    parser.add_argument("--revision", metavar="NAME", help="only this branch, tag or commit")
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask for confirmation")
    add_json(parser)


def _add_run(parser: Parser) -> None:
    _model_argument(parser, required=False)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="default: chat, or read standard input")
    sampling = add_sampling(parser)
    sampling.add_argument("--raw", action="store_true", help="continue the prompt as it is, without a chat template")
    add_engine_flags(
        parser, leave_out=ADAPTER_FLAGS
    )  # the prompt goes to the model itself, so an adapter would be unused


def _add_run_batch(parser: Parser) -> None:
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


def _add_bench(parser: Parser) -> None:
    parser.add_argument("kind", choices=("throughput", "latency", "serve"), help="what to measure")
    _model_argument(parser, required=False)
    parser.add_argument("--url", metavar="URL", help="serve: the server to measure; default: http://127.0.0.1:8000")
    parser.add_argument("--api-key", metavar="KEY", help="serve: the server's API key")
    parser.add_argument("--num-requests", type=int, default=100, metavar="N", help="number of requests")
    parser.add_argument("--concurrency", type=int, default=10, metavar="N", help="concurrent requests")
    parser.add_argument("--input-len", type=int, default=128, metavar="N", help="prompt tokens per request")
    parser.add_argument("--output-len", type=int, default=64, metavar="N", help="output tokens per request")
    parser.add_argument("--seed", type=int, default=0, metavar="N", dest="bench_seed", help="seed of the prompts")
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write the report to FILE, as JSON")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_engine_flags(parser, leave_out=("seed", "lora_modules"))  # requests go to the model itself


def _add_tune(parser: Parser) -> None:
    _model_argument(parser, required=True)
    help = "what to optimise for: chat, agents, throughput, long-context, share or edit"
    parser.add_argument("--goal", default="chat", metavar="NAME", help=help)
    parser.add_argument("--people", type=int, metavar="N", help="share: number of concurrent users; default: 4")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-ttft", type=float, metavar="SECONDS", help="longest time to first token (p95)")
    limits.add_argument(
        "--max-tpot", type=float, metavar="SECONDS", help="longest time per output token after the first"
    )
    limits.add_argument("--min-context", metavar="N", help="shortest acceptable context, in tokens")
    help = "most memory for weights, KV cache and activations together, e.g. 12GiB"
    limits.add_argument("--max-memory", metavar="SIZE", help=help)
    effort = parser.add_argument_group("effort")
    effort.add_argument("--quick", action="store_true", help="shorter trials and a shorter soak")
    effort.add_argument(
        "--trial-seconds", type=float, metavar="X", help="approximate length of a full trial; default: 12"
    )
    effort.add_argument(
        "--soak-seconds", type=float, metavar="X", help="length of the soak at the end; 0: none; default: 20"
    )
    effort.add_argument("--seed", type=int, metavar="N", dest="tune_seed", help="seed of the search and its prompts")
    kept = parser.add_argument_group("result")
    kept.add_argument("--apply", action="store_true", help="use the profile at every later start of this model")
    kept.add_argument("--save", metavar="NAME", help="name of the profile; default: the goal's name")
    kept.add_argument("--no-save", action="store_true", help="save no profile")
    help = "also print the settings, as a command or for config.toml"
    kept.add_argument("--export", choices=("flags", "toml"), help=help)
    help = "only measure a saved profile again, to see whether it still holds"
    kept.add_argument("--check", action="store_true", help=help)
    parser.add_argument("--json", action="store_true", help="print JSON; progress goes to standard error")
    add_engine_flags(
        parser, leave_out=("seed", "lora_modules", "profile")
    )  # settings given here are fixed, not searched


def _add_doctor(parser: Parser) -> None:
    parser.add_argument(
        "--report", action="store_true", help="print a report to paste into an issue, without user names or keys"
    )
    help = "only the problems, the best model that fits, and the next command"
    parser.add_argument("--brief", action="store_true", help=help)
    parser.add_argument("--gpu", action="store_true", help="compare the kernels with PyTorch on the GPU")
    parser.add_argument("--network", action="store_true", help="also check that the hub can be reached")
    parser.add_argument("--server", action="store_true", help="check a running server and its parts")
    parser.add_argument(
        "--url", metavar="URL", help="with --server: the server; default: the one running on this machine"
    )
    parser.add_argument("--api-key", metavar="KEY", help="with --server: a key with the scope admin")
    add_json(parser)


def _add_keys(parser: Parser) -> None:
    parser.add_argument("action", choices=("add", "list", "remove"), nargs="?", default="list", help="without it: list")
    parser.add_argument("name", nargs="?", metavar="NAME", help="the key's name, as the access log shows it")
    help = "infer: use models and read metrics; admin: also load, unload, download and delete models"
    parser.add_argument("--scope", choices=("infer", "admin"), default="infer", help=help)
    parser.add_argument("--delete-chats", action="store_true", help="with remove: also delete the key's chats")
    add_json(parser)


def _add_config(parser: Parser) -> None:
    parser.add_argument("action", choices=("show", "path"), nargs="?", default="show", help="without it: show")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file of settings (or LOCALLLM_CONFIG)")
    add_json(parser)


class _Later:
    """A verb's handler, `file:function` of this package; the file is imported when the verb is used."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __call__(self, options: argparse.Namespace) -> int:
        module, function = self.where.split(":")
        code: int = getattr(import_module(f"localllm.cli.{module}"), function)(options)
        return code


def _report(error: Exception, *, debug: bool, out: TextIO | None = None) -> int:
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
    from localllm.cli.tell import print_table
    from localllm.models.fit import option_rows

    print("\nThe model would fit with", file=out)
    print_table(option_rows(error.options), out)
