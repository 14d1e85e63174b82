"""Models that embed or score instead of generating: text in, one vector or score out.

    recipe.py    the task, how token states are pooled, and what follows, as the checkpoint says
    model.py     the model, computed by transformers' code, and the pooling
    heads.py     heads of rewards and of token vectors, for which transformers has no class

They only prefill and keep no cache, so they do not use the decoder's machinery.
"""
