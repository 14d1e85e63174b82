"""Rankings joined to one, the passages of it that fit, and a ranking by single sentences.

Idea: reciprocal rank fusion (Cormack et al. 2009, SIGIR).
Does not know: how the rankings were found.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

FUSION_K = 60
"""Lowers the weight of the first ranks, so that one ranking alone decides little."""


SPREAD_WEIGHT = 0.5
"""Weight of a term somewhere in a text, beside its weight in the text's best sentence."""

LONG_WORD = 5
_SENTENCE = re.compile(r"[.!?…。！？]\s*|\n\s*\n")
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W_]+?(?=[\u3040-\u30ff\u3400-\u9fff]|\b|_)")


def fused(rankings: Sequence[Sequence[int]]) -> list[int]:
    """Return all ids, best first; an id gains 1 / (60 + rank) from each ranking that has it. The first of each ranking
    precedes the others, which may all be in two rankings.
    """
    scores: defaultdict[int, float] = defaultdict(float)
    for ranking in rankings:
        for rank, each in enumerate(ranking, 1):
            scores[each] += 1 / (FUSION_K + rank)
    firsts = {ranking[0] for ranking in rankings if ranking}
    return sorted(scores, key=lambda each: (each not in firsts, -scores[each], each))


def by_sentence(terms: Sequence[str], texts: Mapping[int, str]) -> list[int]:
    """Return the ids of texts by the terms that each has, and by those that its best sentence has; equal ones keep
    their order.

    A term weighs more the fewer of the texts have it. An answer mostly has the words of its question in one sentence,
    while full-text search takes a passage for a bag of words.
    """
    wanted = [{_stem(part) for part in term.split()} for term in terms]
    sentences = {each: [_stems(sentence) for sentence in _SENTENCE.split(text)] for each, text in texts.items()}
    words = {each: set[str]().union(*found) for each, found in sentences.items()}
    counts = [sum(stems <= found for found in words.values()) for stems in wanted]
    weights = [math.log(1 + len(texts) / (1 + count)) for count in counts]

    def score(found: set[str]) -> float:
        return sum(weight for stems, weight in zip(wanted, weights, strict=True) if stems <= found)

    return sorted(texts, key=lambda each: -max(map(score, sentences[each])) - SPREAD_WEIGHT * score(words[each]))


def _stems(text: str) -> set[str]:
    return {_stem(word) for word in _WORD.findall(text.casefold())}


def _stem(word: str) -> str:
    """Return the beginning of a word that its other forms share, roughly: a fifth of a long word is its ending."""
    return word if len(word) < LONG_WORD else word[: max(LONG_WORD - 1, len(word) * 4 // 5 - 1)]


def fitting(ranking: Sequence[int], sizes: Mapping[int, int], room: int) -> list[int]:
    """Return the best ids whose sizes together fit into the room, in ascending order. One that does not fit is left
    out, and smaller ones after it may still fit.
    """
    chosen, left = list[int](), room
    for each in ranking:
        if sizes[each] <= left:
            chosen.append(each)
            left -= sizes[each]
    return sorted(chosen)


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` of the numbers 0 to `count` - 1, at even distances; the first few of them are spread, too.

    Idea: the van der Corput sequence, whose members halve the largest gap.
    """
    taken = min(count, most)
    bits = max(1, (taken - 1).bit_length())
    in_order = sorted(range(taken), key=lambda index: int(f"{index:0{bits}b}"[::-1], 2))
    return [index * count // taken for index in in_order]
