"""The demo model and its training loop, in plain torch on a CPU.

Rows are filled with whole conversations, one after another, up to their length. The loss counts the assistant's text
fully and everything else a little. The learning rate stays flat and then falls along a cosine to zero.
Does not know: what the conversations are about.
"""

import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from .corpus import Message, conversations, render
from .vocabulary import VOCAB_SIZE

END_OF_TEXT, IM_END = 0, 2
CONTEXT = 2048
OTHERS_WEIGHT = 0.1  # loss weight of tokens that the assistant did not write
ROW_LENGTHS = {128: 0.15, 256: 0.40, 512: 0.30, 1024: 0.15}


@dataclass(frozen=True, slots=True)
class Recipe:
    """One training run. The rate is flat for the share `flat` of the steps, then falls along a cosine to zero."""

    steps: int
    seed: int = 7
    tokens_per_step: int = 2048
    peak_rate: float = 2e-3
    warmup_steps: int = 100
    flat: float = 0.5
    weight_decay: float = 0.05

    def rate(self, step: int) -> float:
        fall = max(0.0, (step / self.steps - self.flat) / (1 - self.flat))
        return (
            self.peak_rate * min(1.0, (step + 1) / self.warmup_steps) * 0.5 * (1 + math.cos(math.pi * min(1.0, fall)))
        )


def new_model(seed: int) -> LlamaForCausalLM:
    """Return a Llama with random weights; projections into the residual stream start smaller, as in GPT-2."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=CONTEXT,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=IM_END,
            pad_token_id=END_OF_TEXT,
        )
    )
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.weight.mul_(1 / math.sqrt(2 * len(model.model.layers)))
    return model


def encode(
    tokenizer: Tokenizer, messages: list[Message], tools: list[dict[str, Any]] | None
) -> tuple[list[int], list[float]]:
    """Return the token ids of a conversation, and the loss weight of each."""
    ids: list[int] = []
    weights: list[float] = []
    for text, is_answer in render(messages, tools):
        piece = tokenizer.encode(text, add_special_tokens=False).ids
        ids += piece
        weights += [1.0 if is_answer else OTHERS_WEIGHT] * len(piece)
    return [*ids, END_OF_TEXT], [*weights, OTHERS_WEIGHT]


def batches(tokenizer: Tokenizer, seed: int, tokens_per_step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield endless (ids, weights), both [rows, length + 1], with rows * length = tokens_per_step."""
    rng = random.Random(seed)
    stream = conversations(seed)
    while True:
        length = rng.choices(list(ROW_LENGTHS), list(ROW_LENGTHS.values()))[0]
        rows: list[tuple[list[int], list[float]]] = []
        for _ in range(max(1, tokens_per_step // length)):
            ids: list[int] = []
            weights: list[float] = []
            while len(ids) <= length:
                more_ids, more_weights = encode(tokenizer, *next(stream))
                ids += more_ids
                weights += more_weights
            rows.append((ids[: length + 1], weights[: length + 1]))
        yield torch.tensor([ids for ids, _ in rows]), torch.tensor([weights for _, weights in rows])


def train(
    tokenizer: Tokenizer, recipe: Recipe, checkpoint: Path, *, resume: bool, save_every: int = 100
) -> LlamaForCausalLM:
    """Train to `recipe.steps`, writing `checkpoint` periodically; with `resume`, continue from it."""
    model = new_model(recipe.seed)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.98), fused=True)
    step = 0
    if resume and checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    stream = batches(tokenizer, recipe.seed + step, recipe.tokens_per_step)
    started, first, mean_loss = time.monotonic(), step, 0.0
    model.train()
    while step < recipe.steps:
        ids, weights = next(stream)
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        losses = functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = (losses * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        mean_loss = loss.item() if step == first + 1 else 0.98 * mean_loss + 0.02 * loss.item()
        if step % 50 == 0 or step == recipe.steps:
            rate, speed = recipe.rate(step), (step - first) * recipe.tokens_per_step / (time.monotonic() - started)
            print(
                f"step {step}/{recipe.steps} loss={mean_loss:.4f} rate={rate:.1e} tokens_per_s={speed:.0f}",
                flush=True,
            )
        if step % save_every == 0 or step == recipe.steps:
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            partial = checkpoint.with_suffix(".part")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, partial)
            partial.replace(checkpoint)
    return model.eval()


@torch.no_grad()
def answer(
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    messages: list[Message],
    tools: list[dict[str, Any]] | None = None,
    max_tokens: int = 160,
) -> tuple[str, bool]:
    """Return the greedy answer to a conversation, and whether the model ended it by itself."""
    prompt = "".join(text for text, _ in render(messages, tools)) + "<|im_start|>assistant\n"
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False).ids])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=IM_END,
        pad_token_id=END_OF_TEXT,
    )
    new = out[0, ids.shape[1] :].tolist()
    return tokenizer.decode(new, skip_special_tokens=True), new[-1] == IM_END


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Save bf16 weights, config.json and generation_config.json, with fields that every Llama loader reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    c = model.config
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_hidden_layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "hidden_act": c.hidden_act,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": c.initializer_range,
        "bos_token_id": None,
        "eos_token_id": IM_END,
        "pad_token_id": END_OF_TEXT,
        "use_cache": True,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"eos_token_id": [IM_END, END_OF_TEXT], "pad_token_id": END_OF_TEXT, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
