"""What scripts/gpu_check, scripts/bench_kernels and `scripts/bench_engine --device` are made of.

environment   may anything run here at all, and what is missing
wheels        packages for a machine without a package index
stages        a list of stages, each in a process of its own with a time limit; what they report
report        the table, results.json, results.md, the archive
pytest_stage  tests as a stage
ceilings      what this GPU can do: copy GB/s, GEMM TFLOP/s
roofline      from a model's shape and the ceilings to the least time a step can take; the figures asked
engine        an engine around a model of random weights
compiling     every kernel that the figures need, before they are measured
figures       the measured ones
activity      what the device did, as the profiler saw it
profiling     a step kernel by kernel
variants      A and B on one model
counters      hardware counters of the large kernels
kernel_cases  one launch of each kernel at real shapes
tuning        launch settings by measurement
serving       over HTTP
sanitizer     accesses beyond a tensor, races
"""
