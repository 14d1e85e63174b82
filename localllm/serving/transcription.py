"""Build a served model that transcribes, and its client: sound in, words with times out.

Windows of a sound are cut at pauses (media/speech.py) and run in batches, on the loop of models that embed or score.
Does not know: HTTP, formats of answers, which models stay loaded (manager.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from localllm.config.settings import Settings
from localllm.engine.pooling import PoolingLoop
from localllm.engine.pooling_client import BatchClient, PoolingLimits
from localllm.serving.compute import start_torch
from localllm.serving.phases import OnPhase, report_phase
from localllm.serving.pooling import BatchRunner, serve_in_batches
from localllm.serving.served import NO_LIMITS, LoadLimits, ServedModel
from localllm.text.transcript import TimedToken, Word, words_of
from localllm.units import format_bytes

if TYPE_CHECKING:
    from localllm.media.sound import Samples
    from localllm.media.speech import VadOptions, Window
    from localllm.models.encoders.transcriber import Transcriber
    from localllm.models.library.catalog import ResolvedModel
    from localllm.text.tokenizer import Tokenizer

WINDOW_S = 30.0
"""Longest window."""
FRAMES_PER_S = 100
"""Frames of features a second of sound, in which a batch is counted."""
SILENT_SHARE = 1 / 3
"""A sound of one window is cut at its pauses only if more of it than this is silence."""


@dataclass(frozen=True, slots=True)
class WindowInput:
    samples: Any  # int16 [n] at 16 kHz

    @property
    def length(self) -> int:
        return len(self.samples) * FRAMES_PER_S // 16_000 + 1


class Heard(NamedTuple):
    """The words of the next window of a sound."""

    window: Window
    words: list[Word]


class TranscriptionClient(BatchClient):
    def __init__(self, loop: PoolingLoop, limits: PoolingLimits, tokenizer: Tokenizer) -> None:
        super().__init__(loop, limits)
        self._tokenizer = tokenizer

    async def transcribe(
        self, samples: Samples, vad: VadOptions | None, *, is_background: bool = False
    ) -> AsyncIterator[Heard]:
        """Yield the words of each window in order, with their times in the sound. vad: None: nothing is left out.

        Windows run side by side, as many as a batch holds, so that other requests have their turns between them.
        Raises `QueueFull`, `EngineStopped`.
        """
        found = await asyncio.to_thread(windows_of, samples, vad)
        for first in range(0, len(found), self.limits.max_num_seqs):
            group = found[first : first + self.limits.max_num_seqs]
            for window, tokens in zip(group, await self.run(inputs_of(samples, group), is_background), strict=True):
                yield Heard(window, self.words(tokens, window.start / 16_000))

    def words(self, tokens: Sequence[Any], start_s: float) -> list[Word]:
        """Return the words of the tokens of a window that starts at `start_s`."""
        timed = [
            TimedToken(each.token_id, start_s + each.start_s, start_s + each.stop_s, each.probability)
            for each in tokens
        ]
        return words_of(timed, self._tokenizer.decode, self._begins_word)

    def _begins_word(self, token_id: int) -> bool:
        return self._tokenizer.token_bytes(token_id).startswith(b" ")


def transcriber_of(model: ServedModel) -> TranscriptionClient:
    """Return the client of a model that transcribes. Raises `WrongTask`."""
    model.require("transcribe")
    return cast("TranscriptionClient", model.client)


def inputs_of(samples: Samples, found: Sequence[Window]) -> list[WindowInput]:
    return [WindowInput(samples.values[each.start : each.stop]) for each in found]


def warnings_of(samples: Samples, words: Sequence[Word] | None = None) -> tuple[str, ...]:
    """Return what a person should know about the transcript of a sound. words: None while they are not known."""
    warnings = []
    if samples.missing_s:
        warnings.append(f"file is damaged: {samples.missing_s:.1f} s are missing")
    if words is not None and not words:
        warnings.append(f"no speech found in {samples.seconds:.1f} s")
    return tuple(warnings)


def windows_of(samples: Samples, vad: VadOptions | None) -> list[Window]:
    """Return the windows in which a sound is recognised. vad: None: nothing is left out."""
    from localllm.media.speech import plain_windows, speech_finder, windows

    if vad is None:
        return plain_windows(samples.values, WINDOW_S)
    total = len(samples.values)
    found = windows(speech_finder().probabilities(samples.values), total, WINDOW_S, vad)
    heard = sum(each.stop - each.start for each in found)
    if len(found) == 1 and total <= WINDOW_S * 16_000 and heard >= (1 - SILENT_SHARE) * total:
        return plain_windows(samples.values, WINDOW_S)
    return found


def build_transcriber(
    settings: Settings,
    found: ResolvedModel,
    on_phase: OnPhase = lambda phase: None,
    limits: LoadLimits = NO_LIMITS,
) -> ServedModel:
    """Read, fit and load the model. Blocking. Raises UnsupportedModel, CorruptModel, DoesNotFit, ConfigError."""
    from localllm.models.encoders.recipe import spec_of_any
    from localllm.models.fit.pooling import plan_transcriber
    from localllm.text.tokenizer import load_tokenizer

    config = settings.engine
    hardware = start_torch(on_phase, limits)
    with report_phase("fit", on_phase) as report:
        import torch

        from localllm.models.encoders.transcriber import count_transcriber_parameters, load_transcriber

        spec = spec_of_any(found.path, task="transcribe")
        plan = plan_transcriber(config, spec, count_transcriber_parameters(found.path), hardware)
        report(f"{plan.device} · {plan.dtype} · weights {format_bytes(plan.weights_bytes)}")
    with report_phase("tokenizer", on_phase) as report:
        tokenizer = load_tokenizer(found.path)
        report(f"{tokenizer.vocab_size} tokens")
    with report_phase("weights", on_phase) as report:
        model = load_transcriber(found.path, torch.device(plan.device), getattr(torch, plan.dtype))
        report(f"{spec.num_layers} layers, {model.kind}")
    sizes = PoolingLimits(plan.max_model_len, plan.max_num_seqs, spec.vocab_size)
    return serve_in_batches(
        settings, found, spec, plan, tokenizer, BatchRunner(model, _transcribed),
        lambda loop: TranscriptionClient(loop, sizes, tokenizer),
    )  # fmt: skip


def _transcribed(model: Transcriber, batch: Sequence[WindowInput]) -> list[Any]:
    return model.transcribe([each.samples for each in batch])
