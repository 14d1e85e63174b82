"""Vector operations that every dialect shares.

Does not know: HTTP, any dialect's fields.
"""

from __future__ import annotations

from localllm.errors import InvalidParameter

MAX_INPUTS = 2048
"""Inputs per request, as in OpenAI's API."""


def shortened(vector: list[float], dimensions: int | None) -> list[float]:
    """Return the first `dimensions` numbers, normalised to length 1 (Matryoshka, arXiv:2205.13147)."""
    if dimensions is None or dimensions == len(vector):
        return vector
    if not 0 < dimensions < len(vector):
        raise InvalidParameter(
            f"dimensions {dimensions} is out of range.",
            f"Vectors of this model have {len(vector)} dimensions.",
            param="dimensions",
        )
    part = vector[:dimensions]
    length = sum(number * number for number in part) ** 0.5 or 1.0
    return [number / length for number in part]
