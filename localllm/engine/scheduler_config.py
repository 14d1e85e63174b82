"""Limits of the scheduler, as decided by the memory plan (models/fit/)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one scheduler. Token counts are per step unless their name says otherwise."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 4096
    block_size: int = 16
    long_prefill_token_threshold: int = 0  # prefill tokens per step while any request decodes; 0: no cap
    target_step_s: float = 0.0  # longest step with prompt tokens while any request decodes; 0: no limit of time
    fixed_chunk: int = 0  # tokens of a prompt's chunks, which then end at its multiples; 0: any (prefill.py)
    stream_from: int = 0  # tokens of a step that copies weights to the device, with steps of the same length between
    policy: str = "fcfs"  # fcfs, priority
    max_num_queued_reqs: int = 1024
    enable_prefix_caching: bool = True
    watermark: float = 0.01  # share of the pool kept free at admission while something runs
    output_reserve: float = 0.65  # share of its expected output that a request needs room for at admission
    state_interval: int = 256  # tokens of an output from one checkpoint of recurrent states to the next
    encoder_rows: int = 0  # rows of encoded pictures that are kept; 0: the model does not see
    encoder_budget: int = 0  # rows that one step encodes: as many as the largest picture has
    num_stages: int = 1  # pipeline stages of the runner
    num_extra_cohorts: int = 0  # cohorts beyond one per stage; one of them hides the host's work between two steps

    @property
    def num_cohorts(self) -> int:
        """Return the steps that a pipeline has in flight, each with other requests; 1 without a pipeline."""
        return self.num_stages + self.num_extra_cohorts if self.num_stages > 1 else 1
