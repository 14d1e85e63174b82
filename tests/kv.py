"""Sizes of a small KV cache over all groups of a model."""

from localllm.engine.memory.ledger import Ledger
from localllm.models.spec.model_spec import ModelSpec, kv_groups


def of_each(spec: ModelSpec, num_blocks: int) -> tuple[int, ...]:
    """Return the same number of blocks for each KV group."""
    return (num_blocks,) * len(kv_groups(spec))


def ledger_of(spec: ModelSpec, num_blocks: int, block_size: int) -> Ledger:
    """Return a ledger with the same number of blocks for each KV group, in which windowed groups keep every token."""
    return Ledger(of_each(spec, num_blocks), block_size)


def windowed_ledger(spec: ModelSpec, num_blocks: tuple[int, ...], block_size: int, step_tokens: int) -> Ledger:
    """Return a ledger in which windowed groups give back what is before their windows."""
    windows = tuple(group.window for group in kv_groups(spec))
    return Ledger(num_blocks, block_size, windows, step_tokens=step_tokens)
