"""A question as a query of SQLite's FTS5: its words without those that every text has, any of which may match.

Chinese and Japanese are written without spaces, so their characters are indexed one by one, and searched by pairs.
Does not know: SQL beyond the syntax of a query, what is searched.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

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
    found = dict.fromkeys(term for token in _TOKEN.findall(text.casefold()) for term in _parts(token))
    return [term for term in found if term not in STOP_WORDS and (len(term) > 1 or term.isdigit())][:MAX_TERMS]


def with_context(text: str, before: str) -> list[str]:
    """Return the terms of a question; those of the message before it, too, if they are few."""
    own = terms(text)
    return own if len(own) >= FEW_TERMS else list(dict.fromkeys(own + terms(before)))[:MAX_TERMS]


def query(words: Sequence[str]) -> str:
    """Return the FTS5 query: any of the terms. Typed characters are never operators, because each term is quoted."""
    return " OR ".join(_term(word) for word in words)


def indexed(text: str) -> str:
    """Return the text as it is indexed: with spaces around each character of Chinese and Japanese."""
    return _IDEOGRAPH.sub(r" \g<0> ", text)


def _parts(token: str) -> list[str]:
    """Return the token, or pairs of characters for Chinese and Japanese."""
    characters = indexed(token).split()
    if len(characters) == 1:
        return [token]
    return [f"{one} {two}" for one, two in pairwise(characters)]


def _term(word: str) -> str:
    return f'"{word}"*' if len(word) >= PREFIX_CHARS and " " not in word else f'"{word}"'
