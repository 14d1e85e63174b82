"""Input embeddings that a request supplies instead of prompt tokens: validated, and converted to the model's type.

They are what `get_input_embeddings()` of the same model returns in transformers, or trained vectors of that size. A
`torch.save` file is untrusted: before torch reads it, it is checked to hold exactly one tensor, no larger than the
received bytes.
Does not know: requests, HTTP, where the embeddings go.
"""

from __future__ import annotations

import base64
import io
import pickletools
import zipfile
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from localllm.errors import ContextTooLong, InvalidParameter

PARAM = "prompt_embeds"
TYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
MAY_NAME = frozenset({
    "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter", "collections OrderedDict",
    "torch FloatStorage", "torch HalfStorage", "torch BFloat16Storage",
})  # fmt: skip
"""All names that the pickle of a dense tensor refers to."""
MOST_PICKLE_BYTES = 16 * 1024  # a tensor's pickle has about 300
HOW = "torch.save(tensor, buffer), then base64.b64encode(buffer.getvalue())."


@dataclass(frozen=True, slots=True, eq=False)
class PromptEmbedsTensor:
    """T embeddings on the CPU. `digest` is a hash of them, so that equal ones can share cached blocks."""

    values: Tensor  # [T, hidden]
    digest: str

    @property
    def num_tokens(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True)
class PromptEmbedsReader:
    """A validator for one model. Raises `InvalidParameter` or `ContextTooLong` with the reason."""

    hidden_size: int
    dtype: torch.dtype
    max_model_len: int

    def of_base64(self, text: str) -> PromptEmbedsTensor:
        try:
            raw = base64.b64decode(text, validate=True)
        except ValueError as error:
            raise _refused("prompt_embeds is not base64.", f"{error}.", HOW) from error
        return self.of_file(raw)

    def of_file(self, raw: bytes) -> PromptEmbedsTensor:
        """Read one tensor that `torch.save` wrote."""
        records = _records(raw)
        _check_pickle(records["data.pkl"])
        try:
            tensor = torch.load(io.BytesIO(_packed(records)), map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds of errors here
            why = (str(error).splitlines() or [""])[0]
            raise _refused("prompt_embeds cannot be read.", f"{type(error).__name__}: {why}", HOW) from error
        if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() != len(records["data/0"]):
            raise _refused("prompt_embeds is damaged.", "The size of its tensor does not match its data.", HOW)
        return self.of_tensor(tensor)

    def of_tensor(self, tensor: Any) -> PromptEmbedsTensor:
        """Validate a floating-point tensor [T, hidden] or [1, T, hidden]."""
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_meta:
            kind = f"a tensor of layout {tensor.layout}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise _refused("prompt_embeds must be a dense tensor.", f"Got {kind}.")
        if tensor.dtype not in TYPES:
            why = f"They are of type {str(tensor.dtype).removeprefix('torch.')}."
            raise _refused(f"prompt_embeds must be {', '.join(TYPES.values())}.", why)
        shape = tuple(tensor.shape)
        if len(shape) == 3 and shape[0] == 1:
            tensor = tensor[0]
        if tensor.ndim != 2 or tensor.shape[1] != self.hidden_size or not len(tensor):
            why = f"Its shape is {list(shape)}; this model's embeddings have {self.hidden_size} numbers."
            raise _refused(f"prompt_embeds must be of shape [tokens, {self.hidden_size}].", why)
        if len(tensor) >= self.max_model_len:
            raise ContextTooLong(
                f"This model's context holds {self.max_model_len} tokens here.",
                f"prompt_embeds has {len(tensor)}, and the output needs one.",
                "Send fewer, or start the server with a larger --max-model-len.",
                param=PARAM,
            )
        values = tensor.detach().to("cpu", self.dtype, memory_format=torch.contiguous_format, copy=True)
        if not values.isfinite().all():
            why = f"They hold NaN or infinity, at least after conversion to {TYPES[self.dtype]}, the model's dtype."
            raise _refused("prompt_embeds must be finite numbers.", why)
        digest = blake2b(values.view(torch.uint8).numpy(), digest_size=16).hexdigest()
        return PromptEmbedsTensor(values, f"{len(values)} {digest}")


def _records(raw: bytes) -> dict[str, bytes]:
    """Return the parts of a file by name: one pickle, one block of data."""
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            entries = archive.infolist()
            size = sum(entry.file_size for entry in entries)
            if size > len(raw) or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise _refused("prompt_embeds is not a file written by torch.save.", "It is compressed.", HOW)
            records = {entry.filename.partition("/")[2]: archive.read(entry) for entry in entries}
    except InvalidParameter:
        raise
    except Exception as error:  # as zipfile puts it: of damaged files about anything is possible
        raise _refused("prompt_embeds is not a file written by torch.save.", f"{error}.", HOW) from error
    data = [name for name in records if name.startswith("data/")]
    if "data.pkl" not in records or data != ["data/0"]:
        raise _refused("prompt_embeds must hold one tensor.", f"The file has {len(data)} blocks of data.", HOW)
    if records.get("byteorder", b"little") != b"little":
        raise _refused("prompt_embeds has big-endian data.", "Supported: little-endian data.")
    return records


def _check_pickle(pickle: bytes) -> None:
    if len(pickle) > MOST_PICKLE_BYTES:
        raise _refused("prompt_embeds must hold one tensor.", f"Its description has {len(pickle)} bytes.", HOW)
    try:
        for opcode, argument, _ in pickletools.genops(pickle):
            named = argument if opcode.name == "GLOBAL" else None
            if opcode.name in ("STACK_GLOBAL", "INST") or (named is not None and named not in MAY_NAME):
                raise _refused("prompt_embeds must hold one dense tensor.", f"It names {named or argument}.", HOW)
    except (ValueError, UnicodeDecodeError) as error:
        raise _refused("prompt_embeds cannot be read.", f"{error}.", HOW) from error


def _packed(records: dict[str, bytes]) -> bytes:
    """Write the same parts into a new file, so that torch reads only what was checked here."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, content in {"version": b"3\n", "data.pkl": records["data.pkl"], "data/0": records["data/0"]}.items():
            archive.writestr(f"embeds/{name}", content)
    return file.getvalue()


def _refused(what: str, why: str, hint: str = "") -> InvalidParameter:
    return InvalidParameter(what, why, hint, param=PARAM)
