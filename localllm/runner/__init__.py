"""The mechanism that executes plans: forward passes and sampling. Everything here uses torch; scheduling is in engine/.

runner      the engine's `Runner`: forward, sample, result
profiling   the same with named ranges and traces
batch       state of every slot, and one step's inputs made from it
kv_cache    the tensors of K, V and recurrent states
sampling    the slots' sampling parameters      sampler     logits to tokens, in a documented order
edits       penalties, biases, masks            selection   the likeliest tokens without a sort
logprobs    of the raw model
"""
