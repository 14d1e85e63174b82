"""The arguments of the verbs that talk to a running server, and of `service`.

Does not know: the other verbs, what an argument does.
"""

from __future__ import annotations

import argparse

from localllm.cli.flags import add_debug_flag, add_server_flags
from localllm.cli.programs import PROGRAMS
from localllm.engine.params import SAMPLING_PARAMS, ParamInfo

SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "stop")
"""The sampling parameters that have a flag."""


def add_chat(parser: argparse.ArgumentParser, *, chats: bool = True) -> None:
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="default: chat, or read standard input")
    help = "URL of any OpenAI-compatible server; default: the one running on this machine"
    parser.add_argument("--url", metavar="URL", help=help)
    help = "the server's API key; default for a remote server: OPENAI_API_KEY"
    parser.add_argument("--api-key", metavar="KEY", help=help)
    parser.add_argument("--model", metavar="NAME", help="a model of the server, or a folder; default: the first")
    add_sampling(parser, chats=chats)
    add_debug_flag(parser)


def add_sampling(parser: argparse.ArgumentParser, *, chats: bool = True) -> argparse._ArgumentGroup:
    """Add the sampling flags of the verbs that print answers. Return their group."""
    sampling = parser.add_argument_group("sampling")
    if chats:
        sampling.add_argument("--system", metavar="TEXT", help="system message")
    else:
        parser.set_defaults(system=None)
    for name in SAMPLING:
        _add_sampling_flag(sampling, name, SAMPLING_PARAMS[name], chats)
    parser.add_argument("--verbose", action="store_true", help="print token counts and speed after each answer")
    return sampling


def _add_sampling_flag(sampling: argparse._ArgumentGroup, name: str, info: ParamInfo, chats: bool) -> None:
    flag, help = f"--{name.replace('_', '-')}", info.text[0].lower() + info.text[1:].removesuffix(".")
    if name == "max_tokens":
        help += f"; default: {info.unset if chats else '256'}"
    if info.kind == "strings":
        sampling.add_argument(flag, action="append", metavar="TEXT", help=help)
    else:
        number, metavar = (float, "X") if info.kind == "real" else (int, "N")
        sampling.add_argument(flag, type=number, metavar=metavar, help=help)


def add_server(parser: argparse.ArgumentParser, model: str = "") -> None:
    """Add the flags of a verb that talks to a running server; `model` is the help of its MODEL argument, if any."""
    if model:
        parser.add_argument("model", metavar="MODEL", help=model)
    parser.add_argument("--url", metavar="URL", help="the server; default: the one running on this machine")
    parser.add_argument("--api-key", metavar="KEY", help="the server's API key")
    add_json(parser)


def add_top(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="print the state once and exit")
    add_server(parser)


def add_launch(parser: argparse.ArgumentParser) -> None:
    help = "claude, codex, opencode, copilot, cline, qwen, zed or vscode; arguments after -- go to the program"
    parser.add_argument("program", choices=tuple(PROGRAMS), metavar="PROGRAM", help=help)
    parser.add_argument("--model", metavar="NAME", help="a model of the server, or a folder; default: the first")
    parser.add_argument("--print", action="store_true", help="only print what would be set; start nothing")
    parser.add_argument(
        "--url", metavar="URL", help="the server; default: the one running on this machine, or a new one"
    )
    parser.add_argument("--api-key", metavar="KEY", help="the server's API key")
    add_debug_flag(parser)


def add_link(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", help="default: the server that this user started last")
    parser.add_argument("--open", action="store_true", help="also open it in a browser")
    add_json(parser)


def add_logs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--follow", "-f", action="store_true", help="keep printing new lines until Ctrl-C")
    parser.add_argument("--lines", "-n", type=int, default=100, metavar="N", help="number of last lines to print")
    help = "the log of the server on that port; default: the running server's, or the last one's"
    parser.add_argument("--port", type=int, metavar="N", help=help)
    parser.add_argument("--path", action="store_true", help="only print the path of the log file")
    add_debug_flag(parser)


def add_service(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", choices=("install", "uninstall", "status"), nargs="?", default="status", help="without it: status"
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="the model to serve, as for `localllm serve`")
    help = "only print the unit; write and start nothing"
    parser.add_argument("--print", "--dry-run", action="store_true", help=help)
    help = "the machine's service, with a user of its own, instead of this user's; needs root"
    parser.add_argument("--system", action="store_true", help=help)
    help = "let systemd listen on the address, and start the server with the first request"
    parser.add_argument("--socket", action="store_true", help=help)
    add_server_flags(parser, json="with status: print JSON")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_debug_flag(parser)
