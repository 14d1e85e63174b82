"""The demo model that ships inside the package, so that `localllm up` works offline on the first try.

It is a Llama checkpoint of about four million parameters with its tokenizer, made by scripts/make_demo_model.
README.md beside this file is its model card.
Does not know: torch, how a model is loaded.
"""

from pathlib import Path


def demo_model_path() -> Path:
    """Return the folder with config.json, model.safetensors and tokenizer.json of the demo model."""
    return Path(__file__).resolve().parent
