"""Pictures to the tensors that a tower reads, by transformers' own image processors.

The processors that need no torchvision are used; sizes are computed without pixels (families.py). Files are decoded by
a function that the caller passes: this module does not know formats.
Does not know: messages, requests, the tower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.errors import CorruptModel, InvalidParameter, UnsupportedModel
from localllm.models.spec.vision import AUTO, Detail, ImageLimits, VisionSpec
from localllm.models.vision.families import Layout, Size, family_of, keywords
from localllm.models.vision.mmproj import image_processor

if TYPE_CHECKING:
    from PIL.Image import Image

Decode = Callable[[bytes, tuple[int, int] | None], "Image"]
"""Decode a file to an upright RGB picture; the size that suffices, or None: its own."""


@dataclass(frozen=True, slots=True)
class Processed:
    """One picture as tensors, with the text that stands for it in a prompt. It is the `inputs` of an engine's
    `MediaSpan` (engine/media.py)."""

    tensors: Mapping[str, Any]  # by the keywords of the tower; on the host
    prompt: str  # the text that replaces the picture's mark: `rows` placeholders, and the marks around and between
    rows: int  # placeholder tokens in `prompt`
    grid: tuple[int, int] | None  # rows and columns of tokens; None: positions are those of text
    both_ways: bool
    size: tuple[int, int]  # width and height of the upright picture
    shown: tuple[int, int]  # width and height after scaling
    digest: bytes  # 16: of the file's bytes, the processor and what was asked of it

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(int(tensor.nbytes) for tensor in self.tensors.values() if hasattr(tensor, "nbytes"))

    def pixels(self) -> Mapping[str, Any]:
        return self.tensors


class PictureProcessor:
    """Prepares pictures for one model. Thread-safe."""

    def __init__(self, path: Path, spec: VisionSpec, decode: Decode, limits: ImageLimits | None = None) -> None:
        """path: folder of the model. limits: of this server; None: the checkpoint's."""
        self.spec, self.limits = spec, limits or spec.limits
        self._decode, self._family = decode, family_of(spec)
        self.processor = open_processor(path, spec)
        name = f"{spec.model_type} {self.processor.to_json_string()}"
        if spec.projector:  # its file is not among the model's own, by which blocks are named
            state = Path(spec.projector).stat()
            name = f"{name} {state.st_size} {state.st_mtime_ns}"
        self._key = blake2b(name.encode(), digest_size=32).digest()

    @property
    def mark(self) -> str:
        """The text that a chat template writes for a picture, and that `Processed.prompt` replaces."""
        return self._family.mark

    def layout(self, width: int, height: int, detail: Detail = AUTO) -> Layout:
        """Return what becomes of a picture of this size, without its pixels."""
        asked = keywords(self.spec, self.limits, detail)
        if detail.level == "original":
            largest = keywords(self.spec, self.limits, detail._replace(level="auto"))
            found = self._family.layout(Size(width, height, self.processor, largest), self.spec)
            if found.shown[0] < width * 0.98 or found.shown[1] < height * 0.98:
                raise InvalidParameter(
                    f"A picture of {width} x {height} pixels is scaled to {found.shown[0]} x {found.shown[1]}.",
                    f"detail: original allows no scaling, and at most {self.limits.max_tokens} tokens are read.",
                    "Send detail: auto, or start with a larger --image-max-tokens.",
                    param="detail",
                )
        return self._family.layout(Size(width, height, self.processor, asked), self.spec)

    def tokens(self, width: int, height: int, detail: Detail = AUTO) -> int:
        """Return the rows of a picture of this size."""
        return self.layout(width, height, detail).rows

    def shown(self, width: int, height: int, detail: Detail = AUTO) -> tuple[int, int]:
        """Return the width and height to which such a picture is scaled."""
        return self.layout(width, height, detail).shown

    def process(self, data: bytes, detail: Detail = AUTO, size: tuple[int, int] | None = None) -> Processed:
        """Decode, scale and cut a picture. size: its width and height where they are known, so that a large JPEG is
        decoded at a fraction of them. Raises what the decoder raises, and `InvalidParameter`."""
        wanted = None if size is None else self.shown(*size, detail)
        picture = self._decode(data, wanted)
        if size is not None and self.layout(*picture.size, detail) != self.layout(*size, detail):
            picture = self._decode(data, None)  # rounding of the fraction's size would change the tokens
        size = size or picture.size
        digest = blake2b(data, key=self._key, digest_size=16)
        return self._processed(picture, size, detail, digest)

    def process_image(self, picture: Image, detail: Detail = AUTO) -> Processed:
        """Do the same with a decoded RGB picture."""
        size = f"{picture.width} {picture.height} ".encode()
        digest = blake2b(size + picture.tobytes(), key=self._key, digest_size=16)
        return self._processed(picture, picture.size, detail, digest)

    def _processed(self, picture: Image, size: tuple[int, int], detail: Detail, digest: Any) -> Processed:
        asked = keywords(self.spec, self.limits, detail)
        digest.update(repr(sorted(asked.items())).encode())
        layout = self.layout(*picture.size, detail)
        made = self.processor(images=[picture], return_tensors="pt", **asked)
        tensors = {name: made[name] for name in self.processor.model_input_names if name in made}
        return Processed(
            tensors, layout.prompt, layout.rows, layout.grid, self.spec.both_ways, size, layout.shown, digest.digest()
        )


def open_processor(path: Path, spec: VisionSpec) -> Any:
    """Return transformers' image processor of a folder, on Pillow. Raises `UnsupportedModel` if there is none that
    works without torchvision, `CorruptModel` if its config cannot be read."""
    from transformers import AutoImageProcessor

    try:
        if spec.projector:
            return image_processor(spec)
        if spec.model_type == "gemma4_unified":  # its own class needs torchvision; this one makes the same tensors
            from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

            sizes = {"patch_size": spec.patch, "pooling_kernel_size": spec.merge}
            return Gemma4ImageProcessorPil.from_pretrained(path, local_files_only=True, **sizes)
        return AutoImageProcessor.from_pretrained(path, backend="pil", local_files_only=True)
    except ImportError as error:
        raise UnsupportedModel(
            f"Pictures of {path.name} are not supported.",
            f"Its image processor needs another library: {str(error).strip().splitlines()[0]}",
            "--limit-mm-per-prompt image=0 loads its text part.",
        ) from error
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise CorruptModel(
            f"The image processor of {path.name} cannot be read.", f"{type(error).__name__}: {error}."
        ) from error
