"""`localllm run`: answer one prompt, or chat, with a model in this process, without a server.

Without a model it offers the one that fits, at a terminal; nothing is downloaded before the answer `y`.
Does not know: how tokens are generated (llm.py), how a conversation is printed (talk.py), which model fits
(suggestion.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from localllm.cli.talk import SAMPLING, Piece, Talk, add_sampling, answer_or_chat, read_prompt, speed_line
from localllm.config.flags import ADAPTER_FLAGS, add_engine_flags, add_model, settings_from
from localllm.engine.params import SamplingParams
from localllm.errors import ConfigError, HubUnreachable

if TYPE_CHECKING:
    from localllm.config.settings import Settings
    from localllm.engine.outputs import GenerationEvent
    from localllm.llm import LLM


def run_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, required=False)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="default: chat, or read standard input")
    sampling = add_sampling(parser)
    sampling.add_argument("--raw", action="store_true", help="continue the prompt as it is, without a chat template")
    add_engine_flags(
        parser, leave_out=ADAPTER_FLAGS
    )  # the prompt goes to the model itself, so an adapter would be unused


def run(options: argparse.Namespace) -> int:
    """Answer the prompt from the command line or standard input; without a prompt, chat."""
    settings = settings_from(options)
    is_offered = settings.source("model") == "default"
    if is_offered:
        name = offer(settings)
        if name is None:
            return 0
        settings = replace(settings, engine=replace(settings.engine, model=name))
    prompt = read_prompt(options.prompt)
    _fetch(settings, is_offered=is_offered)
    from localllm.llm import LLM

    with LLM(**asdict(settings.engine)) as llm:
        speaker = InProcess(llm, _params(options, llm), model=settings.engine.model, raw=options.raw)
        return answer_or_chat(Talk(speaker, system=options.system, verbose=options.verbose), prompt)


def offer(settings: Settings) -> str | None:
    """Ask at the terminal whether to run the model that fits. Return its name; None: the answer was no.

    Raises `ConfigError` with the command to type without a terminal, where no model fits, and without a network
    for a model that would have to be downloaded.
    """
    from localllm.cli.start_lines import offer_lines
    from localllm.cli.suggestion import best_pick, installed_model
    from localllm.models.library.hub import client

    is_offline = settings.engine.offline or client.is_offline()
    installed = installed_model()
    pick = None if installed is not None else best_pick(settings)
    if installed is None and (pick is None or is_offline):
        why = "No model is on this machine, and "
        why += "downloads are disabled (--offline or HF_HUB_OFFLINE)." if pick else "no suggested one fits."
        raise ConfigError(
            "localllm run needs a model.", why, f"{FILE}, or localllm run demo for the toy", param="model"
        )
    name = installed or (pick.name if pick is not None else "")
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(NEEDS, "None was named.", f"localllm run {name}", param="model")
    for line in offer_lines(installed, pick):
        print(line, file=sys.stderr)
    if _says_yes("Run it? [y/n] " if installed is not None else "Download and run it? [y/n] "):
        return name
    print(f"Nothing was downloaded. Later: localllm run {name}, or any other model of the hub.", file=sys.stderr)
    return None


def _says_yes(question: str) -> bool:
    """Ask until the answer is y or n. The end of input means no."""
    while True:
        print(question, end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline()
        if not answer or answer.strip().lower() in ("n", "no"):
            return False
        if answer.strip().lower() in ("y", "yes"):
            return True


def _fetch(settings: Settings, *, is_offered: bool) -> None:
    """Download the model if it is only on the hub. Raises the hub's errors; of an offered model they also name a way
    without the network."""
    from localllm.cli.hub import fetch_if_missing

    try:
        fetch_if_missing(settings.engine)
    except HubUnreachable as error:
        if is_offered:
            raise HubUnreachable(error.what, error.why, f"{error.hint} Without a network: {FILE}") from error
        raise


FILE = "localllm run /path/to/file.gguf"
NEEDS = "localllm run needs a model."


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
