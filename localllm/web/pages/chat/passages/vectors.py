"""Embeddings as bytes (little-endian fp16), and the ranking of many by their similarity to one.

Does not know: which model made them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def packed(vector: Sequence[float]) -> bytes:
    """Return a vector of length 1 as bytes; a vector of zeros stays one."""
    values = np.asarray(vector, np.float32)
    return (values / (np.linalg.norm(values) or 1.0)).astype("<f2").tobytes()


def nearest(wanted: bytes, rows: Sequence[tuple[int, bytes]], most: int) -> list[int]:
    """Return the ids of the rows that are most similar to `wanted`, best first. Rows of another length are left out."""
    same = [(each, vector) for each, vector in rows if len(vector) == len(wanted)]
    if not same:
        return []
    matrix = np.frombuffer(b"".join(vector for _, vector in same), "<f2").reshape(len(same), -1).astype(np.float32)
    scores = matrix @ np.frombuffer(wanted, "<f2").astype(np.float32)
    return [same[index][0] for index in np.argsort(-scores, kind="stable")[:most]]
