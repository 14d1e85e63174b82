"""Mixture of experts (Shazeer et al. 2017, arXiv:1701.06538): each token is processed by a few experts.

    route         router logits -> top-k expert ids and their weights
    align         ids -> blocks of rows that share one expert, without a sort and without the host;
                  the ordered sum of a token's top-k outputs
    grouped_gemm  one matrix product over all those blocks, each with its expert's weights
    planar_gemm   the same with weights of 4 or 8 bits
    experts       all of it as one operation, after `route`
    weights       the storage formats of a layer's experts

A padding token has the expert id -1 everywhere: it is in no block, and its output is zero.
"""
