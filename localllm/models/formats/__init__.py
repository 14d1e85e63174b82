"""Checkpoint formats, one per file: each reads its files as named tensors."""
