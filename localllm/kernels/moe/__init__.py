"""Mixture of experts (Shazeer et al. 2017, arXiv:1701.06538): each token runs through the few experts it is sent to.

    route         router logits -> top-k expert ids and their weights
    align         ids -> blocks of rows that share one expert, without a sort and without the host
    grouped_gemm  one matrix product over all those blocks, each with its expert's weights
    planar_gemm   the same with weights of 4 or 8 bits
    combine       the ordered sum of a token's top-k answers
    experts       all of it as one operation, after `route`
    weights       what a layer's experts can be made of

A padding token has the expert id -1 everywhere: it takes no block, and its answer is zero.
"""
