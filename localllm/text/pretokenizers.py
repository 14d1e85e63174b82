"""Pre-tokenizers, which split a text into words before byte-pair merging, by GGUF's tokenizer.ggml.pre.

The patterns are from the models' own tokenizer.json. GGUF stores only a name, so each must be known here. An
unknown name is refused, because a wrong split gives plausible but wrong tokens.
Does not know: vocabularies, files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tokenizers import Regex, normalizers, pre_tokenizers

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _CASED % ("", "") + r"|\p{N}" + _CASED_TAIL
_GPT4O = _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?") + r"|\p{N}{1,3}" + _CASED_TAIL
_TINY_AYA = _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?") + r"|\p{N}" + _CASED_TAIL
_CJK = "[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK_WIDE = "[一-龥ࠀ-一가-퟿]+"
_CASED_LETTERS = (  # code points of letters with two cases, as listed in DeepSeek's first tokenizer
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C "
    "38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B "
    "1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 "
    "1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 "
    "2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B "
    "2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 "
    "FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF "
    "1E900-1E943"
)
_SIGNS = "21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002"
_BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"


def _class(code_points: str) -> str:
    """Convert hexadecimal ranges to the inside of a regular expression's character class."""
    ranges = (part.split("-") for part in code_points.split())
    return "".join("-".join(rf"\x{{{point}}}" for point in ends) for ends in ranges)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _patterns(*patterns: str) -> list[pre_tokenizers.PreTokenizer]:
    return [_split(pattern) for pattern in patterns]


def _digits(*patterns: str) -> list[pre_tokenizers.PreTokenizer]:
    """Split off each digit, then apply the patterns."""
    return [pre_tokenizers.Digits(individual_digits=True), *_patterns(*patterns)]


def _falcon() -> list[pre_tokenizers.PreTokenizer]:
    return [
        pre_tokenizers.Punctuation(behavior="contiguous"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        pre_tokenizers.Digits(individual_digits=False),
        _split("[0-9][0-9][0-9]"),
    ]


def _deepseek_llm() -> list[pre_tokenizers.PreTokenizer]:
    letters, signs = rf"\s?[{_class(_CASED_LETTERS)}]+", rf"\s?[{_class(_SIGNS)}]+"
    return [*_patterns(r"[\r\n]", letters, signs, r"\s+$", _CJK_WIDE), pre_tokenizers.Digits(individual_digits=True)]


def _deepseek_coder() -> list[pre_tokenizers.PreTokenizer]:
    return [
        *_patterns(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_WIDE),
        pre_tokenizers.Digits(individual_digits=True),
    ]


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The steps for one name. The last step maps bytes to characters, unless an earlier one has."""

    steps: Callable[[], list[pre_tokenizers.PreTokenizer]]
    nfc: bool = False  # normalise the text to NFC first
    whole_words: bool = False  # a word that is a token stays that token, whatever the merges are
    adds_bos: bool = False  # default if the file does not say
    in_bytes: bool = False  # one of the steps maps bytes to characters

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        bytes_last = [] if self.in_bytes else [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        return pre_tokenizers.Sequence([*self.steps(), *bytes_last])

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_KINDS: dict[PreTokenizer, str] = {
    PreTokenizer(partial(_patterns, _GPT2)):
        "gpt-2 phi-2 mpt olmo jais exaone4 gigachat mellum modern-bert a.x-4.0 trillion granite-docling roberta-bpe "
        "jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code",
    PreTokenizer(partial(_digits, _GPT2)): "starcoder refact smollm codeshell exaone minerva-7b mellum2",
    PreTokenizer(partial(_digits, _GPT2), nfc=True): "command-r",
    PreTokenizer(partial(_patterns, _LLAMA3), whole_words=True, adds_bos=True):
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    PreTokenizer(partial(_patterns, _LLAMA3)): "dbrx smaug-bpe chatglm-bpe",
    PreTokenizer(partial(_patterns, _LLAMA3), whole_words=True): "glm4 glm5",
    PreTokenizer(partial(_patterns, _QWEN2), nfc=True):
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez",
    PreTokenizer(partial(_patterns, _QWEN2)): "stablelm2 hunyuan solar-open grok-2",
    PreTokenizer(partial(_patterns, r"[^\n]+|\n+", _QWEN2)): "laguna",
    PreTokenizer(partial(_patterns, _QWEN35)): "qwen35",
    PreTokenizer(partial(_patterns, _TEKKEN), whole_words=True, adds_bos=True): "tekken",
    PreTokenizer(partial(_patterns, _GPT4O)): "gpt-4o llama4 kanana2 minimax-m2",
    PreTokenizer(partial(_patterns, r"\d{1,3}(?=(?:\d{3})*\b)", _TINY_AYA)): "tiny_aya cohere2moe",
    PreTokenizer(partial(_patterns, r"\p{N}{1,3}", _CJK, _DEEPSEEK3)): "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    PreTokenizer(_deepseek_llm): "deepseek-llm",
    PreTokenizer(_deepseek_coder): "deepseek-coder",
    PreTokenizer(_falcon, in_bytes=True): "falcon",
    PreTokenizer(partial(_patterns, _BLOOM)): "bloom gpt3-finnish poro-chat",
    PreTokenizer(partial(_digits, _BLOOM)): "viking",
}  # fmt: skip
PRE_TOKENIZERS = {name: kind for kind, names in _KINDS.items() for name in names.split()}
"""Pre-tokenizers by tokenizer.ggml.pre."""
UNNAMED = {
    "llama": "llama-bpe", "qwen2": "qwen2", "qwen2moe": "qwen2", "falcon": "falcon", "starcoder": "starcoder",
    "starcoder2": "starcoder", "command-r": "command-r", "bloom": "bloom", "stablelm": "gpt-2",
}  # fmt: skip
"""Names by general.architecture, for older files without tokenizer.ggml.pre; others are split like GPT-2."""
