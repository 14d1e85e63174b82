"""POST /v1/audio/transcriptions and /v1/audio/translations: text, words, segments and subtitles of a sound file."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal, cast

import anyio.to_thread
import msgspec
from litestar import post
from litestar.datastructures import UploadFile
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse

from localllm.config.settings import ServerConfig
from localllm.errors import InvalidParameter, UnsupportedParameter
from localllm.models.encoders.recipe import MOST_BEAMS
from localllm.serving.transcription import Heard, SpeechOptions, transcriber_of, transcript_of, warnings_of
from localllm.text.transcript import FORMATS, Transcript, TranscriptSegment, compression_ratio, joined, srt, vtt
from localllm.web.api.disconnect import EventStream, unless_disconnected
from localllm.web.api.exchange import ApiRequest, served_model, warning_headers
from localllm.web.api.fields import FieldRules, Refused
from localllm.web.api.openai import shapes
from localllm.web.api.openapi import FORM, OF_MODELS, Operation, RequestBody
from localllm.web.errors import InvalidType, MissingParameter, UnsupportedMediaType, as_local_error, openai_error

if TYPE_CHECKING:
    from localllm.media.sound import Samples
    from localllm.media.speech import VadOptions

FORM_BYTES = 64 * 1024
"""Room for the other fields of a form and for the borders between them."""
_SPEAKERS = Refused("Speakers are not told apart.")
RULES = FieldRules(
    refused={
        "known_speaker_names[]": _SPEAKERS,
        "known_speaker_references[]": _SPEAKERS,
    }
)


_NUMBERS: dict[str, Callable[[str], float]] = {
    "temperature": float, "seed": int, "beam_size": int, "no_speech_threshold": float, "logprob_threshold": float,
    "compression_ratio_threshold": float, "max_completion_tokens": int,
}  # fmt: skip


class TranscriptionForm(msgspec.Struct, kw_only=True):
    file: Annotated[str, msgspec.Meta(extra_json_schema={"format": "binary"})]
    model: str | None = None
    response_format: Literal["json", "text", "srt", "vtt", "verbose_json"] = "json"
    timestamp_granularities: list[Literal["word", "segment"]] = msgspec.field(
        default_factory=list, name="timestamp_granularities[]"
    )  # of verbose_json; none: segment
    stream: bool = False
    chunking_strategy: str | None = None  # auto, or JSON of {"type": "server_vad", ...}
    vad_filter: bool = True  # false: windows of 30 s, nothing is left out
    allow_damaged: bool = False  # transcribe a damaged file as far as it can be read
    language: str | None = None  # ISO 639-1, or its English name
    prompt: str | None = None  # a text before the sound: its names, its style
    hotwords: str | None = None  # more of the prompt
    temperature: float | None = None  # 0 to 1, of the first attempt
    seed: int | None = None
    beam_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_BEAMS)] = 1  # partial texts of a search, at temperature 0
    condition_on_previous_text: bool = False  # each window reads the texts before, so windows wait for each other
    no_speech_threshold: float = 0.6  # probability of no speech from which on an unlikely text is dropped
    logprob_threshold: float = -1.0  # mean log probability below which a window is written again
    compression_ratio_threshold: float = 2.4  # above which a window is written again
    max_completion_tokens: int | None = None  # of a window
    include: list[Literal["logprobs"]] = msgspec.field(default_factory=list, name="include[]")  # of json and streams


class ServerVad(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["server_vad"]
    threshold: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.5
    prefix_padding_ms: Annotated[int, msgspec.Meta(ge=0, le=2000)] = 200
    silence_duration_ms: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 500


def audio_routes(config: ServerConfig) -> list[HTTPRouteHandler]:
    """Return the handlers, whose bodies may be as large as a sound file."""

    @post(
        ["/v1/audio/transcriptions", "/audio/transcriptions"],
        status_code=200,
        request_max_body_size=config.largest_audio_bytes + FORM_BYTES,
        operation=Operation(
            shapes.Transcription, RequestBody(TranscriptionForm, RULES, media_type=FORM), shapes.TranscriptDelta,
            also=(*OF_MODELS, 413, 415), guide="speech",
        ),
    )  # fmt: skip
    async def transcriptions(request: ApiRequest) -> ASGIResponse:
        """Transcribe a sound file. The format of the file is told by its first bytes."""
        return await _transcribe(request, config)

    @post(
        ["/v1/audio/translations", "/audio/translations"],
        status_code=200,
        request_max_body_size=config.largest_audio_bytes + FORM_BYTES,
        operation=Operation(
            shapes.Transcription, RequestBody(TranscriptionForm, RULES, media_type=FORM), shapes.TranscriptDelta,
            also=(*OF_MODELS, 413, 415), guide="speech",
        ),
    )  # fmt: skip
    async def translations(request: ApiRequest) -> ASGIResponse:
        """Write the text of a sound file in English. Whisper's models translate, if they are neither distilled nor of
        English alone."""
        return await _transcribe(request, config, translate=True)

    return [transcriptions, translations]


async def _form(request: ApiRequest) -> Any:
    if request.content_type[0] != "multipart/form-data":
        raise UnsupportedMediaType(
            "The file must be sent as multipart/form-data.",
            f"The content type is {request.content_type[0] or 'missing'!r}.",
            "With curl: -F model=NAME -F file=@talk.wav",
        )
    return await request.form()


async def _transcribe(request: ApiRequest, config: ServerConfig, *, translate: bool = False) -> ASGIResponse:
    form = await _form(request)
    asked, granularities, warnings = _read(form)
    model = await served_model(request, asked["model"], "transcribe")
    client = transcriber_of(model)
    options = _options(form, translate=translate, words="word" in granularities)
    decoding, unused = client.decoding(options, model.name)
    warnings += unused
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise MissingParameter("Missing required parameter: 'file'.", param="file")
    vad = _vad(form)
    samples = await _samples(file, "file", config, allow_damaged=_flag(form, "allow_damaged", default=False))
    heard = client.transcribe(samples, vad, decoding, is_background=model.is_background)
    spell = client.spelled if asked["logprobs"] else None
    if asked["stream"]:
        return EventStream(
            _events(request, heard, samples.seconds, spell),
            nothing_to_close,
            warning_headers([*warnings, *warnings_of(samples)]),
        )

    windows = await unless_disconnected(request.receive, _all(heard))
    transcript = transcript_of(samples, windows, translate=translate, warnings=warnings)
    body = written(transcript, asked["format"], granularities, spell)
    headers = warning_headers(transcript.warnings)
    return ASGIResponse(body=body, media_type=FORMATS[asked["format"]], headers=headers)


async def _samples(file: UploadFile, where: str, config: ServerConfig, *, allow_damaged: bool = False) -> Samples:
    from localllm.media.sound import SoundLimits, decode

    limits, opened = SoundLimits(config.largest_audio_bytes, config.max_audio_seconds), cast("BinaryIO", file.file)
    return await anyio.to_thread.run_sync(lambda: decode(opened, where, limits, allow_damaged=allow_damaged))


async def _all(heard: AsyncIterator[Heard]) -> list[Heard]:
    return [each async for each in heard]


async def hear(
    request: ApiRequest, file: UploadFile, where: str, options: SpeechOptions, asked: str | None = None
) -> tuple[str, Samples, AsyncIterator[Heard], list[str]]:
    """Return the speech model's name, the sound of a file that a page sent, damaged or not, the texts of its windows,
    and warnings. where: the file's name in errors. asked: the model; None: the speech model. Raises like a request of
    the API.
    """
    from localllm.media.speech import VadOptions

    model = await served_model(request, asked, "transcribe")
    client = transcriber_of(model)
    decoding, warnings = client.decoding(options, model.name)
    samples = await _samples(file, where, request.app.state["settings"].server, allow_damaged=True)
    return model.name, samples, client.transcribe(samples, VadOptions(), decoding), warnings


async def transcript_of_page(
    request: ApiRequest, file: UploadFile, where: str, asked: str | None = None
) -> tuple[str, Transcript]:
    """Return the speech model's name and the text of a file that a page sent. Raises like `hear`."""
    name, samples, heard, warnings = await hear(request, file, where, SpeechOptions(), asked)
    windows = await unless_disconnected(request.receive, _all(heard))
    return name, transcript_of(samples, windows, translate=False, warnings=warnings)


async def nothing_to_close() -> None:
    """The generator of events has no source that must be closed."""


Spell = Callable[[Iterable[TranscriptSegment]], list[tuple[bytes, float]]]
"""Returns the tokens of some segments, each with its log probability."""


def _tokens(spelled: Iterable[tuple[bytes, float]]) -> list[shapes.TranscribedToken]:
    return [
        shapes.TranscribedToken(token=raw.decode(errors="replace"), bytes=list(raw), logprob=logprob)
        for raw, logprob in spelled
    ]


async def _events(
    request: ApiRequest, heard: AsyncIterator[Heard], seconds: float, spell: Spell | None
) -> AsyncGenerator[bytes, None]:
    told = ""
    try:
        async for each in heard:
            if text := joined((part.text for part in each.segments or each.words), each.language):
                delta = joined(("", text), each.language) if told else text
                told += delta
                event = shapes.TranscriptDelta(type="transcript.text.delta", delta=delta)
                if spell is not None:
                    event.logprobs = _tokens(spell(each.segments or [TranscriptSegment.of(each.words)]))
                yield _event(event)
        usage = shapes.SoundUsage(type="duration", seconds=seconds)
        yield _event(shapes.TranscriptDone(type="transcript.text.done", text=told, usage=usage))
    except Exception as error:
        yield _event(openai_error(as_local_error(error, request.scope)))


def _event(content: Any) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(content)


def written(
    transcript: Transcript, kind: str, granularities: Collection[str] = ("segment",), spell: Spell | None = None
) -> bytes:
    """Return a transcript in one of the formats. granularities: the times that verbose_json has, word or segment.
    spell: None: json has no log probabilities."""
    match kind:
        case "text":
            return f"{transcript.text}\n".encode()
        case "srt":
            return srt(transcript.segments).encode()
        case "vtt":
            return vtt(transcript.segments).encode()
    usage = shapes.SoundUsage(type="duration", seconds=transcript.seconds)
    if kind == "json":
        plain = shapes.Transcription(text=transcript.text, usage=usage)
        if spell is not None:
            plain.logprobs = _tokens(spell(transcript.segments))
        return msgspec.json.encode(plain)
    answer = shapes.VerboseTranscription(
        task="translate" if transcript.is_translated else "transcribe", language=transcript.language,
        duration=transcript.seconds, text=transcript.text, usage=usage,
    )  # fmt: skip
    if "segment" in granularities:
        answer.segments = [_segment(i, each) for i, each in enumerate(transcript.segments)]
    if "word" in granularities:
        answer.words = [
            shapes.TranscribedWord(word=each.text, start=each.start_s, end=each.stop_s, probability=each.probability)
            for each in transcript.words
        ]
    return msgspec.json.encode(answer)


def _segment(number: int, segment: TranscriptSegment) -> shapes.TranscribedSegment:
    return shapes.TranscribedSegment(
        id=number, seek=round(segment.start_s * 100), start=segment.start_s, end=segment.stop_s, text=segment.text,
        tokens=list(segment.token_ids), temperature=segment.temperature, avg_logprob=segment.avg_logprob,
        compression_ratio=compression_ratio(segment.text), no_speech_prob=segment.no_speech_prob,
    )  # fmt: skip


def _read(form: Any) -> tuple[dict[str, Any], set[str], list[str]]:
    """Return model, format and whether to stream, the granularities, and warnings. Raises an error that names the wrong
    field."""
    fields = {field.encode_name for field in msgspec.structs.fields(TranscriptionForm)}
    warnings = RULES.check(dict(form), {*fields, "timestamp_granularities", "include"})
    kind = _text(form, "response_format") or "json"
    if kind not in FORMATS:
        error = UnsupportedParameter if kind == "diarized_json" else InvalidParameter
        raise error(
            f"response_format {kind[:40]!r} is not supported.", f"Supported: {', '.join(FORMATS)}.",
            param="response_format",
        )  # fmt: skip
    granularities = {
        str(each) for name in ("timestamp_granularities[]", "timestamp_granularities") for each in form.getall(name, [])
    }
    if unknown := granularities - {"word", "segment"}:
        what = f"timestamp_granularities {min(unknown)[:40]!r} is not supported."
        raise InvalidParameter(what, "Supported: word, segment.", param="timestamp_granularities")
    if granularities and kind != "verbose_json":
        what = f"timestamp_granularities does not apply to {kind}."
        raise InvalidParameter(what, "Only verbose_json has times.", "verbose_json", param="timestamp_granularities")
    stream = _flag(form, "stream", default=False)
    if stream and kind not in ("json", "text"):
        what = f"response_format {kind} cannot be streamed."
        raise UnsupportedParameter(what, "A stream has events with text.", "json", param="response_format")
    included = {str(each) for name in ("include[]", "include") for each in form.getall(name, [])}
    if unknown := included - {"logprobs"}:
        raise InvalidParameter(
            f"include {min(unknown)[:40]!r} is not supported.", "Supported: logprobs.", param="include"
        )
    if included and kind != "json":
        what, why = f"include does not apply to {kind}.", "Only json and streams of it have log probabilities."
        raise InvalidParameter(what, why, "json", param="include")
    asked = {"model": _text(form, "model"), "format": kind, "stream": stream, "logprobs": bool(included)}
    return asked, granularities or {"segment"}, warnings


def _options(form: Any, *, translate: bool, words: bool) -> SpeechOptions:
    """Return what is asked of the model. Raises `InvalidType` for what is not a number."""
    numbers = dict[str, Any]()
    for name, kind in _NUMBERS.items():
        try:
            numbers |= {name: kind(text)} if (text := _text(form, name)) is not None else {}
        except ValueError as error:
            raise InvalidType(f"Invalid type for '{name}'.", f"{error}.", param=name) from None
    prompt = " ".join(text for name in ("prompt", "hotwords") if (text := _text(form, name)))
    conditioned = _flag(form, "condition_on_previous_text", default=False)
    return SpeechOptions(
        _text(form, "language"), prompt, translate=translate, words=words, condition_on_previous_text=conditioned,
        **numbers,
    )  # fmt: skip


def _vad(form: Any) -> VadOptions | None:
    """Return how speech is told from silence, or None: nothing is left out."""
    options = vad_options(_text(form, "chunking_strategy"))
    return options if _flag(form, "vad_filter", default=True) else None


def vad_options(asked: str | None) -> VadOptions:
    """Return how a `chunking_strategy` tells speech from silence. Raises `InvalidParameter`."""
    from localllm.media.speech import VadOptions

    if asked in (None, "auto"):
        return VadOptions()
    try:
        options = msgspec.json.decode(asked, type=ServerVad)
    except msgspec.DecodeError as error:
        why = f"{error}. It must be auto, or an object with type server_vad."
        raise InvalidParameter("chunking_strategy is not valid.", why, param="chunking_strategy") from None
    return VadOptions(options.threshold, options.prefix_padding_ms / 1000, options.silence_duration_ms / 1000)


def _text(form: Any, name: str) -> str | None:
    value = form.get(name)
    if value is None or isinstance(value, str):
        return value or None
    raise InvalidType(f"Invalid type for '{name}'.", "Expected a text, not a file.", param=name)


def _flag(form: Any, name: str, *, default: bool) -> bool:
    value = _text(form, name)
    if value is None:
        return default
    if value.lower() not in ("true", "false", "1", "0"):
        raise InvalidParameter(f"{name} is {value[:20]!r}.", "It must be true or false.", param=name)
    return value.lower() in ("true", "1")
