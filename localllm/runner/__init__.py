"""Mechanism: plans into forward passes, logits into tokens. Everything here knows torch; nothing decides who runs.

runner      the engine's `Runner`: forward, sample, result
batch       what every slot holds, and one step's inputs made of it
kv_cache    the tensors behind the block tables
sampling    the slots' sampling parameters      sampler     logits to tokens, in a documented order
edits       penalties, biases, masks            selection   the likeliest tokens without a sort
noise       randomness keyed by request         logprobs    of the raw model
fake        the same contract without a model, for tests of the engine
"""
