"""A rank's share of a real model: its connections, its weights, its runner.

Does not know: records, other ranks' sizes, how a model is divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor

from localllm.errors import DoesNotFit
from localllm.kernels.layer_cache import LayerCache
from localllm.models.decoder.decoder import DecoderModel, Taps
from localllm.models.fit import MemoryPlan
from localllm.models.inputs import CausalModel, ForwardInputs
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.shard import local_spec
from localllm.models.weights.lora import open_lora
from localllm.ranks.group import World
from localllm.ranks.handshake import checkpoint_fingerprint
from localllm.ranks.messages import (
    Connect,
    Connected,
    Loaded,
    Measured,
    Open,
    Opened,
    OpenRunner,
    PutAdapter,
    Report,
)  # fmt: skip
from localllm.ranks.one_shot import choose_sums
from localllm.ranks.rank import Agree, Tell
from localllm.ranks.wire import decode
from localllm.runner.device_memory import make_current
from localllm.runner.drafter_steps import OpenDrafter
from localllm.runner.executor import LocalExecutor
from localllm.runner.kv_cache import KVCache, StateCache
from localllm.runner.opening import (
    Parallel,
    compile_for_rank,
    encoder_of,
    launch_options_of,
    measure,
    open_on,
    with_cache,
)
from localllm.runner.runner import TorchRunner
from localllm.runner.self_check import fall_backs_of, known_choice

PROBES = 1024, 2048  # context lengths that show the bytes of the tables per token


class Pipe(Protocol):
    """The connections of a rank to the same shard of the stages before and after."""

    def receive(self, stream: Tensor) -> Tensor:
        """Receive the stream [T, width] of the stage before, in place."""
        ...

    def send(self, stream: Tensor) -> None:
        """Send the stream [T, width] to the next stage."""
        ...


class StageModel:
    """A pipeline stage as a `CausalModel` of some layers. Hidden states of a stage before the last are its stream."""

    def __init__(self, model: DecoderModel, pipe: Pipe) -> None:
        self._model, self._pipe = model, pipe

    @property
    def spec(self) -> ModelSpec:
        return self._model.spec

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    def forward(self, inputs: ForwardInputs, cache: Sequence[LayerCache | None], *, taps: Taps | None = None) -> Tensor:
        """taps: of a last stage, the hidden state after the final norm or before it alone."""
        model, stream = self._model, None
        if model.embedding is None:
            shape = (len(inputs.token_ids), model.stage_width)
            stream = self._pipe.receive(inputs.token_ids.new_empty(shape, dtype=model.dtype))
        hidden = model.forward(inputs, cache, stream, taps)
        if model.lm_head is None:
            self._pipe.send(hidden)
        return hidden

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor | None:
        return self._model.compute_logits(hidden, out)


class TorchShare:
    """Implements `ranks.rank.Share`. Each method is called by a record, in the order of `ranks.wire.Kind`."""

    samples = answers_later = False

    def connect(self, rank: int, asked: Connect) -> Connected:
        self._device = torch.device(asked.devices[rank])
        make_current(self._device)
        self._world = World(rank, asked, self._device)
        self.samples = self._world.is_last_stage and self._world.group.index == 0
        self.answers_later = self._device.type == "cuda"
        return Connected(self._world.measure_s(), self._world.transport)

    def enter_thread(self) -> None:
        make_current(self._device)  # else the thread would use, and create a context on, the first GPU

    def fingerprint(self, path: str) -> dict[str, str]:
        return checkpoint_fingerprint(Path(path))

    def load(self, asked: bytes, tell: Tell) -> Loaded:
        opening = decode(asked, Open)
        self._spec = local_spec(opening.spec, opening.shard)
        self._world.group.is_deterministic = opening.config.deterministic

        def progress(loaded: int, total: int) -> None:
            tell(Report("", loaded, total))

        self._executor = LocalExecutor.load(
            Path(opening.path), opening.spec, opening.config, opening.plan, progress, opening.shard, self._world.group
        )
        slots = self._executor.adapter_slots
        unused = self._model.unused_tensors
        return Loaded(*self._sizes(), unused, None if slots is None else slots.max_loras)

    def _sizes(self) -> tuple[int, float]:
        """Return the bytes of the weights without tables, and the bytes of the tables per token."""
        short, long = (self._executor.resident_bytes("", "", length, None) for length in PROBES)
        per_token = (long - short) / (PROBES[1] - PROBES[0])
        return round(short - per_token * PROBES[0]), per_token

    def open_runner(self, asked: bytes, agree: Agree, tell: Tell) -> tuple[TorchRunner, Opened]:
        request = decode(asked, OpenRunner)
        self._executor.serve_context(request.plan.max_model_len)
        sums = choose_sums(
            self._world, request.config, getattr(torch, request.plan.dtype), self._spec.hidden_size
        )  # fmt: skip
        with self._world.rehearsing():
            compile_for_rank(
                self._stage, self._spec, request.config, request.plan, self._parallel, lambda text: tell(Report(text)),
                self._executor.drafter,
            )  # fmt: skip
        plan = decode(agree(self._measured(request, tell)), MemoryPlan)
        self._executor.serve_context(plan.max_model_len)
        kv, states, drafter = self._allocate(plan)
        runner = open_on(
            kv, self._stage, self._spec, request.config, plan, lambda text: tell(Report(text)), self._parallel,
            states=states, drafter=drafter,
            encoder=encoder_of(self._executor.tower, self._executor.model, self._spec, plan),
        )  # fmt: skip
        known = known_choice(request.config, self._device, launch_options_of(request.config, self._device))
        fall_backs = tuple(filter(None, (*fall_backs_of(known), sums.fall_back)))
        runner.tell_of_kernels(fall_backs, sums.note)
        notes = *plan.notes, *(each.text for each in fall_backs), *filter(None, [sums.note])
        sizes = runner.num_blocks, runner.block_size, runner.vocab_size
        return runner, Opened(replace(plan, notes=notes), *sizes, runner.drafts, runner.block_bytes)

    def _measured(self, request: OpenRunner, tell: Tell) -> Measured:
        """Run the largest steps on a GPU; all ranks do so at once."""
        if self._device.type != "cuda":
            return Measured()
        tell(Report("measuring one full step"))
        config, options = request.config, launch_options_of(request.config, self._device)
        seen = measure(
            self._stage, self._spec, request.plan, self._device, 0, options, config.enable_prompt_embeds,
            self._parallel, self._executor.drafter,
            encoder_of(self._executor.tower, self._executor.model, self._spec, request.plan),
        )  # fmt: skip
        return Measured(seen.weights_bytes, seen.activation_bytes, seen.comm_bytes)

    def _allocate(self, plan: MemoryPlan) -> tuple[KVCache, StateCache, OpenDrafter | None]:
        """Return the KV cache, the recurrent states, and the drafter with its own cache. Raises `DoesNotFit` on all
        ranks if one of them has too little memory."""
        kv, states, opened = None, None, None
        refusal = DoesNotFit("Another rank does not have enough memory for its KV cache.")
        try:
            states = StateCache(self._spec, plan.num_places, self._device, getattr(torch, plan.dtype))
            kv = KVCache(self._spec, plan.num_blocks, plan.block_size, self._device, plan.kv_dtype)
            opened = with_cache(self._executor.drafter, self._spec, plan, self._device, plan.num_blocks)
        except DoesNotFit as error:
            refusal = error
        ready = torch.full((1,), float(kv is not None), device=self._device)
        self._world.everyone.sum_(ready)
        if kv is None or states is None or int(ready.item()) < self._world.everyone.size:
            raise refusal
        return kv, states, opened

    def waited_ns(self) -> int:
        return self._world.pipe.waited_ns

    def sleep(self) -> None:
        self._executor.move_to_host()
        self._world.disconnect()

    def wake(self) -> None:
        self._world.reconnect()
        self._executor.move_to_device()

    def put_adapter(self, asked: PutAdapter) -> None:
        slots = self._executor.adapter_slots
        assert slots is not None, "the model was loaded without memory for adapters"
        slots.put(asked.slot, open_lora(Path(asked.path)))

    def close(self) -> None:
        self._world.disconnect()

    @property
    def _model(self) -> DecoderModel:
        return cast("DecoderModel", self._executor.model)

    @property
    def _stage(self) -> CausalModel:
        return self._model if self._world.num_stages == 1 else StageModel(self._model, self._world.pipe)

    @property
    def _parallel(self) -> Parallel:
        return Parallel(self._world.group, self._world.everyone, self._world.is_last_stage)
