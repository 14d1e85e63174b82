"""Weights of low precision on a CPU, laid out for torch's own integer and 4-bit products: what, how, and when."""
