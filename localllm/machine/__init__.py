"""This machine as plain values: processors, GPUs and memory, threads, and the servers that run on it."""
