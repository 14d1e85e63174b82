"""GGUF files that other local programs have downloaded. localllm reads them in place and never writes them.

    ollama:NAME[:TAG]            ~/.ollama/models (OLLAMA_MODELS): manifests name blobs without extension
    lmstudio:OWNER/REPO/FILE     ~/.lmstudio/models, ~/.cache/lm-studio/models
    llamacpp:FILE                ~/.cache/llama.cpp (LLAMA_CACHE), on a Mac ~/Library/Caches/llama.cpp
    jan:NAME                     ~/jan/models, and Jan's current folder

FILE is a file's name without extension and part number. Does not know: what is inside a file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from localllm.models.formats.gguf.file_names import gguf_models, ollama_manifests

Program = Literal["ollama", "lmstudio", "llamacpp", "jan"]
_DEFAULT_REGISTRY, _DEFAULT_OWNER = "registry.ollama.ai", "library"


@dataclass(frozen=True, slots=True)
class ProgramModel:
    """A GGUF file of another program."""

    name: str  # ollama:llama3.2:1b
    path: Path
    program: Program


def program_models(program: str | None = None) -> list[ProgramModel]:
    """Return the models of one program, or of all, by name. A missing or unreadable folder counts as empty."""
    found = [model for name, look in _LOOKS.items() if program in (None, name) for model in _skip_unreadable(look)]
    return sorted(found, key=lambda model: model.name)


def _skip_unreadable(look: Callable[[], Iterator[ProgramModel]]) -> list[ProgramModel]:
    try:
        return list(look())
    except OSError:
        return []


def _ollama() -> Iterator[ProgramModel]:
    root = Path(os.environ.get("OLLAMA_MODELS") or "~/.ollama/models").expanduser()
    for parts, blobs in ollama_manifests(root):
        models = blobs.get("model", [])  # none for an invalid manifest
        if len(parts) >= 3 and len(models) == 1 and "adapter" not in blobs and (root / "blobs" / models[0]).is_file():
            yield ProgramModel(f"ollama:{_ollama_name(parts)}", root / "blobs" / models[0], "ollama")


def _ollama_name(parts: tuple[str, ...]) -> str:
    """Return the name as `ollama list` shows it, without Ollama's own registry and owner."""
    registry, *owner, name, tag = parts
    shown = [] if owner == [_DEFAULT_OWNER] and registry == _DEFAULT_REGISTRY else owner
    return "/".join([*([] if registry == _DEFAULT_REGISTRY else [registry]), *shown, name]) + f":{tag}"


def _lmstudio() -> Iterator[ProgramModel]:
    for root in ("~/.lmstudio/models", "~/.cache/lm-studio/models"):
        yield from _files(Path(root).expanduser(), "lmstudio", with_folders=True)


def _llamacpp() -> Iterator[ProgramModel]:
    default = "~/Library/Caches/llama.cpp" if sys.platform == "darwin" else "~/.cache/llama.cpp"
    yield from _files(Path(os.environ.get("LLAMA_CACHE") or default).expanduser(), "llamacpp", with_folders=False)


def _jan() -> Iterator[ProgramModel]:
    """Yield Jan's models. Each has its own folder; a file called model.gguf is named after that folder."""
    for root in ("~/jan/models", "~/.local/share/Jan/data/llamacpp/models"):
        for model in _files(Path(root).expanduser(), "jan", with_folders=True):
            folder, _, file = model.name.removeprefix("jan:").rpartition("/")
            yield ProgramModel(f"jan:{folder if file == 'model' and folder else file}", model.path, "jan")


def _files(root: Path, program: Program, *, with_folders: bool) -> Iterator[ProgramModel]:
    names = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()] if root.is_dir() else []
    for model in gguf_models(names):
        if not model.missing:
            folder = model.files[0].rpartition("/")[0] if with_folders else ""
            yield ProgramModel(
                f"{program}:{folder + '/' if folder else ''}{model.stem}", root / model.files[0], program
            )


_LOOKS: dict[str, Callable[[], Iterator[ProgramModel]]] = {
    "ollama": _ollama,
    "lmstudio": _lmstudio,
    "llamacpp": _llamacpp,
    "jan": _jan,
}
