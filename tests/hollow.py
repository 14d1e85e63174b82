"""Checkpoints of the real sizes of large models, without weights: a config.json, headers, and holes in their place.

Only the headers of such a checkpoint can be used (`localllm fit`); its files take a few hundred KiB of the disk.
Does not know: localllm.
"""

import json
import math
import struct
from pathlib import Path
from typing import Any

from tests.tiny import class_of, tiny_config

_DTYPE_BYTES = {"BF16": 2, "F32": 4}


def make_hollow_model(path: Path, family: str, **sizes: Any) -> Path:
    """Write the checkpoint of a family of tests/tiny.py with these fields in its config.json, stored as bfloat16."""
    import torch

    config = tiny_config(family, **sizes)
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = class_of(config)._from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(path)
    tied = {name for name in model.state_dict() if name == "lm_head.weight" and config.tie_word_embeddings}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}
    write_header(path / "model.safetensors", shapes, "BF16")
    return path


def write_header(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str) -> None:
    """Write a safetensors file with these tensors, whose data are a hole."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * _DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + end)
