"""Each model family by its differences from Llama: what its config.json, its tensor names and its GGUF files say."""
