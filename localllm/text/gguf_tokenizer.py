"""Builds a tokenizer from a GGUF file's metadata, with special tokens and chat templates.

    tokenizer.ggml.model    becomes
    gpt2                    byte-level BPE; words split as tokenizer.ggml.pre says (pretokenizers.py)
    llama                   SentencePiece BPE: merges follow from the pieces' scores; bytes for what has no piece
    gemma4                  SentencePiece's alphabet with explicit merges
    bert                    WordPiece

Does not know: files (the caller has read the metadata), torch.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.text.pretokenizers import PRE_TOKENIZERS, UNNAMED, PreTokenizer
from localllm.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type
MAX_TOKEN_CHARS = 1000
"""Longest token of a vocabulary. Each cut of a token is tried; the longest ones in use, of dashes, have 512."""
MAX_VOCABULARY_CHARS = 8_000_000
"""All tokens together; vocabularies of 260,000 tokens have under 2 million."""
MAX_MERGES = 2_000_000
"""Merges that follow from scores; a vocabulary of 260,000 tokens has 600,000."""
SPACE = "▁"
_ROLES = {
    "bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token", "seperator": "sep_token",
    "cls": "cls_token", "mask": "mask_token",
}  # fmt: skip
"""GGUF's names of special tokens -> the names in chat templates."""
_FILL_IN = ("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep", "prefix", "suffix", "middle", "eot")
"""GGUF's names of tokens for filling in the middle (fill_in.py)."""
_IDS_UNNAMED = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "bert": {"cls": 101, "seperator": 102, "unknown": 100, "padding": 0, "mask": 103},
}


def tokenizer_of_gguf(metadata: Mapping[str, Any], more: Sequence[str] = ()) -> Tokenizer:
    """Build the tokenizer. metadata: keys to plain values. more: special tokens to add where the file has them not.
    Raises `CorruptModel`, `UnsupportedModel`."""
    vocabulary = _Vocabulary.read(metadata)
    make = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _sentencepiece_merges, "bert": _wordpiece}
    if vocabulary.model not in make:
        raise UnsupportedModel(
            f"The file's tokenizer has the type {vocabulary.model!r}.", f"Supported: {', '.join(sorted(make))}."
        )
    try:
        raw = make[vocabulary.model](vocabulary)
        _add_tokens(raw, vocabulary)
        raw.add_special_tokens([AddedToken(text, normalized=False) for text in more])
    except UnsupportedModel:
        raise
    except Exception as error:  # the library raises plain Exception
        raise CorruptModel("The tokenizer in the file's metadata cannot be used.", f"{error}.") from error
    return Tokenizer(raw, special_tokens=vocabulary.special_tokens, chat_templates=chat_templates(metadata))


def chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name; the unnamed one is 'default'."""
    named = metadata.get("tokenizer.chat_templates") or []
    found = {str(name): metadata.get(f"tokenizer.chat_template.{name}") for name in named if isinstance(name, str)}
    found["default"] = metadata.get("tokenizer.chat_template")
    return {name: text for name, text in found.items() if isinstance(text, str)}


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The metadata about tokens, checked for consistency."""

    model: str
    pre: str | None
    architecture: str
    tokens: Sequence[str]  # all different
    types: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[str]
    ids: Mapping[str, int]  # by the format's names (bos, eos, ...); all inside the vocabulary
    flags: Mapping[str, bool]  # add_bos_token, add_space_prefix, ...: only those given

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> _Vocabulary:
        model, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
        if not isinstance(model, str) or not isinstance(tokens, list) or not tokens:
            raise CorruptModel(
                "The GGUF file carries no tokenizer.",
                "tokenizer.ggml.model and tokenizer.ggml.tokens are missing from its metadata.",
                "Use a GGUF file with a tokenizer; nearly all have one.",
            )
        tokens = [str(token) or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
        _require_length(tokens)
        if len(set(tokens)) < len(tokens):
            twice = next(token for token, count in Counter(tokens).items() if count > 1)
            raise CorruptModel(f"The vocabulary in the file has the token {twice!r} twice.")
        found = {name: metadata.get(f"{_PREFIX}{name}_token_id") for name in (*_ROLES, *_FILL_IN)}
        ids = {**_IDS_UNNAMED.get(model, {}), **{name: value for name, value in found.items() if type(value) is int}}
        return cls(
            model,
            metadata.get("tokenizer.ggml.pre"),
            str(metadata.get("general.architecture")),
            tokens,
            _per_token(metadata, "token_type", len(tokens), NORMAL),
            _per_token(metadata, "scores", len(tokens), 0.0),
            metadata.get("tokenizer.ggml.merges") or [],
            {name: token_id for name, token_id in ids.items() if 0 <= token_id < len(tokens)},
            {key[15:]: value for key, value in metadata.items() if key[:15] == _PREFIX and isinstance(value, bool)},
        )

    @property
    def special_tokens(self) -> dict[str, str]:
        return {
            role: self.tokens[self.ids[name]]
            for name, role in (_ROLES | {name: f"{name}_token" for name in _FILL_IN}).items()
            if name in self.ids
        }

    @property
    def by_token(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}

    def pairs(self) -> list[tuple[str, str]]:
        """Return the merges as pairs. A token may begin with a space,
        so the separator is not searched at the first character."""
        cuts = ((merge, merge.index(" ", 1)) for merge in self.merges)
        return [(merge[:at], merge[at + 1 :]) for merge, at in cuts]

    def unknown_token(self) -> str | None:
        return self.tokens[self.ids["unknown"]] if "unknown" in self.ids else None

    def add_ends(self, raw: tokenizers.Tokenizer, *, bos: bool, eos: bool, names: tuple[str, str]) -> None:
        """Add tokens before and after each text, if the file (or its tokenizer type by default) wants them."""
        first, last = names
        wanted = [first] * self.flags.get("add_bos_token", bos), [last] * self.flags.get("add_eos_token", eos)
        before, after = ([self.ids[name] for name in side if name in self.ids] for side in wanted)
        if before or after:
            pieces = [*(self.tokens[i] for i in before), "$A", *(self.tokens[i] for i in after)]
            named = [(self.tokens[i], i) for i in dict.fromkeys((*before, *after))]
            raw.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=named)


_PREFIX = "tokenizer.ggml."


def _require_length(tokens: Sequence[str]) -> None:
    lengths = [len(token) for token in tokens]
    for count, most, what in (
        (max(lengths), MAX_TOKEN_CHARS, "a token that is"),
        (sum(lengths), MAX_VOCABULARY_CHARS, "tokens that are together"),
    ):
        if count > most:
            raise CorruptModel(
                f"The vocabulary in the file has {what} too long.",
                f"It has {count:,} characters; at most {most:,} are read.",
            )


def _per_token(metadata: Mapping[str, Any], name: str, count: int, default: Any) -> list[Any]:
    values = metadata.get(_PREFIX + name)
    if values is None:
        return [default] * count
    if not isinstance(values, list) or len(values) < count or isinstance(values[0], str):
        raise CorruptModel(f"{_PREFIX}{name} must have a number for each of {count:,} tokens.")
    return values[:count]


# -- kinds


def _byte_level(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    kind = _pre_tokenizer(vocabulary)
    raw = tokenizers.Tokenizer(
        models.BPE(vocabulary.by_token, vocabulary.pairs(), ignore_merges=kind.whole_words, fuse_unk=False)
    )
    normalizer = kind.normalizer()
    if normalizer is not None:
        raw.normalizer = normalizer
    raw.pre_tokenizer = kind.pre_tokenizer()
    raw.decoder = decoders.ByteLevel()
    vocabulary.add_ends(raw, bos=kind.adds_bos, eos=False, names=("bos", "eos"))
    return raw


def _pre_tokenizer(vocabulary: _Vocabulary) -> PreTokenizer:
    name = vocabulary.pre
    if name is None or name == "default":
        taken = UNNAMED.get(vocabulary.architecture, "gpt-2")
        log.warning("tokenizer names no pre-tokenizer architecture=%s assumed=%s", vocabulary.architecture, taken)
        name = taken
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"The file's pre-tokenizer {name!r} is not supported.",
            f"Known: {', '.join(sorted(PRE_TOKENIZERS))}.",
            "Serve the model's safetensors repository, which has a complete tokenizer.json.",
        )
    return PRE_TOKENIZERS[name]


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """Build SentencePiece BPE: the neighbours that form the piece with the best score are merged first."""
    merges = list(islice(_merges_by_score(vocabulary), MAX_MERGES + 1))
    if len(merges) > MAX_MERGES:
        raise UnsupportedModel(f"The vocabulary in the file has more than {MAX_MERGES:,} merges.")
    return _spaced(vocabulary, [pair for _, pair in sorted(merges, key=lambda item: item[0])])


def _sentencepiece_merges(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    raw = _spaced(vocabulary, vocabulary.pairs(), prefix=False)
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|[\n]+"), behavior="isolated")
    return raw


def _merges_by_score(vocabulary: _Vocabulary) -> Iterator[tuple[tuple[float, int, int], tuple[str, str]]]:
    known = vocabulary.by_token
    usable = {NORMAL, USER_DEFINED}
    joined = {token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind in usable}
    for token in joined:
        score = vocabulary.scores[known[token]]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in joined and right in joined:
                yield (-score, known[left], known[right]), (left, right)


def _spaced(vocabulary: _Vocabulary, merges: list[tuple[str, str]], *, prefix: bool = True) -> tokenizers.Tokenizer:
    unknown = vocabulary.unknown_token()
    model = models.BPE(vocabulary.by_token, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    raw = tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.flags.get("add_space_prefix", prefix):
        raw.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        raw.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    else:
        raw.normalizer = spaces
        raw.decoder = decoders.Sequence(steps)
    vocabulary.add_ends(raw, bos=True, eos=False, names=("bos", "eos"))
    return raw


def _wordpiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """Build WordPiece. GGUF marks the start of a word, WordPiece marks continuations."""
    known = {_wordpiece_token(token): index for index, token in enumerate(vocabulary.tokens)}
    unknown = vocabulary.unknown_token() or "[UNK]"
    raw = tokenizers.Tokenizer(models.WordPiece(known, unk_token=unknown, max_input_chars_per_word=100))
    lower = vocabulary.flags.get("normalizer.lowercase", True)
    accents = vocabulary.flags.get("normalizer.strip_accents", lower)
    raw.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=accents)
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece()
    vocabulary.add_ends(raw, bos=True, eos=True, names=("cls", "seperator"))
    return raw


def _wordpiece_token(token: str) -> str:
    if token.startswith(SPACE):
        return token[1:]
    return token if token.startswith("[") and token.endswith("]") else f"##{token}"


def _add_tokens(raw: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Add tokens that are matched before a text is split into words; control tokens are special."""
    for types, special in (((UNKNOWN, CONTROL), True), ((USER_DEFINED,), False)):
        texts = [text for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind in types]
        raw.add_tokens([AddedToken(text, special=special, normalized=False) for text in texts])
