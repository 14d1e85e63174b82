"""Tokenizers from GGUF metadata: the same ids as the tokenizer that the metadata was made from.

With GGUF_VOCABULARIES=FOLDER the ggml-vocab-*.gguf files of llama.cpp's sources are read too, and compared with the
token ids that lie beside them.
"""

import json
import os
import time
import unicodedata
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.text import gguf_tokenizer
from localllm.text.gguf_tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    chat_templates,
    tokenizer_of_gguf,
)
from localllm.text.pretokenizers import PRE_TOKENIZERS
from localllm.text.tokenizer import Tokenizer
from tests.draws import draws
from tests.text.vocabularies import CORPUS, SPECIALS, UNSEEN, raw_tokenizer

TEXTS = st.lists(st.sampled_from([*" \n\t'.,09aéß你🙂", *CORPUS, UNSEEN, "don't ", "2024", "  x"]), max_size=8).map(
    "".join
)
KEY = "tokenizer.ggml."


def state_of(kind: str) -> Mapping[str, Any]:
    state: Mapping[str, Any] = json.loads(raw_tokenizer(kind).to_str())
    return state


def tokens_of(state: Mapping[str, Any]) -> list[str]:
    added = {entry["content"]: entry["id"] for entry in state["added_tokens"]}
    return [token for token, _ in sorted({**state["model"]["vocab"], **added}.items(), key=lambda item: item[1])]


def byte_level(**changes: Any) -> dict[str, Any]:
    state = state_of("byte_level")
    tokens, specials = tokens_of(state), {entry["content"]: entry["special"] for entry in state["added_tokens"]}
    kinds = {True: CONTROL, False: USER_DEFINED, None: NORMAL}
    metadata = {
        "general.architecture": "llama",
        KEY + "model": "gpt2",
        KEY + "pre": "gpt-2",
        KEY + "tokens": tokens,
        KEY + "token_type": [kinds[specials.get(token)] for token in tokens],
        KEY + "merges": [" ".join(merge) for merge in state["model"]["merges"]],
        KEY + "bos_token_id": tokens.index("<s>"),
        KEY + "eos_token_id": tokens.index("</s>"),
    }
    return metadata | {KEY + name: value for name, value in changes.items()}


PIECES = [
    "▁",
    *"abcdehlnorstw",
    "▁h",
    "he",
    "ll",
    "lo",
    "llo",
    "▁he",
    "hello",
    "▁hello",
    "wo",
    "or",
    "▁wor",
    "ld",
    "world",
]


def sentencepiece(**changes: Any) -> dict[str, Any]:
    special = ["<unk>", "<s>", "</s>", "<mark>", "[PAD]"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    types = [UNKNOWN, CONTROL, CONTROL, USER_DEFINED, UNUSED, *[BYTE] * 256, *[NORMAL] * len(PIECES)]
    scores = [0.0] * 261 + [-float(index) for index in range(len(PIECES))]
    metadata = {KEY + "model": "llama", KEY + "tokens": tokens, KEY + "token_type": types, KEY + "scores": scores}
    return metadata | {KEY + name: value for name, value in changes.items()}


def merged_by_score(text: str, metadata: Mapping[str, Any]) -> list[int]:
    """SentencePiece's rule, straight from its description: join the two neighbours that make the best piece."""
    scores = dict(zip(PIECES, (-index for index in range(len(PIECES))), strict=True))
    parts = list((SPACE + text.replace(" ", SPACE)) if text else "")
    while pairs := [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]:
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids = metadata[KEY + "tokens"].index
    return [i for part in parts for i in ([ids(part)] if part in scores else [5 + byte for byte in part.encode()])]


@cache
def tokenizer(kind: str) -> Tokenizer:
    return tokenizer_of_gguf({"byte_level": byte_level, "sentencepiece": sentencepiece}[kind]())


@given(TEXTS)
@draws(100)
def test_byte_level_ids_are_the_originals(text: str) -> None:
    ids = tokenizer("byte_level").encode(text, add_special_tokens=False)
    assert ids == raw_tokenizer("byte_level").encode(text, add_special_tokens=False).ids
    assert tokenizer("byte_level").decode(ids) == text


@given(st.text(alphabet="helo wrdst\né", max_size=30))
@draws(150)
def test_sentencepiece_ids_follow_from_scores(text: str) -> None:
    ids = tokenizer("sentencepiece").encode(text, add_special_tokens=False)
    assert ids == merged_by_score(text, sentencepiece())
    assert tokenizer("sentencepiece").decode(ids) == text


def test_wordpiece_ids_are_the_originals() -> None:
    state = state_of("wordpiece")
    marked = [
        token[2:] if token.startswith("##") else token if token[0] in "[<" else SPACE + token
        for token in tokens_of(state)
    ]
    types = [CONTROL if token in SPECIALS else NORMAL for token in marked]
    metadata = {
        KEY + "model": "bert", KEY + "tokens": marked, KEY + "token_type": types, KEY + "unknown_token_id": 0,
        KEY + "cls_token_id": 1, KEY + "seperator_token_id": 2, KEY + "normalizer.lowercase": False,
    }  # fmt: skip
    made = tokenizer_of_gguf(metadata)
    for text in ("The quick brown fox", "Hello world, hello there!", "lazy dogs"):
        ids = raw_tokenizer("wordpiece").encode(text, add_special_tokens=False).ids
        assert made.encode(text, add_special_tokens=False) == ids
        assert made.encode(text) == [1, *ids, 2]


def test_control_tokens_are_special_and_others_are_text() -> None:
    made = tokenizer("sentencepiece")
    hello = made.token_id("▁hello")
    assert made.encode("hello<mark>hello</s>", add_special_tokens=False) == [hello, 3, hello, 2]
    assert made.decode([hello, 3, 2]) == "hello<mark>"
    assert made.special_ids == {0, 1, 2}
    assert (made.bos_token_id, made.eos_token_id) == (1, 2)


@pytest.mark.parametrize(
    ("metadata", "ids"),
    [
        (byte_level(), "x"),
        (byte_level(add_bos_token=True), "<x"),
        (byte_level(add_bos_token=True, add_eos_token=True), "<x>"),
        (byte_level(pre="llama-bpe"), "<x"),
        (byte_level(pre="llama-bpe", add_bos_token=False), "x"),
        (byte_level(add_bos_token=True, bos_token_id=10**6), "x"),
        (sentencepiece(), "<x"),
        (sentencepiece(add_bos_token=False, add_eos_token=True), "x>"),
    ],
)
def test_tokens_at_the_ends(metadata: dict[str, Any], ids: str) -> None:
    made = tokenizer_of_gguf(metadata)
    ends = {"<": [1], ">": [2], "x": made.encode("hello", add_special_tokens=False)}
    assert made.encode("hello") == [i for each in ids for i in ends[each]]


def test_a_space_before_the_text_only_where_it_was_trained_with_one() -> None:
    bare = tokenizer_of_gguf(sentencepiece(add_space_prefix=False))
    assert bare.decode(ids := bare.encode("hello", add_special_tokens=False)) == "hello"
    assert ids == [bare.token_id("hello")]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_no_cut_loses_a_character(name: str) -> None:
    made = tokenizer_of_gguf(byte_level(pre=name))
    for text in (*CORPUS, UNSEEN, "it's 12345 ÀÉ\r\n\n  x\t\t.../a_b 1,234.5"):
        wanted = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[name].nfc else text
        assert made.decode(made.encode(text, add_special_tokens=False), skip_special_tokens=False) == wanted


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt-2", "it's 12345!\n\nX", ["it", "'s", " 12345", "!", "\n", "\n", "X"]),
        ("llama-bpe", "it'S 12345!\n\nX", ["it", "'S", " ", "123", "45", "!\n\n", "X"]),
        ("qwen2", "it's 123 !", ["it", "'s", " ", "1", "2", "3", " !"]),
        ("starcoder", "ab12 c", ["ab", "1", "2", " c"]),
        ("deepseek-v3", "x=12345 你好abc", ["x", "=", "123", "45", " ", "你好", "abc"]),
        ("deepseek-llm", "ab 12\nç", ["ab", " ", "1", "2", "\n", "ç"]),
        ("deepseek-coder", "ab 12", ["ab", " ", "1", "2"]),
        ("falcon", "a+1234", ["a", "+", "123", "4"]),
        ("tekken", "aBc 12", ["a", "Bc", " ", "1", "2"]),
        ("gpt-4o", "isn't HTTPServer", ["isn't", " HTTPServer"]),
        ("tiny_aya", "aB 12", ["a", "B", " ", "1", "2"]),
        ("bloom", "a, b", ["a", ",", " b"]),
        ("qwen35", "e\u0301a", ["e\u0301a"]),
    ],
)
def test_where_words_are_cut(name: str, text: str, words: list[str]) -> None:
    cut = PRE_TOKENIZERS[name].pre_tokenizer().pre_tokenize_str(text)
    spelled = [tokenizer("byte_level")._rule.piece(word).decode() for word, _ in cut]  # type: ignore[union-attr]
    assert spelled == words


def test_a_tokenizer_without_a_name_for_its_cuts(caplog: pytest.LogCaptureFixture) -> None:
    metadata = byte_level(pre="default") | {"general.architecture": "qwen2"}
    made = tokenizer_of_gguf(metadata)
    assert made.encode("12", add_special_tokens=False) == [made.token_id("1"), made.token_id("2")]
    assert "assumed=qwen2" in caplog.text


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({}, CorruptModel, "carries no tokenizer"),
    (byte_level(model="t5"), UnsupportedModel, "has the type 't5'"),
    (byte_level(pre="nobody"), UnsupportedModel, "pre-tokenizer 'nobody'"),
    (byte_level(tokens=["a", "b", "a"]), CorruptModel, "the token 'a' twice"),
    (byte_level(token_type=[1, 2]), CorruptModel, "token_type must have a number for each"),
    (byte_level(merges=["nospace"]), CorruptModel, "cannot be used"),
    (byte_level(merges=["no such"]), CorruptModel, "cannot be used"),
    (byte_level(merges=7), CorruptModel, "cannot be used"),
]


@pytest.mark.parametrize(("metadata", "error", "message"), BAD)
def test_metadata_that_makes_no_tokenizer(metadata: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tokenizer_of_gguf(metadata)


def test_chat_templates_by_name() -> None:
    metadata = {
        "tokenizer.chat_template": "plain", "tokenizer.chat_templates": ["tool_use", "lost", 3],
        "tokenizer.chat_template.tool_use": "tools",
    }  # fmt: skip
    assert chat_templates(metadata) == {"default": "plain", "tool_use": "tools"}
    assert tokenizer_of_gguf(byte_level() | metadata).chat_template == "plain"


def test_a_repeated_token_is_named_in_linear_time() -> None:
    tokens = [f"t{number}" for number in range(200_000)]
    started_s = time.process_time()
    with pytest.raises(CorruptModel, match="'t199999' twice"):
        tokenizer_of_gguf({KEY + "model": "gpt2", KEY + "tokens": [*tokens, tokens[-1]]})
    assert time.process_time() - started_s < 5


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (["a" * 400_000], CorruptModel, "a token that is too long"),
        (["a" * length for length in range(1, 2500)], CorruptModel, "a token that is too long"),
        ([f"{number:0999}" for number in range(8100)], CorruptModel, "together too long"),
        ([letter * length for letter in "ab" for length in range(1, 401)], UnsupportedModel, "more than 100,000"),
    ],
    ids=["one long token", "each one longer", "many long tokens", "many merges"],
)
def test_vocabularies_that_would_take_minutes_are_refused(
    tokens: list[str], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_tokenizer, "MAX_MERGES", 100_000)
    started_s = time.process_time()
    with pytest.raises(error, match=message):
        tokenizer_of_gguf({KEY + "model": "llama", KEY + "tokens": ["<unk>", "<s>", "</s>", *tokens]})
    assert time.process_time() - started_s < 15


def vocabularies() -> list[Path]:
    folder = os.environ.get("GGUF_VOCABULARIES")
    return (
        []
        if folder is None
        else [p for p in sorted(Path(folder).glob("*.gguf")) if p.with_suffix(".gguf.inp").exists()]
    )


@pytest.mark.skipif(not vocabularies(), reason="GGUF_VOCABULARIES names no folder with ggml-vocab-*.gguf and *.inp")
@pytest.mark.parametrize("file", vocabularies(), ids=lambda file: file.stem)
def test_real_vocabularies(file: Path) -> None:
    from localllm.models.formats.gguf.header import plain, read_header

    made = tokenizer_of_gguf({key: plain(value) for key, value in read_header(file).metadata.items()})
    with open(f"{file}.inp", encoding="utf-8", newline="") as stream:
        texts = stream.read().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{file}.out").read_text().split("\n")[:-1]
    assert len(lines) >= 46
    for text, line in zip(texts, lines, strict=False):
        assert made.encode(text, add_special_tokens=False) == [int(each) for each in line.split()], repr(text)
