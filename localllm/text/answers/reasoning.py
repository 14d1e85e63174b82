"""What a model writes to itself before it answers: between two markers, or from the start where the prompt opened it.

Does not know: tool calls. A tool's marker inside reasoning is reasoning.
"""

from __future__ import annotations

from typing import NamedTuple

from localllm.text.answers.output import Output
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
    """What a model goes on from."""

    text: str  # the prompt, or its end
    continued: str = ""  # the text of its last message, where the model is to go on with that

    def opens(self, pair: ReasoningPair) -> bool:
        """Whether it ends inside reasoning, so that the model's text begins there.

        A marker further back opens nothing, for it may be what a question is about; but reasoning at the start of a
        message that goes on is open until it is closed.
        """
        text, continued = self.text.rstrip(), self.continued.strip()
        opened = text.removesuffix(continued).rstrip().endswith(pair.opener) or continued.startswith(pair.opener)
        return opened and pair.closer not in continued


NO_PROMPT = PromptEnd("")


def read_reasoning(scan: Scanner, output: Output, pair: ReasoningPair, *, inside: bool) -> Read[bool]:
    """Read the reasoning at the start of an answer, without the whitespace around it; False if there is none."""
    yield from scan.skip_space()
    if not (yield from scan.accept(pair.opener)) and not inside:  # a model may repeat what the prompt has opened
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
