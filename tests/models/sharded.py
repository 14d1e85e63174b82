"""Runs the shards of a model in threads, stage after stage, and returns the logits that the whole model would.

Does not know: runners, schedulers.
"""

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from localllm.models.decoder.decoder import DecoderModel
from localllm.models.inputs import GivenEmbeds
from localllm.models.loader import check_all_used, load_model
from localllm.models.read_spec import read_spec
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.shard import Shard, even_heads, shards_of
from tests.models.harness import CPU, ModelHarness, Sequence
from tests.threads import Threads

STEPS = (17, 9, 1, 1)
"""Tokens per step: a prompt in two chunks, then two single tokens."""


def even_shards(path: Path, size: int, **counts: Any) -> list[Shard] | None:
    """Return `size` shards as even as heads allow; None: the heads cannot be divided so."""
    spec = read_spec(path)
    heads = even_heads(spec, size)
    return None if heads is None else shards_of(spec, heads, **counts)


def load_whole(path: Path, spec: ModelSpec | None = None, **options: Any) -> DecoderModel:
    calls: list[tuple[int, int]] = []
    spec = spec or read_spec(path)
    model = load_model(path, spec, CPU, torch.float32, lambda done, total: calls.append((done, total)), **options)
    assert isinstance(model, DecoderModel)
    assert calls[-1][0] == calls[-1][1]  # a shard's progress ends at 100 %
    assert calls == sorted(calls)
    return model


class ShardedModel:
    """All shards of all stages of a checkpoint."""

    def __init__(self, path: Path, *stages: Seq[Shard], spec: ModelSpec | None = None, **options: Any) -> None:
        """spec: with a drafter; None: that of the checkpoint."""
        spec = spec or read_spec(path)
        self.threads = [Threads(len(shards)) for shards in stages]
        self.stages: list[list[DecoderModel]] = []
        for threads, shards in zip(self.threads, stages, strict=True):
            members = threads.members()
            self.stages.append(
                [load_whole(path, spec, shard=s, group=m, **options) for s, m in zip(shards, members, strict=True)]
            )
        check_all_used(spec, [model.unused_tensors for stage in self.stages for model in stage])

    def logits(
        self, tokens: list[int], steps: Seq[int] = STEPS, adapter: int = -1, embeds: Tensor | None = None
    ) -> Tensor:
        """Return the logits at every position. embeds: in place of the first tokens' own."""
        width = len(self.stages[0])
        tasks = [
            lambda index=index: run([stage[index] for stage in self.stages], tokens, steps, adapter, embeds)
            for index in range(width)
        ]
        first, *others = self.threads[0].run(tasks)
        assert first is not None
        assert all(other is None for other in others)
        return first


def run(
    models: Seq[DecoderModel], tokens: list[int], steps: Seq[int] = STEPS, adapter: int = -1,
    embeds: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Run one shard of each stage. Return the logits at every position; None: another shard has them."""
    harnesses = [ModelHarness(model) for model in models]
    sequences = [Sequence(list(tokens), adapter=adapter) for _ in models]
    parts: list[Tensor | None] = []
    for count in steps:
        stream: Tensor | None = None
        for harness, sequence in zip(harnesses, sequences, strict=True):
            inputs = replace(harness._inputs([(sequence, count)], True), embeds=_given(embeds, sequence, count))
            stream = harness.model.forward(inputs, harness.kv_cache, stream)
            sequence.computed += count
        assert stream is not None
        parts.append(models[-1].compute_logits(stream))
    logits = [part for part in parts if part is not None]
    return torch.cat(logits) if logits else None


def _given(embeds: Tensor | None, sequence: Sequence, count: int) -> GivenEmbeds | None:
    own = () if embeds is None else embeds[sequence.computed : sequence.computed + count]
    return GivenEmbeds(torch.arange(len(own)), own) if isinstance(own, Tensor) and len(own) else None
