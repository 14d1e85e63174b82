"""NVIDIA Model Optimizer's checkpoints: FP8 per tensor, and NVFP4.

    FP8      {stem}.weight e4m3, weight_scale, input_scale                        fp8.py
    NVFP4    {stem}.weight uint8, weight_scale e4m3, weight_scale_2, input_scale  fp4.py

The method is in config.json's quantization_config, or in hf_quant_config.json. Unquantised matrices stay so.
Does not know: kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localllm.models.formats.compressed_tensors import kv_note
from localllm.models.formats.fp4 import Fp4, Fp4Names
from localllm.models.formats.fp8 import Fp8
from localllm.models.formats.matrices import MatrixFormat, is_kv_scale, refuse

NAMES = Fp4Names("weight", "weight_scale", "weight_scale_2")


def modelopt(config: Mapping[str, Any]) -> MatrixFormat:
    algorithm = config.get("quant_algo")
    notes = kv_note(config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo"))
    if algorithm == "FP8":
        return ModelOptFp8(notes)
    if algorithm == "NVFP4":
        return ModelOptFp4(notes)
    raise refuse(f"This checkpoint is Model Optimizer's {algorithm}.", "Supported: FP8 and NVFP4.")


class ModelOptFp8(Fp8):
    def __init__(self, notes: tuple[str, ...]) -> None:
        super().__init__("Model Optimizer FP8", "static", None, notes)

    def ignores(self, name: str) -> bool:
        return bool(self.notes) and is_kv_scale(name)


class ModelOptFp4(Fp4):
    def __init__(self, notes: tuple[str, ...]) -> None:
        super().__init__(NAMES)
        self.has_kv_scales = bool(notes)
        self.notes = ("Activations stay in 16 bits, although the checkpoint allows 4 bits.", *notes)

    @property
    def name(self) -> str:
        return "Model Optimizer NVFP4"

    def ignores(self, name: str) -> bool:
        return self.has_kv_scales and is_kv_scale(name)
