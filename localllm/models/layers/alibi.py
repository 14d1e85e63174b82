"""ALiBi: attention scores fall with distance, with a slope per head, and replace any other encoding of positions
(Press et al. 2021, arXiv:2108.12409). Does not know: attention (kernels/paged_attention takes the slopes).
"""

from __future__ import annotations

import math


def alibi_slopes(num_heads: int) -> list[float]:
    """Return 2^(-8 i / n), i from 1, for n heads, n a power of two. Further heads take every other slope of 2 n."""
    power = 1 << int(math.log2(num_heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    return slopes + [2 ** (-4 * i / power) for i in range(1, 2 * (num_heads - power), 2)]
