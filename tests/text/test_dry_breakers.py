"""DRY's breakers as tokens: all tokens and sequences of tokens that spell a string."""

import itertools

from localllm.text.dry_breakers import DryBreakers


class Words:
    """A vocabulary of a few words, tokenised greedily."""

    words = (b"", b"a", b"b", b"ab", b"ba", b"aab", b"c", b"bc", b"abc", b"\n", b".\n")
    vocab_size = len(words)

    def token_bytes(self, token_id: int) -> bytes:
        return self.words[token_id]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids, rest = [], text.encode()
        while rest:
            word = max((word for word in self.words if word and rest.startswith(word)), key=len)
            ids.append(self.words.index(word))
            rest = rest[len(word) :]
        return ids


def test_a_character_breaks_in_every_token_that_contains_it() -> None:
    assert DryBreakers(Words()).of(["\n"]) == (((), (9, 10)),)


def test_a_string_breaks_wherever_its_beginning_ends_a_token() -> None:
    found = dict(DryBreakers(Words()).of(["abc"]))
    assert found == {(): (8,), (7,): (1, 4), (6,): (3, 5)}  # a|bc, ba|bc; ab|c, aab|c


def test_each_spelling_of_a_string_holds_a_breaker() -> None:
    """Of sequences of up to four tokens, those that spell the string with the tokenizer's own tail are found."""
    words = Words()
    breakers = DryBreakers(words).of(["bc", "ab"])
    for ids in itertools.product(range(1, 9), repeat=2):
        text = b"".join(map(words.token_bytes, ids))
        whole = any(part in words.token_bytes(token) for token in ids for part in (b"bc", b"ab"))
        held = any(
            ids[place] in heads and list(tail) == list(ids[place + 1 : place + 1 + len(tail)])
            for tail, heads in breakers
            for place in range(2)
        )
        if whole:
            assert held
        if held:
            assert b"bc" in text or b"ab" in text
