"""Models that have no decoder of ours: the code of `transformers` computes them, over our paged KV cache.

    spec.py      what its config class says, as fields of ModelSpec
    model.py     the module, its attention replaced by ours
    verify.py    our logits against eager ones on a short prompt, before anybody is served

Slower than the native decoder: nothing is fused, and a step launches whatever the module launches.
"""
