"""Scheduling: which requests run, with which blocks, and how results are accounted for. Plain Python, no torch."""
