"""The arguments of the verbs about this install: `completion`, `update`, `uninstall`.

Does not know: the other verbs, what an argument does.
"""

from __future__ import annotations

import argparse

from localllm.cli.flags import add_debug_flag


def add_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell to complete in")
    parser.add_argument("--install", action="store_true", help="write the script to the place where the shell loads it")
    add_debug_flag(parser)


def add_update(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="only look for a newer release, and show what it changes")
    parser.add_argument("--to", metavar="VERSION", help="install this release, newer or older")
    parser.add_argument("--back", action="store_true", help="undo the last update, without a network")
    help = "package index (.../simple), page that links wheels, or folder of wheels; default: that of the install"
    parser.add_argument("--from", dest="source", metavar="ADDRESS", help=help)
    parser.add_argument("--restart", action="store_true", help="restart the service afterwards, instead of refusing")
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask for confirmation")
    add_debug_flag(parser)


def add_uninstall(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="only list what would be removed, with sizes")
    data = parser.add_mutually_exclusive_group()
    help = "keep settings, keys, chats, logs and profiles, without asking"
    data.add_argument("--keep-data", action="store_true", help=help)
    data.add_argument("--all", action="store_true", help="also remove settings, keys, chats, logs and profiles")
    parser.add_argument(
        "--yes", "-y", action="store_true", help="do not ask for confirmation; data is kept without --all"
    )
    add_debug_flag(parser)
