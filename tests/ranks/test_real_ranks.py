"""Tiny models on real ranks that exchange tensors over gloo: the same tokens as in one process."""

import sys
from pathlib import Path

import pytest

from localllm.engine.step import Runner
from localllm.models.fit import MemoryPlan
from localllm.models.read_spec import read_spec
from localllm.ranks.executor import RankExecutor
from localllm.runner.executor import LocalExecutor
from tests.ranks.real import HARDWARE, assert_closed_to_others, config_for, executor_of, plan_for, tokens_of
from tests.tiny import make_tiny_model


def test_two_ranks_generate_the_tokens_of_one_process(checkpoint: Path, alone: tuple[Runner, MemoryPlan]) -> None:
    config = config_for(tensor_parallel_size=2)
    executor, plan = executor_of(checkpoint, config)
    try:
        assert executor.weights_bytes == plan.weights_bytes
        runner, _ = executor.open_runner(config, plan, HARDWARE, lambda text: None)
        assert tokens_of(runner, plan, temperature=0.0) == tokens_of(*alone, temperature=0.0)
        assert tokens_of(runner, plan, seed=7) == tokens_of(*alone, seed=7)
        assert tokens_of(runner, plan, repeats=True, temperature=0.0) == tokens_of(
            *alone, repeats=True, temperature=0.0
        )
        assert_closed_to_others(executor)
        runner.close()  # type: ignore[attr-defined]
        executor.move_to_host()
        executor.move_to_device()
        again, _ = executor.open_runner(config, plan, HARDWARE, lambda text: None)
        assert tokens_of(again, plan, temperature=0.0) == tokens_of(*alone, temperature=0.0)
        assert_closed_to_others(executor)
    finally:
        executor.close()


def test_two_stages_of_two_shards_generate_the_tokens_of_one_process(
    checkpoint: Path, alone: tuple[Runner, MemoryPlan]
) -> None:
    config = config_for(tensor_parallel_size=2, pipeline_parallel_size=2)
    executor, plan = executor_of(checkpoint, config)
    try:
        runner, _ = executor.open_runner(config, plan, HARDWARE, lambda text: None)
        assert runner.num_stages == 2
        assert tokens_of(runner, plan, temperature=0.0) == tokens_of(*alone, temperature=0.0)
        assert tokens_of(runner, plan, repeats=True, temperature=0.0) == tokens_of(
            *alone, repeats=True, temperature=0.0
        )
        bubbles = runner.stats().bubble_ratios()
        assert set(bubbles) == {0, 1}
        assert all(0 < ratio < 1 for ratio in bubbles.values())
        assert {rank.device_bytes for rank in runner.stats().ranks} == {2**34}
    finally:
        executor.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["shards", "stages"]
)
def test_ranks_with_recurrent_states_generate_the_tokens_of_one_process(sizes: dict[str, int], tmp_path: Path) -> None:
    """Also after a sleep, and with drafts where they are verified. Each rank holds the bytes that were planned."""
    path = make_tiny_model(tmp_path / "model", "falcon_h1")
    config, spec = config_for(**sizes), read_spec(path)
    whole = plan_for(path, config_for())
    local = LocalExecutor.load(path, spec, config_for(), whole, lambda loaded, total: None)
    alone = local.open_runner(config_for(), whole, HARDWARE, lambda text: None)
    executor, plan = executor_of(path, config)
    try:
        assert executor.weights_bytes == plan.weights_bytes
        assert plan.num_places == whole.num_places
        assert 0 < plan.ranks[1].state_bytes < whole.state_bytes
        runner, _ = executor.open_runner(config, plan, HARDWARE, lambda text: None)
        assert bool(runner.drafts.most) == ("tensor_parallel_size" in sizes)
        for asked in ({"temperature": 0.0}, {"seed": 7}, {"repeats": True, "temperature": 0.0}):
            assert tokens_of(runner, plan, **asked) == tokens_of(*alone, **asked)
        runner.close()  # type: ignore[attr-defined]
        executor.move_to_host()
        executor.move_to_device()
        again, _ = executor.open_runner(config, plan, HARDWARE, lambda text: None)
        assert tokens_of(again, plan, temperature=0.0) == tokens_of(*alone, temperature=0.0)
    finally:
        executor.close()
        local.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("gemma4", {"pipeline_parallel_size": 2}),  # per-layer embeddings behind the stream
        ("gemma3n", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),  # and several streams
        ("laguna", {"tensor_parallel_size": 2}),  # layers with unlike numbers of heads
    ],
    ids=["gemma4", "gemma3n", "laguna"],
)
def test_ranks_of_unlike_layers_generate_the_tokens_of_one_process(
    family: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    path = make_tiny_model(tmp_path / "model", family)
    config, whole = config_for(**sizes), plan_for(path, config_for())
    local = LocalExecutor.load(path, read_spec(path), config_for(), whole, lambda loaded, total: None)
    alone = local.open_runner(config_for(), whole, HARDWARE, lambda text: None)
    executor, plan = executor_of(path, config)
    try:
        assert executor.weights_bytes == plan.weights_bytes
        runner, _ = executor.open_runner(config, plan, HARDWARE, lambda text: None)
        for asked in ({"temperature": 0.0}, {"seed": 7}):
            assert tokens_of(runner, plan, **asked) == tokens_of(*alone, **asked)
    finally:
        executor.close()
        local.close()


# ---- recorded steps --------------------------------------------------------------------------------------------------

# NCCL connects a communicator at its first use, which waits and so cannot be recorded: each must have been used before
# the first recording that uses it. All ranks must record the same steps, or one waits in a collective for ever. Whether
# NCCL's own collectives can be recorded, only GPUs can show.
RANK = """
import sys, torch.distributed as dist
from localllm.ranks import rank as process
from localllm.ranks.__main__ import torch_share
from localllm.runner import opening
from localllm.runner.graphs import AgreedCapture

used, within = set(), []  # groups that were used eagerly; whether a step is being recorded

def watch(name):
    call = getattr(dist, name)
    def watched(*given, group=None, **options):
        if within:
            assert group in used, f"{name} connects a communicator while a step is recorded"
        else:
            used.add(group)
        return call(*given, group=group, **options)
    setattr(dist, name, watched)

for name in ("all_reduce", "all_gather", "gather", "broadcast", "send", "isend", "recv"):
    watch(name)

class Record:
    # As CudaCapture does: a step runs once, is recorded, and is replayed. A recording of gloo is the step itself.
    count = 0
    def has_memory(self):
        return True
    def __call__(self, step):
        self.count += 1
        step()
        within.append(True)
        try:
            step()
        finally:
            within.clear()
        if self.count == FAILS[parallel.world.index]:
            raise ValueError("this rank cannot make a graph of what it has recorded")
        return step

make = opening._runner
def with_capture(model, spec, plan, kv, device, capture, options, given, *rest):
    global parallel
    parallel = given
    return make(model, spec, plan, kv, device, AgreedCapture(Record(), given.world, device), options, given, *rest)
opening._runner = with_capture
process.main(torch_share)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("fails", [0, 3], ids=["all record", "one rank fails"])
def test_recorded_steps_of_ranks_give_the_tokens_of_one_process(
    stages: int, fails: int, checkpoint: Path, alone: tuple[Runner, MemoryPlan]
) -> None:
    """Where one rank cannot record a step, all stop recording at that step, and serve on."""
    config = config_for(tensor_parallel_size=2, pipeline_parallel_size=stages, max_num_seqs=4)
    plan = plan_for(checkpoint, config)
    last = len(plan.ranks) - 1
    code = f"FAILS = {[fails if rank == last else 0 for rank in range(last + 1)]}\n{RANK}"
    executor = RankExecutor.load(
        checkpoint, read_spec(checkpoint), config, plan, lambda loaded, total: None, lambda text: None,
        command=(sys.executable, "-c", code),
    )  # fmt: skip
    try:
        runner, _ = executor.open_runner(config, plan, HARDWARE, lambda text: None)
        while runner.use_idle_time():
            pass
        before = runner.stats()
        assert before.captured_graphs > 0
        assert bool(before.failed_graphs) == (fails > 0), before.graph_failure
        assert tokens_of(runner, plan, temperature=0.0) == tokens_of(*alone, temperature=0.0)
        assert tokens_of(runner, plan, seed=7) == tokens_of(*alone, seed=7)
        assert runner.stats().replayed_steps > 0
    finally:
        executor.close()
