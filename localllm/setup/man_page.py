"""The manual page, written from the parsers in man(7)'s format, and `localllm man`, which shows it.

scripts/make_docs stores the same text as docs/reference/localllm.1, which wheels install into share/man/man1.
Does not know: what a verb does.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from localllm.config.flags import add_debug_flag, help_of
from localllm.config.settings import SETTINGS
from localllm.version import __version__

SHARED = "up"
"""The verb whose section describes the flags that others share with it."""

EXIT_CODES = {
    0: "success",
    1: "something failed",
    2: "a flag or a setting is wrong",
    4: "the model does not fit into this machine's memory",
    5: "the model was not found, could not be downloaded, or is damaged",
    6: "the port is in use",
    7: "the GPU was lost",
    130: "ended by Ctrl-C",
}
FILES = {
    "~/.config/localllm/config.toml": "settings",
    "~/.local/share/localllm/": "keys, chats, logs, profiles and names of models",
    "~/.cache/localllm/": "measurements and compiled kernels, which may be deleted at any time",
    "~/.cache/huggingface/hub/": "downloaded models, shared with other programs",
}


def show_man_arguments(parser: argparse.ArgumentParser) -> None:
    add_debug_flag(parser)


def show_man(options: argparse.Namespace) -> int:
    """Show the page with `man`, or print the help of all verbs where `man` is not installed."""
    if not shutil.which("man"):
        parser, verbs = options.all_parsers()
        print("\n\n".join(each.format_help() for each in (parser, *verbs.values())))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "localllm.1"
        path.write_text(man_page(*options.all_parsers()), encoding="utf-8")
        return subprocess.run(["man", str(path)], check=False).returncode


def man_page(parser: argparse.ArgumentParser, verbs: Mapping[str, argparse.ArgumentParser]) -> str:
    """Return the manual page. parser: the parser of the whole command line; verbs: the parser of each verb, by name."""
    return "\n".join(_lines(parser, verbs)) + "\n"


def _lines(parser: argparse.ArgumentParser, verbs: Mapping[str, argparse.ArgumentParser]) -> Iterator[str]:
    yield f'.TH LOCALLLM 1 "" "localllm {__version__}" "User commands"'
    yield from (".SH NAME", r"localllm \- a local LLM server")
    yield from (".SH SYNOPSIS", r".B localllm", r"[\fIVERB\fR] [\fIARGUMENTS\fR]")
    yield from (".SH DESCRIPTION", _escaped(parser.description or ""))
    yield _escaped("`localllm VERB --help` prints the arguments of one verb. A setting is taken from its flag, its "
                   "environment variable, config.toml, the tuned profile, or its default, in this order.")  # fmt: skip
    yield ".SH VERBS"
    for verb in verbs.values():
        yield from _section(verb, verbs[SHARED])
    yield ".SH ENVIRONMENT"
    for spec in SETTINGS.values():
        if spec.environment:
            yield from _entry(spec.environment, spec.meaning)
    yield ".SH FILES"
    for path, what in FILES.items():
        yield from _entry(path, what)
    yield ".SH EXIT STATUS"
    for code, meaning in EXIT_CODES.items():
        yield from _entry(str(code), meaning)


def _section(verb: argparse.ArgumentParser, shared: argparse.ArgumentParser) -> Iterator[str]:
    """Yield a verb's synopsis, its arguments and its flags. Flags that SHARED describes are only named."""
    positionals = [action for action in verb._actions if not action.option_strings]
    yield f".SS {_escaped(' '.join([verb.prog, *map(_usage, positionals)]))}"
    yield _escaped(verb.description or "")
    for action in positionals:
        if action.help:
            yield from _entry(_usage(action), help_of(action))
    same: list[str] = []
    for action in verb._actions:
        if not action.option_strings or isinstance(action, argparse._HelpAction):
            continue
        first = shared._option_string_actions.get(action.option_strings[0])
        if verb is not shared and first is not None and first.help == action.help:
            same.append(action.option_strings[0])
        else:
            metavar = action.metavar or "|".join(map(str, action.choices or [action.dest.upper()]))
            value = f" {metavar}" if action.nargs != 0 else ""
            yield from _entry(", ".join(f"{flag}{value}" for flag in action.option_strings), help_of(action))
    if same:
        yield from (".PP", _escaped(f"Also, as for {SHARED}: {', '.join(same)}."))


def _entry(term: str, text: str) -> Iterator[str]:
    yield from (".TP", rf"\fB{_escaped(term)}\fR", _escaped(text) or r"\&")


def _usage(action: argparse.Action) -> str:
    name = action.metavar or "|".join(map(str, action.choices or [action.dest]))
    return f"[{name}]" if action.nargs in ("?", "*") else str(name)


def _escaped(text: str) -> str:
    """Escape for roff: a backslash, a hyphen that is typed as such, and a control character at a line's start."""
    text = " ".join(text.split()).replace("\\", r"\e").replace("-", r"\-").replace("`", "")
    return rf"\&{text}" if text.startswith((".", "'")) else text
