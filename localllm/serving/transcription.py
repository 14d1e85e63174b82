"""Build a served model that transcribes, and its client: sound in, words with times out.

Windows of a sound are cut at pauses (media/speech.py). They run in batches, on the loop of models that embed or score,
or, where their texts are written token by token, join and leave between two tokens. A model that hears transcribes,
too: each window is a chat of one turn (`ChatTranscriber`).
Does not know: HTTP, formats of answers, which models stay loaded (manager.py).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from localllm.config.settings import Settings
from localllm.engine.params import SamplingParams
from localllm.engine.pooling import JoiningLoop, PoolingLoop
from localllm.engine.pooling_client import BatchClient, PoolingLimits
from localllm.errors import InvalidParameter, UnsupportedParameter
from localllm.models.encoders.recipe import MOST_BEAMS
from localllm.serving.answers.generation import collect, generation_of
from localllm.serving.answers.pictures import PromptIds, require_room
from localllm.serving.answers.sounds import Hearing, Senses, SoundPart
from localllm.serving.compute import start_torch
from localllm.serving.phases import OnPhase, report_phase
from localllm.serving.pooling import BatchRunner, loop_in_batches, serve_inputs
from localllm.serving.served import NO_LIMITS, LoadLimits, ServedModel
from localllm.text.transcript import (
    UNSPACED,
    TimedToken,
    Transcript,
    TranscriptSegment,
    Word,
    compression_ratio,
    segments_of,
    words_of,
)
from localllm.units import format_bytes

if TYPE_CHECKING:
    from localllm.engine.media import MediaSpan
    from localllm.media.sound import Samples
    from localllm.media.speech import VadOptions, Window
    from localllm.models.encoders.speech_rows import SpeechModel, SpeechRows
    from localllm.models.encoders.whisper import Decoding, SpokenText
    from localllm.models.library.catalog import ResolvedModel
    from localllm.models.vision.sound import Wish
    from localllm.text.tokenizer import Tokenizer

WINDOW_S = 30.0
"""Longest window."""
FRAMES_PER_S = 100
"""Frames of features a second of sound, in which a batch is counted."""
_CONTINUED = frozenset(bytes((byte,)) for byte in range(0x80, 0xC0))
"""Bytes within a character in UTF-8."""
SPARE_TOKENS, TOKENS_PER_S = 64, 16
"""Most tokens of a window's text: these, and so many for each second. A model that repeats itself ends there."""
SILENT_SHARE = 1 / 3
"""A sound of one window is cut at its pauses only if more of it than this is silence."""


@dataclass(frozen=True, slots=True)
class WindowInput:
    samples: Any  # int16 [n] at 16 kHz
    decoding: Decoding | None = None  # of a model that writes token by token; it counts as 30 s, which Whisper reads

    @property
    def beams(self) -> int:
        """Texts of the window that are written at once."""
        return 1 if self.decoding is None else self.decoding.beams

    @property
    def length(self) -> int:
        return len(self.samples) * FRAMES_PER_S // 16_000 + 1 if self.decoding is None else round(WINDOW_S * 100)


class SpeechOptions(NamedTuple):
    """The wishes of a request. A model with CTC or a transducer has no choice."""

    language: str | None = None  # ISO 639-1, or its English name; None: the model finds it
    prompt: str = ""  # a text before the sound: its names, its style
    temperature: float = 0.0  # 0 to 1; of the first attempt
    seed: int = 0
    translate: bool = False  # into English
    words: bool = False  # with their times
    beam_size: int = 1  # partial texts of a search at temperature 0
    condition_on_previous_text: bool = False  # windows one after the other, each with the texts before as its prompt
    no_speech_threshold: float | None = None  # the three of Whisper's attempts; None: 0.6, -1 and 2.4
    logprob_threshold: float | None = None
    compression_ratio_threshold: float | None = None
    max_completion_tokens: int | None = None  # of a window


HINTS_OF_WHISPER = ("condition_on_previous_text", "no_speech_threshold", "logprob_threshold",
                    "compression_ratio_threshold")  # fmt: skip
HINTS = ("language", "prompt", "temperature", "seed", "beam_size", *HINTS_OF_WHISPER, "max_completion_tokens")
"""Options that have no effect on a model with CTC or a transducer."""


class WriterFacts(NamedTuple):
    """The abilities of a model that writes a window's text token by token."""

    languages: tuple[str, ...] = ()  # codes; none: one language, which is not told apart
    translates: bool = False
    most_prompt: int = 0  # tokens of a prompt that are read, the last ones; 0: none
    has_words: bool = False  # with their times
    has_attempts: bool = False  # a window is written again at higher temperatures


class Heard(NamedTuple):
    """The text of the next window of a sound."""

    window: Window
    words: list[Word]  # of a model with times for words
    segments: list[TranscriptSegment]  # of the others
    language: str = ""  # code


class TranscriptionClient(BatchClient):
    def __init__(
        self, loop: PoolingLoop, limits: PoolingLimits, tokenizer: Tokenizer, facts: WriterFacts | None = None
    ) -> None:
        """facts: None: the model has CTC or a transducer."""
        super().__init__(loop, limits)
        self._tokenizer, self._facts = tokenizer, facts

    def decoding(self, asked: SpeechOptions, name: str) -> tuple[Decoding | None, list[str]]:
        """Return how windows are written, and warnings of what has no effect. name: of the model, for errors.
        Raises `UnsupportedParameter`, `InvalidParameter`."""
        facts = self._facts
        if asked.translate and not (facts and facts.translates):
            raise UnsupportedParameter(
                f"{name} does not translate.", "It was trained on transcription alone.",
                "POST /v1/audio/transcriptions, then have a chat model translate the text.", param="model",
            )  # fmt: skip
        if facts is None:
            return None, _without_effect(asked, HINTS)
        _require_possible(asked)
        if asked.words and not facts.has_words:
            what, why = (
                f"{name} has no times for words.",
                "Its texts are written without times; Whisper and Parakeet do.",
            )
            raise UnsupportedParameter(what, why, "Leave word out.", param="timestamp_granularities")
        if not 1 <= asked.beam_size <= MOST_BEAMS:
            why = f"It must be 1 to {MOST_BEAMS}."
            raise InvalidParameter(f"beam_size is {asked.beam_size}.", why, param="beam_size")
        from localllm.models.encoders.whisper import TEMPERATURES, Decoding, Thresholds

        prompt, warnings = self._tokenizer.encode(f" {asked.prompt.strip()}", add_special_tokens=False), list[str]()
        if not asked.prompt.strip() or not facts.most_prompt:
            warnings += ["prompt has no effect"] * bool(asked.prompt.strip())
            prompt = []
        if len(prompt) > facts.most_prompt:
            warnings.append(f"prompt has {len(prompt)} tokens; its last {facts.most_prompt} are used")
        temperatures = (asked.temperature, *(each for each in TEMPERATURES if each > asked.temperature))
        if not facts.has_attempts:
            temperatures = temperatures[:1]
            warnings += _without_effect(asked, ("language", *HINTS_OF_WHISPER))
            asked = asked._replace(language=None, condition_on_previous_text=False)
        language, given = self._language(asked.language, name, facts), Thresholds()
        named = (asked.logprob_threshold, asked.compression_ratio_threshold, asked.no_speech_threshold)
        bounds = Thresholds(*(default if own is None else own for own, default in zip(named, given, strict=True)))
        return Decoding(
            language, asked.translate, tuple(prompt), temperatures, asked.seed, asked.words, asked.beam_size,
            asked.max_completion_tokens, bounds, asked.condition_on_previous_text,
        ), warnings  # fmt: skip

    def _language(self, asked: str | None, name: str, facts: WriterFacts) -> str | None:
        """Return the code of a language. Raises `InvalidParameter` with the languages that the model knows."""
        from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

        if asked is None:
            return None
        known = facts.languages or ("en",)
        code: str = TO_LANGUAGE_CODE.get(asked.lower(), asked.lower())
        if code not in known:
            what, why = f"{name} does not know the language {asked[:40]!r}.", f"It knows {', '.join(sorted(known))}."
            raise InvalidParameter(what, why, "Leave language out, and the model finds it.", param="language")
        return code

    async def transcribe(
        self, samples: Samples, vad: VadOptions | None, decoding: Decoding | None = None, *,
        is_background: bool = False,
    ) -> AsyncIterator[Heard]:  # fmt: skip
        """Yield the text of each window in order, with times in the sound. vad: None: nothing is left out.

        Windows run side by side, unless each reads the texts before. Raises `QueueFull`, `EngineStopped`.
        """
        found = await asyncio.to_thread(windows_of, samples, vad)
        if decoding is not None and decoding.reads_previous:
            for window in found:
                (result,) = await self.run(inputs_of(samples, [window], decoding), is_background)
                decoding = decoding.after(cast("SpokenText", result))
                yield self.heard(window, result)
            return
        async with aclosing(self.run_in_order(inputs_of(samples, found, decoding), is_background)) as results:
            for window in found:
                result = await anext(results)
                samples.drop_pages()
                yield self.heard(window, result)

    def heard(self, window: Window, result: Any) -> Heard:
        """Return what the model's result for a window says."""
        start_s = window.start / 16_000
        if self._facts is None:
            return Heard(window, self._words(((each.token_id, each) for each in result), start_s), [])
        text: SpokenText = result
        found = [
            TranscriptSegment(
                words, start_s + each.start_s, start_s + each.stop_s, each.token_ids, text.avg_logprob,
                tuple(self._words(zip(each.token_ids, each.tokens, strict=False), start_s, text.language)),
                text.temperature, text.no_speech_prob, each.logprobs,
            )
            for each in text.segments if (words := self._tokenizer.decode(each.token_ids).strip())
        ]  # fmt: skip
        return Heard(window, [], found, text.language)

    def spelled(self, segments: Iterable[TranscriptSegment]) -> list[tuple[bytes, float]]:
        """Return each token of some segments with its log probability."""
        return spelled(self._tokenizer, segments)

    def _words(self, tokens: Iterable[tuple[int, Any]], start_s: float, language: str = "") -> list[Word]:
        """Return the words of tokens, (id, its times), of a window that starts at `start_s`; none without times. A word
        of a language without spaces is a character, or a token of several."""
        timed = [
            TimedToken(token_id, start_s + each.start_s, start_s + each.stop_s, each.probability)
            for token_id, each in tokens
        ]
        return words_of(timed, self._tokenizer.decode, partial(self._begins_word, language))

    def _begins_word(self, language: str, token_id: int) -> bool:
        first = self._tokenizer.token_bytes(token_id)[:1]
        return first not in _CONTINUED if language in UNSPACED else first == b" "


def spelled(tokenizer: Tokenizer, segments: Iterable[TranscriptSegment]) -> list[tuple[bytes, float]]:
    """Return each token of some segments with its log probability."""
    return [
        (tokenizer.token_bytes(token), logprob)
        for each in segments
        for token, logprob in zip(each.token_ids, each.logprobs, strict=True)
    ]


def _require_possible(asked: SpeechOptions) -> None:
    """Raise `InvalidParameter` for numbers that no model that writes texts token by token takes."""
    if not 0 <= asked.temperature <= 1:
        raise InvalidParameter(f"temperature is {asked.temperature:g}.", "It must be 0 to 1.", param="temperature")
    if asked.max_completion_tokens is not None and asked.max_completion_tokens < 1:
        what, why = f"max_completion_tokens is {asked.max_completion_tokens}.", "It must be at least 1."
        raise InvalidParameter(what, why, param="max_completion_tokens")


def _without_effect(asked: SpeechOptions, names: Iterable[str]) -> list[str]:
    """Return a warning for each option that is asked for."""
    default = SpeechOptions()
    return [f"{each} has no effect" for each in names if getattr(asked, each) != getattr(default, each)]


class SpeechClient(Protocol):
    """Transcribes with one model."""

    def decoding(self, asked: SpeechOptions, name: str) -> tuple[Any, list[str]]: ...

    def spelled(self, segments: Iterable[TranscriptSegment]) -> list[tuple[bytes, float]]: ...

    def transcribe(
        self, samples: Samples, vad: VadOptions | None, decoding: Any, *, is_background: bool = False
    ) -> AsyncIterator[Heard]: ...


def transcriber_of(model: ServedModel) -> SpeechClient:
    """Return the client of a model that transcribes, or that hears. Raises `WrongTask`."""
    if model.hearing is not None:
        return ChatTranscriber(model, model.hearing)
    model.require("transcribe")
    return cast("TranscriptionClient", model.client)


class ChatDecoding(NamedTuple):
    """The wishes of a transcription by a model that hears."""

    wish: Wish
    temperature: float = 0.0
    seed: int = 0
    max_completion_tokens: int | None = None  # of a window


class ChatTranscriber:
    """Transcribes with a model that hears: each window is a chat of one turn, with the prompt of its family."""

    def __init__(self, model: ServedModel, hearing: Hearing) -> None:
        self._model, self._hearing, self._family = model, hearing, hearing.processor.family

    def decoding(self, asked: SpeechOptions, name: str) -> tuple[ChatDecoding, list[str]]:
        """Return how windows are written, and warnings of what has no effect. name: of the model, for errors.
        Raises `UnsupportedParameter`, `InvalidParameter`."""
        from localllm.models.vision.sound import Wish

        family, warnings = self._family, _without_effect(asked, ("beam_size", *HINTS_OF_WHISPER))
        if asked.translate and not family.translates:
            raise UnsupportedParameter(
                f"{name} does not translate here.", "Its transcriptions have no such task.",
                "Send the sound in a chat, and ask for a translation.", param="model",
            )  # fmt: skip
        if asked.words:
            what, why = f"{name} has no times for words.", "It tells the times of windows alone."
            raise UnsupportedParameter(what, why, "Parakeet and Whisper tell them.", param="timestamp_granularities")
        _require_possible(asked)
        if asked.prompt.strip() and not family.prompts:
            warnings.append("prompt has no effect")
        language = asked.language
        if language is not None and not family.languages:
            warnings.append("language has no effect")
            language = None
        if language is not None:
            codes = {known.lower(): code for code, known in family.languages.items()}
            language = codes.get(language.lower(), language.lower())
            if language not in family.languages:
                what = f"{name} does not know the language {language[:40]!r}."
                why = f"It knows {', '.join(sorted(family.languages))}."
                raise InvalidParameter(what, why, "Leave language out, and the model finds it.", param="language")
        prompt = asked.prompt.strip() if family.prompts else ""
        wish = Wish(language, prompt, asked.translate)
        return ChatDecoding(wish, asked.temperature, asked.seed, asked.max_completion_tokens), warnings

    def spelled(self, segments: Iterable[TranscriptSegment]) -> list[tuple[bytes, float]]:
        """Return each token of some segments with its log probability."""
        return spelled(self._model.tokenizer, segments)

    async def transcribe(
        self, samples: Samples, vad: VadOptions | None, decoding: ChatDecoding, *, is_background: bool = False
    ) -> AsyncIterator[Heard]:
        """Yield the text of each window in order, with times in the sound. vad: None: nothing is left out.

        As many windows as the engine has slots are written side by side, and at most half of the slots while others
        wait. is_background: is the model's. Raises what a chat raises.
        """
        found = await asyncio.to_thread(windows_of, samples, vad)
        at_once = max(1, self._model.plan.max_num_seqs // 2)
        tasks: deque[asyncio.Task[Heard]] = deque()
        try:
            for window in found:
                while len(tasks) >= at_once:
                    yield await tasks.popleft()
                tasks.append(asyncio.create_task(self._written(samples, window, decoding)))
            while tasks:
                yield await tasks.popleft()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _written(self, samples: Samples, window: Window, decoding: ChatDecoding) -> Heard:
        prompt, params = await asyncio.to_thread(self.asked, samples, window, decoding)
        async with generation_of(self._model, params, [prompt]) as generation:
            [choice] = await collect(generation)
        logprobs = [each.logprobs[0] for each in choice.logprobs]
        return self.heard(window, decoding, choice.text, choice.token_ids, logprobs)

    def asked(self, samples: Samples, window: Window, decoding: ChatDecoding) -> tuple[PromptIds, SamplingParams]:
        """Return the prompt of a window, with its sound, and how it is answered. Blocks. Raises `ContextTooLong`."""
        from localllm.media.sound import Samples

        model, spoken = self._model, self._family.spoken(decoding.wish)
        part = SoundPart("file", samples=Samples(samples.values[window.start : window.stop]))
        text = spoken.text
        if not text:
            messages = [{**message, "content": _with_sound(message["content"], part)} for message in spoken.messages]
            text = model.chat_template.render(messages) + spoken.behind
        listened = self._hearing.listen((part, b""))
        prompt = Senses(None, self._hearing).prompt(
            text, [listened], lambda text: model.tokenizer.encode(text, add_special_tokens=False), model.name
        )
        require_room(prompt, model.plan.max_model_len)
        most = min(model.plan.max_model_len - len(prompt), SPARE_TOKENS + int(listened.seconds * TOKENS_PER_S))
        most = min(most, decoding.max_completion_tokens or most)
        return prompt, SamplingParams(
            temperature=decoding.temperature, seed=decoding.seed if decoding.temperature else None, max_tokens=most,
            logprobs=0,
        )  # fmt: skip

    def spans(self, prompt: PromptIds) -> tuple[MediaSpan, ...]:
        """Return the places of a prompt's sound, for callers without an event loop. Blocks."""
        return self._hearing.spans_of(prompt, prompt.sounds)

    def heard(
        self, window: Window, decoding: ChatDecoding, answer: str, token_ids: Sequence[int], logprobs: Sequence[float]
    ) -> Heard:
        """Return what the answer for a window says: one segment, or none. logprobs: of each token."""
        language, text = self._family.written(answer)
        language = "en" if decoding.wish.translate else language or decoding.wish.language or ""
        if not text:
            return Heard(window, [], [], language)
        start_s, stop_s, mean = window.start / 16_000, window.stop / 16_000, sum(logprobs) / max(1, len(logprobs))
        ends = self._model.spec.eos_token_ids
        kept = [each for each in zip(token_ids, logprobs, strict=True) if each[0] not in ends]
        segment = TranscriptSegment(
            text, start_s, stop_s, tuple(token for token, _ in kept), mean, temperature=decoding.temperature,
            logprobs=tuple(logprob for _, logprob in kept),
        )  # fmt: skip
        return Heard(window, [], [segment], language)


def _with_sound(content: Any, part: SoundPart) -> Any:
    """Return the content of a family's message, whose sound is `part`."""
    if isinstance(content, str):
        return content
    return [{**each, "media": part} if each["type"] == "audio" else each for each in content]


def inputs_of(samples: Samples, found: Sequence[Window], decoding: Decoding | None) -> list[WindowInput]:
    return [WindowInput(samples.values[each.start : each.stop], decoding) for each in found]


def transcript_of(
    samples: Samples, heard: Sequence[Heard], *, translate: bool, warnings: Sequence[str] = ()
) -> Transcript:
    """Return the text of a whole sound from what was heard in its windows, in order."""
    words = [word for each in heard for word in each.words]
    segments = [segment for each in heard for segment in each.segments] or segments_of(words)
    codes = Counter(each.language for each in heard if each.language)
    code = "en" if translate else max(codes, key=lambda each: codes[each], default="")
    return Transcript(
        segments, samples.seconds, (*warnings, *warnings_of(samples, segments)), code, is_translated=translate
    )


def warnings_of(samples: Samples, found: Sequence[TranscriptSegment] | None = None) -> tuple[str, ...]:
    """Return what a person should know about the transcript of a sound. found: None while it is not known."""
    warnings = []
    if samples.missing_s:
        warnings.append(f"file is damaged: {samples.missing_s:.1f} s are missing")
    if found is not None and not found:
        warnings.append(f"no speech found in {samples.seconds:.1f} s")
    return tuple(warnings)


def windows_of(samples: Samples, vad: VadOptions | None) -> list[Window]:
    """Return the windows in which a sound is recognised. vad: None: nothing is left out."""
    from localllm.media.speech import plain_windows, speech_finder, windows

    if vad is None:
        return plain_windows(samples.values, WINDOW_S, samples.drop_pages)
    total = len(samples.values)
    found = windows(speech_finder().probabilities(samples.values, samples.drop_pages), total, WINDOW_S, vad)
    heard = sum(each.stop - each.start for each in found)
    if len(found) == 1 and total <= WINDOW_S * 16_000 and heard >= (1 - SILENT_SHARE) * total:
        return plain_windows(samples.values, WINDOW_S, samples.drop_pages)
    return found


def build_transcriber(
    settings: Settings,
    found: ResolvedModel,
    on_phase: OnPhase = lambda phase: None,
    limits: LoadLimits = NO_LIMITS,
) -> ServedModel:
    """Read, fit and load the model. Blocking. Raises UnsupportedModel, CorruptModel, DoesNotFit, ConfigError."""
    from localllm.models.encoders.recipe import spec_of_any
    from localllm.models.fit.pooling import WINDOW_FRAMES, plan_transcriber
    from localllm.text.tokenizer import load_tokenizer

    config = settings.engine
    hardware = start_torch(on_phase, limits)
    with report_phase("fit", on_phase) as report:
        import torch

        from localllm.models.encoders.source import HeldAs
        from localllm.models.encoders.speech_rows import SpeechRows
        from localllm.models.encoders.transcriber import Transcriber, load_transcriber, transcriber_sizes
        from localllm.models.encoders.whisper import WhisperModel

        spec = spec_of_any(found.path, task="transcribe")
        sizes = transcriber_sizes(found.path, HeldAs.asked(config))
        plan = plan_transcriber(config, spec, sizes, hardware)
        stored = f" ({plan.quantization})" if plan.quantization else ""
        report(f"{plan.device} · {plan.dtype} · weights {format_bytes(plan.weights_bytes)}{stored}")
    with report_phase("tokenizer", on_phase) as report:
        tokenizer = load_tokenizer(found.path)
        report(f"{tokenizer.vocab_size} tokens")
    with report_phase("weights", on_phase) as report:
        device, dtype = torch.device(plan.device), getattr(torch, plan.dtype)
        model = load_transcriber(found.path, device, dtype, HeldAs.asked(config))
        report(f"{spec.num_layers} layers, {model.kind}")
    served = PoolingLimits(plan.max_model_len, plan.max_num_seqs, spec.vocab_size)
    most_queued = config.max_num_queued_reqs
    if isinstance(model, Transcriber):
        run = BatchRunner(model, lambda model, batch: model.transcribe([each.samples for each in batch]))
        loop, facts = loop_in_batches(run, plan, most_queued), None
    else:
        facts = WriterFacts()
        if isinstance(model, WhisperModel):
            special = model.special
            facts = WriterFacts(
                tuple(special.languages), model.translates, special.most_prompt, has_words=True, has_attempts=True
            )
        places = plan.max_num_batched_tokens // WINDOW_FRAMES
        rows = SpeechRows(model, places, halves=config.keeps_half_weights)
        runner = RowsRunner(model, rows, lambda ids: compression_ratio(tokenizer.decode(ids)))
        loop = JoiningLoop(runner, max_num_queued=most_queued)
    client = TranscriptionClient(loop, served, tokenizer, facts)
    return serve_inputs(settings, found, spec, plan, tokenizer, loop, client)


class RowsRunner:
    """Windows that join and leave between two steps of a model that writes their texts."""

    def __init__(self, model: SpeechModel, rows: SpeechRows, ratio_of: Callable[[Sequence[int]], float]) -> None:
        self._model: SpeechModel | None = model
        self._rows: SpeechRows | None = rows
        self._ratio_of = ratio_of

    @property
    def rows(self) -> SpeechRows:
        assert self._rows is not None, "the runner is closed"
        return self._rows

    def fits(self, each: WindowInput) -> bool:
        return self.rows.fits(each.beams)

    def is_last_place(self) -> bool:
        return self.rows.num_free <= 1

    def join(self, key: int, each: WindowInput) -> None:
        model, rows = self._model, self.rows
        assert model is not None, "the runner is closed"
        writing = model.write(each.samples, each.decoding, self._ratio_of)
        self._guarded(lambda: rows.join(key, each.samples, writing, each.beams))

    def step(self) -> list[tuple[int, Any]]:
        return self._guarded(self.rows.step)  # type: ignore[no-any-return]

    def drop(self, key: int) -> None:
        self.rows.drop(key)

    def close(self) -> None:
        self._model = self._rows = None

    def _guarded(self, call: Callable[[], Any]) -> Any:
        """Call something that runs on the device. Raises `DeviceLost` if the device is lost."""
        from localllm.runner.device_errors import check_device, translated

        assert self._model is not None, "the runner is closed"
        try:
            with translated():
                return call()
        except Exception:
            check_device(self._model.device)
            raise
