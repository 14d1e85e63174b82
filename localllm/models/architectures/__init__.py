"""One configurable decoder, and each family described by its differences from the Llama line."""
