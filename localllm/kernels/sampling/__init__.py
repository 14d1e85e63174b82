"""Choosing one token per row without sorting the vocabulary and without asking the host anything.

    noise       random numbers from (seed, position, token id)     selection   the order of tokens, in plain torch
    tables      what every slot asks, where kernels can read it    edit        penalties, bias, masks: before the draw
    nucleus     where top_k, top_p and min_p end                   draw        argmax or Gumbel, in two stages
    logprobs    log-softmax of raw logits, ranks, the likeliest

A kernel is told row by row which slot it samples for (-1: padding, does nothing) and how long that slot's text is;
everything else it reads from the tables. So shapes never depend on data and one captured graph serves any requests.
Everybody's order is: larger value first, equal values by lower id.
"""
