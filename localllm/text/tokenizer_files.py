"""Reads the tokenizer files of a checkpoint's folder: tokenizer.json, named special tokens, chat templates.

Does not know: how any of them is used.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.files.json_file import read_json_object, read_text
from localllm.machine.install_kind import how_to_install

CONVERTIBLE = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tiktoken.model")
"""Tokenizer files of other formats, which transformers can convert to a tokenizer.json."""
TEKKEN = "tekken.json"
LARGEST_TOKENIZER = 256 * 2**20  # bytes; Gemma's has 34 MB
MOST_GROWTH = 100


def read_raw_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Read or convert the tokenizer.
    Raises `CorruptModel` (missing or unreadable) or `UnsupportedModel` (cannot be converted)."""
    file = path / "tokenizer.json"
    if file.is_file():
        if (size := file.stat().st_size) > LARGEST_TOKENIZER:
            raise CorruptModel(f"{file} is too long.", f"It has {size:,} bytes; the limit is {LARGEST_TOKENIZER:,}.")
        try:
            with panics_told():
                return tokenizers.Tokenizer.from_file(str(file))
        except CorruptModel:
            raise
        except Exception as error:  # the library raises plain Exception for whatever it dislikes
            raise CorruptModel(f"{file} cannot be read.", f"{error}.", "Download the file again.") from error
    found = next((name for name in CONVERTIBLE if (path / name).is_file()), None)
    if found is not None:
        return _convert(path, found)
    if (path / TEKKEN).is_file():
        return _of_tekken(path / TEKKEN)
    raise CorruptModel(
        f"{path} has no tokenizer.",
        f"Neither tokenizer.json nor any of {', '.join(CONVERTIBLE)} is there.",
        "Copy the tokenizer files of its base model into the folder.",
    )


def _of_tekken(file: Path) -> tokenizers.Tokenizer:
    """Convert Mistral's own format, the only one that some checkpoints have. It takes seconds."""
    try:
        from transformers.integrations.mistral.tokenizer import MistralConverter

        raw: tokenizers.Tokenizer = MistralConverter(str(file)).converted()
    except Exception as error:  # KeyError, ValueError, ...: each means that the file is not what it should be
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}."
        raise CorruptModel(f"{file} cannot be read.", why, "Download the file again.") from error
    return raw


def _convert(path: Path, found: str) -> tokenizers.Tokenizer:
    """Convert a tokenizer with transformers, imported only now since that takes seconds."""
    try:
        from transformers import AutoTokenizer

        raw = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False).backend_tokenizer
        if isinstance(raw, tokenizers.Tokenizer):
            return raw
        why = f"transformers supports {found} only with a slow Python tokenizer, which is not used here."
    except Exception as error:  # ImportError, ValueError, OSError, ...: each means that there is no conversion here
        reason = " ".join(str(error).split())
        why = f"The conversion of {found} failed: {reason[:300]}"
        raise _no_conversion(path, why) from error
    raise _no_conversion(path, why)


@contextmanager
def panics_told() -> Iterator[None]:
    """Raise `CorruptModel` if the library panics, which `except Exception` does not catch.

    It does so for a regular expression that backtracks too much, for example.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:300] or "The library gives no reason"
        raise CorruptModel(
            "This model's tokenizer fails on the text.",
            f"{reason}.",
            "Check where the model comes from; another text may work.",
        ) from error


def require_little_growth(raw: tokenizers.Tokenizer) -> None:
    """Raise `CorruptModel` if a text could become much longer before or after it is split into tokens."""
    for part in (raw.normalizer, raw.decoder):
        growth = _growth(json.loads(part.__getstate__())) if part is not None else 1.0
        if growth > MOST_GROWTH:
            raise CorruptModel(
                "This model's tokenizer makes texts too long.",
                f"Its replacements can turn one character into {growth:,.0f}; real ones stay below {MOST_GROWTH}.",
                "Check where the model comes from before you use it in any program.",
            )


def _growth(part: dict[str, Any]) -> float:
    """Return the most characters that one may become. Unknown steps (Unicode normalisation, case) add only a few."""
    if "normalizers" in part or "decoders" in part:
        return math.prod(map(_growth, [*part.get("normalizers", ()), *part.get("decoders", ())]))
    if part.get("type") == "Replace":
        pattern, content = part["pattern"], len(part["content"])
        # An expression may match between any two characters.
        return max(1.0, content / len(pattern["String"])) if pattern.get("String") else 1.0 + content
    if part.get("type") == "Prepend":
        return max(1.0, len(part["prepend"]))
    if part.get("type") == "Precompiled":
        table = base64.b64decode(part["precompiled_charsmap"])
        texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")  # after the trie that finds them
        return max(1.0, max(map(len, texts)) / 4)
    return 1.0


def _no_conversion(path: Path, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{path} has no tokenizer.json.",
        why,
        f"Put the repository's tokenizer.json into the folder, or: {how_to_install('sentencepiece protobuf tiktoken')}",
    )


def read_special_tokens(path: Path) -> dict[str, str]:
    """Return special tokens by role (`bos_token`, `eos_token`, ...), as chat templates name them."""
    found: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):  # later files override earlier ones
        entries = _read_json(path / file)
        extra = entries.get("extra_special_tokens")
        for role, token in [*entries.items(), *(extra.items() if isinstance(extra, dict) else ())]:
            content = token.get("content") if isinstance(token, dict) else token
            if role.endswith("_token") and isinstance(content, str):
                found[role] = content
    return found


def read_chat_templates(path: Path) -> dict[str, str]:
    """Return chat templates by name. Separate files override the one in tokenizer_config.json, as in transformers."""
    inside = _read_json(path / "tokenizer_config.json").get("chat_template")
    if inside is None:
        inside = _read_json(path / "chat_template.json").get("chat_template")
    named: dict[str, str] = {}
    if isinstance(inside, str):
        named["default"] = inside
    elif isinstance(inside, list):
        named = {entry["name"]: entry["template"] for entry in inside if {"name", "template"} <= entry.keys()}
    alone = {file.stem: read_text(file) for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    if (path / "chat_template.jinja").is_file():
        alone["default"] = read_text(path / "chat_template.jinja")
    return alone or named


def _read_json(file: Path) -> dict[str, Any]:
    """Parse a JSON file. A missing file gives an empty object: all of these are optional."""
    return read_json_object(file) if file.is_file() else {}
