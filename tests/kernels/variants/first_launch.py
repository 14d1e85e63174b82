"""kernels/first_launch.py: one program that adds 1."""

from localllm.kernels.first_launch import SIZE, _add_one_kernel
from tests.kernels.ahead_of_time import Variant

VARIANTS = [
    Variant(
        "before any weights are read",
        _add_one_kernel,
        signature={"x_ptr": "*fp32", "y_ptr": "*fp32"},
        constants={"SIZE": SIZE},
        archs=(75, 80, 89, 90, 120),
        max_registers=32,
        hip=True,
    )
]
