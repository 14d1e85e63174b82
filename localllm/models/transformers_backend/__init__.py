"""Models without a native decoder: `transformers`' code computes them over localllm's paged KV cache.

    spec.py      the checkpoint's config class as fields of ModelSpec
    module.py    loads the module               layouts.py  puts its matrices into our layouts, quantised ones too
    attention.py replaces its attention        mixers.py   runs its recurrent modules row by row
    model.py     its output head alone, and all of it as a `CausalModel`
    loading.py   compares logits with eager attention on a short prompt, before the model is served
    describe.py  a class in the words of localllm's decoder     recognition.py  whether the two compute the same

This is slower than the native decoder: nothing is fused, and a step launches all of the module's kernels.
"""
