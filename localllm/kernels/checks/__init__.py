"""Comparisons of the kernels with plain torch on the device that will serve, and the choice of variants that are right.

    case.py      one comparison: what is launched, and how its result is judged
    plain.py     what all kernels rely on: early launches, graphs, the tensor memory accelerator
    steps.py     kernels of whole numbers, which must be exact: inputs of a step, drafts, sampling
    floats.py    kernels of rounded numbers, at the shapes of a model, with limits from torch's own rounding
    table.py     every kernel with its variants, best first, and its cases
    choose.py    try the variants, stop what hangs, and return the launch options to serve with
    record.py    what was found on this GPU, in a file; and a journal of the case that runs

Does not know: models, requests, graphs of steps.
"""
