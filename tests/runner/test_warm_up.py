"""After the warm-up no step compiles a kernel, whatever its size and whatever its requests ask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from localllm.engine.params import SamplingParams
from localllm.engine.step import NewSlot, Row, StepPlan, TokenMasks
from localllm.kernels.launch import HAS_TRITON, INTERPRETED, LaunchOptions
from localllm.models.architectures import decoder
from localllm.runner.graphs import Replay
from localllm.runner.kv_cache import KVCache
from localllm.runner.runner import TorchRunner
from scripts.random_weights import WeightFormat, random_model, shape_spec
from tests.kv import of_each

if not HAS_TRITON or INTERPRETED:
    pytest.skip("notes what a GPU would compile", allow_module_level=True)

from tests.runner.pretend_gpu import pretend_gpu

CPU = torch.device("cpu")
BLOCK, NUM_SEQS, BUDGET = 64, 24, 2048
DENSE = {"vocab_size": 4608, "hidden_size": 256, "intermediate_size": 2048, "head_dim": 64}
MIXTURE = {
    **DENSE, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


@dataclass(frozen=True)
class Served:
    """A small model, and how it is served."""

    name: str
    shape: dict[str, Any]
    weights: WeightFormat = "16-bit"
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None  # None: as dtype
    arch: int = 90
    deterministic: bool = False
    often: bool = False  # else only where slow tests run


SERVED = [
    Served("dense", DENSE, often=True),
    Served("int4", DENSE, "int4", kv_dtype=torch.int8, often=True),
    Served("fp8", DENSE, "fp8", kv_dtype=torch.float8_e4m3fn),
    Served("int8", DENSE, "int8"),
    Served("mixture", MIXTURE, often=True),
    Served("mixture-int4", MIXTURE, "int4"),
    Served("turing", DENSE, dtype=torch.float16, arch=75),
    Served("blackwell", DENSE, arch=120),
    Served("deterministic", DENSE, deterministic=True),
    Served("deterministic-int4", DENSE, "int4", deterministic=True),
    Served("deterministic-mixture", MIXTURE, deterministic=True),
]
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.9, "seed": 3, "top_p": 0.9, "frequency_penalty": 0.5},
    {"temperature": 0.9, "seed": 3, "frequency_penalty": 0.5, "logprobs": 20},
    {"temperature": 1.5, "seed": 4, "top_k": 20, "repetition_penalty": 1.3},
    {"temperature": 1.0, "seed": 5, "min_p": 0.02, "min_tokens": 10, "stop_token_ids": [7, 9]},
    {"temperature": 1.0, "seed": 6, "logit_bias": {3: 2.0}, "allowed_token_ids": [3, 4, 5]},
    {"temperature": 1.0, "seed": 7, "logprobs": 0},
    *({"temperature": 0.0, "prompt_logprobs": k} for k in range(21)),
]


def run_again(step: Replay) -> Replay:
    """A capture as CUDA's: the step runs once before it is recorded; a replay launches nothing."""
    step()
    return lambda: None


def runner_of(served: Served, graphs: bool) -> TorchRunner:
    spec = shape_spec("tiny", **{"num_hidden_layers": 1, **served.shape})
    model = random_model(spec, CPU, served.dtype, weights=served.weights, max_model_len=BUDGET)
    kv = KVCache(spec, of_each(spec, 2 * NUM_SEQS * (BUDGET // BLOCK)), BLOCK, CPU, served.kv_dtype or served.dtype)
    return TorchRunner(
        model, spec, kv, max_num_seqs=NUM_SEQS, max_num_batched_tokens=BUDGET, max_model_len=BUDGET, block_size=BLOCK,
        device=CPU, capture=run_again if graphs else None, staged=True,
        launch_options=LaunchOptions(deterministic=served.deterministic),
    )  # fmt: skip


def step(
    runner: TorchRunner, number: int, decodes: int, prompts: list[int], asked: dict[str, Any], masked: bool
) -> None:
    """One step of so many decode rows and of prompts of these lengths, and one with drafts of the decode rows; all of
    it is forgotten after it."""
    params = SamplingParams(**asked)
    lengths = [BLOCK + 1] * decodes + prompts
    news, rows = [], []
    for slot, length in enumerate(lengths):
        computed = BLOCK if slot < decodes else 0
        cached = (1 + slot,) if computed else ()
        blocks = tuple(range(100, 100 + -(-length // BLOCK) - len(cached)))
        news.append(NewSlot(slot, f"r{slot}", [1] * length, length, params, (cached,), computed))
        rows.append(Row(slot, f"r{slot}", computed, length - computed, (blocks,), True))
    plan = StepPlan(number, tuple(rows), tuple(news))
    runner.forward(plan)
    words = -(-runner.vocab_size // 32)
    masks = TokenMasks((0,), np.full((1, words), -1, np.int32)) if masked else None
    runner.sample(plan, masks).result()
    drafts = min(15, 64 // max(1, decodes) - 1)
    if drafts > 0 and not prompts:
        verified = tuple(Row(s, f"r{s}", BLOCK + 1, 1 + drafts, (), True, (), None, drafts) for s in range(decodes))
        plan = StepPlan(number + 1, verified, propose=15)
        runner.forward(plan)
        runner.sample(plan, masks).result()
    runner.forward(StepPlan(number + 1, (), (), tuple(range(len(lengths)))))
    runner.reset()


SIZES: list[tuple[int, list[int]]] = [
    *((n, []) for n in range(1, NUM_SEQS + 1)),
    *((0, [n]) for n in (2, 3, 5, 9, 15, 16, 17, 31, 33, 47, 63, 64, 65, 75, 97, 100, 129, 200, 257, 380, 400, 700)),
    *((0, [n]) for n in (769, 1000, 1025, 1500, 1999, 2048)),
    *((n, [m]) for n, m in ((1, 2), (3, 30), (8, 100), (17, 500), (23, 1030))),
    (2, [3, 40, 5]),
]
FEW = [(1, []), (2, []), (3, []), (16, []), (0, [2]), (0, [17]), (2, [3, 70])]
STEPS = [
    *((size, asked, False) for size in SIZES for asked in ASKED[:3:2]),
    *((size, asked, masked) for size in FEW for asked in ASKED for masked in (False, True)),
]


@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "graphs"])
@pytest.mark.parametrize(
    "served", [pytest.param(each, id=each.name, marks=[] if each.often else pytest.mark.slow) for each in SERVED]
)
def test_nothing_compiles_late(served: Served, graphs: bool) -> None:
    """Without graphs no step is padded to a shape that was recorded: each size meets the kernels as it is."""
    with pretend_gpu(served.arch) as compiled:
        runner = runner_of(served, graphs)
        runner.warm_up()
        while runner.use_idle_time():
            pass
        assert compiled.new
        late: dict[str, str] = {}
        for number, ((decodes, prompts), asked, masked) in enumerate(STEPS):
            compiled.new.clear()
            step(runner, 2 * number, decodes, prompts, asked, masked)
            for key in compiled.new:
                late[key] = f"{decodes} decodes, prompts {prompts}, {asked}{', a grammar' * masked}"
        runner.close()
    assert not late, "\n".join(f"{key}\n    first in: {where}" for key, where in late.items())


def test_the_host_reads_nothing_between_the_forward_pass_and_the_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that the host reads of a device's tensor would make it wait for the step."""
    with pretend_gpu():
        runner = runner_of(SERVED[0], graphs=False)
        runner.warm_up()
        new = NewSlot(0, "r", [1, 2, 3], 3, SamplingParams(temperature=0.7), (), 0, max_drafts=15)
        plans = [
            StepPlan(1, (Row(0, "r", 0, 3, ((1,),), True),), (new,), propose=15),
            StepPlan(2, (Row(0, "r", 3, 6, (), True, (), None, 5),), propose=15),
            StepPlan(3, (Row(0, "r", 9, 16, (), True, (), None, 15),), propose=15),
        ]
        pending = []
        with monkeypatch.context() as patch:
            patch.setattr(decoder, "has_no_skipped_slot", lambda slots: False)  # reads tensors of a CPU alone
            for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "nonzero"):
                patch.setattr(torch.Tensor, name, _refuse(name))
            for plan in plans:
                runner.forward(plan)
                pending.append(runner.sample(plan))
        assert [len(each.result().rows) for each in pending] == [1, 1, 1]
        runner.close()


def _refuse(name: str) -> Any:
    def read(*args: Any, **options: Any) -> None:
        raise AssertionError(f"the host reads a tensor: {name}")

    return read
