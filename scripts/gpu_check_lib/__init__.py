"""What scripts/gpu_check, scripts/bench_kernels and `scripts/bench_engine --device` are made of.

environment   may anything run here at all, and what is missing
stages        a list of stages, each in a process of its own with a time limit; what they report
report        the table, results.json, results.md
ceilings      what this GPU can do: copy GB/s, GEMM TFLOP/s
roofline      from a model's shape and the ceilings to the least time a step can take; the figures asked
engine        an engine around a model of random weights
checks        kernels, goldens, graphs, properties on the device
figures       the measured ones
serving       over HTTP
"""
