"""Small models in every way of serving whose steps have kernels of their own, and steps of every kind for them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from localllm.engine.params import SamplingParams
from localllm.engine.step import NewSlot, Row, StateUse, StepPlan, TokenMasks
from localllm.kernels.launch import LaunchOptions
from localllm.models.decoder.builder import DecoderBuilder
from localllm.models.layers.linear import Linear
from localllm.models.layers.lora import LoraBank, LoraLimits, LoraPart
from localllm.models.read_spec import spec_of_config
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.shard import local_spec, shards_of
from localllm.runner.device_drafts import DRAFT_WIDTHS
from localllm.runner.graphs import Capture
from localllm.runner.kv_cache import KVCache, StateCache
from localllm.runner.runner import TorchRunner
from scripts.random_weights import SHAPES, RandomTensors, WeightFormat
from tests.kv import of_each

CPU = torch.device("cpu")
BLOCK, NUM_SEQS, BUDGET = 64, 24, 2048
ADAPTERS = LoraLimits(max_loras=2, max_rank=16)


@dataclass(frozen=True)
class Served:
    """A small model, and how it is served."""

    name: str
    shape: dict[str, Any] = field(default_factory=dict)  # fields of config.json; those left out are DENSE's
    weights: WeightFormat = "16-bit"
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: str = ""  # empty: as dtype
    arch: int = 90
    deterministic: bool = False
    adapters: bool = False
    heads: tuple[int, ...] = ()  # KV heads of each tensor-parallel rank; (): the model is not split
    rank: int = 0
    num_seqs: int = NUM_SEQS
    samples_in_every_way: bool = False  # else with a few parameters
    often: bool = False  # else only where slow tests run

    @cached_property
    def spec(self) -> ModelSpec:
        return spec_of_config({**DENSE, **self.shape} if "model_type" not in self.shape else self.shape)


DENSE: dict[str, Any] = {
    **SHAPES["tiny"], "vocab_size": 4608, "hidden_size": 256, "intermediate_size": 2048, "head_dim": 64,
    "num_hidden_layers": 1,
}  # fmt: skip
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
FOUR_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
WINDOWS = {
    "architectures": ["Gemma3ForCausalLM"], "sliding_window": 128, "query_pre_attn_scalar": 64, "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"], "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
SINKS = {
    "architectures": ["GptOssForCausalLM"], "num_hidden_layers": 2, "sliding_window": 128, "num_local_experts": 8,
    "num_experts_per_tok": 2, "intermediate_size": 256, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
DELTA = {
    "architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 2, "full_attention_interval": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
MAMBA = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "num_hidden_layers": 2, "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4,
    "mamba_expand": 2, "num_local_experts": 0, "shared_intermediate_size": 512, "attention_multiplier": 0.125,
}  # fmt: skip
CONVOLUTION = {
    "architectures": ["Lfm2ForCausalLM"], "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"],
    "conv_L_cache": 3, "conv_bias": False, "block_auto_adjust_ff_dim": False, "norm_eps": 1e-5,
}  # fmt: skip
LAYER_NORMS = {
    "architectures": ["StableLmForCausalLM"], "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25,
    "use_qkv_bias": True,
}  # fmt: skip
LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 2, "first_k_dense_replace": 1,
    "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2,
    "moe_intermediate_size": 128, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "norm_topk_prob": True,
}  # fmt: skip
SERVED = [
    Served("dense", samples_in_every_way=True, often=True),
    Served("int4", weights="int4", kv_dtype="int8", often=True),
    Served("fp8", weights="fp8", kv_dtype="float8_e4m3fn"),
    Served("int8", weights="int8"),
    Served("mixture", MIXTURE, often=True),
    Served("mixture-int4", MIXTURE, "int4"),
    Served("windows", WINDOWS, often=True),
    Served("windows-int8-cache", WINDOWS, kv_dtype="int8"),
    Served("sinks", SINKS),
    Served("delta", DELTA, often=True),
    Served("delta-int4", DELTA, "int4"),
    Served("mamba", MAMBA),
    Served("convolution", CONVOLUTION),
    Served("layer-norms", LAYER_NORMS),
    Served("latent", LATENT),
    Served("latent-fp8", LATENT, "fp8"),
    Served("adapters", adapters=True),
    Served("adapters-int4", weights="int4", adapters=True),
    Served("turing", dtype=torch.float16, arch=75, samples_in_every_way=True),
    Served("turing-adapters", dtype=torch.float16, arch=75, adapters=True),
    Served("turing-mixture", MIXTURE, dtype=torch.float16, arch=75),
    Served("blackwell", arch=120, samples_in_every_way=True),
    Served("many", num_seqs=200),
    Served("many-int4", weights="int4", num_seqs=200),
    Served("deterministic", deterministic=True),
    Served("deterministic-int4", weights="int4", deterministic=True),
    Served("deterministic-mixture", MIXTURE, deterministic=True),
    Served("deterministic-windows", WINDOWS, deterministic=True),
    Served("deterministic-delta", DELTA, deterministic=True),
    *(Served(f"rank-{rank}", FOUR_HEADS, heads=(1, 3), rank=rank) for rank in (0, 1)),
    *(Served(f"mixture-rank-{rank}", {**MIXTURE, **FOUR_HEADS}, heads=(2, 2), rank=rank) for rank in (0, 1)),
]


class Rank:
    """A `Group` in which the other ranks' parts are this rank's: sizes are right, numbers are not."""

    def __init__(self, index: int, size: int) -> None:
        self.index, self.size = index, size

    def sum_(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        return x.new_zeros(*x.shape[:-1], sum(sizes))

    def gather_to_first(self, x: Tensor, sizes: Sequence[int]) -> Tensor | None:
        return self.gather(x, sizes) if self.index == 0 else None

    def broadcast_(self, x: Tensor) -> Tensor:
        return x


class AdaptedTensors(RandomTensors):
    """Random weights whose layers take adapters."""

    def __init__(self, bank: LoraBank, dtype: torch.dtype, weights: WeightFormat) -> None:
        super().__init__(CPU, dtype, 0, weights)
        self._bank = bank

    def linear(self, stems: Sequence[str], shape: tuple[int, int], **options: Any) -> Linear:
        layer = super().linear(stems, shape, **options)
        if stems[0] == "lm_head":
            return layer
        rows, columns = shape
        parts = [LoraPart((), 0, rows, None, (rows, columns))] * len(stems)
        return self._bank.linear(layer.weight, layer.bias, parts, self.dtype, CPU, packer=self.packer)


def runner_of(served: Served, capture: Capture | None) -> TorchRunner:
    spec = served.spec
    shard, group, bank = None, None, None
    source = RandomTensors(CPU, served.dtype, 0, served.weights)
    if served.heads:
        shard, group = shards_of(spec, served.heads)[served.rank], Rank(served.rank, len(served.heads))
    if served.adapters:
        bank = LoraBank(ADAPTERS)
        source = AdaptedTensors(bank, served.dtype, served.weights)
    with torch.inference_mode():
        model = DecoderBuilder(spec, source, CPU, served.dtype, shard, group).build(BUDGET)
    model.lora = bank
    own = spec if shard is None else local_spec(spec, shard)
    options = LaunchOptions(deterministic=served.deterministic)
    kv_dtype = served.kv_dtype or str(served.dtype).removeprefix("torch.")
    kv = KVCache(own, of_each(own, 2 * NUM_SEQS * (BUDGET // BLOCK)), BLOCK, CPU, kv_dtype)
    return TorchRunner(
        model, own, kv, max_num_seqs=served.num_seqs, max_num_batched_tokens=BUDGET, max_model_len=BUDGET,
        block_size=BLOCK, device=CPU, capture=capture, staged=True, launch_options=options,
        group=group, states=StateCache(own, 1 + 2 * served.num_seqs, CPU, served.dtype),
    )  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One step: decode rows, prompts of so many tokens, and what each request asks for."""

    decodes: int
    prompts: tuple[int, ...] = ()
    asked: dict[str, Any] = field(default_factory=dict)
    masked: bool = False  # the first row has a grammar

    def run(self, runner: TorchRunner, served: Served) -> None:
        """Run the step, and without prompts one with drafts of each width; all is forgotten then."""
        groups, propose = len(runner.num_blocks), runner.drafts.most
        params = SamplingParams(**self.asked)
        lengths = [BLOCK + 1] * self.decodes + list(self.prompts)
        adapter = 0 if served.adapters else -1
        news, rows = [], []
        for slot, length in enumerate(lengths):
            computed = BLOCK if slot < self.decodes else 0
            cached = ((1 + slot,) if computed else (),) * groups
            blocks = (tuple(range(100, 100 + -(-length // BLOCK) - len(cached[0]))),) * groups
            news.append(NewSlot(
                slot, f"r{slot}", [1] * length, length, params, cached, computed, adapter=adapter, max_drafts=propose
            ))  # fmt: skip
            state = None
            if served.spec.layer_kinds:
                state = StateUse(1 + slot if computed else -1, 1 + slot, 1 + served.num_seqs + slot)
            rows.append(Row(slot, f"r{slot}", computed, length - computed, blocks, True, (), state))
        plans = [StepPlan(1, tuple(rows), tuple(news), propose=propose)]
        for width in DRAFT_WIDTHS if not self.prompts else ():
            if (1 + width) * self.decodes <= runner.drafts.step_tokens:
                drafted = (
                    Row(s, f"r{s}", BLOCK + 1, 1 + width, (), True, (),
                        StateUse(1 + s, 1 + s) if served.spec.layer_kinds else None, width)
                    for s in range(self.decodes)
                )  # fmt: skip
                plans.append(StepPlan(len(plans) + 1, tuple(drafted), propose=propose))
        words = -(-runner.vocab_size // 32)
        masks = TokenMasks((0,), np.full((1, words), -1, np.int32)) if self.masked else None
        for plan in plans:
            runner.forward(plan)
            runner.sample(plan, masks).result()
        runner.forward(StepPlan(len(plans) + 1, (), (), tuple(range(len(lengths)))))
        runner.reset()
