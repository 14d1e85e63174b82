"""Matrices as the quantising tools store them: the configs of six formats, and a `Store` for each of their ways."""

import json
from typing import Any

import torch
from torch import Tensor

from tests.models.formats.quantised import Store, Stored, e2m1, in_order, rounded, shuffled, to_int32

# AWQ ------------------------------------------------------------------------------------------------------------------


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
AWQ: dict[str, Any] = {
    "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
    "modules_to_not_convert": None,
}  # fmt: skip


def awq_words(codes: Tensor) -> Tensor:
    """[r, c] -> [r, c / 8]: output AWQ_ORDER[i] of eight in nibble i."""
    return to_int32(sum(codes[:, AWQ_ORDER[i] :: 8] << (4 * i) for i in range(8)))


def awq(group: int, *, zeros: bool = True, skip: str = "") -> Store:
    def store(stem: str, weight: Tensor) -> Stored | None:
        if skip and skip in stem:
            return None
        codes, zero, scales, meant = rounded(weight, in_order(weight.shape[1], group), 4, sym=not zeros)
        tensors = {"qweight": awq_words(codes.t()), "scales": scales.t()}
        return {**tensors, "qzeros": awq_words(zero.t())} if zeros else tensors, meant

    return store


# GPTQ -----------------------------------------------------------------------------------------------------------------


GPTQ: dict[str, Any] = {
    "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False, "lm_head": False,
    "checkpoint_format": "gptq", "damp_percent": 0.01, "true_sequential": True,
}  # fmt: skip


def words(codes: Tensor, bits: int) -> Tensor:
    """[r, c] -> [r, c * bits / 32], written out as AutoGPTQ does: three words for 32 codes of 3 bits."""
    if bits != 3:
        per_word = 32 // bits
        return to_int32(sum(codes[:, i::per_word] << (bits * i) for i in range(per_word)))
    c = codes.view(codes.shape[0], -1, 32)
    first = sum(c[..., i] << (3 * i) for i in range(10)) | (c[..., 10] & 3) << 30
    second = c[..., 10] >> 2 | sum(c[..., 11 + i] << (3 * i + 1) for i in range(10)) | (c[..., 21] & 1) << 31
    third = c[..., 21] >> 1 | sum(c[..., 22 + i] << (3 * i + 2) for i in range(10))
    return to_int32(torch.stack((first, second, third), dim=-1).flatten(1))


def gptq(bits: int, group: int, *, sym: bool = False, order: str = "", v2: bool = False) -> Store:
    """order: "" none; "layer": one for the parts of a layer; "part": each its own."""

    def store(stem: str, weight: Tensor) -> Stored:
        columns = weight.shape[1]
        seed = columns if order == "layer" else sum(stem.encode())
        g_idx = shuffled(columns, group, seed) if order else in_order(columns, group)
        codes, zeros, scales, meant = rounded(weight, g_idx, bits, sym=sym)
        if not v2:
            zeros = zeros.clamp(min=1)  # v1 cannot say 0
            meant = (codes - zeros[:, g_idx]) * scales.float()[:, g_idx]
        tensors = {
            "qweight": words(codes, bits).t(),
            "qzeros": words((zeros if v2 else zeros - 1).t(), bits),
            "scales": scales.t(),
            "g_idx": g_idx.int(),
        }
        return tensors, meant

    return store


# FP8 ------------------------------------------------------------------------------------------------------------------


E4M3 = torch.float8_e4m3fn
DYNAMIC: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}
STATIC = {**DYNAMIC, "activation_scheme": "static"}
BLOCKS = {**DYNAMIC, "fmt": "e4m3", "weight_block_size": [128, 128]}


def fp8_values(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """-> e4m3 values, what they mean; scale is of weight's shape."""
    values = (weight / scale).clamp(-448, 448).to(E4M3)
    return values, values.float() * scale


def per_tensor(*, static: str = "", shape: tuple[int, ...] = ()) -> Store:
    """static: what the scale of x is called."""

    def store(stem: str, weight: Tensor) -> Stored:
        scale = weight.abs().max() / 448
        values, meant = fp8_values(weight, scale.expand_as(weight))
        tensors = {"weight": values, "weight_scale": scale.reshape(shape)}
        return {**tensors, static: torch.tensor(0.01 + len(stem) / 1e4)} if static else tensors, meant

    return store


def per_output(stem: str, weight: Tensor) -> Stored:
    scale = weight.abs().amax(1, keepdim=True) / 448
    values, meant = fp8_values(weight, scale.expand_as(weight))
    return {"weight": values, "weight_scale": scale}, meant


def per_block(size: int = 128, kind: torch.dtype = torch.float32) -> Store:
    def store(stem: str, weight: Tensor) -> Stored:
        rows, columns = weight.shape
        scale = (
            torch.stack([torch.stack([b.abs().max() for b in band.split(size, 1)]) for band in weight.split(size)])
            / 448
        )
        scale = torch.exp2(scale.log2().ceil()).to(kind) if kind == torch.float8_e8m0fnu else scale.to(kind)
        spread = scale.float().repeat_interleave(size, 0)[:rows].repeat_interleave(size, 1)[:, :columns]
        values, meant = fp8_values(weight, spread)
        return {"weight": values, "weight_scale_inv": scale}, meant

    return store


MXFP8 = {"quant_method": "mxfp8", "ignored_layers": ["lm_head"]}


def mxfp8(name: str = "weight_scale", kind: torch.dtype = torch.uint8) -> Store:
    """A power of two for each 32 inputs, whose exponent is stored plus 127. name: of the tensor of exponents."""

    def store(stem: str, weight: Tensor) -> Stored:
        groups = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 32)).unflatten(1, (-1, 32))
        exponents = (groups.abs().amax(2) / 448).clamp(min=2.0**-60).log2().ceil()
        spread = torch.exp2(exponents).repeat_interleave(32, 1)[:, : weight.shape[1]]
        values, meant = fp8_values(weight, spread)
        return {"weight": values, name: (exponents + 127).to(torch.uint8).view(kind)}, meant

    return store


# bitsandbytes ---------------------------------------------------------------------------------------------------------


TABLES = {
    "nf4": [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    "fp4": [
        0.0, 0.005208333333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25,
        -0.0, -0.005208333333, -0.66666667, -1.0, -0.33333333, -0.5, -0.16666667, -0.25,
    ],
}  # fmt: skip
NF4: dict[str, Any] = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16",
}  # fmt: skip


def four_bits(kind: str, *, double: bool, block: int = 64) -> Store:
    table = torch.tensor(TABLES[kind])

    def store(stem: str, weight: Tensor) -> Stored:
        blocks = weight.reshape(-1, block)
        scale = blocks.abs().amax(1)
        state: dict[str, Any] = {
            "quant_type": kind, "blocksize": block, "dtype": "float16", "shape": list(weight.shape),
        }  # fmt: skip
        tensors = {}
        if double:  # scales less their mean, as codes of a table, in blocks of 256
            offset = float(scale.mean())
            dynamic = torch.linspace(-1, 1, 256)
            groups = torch.nn.functional.pad(scale - offset, (0, -len(scale) % 256)).view(-1, 256)
            outer = groups.abs().amax(1)
            codes = (groups / outer[:, None])[..., None].sub(dynamic).abs().argmin(-1).flatten()[: len(scale)]
            scale = dynamic[codes] * outer.repeat_interleave(256)[: len(scale)] + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            tensors |= {"weight.nested_absmax": outer, "weight.nested_quant_map": dynamic}
            tensors["weight.absmax"] = codes.to(torch.uint8)
        else:
            tensors["weight.absmax"] = scale
        codes = (blocks / scale[:, None])[..., None].sub(table).abs().argmin(-1)
        flat = codes.flatten().to(torch.uint8)
        blob = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        tensors |= {
            "weight": (flat[::2] << 4 | flat[1::2])[:, None], "weight.quant_map": table,
            f"weight.quant_state.bitsandbytes__{kind}": blob,
        }  # fmt: skip
        return tensors, (table[codes] * scale[:, None]).view(weight.shape)

    return store


def eight_bits(stem: str, weight: Tensor) -> Stored:
    most = weight.abs().amax(1)
    values = (weight * 127 / most[:, None]).round().to(torch.int8)
    tensors = {"weight": values, "SCB": most, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, values * most[:, None] / 127


# compressed-tensors ---------------------------------------------------------------------------------------------------


def ct_config(
    layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """As llm-compressor writes it."""
    group = {"targets": ["Linear"], "weights": {"dynamic": False, **weights}, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "output_activations": None}}, "ignore": ["lm_head"],
        "kv_cache_scheme": None, **more,
    }  # fmt: skip


def ints(bits: int, group: int, *, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    strategy = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy, **more}


def packed(bits: int, group: int, *, symmetric: bool = True, order: str = "", skip: str = "") -> Store:
    """pack-quantized; order: "" none, "layer" one g_idx for the parts of a layer, "part" each its own, "unused"."""

    def store(stem: str, weight: Tensor) -> Stored | None:
        if skip and skip in stem:
            return None
        columns = weight.shape[1]
        seed = columns if order == "layer" else sum(stem.encode())
        g_idx = shuffled(columns, group, seed) if order in ("layer", "part") else in_order(columns, group)
        codes, zeros, scales, meant = rounded(weight, g_idx, bits, sym=symmetric, dtype=torch.bfloat16)
        tensors = {
            "weight_packed": words(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape),
        }  # fmt: skip
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros.t(), bits).t()
        if order:
            tensors["weight_g_idx"] = torch.full((columns,), -1).int() if order == "unused" else g_idx.int()
        return tensors, meant

    return store


def plain(bits: int, group: int = -1, *, symmetric: bool = True, static: bool = False, tensor: bool = False) -> Store:
    """int-quantized: two's complement in bytes."""

    def store(stem: str, weight: Tensor) -> Stored:
        shape = weight.shape
        flat = weight.reshape(1, -1) if tensor else weight
        codes, zeros, scales, meant = rounded(flat, in_order(flat.shape[1], group), bits, sym=symmetric)
        middle = 1 << (bits - 1)
        tensors = {"weight": (codes - middle).to(torch.int8).view(shape), "weight_scale": scales}
        if tensor:
            tensors["weight_scale"] = scales.view(1)
        if not symmetric:
            tensors["weight_zero_point"] = (zeros - middle).to(torch.int8)
        if static:
            tensors |= {"input_scale": torch.tensor([0.02]), "input_zero_point": torch.tensor([3], dtype=torch.int8)}
        return tensors, meant.view(shape)

    return store


def ct_fp8(strategy: str, *, static: bool = False) -> Store:
    def store(stem: str, weight: Tensor) -> Stored:
        if strategy == "block":
            rows, columns = -(-weight.shape[0] // 128), -(-weight.shape[1] // 128)
            scale = torch.stack(
                [torch.stack([b.abs().max() for b in band.split(128, 1)]) for band in weight.split(128)]
            )
            spread = scale.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)[:, : weight.shape[1]]
            assert scale.shape == (rows, columns)
        else:
            scale = weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().max().view(1)
            spread = scale.expand_as(weight) if strategy == "channel" else scale
        values = (weight / (spread / 448)).to(E4M3)
        tensors = {"weight": values, "weight_scale": (scale / 448).to(torch.bfloat16)}
        if static:
            tensors["input_scale"] = torch.tensor([0.02])
        narrow = (scale / 448).to(torch.bfloat16).float()
        if strategy == "block":
            narrow = narrow.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)[:, : weight.shape[1]]
        return tensors, values.float() * narrow

    return store


def ct_nvfp4(stem: str, weight: Tensor) -> Stored:
    rows = weight.shape[0]
    whole = 448 * 6 / weight.abs().max()
    scale = (weight.view(rows, -1, 16).abs().amax(2) / 6 * whole).to(E4M3)
    codes, values = e2m1((weight.view(rows, -1, 16) / (scale.float() / whole)[..., None]).nan_to_num().view(rows, -1))
    meant = (values.view(rows, -1, 16) * (scale.float() / whole)[..., None]).view(rows, -1)
    tensors = {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scale,
               "weight_global_scale": whole.view(1), "input_global_scale": torch.ones(1)}  # fmt: skip
    return tensors, meant


def ct_mxfp4(stem: str, weight: Tensor) -> Stored:
    rows = weight.shape[0]
    exponent = (weight.view(rows, -1, 32).abs().amax(2) / 6).log2().ceil()
    codes, values = e2m1((weight.view(rows, -1, 32) / exponent.exp2()[..., None]).view(rows, -1))
    meant = (values.view(rows, -1, 32) * exponent.exp2()[..., None]).view(rows, -1)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return {"weight_packed": packed, "weight_scale": (exponent + 127).to(torch.uint8)}, meant


# Model Optimizer ------------------------------------------------------------------------------------------------------


def modelopt_fp8(stem: str, weight: Tensor) -> Stored:
    scale = weight.abs().max() / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.02)}, values.float() * scale


def modelopt_nvfp4(stem: str, weight: Tensor) -> Stored:
    rows, whole = weight.shape[0], weight.abs().max() / (448 * 6)
    scale = (weight.view(rows, -1, 16).abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
    step = (scale.float() * whole)[..., None]
    codes, values = e2m1((weight.view(rows, -1, 16) / step).nan_to_num().view(rows, -1))
    tensors = {"weight": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scale, "weight_scale_2": whole,
               "input_scale": torch.tensor(0.01)}  # fmt: skip
    return tensors, (values.view(rows, -1, 16) * step).view(rows, -1)


PACKED = ct_config("pack-quantized", ints(4, 32, symmetric=False))
FORMATS: dict[str, tuple[dict[str, Any], Store]] = {
    "awq": (AWQ, awq(32)),
    "gptq": ({**GPTQ, "desc_act": True, "dynamic": {}}, gptq(4, 32, order="layer")),
    "fp8": (STATIC, per_tensor(static="input_scale")),
    "blocks": (BLOCKS, per_block()),
    "packed": (PACKED, packed(4, 32, symmetric=False)),
    "nf4": (NF4, four_bits("nf4", double=True)),
}
