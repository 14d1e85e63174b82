"""One configurable decoder, and each model family described by its differences from Llama."""
