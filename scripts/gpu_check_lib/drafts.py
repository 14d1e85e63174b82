"""Steps with drafts on one model: the time of a step of each width, and tokens per second if every draft is right.
Also what a drafter with weights adds to each step, as part of the step's graph.

In `measure_drafts` the model counts through 64 tokens again and again, so that lookup always finds drafts and each is
accepted: the most that speculation can bring. A width pays from the number of right drafts on that its longer step
costs, in steps without drafts.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from localllm.engine.request import Request
from localllm.models.decoder.builder import DecoderBuilder
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.drafters.draft_model import DraftModel
from localllm.models.drafters.drafter import Drafter
from localllm.models.drafters.eagle_config import EagleMethod
from localllm.models.drafters.opening import open_drafter, plan_drafter
from localllm.models.spec.model_spec import ModelSpec
from localllm.runner.device_drafts import DRAFT_WIDTHS
from scripts.gpu_check_lib.engine import Options, RandomEngine
from scripts.gpu_check_lib.figures import dtype_of, graphs, late_work, require_memory
from scripts.gpu_check_lib.roofline import work_of
from scripts.gpu_check_lib.stages import Context, Found, Verdict
from scripts.random_weights import RandomTensors, random_model, shape_spec
from tests.eagle_files import eagle_tensors, write_eagle

BATCHES = (1, 8)
STEPS = 32
CONTEXT = 1024
DRAFTS = 4  # of a drafter at a time, as by default
DRAFT_VOCAB = 32_000  # rows of an EAGLE-3 head
MOST_GRAPHS = 225
FIRST, PERIOD = 16, 64  # the model counts from the first token on, through so many
SMALL = 1e-3  # of what a layer adds to the stream: the next token then depends on the last one alone


def measure_drafts(context: Context, shape: str = "llama-3.1-8b") -> Iterator[Found]:
    spec, device = shape_spec(shape), torch.device(context.device)
    length = CONTEXT + (1 + DRAFT_WIDTHS[-1]) * (STEPS + 64)
    options = Options(device, dtype_of(device), max_num_seqs=max(BATCHES), max_model_len=length,
                      num_kv_tokens=max(BATCHES) * length, most_drafts=DRAFT_WIDTHS[-1],
                      graphs="replayed" if device.type == "cuda" else "padded")  # fmt: skip
    require_memory(spec, options, work_of(spec), "16-bit")
    engine = RandomEngine(spec, options, model=counting_model(spec, options))
    engine.prompts = CountingPrompts()  # type: ignore[assignment]
    yield graphs(engine)
    chosen = engine.speculation.width
    for batch in BATCHES:
        plain_s = 0.0
        for width in (0, *DRAFT_WIDTHS):
            if batch * (1 + width) > engine.runner.drafts.step_tokens:
                continue
            engine.speculation.width = FixedWidth(width)  # type: ignore[method-assign]
            times = engine.decode(batch, CONTEXT, STEPS)
            plain_s = plain_s or times.median_s
            text = f"{times.median_s * 1e3:.3f} ms a step, {times.tokens / batch:.1f} tokens of each request"
            text += f", {times.tokens_per_s:,.0f} tok/s"
            if width:
                text += f"; pays from {times.median_s / plain_s - 1:.2f} right drafts a step on"
            data = {"median_s": times.median_s, "tokens": times.tokens, "tokens_per_s": times.tokens_per_s}
            is_wrong = width and times.tokens < batch * (1 + width) * 0.9
            yield f"batch {batch}, {width} drafts", "failed" if is_wrong else "note", text, data
        engine.speculation.width = chosen  # type: ignore[method-assign]
        times = engine.decode(batch, CONTEXT, STEPS)
        text = f"{times.tokens / batch:.1f} tokens of each request a step, {times.tokens_per_s:,.0f} tok/s"
        yield f"batch {batch}, as decided", "note", text, {"tokens_per_s": times.tokens_per_s}
    yield late_work(engine)
    engine.close()


def measure_drafters(context: Context, shape: str = "llama-3.1-8b", smaller: str = "llama-3.2-1b") -> Iterator[Found]:
    """Measure a model's steps beside a draft model and beside EAGLE-3 and EAGLE-1 heads of random weights. None of
    their drafts is right, so a step has one token of each request: its time alone counts."""
    spec, device = shape_spec(shape), torch.device(context.device)
    length = CONTEXT + 8 * (STEPS + 64)
    options = Options(device, dtype_of(device), max_num_seqs=max(BATCHES), max_model_len=length,
                      num_kv_tokens=max(BATCHES) * length, max_num_batched_tokens=2048,
                      graphs="replayed" if device.type == "cuda" else "padded")  # fmt: skip
    work = work_of(spec)
    both = replace(work, layer_parameters=work.layer_parameters + work_of(shape_spec(smaller)).layer_parameters)
    require_memory(spec, options, both, "16-bit")
    model = random_model(spec, device, options.dtype, max_model_len=length)
    engine = RandomEngine(spec, options, model=model)
    plain = {batch: engine.decode(batch, CONTEXT, STEPS).median_s for batch in BATCHES}
    engine.close()
    for name, drafter in random_drafters(context.out, model, smaller, length):
        engine = RandomEngine(spec, replace(options, most_drafts=DRAFTS), model=model, drafter=drafter,
                              num_drafts=DRAFTS)  # fmt: skip
        for batch, plain_s in plain.items():
            launched = engine.runner.stats().launched_steps
            times = engine.decode(batch, CONTEXT, STEPS)
            launched = engine.runner.stats().launched_steps - launched
            text = f"{times.median_s * 1e3:.3f} ms a step with {DRAFTS} drafts, {plain_s * 1e3:.3f} without"
            text += f"; pays from {times.median_s / plain_s - 1:.2f} right drafts a step on"
            data = {"median_s": times.median_s, "plain_s": plain_s, "launched_steps": launched}
            yield f"{name}, batch {batch}", "note", text, data, "one graph a step: no step launched kernel by kernel"
        stats = engine.runner.stats()
        verdict: Verdict = "failed" if stats.failed_graphs else "ok"
        text = f"{stats.captured_graphs} graphs, {stats.failed_graphs} failed {stats.graph_failure}".strip()
        yield f"{name}, graphs", verdict, text, {"graphs": stats.captured_graphs}, f"at most {MOST_GRAPHS}, none failed"
        yield f"{name}, late work", *late_work(engine)[1:]
        engine.close()


def random_drafters(out: Path, model: DecoderModel, smaller: str, max_model_len: int) -> Iterator[tuple[str, Drafter]]:
    """Yield drafters of random weights for a model: a smaller one, and EAGLE heads from files as they are published."""
    device, dtype = model.device, model.dtype
    small = random_model(shape_spec(smaller), device, dtype, max_model_len=max_model_len, seed=1)
    yield f"draft model {smaller}", DraftModel(small, model.spec.vocab_size)
    del small
    methods: tuple[EagleMethod, ...] = ("eagle3", "eagle")
    for method in methods:
        folder = out / method
        config = {name: getattr(model.spec, name) for name in ("hidden_size", "intermediate_size", "vocab_size")}
        config |= {"num_attention_heads": model.spec.num_heads, "num_key_value_heads": model.spec.num_kv_heads}
        vocab = min(DRAFT_VOCAB, model.spec.vocab_size)
        last = model.spec.num_layers - 1
        taps = sorted({0, last // 2, last})
        tensors = eagle_tensors(config, method, draft_vocab=vocab, num_taps=len(taps))
        narrow = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
        write_eagle(
            folder, config, method, draft_vocab=vocab, tensors=narrow, max_position_embeddings=max_model_len,
            taps=taps if method == "eagle3" else None,
        )  # fmt: skip
        plan = plan_drafter(folder, method, model.spec, folder)
        yield method, open_drafter(plan, model, device, dtype, max_model_len=max_model_len)
        shutil.rmtree(folder)


def counting_model(spec: ModelSpec, options: Options, period: int = PERIOD) -> DecoderModel:
    """Return a random model whose likeliest token after each of `period` tokens is the next one of them."""
    assert not spec.tie_word_embeddings, "the head is made from the embedding"
    with torch.inference_mode():
        source = CountingTensors(options, period)
        return DecoderBuilder(spec, source, options.device, options.dtype).build(options.max_model_len)


class CountingTensors(RandomTensors):
    """Random weights; the head's row of each token is the embedding of the token before it."""

    def __init__(self, options: Options, period: int) -> None:
        super().__init__(options.device, options.dtype, options.seed)
        self._counted = slice(FIRST, FIRST + period)

    def take(self, names: Iterable[str], shape: tuple[int, ...], **options: Any) -> Tensor:
        name = next(iter(names := list(names)))
        out = super().take(names, shape, **options)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            out.mul_(SMALL)
        elif name.endswith("embed_tokens.weight"):
            self._embedding = out[self._counted].clone()
        elif name == "lm_head.weight":
            out[self._counted] = self._embedding.roll(1, 0)
        return out


class CountingPrompts:
    """Prompts that count."""

    def prompt(self, length: int) -> tuple[int, ...]:
        return tuple(FIRST + i % PERIOD for i in range(length))


class FixedWidth:
    """Decides for the same number of drafts in every step."""

    def __init__(self, width: int) -> None:
        self._width = width

    def __call__(self, decoding: Sequence[Request], ready: Sequence[int], limit: int) -> int:
        return self._width
