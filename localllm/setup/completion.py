"""`localllm completion SHELL`: print a script that completes verbs, flags, values and model names, or install it.

bash   source <(localllm completion bash)     --install: $XDG_DATA_HOME/bash-completion/completions/localllm
zsh    source <(localllm completion zsh)      --install: $XDG_DATA_HOME/zsh/site-functions/_localllm
fish   localllm completion fish | source      --install: $XDG_CONFIG_HOME/fish/completions/localllm.fish

The script is generated from the parsers. Model names come from `localllm list --names` at completion time.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from localllm.config.flags import add_debug_flag
from localllm.errors import ConfigError
from localllm.files.folders import config_home, data_folder, translated_write, write_whole

SHELLS = ("bash", "zsh", "fish")
MARK = "# Written by `localllm completion`."
NAMES = "localllm list --names 2>/dev/null"

_BASH = """\
_localllm() {{
  local line=${{COMP_LINE:0:$COMP_POINT}} verb=${{COMP_WORDS[1]}} flags= words= names= word before
  word=${{line##* }}
  line=${{line% *}}
  before=${{line##* }}
  if [ "$COMP_CWORD" = 1 ]; then
    case $word in -*) verb=up ;; *) verb= words="{verbs}" ;; esac
  fi
  case $verb in
{cases}
  esac
  case "$verb $before" in
{values}
  esac
  case $word in -*) words=$flags names= ;; esac
  if [ -n "$names" ]; then words="$words $({list_names} | tr '\\n' ' ')"; fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  case $COMP_WORDBREAKS in *:*) COMPREPLY=("${{COMPREPLY[@]#"${{word%"${{word##*:}}"}}"}}") ;; esac
}}
complete -o default -F _localllm localllm
"""

_FISH = """\
complete -c localllm -e
function __localllm_verb
  set -l words (commandline -opc)
  test (count $words) -gt 1; and test $words[2] = $argv[1]
end
complete -c localllm -n '__fish_is_first_arg' -f -a '{verbs}'
"""


@dataclass(frozen=True, slots=True)
class VerbCompletions:
    """The possible arguments of a verb."""

    flags: list[str]
    values: Mapping[str, list[str]]  # allowed values of each flag that takes one; empty: any value
    words: list[str]
    takes_model: bool


def print_script_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell to complete in")
    parser.add_argument("--install", action="store_true", help="write the script to the place where the shell loads it")
    add_debug_flag(parser)


def print_script(options: argparse.Namespace) -> int:
    """Print the script, or install it. Raises `ConfigError` for a file that localllm did not write."""
    text = script_of(options.shell, options.all_parsers()[1])
    if not options.install:
        print(text, end="")
        return 0
    path = installed_path(options.shell)
    if path.exists() and not is_ours(path):
        raise ConfigError(f"{path} was not written by localllm.", f"It has no line {MARK!r}.", f"mv {path} {path}.old")
    # zsh calls the file as the function that completes; the last line completes in this first call.
    first_call = "_bash_complete -o default -F _localllm\n"
    with translated_write("The completion script", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, f"#compdef localllm\n{text}{first_call}" if options.shell == "zsh" else text, mode=0o644)
    print(f"Written to {path}. It is used by the next {options.shell} that you start.")
    if options.shell == "zsh" and str(path.parent) not in os.environ.get("FPATH", "").split(":"):
        print(f"zsh does not search this folder yet: put fpath+=({path.parent}) into ~/.zshrc, before compinit.")
    return 0


def installed_path(shell: str) -> Path:
    """Return the file from which a user's shell loads the completions of `localllm`."""
    data_home = data_folder().parent
    return {
        "bash": data_home / "bash-completion" / "completions" / "localllm",
        "zsh": data_home / "zsh" / "site-functions" / "_localllm",
        "fish": config_home() / "fish" / "completions" / "localllm.fish",
    }[shell]


def is_ours(path: Path) -> bool:
    """Return whether a file exists and was written by `--install`."""
    try:
        return MARK in path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def script_of(shell: str, parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """Return the script for a shell. parsers: the parser of each verb, by name."""
    verbs = {name: _verb(parser) for name, parser in parsers.items()}
    return f"{MARK}\n" + (_fish(verbs) if shell == "fish" else _bash(verbs, zsh=shell == "zsh"))


def _verb(parser: argparse.ArgumentParser) -> VerbCompletions:
    flags: list[str] = []
    values: dict[str, list[str]] = {}
    words: list[str] = []
    takes_model = False
    for action in parser._actions:
        choices = [str(choice) for choice in action.choices or ()]
        if not action.option_strings:
            words += choices
            takes_model |= action.metavar == "MODEL"
            continue
        flags += [flag for flag in action.option_strings if flag.startswith("--")]
        if action.nargs != 0:
            values |= dict.fromkeys(action.option_strings, choices)
    return VerbCompletions(flags, values, words, takes_model)


def _bash(verbs: Mapping[str, VerbCompletions], *, zsh: bool) -> str:
    cases, values = [], []
    for name, verb in verbs.items():
        names = " names=1" if verb.takes_model else ""
        cases.append(f'    {name}) flags="{" ".join(verb.flags)}" words="{" ".join(verb.words)}"{names} ;;')
        free = [f'"{name} {flag}"' for flag, choices in verb.values.items() if not choices]
        if free:
            values.append(f"    {'|'.join(free)}) COMPREPLY=(); return ;;")
        for flag, choices in verb.values.items():
            if choices:
                values.append(f'    "{name} {flag}") flags= names= words="{" ".join(choices)}" ;;')
    intro = "autoload -Uz bashcompinit && bashcompinit\n" if zsh else ""
    script = _BASH.format(cases="\n".join(cases), values="\n".join(values), verbs=" ".join(verbs), list_names=NAMES)
    return intro + script


def _fish(verbs: Mapping[str, VerbCompletions]) -> str:
    lines = []
    for name, verb in verbs.items():
        start = f"complete -c localllm -n '__localllm_verb {name}'"
        if verb.words:
            lines.append(f"{start} -f -a '{' '.join(verb.words)}'")
        if verb.takes_model:
            lines.append(f"{start} -a '({NAMES})'")
        for flag in verb.flags:
            choices = verb.values.get(flag)
            takes = "" if choices is None else f" -x -a '{' '.join(choices)}'" if choices else " -r"
            lines.append(f"{start} -l {flag[2:]}{takes}")
    return _FISH.format(verbs=" ".join(verbs)) + "\n".join(lines) + "\n"
