"""Whether a model fits into this machine, and how well: arithmetic, no device.

    plan.py    what will be done, or the refusal with the numbers
    step.py    what one step holds beside weights and KV cache
"""

from localllm.models.fit.plan import Measured, MemoryPlan, ResidentBytes
from localllm.models.fit.plan import make_plan as plan_memory
from localllm.models.fit.step import LOGITS_ROWS, kv_bytes_per_token

__all__ = ["LOGITS_ROWS", "Measured", "MemoryPlan", "ResidentBytes", "kv_bytes_per_token", "plan_memory"]
