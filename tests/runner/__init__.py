"""The runner: tokens in rows, rows in batches, logits to tokens."""
