"""`localllm completion SHELL`: code that completes verbs and flags, made from the parsers themselves.

bash   source <(localllm completion bash)
zsh    source <(localllm completion zsh)
fish   localllm completion fish | source
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

_BASH = """\
_localllm() {{
  local word=${{COMP_WORDS[COMP_CWORD]}}
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  if [ "$COMP_CWORD" = 1 ]; then COMPREPLY=($(compgen -W "{verbs}" -- "$word")); fi
}}
complete -o default -F _localllm localllm
"""


def print_script(options: argparse.Namespace) -> int:
    from localllm.cli import build_parser

    verbs = {name: _flags(parser) for name, parser in build_parser()[1].items()}
    print(_fish(verbs) if options.shell == "fish" else _bash(verbs, zsh=options.shell == "zsh"), end="")
    return 0


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for flag in parser._option_string_actions if flag.startswith("--")]


def _bash(verbs: Mapping[str, list[str]], *, zsh: bool) -> str:
    cases = "\n".join(
        f'    {verb}) COMPREPLY=($(compgen -W "{" ".join(flags)}" -- "$word")) ;;' for verb, flags in verbs.items()
    )
    intro = "autoload -Uz bashcompinit && bashcompinit\n" if zsh else ""
    return intro + _BASH.format(cases=cases, verbs=" ".join(verbs))


def _fish(verbs: Mapping[str, list[str]]) -> str:
    lines = [f"complete -c localllm -n __fish_use_subcommand -f -a '{' '.join(verbs)}'"]
    for verb, flags in verbs.items():
        lines += [f"complete -c localllm -n '__fish_seen_subcommand_from {verb}' -l {flag[2:]}" for flag in flags]
    return "\n".join(lines) + "\n"
