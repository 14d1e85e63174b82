"""Checkpoints of the quantising tools by table: those that load and agree, and those that are refused with a reason.

A row of `LOADED` is a config, how the matrices are stored, and what they are in the loaded model. A row of `REFUSED` is
a config that is not supported, one that contradicts the file, or a damaged file.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from localllm.errors import CorruptModel, LocalLLMError, UnsupportedModel
from localllm.kernels.fp8_linear import Fp8Weight
from localllm.kernels.int4_linear import Int4Weight
from localllm.kernels.int8_linear import Int8Weight
from localllm.kernels.linear import StackedWeight
from localllm.kernels.planar.linear import PlanarWeight
from localllm.models.formats.registry import quantization_in_words, quantization_notes
from localllm.models.loader import load_model, resident_bytes
from localllm.models.read_spec import read_spec
from tests.models.formats.quantised import (
    SHAPE,
    Saved,
    Store,
    Stored,
    agrees,
    assert_refused,
    quantised_matrices,
    rewrite,
    save_quantised,
    set_quantization,
    weights_agree,
)
from tests.models.formats.stores import (
    AWQ,
    BLOCKS,
    DYNAMIC,
    E4M3,
    GPTQ,
    MXFP8,
    NF4,
    STATIC,
    awq,
    ct_config,
    ct_fp8,
    ct_mxfp4,
    ct_nvfp4,
    eight_bits,
    four_bits,
    gptq,
    ints,
    modelopt_fp8,
    modelopt_nvfp4,
    mxfp8,
    packed,
    per_block,
    per_output,
    per_tensor,
    plain,
)
from tests.models.harness import CPU
from tests.tiny import make_tiny_model

Q = "model.layers.0.self_attn.q_proj"
SOURCES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama bf16": {"dtype": "bfloat16"},
    "phi3": {"rope_parameters": None, "sliding_window": None},  # stores q, k and v as one, and gate and up
    "qwen2": {},  # has biases
}


@pytest.fixture(scope="module")
def source_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("sources")
    return cache(lambda name: make_tiny_model(folder / name, name.split()[0], **{**SHAPE, **SOURCES[name]}))


# Checkpoints that load ------------------------------------------------------------------------------------------------

Kind = tuple[type, Mapping[str, Any]]


def of(kind: type, **values: Any) -> Kind:
    """A loaded matrix: its class and its attributes. A function says whether an attribute is right."""
    return kind, values


def present(value: object) -> bool:
    return value is not None


@dataclass(frozen=True)
class Loads:
    config: Mapping[str, Any]
    store: Store
    kinds: list[Kind] | Kind | None = None  # of qkv, o, gate and up, down, so far as quantised; one: of all four
    source: str = "llama"
    head: type | None = None  # of the head's weight, where it is quantised
    within: float = 1e-4  # relative error of the logits
    each_within: float | None = None  # of each weight
    notes: tuple[str, ...] | None = None  # parts of the notes, in order
    beside: tuple[str, Any] | None = None  # a file with the settings, which config.json lacks then


def without(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != name}


def ct(layout: str, weights: Mapping[str, Any], store: Store, kinds: Any, *, inputs: Any = None, **more: Any) -> Loads:
    return Loads(ct_config(layout, dict(weights), inputs), store, kinds, source="llama bf16", **more)


def floats(bits: int = 8, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "symmetric": True, **more}


def feed_forward_in_8_bits(stem: str, weight: Tensor) -> Stored | None:
    if "o_proj" in stem:
        return None
    return gptq(8, 64)(stem, weight) if ".mlp." in stem else gptq(4, 32)(stem, weight)


PER_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
PER_TENSOR = {**PER_TOKEN, "dynamic": False, "strategy": "tensor"}
FP8_INPUTS: dict[str, Any] = {"dynamic": floats(strategy="token", dynamic=True), "16-bit": None,
                              "static": floats(strategy="tensor", dynamic=False)}  # fmt: skip
FP4_INPUTS = {"num_bits": 4, "type": "float", "dynamic": "local"}
INT4 = of(Int4Weight)
LOADED = {
    **{f"awq, groups of {n}": Loads({**AWQ, "group_size": n}, awq(n), INT4) for n in (32, 64, 128, -1)},
    "awq without zero points": Loads({**AWQ, "zero_point": False}, awq(32, zeros=False), of(Int4Weight, zeros=None)),
    "awq, v and so qkv not as one matrix": Loads(
        {**AWQ, "modules_to_not_convert": ["v_proj"]}, awq(32, skip="v_proj"), head=Int4Weight),
    "awq of fused matrices": Loads(AWQ, awq(32), INT4, source="phi3"),
    "awq, older": Loads(AWQ, awq(32), INT4, beside=("quant_config.json", {
        "zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"})),
    **{f"gptq v1 sym, {n} bits": Loads(
        {**GPTQ, "bits": n, "sym": True}, gptq(n, 32, sym=True),
        of(Int4Weight, bits=8 if n == 8 else 4, zeros=None, input_order=None)) for n in (2, 3, 4, 8)},
    **{f"gptq v2 asym, {n} bits": Loads(
        {**GPTQ, "bits": n, "checkpoint_format": "gptq_v2"}, gptq(n, 32, v2=True),
        of(Int4Weight, bits=8 if n == 8 else 4, zeros=present, input_order=None)) for n in (2, 3, 4, 8)},
    **{f"gptq desc_act, {n} bits": Loads(
        {**GPTQ, "bits": n, "desc_act": True}, gptq(n, 32, order="layer"),
        of(Int4Weight, bits=8 if n == 8 else 4, zeros=present, input_order=present)) for n in (2, 3, 4, 8)},
    **{f"gptq, groups of {n}": Loads({**GPTQ, "group_size": n}, gptq(4, n), INT4) for n in (64, 128, -1)},
    "gptq, an order for each part of a layer": Loads(
        {**GPTQ, "desc_act": True}, gptq(4, 32, order="part"),
        [of(StackedWeight, parts=lambda parts: len(parts) == 3), INT4, of(StackedWeight), INT4]),
    "gptq desc_act in order": Loads({**GPTQ, "desc_act": True}, gptq(4, 32), of(Int4Weight, input_order=None)),
    "gptq desc_act, one group a row": Loads(
        {**GPTQ, "desc_act": True, "group_size": -1}, gptq(4, -1, order="part"), INT4),
    # AutoGPTQ before 0.5: the file does not name the method
    "gptq, older": Loads(GPTQ, gptq(4, 32, sym=True), INT4, beside=("quantize_config.json", {
        "bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": False, "static_groups": False, "sym": True,
        "true_sequential": True, "model_name_or_path": None, "model_file_base_name": None})),
    "gptq with a head": Loads({**GPTQ, "lm_head": True}, gptq(4, 32), INT4, head=Int4Weight),
    "gptq of biased layers": Loads(GPTQ, gptq(4, 32), INT4, source="qwen2"),
    # GPTQModel's patterns
    "gptq with dynamic settings": Loads(
        {**GPTQ, "dynamic": {"+:.*\\.mlp\\.": {"bits": 8, "group_size": 64}, "-:.*o_proj": {}}},
        feed_forward_in_8_bits, [of(Int4Weight, bits=4), of(Int4Weight, bits=8), of(Int4Weight, bits=8)]),
    # q, k and v have a scale each; as one matrix they have one per output
    **{f"fp8, scales of shape {shape}": Loads(
        DYNAMIC, per_tensor(shape=shape),
        [of(Fp8Weight, activations="dynamic", scales=lambda scales: len(scales.unique()) == 3), *[of(Fp8Weight)] * 3]
        ) for shape in ((), (1,), (1, 1))},
    # the parts of a layer read the same x: its widest measured range holds for all of them
    **{f"fp8 static, {name}": Loads(STATIC, per_tensor(static=name), [
        of(Fp8Weight, activations="static", activation_scale=lambda s: float(s) == pytest.approx(0.01 + len(Q) / 1e4)),
        *[of(Fp8Weight)] * 3]) for name in ("input_scale", "activation_scale")},
    "fp8 per output": Loads(DYNAMIC, per_output, of(Fp8Weight)),
    "fbgemm": Loads(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        per_output, of(Fp8Weight)),
    # k has 64 outputs: the blocks of v cannot follow on its own
    **{f"fp8 blocks, {str(kind)[6:]}": Loads(BLOCKS, per_block(kind=kind), [
        of(StackedWeight), of(Fp8Weight), of(Fp8Weight, scales=lambda scales: scales.shape == (4, 1)), of(Fp8Weight)]
        ) for kind in (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)},
    "fp8 blocks of 256": Loads({**BLOCKS, "weight_block_size": [256, 256]}, per_block(256)),
    "mxfp8": Loads(MXFP8, mxfp8(), of(Fp8Weight, activations="16-bit", scales=lambda s: s.dtype == torch.uint8),
                   notes=("16 bits",)),
    "mxfp8 as fp8 in blocks": Loads({**BLOCKS, "weight_block_size": [1, 32]},
                                    mxfp8("weight_scale_inv", torch.float8_e8m0fnu), of(Fp8Weight), notes=("16 bits",)),
    "fp8 with a head": Loads(DYNAMIC, per_tensor(), of(Fp8Weight), head=Fp8Weight),
    # scales are rounded to fp16, and those of the source are fp16 numbers already, unless they are quantised
    **{f"bitsandbytes {kind}, {'double' if double else 'plain'}": Loads(
        {**NF4, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": double}, four_bits(kind, double=double),
        of(PlanarWeight, bits=4), within=5e-3 if double else 1e-4, each_within=2**-11 if double else 1e-6)
       for kind in ("nf4", "fp4") for double in (False, True)},
    "bitsandbytes without a method": Loads(
        without(NF4, "quant_method"), four_bits("nf4", double=True), of(PlanarWeight), within=5e-3),
    "bitsandbytes, blocks of 128": Loads(NF4, four_bits("nf4", double=False, block=128), of(PlanarWeight)),
    "LLM.int8": Loads({"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0},
                      eight_bits, of(Int8Weight)),
    **{f"ct packed, {bits} bits, groups of {group}, {'symmetric' if symmetric else 'zeros'}": ct(
        "pack-quantized", ints(bits, group, symmetric=symmetric), packed(bits, group, symmetric=symmetric),
        of(Int4Weight, bits=8 if bits == 8 else 4))
       for bits in (2, 4, 8) for group, symmetric in ((32, True), (128, False), (-1, True), (-1, False))},
    **{f"ct packed, order: {order}": ct(
        "pack-quantized", ints(4, 32, actorder="group"), packed(4, 32, order=order),
        [of(kind), INT4, of(kind), INT4])
       for order, kind in (("layer", Int4Weight), ("part", StackedWeight), ("unused", Int4Weight))},
    **{f"ct int8, {'symmetric' if symmetric else 'zeros'}, x {name}": ct(
        "int-quantized", ints(8, -1, symmetric=symmetric),
        plain(8, symmetric=symmetric, static=name == "static"),
        [of(Int8Weight, zeros=None if symmetric else present, activations=runs), *[of(Int8Weight)] * 3],
        inputs=inputs, notes=("",) if name == "static" else ())
       for symmetric in (True, False)
       for name, inputs, runs in (("dynamic", PER_TOKEN, "dynamic"), ("static", PER_TENSOR, "dynamic"),
                                  ("none", None, "16-bit"))},
    "ct int8 per tensor": ct("naive-quantized", {**ints(8, -1), "strategy": "tensor"}, plain(8, tensor=True),
                             of(Int8Weight), inputs=PER_TOKEN),
    **{f"ct W{bits}A8, groups of {group}": ct(
        "int-quantized", ints(bits, group), plain(bits, group), INT4, inputs=PER_TOKEN,
        notes=(f"W{bits}A8 runs as W{bits}A16",)) for bits, group in ((4, -1), (4, 128), (8, 128))},
    **{f"ct fp8 per {strategy}, x {name}": ct(
        "float-quantized", floats(strategy=strategy, block_structure=[128, 128]),
        ct_fp8(strategy, static=name == "static"),
        [of(StackedWeight if strategy == "block" else Fp8Weight), of(Fp8Weight),
         of(Fp8Weight, activations="dynamic" if strategy == "block" and name == "static" else name), of(Fp8Weight)],
        inputs=inputs) for strategy in ("tensor", "channel", "block") for name, inputs in FP8_INPUTS.items()},
    # NVFP4's scales are products, rounded to fp16; MXFP4 loses nothing
    "ct mxfp8": ct("mxfp8-quantized", floats(strategy="group", group_size=32), mxfp8(), of(Fp8Weight),
                   inputs=floats(strategy="group", group_size=32, dynamic=True), notes=("16 bits",)),
    "ct NVFP4": ct("nvfp4-pack-quantized", floats(4, strategy="tensor_group", group_size=16), ct_nvfp4,
                   of(PlanarWeight, bits=4, group=16), inputs=FP4_INPUTS, within=5e-3, each_within=2**-11,
                   notes=("16 bits",)),
    "ct MXFP4": ct("mxfp4-pack-quantized", floats(4, strategy="tensor_group", group_size=32), ct_mxfp4,
                   of(PlanarWeight, bits=4, group=32), inputs=FP4_INPUTS, each_within=0, notes=("16 bits",)),
    "modelopt fp8": Loads({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, modelopt_fp8,
                          of(Fp8Weight, activations="static")),
    "modelopt MXFP8": Loads({"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]}, mxfp8(),
                            of(Fp8Weight), notes=("16 bits",)),
    "modelopt NVFP4, config in a file": Loads(
        {}, modelopt_nvfp4, of(PlanarWeight, bits=4), within=5e-3, each_within=2**-11, notes=("16 bits", "KV cache"),
        beside=("hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": {
            "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}})),
}  # fmt: skip


@pytest.mark.parametrize("name", LOADED)
def test_the_loaded_model_is_the_one_that_was_quantised(
    name: str, source_of: Callable[[str], Path], tmp_path: Path
) -> None:
    case = LOADED[name]
    saved = save_quantised(source_of(case.source), tmp_path / "model", case.config, case.store, head=bool(case.head))
    if case.beside:
        set_quantization(saved.path, None)
        (saved.path / case.beside[0]).write_text(json.dumps(case.beside[1]))
        rewrite(saved.path, lambda t: t.update(scale_of_the_cache) if "kv_cache" in str(case.beside) else None)
    harness = agrees(saved, case.within)
    found = quantised_matrices(harness)
    if case.kinds is not None:
        kinds = case.kinds if isinstance(case.kinds, list) else [case.kinds] * 4
        for matrix, (kind, values) in zip(found, kinds, strict=True):
            assert isinstance(matrix, kind)
            for attribute, value in values.items():
                got = getattr(matrix, attribute)
                assert value(got) if callable(value) else got is None if value is None else got == value, attribute
    if case.head:
        assert isinstance(harness.model.lm_head.weight, case.head)
    if case.each_within is not None:
        weights_agree(saved, harness, case.each_within)
    if case.notes is not None:
        notes = quantization_notes(read_spec(saved.path).quantization, "cpu")
        assert all(part in note for part, note in zip(case.notes, notes, strict=True)), notes


scale_of_the_cache = {"model.layers.0.self_attn.k_proj.k_scale": torch.tensor(1.0)}


@pytest.fixture
def source(source_of: Callable[[str], Path]) -> Path:
    return source_of("llama")


def test_groups_of_modules(source_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Patterns name the attention in 8 bits; the rest of the class is in 4; down is left alone."""
    quantization = ct_config("pack-quantized", ints(4, 32), ignore=["lm_head", "re:.*down_proj"])
    quantization["config_groups"]["group_1"] = {"targets": ["re:.*self_attn.*"], "weights": ints(8, 64)}

    def store(stem: str, weight: Tensor) -> Stored | None:
        return packed(8, 64)(stem, weight) if "self_attn" in stem else packed(4, 32, skip="down_proj")(stem, weight)

    saved = save_quantised(source_of("llama bf16"), tmp_path / "model", quantization, store)
    assert [matrix.bits for matrix in quantised_matrices(agrees(saved))] == [8, 8, 4]
    assert quantization_in_words(quantization) == (
        "compressed-tensors: 4 bits, groups of 32; 8 bits, groups of 64 · runs as packed int4, int8 in groups"
    )


def test_scales_of_a_cache_are_left_out_and_said_so(source: Path, tmp_path: Path) -> None:
    quantization = ct_config("pack-quantized", ints(4, 32), kv_cache_scheme={"num_bits": 8, "type": "float"})
    saved = save_quantised(source, tmp_path / "model", quantization, packed(4, 32))
    rewrite(saved.path, lambda t: t.update({"model.layers.0.self_attn.k_scale": torch.ones(1)}))
    agrees(saved)
    assert "KV cache" in quantization_notes(quantization, "cpu")[0]
    set_quantization(saved.path, {**quantization, "kv_cache_scheme": None})
    assert_refused(saved, LocalLLMError, r"1 tensors.*k_scale")


@pytest.mark.parametrize("value", [0.0, 0.25])
def test_a_bias_beside_a_quantised_matrix_is_dropped_if_it_is_zero(value: float, source: Path, tmp_path: Path) -> None:
    """AutoGPTQ wrote a bias of zeros for every layer."""
    saved = save_quantised(source, tmp_path / "model", GPTQ, gptq(4, 32))
    tensors = load_file(saved.path / "model.safetensors")
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith(".scales")}
    biases = {n.replace(".scales", ".bias"): torch.full((t.shape[1],), value).half() for n, t in scales.items()}
    rewrite(saved.path, lambda t: t.update(biases))
    if value:
        assert_refused(saved, CorruptModel, r"_proj\.bias is not zero")
    else:
        agrees(saved)


def test_weights_do_not_look_into_the_file(source: Path, tmp_path: Path) -> None:
    """A checkpoint that is rewritten in place must not change a model that is being served."""
    saved = save_quantised(source, tmp_path / "model", AWQ, awq(32))
    harness = agrees(saved)
    _, before = harness.prefill([5, 6, 7])
    size = sum(tensor.nbytes for tensor in load_file(saved.path / "model.safetensors").values())
    with (saved.path / "model.safetensors").open("r+b") as stream:
        stream.seek(-size, 2)
        stream.write(b"\x42" * size)
    _, after = harness.prefill([5, 6, 7])
    assert torch.equal(before, after)


# Checkpoints that are refused -----------------------------------------------------------------------------------------

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], Any]


def drop(ending: str) -> Change:
    return lambda tensors: tensors.pop(f"{Q}.{ending}")


def put(ending: str, make: Callable[[Tensor], Tensor]) -> Change:
    """Replace one tensor of q by another, or add one."""
    name = f"{Q}.{ending}"
    return lambda tensors: tensors.update({name: make(tensors.get(name, torch.empty(0))).clone()})


def halve(tensors: Tensors) -> None:
    """Half as many outputs as the config says."""
    tensors.update({n: t[..., : t.shape[-1] // 2].clone() for n, t in tensors.items() if n.startswith(f"{Q}.")})


def state(text: bytes) -> Change:
    """The settings of a matrix, as bitsandbytes writes them."""
    return put("weight.quant_state.bitsandbytes__nf4", lambda t: torch.tensor(list(text), dtype=torch.uint8))


@dataclass(frozen=True)
class Refused:
    message: str
    config: Mapping[str, Any]
    store: Store
    change: Change | None = None
    error: type[LocalLLMError] = LocalLLMError
    source: str = "llama"
    at_once: bool = False  # before any file of weights is opened


def configs(
    base: Mapping[str, Any], store: Store, changes: Mapping[str, Mapping[str, Any]], **more: Any
) -> list[Refused]:
    return [Refused(message, {**base, **change}, store, **more) for message, change in changes.items()]


def damaged(base: Mapping[str, Any], store: Store, changes: Mapping[str, Change], **more: Any) -> list[Refused]:
    return [Refused(message, base, store, change, **more) for message, change in changes.items()]


PACKED = ct_config("pack-quantized", ints(4, 32))


def of_targets(*targets: str) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": list(targets), "weights": ints(4, 32)}}}


REFUSED = [
    *configs(AWQ, awq(32), {
        "gemv layout.*Supported: the gemm layout": {"version": "gemv"},
        "exllama layout": {"version": "exllama"},
        "llm-awq layout": {"backend": "llm-awq"},
        "3 bits": {"bits": 3},
        "group_size = '128'": {"group_size": "128"},
    }, at_once=True),
    *damaged(AWQ, awq(32), {
        rf"lacks {Q}\.scales": drop("scales"),
        r"shape \[3, 128\].*\[4, 128\]": put("scales", lambda t: t[:3]),
        "qzeros is stored as F16": put("qzeros", lambda t: t.half()),
        r"\[4, 4\].*\[4, 16\]": put("qzeros", lambda t: t[:, :4]),
        r"scales has shape \[4, 128\]": put("qweight", lambda t: t[:64]),
        "2 dimensions": put("qweight", lambda t: t.flatten()),
        "NaN or infinite": put("scales", lambda t: t.fill_(torch.nan)),
        rf"1 tensors.*{Q}\.weight": put("weight", lambda t: torch.zeros(128, 128)),
        r"shape \[192, 128\].*\[256, 128\]": halve,
    }, error=CorruptModel),
    *[Refused(r"lacks .*\.qzeros", {**without(AWQ, "zero_point"), **said}, awq(32, zeros=False), error=CorruptModel)
      for said in ({"zero_point": True}, {})],
    Refused(r"AWQ.*none of its matrices", AWQ, lambda stem, weight: None, error=CorruptModel),
    Refused("groups of 8", {**AWQ, "group_size": 8}, awq(8), error=UnsupportedModel),
    *configs(GPTQ, gptq(4, 32), {
        "marlin layout": {"checkpoint_format": "marlin"},
        "layout": {"is_marlin_format": True},
        "5 bits": {"bits": 5},
        "bits = None": {"bits": None},
        "pattern": {"dynamic": {"+:(": {"bits": 8}}},
    }),
    *configs(GPTQ, gptq(4, 32), {
        "128 inputs.*groups of 48": {"group_size": 48},
        "q_proj.*dynamic": {"dynamic": {"-:.*q_proj": {}}},
        "qzeros.*not 8.*sym": {"sym": True},
        "qzeros has shape": {"bits": 8},
    }),
    *damaged(GPTQ, gptq(4, 32), {
        "groups 4 to 4.*There are 4": put("g_idx", lambda t: t.fill_(4)),
        "groups -1 to 2": put("g_idx", lambda t: t - 1),
        "does not divide 128 columns": put("g_idx", lambda t: t.fill_(2)),
        r"g_idx has shape \[64\]": put("g_idx", lambda t: t[:64]),
        rf"lacks {Q}\.scales": drop("scales"),
        rf"lacks {Q}\.qzeros": drop("qzeros"),
        r"\[4, 8\].*\[4, 16\]": put("qzeros", lambda t: t[:, :8]),
        "qweight is stored as F32": put("qweight", lambda t: t.float()),
        rf"1 tensors.*{Q}\.weight": put("weight", lambda t: torch.zeros(128, 128)),
    }),
    # v2 zero points under a config that says v1 would shift every weight by a step
    Refused(r"not 8: 9 for one.*checkpoint_format gptq;", {**GPTQ, "sym": True}, gptq(4, 32, sym=True, v2=True),
            error=CorruptModel),
    Refused(r"g_idx is not in order.*desc_act is false", GPTQ, gptq(4, 32, order="layer"), error=CorruptModel),
    Refused(rf"lacks {Q}\.g_idx", {**GPTQ, "desc_act": True}, gptq(4, 32, order="layer"), drop("g_idx"), CorruptModel),
    # 8 bits, v1: 255 in the file means 256, which a byte cannot say
    Refused(f"{Q}.*zero point of 256", {**GPTQ, "bits": 8}, gptq(8, 32), put("qzeros", lambda t: t.fill_(-1))),
    *configs(STATIC, per_tensor(static="input_scale"), {
        "e5m2": {"fmt": "e5m2"},
        "weekly": {"activation_scheme": "weekly"},
        "64 x 64.*128 x 128": {"weight_block_size": [64, 64]},
        "weight_block_size = 128": {"weight_block_size": 128},
        r"weight_scale has shape \[\].*\[1, 1\]": {"weight_block_size": [128, 128]},
    }),
    *damaged(STATIC, per_tensor(static="input_scale"), {
        rf"lacks {Q}\.weight_scale": drop("weight_scale"),
        rf"lacks {Q}\.input_scale": drop("input_scale"),
        r"shape \[7\].*\[\].*\[128\]": put("weight_scale", lambda t: torch.ones(7)),
        "NaN or infinite": put("weight_scale", lambda t: t.fill_(torch.inf)),
        "F8_E5M2.*F8_E4M3": put("weight", lambda t: t.float().to(torch.float8_e5m2)),
        "different numbers of inputs.*q_proj: 256": put("weight", lambda t: torch.zeros(128, 256).to(E4M3)),
    }),
    *configs(NF4, four_bits("nf4", double=True), {"af4": {"bnb_4bit_quant_type": "af4"}}, at_once=True),
    *configs({}, eight_bits, {"neither in 4 nor in 8": {"quant_method": "bitsandbytes"}}, at_once=True),
    *damaged(NF4, four_bits("nf4", double=True), {
        "quant_state.*cannot be read": state(b"\xff" * 9),
        "cannot be read": state(b"[]"),
        "cannot be read.*shape": state(b'{"blocksize": 64}'),
        "cannot be read.*-128": state(b'{"blocksize": 64, "shape": [-128, -128]}'),
        "1099511627[79]": state(b'{"blocksize": 64, "shape": [1099511627776, 128]}'),
        "blocks of 96": state(b'{"blocksize": 96, "shape": [128, 128]}'),
        r"lacks .*weight\.absmax": drop("weight.absmax"),
        "lacks .*nested_absmax": drop("weight.nested_absmax"),
        r"quant_map has shape \[8\].*\[16\]": put("weight.quant_map", lambda t: torch.zeros(8)),
        "NaN or infinite": put("weight.nested_absmax", lambda t: t.fill_(torch.nan)),
    }),
    *damaged(MXFP8, mxfp8(), {
        r"\[128, 3\].*\[128, 4\]": put("weight_scale", lambda t: t[:, :3]),
        "weight_scale is stored as F32": put("weight_scale", lambda t: t.float()),
        "weight_scale contains NaN": put("weight_scale", lambda t: torch.full_like(t, 255)),
    }, error=CorruptModel),
    Refused("GPU-specific tile layout", {"load_in_8bit": True}, eight_bits, put("weight_format", lambda t: t.fill_(2))),
    *configs(PACKED, packed(4, 32), {
        "format marlin-24": {"format": "marlin-24"},
        "sparsity_config": {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "transform_config": {"transform_config": {"config_groups": {"u": {}}}},
        "integers of 3 bits": ct_config("pack-quantized", ints(3, 32)),
        "no config_groups": {"config_groups": {}},
        "8 bits with scales per group": ct_config("float-quantized", floats(strategy="group")),
        "target": of_targets("re:("),
        r"No group.*q_proj.*I32": of_targets("re:.*mlp.*"),
        r"No group .*q_proj.*I32": of_targets("model.layers.0.mlp.down_proj"),
        "weight_scale has shape": ct_config("pack-quantized", ints(8, 32)),
    }, source="llama bf16"),
    *damaged(PACKED, packed(4, 32), {
        rf"lacks {Q}\.weight_scale": drop("weight_scale"),
        r"weight_shape says \[129, 129\].*\[128, 128\]": put("weight_shape", lambda t: t + 1),
        rf"lacks {Q}\.weight_shape": drop("weight_shape"),
        r"\[128, 2\].*\[128, 4\]": put("weight_scale", lambda t: t[:, :2]),
        "stored as F32": put("weight_packed", lambda t: t.float()),
        "groups 7 to 7": put("weight_g_idx", lambda t: torch.full((128,), 7).int()),
    }, source="llama bf16"),
    Refused(r"weight holds -1\d\d to 127.*-8 to 7", ct_config("int-quantized", ints(4, -1)), plain(8)),
    Refused(r"W4A8_AWQ.*MXFP8 and NVFP4", {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, modelopt_fp8,
            error=UnsupportedModel, at_once=True),
]  # fmt: skip


def save_refused(case: Refused, source_of: Callable[[str], Path], folder: Path) -> Saved:
    saved = save_quantised(source_of(case.source), folder / "model", case.config, case.store)
    if case.change is not None:
        rewrite(saved.path, case.change)
    return saved


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=f"{case.config.get('quant_method', 'none')}: {case.message}") for case in REFUSED]
)
def test_what_cannot_be_loaded_is_refused_with_the_reason(
    case: Refused, source_of: Callable[[str], Path], tmp_path: Path
) -> None:
    saved = save_refused(case, source_of, tmp_path)
    if case.at_once:
        with pytest.raises(case.error, match=case.message):
            read_spec(saved.path)
    else:
        assert_refused(saved, case.error, case.message)


@pytest.mark.parametrize("read", [load_model, resident_bytes])
@pytest.mark.parametrize(
    ("config", "store", "unit"),
    [
        ({**GPTQ, "group_size": 8}, gptq(4, 8), "groups of 8"),
        (NF4, four_bits("nf4", double=False, block=16), "blocks of 16"),
    ],
    ids=["gptq", "bitsandbytes"],
)
def test_a_form_that_no_kernel_takes_is_refused_by_a_load_and_by_a_question_for_its_size(
    read: Callable[..., object], config: dict[str, Any], store: Store, unit: str, source: Path, tmp_path: Path
) -> None:
    saved = save_quantised(source, tmp_path / "model", config, store)
    with pytest.raises(UnsupportedModel, match=rf"_proj has a stored form that is not supported.*{unit} weights"):
        read(saved.path, read_spec(saved.path), CPU, torch.float32)


def test_truncated_file(source: Path, tmp_path: Path) -> None:
    saved = save_quantised(source, tmp_path / "model", AWQ, awq(32))
    file = saved.path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert_refused(saved, CorruptModel, "cut short")
