"""The words of the verbs that are used beside a running server, and of the one that keeps it running.

Does not know: the other verbs, what any word does.
"""

from __future__ import annotations

import argparse

from localllm.cli.flags import add_debug_flag, add_server_flags


def add_chat(parser: argparse.ArgumentParser, *, chats: bool = True) -> None:
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="without one: chat, or read standard input")
    help = "the server, any that speaks OpenAI's API; default: the one that runs here"
    parser.add_argument("--url", metavar="URL", help=help)
    help = "the key that the server wants; one elsewhere gets OPENAI_API_KEY without it"
    parser.add_argument("--api-key", metavar="KEY", help=help)
    parser.add_argument("--model", metavar="NAME", help="one of the server's models; default: its first")
    add_sampling(parser, chats=chats)
    add_debug_flag(parser)


def add_sampling(parser: argparse.ArgumentParser, *, chats: bool = True) -> argparse._ArgumentGroup:
    """For verbs that print answers."""
    sampling = parser.add_argument_group("sampling")
    if chats:
        sampling.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    else:
        parser.set_defaults(system=None)
    sampling.add_argument("--temperature", type=float, metavar="X", help="0: always the likeliest token")
    sampling.add_argument("--top-p", type=float, metavar="X")
    sampling.add_argument("--top-k", type=int, metavar="N")
    help = f"longest answer; default: {'up to the context' if chats else '256'}"
    sampling.add_argument("--max-tokens", type=int, metavar="N", help=help)
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before this text")
    parser.add_argument("--verbose", action="store_true", help="tokens and speed after each answer")
    return sampling


def add_server(parser: argparse.ArgumentParser, model: str = "") -> None:
    """A verb that talks to a running server."""
    if model:
        parser.add_argument("model", metavar="MODEL", help=model)
    parser.add_argument("--url", metavar="URL", help="the server; default: the one that runs here")
    parser.add_argument("--api-key", metavar="KEY", help="the key that the server wants")
    add_json(parser)


def add_top(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="one look, as lines")
    add_server(parser)


def add_logs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--follow", "-f", action="store_true", help="go on with what is written, until Ctrl-C")
    parser.add_argument("--lines", "-n", type=int, default=100, metavar="N", help="how many of the last lines")
    help = "of the server on that port; default: of the one that runs here, or ran last"
    parser.add_argument("--port", type=int, metavar="N", help=help)
    parser.add_argument("--path", action="store_true", help="only tell where the file is")
    add_debug_flag(parser)


def add_service(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("install", "uninstall", "status"), nargs="?", default="status")
    parser.add_argument("model", nargs="?", metavar="MODEL", help="what it serves, as for `localllm serve`")
    parser.add_argument("--print", action="store_true", help="only show the unit; write and start nothing")
    add_server_flags(parser, json="status: as JSON")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_debug_flag(parser)
