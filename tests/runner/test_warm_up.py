"""After the warm-up no step compiles a kernel, whatever its size and whatever its requests ask."""

from typing import Any

import pytest
import torch

from localllm.engine.params import SamplingParams
from localllm.engine.step import NewSlot, Row, StepPlan
from localllm.kernels.launch import HAS_TRITON, INTERPRETED
from localllm.runner.graphs import Replay
from tests.runner.served import NUM_SEQS, SERVED, Served, Step, runner_of

if not HAS_TRITON or INTERPRETED:
    pytest.skip("notes what a GPU would compile", allow_module_level=True)

from tests.runner.pretend_gpu import pretend_gpu

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


SIZES: list[tuple[int, tuple[int, ...]]] = [
    *((n, ()) for n in range(1, NUM_SEQS + 1)),
    *((0, (n,)) for n in (2, 3, 5, 9, 15, 16, 17, 31, 33, 47, 63, 64, 65, 75, 97, 100, 129, 200, 257, 380, 400, 700)),
    *((0, (n,)) for n in (769, 1000, 1025, 1500, 1999, 2048)),
    *((n, (m,)) for n, m in ((1, 2), (3, 30), (8, 100), (17, 500), (23, 1030))),
    (2, (3, 40, 5)),
]
FEW: list[tuple[int, tuple[int, ...]]] = [(1, ()), (2, ()), (3, ()), (16, ()), (0, (2,)), (0, (17,)), (2, (3, 70))]


def steps_of(served: Served) -> list[Step]:
    """Return steps of every size, and steps with every parameter where the sampler differs from other models'."""
    asked = ASKED if served.samples_in_every_way else ASKED[:3]
    return [
        *(
            Step(*size, each)
            for size in [*SIZES, *((n, ()) for n in range(NUM_SEQS + 1, served.num_seqs + 1))]
            for each in ASKED[:3:2]
        ),
        *(Step(*size, each, masked) for size in FEW for each in asked for masked in (False, True)),
    ]


@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "graphs"])
@pytest.mark.parametrize(
    "served", [pytest.param(each, id=each.name, marks=[] if each.often else pytest.mark.slow) for each in SERVED]
)
def test_nothing_compiles_late(served: Served, graphs: bool) -> None:
    """Without graphs no step is padded to a shape that was recorded: each size meets the kernels as it is."""
    with pretend_gpu(served.arch) as compiled:
        runner = runner_of(served, run_again if graphs else None)
        runner.warm_up()
        while runner.use_idle_time():
            pass
        assert compiled.new
        late: dict[str, Step] = {}
        for step in steps_of(served):
            compiled.new.clear()
            step.run(runner, served)
            late |= dict.fromkeys(compiled.new, step)
        runner.close()
    assert not late, "\n".join(f"{key}\n    first in: {step}" for key, step in late.items())


def test_the_host_reads_nothing_between_the_forward_pass_and_the_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that the host reads of a device's tensor would make it wait for the step."""
    with pretend_gpu():
        runner = runner_of(SERVED[0], None)
        runner.warm_up()
        new = NewSlot(0, "r", [1, 2, 3], 3, SamplingParams(temperature=0.7), (), 0, max_drafts=15)
        plans = [
            StepPlan(1, (Row(0, "r", 0, 3, ((1,),), True),), (new,), propose=15),
            StepPlan(2, (Row(0, "r", 3, 6, (), True, (), None, 5),), propose=15),
            StepPlan(3, (Row(0, "r", 9, 16, (), True, (), None, 15),), propose=15),
        ]
        pending = []
        with monkeypatch.context() as patch:
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
