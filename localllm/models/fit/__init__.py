"""The fit of a model into this machine, with numbers: arithmetic, without a device.

    plan.py                the devices of a model, and a plan for them or a refusal with numbers
    plan_attempt.py        the sizes on given devices
    memory_plan.py         the memory plan, and the report of planned and measured memory
    devices.py             the devices that a model may use, their connections and types, and the number of ranks
    shard_sizes.py         the shares of a model's ranks
    far.py                 experts in RAM beside a GPU, and the speed of such a model
    speed.py               the speeds of a model on a machine, before any load
    balance.py             the solver behind them
    rank_budget.py         the memory of one rank
    activation_bytes.py    the memory of one step besides weights and KV cache
    cache_sizes.py         blocks of each KV group, and the number of recurrent states
    conversation_bytes.py  the memory of one conversation at a length
    options.py             alternative settings when a model does not fit
    estimate.py            all devices of a machine side by side
    checkpoint.py          the fit of a checkpoint, from its headers
    pooling.py             the memory plan of a model that embeds or scores

Does not know: how the memory is used.
"""

from localllm.models.fit.activation_bytes import LOGITS_ROWS, kv_bytes_per_token, kv_cache_bytes
from localllm.models.fit.estimate import Estimate, estimate
from localllm.models.fit.memory_plan import MemoryPart, MemoryPlan, MemoryReport
from localllm.models.fit.options import FitOption, fit_options, option_rows, plan_memory
from localllm.models.fit.rank_budget import Measured, RankPlan, ResidentBytes

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
