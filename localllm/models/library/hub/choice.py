"""Choose the files of a repository that a load needs: config, tokenizer and one set of weights, without duplicates.

Left out: pickles and other frameworks' weights, ONNX and OpenVINO exports, a consolidated copy of the shards, images,
training states, and the owner's Python code unless requested.
Does not know: what is on this machine, the files' sizes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch

from localllm import errors
from localllm.models.formats.gguf_names import gguf_models, require_one
from localllm.models.formats.safetensors import INDEX, PICKLES

_SIDE_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "*.tiktoken", "tekken.json", "tokenizer.model",
    "tokenizer.model.v*", "spiece.model", "sentencepiece.bpe.model", "chat_template.json", "chat_template.jinja",
    "additional_chat_templates/*.jinja", "preprocessor_config.json", "processor_config.json", "quantize_config.json",
    "quant_config.json", "hf_quant_config.json", "recipe.yaml", "adapter_config.json", "modules.json",
    "sentence_bert_config.json", "config_sentence_transformers.json", "[1-9]_*/config.json",
)  # fmt: skip
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def load_files(
    repo_id: str, names: Sequence[str], quant: str | None, shards: Iterable[str] | None = None, *, code: bool = False
) -> list[str]:
    """Return the names of the files to download. shards: the files that the index names; code: also the owner's Python
    files.

    Raises `UnsupportedModel` for a repository without supported weights, `ModelNotFound` for an unknown `quant`,
    `CorruptModel` if the index names files that the repository does not have.
    """
    weights = _safetensors(repo_id, names, shards)
    ggufs = gguf_models(names)
    if quant is not None or (ggufs and not weights):
        first = f":{ggufs[0].quant or ggufs[0].stem}" if ggufs else ""
        return list(require_one(repo_id, ggufs, quant, f"localllm pull {repo_id}{first}").files)
    if not weights:
        raise _no_weights(repo_id, names)
    side = [name for name in names if any(_matches(name, pattern) for pattern in _SIDE_FILES)]
    own_code = [name for name in names if code and name.endswith(".py")]
    index = [INDEX] if INDEX in names and len(weights) > 1 else []
    return sorted({*side, *own_code, *index, *weights})


def included_files(repo_id: str, names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the files that match a pattern, of any kind."""
    chosen = [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]
    if not chosen:
        raise errors.ModelNotFound(
            f"No file of {repo_id} matches {', '.join(patterns)}.", _listed(names), param="include"
        )
    return chosen


def _safetensors(repo_id: str, names: Sequence[str], shards: Iterable[str] | None) -> list[str]:
    """Return one set of weights: the single file, else the shards of the index, else the files at the top level."""
    top = [name for name in names if "/" not in name and name.endswith(".safetensors")]
    # Dense layers of an embedding model, each in its own folder.
    dense = [name for name in names if re.fullmatch(r"[1-9]_\w+/model\.safetensors", name)]
    if shards is not None:
        missing = sorted(set(shards) - set(names))
        if missing:
            raise errors.CorruptModel(
                f"{repo_id} is incomplete on the hub.", f"Its index names {missing[0]}, which does not exist."
            )
        return [*sorted(set(shards)), *dense]
    if "model.safetensors" in top:
        return ["model.safetensors", *dense]
    numbered = [name for name in top if _SHARD.fullmatch(name)]
    return [*(numbered or [name for name in top if not name.startswith("consolidated")]), *(dense if top else [])]


def _matches(name: str, pattern: str) -> bool:
    return name.count("/") == pattern.count("/") and fnmatch(name, pattern)


def _no_weights(repo_id: str, names: Sequence[str]) -> errors.LocalLLMError:
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles:
        search = f"localllm search {repo_id.rpartition('/')[2]}  (others may have converted it)"
        return errors.UnsupportedModel(
            f"{repo_id} has its weights only as pickles ({pickles[0]}).",
            "Loading a pickle can run code, so only safetensors and GGUF are supported.",
            search + _as_drafter(repo_id, names),
        )
    return errors.UnsupportedModel(
        f"{repo_id} has no weights in a supported format.",
        f"{_listed(names)} Supported: safetensors and GGUF files.",
        f"localllm search {repo_id.rpartition('/')[2]}",
    )


def _as_drafter(repo_id: str, names: Sequence[str]) -> str:
    """Return how to download a drafter, which alone may have such weights (formats/torch_file.py)."""
    if not {"config.json", "pytorch_model.bin"} <= set(names):
        return ""
    return f"; an EAGLE drafter: localllm pull {repo_id} --include config.json --include pytorch_model.bin"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(sorted(names)[:8])
    return f"It has {shown}{', ...' if len(names) > 8 else ''}." if names else "It has no files."
