"""Kernels as they are served, one file per kernel file: `VARIANTS`, a list of ahead_of_time.Variant."""
