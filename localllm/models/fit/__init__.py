"""Whether a model fits into this machine, and how well: arithmetic, no device.

    plan.py    what will be done, or the refusal with the numbers
"""

from localllm.models.fit.plan import LOGITS_ROWS, Measured, MemoryPlan, kv_bytes_per_token, plan_memory

__all__ = ["LOGITS_ROWS", "Measured", "MemoryPlan", "kv_bytes_per_token", "plan_memory"]
