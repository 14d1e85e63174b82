"""What a checkpoint says about itself, read from its config.json before a byte of weights is touched.

Does not know: the machine, what was asked, where weights live in memory (fit.py and loader.py do).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its long-context variants."""

    theta: float = 10_000.0
    variant: str = "default"                 # default, linear, dynamic, llama3, yarn, longrope
    rotary_dim: int = 0                      # leading dimensions of a head that rotate
    parameters: Mapping[str, Any] = field(default_factory=dict)  # the variant's own numbers, named as in config.json


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer, as its differences from the Llama line."""

    architecture: str                        # class name in config.json, e.g. LlamaForCausalLM
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int                        # context the checkpoint was trained (or scaled) for
    rms_norm_eps: float
    hidden_act: str                          # silu, gelu_pytorch_tanh, ...
    tie_word_embeddings: bool
    dtype: str                               # of the stored weights: float32, bfloat16, float16
    rope: RopeSpec
    attention_bias: bool = False             # on q, k, v
    attention_out_bias: bool = False         # on o
    mlp_bias: bool = False
    qk_norm: bool = False                    # RMSNorm over each head of q and k (Qwen3, Gemma 3)
    sliding_window: int | None = None        # tokens a windowed layer sees, itself included
    layer_is_windowed: tuple[bool, ...] = () # per layer; empty: none
    local_rope: RopeSpec | None = None       # of windowed layers where it differs (Gemma 3)
    attention_scale: float | None = None     # None: head_dim ** -0.5
    attention_softcap: float | None = None   # Gemma 2
    final_softcap: float | None = None
    post_norms: bool = False                 # norms after attention and MLP too (Gemma 2/3)
    norm_plus_one: bool = False              # weights stored as w - 1 (Gemma)
    embedding_scale: float | None = None     # Gemma: sqrt(hidden_size)
    eos_token_ids: tuple[int, ...] = ()      # generation_config.json first, config.json else
    bos_token_id: int | None = None
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)  # temperature, top_p, ... of generation_config

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of K and V that one token position holds over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes
