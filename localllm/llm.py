"""The offline API: `LLM(model).generate(...)` and `.chat(...)`, with vLLM's names and outputs.

It runs the same engine as the server, step by step in the caller's thread. There are no threads or child processes, so
a script needs no `if __name__ == "__main__"` guard. A call returns when all its prompts are done.
Does not know: HTTP, asyncio, torch (serving/compute.py imports it).
"""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from localllm.config.settings import SETTINGS, EngineConfig, Settings
from localllm.config.unsupported import UNSUPPORTED
from localllm.engine.adapter import Adapter
from localllm.engine.admission import GenerationRequest
from localllm.engine.beam_search import Beam, BeamSearch, BeamSearchParams
from localllm.engine.media import MediaSpan
from localllm.engine.outputs import EngineOutput, GenerationEvent
from localllm.engine.params import SamplingParams
from localllm.engine.pooling import BatchInput, PooledValues, PoolingLoop
from localllm.engine.processor import OutputProcessor
from localllm.engine.request import RequestOptions
from localllm.engine.step import PromptEmbeds, TokenLogprobs
from localllm.errors import ConfigError, EngineError, InvalidParameter, UnsupportedOption, UnsupportedParameter
from localllm.machine.processes import set_thread_environment
from localllm.models.encoders.recipe import Want
from localllm.serving.answers.conversation import Conversation, Tools, answer_start, in_language
from localllm.serving.answers.pictures import PICTURE_PARTS, PicturePart, PromptIds, require_room
from localllm.serving.answers.sounds import SOUND_PARTS, SoundPart
from localllm.serving.build import build_engine
from localllm.text.answers.whole import ParsedAnswer, ToolCall, add_up
from localllm.text.messages import images_of
from localllm.text.transcript import Transcript

if TYPE_CHECKING:
    import numpy.typing as npt

    from localllm.media.sound import Samples
    from localllm.media.speech import VadOptions, Window
    from localllm.serving.served import ServedModel
    from localllm.serving.transcription import Heard, SpeechClient
    from localllm.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, its token ids, or {"prompt": text}, {"prompt_token_ids": ids} or {"prompt_embeds": tensor}. A text with marks
of pictures also has {"multi_modal_data": {"image": pictures}}: Pillow's images, bytes of files, or URLs. For an
encoder-decoder {"encoder_prompt": prompt, "decoder_prompt": prompt}, with src_lang and tgt_lang for translations."""
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate token at one position."""

    logprob: float
    rank: int  # 1 is the likeliest of the whole vocabulary
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One of the n answers to a prompt."""

    index: int
    text: str = ""  # in a chat, the content without reasoning and tool calls
    reasoning: str | None = None  # in a chat, the reasoning, if any
    tool_calls: list[ToolCall] = field(default_factory=list)  # in a chat with tools
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None  # of the sampled tokens; None unless logprobs were asked for
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # stop, length
    stop_reason: int | str | None = None  # the stop string or stop token id that ended it


@dataclass(slots=True)
class RequestOutput:
    """The result of one prompt."""

    request_id: str
    prompt: str | None  # None when token ids were given
    prompt_token_ids: list[int]  # empty for prompt embeddings
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # None at the first token, which nothing precedes
    finished: bool = False
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One of the likeliest answers to a prompt, with the prompt before it."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]  # of the answer's tokens
    cum_logprob: float  # of the answer
    text: str  # of all tokens
    finish_reason: str  # stop, length


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    sequences: list[BeamSearchSequence]  # best first


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter for a call of `generate` or `chat`, loaded at its first use. The id is for vLLM compatibility:
    the name identifies the adapter."""

    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass(frozen=True, slots=True)
class Embedding:
    embedding: list[float]


@dataclass(frozen=True, slots=True)
class Classification:
    probs: list[float]


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """The plain output of a pooling model: numbers, or lists of numbers for the tokens."""

    data: list[float] | list[list[float]]


@dataclass(frozen=True, slots=True)
class Score:
    score: float  # 0 to 1


class LLM:
    """A model in this process, with vLLM's keyword arguments. An unknown or unsupported argument raises an error.

    `gpu_memory_utilization` is the share of the *free* GPU memory; `max_model_len=None` takes the longest context
    that fits. Close it (or leave its `with` block) to free the memory.
    """

    def __init__(
        self,
        model: str,
        *,
        tensor_parallel_size: int | None = None,
        dtype: Any = "auto",
        quantization: str | None = None,
        revision: str | None = None,
        seed: int = 0,
        gpu_memory_utilization: float = 0.9,
        max_model_len: int | str | None = None,
        max_num_seqs: int = 64,
        enable_prefix_caching: bool = True,
        enforce_eager: bool = False,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "options")} | options
        settings = Settings(_engine_config(given))
        for name, most in (("data_parallel_size", 1), ("prefill_replicas", 0)):
            if getattr(settings.engine, name) > most:
                what, why = "LLM runs one replica.", "A server (localllm up) runs several."
                raise UnsupportedOption(what, why, f"Leave {name} out.", param=name)
        set_thread_environment()  # must run before torch is imported, which building the engine does
        self._engine = build_engine(settings)
        if self._engine.admission is not None and self._engine.plan.device == "cpu":
            while self._engine.engine[0].runner.use_idle_time():  # a server does this while it is idle
                pass
        self._lock = threading.RLock()
        self._busy = False
        self._ids = itertools.count()

    # ---- vLLM's calls --------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt | _Encoded],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt, in the order given. Nothing runs if one of them is refused (`RequestError`).

        lora_request: the adapter for all prompts, or one for each prompt; needs `enable_lora=True`.
        """
        encoded = [self._encode(prompt) for prompt in _as_prompts(prompts)]
        params = self._params_for(len(encoded), sampling_params)
        priorities = list(priority or [0] * len(encoded))
        _check_length(len(priorities), len(encoded), "priority")
        adapters = self._adapters_for(len(encoded), lora_request)
        asked = [
            GenerationRequest(
                f"offline-{next(self._ids)}",
                ids,
                each,
                RequestOptions(
                    rank, adapter=self._engine.senses.adapter_for(ids, adapter), decoder_prompt_token_ids=begun
                ),
                embeds,
                media,
            )
            for (_, ids, embeds, media, begun), each, rank, adapter in zip(
                encoded, params, priorities, adapters, strict=True
            )
        ]
        results = [_empty_output(text, request) for (text, *_), request in zip(encoded, asked, strict=True)]
        self._collect(asked, results, use_tqdm)
        return results

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, like `generate`, through the model's chat template.

        Reasoning, and calls of `tools` if given, are separated from the content as the server does. Pictures are parts
        as in the API, or {"type": "image", "image": image of Pillow}.
        """
        calls = _checked_tools(tools)
        template = {
            "add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message,
            **(chat_template_kwargs or {}),
        }  # fmt: skip
        several = [messages] if messages and isinstance(messages[0], Mapping) else messages
        seeing = [self._with_pictures(each, mm_processor_kwargs) for each in several]  # type: ignore[arg-type]
        chats = [Conversation(each, template, Tools(calls, calls)) for each in seeing]
        prompts = [self._encode_chat(chat) for chat in chats]
        given = self._params_for(len(chats), sampling_params)
        readings = [
            chat.reading(self._engine, params, prompt.token_ids)
            for chat, params, prompt in zip(chats, given, prompts, strict=True)
        ]
        results = self.generate(prompts, [params for params, _ in readings], use_tqdm, lora_request=lora_request)
        for result, (_, new_reader) in zip(results, readings, strict=True):
            if new_reader is not None:
                for output in result.outputs:
                    answer, reader = ParsedAnswer(), new_reader()
                    add_up(answer, [*reader.feed(output.text), *reader.end()])
                    output.text, output.tool_calls = answer.text, answer.calls
                    output.reasoning = answer.reasoning or None
        return results

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """Find the likeliest answers to every prompt. Nothing runs if one of them is refused (`RequestError`)."""
        ids = [self._encode(prompt, tokens=True).token_ids for prompt in _as_prompts(prompts)]
        admission = self._engine.engine[1]
        searches = [
            BeamSearch(params.request(f"offline-{next(self._ids)}", prompt, adapter), admission)
            for prompt, adapter in zip(ids, self._adapters_for(len(ids), lora_request), strict=True)
        ]
        while running := [search for search in searches if not search.is_over]:
            asked = [search.requests() for search in running]
            with closing(self._events([request for each in asked for request in each])) as events:
                told = {position: event.logprobs[0] for position, event in events}
            positions = itertools.count()
            for search, requests in zip(running, asked, strict=True):
                search.advance([told[next(positions)] for _ in requests])
        return [BeamSearchOutput([self._sequence(search, beam) for beam in search.best()]) for search in searches]

    def _sequence(self, search: BeamSearch, beam: Beam) -> BeamSearchSequence:
        tokens = [*search.prompt, *beam.token_ids]
        logprobs = [self._candidates(position) for position in beam.logprobs]
        text = self.get_tokenizer().decode(tokens)
        return BeamSearchSequence(tokens, logprobs, beam.cum_logprob, text, beam.finish_reason)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, truncate_prompt_tokens: int | None = None
    ) -> list[Embedding]:
        """Return a vector for every prompt; needs an embedding model. A prompt longer than the limit is refused,
        unless truncate_prompt_tokens says how many tokens to keep (-1: as many as the model supports)."""
        pooler = self._engine.pooler
        encoded = [self._encode(prompt, tokens=True) for prompt in _as_prompts(prompts)]
        texts = [text if text is not None else ids for text, ids, *_ in encoded]
        return [Embedding(values) for values in self._pool(pooler.inputs(texts, truncate_prompt_tokens))]

    def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], *, truncate_prompt_tokens: int | None = None
    ) -> list[Score]:
        """Score how well each text of data_2 answers data_1 (one text for all, or one each); needs a scoring model."""
        firsts = [data_1] if isinstance(data_1, str) else list(data_1)
        seconds = [data_2] if isinstance(data_2, str) else list(data_2)
        firsts = firsts * len(seconds) if len(firsts) == 1 else firsts
        _check_length(len(firsts), len(seconds), "data_1")
        self._engine.require("score")
        pairs = list(zip(firsts, seconds, strict=True))
        return [
            Score(values[0]) for values in self._pool(self._engine.pooler.pair_inputs(pairs, truncate_prompt_tokens))
        ]

    def classify(
        self, prompts: Prompt | Sequence[Prompt], *, truncate_prompt_tokens: int | None = None
    ) -> list[Classification]:
        """Return the probabilities of the classes for every prompt; needs a classifier."""
        self._engine.require("score")
        return [Classification(values) for values in self._pooled(prompts, "pooled", truncate_prompt_tokens)]

    def reward(
        self, prompts: Prompt | Sequence[Prompt], *, truncate_prompt_tokens: int | None = None
    ) -> list[PoolingOutput]:
        """Return the reward of every prompt, without an activation; needs a reward model. A process reward model has
        values for each token."""
        self._engine.require("score")
        pooling_task = "classify" if "raw" in self._engine.pooler.wants else "token_classify"
        return self.encode(
            prompts, pooling_task=pooling_task, use_activation=False, truncate_prompt_tokens=truncate_prompt_tokens
        )

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_task: str,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingOutput]:
        """Return the output of a pooling model for every prompt. pooling_task: embed, classify, or token_embed and
        token_classify for an output of each token."""
        kind = "embed" if self._engine.spec.task == "embed" else "classify"
        if pooling_task not in (kind, f"token_{kind}"):
            what, why = f"pooling_task {pooling_task!r} is not supported.", f"Supported: {kind}, token_{kind}."
            raise InvalidParameter(what, why, param="pooling_task")
        if pooling_task == kind:
            want: Want = "pooled" if use_activation or kind == "embed" else "raw"
            return [PoolingOutput(values) for values in self._pooled(prompts, want, truncate_prompt_tokens)]
        dim = self._engine.pooler.dim
        return [
            PoolingOutput([values[at : at + dim] for at in range(0, len(values), dim)])
            for values in self._pooled(prompts, "tokens", truncate_prompt_tokens)
        ]

    def transcribe(
        self,
        sound: str | Path | bytes | tuple[npt.ArrayLike, int],
        *,
        language: str | None = None,
        prompt: str = "",
        temperature: float = 0.0,
        seed: int = 0,
        translate: bool = False,
        words: bool = False,
        beam_size: int = 1,
        condition_on_previous_text: bool = False,
        no_speech_threshold: float | None = None,
        logprob_threshold: float | None = None,
        compression_ratio_threshold: float | None = None,
        max_completion_tokens: int | None = None,
        vad_filter: bool | VadOptions = True,
        allow_damaged: bool = False,
    ) -> Transcript:
        """Return the text of a sound: a path, the bytes of a file, or samples within -1 and 1 and their rate in Hz.
        Needs a model that transcribes or hears.

        language: ISO 639-1, or its English name; None: the model finds it. prompt: a text before the sound, for its
        names and style. temperature: of the first attempt. translate: into English. beam_size: partial texts of a
        search at temperature 0. condition_on_previous_text: windows are written one after the other, each with the
        texts before as its prompt. The three thresholds bound Whisper's attempts; None: 0.6, -1 and 2.4.
        max_completion_tokens: of a window. These and seed are Whisper's; the transcript's warnings say which had no
        effect. words: refuse a model without times for words. vad_filter: leave out parts without speech, and how they
        are found. allow_damaged: take what was decoded before the damage. Raises `UnreadableMedia`, `MediaTooLarge`,
        `WrongTask`, `InvalidParameter` and `UnsupportedParameter`.
        """
        from localllm.media.sound import Samples, decode
        from localllm.media.speech import VadOptions
        from localllm.serving.transcription import SpeechOptions, transcriber_of, transcript_of, windows_of

        client = transcriber_of(self._engine)
        asked = SpeechOptions(
            language, prompt, temperature, seed, translate, words, beam_size, condition_on_previous_text,
            no_speech_threshold, logprob_threshold, compression_ratio_threshold, max_completion_tokens,
        )  # fmt: skip
        decoding, warnings = client.decoding(asked, self._engine.name)
        if isinstance(sound, tuple):
            samples = Samples.of(*sound)
        else:
            with tempfile.TemporaryFile() if isinstance(sound, bytes) else open(sound, "rb") as file:
                if isinstance(sound, bytes):
                    file.write(sound)
                name = "The sound" if isinstance(sound, bytes) else str(sound)
                samples = decode(file, name, allow_damaged=allow_damaged)
        options = vad_filter if isinstance(vad_filter, VadOptions) else VadOptions() if vad_filter else None
        windows = windows_of(samples, options)
        heard = _heard(self, client, samples, windows, decoding)
        return transcript_of(samples, heard, translate=translate, warnings=warnings)

    def _pooled(self, prompts: Prompt | Sequence[Prompt], want: Want, truncate: int | None) -> list[list[float]]:
        pooler = self._engine.pooler
        encoded = [self._encode(prompt, tokens=True) for prompt in _as_prompts(prompts)]
        texts = [text if text is not None else ids for text, ids, *_ in encoded]
        return self._pool(pooler.pool_inputs(texts, want, truncate))

    def get_tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary; all token ids are below it."""
        return self._engine.spec.vocab_size

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that generation_config.json recommends; the default of `sampling_params`."""
        return self._engine.default_params

    def start_profile(self) -> None:
        """Begin to record a trace of the steps of this thread's calls. It needs the argument torch_profiler_dir."""
        with self._alone():
            self._engine.profiler.start()

    def stop_profile(self) -> Path:
        """End the trace, on the same thread, and write it. Return the path of the file, for Perfetto."""
        with self._alone():
            return self._engine.profiler.stop()(self._engine.name)

    def close(self) -> None:
        """Free the memory. Idempotent; calls on a closed LLM raise `EngineStopped`."""
        with self._lock:
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # ---- ours ----------------------------------------------------------------------------------------------------

    def apply_chat_template(self, messages: Sequence[Message], **how: Any) -> str:
        """Return the prompt text that the model's chat template renders for a conversation."""
        return self._engine.chat_template.render(messages, **how)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._engine.chat_template)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generator[GenerationEvent]:
        """Yield the events of one prompt as they occur. Closing the iterator ends the request."""
        _, ids, embeds, media, begun = self._encode(prompt)
        params = sampling_params or self.get_default_sampling_params()
        options = RequestOptions(decoder_prompt_token_ids=begun)
        asked = GenerationRequest(f"offline-{next(self._ids)}", ids, params, options, embeds, media)
        with closing(self._events([asked])) as events:
            for _, event in events:
                yield event

    def _pool(self, inputs: Sequence[BatchInput]) -> list[PooledValues]:
        with self._lock:
            loop = self._engine.loop
            assert isinstance(loop, PoolingLoop)
            if not loop.is_running:
                loop.start()
            return loop.submit(inputs).result()

    # ---- the drive -----------------------------------------------------------------------------------------------

    def _collect(self, asked: Sequence[GenerationRequest], results: list[RequestOutput], use_tqdm: bool) -> None:
        bar = _ProgressBar(sum(request.params.n for request in asked), enabled=use_tqdm)
        with closing(self._events(asked)) as events, closing(bar):
            for position, event in events:
                self._add(results[position], event)
                if event.finish_reason is not None:
                    bar.advance(event)
        for result in results:
            result.finished = True

    def _events(self, asked: Sequence[GenerationRequest]) -> Generator[tuple[int, GenerationEvent]]:
        """Yield (position in `asked`, event) until every choice is finished. Raises the error of a failed request."""
        with self._alone():
            loop, admission = self._engine.engine
            processor = OutputProcessor(self.get_tokenizer())
            positions: dict[str, int] = {}  # unfinished choices, by the engine's request id
            admitted = []
            for position, request in enumerate(asked):
                for index, choice in enumerate(admission.admit(request)):
                    processor.open(choice, index)
                    positions[choice.request_id] = position
                    admitted.append(choice)
            outputs: list[EngineOutput] = []
            loop.deliver = outputs.extend
            try:
                loop.submit(*admitted)
                while positions:
                    loop.step()
                    yield from self._take(outputs, processor, positions)
            finally:
                for request_id in positions:
                    loop.cancel(request_id)
                for _ in range(loop.depth + 1):  # steps in flight may still hold cancelled requests
                    if positions and loop.scheduler.has_work:
                        loop.step()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock of this LLM: calls from several threads queue. A call during the same thread's `stream` raises,
        since it would wait for itself."""
        with self._lock:
            if self._busy:
                raise EngineError(
                    "This LLM is still streaming an answer.",
                    "Only one call can run at a time.",
                    "close the stream first",
                )
            self._busy = True
            try:
                yield
            finally:
                self._busy = False

    def _take(
        self, outputs: list[EngineOutput], processor: OutputProcessor, positions: dict[str, int]
    ) -> Iterator[tuple[int, GenerationEvent]]:
        """Turn a step's outputs into events, and end requests that reached a stop string."""
        step_outputs, outputs[:] = list(outputs), []
        for output in step_outputs:
            event = processor.process(output)
            if event is None:
                continue
            if event.error is not None:
                raise event.error
            position = positions[output.request_id]
            if event.finish_reason is not None:
                del positions[output.request_id]
                if output.finish_reason is None:
                    self._engine.engine[0].cancel(output.request_id, "stop")
            yield position, event

    # ---- translation ---------------------------------------------------------------------------------------------

    def _encode(self, prompt: Prompt | _Encoded, *, tokens: bool = False) -> _Encoded:
        """Encode a prompt. With `tokens`, prompt embeddings are refused."""
        if isinstance(prompt, _Encoded):
            return prompt
        if isinstance(prompt, str):
            return _Encoded(prompt, self.get_tokenizer().encode(prompt))
        if not isinstance(prompt, Mapping):
            return _Encoded(None, prompt)
        if prompt.keys() == {"prompt_embeds"} and not tokens:
            self._engine.generator.limits.require_prompt_embeds()
            embeds = self._engine.prompt_embeds_reader.of_tensor(prompt["prompt_embeds"])
            return _Encoded(None, (0,) * embeds.num_tokens, embeds)
        if not tokens and prompt.get("multi_modal_data"):
            return self._encode_seen(prompt)
        if not tokens and "encoder_prompt" in prompt:
            return _encoded_source(prompt, self._engine, partial(self._encode, tokens=True))
        unknown = set(prompt) - {"prompt", "prompt_token_ids", "multi_modal_data"}
        if unknown or not prompt:
            raise InvalidParameter(
                "A prompt dictionary holds 'prompt' or 'prompt_token_ids', or, to generate, only 'prompt_embeds', or "
                "'prompt' and 'multi_modal_data'.",
                f"Got {sorted(prompt)}.",
                param="prompt",
            )
        text = prompt.get("prompt")
        ids = prompt.get("prompt_token_ids")
        return _Encoded(text, self.get_tokenizer().encode(text or "") if ids is None else ids)

    def _encode_seen(self, prompt: Mapping[str, Any]) -> _Encoded:
        """Encode a text with a mark of the family for each of its pictures."""
        given, senses, text = prompt["multi_modal_data"], self._engine.senses, prompt.get("prompt")
        if not given or not set(given) <= {"image", "audio"} or not isinstance(text, str):
            why = f"Got {sorted(given)} and a prompt that is {type(text).__name__}."
            what = "multi_modal_data holds only 'image' and 'audio', beside a text."
            raise InvalidParameter(what, why, param="multi_modal_data")
        for kind, sense, does in (("image", senses.sight, "see pictures"), ("audio", senses.hearing, "hear")):
            if kind in given and sense is None:
                what, why = f"{self._engine.name} does not {does}.", "It was loaded without such a part."
                raise UnsupportedParameter(what, why, param="multi_modal_data")
        options, parts = prompt.get("mm_processor_kwargs"), list[PicturePart | SoundPart]()
        if senses.hearing is not None and "audio" in given:
            sounds = given["audio"] if isinstance(given["audio"], list) else [given["audio"]]
            for i, sound in enumerate(sounds):
                where = f"multi_modal_data.audio[{i}]"
                parts.append(senses.hearing.part({"type": "audio", "audio": sound}, where)["media"])
        images = given.get("image", [])
        for i, image in enumerate(images if isinstance(images, list | tuple) else [images]):
            sight = senses.sight
            assert sight is not None
            where = f"multi_modal_data.image[{i}]"
            if isinstance(image, bytes):
                parts.append(PicturePart(where, data=image, detail=sight.detail({}, where, options)))
            else:
                parts.append(sight.part({"image": image}, where, options)["media"])
        return _Encoded(text, *self._seen(text, parts, self.get_tokenizer().encode))

    def _with_pictures(self, messages: Sequence[Message], options: Mapping[str, Any] | None) -> list[Message]:
        """Return the messages with their pictures and sounds as parts that the engine reads, if the model sees or
        hears."""
        senses = self._engine.senses
        if not any(senses):
            return list(messages)

        def read(part: Any, where: str) -> Any:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in PICTURE_PARTS and senses.sight is not None:
                return senses.sight.part(part, where, options)
            return senses.hearing.part(part, where) if kind in SOUND_PARTS and senses.hearing is not None else part

        found = list[Message]()
        for i, message in enumerate(messages):
            content = message.get("content")
            if isinstance(content, list):
                content = [read(part, f"messages[{i}].content[{j}]") for j, part in enumerate(content)]
                message = {**message, "content": content}
            found.append(message)
        return found

    def _encode_chat(self, chat: Conversation) -> _Encoded:
        text, template = chat.prompt(self._engine), self._engine.chat_template
        if not any(self._engine.senses) or not any(images_of(message) for message in chat.messages):
            return _Encoded(text, chat.encode(text, self._engine))
        parts = template.pictures(chat.messages, with_tools=bool(chat.tools.offered))
        return _Encoded(text, *self._seen(text, parts, lambda text: chat.encode(text, self._engine)))

    def _seen(
        self, text: str, parts: Sequence[PicturePart | SoundPart], encode: Callable[[str], Sequence[int]]
    ) -> tuple[PromptIds, None, tuple[MediaSpan, ...]]:
        ids, media = self._engine.senses.read(text, parts, encode, self._engine.name)
        require_room(ids, self._engine.plan.max_model_len)
        return ids, None, media

    def _params_for(self, count: int, given: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * count
        _check_length(len(given), count, "sampling_params")
        return list(given)

    def _adapters_for(
        self, count: int, given: LoRARequest | Sequence[LoRARequest | None] | None
    ) -> list[Adapter | None]:
        if given is None or isinstance(given, LoRARequest):
            return [self._adapter(given)] * count
        _check_length(len(given), count, "lora_request")
        return [self._adapter(each) for each in given]

    def _adapter(self, asked: LoRARequest | None) -> Adapter | None:
        if asked is None:
            return None
        with self._lock:
            adapters = self._engine.require_adapters()
            found = adapters.find(asked.lora_name)
            if found is not None and found.asked_path != asked.lora_path:
                raise InvalidParameter(
                    f"The adapter {asked.lora_name!r} is loaded from {found.asked_path}.",
                    f"This call names the path {asked.lora_path}.",
                    "Choose another name.",
                    param="lora_request",
                )
            return (found or adapters.load(asked.lora_name, asked.lora_path)).adapter

    def _add(self, result: RequestOutput, event: GenerationEvent) -> None:
        output = result.outputs[event.index]
        output.text += event.text
        output.token_ids += event.token_ids
        if output.logprobs is not None:
            output.logprobs += [self._candidates(position) for position in event.logprobs]
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(p.logprobs[0] for p in event.logprobs)
        if event.prompt_logprobs is not None and result.prompt_logprobs is None:
            result.prompt_logprobs = [None, *(self._candidates(position) for position in event.prompt_logprobs)]
        if event.finish_reason is not None:
            output.finish_reason, output.stop_reason = event.finish_reason, event.stop_reason
            result.num_cached_tokens = max(result.num_cached_tokens, event.usage.cached_tokens if event.usage else 0)

    def _candidates(self, position: TokenLogprobs) -> dict[int, Logprob]:
        """Return the sampled token with its rank, then the likeliest tokens."""
        token_text = self.get_tokenizer().token_text
        ranks = [position.rank, *range(1, len(position.token_ids))]
        candidates: dict[int, Logprob] = {}
        for token_id, logprob, rank in zip(position.token_ids, position.logprobs, ranks, strict=True):
            candidates.setdefault(token_id, Logprob(logprob, rank, token_text(token_id)))
        return candidates


class _Encoded(NamedTuple):
    """An encoded prompt."""

    text: str | None
    token_ids: Sequence[int]
    embeds: PromptEmbeds | None = None  # prompt embeddings that replace the tokens
    media: tuple[MediaSpan, ...] = ()  # pictures
    begun: tuple[int, ...] = ()  # how an encoder-decoder's answer begins


def _encoded_source(prompt: Mapping[str, Any], model: ServedModel, encode: Callable[[Prompt], _Encoded]) -> _Encoded:
    """Encode the prompt of an encoder-decoder, and how its answer begins."""
    names = {"encoder_prompt", "decoder_prompt", "src_lang", "tgt_lang"}
    if unknown := set(prompt) - names:
        what = f"A prompt dictionary with 'encoder_prompt' holds no {min(unknown)!r}."
        raise InvalidParameter(what, f"It may hold {', '.join(sorted(names))}.", param="prompt")
    read, begun = encode(prompt["encoder_prompt"]), prompt.get("decoder_prompt")
    ids = in_language(model, read.token_ids, prompt.get("src_lang"))
    begun = encode(begun).token_ids if isinstance(begun, Mapping) else begun
    return read._replace(token_ids=ids, begun=answer_start(model, begun, prompt.get("tgt_lang")))


class _ProgressBar:
    """A progress bar like vLLM's: prompts done, and tokens per second in and out."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, desc="Processed prompts", disable=not enabled, dynamic_ncols=True)
        self._prompt_tokens = self._output_tokens = 0

    def advance(self, event: GenerationEvent) -> None:
        if event.usage is not None and not self._bar.disable:
            self._prompt_tokens += event.usage.prompt_tokens
            self._output_tokens += event.usage.completion_tokens
            seconds = max(self._bar.format_dict["elapsed"], 1e-6)
            speed = f"{self._prompt_tokens / seconds:.1f} tok/s in, {self._output_tokens / seconds:.1f} tok/s out"
            self._bar.set_postfix_str(speed, refresh=False)
        self._bar.update(1)

    def close(self) -> None:
        self._bar.close()


PARSED = {
    "max_model_len", "lora_modules", "tensor_parallel_size", "pipeline_parallel_size", "tensor_split",
    "pipeline_layer_partition", "device_ids", "n_cpu_moe", "limit_mm_per_prompt", "mm_processor_kwargs",
}  # fmt: skip
"""Arguments that may also have the form of their flag: "auto", "3,1", a list."""


def _engine_config(given: Mapping[str, Any]) -> EngineConfig:
    """Turn the keyword arguments into settings. Raises `UnsupportedOption` or `ConfigError` naming the wrong one."""
    values = dict(given)
    if values.pop("enable_chunked_prefill", True) is not True:
        raise UnsupportedOption("enable_chunked_prefill=False is not supported.", UNSUPPORTED["enable_chunked_prefill"])
    known = [f.name for f in fields(EngineConfig)]
    for name in values:
        if name in UNSUPPORTED:
            raise UnsupportedOption(f"{name} is not supported.", UNSUPPORTED[name], f"leave {name} out", param=name)
        if name not in known:
            near = get_close_matches(name, known, n=1)
            why = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(sorted(known))}."
            raise ConfigError(f"LLM has no argument {name!r}.", why, param=name)
    values["dtype"] = str(values["dtype"]).removeprefix("torch.")  # torch.float16 and "float16" mean the same
    for name in PARSED & values.keys():
        values[name] = SETTINGS[name].parse(values[name])
    values.setdefault("max_num_queued_reqs", 2**31)  # the caller's list is the queue, so it has no limit
    values.setdefault("profile", "none")  # a script's results do not depend on what was tuned on this machine
    return EngineConfig(**values)


def _checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]]:
    """Check that the tools have OpenAI's form, which chat templates expect."""
    for i, tool in enumerate(tools or ()):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            what = f"tools[{i}] is not a function."
            raise InvalidParameter(what, 'Expected {"type": "function", "function": {"name": ...}}.', param="tools")
    return tools or ()


def _as_prompts(prompts: Prompt | Sequence[Prompt | _Encoded]) -> list[Prompt | _Encoded]:
    """Return a list of prompts from one prompt or many; a list of integers is one prompt's token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _empty_output(text: str | None, asked: GenerationRequest) -> RequestOutput:
    wants_logprobs = asked.params.logprobs is not None
    outputs = [CompletionOutput(index, logprobs=[] if wants_logprobs else None) for index in range(asked.params.n)]
    token_ids = list(asked.prompt_token_ids) if asked.prompt_embeds is None else []
    return RequestOutput(asked.request_id, text, token_ids, outputs)


def _check_length(got: int, wanted: int, param: str) -> None:
    if got != wanted:
        raise InvalidParameter(
            f"{param} has {got} entries for {wanted} prompts.",
            "Pass one for all prompts, or one for each prompt.",
            param=param,
        )


def _heard(llm: LLM, client: SpeechClient, samples: Samples, windows: Sequence[Window], decoding: Any) -> list[Heard]:
    """Return the texts of windows, each of which is a chat of one turn for a model that hears."""
    from localllm.serving.transcription import ChatTranscriber, TranscriptionClient, inputs_of

    if isinstance(client, ChatTranscriber):
        prompts = [client.asked(samples, window, decoding) for window in windows]
        encoded = [_Encoded(None, ids, None, client.spans(ids)) for ids, _ in prompts]
        outputs = llm.generate(encoded, [params for _, params in prompts], use_tqdm=False) if encoded else []
        heard = []
        for window, each in zip(windows, (output.outputs[0] for output in outputs), strict=True):
            pairs = zip(each.token_ids, each.logprobs or (), strict=True)
            logprobs = [found[token].logprob for token, found in pairs]
            heard.append(client.heard(window, decoding, each.text, each.token_ids, logprobs))
        return heard
    assert isinstance(client, TranscriptionClient)
    if decoding is None or not decoding.reads_previous:
        results = llm._pool(inputs_of(samples, windows, decoding))
    else:
        results = list[Any]()
        for window in windows:
            results += llm._pool(inputs_of(samples, [window], decoding))
            decoding = decoding.after(results[-1])
    return [client.heard(*each) for each in zip(windows, results, strict=True)]
