"""The state of a model's ranks for pages and metrics, from what the server knows: no rank is asked.

Does not know: who reads it, records.
"""

from __future__ import annotations

from collections.abc import Sequence

from localllm.engine.step import RankMemory, RankStats
from localllm.models.fit import RankPlan
from localllm.ranks.progress import RankProgress
from localllm.ranks.supervisor import Supervisor

RECORDS_PER_STEP = 2


class RankStates:
    """Reads the state of all ranks of a group, from any thread, also after the group has ended."""

    def __init__(self, supervisor: Supervisor, ranks: Sequence[RankPlan], lost: Sequence[RankStats]) -> None:
        """lost: last states of the ranks that ran the model before these; empty: none did."""
        self._supervisor, self._ranks = supervisor, ranks
        self._lost = {each.rank: each for each in lost}

    def read(self) -> tuple[RankStats, ...]:
        lines = self._supervisor.progress.read_all()
        furthest = max(line.launched for line in lines)
        return tuple(self._state(rank, line, furthest) for rank, line in enumerate(lines))

    def _state(self, rank: int, line: RankProgress, furthest: int) -> RankStats:
        plan, supervisor = self._ranks[rank], self._supervisor
        error, before = supervisor.loss.error, self._lost.get(rank)
        return RankStats(
            rank, plan.stage, plan.shard.index, plan.device, plan.name,
            pid=supervisor.processes[rank].pid,
            is_up=supervisor.is_alive and error is None,
            memory=RankMemory(
                plan.weights_bytes, plan.kv_bytes, plan.activation_bytes, plan.graph_bytes + plan.comm_bytes
            ),
            step_s=line.step_ns / 1e9,
            lag_steps=(furthest - line.launched) // RECORDS_PER_STEP,
            restarts=0 if before is None else before.restarts + 1,
            last_words=str(error) if rank in supervisor.loss.ranks else "" if before is None else before.last_words,
        )  # fmt: skip
