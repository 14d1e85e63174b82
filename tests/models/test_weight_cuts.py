"""Rows and columns of matrices as a layer asks for them: plain, fused, transposed, and of experts in one tensor."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.kernels.linear import StackedWeight
from localllm.kernels.quantized_weight import QuantizedWeight
from localllm.models.formats.checkpoint import TensorInfo
from localllm.models.formats.registry import linear_format
from localllm.models.spec.family import Storage
from localllm.models.weights.layout import StoredLayout
from localllm.models.weights.meta import MetaWeights
from localllm.models.weights.weights import Weights
from tests.gguf_files import blocks_of
from tests.models.formats.held import Held, ReadBytes
from tests.models.harness import CPU
from tests.models.stored_experts import mxfp4

MLP = "model.layers.0.mlp"
SPEC: Any = SimpleNamespace(tie_word_embeddings=False, kv_source=(), architecture="A test", intermediate_size=96)
GATE, UP, DOWN = torch.randn(3, 96, 160, generator=torch.Generator().manual_seed(1))
FEATURES = torch.cat((torch.arange(16, 40), torch.arange(96 + 16, 96 + 40)))  # of gate and up
Opened = tuple[Weights, MetaWeights, Held]


def opened(held: Held, config: Mapping[str, Any] | None = None, **storage: Any) -> Opened:
    given = StoredLayout(held, SPEC, Storage(**storage), linear_format(config)), CPU, torch.float32
    return Weights(*given, cpu_weights="exact"), MetaWeights(*given, cpu_weights="exact"), held


def dense(weight: Any) -> Tensor:
    return weight.float() if isinstance(weight, Tensor) else weight.dequantize(torch.float32)


def apart() -> Opened:
    return opened(Held({f"{MLP}.gate_proj.weight": GATE, f"{MLP}.up_proj.weight": UP, f"{MLP}.down_proj.weight": DOWN}))


def fused() -> Opened:
    tensors = {f"{MLP}.both.weight": torch.cat((GATE, UP)), f"{MLP}.down_proj.weight": DOWN}
    return opened(Held(tensors), fused_gate_up="both")


def transposed() -> Opened:
    tensors = {
        f"{MLP}.gate_proj.weight": GATE.t(),
        f"{MLP}.up_proj.weight": UP.t(),
        f"{MLP}.down_proj.weight": DOWN.t(),
    }
    return opened(Held(tensors), transposed=("_proj.weight",))


@pytest.mark.parametrize("open", [apart, fused, transposed])
def test_a_linear_layer(open: Callable[[], Opened]) -> None:
    weights, meta, held = open()
    stems, whole = [f"{MLP}.gate_proj", f"{MLP}.up_proj"], torch.cat((GATE, UP))
    with ReadBytes(held) as read:
        layer = weights.linear(stems, (192, 160), order=FEATURES)
    assert torch.equal(dense(layer.weight), whole[FEATURES])
    assert read.count == 48 * 160 * 4
    columns = weights.widened(f"{MLP}.down_proj", range(20, 50), 160)
    assert columns == range(20, 50)
    with ReadBytes(held) as read:
        layer = weights.linear([f"{MLP}.down_proj"], (96, 160), columns=columns)
    assert torch.equal(dense(layer.weight), DOWN[:, 20:50])
    assert read.count == 96 * 30 * 4
    assert tuple(meta.linear(stems, (192, 160), order=FEATURES).weight.shape) == (48, 160)
    assert tuple(meta.linear([f"{MLP}.down_proj"], (96, 160), columns=columns).weight.shape) == (96, 30)


def test_a_matrix_that_is_too_small_to_be_packed_leaves_the_file() -> None:
    """As a part of a large one, and beside a large one that a layer reads with it in another form."""
    large = torch.randn(2048, 160)  # packed as a whole
    held = Held({f"{MLP}.gate_proj.weight": large})
    weights, *_ = opened(held)
    layer = weights.linear([f"{MLP}.gate_proj"], (2048, 160), order=torch.arange(8))
    assert isinstance(layer.weight, Tensor)
    assert torch.equal(layer.weight, large[:8])
    layer = weights.linear([f"{MLP}.gate_proj"], (2048, 160), columns=range(8, 16))
    assert isinstance(layer.weight, Tensor)
    assert not held.holds(layer.weight)
    blocks = torch.from_numpy(blocks_of(large, "Q8_0")[0])
    described = TensorInfo(Held.path, "Q8_0", (2048, 160), blocks.nbytes)
    small = TensorInfo(Held.path, "F32", (8, 160), 8 * 160 * 4)
    names = f"{MLP}.gate_proj.weight", f"{MLP}.up_proj.weight"
    held = Held(dict(zip(names, (large[:8], blocks), strict=True)), dict(zip(names, (small, described), strict=True)))
    weights, *_ = opened(held, {"quant_method": "gguf"})
    stack = weights.linear([name.removesuffix(".weight") for name in names], (2056, 160)).weight
    assert isinstance(stack, StackedWeight)
    assert isinstance(stack.parts[0], Tensor)
    assert not held.holds(stack.parts[0])


# ---- experts in one tensor


EXPERTS = torch.randn(3, 6, 64, 160, generator=torch.Generator().manual_seed(2))  # gate, up, down of 6 experts
BOTH = torch.cat((EXPERTS[0], EXPERTS[1]), dim=1)
Stacked = tuple[Opened, Tensor, Tensor]  # and what gate and up, and down stand for


def plain() -> Stacked:
    return opened(Held({f"{MLP}.experts.gate_up_proj": BOTH, f"{MLP}.experts.down_proj": EXPERTS[2]})), BOTH, EXPERTS[2]


def plain_apart() -> Stacked:
    names = [f"{MLP}.experts.{name}_proj.weight" for name in ("gate", "up", "down")]
    return opened(Held(dict(zip(names, EXPERTS, strict=True)))), BOTH, EXPERTS[2]


def plain_transposed() -> Stacked:
    tensors = {f"{MLP}.experts.gate_up_proj": BOTH, f"{MLP}.experts.down_proj": EXPERTS[2]}
    held = Held({name: tensor.transpose(1, 2) for name, tensor in tensors.items()})
    return opened(held, transposed=("_proj",)), BOTH, EXPERTS[2]


def interleaved_mxfp4() -> Stacked:
    """gpt-oss's: rows of gate and up alternate."""
    mixed = torch.stack((EXPERTS[0], EXPERTS[1]), dim=2).flatten(1, 2)
    tensors, meant = {}, []
    for name, tensor in {"gate_up": mixed, "down": EXPERTS[2]}.items():
        blocks, scales, values = mxfp4(tensor)
        tensors |= {f"{MLP}.experts.{name}_proj_blocks": blocks, f"{MLP}.experts.{name}_proj_scales": scales}
        meant.append(values)
    both = torch.cat((meant[0][:, ::2], meant[0][:, 1::2]), dim=1)
    return opened(Held(tensors), {"quant_method": "mxfp4"}, interleaved_experts=True), both, meant[1]


def gguf() -> Stacked:
    tensors, described, meant = {}, {}, []
    for name, tensor in zip(("gate", "up", "down"), EXPERTS, strict=True):
        stored, values = blocks_of(tensor, "Q8_0")
        full = f"{MLP}.experts.{name}_proj.weight"
        tensors[full] = torch.from_numpy(stored)
        described[full] = TensorInfo(Held.path, "Q8_0", tuple(tensor.shape), stored.nbytes)
        meant.append(values)
    both = torch.cat((meant[0], meant[1]), dim=1)
    return opened(Held(tensors, described), {"quant_method": "gguf"}), both, meant[2]


@pytest.mark.parametrize("open", [plain, plain_apart, plain_transposed, interleaved_mxfp4, gguf])
def test_experts_in_one_tensor(open: Callable[[], Stacked]) -> None:
    (weights, meta, held), both, down = open()
    prefix, size = f"{MLP}.experts", sum(tensor.nbytes for tensor in held.held.values()) // 3
    columns = weights.widened_experts(prefix, "down_proj", range(40, 60), 160)
    assert columns is not None
    features = torch.cat((torch.arange(16, 40), torch.arange(64 + 16, 64 + 40)))
    wide = slice(columns.start, columns.stop)
    gate_up = ["gate_proj", "up_proj"]
    wanted: list[tuple[list[str], dict[str, Any], Tensor, float]] = [
        (gate_up, {"own": range(2, 4)}, both[2:4], 2 / 3),
        (gate_up, {"order": features}, both[:, features], 2 * 24 / 64),
        (["down_proj"], {"own": range(3, 6)}, down[3:], 1 / 2),
        (["down_proj"], {"columns": columns}, down[:, :, wide], len(columns) / 160),
    ]
    for each, cut, meant, share in wanted:
        shape = (6, 64 * len(each), 160)
        with ReadBytes(held) as read:
            taken, _ = weights.experts(prefix, each, shape, **cut)
        assert isinstance(taken, list)
        assert torch.equal(torch.stack([dense(matrix) for matrix in taken]), meant)
        assert 0 < read.count <= 1.05 * share * size
        promised, _ = meta.experts(prefix, each, shape, **cut)
        assert [nbytes(matrix) for matrix in promised] == [nbytes(matrix) for matrix in taken]


def nbytes(weight: Tensor | QuantizedWeight) -> int:
    return weight.numel() * weight.dtype.itemsize if isinstance(weight, Tensor) else weight.nbytes
