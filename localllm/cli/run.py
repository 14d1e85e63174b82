"""`localllm run`: a model in this terminal. One prompt and its answer, or a chat that remembers.

The model runs in this process, without a server. Answers go to standard output, everything else to standard error,
so that `localllm run demo < question.txt > answer.txt` holds the answer and nothing else.
Does not know: how tokens are made (llm.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from localllm.cli.flags import settings_from
from localllm.engine.outputs import GenerationEvent
from localllm.engine.params import SamplingParams
from localllm.errors import LocalLLMError
from localllm.units import format_rate, format_seconds

if TYPE_CHECKING:
    from localllm.llm import LLM

HELP = "/clear forgets the conversation, /system TEXT sets a system message, /bye or Ctrl-D leaves."


def run(options: argparse.Namespace) -> int:
    """Answer the prompt given as words or on standard input; chat when there is neither."""
    prompt = _read_prompt(options.prompt)
    settings = settings_from(options)
    from localllm.cli.hub import fetch_if_missing
    from localllm.llm import LLM

    fetch_if_missing(settings.engine)
    with LLM(**asdict(settings.engine)) as llm:
        talk = Talk(llm, _params(options, llm), system=options.system, raw=options.raw, verbose=options.verbose)
        if prompt is not None:
            talk.say(prompt)
            return 0
        return _chat(talk)


class Talk:
    """A conversation, and how to continue it. Without a chat template the bare text is continued."""

    def __init__(self, llm: LLM, params: SamplingParams, *, system: str | None, raw: bool, verbose: bool) -> None:
        self._llm, self._params, self._verbose = llm, params, verbose
        self._raw = raw or not llm.has_chat_template
        if self._raw and not raw:
            print("This model has no chat template: it continues the text as it is.", file=sys.stderr)
        self._messages: list[Mapping[str, str]] = []
        self.begin(system)

    def begin(self, system: str | None = None) -> None:
        self._messages = [{"role": "system", "content": system}] if system else []

    def say(self, text: str) -> None:
        """Print the answer while it comes, and remember both; a refused message is forgotten."""
        self._messages.append({"role": "user", "content": text})
        answer: list[GenerationEvent] = []
        try:
            with closing(self._llm.stream(self._prompt(text), self._params)) as events:
                for event in events:
                    answer.append(event)
                    print(event.text, end="", flush=True)
        except LocalLLMError:
            self._messages.pop()
            raise
        except KeyboardInterrupt:
            self._remember(answer)
            raise
        self._remember(answer)
        if self._verbose:
            print(_speed(answer[-1]), file=sys.stderr)

    def _remember(self, answer: list[GenerationEvent]) -> None:
        print()
        self._messages.append({"role": "assistant", "content": "".join(event.text for event in answer)})

    def _prompt(self, text: str) -> str | Mapping[str, object]:
        if self._raw:
            return text
        prompt = self._llm.apply_chat_template(self._messages, add_generation_prompt=True)
        ids = self._llm.get_tokenizer().encode(prompt, add_special_tokens=False)
        return {"prompt": prompt, "prompt_token_ids": ids}


def _chat(talk: Talk) -> int:
    """Read, answer, repeat. Ctrl-C ends an answer; Ctrl-D, or Ctrl-C at the prompt, ends the chat."""
    import readline  # noqa: F401  arrow keys and history in input()

    print(f"Ask something. {HELP}", file=sys.stderr)
    while True:
        try:
            text = input(">>> ").strip()
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return 0
        if text == "/bye":
            return 0
        if text:
            _answer(talk, text)


def _answer(talk: Talk, text: str) -> None:
    command, _, rest = text.partition(" ")
    if command == "/clear":
        talk.begin()
    elif command == "/system":
        talk.begin(rest)
    elif command == "/help":
        print(HELP, file=sys.stderr)
    elif command.startswith("/"):
        print(f"Unknown command {command}. {HELP}", file=sys.stderr)
    else:
        _say(talk, text)


def _say(talk: Talk, text: str) -> None:
    """One bad answer does not end the chat."""
    try:
        talk.say(text)
    except KeyboardInterrupt:
        print("(stopped)", file=sys.stderr)
    except LocalLLMError as error:
        print(f"{error}\n/clear forgets the conversation.", file=sys.stderr)


def _read_prompt(words: str | None) -> str | None:
    """The prompt on the command line, then what is piped in; None when there is neither."""
    piped = "" if sys.stdin.isatty() else sys.stdin.read().strip()
    parts = [part for part in (words, piped) if part]
    return "\n\n".join(parts) if parts or not sys.stdin.isatty() else None


def _params(options: argparse.Namespace, llm: LLM) -> SamplingParams:
    """The checkpoint's defaults, the flags over them; answers may be as long as the context."""
    asked = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k", "stop")}
    given = {name: value for name, value in asked.items() if value is not None}
    return replace(llm.get_default_sampling_params(), max_tokens=options.max_tokens, **given)


def _speed(last: GenerationEvent) -> str:
    """One line of what the answer cost, from the engine's own counts."""
    usage, timings = last.usage, last.timings
    if usage is None or timings is None:
        return ""
    decoded = max(usage.completion_tokens - 1, 0)
    rate = format_rate(decoded / timings.decode_s) if timings.decode_s > 0 else "-"
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    return (
        f"prompt {usage.prompt_tokens}{cached} · output {usage.completion_tokens} · "
        f"first token {format_seconds(timings.ttft_s)} · {rate} · {last.finish_reason}"
    )
