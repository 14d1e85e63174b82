"""Seconds that running requests may take to finish before their model, their adapter or the server ends them."""

DRAIN_S = 30.0
