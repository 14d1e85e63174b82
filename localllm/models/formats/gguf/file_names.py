"""The names of GGUF files: which quantisation, which part of how many, and which file a request means.

There is no standard, only habits: `Qwen3-0.6B-Q4_K_M.gguf`, `model.q8_0.gguf`, `Q2_K/x-Q2_K-00001-of-00003.gguf`.
In Ollama's store a file has its digest as its name, and a manifest names the files of a model.
Does not know: what is inside a GGUF file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path

from localllm.errors import CorruptModel, ModelNotFound
from localllm.files.json_file import read_json

PREFERRED = (
    "Q4_K_M", "UD-Q4_K_XL", "Q4_K_L", "Q4_K_S", "MXFP4_MOE", "MXFP4", "IQ4_NL", "IQ4_XS", "Q4_1", "Q4_0", "Q5_K_M",
    "Q5_K_S", "Q6_K", "Q8_0", "Q3_K_L", "Q3_K_M", "BF16", "F16",
)  # fmt: skip
"""Default order of preference: about 4 bits, best first; then more bits, then fewer."""

_QUANT = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_[A-Z0-9]+)*|NVFP4|BF16|FP16|F16|FP32|F32))(?=$|[-._/])",
    re.IGNORECASE,
)
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
_BESIDE = re.compile(r"(?:^|[-._])(?:mmproj|imatrix|dflash2?|dspark|eagle3?)(?:[-._]|$)|^mtp-", re.IGNORECASE)
"""Names of files beside a model: its projector, its importance matrix, its small model for drafts."""


_PROJECTOR = re.compile(r"(?:^|(?<=[-._]))mmproj(?:[-._]|$)", re.IGNORECASE)
PROJECTOR_TYPES = ("F16", "BF16", "Q8_0", "F32")
"""Order of preference among a model's projectors."""
_LARGEST_MANIFEST, _OLLAMA_LAYER = 2**20, "application/vnd.ollama.image."


def projectors_for(model: str, names: Iterable[str]) -> list[str]:
    """Return the projectors (mmproj) among file names, the likeliest one of a model first: the one whose name is most
    like the model's, then the one of the preferred type."""
    rank = {quant: position for position, quant in enumerate(PROJECTOR_TYPES)}

    def likeness(name: str) -> int:
        own = name.rpartition("/")[2].lower()
        pairs = (zip(model.lower(), part, strict=False) for part in (own, _PROJECTOR.sub("", own, 1)))
        return max(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], each)) for each in pairs)

    files = [name for name in names if name.lower().endswith(".gguf")]
    found = [name for name in files if _PROJECTOR.search(name.rpartition("/")[2][:-5])]
    return sorted(found, key=lambda name: (-likeness(name), rank.get(quant_of(name), len(rank)), name))


def prediction_layers_for(model: str, names: Iterable[str]) -> list[str]:
    """Return the files among names that hold a model's layer for multi-token prediction (mtp-NAME-Q4_0.gguf), the one
    of the model's quantisation first. model: the name of its file or first part, without folder."""
    wanted, quant = _without_quant(whole_stem(model)), quant_of(model)

    def is_own(name: str) -> bool:
        own = whole_stem(name.rpartition("/")[2]).lower()
        return own.startswith("mtp-") and _without_quant(own[4:]) == wanted

    files = [name for name in names if name.lower().endswith(".gguf") and is_own(name)]
    return sorted(files, key=lambda name: (quant_of(name) != quant, name))


def _without_quant(stem: str) -> str:
    quant = quant_of(stem)
    return stem[: len(stem) - len(quant)].rstrip("-._").lower() if quant else stem.lower()


def ollama_manifests(store: Path) -> Iterator[tuple[tuple[str, ...], Mapping[str, list[str]]]]:
    """Yield each model of Ollama's store: the parts of its name, and the names of its blobs by kind (model, projector,
    adapter, ...), none for an invalid manifest. store: the folder of `blobs` and `manifests`."""
    manifests = store / "manifests"
    for path in sorted(manifests.rglob("*")):
        if path.is_file():
            state = path.stat()
            yield path.relative_to(manifests).parts, _ollama_blobs(path, state.st_mtime_ns, state.st_size)


@lru_cache(1024)
def _ollama_blobs(manifest: Path, changed_ns: int, size: int) -> Mapping[str, list[str]]:
    """changed_ns, size: of the file, which is read again if they differ."""
    found: dict[str, list[str]] = {}
    try:
        for layer in read_json(manifest, _LARGEST_MANIFEST)["layers"]:
            name, kind = str(layer["digest"]).replace(":", "-"), str(layer["mediaType"])
            if not (name.startswith("sha256-") and name[7:].isalnum()):
                return {}
            if kind.startswith(_OLLAMA_LAYER):
                found.setdefault(kind.removeprefix(_OLLAMA_LAYER), []).append(name)
    except (CorruptModel, KeyError, TypeError):
        return {}
    return found


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """One model in GGUF: a single file, or all parts of a split one in order."""

    stem: str  # the name without folder, part number and extension
    quant: str  # in capitals, as Q4_K_M; empty if the name does not contain one
    files: tuple[str, ...]  # the files that exist, in order
    num_parts: int  # the number of files that there should be

    @property
    def missing(self) -> list[str]:
        """Names of the missing parts."""
        if self.num_parts == len(self.files):
            return []
        return [name for name in parts_of(self.files[0]) if name not in self.files]


def gguf_models(names: Iterable[str]) -> list[GGUFModel]:
    """Return the models among file names, sorted by name. Projectors, importance matrices and the small models that
    write drafts (mtp-*, dflash-*, *-eagle3) are left out."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf") and not _BESIDE.search(name.rpartition("/")[2][:-5]):
            groups.setdefault(whole_stem(name), []).append(name)
    return [
        GGUFModel(whole.rpartition("/")[2], quant_of(files[0]), tuple(files), len(parts_of(files[0])))
        for whole, files in groups.items()
    ]


def quant_of(name: str) -> str:
    """Return the quantisation in a file's name, else in its folder's name; empty if neither has one."""
    for part in (whole_stem(name.rpartition("/")[2]), name.rpartition("/")[0]):
        found = _QUANT.findall(part)
        if found:
            return str(found[-1]).upper()
    return ""


def parts_of(name: str) -> list[str]:
    """Return all parts of the split model that `name` belongs to; just `name` if it is not split."""
    stem, ending = name[:-5], name[-5:]
    match = _PART.search(stem)
    if match is None:
        return [name]
    count = int(match[2])
    return [f"{stem[: match.start()]}-{number:05d}-of-{match[2]}{ending}" for number in range(1, count + 1)]


def require_one(where: str, models: Sequence[GGUFModel], asked: str | None, hint: str) -> GGUFModel:
    """Return the complete model in `where` that is meant.

    Raises `ModelNotFound` with the available ones and `hint`; `CorruptModel` for missing parts.
    """
    meant = choose(models, asked)
    if not meant:
        offers = ", ".join(dict.fromkeys(model.quant or model.stem for model in models)) or "no GGUF file"
        raise ModelNotFound(f"{where} has no {asked}.", f"It has {offers}.", hint, param="model")
    if len(meant) > 1:
        raise ModelNotFound(
            f"{where} has {len(meant)} models named {asked}.",
            f"They are {', '.join(model.stem for model in meant)}.",
            f"{where}:{meant[0].stem}",
            param="model",
        )
    if meant[0].missing:
        raise CorruptModel(
            f"{meant[0].stem} of {where} is incomplete.",
            f"{len(meant[0].missing)} of its {meant[0].num_parts} parts are missing, {meant[0].missing[0]} among them.",
            hint,
        )
    return meant[0]


def choose(models: Sequence[GGUFModel], asked: str | None) -> list[GGUFModel]:
    """Return the models that `asked` can mean: a quantisation, or a file's name with or without its extension.

    Without `asked`, return the one that suits most machines. Empty: no match; several: the name is ambiguous.
    """
    if asked is None:
        return [_default([model for model in models if not model.missing] or models)] if models else []
    wanted = asked.lower()
    return (
        [m for m in models if wanted in (m.stem.lower(), f"{m.stem.lower()}.gguf", *map(str.lower, m.files))]
        or [m for m in models if wanted == m.quant.lower()]
        or [m for m in models if f"ud-{wanted}" == m.quant.lower()]
    )


def whole_stem(name: str) -> str:
    """Return a file's name without extension and part number; the same for all parts of one model."""
    return _PART.sub("", name[:-5] if name.lower().endswith(".gguf") else name)


def _default(models: Sequence[GGUFModel]) -> GGUFModel:
    rank = {quant: position for position, quant in enumerate(PREFERRED)}
    return min(models, key=lambda model: (rank.get(model.quant, len(rank)), model.stem))
