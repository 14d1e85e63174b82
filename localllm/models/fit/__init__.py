"""Whether a model fits into this machine, and how well: arithmetic, no device.

    plan.py        what will be done, or the refusal with the numbers
    step.py        what one step holds beside weights and KV cache
    ladder.py      what else could be asked when it does not fit
    estimate.py    all devices of a machine side by side, for people and pages
    report.py      the prediction beside what was measured

Does not know: files, how the memory is used.
"""

from localllm.models.fit.estimate import Estimate, estimate
from localllm.models.fit.ladder import FitOption, fit_options, option_rows, plan_memory
from localllm.models.fit.plan import Measured, MemoryPlan, ResidentBytes
from localllm.models.fit.report import MemoryPart, MemoryReport
from localllm.models.fit.step import LOGITS_ROWS, kv_bytes_per_token

__all__ = [
    "LOGITS_ROWS",
    "Estimate",
    "FitOption",
    "Measured",
    "MemoryPart",
    "MemoryPlan",
    "MemoryReport",
    "ResidentBytes",
    "estimate",
    "fit_options",
    "kv_bytes_per_token",
    "option_rows",
    "plan_memory",
]
