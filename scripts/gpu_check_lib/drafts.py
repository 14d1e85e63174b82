"""Steps with drafts on one model: the time of a step of each width, and tokens per second if every draft is right.

The model counts through 64 tokens again and again, so that lookup always finds drafts and each is accepted: the most
that speculation can bring. A width pays from the number of right drafts on that its longer step costs, in steps without
drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from localllm.engine.request import Request
from localllm.models.decoder.builder import DecoderBuilder
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.spec.model_spec import ModelSpec
from localllm.runner.device_drafts import DRAFT_WIDTHS
from scripts.gpu_check_lib.engine import Options, RandomEngine
from scripts.gpu_check_lib.figures import dtype_of, graphs, late_work, require_memory
from scripts.gpu_check_lib.roofline import work_of
from scripts.gpu_check_lib.stages import Context, Found
from scripts.random_weights import RandomTensors, shape_spec

BATCHES = (1, 8)
STEPS = 32
CONTEXT = 1024
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
