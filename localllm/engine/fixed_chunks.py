"""Prompts in chunks at fixed positions, so that nothing about a request depends on what else runs.

A product's last bits depend on how many rows it has. In this mode, which --deterministic uses on a CPU, each row is
therefore computed with the same others every time: a prompt in chunks that end at the multiples of the chunk's size and
at the prompt's end, every later token alone, also when it is computed again after a preemption. Blocks are shared only
if a full chunk has filled them, and hits end where chunks do.
Does not know: requests, blocks, how a step is computed.
"""

from __future__ import annotations

from collections.abc import Sequence


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
