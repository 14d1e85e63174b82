"""`localllm run`: answer one prompt, or chat, with a model in this process, without a server.

Does not know: how tokens are generated (llm.py), how a conversation is printed (talk.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from localllm.cli.flags import settings_from
from localllm.cli.talk import Piece, Talk, answer_or_chat, read_prompt, speed_line
from localllm.cli.words import SAMPLING
from localllm.engine.outputs import GenerationEvent
from localllm.engine.params import SamplingParams
from localllm.errors import ConfigError

if TYPE_CHECKING:
    from localllm.llm import LLM


def run(options: argparse.Namespace) -> int:
    """Answer the prompt from the command line or standard input; without a prompt, chat."""
    prompt = read_prompt(options.prompt)
    settings = settings_from(options)
    from localllm.cli.hub import fetch_if_missing
    from localllm.llm import LLM

    fetch_if_missing(settings.engine)
    with LLM(**asdict(settings.engine)) as llm:
        speaker = InProcess(llm, _params(options, llm), model=settings.engine.model, raw=options.raw)
        return answer_or_chat(Talk(speaker, system=options.system, verbose=options.verbose), prompt)


class InProcess:
    """A `Speaker` that runs the model in this process. Without a chat template, the plain text is continued."""

    def __init__(self, llm: LLM, params: SamplingParams, *, model: str, raw: bool) -> None:
        self.model = model
        self._llm, self._params = llm, params
        self._last: GenerationEvent | None = None
        self.continues_text = raw or not llm.has_chat_template
        if self.continues_text and not raw:
            print("This model has no chat template: the text is continued as it is.", file=sys.stderr)

    def answer(self, messages: Sequence[dict[str, str]]) -> Generator[Piece]:
        with closing(self._llm.stream(self._prompt(messages), self._params)) as events:
            for event in events:
                self._last = event
                yield Piece(event.text)

    def figures(self) -> str:
        """Return one line with the engine's token counts and times."""
        usage = self._last.usage if self._last else None
        timings = self._last.timings if self._last else None
        if self._last is None or usage is None or timings is None:
            return ""
        return speed_line(
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            ttft_s=timings.ttft_s,
            decode_s=timings.decode_s,
            finish_reason=self._last.finish_reason,
        )

    def models(self) -> Sequence[str]:
        return (self.model,)

    def use(self, name: str) -> None:
        why = f"{self.model} runs in this process; a server can serve several models."
        raise ConfigError("This chat has only one model.", why, "localllm up, and localllm chat in another terminal")

    def _prompt(self, messages: Sequence[dict[str, str]]) -> str | Mapping[str, object]:
        if self.continues_text:
            return messages[-1]["content"]
        prompt = self._llm.apply_chat_template(messages, add_generation_prompt=True)
        ids = self._llm.get_tokenizer().encode(prompt, add_special_tokens=False)
        return {"prompt": prompt, "prompt_token_ids": ids}


def _params(options: argparse.Namespace, llm: LLM) -> SamplingParams:
    """Return the checkpoint's default parameters, overridden by flags. The context limits the answer's length."""
    given = {name: getattr(options, name) for name in SAMPLING if getattr(options, name) is not None}
    return replace(llm.get_default_sampling_params(), **{"max_tokens": None, **given})
