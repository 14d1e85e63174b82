"""Room that a request needs for its output at admission, so that it is not preempted soon after.

A request admitted as soon as its prompt fits may be preempted a few steps later, and its tokens are computed again.
Room for the longest possible output would leave most of the cache empty. A request therefore counts with its prompt and
a share of its expected output: the mean length of recent outputs, or `max_tokens` if that is less. In addition, one
request at a time whose prompt fits is admitted on trial. Trials are spread over the time that an output takes, so that
requests do not all grow large together, and they pause after a preemption.
Does not know: blocks, queues.
Idea: new_token_ratio of SGLang (Zheng et al. 2024, arXiv:2312.07104).
"""

from __future__ import annotations

from localllm.engine.request import Request

FIRST_GUESS = 512
"""Expected output tokens before any request has ended."""
WEIGHT = 0.1
"""Weight of the newest output in the mean."""
SPACING = 1.5
"""Time between two trials, as a multiple of (steps of one output / running requests)."""
PAUSE = 0.25
"""Time without trials after a preemption, as a share of the steps of one output."""


class OutputReserve:
    def __init__(self, share: float) -> None:
        """share: of the expected output, 0 to 1; with 0 every prompt that fits is admitted."""
        self._share = share
        self._mean_tokens = float(FIRST_GUESS)
        self._steps_to_trial = 0.0

    def num_tokens(self, request: Request) -> int:
        """Return the tokens that the request is expected to hold for most of its time, at least its present ones."""
        output = self._share * min(self._mean_tokens, request.max_output_tokens)
        return max(request.num_tokens, request.prompt_len + int(output))

    @property
    def allows_trial(self) -> bool:
        return self._steps_to_trial <= 0

    def on_step(self) -> None:
        self._steps_to_trial -= 1

    def on_trial(self, request: Request, num_running: int) -> None:
        self._steps_to_trial = SPACING * min(self._mean_tokens, request.max_output_tokens) / num_running

    def on_preemption(self) -> None:
        self._steps_to_trial = max(self._steps_to_trial, PAUSE * self._mean_tokens)

    def on_end(self, request: Request) -> None:
        if request.num_output_tokens:
            self._mean_tokens += WEIGHT * (request.num_output_tokens - self._mean_tokens)
