"""Stacked bars: the shares of a whole, side by side.

Does not know: what the parts are, templates.
"""

from __future__ import annotations

from collections.abc import Sequence

from localllm.web.pages.frame.views import Segment


def stacked(parts: Sequence[tuple[str, str, float, str]], total: float | None = None) -> tuple[Segment, ...]:
    """Return the parts (name, kind, amount, printed value) side by side; `total` is the amount of the whole bar."""
    whole = max(total if total is not None else 0.0, sum(amount for _, _, amount, _ in parts)) or 1.0
    segments, x = [], 0.0
    for name, kind, amount, value in parts:
        width = 100 * amount / whole
        segments.append(Segment(name, kind, round(x, 3), round(width, 3), value))
        x += width
    return tuple(segments)
