"""Plan a download: its files, bytes, what is cached already, and free disk space. No weights are transferred.

Does not know: how bytes are transferred.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from localllm.errors import CorruptModel, DiskFull
from localllm.files import json_file
from localllm.models.formats.gguf.file_names import gguf_models
from localllm.models.formats.safetensors import INDEX
from localllm.models.library.catalog import hub_cache_dir
from localllm.models.library.hub import cache, client
from localllm.models.library.hub.repository import RemoteFile, Repository, included_files, load_files, read_repository
from localllm.models.library.names import ModelName, parse_name
from localllm.units import format_bytes

SPARE_BYTES = 64 * 1024**2
"""Bytes to leave free on the disk: a full disk harms other programs."""


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file of a download."""

    name: str
    size: int
    etag: str
    cached_bytes: int  # already on disk, complete or in part

    @property
    def needed_bytes(self) -> int:
        return self.size - self.cached_bytes


@dataclass(frozen=True, slots=True)
class DownloadPlan:
    """A download as it would run now."""

    repo_id: str
    revision: str  # as requested; default main
    commit: str
    quant: str | None  # the chosen quantisation of a GGUF repository
    files: tuple[PlannedFile, ...]
    free_bytes: int  # on the disk of the cache
    gated: bool = False
    license: str = ""

    @property
    def name(self) -> str:
        """The name of the model after the download."""
        return str(ModelName(self.repo_id, self.quant, None if self.revision == "main" else self.revision))

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def cached_bytes(self) -> int:
        return sum(file.cached_bytes for file in self.files)

    @property
    def needed_bytes(self) -> int:
        return sum(file.needed_bytes for file in self.files)

    @property
    def is_cached(self) -> bool:
        return all(cache.is_cached(self.repo_id, self.commit, file.name, file.etag) for file in self.files)

    @property
    def fits(self) -> bool:
        """Return whether the disk has enough free space."""
        return not self.needed_bytes or self.needed_bytes + SPARE_BYTES <= self.free_bytes


def plan_download(
    name: str | ModelName, revision: str | None = None, include: Sequence[str] = (), *, code: bool = False,
    prediction_layer: bool = False,
) -> DownloadPlan:  # fmt: skip
    """Ask the hub what a download of `name` (ORG/NAME, with :QUANT and @REVISION) needs: a few small requests.

    include: download the files that match these patterns instead; code, prediction_layer: as for `load_files`.
    Raises what `read_repository` and `load_files` raise.
    """
    asked = parse_name(name) if isinstance(name, str) else name
    repository = read_repository(asked.base, revision or asked.revision)
    names = [file.name for file in repository.files]
    if include:
        chosen = included_files(repository.repo_id, names, include)
    else:
        shards = None if asked.quant else index_shards(repository)
        chosen = load_files(
            repository.repo_id, names, asked.quant, shards, code=code, prediction_layer=prediction_layer
        )
    return DownloadPlan(
        repo_id=repository.repo_id,
        revision=repository.revision,
        commit=repository.commit,
        quant=asked.quant or _quant_of(chosen),
        files=tuple(_planned(repository, file) for file in repository.files if file.name in chosen),
        free_bytes=cache.free_bytes(),
        gated=repository.gated,
        license=repository.license,
    )


def as_it_stands(plan: DownloadPlan) -> DownloadPlan:
    """Return the plan with the bytes that are cached now, without asking the hub."""

    def now(file: PlannedFile) -> PlannedFile:
        here = cache.cached_bytes(plan.repo_id, plan.commit, file.name, file.etag, file.size)
        return replace(file, cached_bytes=here)

    return replace(plan, files=tuple(map(now, plan.files)), free_bytes=cache.free_bytes())


def require_room(plan: DownloadPlan) -> None:
    """Raise `DiskFull` if the download does not fit on the disk."""
    if not plan.fits:
        raise DiskFull(
            f"{plan.name} does not fit on the disk.",
            f"It needs {format_bytes(plan.needed_bytes)} more, and {format_bytes(SPARE_BYTES)} stay free for other "
            f"programs; {format_bytes(plan.free_bytes)} are free where {hub_cache_dir()} is.",
            "localllm list shows model sizes, localllm rm MODEL deletes one; HF_HOME moves the cache.",
        )


def index_shards(repository: Repository) -> list[str] | None:
    """Return the weight files that the index names; None: the repository has no index."""
    index = repository.file(INDEX)
    if index is None:
        return None
    if index.size > json_file.MOST_BYTES:
        raise CorruptModel(
            f"{INDEX} of {repository.repo_id} is too large: {format_bytes(index.size)}.",
            f"At most {format_bytes(json_file.MOST_BYTES)} are read.",
        )
    try:
        return sorted(set(json_file.parse_json(read_text(repository, index), INDEX)["weight_map"].values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptModel(f"{INDEX} of {repository.repo_id} cannot be read.", f"{error!r}.") from error


def read_text(repository: Repository, file: RemoteFile) -> str:
    """Return the text of a small file, from the cache or the hub."""
    here = cache.repository_folder(repository.repo_id) / "snapshots" / repository.commit / file.name
    if here.is_file():
        return json_file.read_text(here)

    def once() -> str:
        with client.get(file_url(repository.repo_id, repository.commit, file.name)) as answer:
            return client.read_body(answer, json_file.MOST_BYTES).decode("utf-8")

    with client.translated(repository.repo_id):
        return client.retry(once)


def file_url(repo_id: str, commit: str, name: str) -> str:
    url: str = client.library().hf_hub_url(repo_id, name, revision=commit, endpoint=client.endpoint())
    return url


def _quant_of(chosen: Sequence[str]) -> str | None:
    models = gguf_models(chosen)
    return (models[0].quant or models[0].stem) if len(models) == 1 else None


def _planned(repository: Repository, file: RemoteFile) -> PlannedFile:
    here = cache.cached_bytes(repository.repo_id, repository.commit, file.name, file.etag, file.size)
    return PlannedFile(file.name, file.size, file.etag, here)
