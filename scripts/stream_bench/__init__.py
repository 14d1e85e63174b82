"""The parts of scripts/bench_streams: an engine on a model with a GPU's timing, a server around it, readers.

Each part is a process of its own, so that readers do not use the interpreter that is being measured.
"""
