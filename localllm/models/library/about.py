"""Look at a checkpoint by any name, local or remote, and list its facts as rows of name and value.

Of a remote checkpoint only the headers are read. The rows are for a terminal and for a page.
Does not know: how they are drawn, the machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.errors import CorruptModel, LocalLLMError, UnsupportedModel
from localllm.models.formats.registry import quantization_in_words
from localllm.models.library.catalog import ResolvedModel, is_for_the_hub, resolve_model
from localllm.models.spec.model_spec import kv_numbers_per_token
from localllm.units import format_bytes, format_count

if TYPE_CHECKING:
    from localllm.models.library.hub.plan import DownloadPlan
    from localllm.models.spec.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class InspectedCheckpoint:
    """A checkpoint to look at. `path` is valid until the `with` block of `inspect_checkpoint` ends."""

    name: str
    path: Path
    model: ResolvedModel | None = None  # None: not on this machine
    plan: DownloadPlan | None = None  # the download of it; None: it is on this machine
    fetched_bytes: int = 0  # bytes downloaded by this look

    @property
    def download_bytes(self) -> int | None:
        return self.plan.needed_bytes if self.plan is not None else None


@contextmanager
def inspect_checkpoint(name: str, revision: str | None = None, *, paths: bool = True) -> Iterator[InspectedCheckpoint]:
    """Yield the checkpoint; ask the hub only if it is not local. Raises as `resolve_model` and `peek` do."""
    if is_for_the_hub(name, revision, paths=paths):
        from localllm.models.library.hub.peek import peek

        with peek(name, revision) as remote:
            yield InspectedCheckpoint(remote.name, remote.path, None, remote.plan, remote.fetched_bytes)
    else:
        model = resolve_model(name, revision, paths=paths)
        yield InspectedCheckpoint(model.name, model.path, model)


SOURCES = {
    "demo": "bundled",
    "path": "path",
    "cache": "Hugging Face cache",
    "ollama": "Ollama",
    "lmstudio": "LM Studio",
    "llamacpp": "llama.cpp",
    "jan": "Jan",
}
_DAY_S = 24 * 3600


@cache
def count_parameters(path: Path) -> int:
    """Return the number of parameters of a safetensors checkpoint that is not quantised, from its headers."""
    from localllm.models.formats.safetensors import read_headers

    return sum(math.prod(tensor.shape) for tensor in read_headers(path).values())


def gguf_rows(path: Path) -> dict[str, str]:
    """Return the rows that only a GGUF file can fill. A safetensors checkpoint's files do not name its licence."""
    from localllm.models.formats.gguf.checkpoint import read_parts
    from localllm.models.formats.gguf.file_names import quant_of

    return {
        "quantization": quant_of(path.name) or "unknown",
        "license": str(read_parts(path)[0].metadata.get("general.license", "not said")),
    }


def longest_input(spec: ModelSpec) -> str:
    """Return the longest input of a model in words."""
    if spec.task == "transcribe":
        return "windows of 30 s at most"
    count = format_count(spec.max_position)
    return f"context of {count} tokens" if spec.task == "generate" else f"{count} tokens at most"


def spec_rows(spec: ModelSpec) -> Mapping[str, str]:
    """Return the rows that describe a checkpoint."""
    if spec.task != "generate":
        return {
            "architecture": spec.architecture,
            "does": {"embed": "embeds texts", "score": "scores pairs of texts"}.get(spec.task, "transcribes speech"),
            "dtype": spec.dtype,
            "layers": f"{spec.num_layers} of width {spec.hidden_size}",
            "vocabulary": f"{format_count(spec.vocab_size)} tokens",
            "inputs": longest_input(spec),
        }
    reads = [name for name, part in (("pictures", spec.vision), ("sound", spec.hearing)) if part is not None]
    return {
        "architecture": spec.architecture,
        **({"reads": f"text and {' and '.join(reads)}"} if reads else {}),
        **({"quantization": quantization_name(spec)} if spec.quantization else {}),
        "dtype": spec.dtype,
        "layers": f"{spec.num_layers} of width {spec.hidden_size}",
        "heads": f"{spec.num_heads} query, {spec.num_kv_heads} key/value, {spec.head_dim} wide",
        "vocabulary": f"{format_count(spec.vocab_size)} tokens",
        "context": f"{format_count(spec.max_position)} tokens",
        "KV cache": f"{format_bytes(2 * kv_numbers_per_token(spec))} per token at 16 bits",
        "sampling": ", ".join(f"{k}={v}" for k, v in spec.generation_defaults.items()) or "no defaults of its own",
    }


def quantization_name(spec: ModelSpec) -> str:
    """Return how the matrices are stored, or why they are unsupported; empty if they are not quantised."""
    try:
        return quantization_in_words(spec.quantization)
    except UnsupportedModel as error:
        return error.what


def spec_or_reason(path: Path) -> tuple[ModelSpec | None, LocalLLMError | None]:
    """Read a checkpoint's spec, or return the error that explains why it cannot be read."""
    from localllm.models.encoders.recipe import spec_of_any

    try:
        return spec_of_any(path), None
    except LocalLLMError as error:
        return None, error
    except Exception as error:  # any field of a stranger's file may hold anything
        return None, CorruptModel(f"Cannot parse {path}.", f"{type(error).__name__}: {error}.")


def ago(moment_s: float) -> str:
    """Return a past moment in words: today, yesterday, 12 days ago."""
    days = int((time.time() - moment_s) // _DAY_S)
    return "today" if days < 1 else "yesterday" if days == 1 else f"{days} days ago"
