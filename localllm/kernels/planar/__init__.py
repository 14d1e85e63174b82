"""Weights of 4 and 8 bits in planes, and the product with them: layout, unpacking, kernels, launches."""
