"""What scripts/bench_streams runs: an engine on a model that takes the time of a GPU, a server around it, readers.

Each part is a process of its own, so that a reader never shares the interpreter whose sharing is measured.
"""
