"""Samples one token per row without sorting the vocabulary and without reading anything on the host.

    noise       random numbers from (seed, position, token id)     selection   the order of tokens, in plain torch
    tables      parameters of every slot, readable by kernels      edit        penalties, bias, masks: before the draw
    nucleus     where top_k, top_p and min_p end                   draw        argmax or Gumbel, in two stages
    logprobs    log-softmax of raw logits, ranks, the likeliest

A kernel receives, per row, the slot it samples for (-1: padding, nothing is done) and the length of that slot's text;
it reads everything else from the tables. Shapes therefore never depend on data, and one captured graph serves any
requests.
All modules use one order: larger value first, equal values by lower id.
"""
