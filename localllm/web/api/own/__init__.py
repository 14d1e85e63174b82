"""Routes that only localllm has: health, the hub's models, running models."""
