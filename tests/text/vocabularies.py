"""Tokenizers of the kinds that language models use, trained here on a few lines: no download.

`byte_level`: GPT-2, Llama 3, Qwen. `sentencepiece`: Llama 2, Mistral (spaces as U+2581, byte fallback, one leading
space stripped). `sentencepiece_bare`: Gemma (no strip). `metaspace`: the Metaspace decoder. `words`: no decoder.
`wordpiece`: BERT, whose decoder looks at neighbours.
"""

import json
from functools import cache

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from localllm.text.tokenizer import Tokenizer

SPECIALS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
CORPUS = (
    "The quick brown fox jumps over the lazy dog. Hello world, hello there! def add(a, b):\n    return a + b\n",
    "안녕하세요 세계, 페이지드 어텐션은 블록 표를 읽습니다. 한국어 문장 하나 더.",
    "naïve café, Grüße aus München, e\u0301 combining, 你好世界, привет мир 🙂🚀👨\u200d👩\u200d👧",
)
UNSEEN = "Ω≈ç√ 🦙 ᄒ힣 𝔘𝔫𝔦 e\u0301\u0323 ﷽ 🇰🇷 \u200b\ufffd"
BYTE_RULE_KINDS = ("byte_level", "sentencepiece", "sentencepiece_bare", "metaspace", "words")


@cache
def raw_tokenizer(kind: str) -> tokenizers.Tokenizer:
    raw = {
        "byte_level": _byte_level,
        "sentencepiece": lambda: _sentencepiece(strip=True),
        "sentencepiece_bare": lambda: _sentencepiece(strip=False),
        "metaspace": _metaspace,
        "words": _words,
        "wordpiece": _wordpiece,
    }[kind]()
    raw.add_special_tokens(list(SPECIALS))
    raw.add_tokens(["<tool call>", "\n\n"])
    return raw


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(raw_tokenizer(kind), special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def _byte_level() -> tokenizers.Tokenizer:
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.train_from_iterator(
        CORPUS * 3,
        trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=list(SPECIALS),
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return raw


def _sentencepiece(*, strip: bool) -> tokenizers.Tokenizer:
    steps = [normalizers.Replace(" ", "▁")]
    if strip:
        steps.insert(0, normalizers.Prepend("▁"))
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence(steps)
    trained.train_from_iterator(CORPUS[:2] * 3, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    entries = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    merges = [tuple(merge) for merge in model["merges"]]
    vocabulary = {entry: i for i, entry in enumerate(dict.fromkeys(entries))}
    raw = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    raw.normalizer = normalizers.Sequence(steps)
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    raw.decoder = decoders.Sequence([*decoder, decoders.Strip(" ", 1, 0)] if strip else decoder)
    return raw


def _metaspace() -> tokenizers.Tokenizer:
    raw = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    raw.train_from_iterator(
        CORPUS * 3, trainers.BpeTrainer(vocab_size=300, special_tokens=list(SPECIALS), show_progress=False)
    )
    return raw


def _words() -> tokenizers.Tokenizer:
    words = dict.fromkeys(word for line in CORPUS for word in line.split())
    raw = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate([*SPECIALS, *words])}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return raw


def _wordpiece() -> tokenizers.Tokenizer:
    raw = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.decoder = decoders.WordPiece()
    raw.train_from_iterator(
        CORPUS * 3, trainers.WordPieceTrainer(vocab_size=300, special_tokens=list(SPECIALS), show_progress=False)
    )
    return raw
