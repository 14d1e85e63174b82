"""The layer against transformers' own blocks: random weights, fp32, token by token and all at once."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen2_moe import modeling_qwen2_moe
from transformers.models.qwen3_moe import modeling_qwen3_moe

from localllm.models.layers.linear import Linear
from localllm.models.layers.mlp import GatedMLP
from localllm.models.layers.moe import Experts, MoE, Routing

HIDDEN, WIDTH, NUM_EXPERTS = 48, 40, 12


def randomize(block: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in (*block.parameters(), *block.buffers()):
            tensor.copy_(torch.randn(tensor.shape) * 0.2)
    return block.float().eval()


def experts_of(block: Any) -> Experts:
    return Experts(block.experts.gate_up_proj.data, block.experts.down_proj.data, "silu")


def shared_of(mlp: Any) -> GatedMLP:
    gate_up = torch.cat((mlp.gate_proj.weight.data, mlp.up_proj.weight.data))
    return GatedMLP(Linear(gate_up), Linear(mlp.down_proj.weight.data), "silu")


def mixtral() -> tuple[Any, MoE]:
    config = modeling_mixtral.MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=8, num_experts_per_tok=2
    )
    block = randomize(modeling_mixtral.MixtralSparseMoeBlock(config))
    return block, MoE(Linear(block.gate.weight.data), experts_of(block), Routing(2))


def qwen3_moe() -> tuple[Any, MoE]:
    config = modeling_qwen3_moe.Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=4,
        norm_topk_prob=True,
    )
    block = randomize(modeling_qwen3_moe.Qwen3MoeSparseMoeBlock(config))
    return block, MoE(Linear(block.gate.weight.data), experts_of(block), Routing(4))


def qwen2_moe() -> tuple[Any, MoE]:
    config = modeling_qwen2_moe.Qwen2MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        shared_expert_intermediate_size=56,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=4,
        norm_topk_prob=False,
    )
    block = randomize(modeling_qwen2_moe.Qwen2MoeSparseMoeBlock(config))
    return block, MoE(
        Linear(block.gate.weight.data),
        experts_of(block),
        Routing(4, renormalize=False),
        shared=shared_of(block.shared_expert),
        shared_gate=Linear(block.shared_expert_gate.weight.data),
    )


def gpt_oss() -> tuple[Any, MoE]:
    config = modeling_gpt_oss.GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=NUM_EXPERTS, num_experts_per_tok=4
    )
    block = randomize(modeling_gpt_oss.GptOssMLP(config))
    held = block.experts

    def gate_first(interleaved: Tensor) -> Tensor:  # last dimension: gate, up, gate, up, ...
        return torch.cat((interleaved[..., ::2], interleaved[..., 1::2]), dim=-1)

    experts = Experts(
        gate_first(held.gate_up_proj.data).transpose(1, 2).contiguous(),
        held.down_proj.data.transpose(1, 2).contiguous(),
        "swiglu_clamped",
        gate_first(held.gate_up_proj_bias.data),
        held.down_proj_bias.data,
    )
    return block, MoE(Linear(block.router.weight.data, block.router.bias.data), experts, Routing(4))


def deepseek_v3() -> tuple[Any, MoE]:
    config = modeling_deepseek_v3.DeepseekV3Config(
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        moe_intermediate_size=WIDTH,
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    block = randomize(modeling_deepseek_v3.DeepseekV3MoE(config))
    routing = Routing(3, scoring="sigmoid", num_groups=4, top_groups=2, scale=2.5)
    bias = block.gate.e_score_correction_bias.data
    return block, MoE(
        Linear(block.gate.weight.data), experts_of(block), routing, bias, shared=shared_of(block.shared_experts)
    )


FAMILIES = {family.__name__: family for family in (mixtral, qwen3_moe, qwen2_moe, gpt_oss, deepseek_v3)}


@pytest.mark.parametrize("family", FAMILIES)
def test_as_transformers_computes_it(family: str) -> None:
    block, layer = FAMILIES[family]()
    x = torch.randn(2, 9, HIDDEN)
    with torch.no_grad():
        wanted = block(x)
    wanted = (wanted[0] if isinstance(wanted, tuple) else wanted).view(18, HIDDEN)
    with torch.inference_mode():
        together = layer(x.view(18, HIDDEN))
        alone = torch.cat([layer(row[None]) for row in x.view(18, HIDDEN)])
    torch.testing.assert_close(together, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(alone, wanted, rtol=1e-4, atol=1e-5)


def test_padding_gets_zeros_and_costs_nobody_anything() -> None:
    _, layer = mixtral()
    x = torch.randn(5, HIDDEN)
    x[3:] = float("nan")
    with torch.inference_mode():
        out = layer(x, torch.tensor([7, 0, 3, -1, -1]))
        alone = layer(x[:3])
    assert torch.equal(out[:3], alone)
    assert not out[3:].any()


def test_a_router_in_fp32_beside_a_model_in_bf16() -> None:
    block, _ = qwen3_moe()
    experts = Experts(block.experts.gate_up_proj.data.bfloat16(), block.experts.down_proj.data.bfloat16(), "silu")
    layer = MoE(Linear(block.gate.weight.data), experts, Routing(4))
    x = torch.randn(3, HIDDEN).bfloat16()
    with torch.inference_mode():
        out = layer(x)
        wanted = block(x.float()[None])[0]
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), wanted, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("num_tokens", [1, 3, 70])
def test_large_experts_are_packed_for_a_cpu(num_tokens: int) -> None:
    """Their rows are filled up to a few sizes, and what was filled in is taken off again."""
    weight = torch.randn(3, 1024, 512) / 20
    layer = Experts(weight.clone(), weight[:, :512, :].clone(), "silu")
    assert all(matrix.is_mkldnn for matrix in layer.gate_up)
    x, ids = torch.randn(num_tokens, 512), torch.tensor([[0, 2]] * num_tokens, dtype=torch.int32)
    weights = torch.full((num_tokens, 2), 0.5)
    plain = Experts([*weight], [*weight[:, :512, :]], "silu")
    with torch.inference_mode():
        torch.testing.assert_close(layer(x, ids, weights), plain(x, ids, weights), rtol=1e-4, atol=1e-4)
