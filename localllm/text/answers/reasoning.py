"""Parses a model's reasoning: between two markers, or from the start if the prompt opened it.

Does not know: tool calls. A tool's marker inside reasoning is reasoning.
"""

from __future__ import annotations

from typing import NamedTuple

from localllm.text.answers.output import PartCollector
from localllm.text.answers.scanner import Read, Scanner


class ReasoningPair(NamedTuple):
    opener: str
    closer: str


PAIRS = (
    ReasoningPair("<think>", "</think>"),
    ReasoningPair("[THINK]", "[/THINK]"),
    ReasoningPair("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningPair("<seed:think>", "</seed:think>"),
    ReasoningPair("<think:opensource>", "</think:opensource>"),
    ReasoningPair("<mm:think>", "</mm:think>"),
    ReasoningPair("<|inner_prefix|>", "<|inner_suffix|>"),
    ReasoningPair("<|channel>thought", "<channel|>"),
)


class PromptEnd(NamedTuple):
    """The end of the prompt that a model continues."""

    text: str  # the prompt, or its last characters
    continued: str = ""  # the text of the last message, if the model is to continue it

    def opens(self, pair: ReasoningPair) -> bool:
        """Return whether the prompt ends inside reasoning, so that the model's text begins there.

        An earlier marker does not count, since a question may be about markers. But reasoning at the start of a
        continued message is open until it is closed.
        """
        text, continued = self.text.rstrip(), self.continued.strip()
        opened = text.removesuffix(continued).rstrip().endswith(pair.opener) or continued.startswith(pair.opener)
        return opened and pair.closer not in continued


NO_PROMPT = PromptEnd("")


def read_reasoning(scan: Scanner, output: PartCollector, pair: ReasoningPair, *, inside: bool) -> Read[bool]:
    """Read the reasoning at the start of an answer, without surrounding whitespace. Return False if there is none.
    An answer that begins with the closing marker has none either, and the marker is dropped (MiniMax M3)."""
    yield from scan.skip_space()
    if not inside and (yield from scan.accept(pair.closer)):
        yield from scan.skip_space()
        scan.commit()
        return True
    if not (yield from scan.accept(pair.opener)) and not inside:  # a model may repeat the opener of the prompt
        scan.rewind()
        return False
    yield from scan.skip_space()
    scan.commit()

    def give(text: str) -> None:
        output.reasoning(text)
        scan.commit()

    yield from scan.give_until((pair.closer,), give, hold_space=True)
    yield from scan.accept(pair.closer)
    yield from scan.skip_space()
    scan.commit()
    return True
