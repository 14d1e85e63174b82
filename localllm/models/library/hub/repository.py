"""Repositories on the hub: search, files with sizes and hashes, commit, licence, gating, and what a load needs of them.

A load needs config, tokenizer and one set of weights, without duplicates; a GGUF model also its projector. Left out:
pickles and other frameworks' weights, ONNX and OpenVINO exports, a consolidated copy of the shards, images, training
states, and the owner's Python code unless requested.
Does not know: what is on this machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Literal

from localllm import errors
from localllm.errors import HubError
from localllm.models.formats.gguf.file_names import gguf_models, prediction_layers_for, projectors_for, require_one
from localllm.models.formats.safetensors import INDEX, PICKLES
from localllm.models.library.hub import client

FOUND_FIELDS = (
    "downloads", "likes", "gated", "tags", "lastModified", "pipeline_tag", "library_name", "safetensors", "gguf",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository at one commit."""

    name: str  # with folders: a/b.json
    size: int
    etag: str  # the file's name in the cache: sha256 of large files, git's sha1 of small ones


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository at one commit."""

    repo_id: str
    revision: str  # as requested: main, a tag, a commit
    commit: str
    files: tuple[RemoteFile, ...]
    gated: bool = False
    license: str = ""
    pipeline: str = ""  # text-generation, feature-extraction, ...
    num_parameters: int | None = None  # the hub's count

    def file(self, name: str) -> RemoteFile | None:
        return next((file for file in self.files if file.name == name), None)


@dataclass(frozen=True, slots=True)
class Found:
    """One search result."""

    repo_id: str
    downloads: int
    likes: int
    updated: str  # 2026-11-21
    gated: bool
    format: Literal["safetensors", "gguf", ""]  # the format that localllm can load; empty: none
    num_parameters: int | None
    pipeline: str
    license: str


def read_repository(repo_id: str, revision: str | None = None) -> Repository:
    """Read a repository from the hub. Raises `ModelNotFound`, `AccessDenied`, `HubUnreachable`, `HubOffline`."""
    about = f"{repo_id}@{revision}" if revision else repo_id
    if client.is_offline():
        raise client.offline_error(about)
    with client.translated(about):
        info = client.retry(
            lambda: client.api().model_info(repo_id, revision=revision, files_metadata=True, timeout=client.timeout_s())
        )
    if not re.fullmatch(r"[0-9a-f]{40}", info.sha or ""):
        raise HubError(f"The hub names no commit for {about}.", f"It is {client.endpoint()}.", "Check HF_ENDPOINT.")
    return Repository(
        repo_id=info.id,  # the hub follows renames
        revision=revision or "main",
        commit=info.sha,
        files=tuple(_file(sibling) for sibling in info.siblings or () if _stays_inside(sibling.rfilename)),
        gated=bool(info.gated),
        license=_license(info.tags, info.card_data),
        pipeline=info.pipeline_tag or "",
        num_parameters=_num_parameters(getattr(info, "safetensors", None), getattr(info, "gguf", None)),
    )


def search(query: str, *, limit: int = 20, format: str | None = None, sort: str = "downloads") -> list[Found]:
    """Search the hub; return repositories with supported weights, most downloaded first.

    format: safetensors or gguf. Raises as `read_repository`.
    """
    if client.is_offline():
        raise client.offline_search_error()
    params: dict[str, Any] = {"search": query, "sort": sort, "limit": 2 * limit, "expand": list(FOUND_FIELDS)}
    if format:
        params["filter"] = format
    answers = client.get_json("/api/models", params, about=f"a search for {query!r}")
    try:
        found = [_found(answer) for answer in answers]
    except (KeyError, TypeError, AttributeError) as error:
        raise HubError(
            f"{client.endpoint()} did not answer like a hub.", f"{error!r}.", "Check HF_ENDPOINT."
        ) from error
    return [each for each in found if each.format][:limit]


def _file(sibling: Any) -> RemoteFile:
    lfs = sibling.lfs
    etag = lfs["sha256"] if lfs else sibling.blob_id
    size = int((lfs["size"] if lfs else sibling.size) or 0)
    return RemoteFile(sibling.rfilename, size, etag if re.fullmatch(r"[0-9A-Za-z_-]{1,128}", etag or "") else "")


def _stays_inside(name: str) -> bool:
    """Return whether a file's name, which the hub chose, stays inside the folder when used as a path."""
    return not name.startswith("/") and not {"..", ".", ""} & set(name.split("/")) and "\\" not in name


def _found(answer: Mapping[str, Any]) -> Found:
    tags = answer.get("tags") or []
    return Found(
        repo_id=answer["id"],
        downloads=int(answer.get("downloads") or 0),
        likes=int(answer.get("likes") or 0),
        updated=str(answer.get("lastModified") or "")[:10],
        gated=bool(answer.get("gated")),
        format="gguf" if "gguf" in tags else "safetensors" if "safetensors" in tags else "",
        num_parameters=_num_parameters(answer.get("safetensors"), answer.get("gguf")),
        pipeline=answer.get("pipeline_tag") or "",
        license=_license(tags, None),
    )


def _license(tags: list[str] | None, card: Any) -> str:
    for tag in tags or []:
        if tag.startswith("license:"):
            return tag.removeprefix("license:")
    return str(getattr(card, "license", None) or "")


def _num_parameters(safetensors: Any, gguf: Any) -> int | None:
    for counted in (safetensors, gguf):
        total = counted.get("total") if isinstance(counted, Mapping) else getattr(counted, "total", None)
        if total:
            return int(total)
    return None


_SIDE_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "*.tiktoken", "tekken.json", "tokenizer.model",
    "tokenizer.model.v*", "spiece.model", "sentencepiece.bpe.model", "chat_template.json", "chat_template.jinja",
    "additional_chat_templates/*.jinja", "preprocessor_config.json", "processor_config.json", "quantize_config.json",
    "quant_config.json", "hf_quant_config.json", "recipe.yaml", "adapter_config.json",
    "adapter_model.safetensors", "modules.json",
    "sentence_bert_config.json", "config_sentence_transformers.json", "[1-9]_*/config.json",
)  # fmt: skip
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def load_files(
    repo_id: str, names: Sequence[str], quant: str | None, shards: Iterable[str] | None = None, *, code: bool = False,
    prediction_layer: bool = False,
) -> list[str]:  # fmt: skip
    """Return the names of the files to download. shards: the files that the index names; code: also the owner's Python
    files; prediction_layer: also the file beside a GGUF model that has its layer for multi-token prediction.

    Raises `UnsupportedModel` for a repository without supported weights, `ModelNotFound` for an unknown `quant`,
    `CorruptModel` if the index names files that the repository does not have.
    """
    weights = _safetensors(repo_id, names, shards)
    ggufs = gguf_models(names)
    if quant is not None or (ggufs and not weights):
        first = f":{ggufs[0].quant or ggufs[0].stem}" if ggufs else ""
        files = require_one(repo_id, ggufs, quant, f"localllm pull {repo_id}{first}").files
        folder, _, name = files[0].rpartition("/")
        beside = [each for each in names if each.rpartition("/")[0] in ("", folder)]
        layers = [each for each in names if each.rpartition("/")[0] in ("", folder, "MTP", f"{folder}/MTP")]
        layers = prediction_layers_for(name, layers) if prediction_layer else []
        return [*files, *projectors_for(name, beside)[:1], *layers[:1]]
    if not weights:
        raise _no_weights(repo_id, names)
    side = [
        name
        for name in names
        if any(name.count("/") == pattern.count("/") and fnmatch(name, pattern) for pattern in _SIDE_FILES)
    ]
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
