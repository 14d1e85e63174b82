"""Drafts by lookup: what followed when the end of the text occurred before (prompt lookup, n-gram speculation).

Of all earlier places where the longest possible end of the text occurs, the latest is taken, and the tokens behind it
are the drafts: never more than the length of the match, since a short match is rarely right for long. Nothing is stored
between two calls: comparing a few thousand numbers takes microseconds.
Does not know: requests, whether a draft is right.
Idea: prompt lookup decoding (Saxena 2023); matches as long as possible as in SAM decoding (Hu et al. 2024,
arXiv:2411.10666).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[Any]

LEAST_MATCH = 3
"""Shortest end of the text that is looked up. Shorter ones occur by chance too often."""
LONGEST_MATCH = 64
"""Matches of this length or more are equally good."""


def find_drafts(token_ids: Ids, most: int, least: int = LEAST_MATCH) -> Ids:
    """Return up to `most` tokens that may follow a text. token_ids [n] int32; least: shortest match."""
    end, length = longest_match(token_ids, token_ids[:-1], least)
    return token_ids[end : end + min(most, length)]


def find_predicted(output_ids: Ids, predicted_ids: Ids, most: int) -> Ids:
    """Return up to `most` tokens that may follow an output, as a predicted text has them.

    output_ids [n], predicted_ids [m] int32. An output that is the beginning of the prediction goes on as it does.
    """
    n = len(output_ids)
    if n < len(predicted_ids) and n <= LEAST_MATCH and (output_ids == predicted_ids[:n]).all():
        return predicted_ids[n : n + most]
    end, length = longest_match(output_ids, predicted_ids, LEAST_MATCH)
    return predicted_ids[end : end + (most if length else 0)]


def longest_match(token_ids: Ids, text: Ids, least: int) -> tuple[int, int]:
    """Find the longest end of `token_ids`, of at least `least` and at most `LONGEST_MATCH` tokens, in `text`.

    Returns the place behind the latest one, and its length; (0, 0) if none is found. `text` may be the beginning of
    `token_ids`, where the match then ends before the last token.
    """
    limit = min(LONGEST_MATCH, len(token_ids), len(text))
    if limit < least:
        return 0, 0
    last = token_ids[::-1]  # last[i]: the token i places before the end
    ends = np.flatnonzero(text[least - 1 :] == last[0]) + least  # places behind the matches that are left
    for place in range(1, least):
        ends = ends[text[ends - 1 - place] == last[place]]
    end, length = 0, 0
    while len(ends):
        end = int(ends[-1])
        least, length = max(least, length + 1), _common_length(text[:end], last, limit)
        if length == limit:
            break
        ends = ends[ends > length]  # only a longer match is better than the latest one
        for place in (length, *range(least, length)):
            ends = ends[text[ends - 1 - place] == last[place]]
            if not len(ends):
                break
    return end, length


def _common_length(text: Ids, last: Ids, limit: int) -> int:
    """Return for how many tokens the end of a text agrees with a reversed one, at most `limit`."""
    width = min(limit, len(text))
    differs = text[::-1][:width] != last[:width]
    place = int(differs.argmax())
    return place if differs[place] else width
