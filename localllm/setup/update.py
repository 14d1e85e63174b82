"""`localllm update`: install another release into this environment, or print the command where localllm cannot do it.

PyTorch and the other packages stay as they are, except where the new release requires newer ones. The release that is
replaced is kept as a wheel, so that `--back` needs no network. Nothing calls this but the person who types it.
Does not know: how each way to install localllm is updated (installers.py).
"""

from __future__ import annotations

import argparse

from localllm.config.flags import add_debug_flag
from localllm.errors import ConfigError
from localllm.setup.installers import installer


def update_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="only look for a newer release, and show what it changes")
    parser.add_argument("--to", metavar="VERSION", help="install this release, newer or older")
    parser.add_argument("--back", action="store_true", help="undo the last update, without a network")
    help = "package index (.../simple), page that links wheels, or folder of wheels; default: that of the install"
    parser.add_argument("--from", dest="source", metavar="ADDRESS", help=help)
    parser.add_argument("--restart", action="store_true", help="restart the service afterwards, instead of refusing")
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask for confirmation")
    add_debug_flag(parser)


def update(options: argparse.Namespace) -> int:
    """Run the verb. Raises `ConfigError` for options that exclude each other and while a server runs."""
    given = [flag for flag, is_set in (("--check", options.check), ("--to", options.to), ("--back", options.back))
             if is_set]  # fmt: skip
    if len(given) > 1:
        raise ConfigError(f"{given[0]} and {given[1]} exclude each other.", hint=f"localllm update {given[0]}")
    return installer().update(options)
