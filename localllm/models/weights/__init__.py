"""A checkpoint's tensors by Llama's names, fused and packed for a device; LoRA adapters; the bytes they hold."""
