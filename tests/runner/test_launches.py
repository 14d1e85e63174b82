"""The number of kernels in a decode step of real models: on small models each costs more than the bytes that it reads.

Counted are the nodes of the graph that a decode step of one request records on an H200: kernels of ours, torch's
operations, and copies between tensors. Weights are reserved and never written or read, so an 8B model costs no memory.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from localllm.kernels.launch import HAS_TRITON, INTERPRETED
from localllm.models.decoder.builder import DecoderBuilder
from localllm.models.layers.linear import Linear
from localllm.runner.device_steps import FEATURE_SETS, DeviceSteps
from localllm.runner.graphs import Replay
from localllm.runner.kv_cache import KVCache
from localllm.runner.runner import TorchRunner
from localllm.runner.staging import StepShape
from scripts.random_weights import GROUP_SIZE, RandomTensors, WeightFormat, shape_spec
from tests.kv import of_each

if not HAS_TRITON or INTERPRETED:
    pytest.skip("counts what a GPU would launch", allow_module_level=True)

from localllm.kernels.fp8_linear import Fp8Weight
from localllm.kernels.int4_linear import Int4Weight
from localllm.kernels.planar.layout import chunk_size
from tests.runner.pretend_gpu import Compiled, pretend_gpu

CPU = torch.device("cpu")
CONTEXT = 2048  # enough for the decode kernel to split a request's context
reserve = torch.empty  # the simulated GPU replaces it by one that writes zeros

NODES = {
    ("llama-3.1-8b", "16-bit"): (5, 7),
    ("llama-3.2-1b", "16-bit"): (5, 7),
    ("qwen2.5-0.5b", "16-bit"): (5, 7),
    ("llama-3.1-8b", "fp8"): (5, 7),
    ("llama-3.1-8b", "int4"): (5, 7),
    ("qwen3-14b", "int4"): (5, 7),
}
"""Nodes of each layer, and nodes besides. A layer has 5: four products and attention, which rotates and stores its
heads. The norms and the activation are part of the products, also where K is split.

Besides, from the staged buffer to the logits: the kernel that prepares the step and plans its attention, the embedding,
the first norm, the last one, and the head. To the token: two kernels, of which the last
records it."""


class ReservedTensors(RandomTensors):
    """A `TensorSource` of matrices whose pages are never touched."""

    def __init__(self, weights: WeightFormat) -> None:
        super().__init__(CPU, torch.bfloat16, 0)
        self._format = weights

    def take(self, names: Any, shape: tuple[int, ...], **options: Any) -> Tensor:
        return reserve(shape, dtype=options.get("dtype") or self.dtype)

    def linear(self, stems: Sequence[str], shape: tuple[int, int], *, bias: bool = False, **cut: Any) -> Linear:
        weight: Any = reserve(shape, dtype=self.dtype)
        if self._format == "fp8" and stems[0] != "lm_head":
            weight = Fp8Weight(reserve(shape, dtype=torch.float8_e4m3fn), reserve(shape[0]))
        elif self._format == "int4" and stems[0] != "lm_head":
            words = reserve(shape[0], -(-shape[1] // chunk_size(4, 32)) * 32, dtype=torch.int16)
            groups = shape[1] // GROUP_SIZE
            zeros = reserve(groups, shape[0], dtype=torch.uint8)
            weight = Int4Weight(words, reserve(groups, shape[0], dtype=torch.float16), shape[1], zeros=zeros)
        return Linear(weight, reserve(shape[0], dtype=self.dtype) if bias else None)


class Operations(TorchDispatchMode):
    """Counts torch's operations that a GPU runs as kernels or copies."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given, made = args[0] if args else None, result[0] if isinstance(result, (list, tuple)) else result
        if not function._schema.is_mutable and _memory(given) == _memory(made) is not None:
            return result  # a view, or a conversion to the same type
        if not function.name().startswith(("aten::empty", "aten::new_empty", "aten::zero_")):  # as the simulated GPU
            self.names.append(function.name())
        return result


def _memory(value: Any) -> int | None:
    return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else None


def nodes_of_a_step(
    shape: str, weights: WeightFormat, layers: int, compiled: Compiled, drafts: int = 0
) -> Counter[str]:
    """Return the nodes that a step of one request replays: the forward pass, the plain draw, and with drafts those
    behind it."""
    spec = shape_spec(shape, num_hidden_layers=layers)
    model = DecoderBuilder(spec, ReservedTensors(weights), CPU, torch.bfloat16).build(CONTEXT)
    replayed: Counter[str] = Counter()

    def record(step: Replay) -> Replay:
        compiled.launched.clear()
        with Operations() as operations:
            step()
        nodes = Counter([*compiled.launched, *operations.names])
        return lambda: replayed.update(nodes)

    kv = KVCache(spec, of_each(spec, 8), 64, CPU, "bfloat16")
    runner = TorchRunner(
        model, spec, kv, max_num_seqs=1, max_num_batched_tokens=16, max_model_len=CONTEXT, block_size=64, device=CPU,
        capture=record, staged=True,
    )  # fmt: skip
    runner.warm_up()
    assert isinstance(runner._steps, DeviceSteps)
    graphs = runner._steps._graphs
    assert graphs is not None
    graphs.replay(StepShape(1, drafts=drafts), FEATURE_SETS[0])
    runner.close()
    return replayed


@pytest.mark.parametrize(("shape", "weights"), NODES)
def test_a_decode_step_has_few_nodes(shape: str, weights: WeightFormat) -> None:
    with pretend_gpu() as compiled:
        one, two = (nodes_of_a_step(shape, weights, layers, compiled) for layers in (1, 2))
    per_layer = two - one
    in_layers, besides = NODES[shape, weights]
    assert per_layer.total() == in_layers, per_layer
    assert (one - per_layer).total() == besides, one - per_layer


def test_parts_that_one_program_would_merge_slowly_have_a_kernel() -> None:
    """Four queries of four heads: 2,048 numbers of each part."""
    with pretend_gpu() as compiled:
        one, two = (nodes_of_a_step("llama-3.1-8b", "16-bit", layers, compiled, drafts=3) for layers in (1, 2))
    assert (two - one)["reduce_kernel"] == 1
    assert (two - one)["_rotary_store_kv_kernel"] == 1, "rows of several tokens are rotated by a kernel of its own"
    assert (two - one).total() == 2 + NODES["llama-3.1-8b", "16-bit"][0]


def test_every_kernel_of_a_decode_step_may_start_while_the_previous_one_finishes() -> None:
    with pretend_gpu() as compiled:
        nodes = nodes_of_a_step("qwen2.5-0.5b", "16-bit", 1, compiled, drafts=3)
    assert nodes["_accept_drafts_kernel"] == 1
    assert not compiled.in_turn, "warming up launches the kernels of wider steps as well"
