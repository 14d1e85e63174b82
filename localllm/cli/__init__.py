"""Words on the command line become one call; an error becomes three lines and an exit code.

Each verb's work lives in a file of its own and is imported when the verb is used, so `--help` answers at once.
Does not know: how a server is built (up.py), what a setting means (config.py).
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn, TextIO

from localllm import __version__
from localllm.cli.flags import ADAPTER_FLAGS, add_debug_flag, add_engine_flags, add_server_flags, refuse_unknown
from localllm.cli.words import add_chat, add_json, add_logs, add_sampling, add_server, add_service, add_top
from localllm.errors import ConfigError, DoesNotFit, LocalLLMError

INTERRUPTED = 130
"""What shells expect of a program that Ctrl-C ended."""


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are our errors."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__(allow_abbrev=False, **kwargs)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message[:1].upper() + message[1:] + ".", "", f"{self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        options = parse(words)
        code: int = options.handler(options)
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `localllm list | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return _report(error, debug="--debug" in words)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The verb's options, with `handler` set. Raises `ConfigError` for what nobody understands."""
    parser, verbs = build_parser()
    words = _with_verb(list(words), verbs)
    if words[0] not in verbs:  # --help or --version, which print and exit
        return parser.parse_args(words)
    verb = verbs[words[0]]
    # Intermixed: `localllm run demo --temperature 0 "a prompt"` has a flag between its two positionals.
    options, leftover = verb.parse_known_intermixed_args(words[1:])
    if leftover:
        refuse_unknown(leftover, verb._option_string_actions, f"{verb.prog} --help")
    return options


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """The whole command line, and the parser of each verb by name."""
    parser = Parser(
        prog="localllm",
        description="A local LLM server. Without a verb: up.",
        epilog="localllm VERB --help tells what a verb takes.",
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
    serve = verb("serve", "the same without desktop manners: no browser, plain log lines", "serving:serve")
    _model_argument(serve, required=False)
    add_server_flags(serve)
    _add_run(verb("run", "answer a prompt, or chat, in this terminal", "run:run"))
    add_chat(verb("chat", "answer a prompt, or chat, through a running server of any make", "chat:chat"))
    add_chat(verb("complete", "go on with a text through a running server of any make", "chat:complete"), chats=False)
    _add_bench(verb("bench", "measure how fast this machine serves", "bench:bench"))
    _add_tune(verb("tune", "find settings for a goal by trying them on this machine", "tune:tune"))
    _add_doctor(verb("doctor", "check what localllm needs of this machine", "doctor:doctor"))
    _add_search(verb("search", "models on the hub", "hub:search"))
    _add_pull(verb("pull", "fetch a model from the hub, or go on with it", "hub:pull"))
    listed = verb("list", "models that can be served without a download", "models:list_models")
    listed.add_argument("--names", action="store_true", help="only the names, one a line")
    add_json(listed)
    show = verb("show", "what a checkpoint says about itself, here or on the hub", "models:show_model")
    _add_show(show)
    fit = verb("fit", "whether a model fits into this machine, here or on the hub; takes up's flags", "fit:fit")
    _model_argument(fit, required=True)
    add_engine_flags(fit)
    fit.add_argument("--json", action="store_true", help="as JSON")
    copied = verb("cp", "give a model a second name", "models:copy_model")
    copied.add_argument("model", metavar="MODEL", help="a name that `localllm list` shows")
    copied.add_argument("name", metavar="NAME", help="the second one")
    add_json(copied)
    _add_remove(verb("rm", "delete a model from the Hugging Face cache, or a second name", "models:remove_model"))
    login = verb("login", "keep a token for gated and private models", "hub:login")
    login.add_argument("--token", metavar="TOKEN", help="without it: asked for, or read from standard input")
    add_json(login)
    add_json(verb("logout", "forget the token", "hub:logout"))
    add_server(verb("ps", "models of a running server, and what they do", "running:ps"))
    add_top(verb("top", "what a running server does, live", "top:top"))
    add_service(verb("service", "a server that systemd starts with your session", "service:service"))
    add_logs(verb("logs", "the log of a server of this machine", "logs:logs"))
    load = verb("load", "load a model on a running server, or wake it", "running:load")
    add_server(load, model="a name that `localllm list` shows, or a folder")
    load.add_argument("--pin", action="store_true", help="keep it, whoever else wants the room")
    load.add_argument("--keep-alive", metavar="TIME", help="how long it stays without a request: 5m, 90s, -1 for good")
    load.add_argument("--no-wait", action="store_true", help="return at once; `localllm ps` shows the progress")
    for name in ("unload", "stop"):
        unload = verb(name, "give back the memory of a model on a running server", "running:unload")
        add_server(unload, model="its name")
    add_server(verb("sleep", "keep only the weights of a model, in host memory", "running:sleep"), model="its name")
    add_server(verb("wake", "serve a sleeping model again", "running:wake"), model="its name")
    pin = verb("pin", "keep a model, whoever else wants the room", "running:pin")
    add_server(pin, model="its name")
    pin.add_argument("--off", action="store_true", help="no longer")
    _add_keys(verb("keys", "keys for the server of this machine, each with a name and a scope", "keys:keys"))
    _add_config(verb("config", "settings in force, and where each comes from", "tell:tell_config"))
    add_json(verb("version", "versions of localllm and of what it runs on", "tell:tell_versions"))
    completion = verb("completion", "shell code that completes what is typed here", "completion:print_script")
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    add_debug_flag(completion)
    return parser, verbs


def _with_verb(words: list[str], verbs: dict[str, Parser]) -> list[str]:
    """`localllm`, `localllm --port 9000` and `localllm ./folder` mean up."""
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help", "--version")):
        return ["up", *words]
    first = words[0]
    if first.startswith("-") or first in verbs:
        return words
    if first == "demo" or "/" in first or Path(first).is_dir():
        return ["up", *words]
    near = difflib.get_close_matches(first, verbs, n=1)
    hint = f"localllm {near[0]}" if near else f"localllm up {first}  (if that is a model), or localllm --help"
    raise ConfigError(f"Unknown verb {first!r}.", f"Verbs: {', '.join(verbs)}.", hint)


def _model_argument(parser: Parser, *, required: bool) -> None:
    help = "ORG/NAME, ORG/NAME:QUANT, a folder, a .gguf file, another name that `localllm list` tells, or demo"
    parser.add_argument("model", nargs=None if required else "?", metavar="MODEL", help=help)


def _add_search(parser: Parser) -> None:
    parser.add_argument("query", nargs="+", metavar="QUERY", help="part of a name")
    parser.add_argument("--format", choices=("safetensors", "gguf"), help="only models in this format")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="at most so many; default: 20")
    add_json(parser)


def _add_pull(parser: Parser) -> None:
    help = "ORG/NAME; with :QUANT one of several GGUF files, with @NAME a revision"
    parser.add_argument("model", metavar="MODEL", help=help)
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit; default: main")
    parser.add_argument("--include", action="append", metavar="PATTERN", help="these files, not what a load needs")
    parser.add_argument("--verify", action="store_true", help="read what is here, and fetch anew what is damaged")
    parser.add_argument("--dry-run", action="store_true", help="only tell what would be fetched")
    add_json(parser)


def _add_show(parser: Parser) -> None:
    _model_argument(parser, required=True)
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a repository")
    add_json(parser)


def _add_remove(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="ORG/NAME, ORG/NAME:QUANT, ORG/NAME@REVISION, or what `cp` made")
    parser.add_argument("--revision", metavar="NAME", help="only this branch, tag or commit")
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask")
    add_json(parser)


def _add_run(parser: Parser) -> None:
    _model_argument(parser, required=True)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="without one: chat, or read standard input")
    sampling = add_sampling(parser)
    sampling.add_argument("--raw", action="store_true", help="continue the prompt as it is, without a chat template")
    add_engine_flags(parser, leave_out=ADAPTER_FLAGS)  # it asks the model itself


def _add_bench(parser: Parser) -> None:
    parser.add_argument("kind", choices=("throughput", "latency", "serve"))
    _model_argument(parser, required=False)
    parser.add_argument("--url", metavar="URL", help="serve: the server to measure; default: http://127.0.0.1:8000")
    parser.add_argument("--api-key", metavar="KEY", help="serve: the key that the server wants")
    parser.add_argument("--num-requests", type=int, default=100, metavar="N")
    parser.add_argument("--concurrency", type=int, default=10, metavar="N", help="requests at a time")
    parser.add_argument("--input-len", type=int, default=128, metavar="N", help="prompt tokens per request")
    parser.add_argument("--output-len", type=int, default=64, metavar="N", help="output tokens per request")
    parser.add_argument("--seed", type=int, default=0, metavar="N", dest="bench_seed", help="of the prompts")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the report there as JSON, too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_engine_flags(parser, leave_out=("seed", "lora_modules"))  # it asks the model itself


def _add_tune(parser: Parser) -> None:
    _model_argument(parser, required=True)
    help = "chat, agents, throughput, long-context or share; default: chat"
    parser.add_argument("--goal", default="chat", metavar="NAME", help=help)
    parser.add_argument("--people", type=int, metavar="N", help="share: so many at once; default: 4")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-ttft", type=float, metavar="SECONDS", help="to the first token, of 19 in 20 requests")
    limits.add_argument("--max-tpot", type=float, metavar="SECONDS", help="for each token after it")
    limits.add_argument("--min-context", metavar="N", help="a shorter context is not good enough")
    limits.add_argument("--max-memory", metavar="SIZE", help="weights, KV cache and activations together, e.g. 12GiB")
    effort = parser.add_argument_group("effort")
    effort.add_argument("--quick", action="store_true", help="shorter trials and a shorter soak")
    effort.add_argument("--trial-seconds", type=float, metavar="X", help="of a full trial, about; default: 12")
    effort.add_argument("--soak-seconds", type=float, metavar="X", help="of the soak at the end, 0: none; default: 20")
    effort.add_argument("--seed", type=int, metavar="N", dest="tune_seed", help="of the search and its prompts")
    kept = parser.add_argument_group("what becomes of it")
    kept.add_argument("--apply", action="store_true", help="every later start of this model uses what was found")
    kept.add_argument("--save", metavar="NAME", help="its name for --profile; default: the goal's")
    kept.add_argument("--no-save", action="store_true", help="keep nothing")
    kept.add_argument("--export", choices=("flags", "toml"), help="print it as a command or for config.toml, too")
    kept.add_argument("--check", action="store_true", help="only measure whether what was found before still holds")
    parser.add_argument("--json", action="store_true", help="print JSON; progress goes to standard error")
    add_engine_flags(parser, leave_out=("seed", "lora_modules", "profile"))  # what is set here is not searched


def _add_doctor(parser: Parser) -> None:
    parser.add_argument("--report", action="store_true", help="a text to paste into an issue; names no user or key")
    parser.add_argument("--server", action="store_true", help="ask a running server how its parts get on")
    parser.add_argument("--url", metavar="URL", help="--server: which one; default: the one that runs here")
    parser.add_argument("--api-key", metavar="KEY", help="--server: a key with the scope admin")
    add_json(parser)


def _add_keys(parser: Parser) -> None:
    parser.add_argument("action", choices=("add", "list", "remove"), nargs="?", default="list")
    parser.add_argument("name", nargs="?", metavar="NAME", help="whose the key is; the access log shows it")
    help = "infer: use models and read metrics; admin: also load, unload, fetch and delete them; default: infer"
    parser.add_argument("--scope", choices=("infer", "admin"), default="infer", help=help)
    parser.add_argument("--delete-chats", action="store_true", help="with remove: delete the key's chats for good")
    add_json(parser)


def _add_config(parser: Parser) -> None:
    parser.add_argument("action", choices=("show", "path"), nargs="?", default="show")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file of settings (or LOCALLLM_CONFIG)")
    add_json(parser)


class _Later:
    """A verb's handler, `file:function` of this room; its file is imported when the verb is used."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __call__(self, options: argparse.Namespace) -> int:
        module, function = self.where.split(":")
        code: int = getattr(import_module(f"localllm.cli.{module}"), function)(options)
        return code


def _report(error: Exception, *, debug: bool, out: TextIO | None = None) -> int:
    """What happened, why, what to try: three lines on standard error. Returns the exit code."""
    out = out or sys.stderr
    if debug:
        traceback.print_exception(error, file=out)
    if not isinstance(error, LocalLLMError):
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        error = LocalLLMError("localllm failed in a way it should not.", what, "the same command with --debug")
    for line in (error.what, error.why, error.hint and f"Try: {error.hint}"):
        if line:
            print(line, file=out)
    if isinstance(error, DoesNotFit) and error.options:
        _print_options(error, out)
    return error.exit_code


def _print_options(error: DoesNotFit, out: TextIO) -> None:
    from localllm.cli.tell import print_table
    from localllm.models.fit import option_rows

    print("\nIt would fit with", file=out)
    print_table(option_rows(error.options), out)
