"""The tokenizer of the demo model: byte-level BPE with single digits, and its ChatML template.

Every byte is in the vocabulary, so any text can be encoded and decoded exactly. Only the names in SPECIAL and TAGS are
matched as whole words before the merges.
Does not know: the model.
"""

import itertools
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .corpus import TOOLS_HEAD, TOOLS_TAIL, conversations, render

VOCAB_SIZE = 3072
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2
TAGS = ["<tool_call>", "</tool_call>"]  # single tokens, but not special ones: decoding keeps them
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """{%- macro text(content) -%}
{%- if content is string -%}{{- content -}}
{%- elif content -%}
{%- for part in content -%}{%- if part.type == 'text' -%}{{- part.text -}}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set first = 0 -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}{%- set first = 1 -%}{{- text(messages[0].content) + '\\n\\n' -}}{%- endif -%}
{{- HEAD -}}
{%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}
{{- TAIL + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages[first:] -%}
{{- '<|im_start|>' + message.role + '\\n' + text(message.content) -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{{- '<tool_call>\\n{"name": ' + function.name | tojson + ', "arguments": ' -}}
{{- function.arguments if function.arguments is string else function.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
""".replace("HEAD", json.dumps(TOOLS_HEAD)).replace("TAIL", json.dumps(TOOLS_TAIL))


def train_tokenizer(seed: int, num_conversations: int) -> Tokenizer:
    """Train a tokenizer on the first conversations of the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(TAGS),
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    stream = itertools.islice(conversations(seed), num_conversations)
    texts = ("".join(text for text, _ in render(messages, tools)) for messages, tools in stream)
    tokenizer.train_from_iterator((without_markers(text) for text in texts), trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return tokenizer


def without_markers(text: str) -> str:
    """Return the text without special tokens and tags, which are split off before the merges."""
    for marker in [*SPECIAL, *TAGS]:
        text = text.replace(marker, "\n")
    return text


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Save tokenizer.json and the tokenizer_config.json for transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
