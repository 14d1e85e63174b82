"""Tiny random encoder-decoders of text, as folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.tiny import VOCAB_SIZE, save_tiny_tokenizer

_BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "max_position_embeddings": 64,
    "init_std": 0.3, "decoder_start_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "forced_eos_token_id": None,
}  # fmt: skip
_T5 = {
    "d_model": 32, "d_kv": 12, "num_layers": 2, "num_heads": 4, "d_ff": 48,
    "initializer_factor": 2.0, "decoder_start_token_id": 0, "eos_token_id": 2, "relative_attention_max_distance": 24,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("bart", {**_BART, "scale_embedding": True, "forced_bos_token_id": 5}),
    "mbart": ("mbart", _BART),
    "marian": ("marian", {**_BART, "activation_function": "silu"}),
    "pegasus": ("pegasus", {**_BART, "activation_function": "relu", "scale_embedding": True}),
    "m2m_100": ("m2m_100", _BART),
    "t5": ("t5", _T5),
    "flan_t5": ("t5", {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("mt5", _T5),
    "umt5": ("umt5", _T5),
}
LANGUAGES = ("__de__", "__en__")


def save_encoder_decoder(path: Path, family: str, seed: int = 0, **more: Any) -> Path:
    """Save a tiny random model. Norms, biases and what is added to the logits are shaken, so that each counts.
    more: further fields of its config."""
    import torch
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    kind, sizes = FAMILIES[family]
    config = AutoConfig.for_model(kind, vocab_size=VOCAB_SIZE, **{**sizes, **more})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForSeq2SeqLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
            if hasattr(model, "final_logits_bias"):
                model.final_logits_bias.normal_(std=0.5)
    model.save_pretrained(path)
    save_tiny_tokenizer(path, ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *LANGUAGES])
    return path


def load_reference(path: Path) -> Any:
    from transformers import AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM.from_pretrained(path, attn_implementation="eager").eval()
