"""The fit of a model into this machine, with numbers: arithmetic, without a device.

    plan.py        the devices of a model, and a plan for them or a refusal with numbers
    attempt.py     the sizes on given devices
    memory_plan.py the memory plan
    devices.py     the devices that a model may use, and their connections
    parallel.py    the number of ranks: as asked, or automatic
    shares.py      the shares of a model's ranks
    split.py       the solver behind them
    rank.py        the memory of one rank
    step.py        memory of one step besides weights and KV cache
    options.py     alternative settings when a model does not fit
    need.py        the memory of one conversation at a length
    estimate.py    all devices of a machine side by side
    checkpoint.py  the fit of a checkpoint, from its headers
    pooling.py     the memory plan of a model that embeds or scores
    report.py      predicted and measured memory

Does not know: how the memory is used.
"""

from localllm.models.fit.estimate import Estimate, estimate
from localllm.models.fit.memory_plan import MemoryPlan
from localllm.models.fit.options import FitOption, fit_options, option_rows, plan_memory
from localllm.models.fit.rank import Measured, RankPlan, ResidentBytes
from localllm.models.fit.report import MemoryPart, MemoryReport
from localllm.models.fit.step import LOGITS_ROWS, kv_bytes_per_token, kv_cache_bytes

__all__ = [
    "LOGITS_ROWS",
    "Estimate",
    "FitOption",
    "Measured",
    "MemoryPart",
    "MemoryPlan",
    "MemoryReport",
    "RankPlan",
    "ResidentBytes",
    "estimate",
    "fit_options",
    "kv_bytes_per_token",
    "kv_cache_bytes",
    "option_rows",
    "plan_memory",
]
