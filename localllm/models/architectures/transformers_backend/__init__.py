"""Models without a native decoder: `transformers`' code computes them over localllm's paged KV cache.

    spec.py      the checkpoint's config class as fields of ModelSpec
    model.py     the module, with its attention replaced
    verify.py    compares logits with eager attention on a short prompt, before the model is served

This is slower than the native decoder: nothing is fused, and a step launches all of the module's kernels.
"""
