"""Models that read a whole input at once: they embed, score or classify, and generate nothing.

    recipe.py    the task, how token states are pooled, and what follows, as the checkpoint says
    model.py     the model, computed by transformers' code, the pooling, and heads for which transformers has no class

They only prefill and keep no cache, so they do not use the decoder's machinery.
"""
