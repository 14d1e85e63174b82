"""Models that read and do not write: text in, one vector or one score out.

    recipe.py    what the checkpoint says: embedding or score, how token states are pooled, what follows
    model.py     the model itself, computed by transformers' code, and the pooling

They are all prefill and keep no cache, so nothing of the decoder's machinery would help them.
"""
