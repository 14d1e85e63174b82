"""Repositories on the hub: files with sizes and hashes, commit, licence and gating. Also the search.

Does not know: which files a load needs, what is on this machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from localllm.errors import HubError
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
