"""Limit the prompt tokens that a step may have beside requests that decode, from the measured times of steps.

Requests that decode wait for the whole step. It therefore takes at most `target_s`, or twice as long as a step without
prompts if that is more, so that a prompt always gets half of the time. What a token costs is the median of the last
steps with prompts, and what the others cost that of the last steps without: one step that the system delayed changes
neither.
Does not know: requests, the clock, torch.
"""

from __future__ import annotations

from collections import deque
from statistics import median

REMEMBERED = 3  # steps of each kind
FIRST = 32  # tokens before any cost is known
LEAST = 16  # tokens that a step may always have: fewer cost almost as much


class PromptPace:
    """Learns the costs of one model on one machine."""

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

    def num_tokens(self) -> int:
        """Return the prompt tokens that the next step may have."""
        if not self._token_s:
            return FIRST
        left_s = max(self.target_s - self.decode_s, self.decode_s)
        return max(LEAST, int(left_s / median(self._token_s)))
