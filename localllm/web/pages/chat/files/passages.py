"""Passages of long files: a text cut into passages, a question as a full-text query, and rankings.

A text is cut into whole paragraphs where they fit, else sentences, words, and at last characters. Sizes are bytes of
UTF-8, of which a token has about four in most languages. A passage begins with the end of the one before it, so that a
sentence at a border is whole in one of the two; a page begins with nothing of another. The own parts, joined, are the
text again. A question becomes a query of SQLite's FTS5: its words without those that every text has, any of which may
match; Chinese and Japanese are indexed by characters and searched by pairs. Rankings are joined by reciprocal rank
fusion (Cormack et al. 2009, SIGIR). Embeddings are stored as little-endian fp16.
Does not know: files, models, chats, HTTP, SQL beyond the syntax of a query.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from localllm.web.api.documents import PAGE

OWN_BYTES = 1_000
"""Most bytes of a passage's own part: about 250 tokens."""

OVERLAP_BYTES = 150
"""Most bytes that a passage repeats of the one before it."""

BYTES_PER_TOKEN = 4

_PARAGRAPH = re.compile(r"\n[ \t]*\n\s*")
_SENTENCE = re.compile(r"(?<=[.!?…。！？])[\"'”’»)\]]*\s+|(?<=[。！？])|\n")
_WORD = re.compile(r"\s+")
_BORDERS = (_PARAGRAPH, _SENTENCE, _WORD)


@dataclass(frozen=True, slots=True)
class Passage:
    """A part of a text. `text[overlap:]` is its own part."""

    text: str
    overlap: int  # characters at its start that the passage before it has, too
    first: int  # page or line, from 1, where its own part begins
    last: int  # page or line where its own part ends


def estimated_tokens(text: str) -> int:
    """Return about how many tokens a text has, without a tokenizer."""
    return -(-len(text.encode(errors="replace")) // BYTES_PER_TOKEN)


def cut(text: str, *, paged: bool = False) -> list[Passage]:
    """Return the passages of a text, in order. `paged`: the text has pages, and no passage is of two; else
    numbers count lines.
    """
    mark, number, found = PAGE if paged else "\n", 1, list[Passage]()
    for start, end in _parts(text, paged):
        own = text[start:end]
        page_start = text.rfind(PAGE, max(0, start - OVERLAP_BYTES - 1), start) + 1 if paged else 0
        overlap = _overlap(text, page_start, start)
        found.append(Passage(overlap + own, len(overlap), number, number + own.rstrip().count(mark)))
        number += own.count(mark)
    return found


def _parts(text: str, paged: bool) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the own parts: neighbouring pieces together, as many as fit."""
    start = end = size = 0
    for piece_start, piece_end in _pages(text) if paged else ((0, len(text)),):
        for first, last in _pieces(text, piece_start, piece_end, 0):
            piece_bytes = _num_bytes(text, first, last)
            if start < end and (size + piece_bytes > OWN_BYTES or (paged and first == piece_start)):
                yield start, end
                start, size = end, 0
            end, size = last, size + piece_bytes
    if start < end:
        yield start, end


def _pages(text: str) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the pages, each with the mark that ends it."""
    start = 0
    for page in text.split(PAGE):
        end = min(start + len(page) + 1, len(text))
        if start < end:
            yield start, end
        start = end


def _pieces(text: str, start: int, end: int, level: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most `OWN_BYTES`, divided at the widest borders that suffice."""
    if _num_bytes(text, start, end) <= OWN_BYTES:
        yield start, end
    elif level == len(_BORDERS):
        yield from _hard(text, start, end)
    else:
        at = start
        for border in _BORDERS[level].finditer(text, start, end):
            if border.end() > at:
                yield from _pieces(text, at, border.end(), level + 1)
                at = border.end()
        if at < end:
            yield from _pieces(text, at, end, level + 1)


def _hard(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of a text without any border."""
    while start < end:
        raw = text[start : min(end, start + OWN_BYTES)].encode(errors="replace")[:OWN_BYTES]
        length = max(1, len(raw.decode(errors="ignore")))
        yield start, start + length
        start += length


def _overlap(text: str, least: int, start: int) -> str:
    """Return the last whole words before a position, but after `least`; at most `OVERLAP_BYTES` of them."""
    raw = text[max(least, start - OVERLAP_BYTES) : start].encode(errors="replace")
    before = raw[-OVERLAP_BYTES:].decode(errors="ignore")
    if len(before) == start - least:
        return before
    word = _WORD.search(before)
    return before[word.end() :] if word else ""


def _num_bytes(text: str, start: int, end: int) -> int:
    return len(text[start:end].encode(errors="replace"))


MAX_TERMS = 32
PREFIX_CHARS = 4
"""A word of this length or more also matches longer words that begin with it."""

FEW_TERMS = 3
"""A question with fewer terms is also searched with the words of the message before it: "And in 1950?"."""

_TOKEN = re.compile(r"[^\W_]+")
_IDEOGRAPH = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")

_STOP_WORDS = """
a about according after all also am an and any are as asks at attached be because been before being between both but by
can could describe did do does document doing each explain file find for from further get give had has have having he
her here hers him his how i if in into is it its just know like list many me mention mentioned mentions might more most
much must my no not now of off on once only or other our out over own pdf please said same say says see shall she should
so some such summarise summarize tell text than that the their them then there these they this those through to too
under until up upon us use very was we were what when where whether which while who whom whose why will with would you
your
aber als auch auf aus bei bis da das dass dem den der du ein eine einem einen einer eines er es für hatte ich ihr im ist
ja kann kein mir mit nach nicht noch nur ob oder sein sich sie sind über und uns von vor was welche welcher welches wenn
wer wie wieviele wo wurde zu zum zur
au aux avec ce ces cette dans de du elle en est et eux il je la le les leur lui ma mais ne nous ou par pas que quel
quelle quelles quels qui sa se ses sur un une vous
al como con cuál cuando cuándo del donde dónde el ella es esta este fue hay las lo los más para pero por qué quien quién
sin su sus y
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())
"""Words of questions and grammar, in English, German, French and Spanish; and words that name the file itself."""


def terms(text: str) -> list[str]:
    """Return the words of a question that can tell one passage from another, each once."""
    found = dict.fromkeys(term for token in _TOKEN.findall(text.casefold()) for term in _query_parts(token))
    return [term for term in found if term not in STOP_WORDS and (len(term) > 1 or term.isdigit())][:MAX_TERMS]


def with_context(text: str, before: str) -> list[str]:
    """Return the terms of a question, and of the message before it if they are few."""
    own = terms(text)
    return own if len(own) >= FEW_TERMS else list(dict.fromkeys(own + terms(before)))[:MAX_TERMS]


def query(words: Sequence[str]) -> str:
    """Return the FTS5 query: any of the terms. Typed characters are never operators, because each term is quoted."""
    return " OR ".join(f'"{word}"*' if len(word) >= PREFIX_CHARS and " " not in word else f'"{word}"' for word in words)


def indexed(text: str) -> str:
    """Return the text as it is indexed: with spaces around each character of Chinese and Japanese."""
    return _IDEOGRAPH.sub(r" \g<0> ", text)


def _query_parts(token: str) -> list[str]:
    """Return the token, or pairs of characters for Chinese and Japanese."""
    characters = indexed(token).split()
    if len(characters) == 1:
        return [token]
    return [f"{one} {two}" for one, two in pairwise(characters)]


FUSION_K = 60
"""Lowers the weight of the first ranks, so that one ranking alone decides little."""

SPREAD_WEIGHT = 0.5
"""Weight of a term somewhere in a text, beside its weight in the text's best sentence."""

LONG_WORD = 5
_RANKED_SENTENCE = re.compile(r"[.!?…。！？]\s*|\n\s*\n")
_RANKED_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W_]+?(?=[\u3040-\u30ff\u3400-\u9fff]|\b|_)")


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
    sentences = {each: [_stems(sentence) for sentence in _RANKED_SENTENCE.split(text)] for each, text in texts.items()}
    words = {each: set[str]().union(*found) for each, found in sentences.items()}
    counts = [sum(stems <= found for found in words.values()) for stems in wanted]
    weights = [math.log(1 + len(texts) / (1 + count)) for count in counts]

    def score(found: set[str]) -> float:
        return sum(weight for stems, weight in zip(wanted, weights, strict=True) if stems <= found)

    return sorted(texts, key=lambda each: -max(map(score, sentences[each])) - SPREAD_WEIGHT * score(words[each]))


def _stems(text: str) -> set[str]:
    return {_stem(word) for word in _RANKED_WORD.findall(text.casefold())}


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
