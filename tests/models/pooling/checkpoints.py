"""Tiny checkpoints with a tokenizer: one that embeds, one that scores pairs."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.tiny import VOCAB_SIZE, save_tiny_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


def save_bert(path: Path, head: str = "AutoModel", **more: Any) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        getattr(transformers, head).from_config(transformers.BertConfig(**SIZES, **more)).save_pretrained(path)
    save_tiny_tokenizer(path)
    return path


def save_cross_encoder(path: Path) -> Path:
    """Its tokenizer marks the two texts of a pair, as BERT's does."""
    from tokenizers import Tokenizer, processors

    save_bert(path, "AutoModelForSequenceClassification", num_labels=1)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        pair="<|im_start|> $A <|im_end|> $B:1 <|im_end|>:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("<|im_start|>", "<|im_end|>")],
    )
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def save_sentence_transformer(path: Path, **sentence_bert_config: Any) -> Path:
    """A folder of sentence-transformers, its tokenizer with a chat template, with a prompt named query."""
    save_bert(path)
    modules = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    listed = [{"type": f"sentence_transformers.models.{kind}", "path": folder} for folder, kind in modules.items()]
    pooling = {"embedding_dimension": 32, "pooling_mode": "mean", "include_prompt": True}
    (path / "1_Pooling").mkdir()
    for file, content in {
        "modules.json": listed,
        "1_Pooling/config.json": pooling,
        "sentence_bert_config.json": sentence_bert_config,
        "config_sentence_transformers.json": {"prompts": {"query": "Find: "}},
    }.items():
        (path / file).write_text(json.dumps(content))
    return path
