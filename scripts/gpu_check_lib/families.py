"""Decode steps and prompts of models that are not plain decoders: windowed layers, recurrent states, experts.

No targets are set; the floor is the time to read what a step reads once.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

import torch

from localllm.errors import DoesNotFit
from localllm.models.spec.model_spec import ModelSpec, kv_numbers_per_token, state_group
from localllm.models.weights.parameters import held_bytes
from scripts.gpu_check_lib.ceilings import read_ceilings
from scripts.gpu_check_lib.engine import Options, RandomEngine
from scripts.gpu_check_lib.figures import dtype_of, graphs, late_work
from scripts.gpu_check_lib.stages import Context, Found
from scripts.random_weights import shape_spec

SHAPES = ("gemma-3-4b", "qwen3.5-0.8b", "qwen3-30b-a3b")
BATCHES = (1, 16)
STEPS = 64
CONTEXT, PROMPT = 1024, 4096


def measure_families(context: Context, shapes: Sequence[str] = SHAPES) -> Iterator[Found]:
    device, ceilings = torch.device(context.device), read_ceilings(context)
    length = max(CONTEXT + 2 * STEPS, PROMPT) + 64
    options = Options(device, dtype_of(device), max_num_seqs=max(BATCHES), max_model_len=length,
                      num_kv_tokens=max(BATCHES) * (CONTEXT + 2 * STEPS + 64) + PROMPT)  # fmt: skip
    for shape in shapes:
        gc.collect()
        try:
            engine = RandomEngine(shape_spec(shape), options)
        except (torch.OutOfMemoryError, DoesNotFit) as error:
            yield shape, "skipped", str(error).splitlines()[0]
            continue
        yield shape, *graphs(engine)[1:]
        for batch in BATCHES:
            times = engine.decode(batch, CONTEXT, STEPS)
            text = f"batch {batch}: {times.step_s * 1e3:.3f} ms a step, {times.tokens_per_s:,.0f} tok/s"
            data = {"step_s": times.step_s, "tokens_per_s": times.tokens_per_s}
            if ceilings is not None:
                floor_s = step_bytes(engine, batch, times.context) / ceilings.copy_bytes_per_s
                text += f"; floor {floor_s * 1e3:.3f} ms: {floor_s / times.step_s:.0%}"
                data["floor_s"] = floor_s
            yield f"{shape} decode", "note", text, data
        seconds = engine.prefill(PROMPT, repeats=2)
        text = f"{PROMPT} tokens: {seconds * 1e3:.1f} ms, {PROMPT / seconds:,.0f} tok/s"
        yield f"{shape} prefill", "note", text, {"seconds": seconds}
        _, verdict, text, *_ = late_work(engine)
        yield f"{shape} late work", verdict, text
        engine.close()
        del engine


def step_bytes(engine: RandomEngine, batch: int, context: float) -> float:
    """Return the bytes that a decode step reads or writes: weights, but only of the experts that tokens of random
    routes meet; keys and values, as if no window was shorter than the context; states, which are also written."""
    spec, options = engine.spec, engine.options
    weights = held_bytes(engine.model) - unread_bytes(spec, batch, options.dtype.itemsize)
    states = state_group(spec, str(options.dtype).removeprefix("torch."))
    per_row = context * kv_numbers_per_token(spec) * options.dtype.itemsize
    return weights + batch * (per_row + (2 * states.bytes_per_place if states is not None else 0))


def unread_bytes(spec: ModelSpec, batch: int, itemsize: int) -> float:
    """Return the bytes of an untied embedding, and of the experts that no token of a batch meets."""
    table = 0 if spec.tie_word_embeddings else spec.vocab_size * spec.hidden_size
    if (mixture := spec.mixture) is None:
        return table * itemsize
    one = 3 * spec.hidden_size * mixture.intermediate_size * mixture.num_experts
    layers = sum(mixture.is_in(layer) for layer in range(spec.num_layers))
    return (table + one * layers * (1 - mixture.top_k / mixture.num_experts) ** batch) * itemsize
