"""The parts of scripts/gpu_check, scripts/bench_kernels and `scripts/bench_engine --device`.

environment   whether the checks can run here, and what is missing
wheels        packages for a machine without a package index
stages        a list of stages, each in its own process with a time limit, and their results
report        the table, results.json, results.md, the archive
pytest_stage  tests as a stage
ceilings      limits of this GPU: copy GB/s, GEMM TFLOP/s
roofline      the least time of a step, from a model's shape and the ceilings; the target figures
engine        an engine around a model of random weights
compiling     compiles every kernel of the figures before they are measured
figures       the measured figures
drafts        steps with drafts: their time, and what they bring at most; what drafters with weights add
first_start   the self-check of a first start
families      the figures of windowed, recurrent and mixture models
start         from the command to the first token
activity      the device's activity, from the profiler
profiling     a step kernel by kernel
variants      A and B on one model
counters      hardware counters of the large kernels
kernel_cases  one launch of each kernel at real shapes
tuning        launch settings by measurement
serving       checks over HTTP
sanitizer     accesses beyond a tensor, races
"""
