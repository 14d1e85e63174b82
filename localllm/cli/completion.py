"""`localllm completion SHELL`: print a script that completes verbs, flags, values and model names.

bash   source <(localllm completion bash)
zsh    source <(localllm completion zsh)
fish   localllm completion fish | source

The script is generated from the parsers. Model names come from `localllm list --names` at completion time.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

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


def print_script(options: argparse.Namespace) -> int:
    from localllm.cli import build_parser

    verbs = {name: _verb(parser) for name, parser in build_parser()[1].items()}
    print(_fish(verbs) if options.shell == "fish" else _bash(verbs, zsh=options.shell == "zsh"), end="")
    return 0


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
