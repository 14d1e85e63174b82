"""Tiny models on real ranks that exchange tensors over gloo: the same tokens as in one process."""

from pathlib import Path

from localllm.engine.step import Runner
from localllm.models.fit import MemoryPlan
from tests.ranks.real import HARDWARE, assert_closed_to_others, config_for, executor_of, tokens_of


def test_two_ranks_generate_the_tokens_of_one_process(checkpoint: Path, alone: tuple[Runner, MemoryPlan]) -> None:
    config = config_for(tensor_parallel_size=2)
    executor, plan = executor_of(checkpoint, config)
    try:
        assert executor.weights_bytes == plan.weights_bytes
        runner, _ = executor.open_runner(config, plan, HARDWARE, lambda text: None)
        assert tokens_of(runner, plan, temperature=0.0) == tokens_of(*alone, temperature=0.0)
        assert tokens_of(runner, plan, seed=7) == tokens_of(*alone, seed=7)
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
        bubbles = runner.stats().bubble_ratios()
        assert set(bubbles) == {0, 1}
        assert all(0 < ratio < 1 for ratio in bubbles.values())
        assert {rank.device_bytes for rank in runner.stats().ranks} == {2**34}
    finally:
        executor.close()
