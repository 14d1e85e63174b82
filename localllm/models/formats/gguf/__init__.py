"""GGUF files: header, names, config, storage, and the matrices of each block type."""
