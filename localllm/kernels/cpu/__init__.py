"""Low-precision weights on a CPU, stored for torch's own integer and 4-bit products."""
