"""What the prefix cache holds of a prompt's start.

Does not know: how it was found (request_table.py, checkpoints.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

NO_STATE = -1
"""In place of a place to read: begin from zeros."""


class CachedPrefix(NamedTuple):
    """The tokens that need not be computed, and what a request takes over for them."""

    blocks: Sequence[int] = ()  # of the KV cache; they hold num_tokens tokens
    num_tokens: int = 0
    num_kv_tokens: int = 0  # tokens whose KV is known; without a state behind them, those after num_tokens do not count
    place: int = NO_STATE  # of the recurrent state after num_tokens tokens
