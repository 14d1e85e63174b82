"""How much room a request should find for its output before it enters, so that it is not preempted soon after.

A request that enters as soon as its prompt fits may be preempted a few steps later, and what it had is computed again.
Room for the longest output would leave most of the cache empty. So a request counts with its prompt and a share of the
output that it is expected to have: the mean of the outputs that ended lately, or `max_tokens` where that is less.
Beyond that one request at a time enters on trial, whose prompt fits. Trials are spread over the time that an output
takes, so that requests do not all grow large together, and there is none for a while after a preemption.
Does not know: blocks, queues.
Idea: new_token_ratio of SGLang (Zheng et al. 2024, arXiv:2312.07104).
"""

from __future__ import annotations

from localllm.engine.request import Request

FIRST_GUESS = 512
"""Expected output tokens before any request has ended."""
WEIGHT = 0.1
"""Of the newest output in their mean."""
SPACING = 1.5
"""Between two trials, in outputs' times divided by the number of running requests."""
PAUSE = 0.25
"""After a preemption no trial for this part of an output's time."""


class OutputReserve:
    def __init__(self, share: float) -> None:
        """share: of the expected output, 0 to 1; with 0 every prompt enters that fits."""
        self._share = share
        self._mean_tokens = float(FIRST_GUESS)
        self._steps_to_trial = 0.0

    def num_tokens(self, request: Request) -> int:
        """Tokens that the request is expected to hold for most of its time, at least those that it has."""
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
