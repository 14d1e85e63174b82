"""The prompt tokens of a step: how many there are, and their shares among prompts.

    PromptPace       a limit beside requests that decode, from the measured times of steps
    StreamPace       when a step may have prompts at all, if a long one takes as long whatever it has
    prefill_shares   the tokens of each prompt
    chunk_length ... chunks at fixed positions, so that nothing about a request depends on what else runs

Does not know: requests, blocks, the clock, torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

REMEMBERED = 3  # steps of each kind
FIRST = 32  # tokens before any cost is known
LEAST = 16  # tokens that a step may always have: fewer cost almost as much


class PromptPace:
    """The prompt tokens that a step may have beside requests that decode: the measured costs of one model on one
    machine.

    Requests that decode wait for the whole step. It therefore takes at most `target_s`, or twice as long as a step
    without prompts if that is more, so that a prompt always gets half of the time. The cost of a token is a median over
    the last steps with prompts, the cost of the others a median over the last steps without: one step that the system
    delayed changes neither.
    """

    def __init__(self, target_s: float) -> None:
        self.target_s = target_s
        self._token_s: deque[float] = deque(maxlen=REMEMBERED)  # of a prompt token
        self._decode_s: deque[float] = deque(maxlen=REMEMBERED)  # of a step without prompts

    def observe(self, prompt_tokens: int, seconds: float) -> None:
        """Take in the time of a step; 0 is not a measurement. The cost of a token is what the step took beyond one
        without prompts, which reads the same weights; if that is out of date, at least a quarter of the time."""
        if seconds <= 0:
            return
        if not prompt_tokens:
            self._decode_s.append(seconds)
        elif prompt_tokens >= LEAST or not self._token_s:
            self._token_s.append(max(seconds - self.decode_s, seconds / 4) / prompt_tokens)

    @property
    def decode_s(self) -> float:
        """Seconds of a step without prompts; 0: not known yet."""
        return median(self._decode_s) if self._decode_s else 0.0

    def num_tokens(self, *, of_background: bool = False) -> int:
        """Return the prompt tokens that the next step may have. of_background: they are of background requests. Such a
        step takes a quarter of the time, since a request that arrives waits for the layer that runs."""
        if not self._token_s:
            return FIRST
        target_s = self.target_s / 4 if of_background else self.target_s
        left_s = max(target_s - self.decode_s, self.decode_s)
        return max(LEAST, int(left_s / median(self._token_s)))


class StreamPace:
    """The time that requests which decode have had since the last step with prompts.

    Where weights are copied to the device for a long prompt, a step takes as long as the copy, whatever it has: a share
    of such a step would cost all of it. So prompts get whole steps, each followed by steps without prompts that take as
    long together. A stream that decodes has a token in every step: it waits for one step with prompts at most, and has
    half of the time.
    """

    def __init__(self) -> None:
        self._owed_s = 0.0

    def observe(self, prompt_tokens: int, seconds: float) -> None:
        """Take in the time of a step; 0 is not a measurement."""
        self._owed_s = seconds if prompt_tokens else max(0.0, self._owed_s - seconds)

    @property
    def is_due(self) -> bool:
        """Return whether the next step may have prompts beside requests that decode."""
        return not self._owed_s


def prefill_shares(wanted: Sequence[int], classes: Sequence[int], budget: int) -> list[int]:
    """Return the tokens of `budget` for each prompt, which still wants `wanted` tokens; most urgent and oldest first.

    Prompts are served in order, except that a prompt that takes more than one step leaves up to half of each step to
    later ones that need at most half as much. The same rule applies among these. A short prompt therefore never waits
    for all of a long one, the long one keeps at least half of its share, and prompts of similar length finish one after
    the other.
    classes: a prompt leaves tokens only to prompts of its own class. The budget is used up unless all prompts are
    served.
    """
    shares = [0] * len(wanted)

    def divide(order: Sequence[int], left: int) -> int:
        """Serve these prompts and return the unused tokens."""
        for index, first in enumerate(order):
            if not left:
                break
            if wanted[first] > left:
                behind = order[index + 1 :]
                short = [i for i in behind if 2 * wanted[i] <= wanted[first] and classes[i] == classes[first]]
                left -= left // 2 - divide(short, left // 2)
            shares[first] = min(wanted[first], left)
            left -= shares[first]
        return left

    divide(range(len(wanted)), budget)
    return shares


# ---- prompts in chunks at fixed positions ----------------------------------------------------------------------------
# A product's last bits depend on how many rows it has. In this mode, which --deterministic uses on a CPU, each row is
# therefore computed with the same others every time: a prompt in chunks that end at the multiples of the chunk's size
# and at the prompt's end, every later token alone, also when it is computed again after a preemption. Blocks are shared
# only if a full chunk has filled them, and hits end where chunks do.


def chunk_length(start: int, prompt_len: int, chunk: int) -> int:
    """Return the tokens of the chunk that begins at position `start`."""
    return 1 if start >= prompt_len else min(chunk - start % chunk, prompt_len - start)


def num_sharable_tokens(prompt_len: int, chunk: int) -> int:
    """Return the tokens, from the first one on, whose blocks other requests may use."""
    return prompt_len // chunk * chunk


def whole_chunks(lengths: Sequence[int], budget: int) -> list[int]:
    """Return each chunk's tokens if they fit into what is left of the step's budget, else 0; most urgent first."""
    shares = []
    for length in lengths:
        shares.append(length if length <= budget else 0)
        budget -= shares[-1]
    return shares
