"""Answers of the OpenAI dialect, including vLLM's, llama.cpp's and Cohere's, as they are sent.

Does not know: where the values come from.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from localllm.web.api.timings import ApiTimings
from localllm.web.shape import Shape

Finish = Literal["stop", "length", "tool_calls", "abort"]


class PromptDetails(Shape):
    cached_tokens: int
    image_tokens: int | UnsetType = UNSET  # if the prompt has pictures
    audio_tokens: int | UnsetType = UNSET  # if the prompt has sound


class CompletionDetails(Shape):
    """Tokens of a prediction that were verified: those that the answer has, and those that it does not have."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class OpenAIUsage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET  # if a prediction was verified


class InfillPiece(Shape):
    """A piece of a text that fills a gap, in llama.cpp's format."""

    content: str
    stop: bool


class Infill(Shape):
    """A text that fills a gap, in llama.cpp's format."""

    content: str
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    timings: ApiTimings


class Scored(Shape):
    token: str
    logprob: float
    bytes: list[int]


class ScoredToken(Scored):
    top_logprobs: list[Scored]


class ChatLogprobs(Shape):
    content: list[ScoredToken]
    refusal: None


class PromptScored(Shape):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptScored] | None] | None


class OpenAICalledFunction(Shape, kw_only=True):
    name: str | UnsetType = UNSET  # in a stream with the first piece only
    arguments: str


class OpenAIToolCall(Shape):
    id: str
    type: Literal["function"]
    function: OpenAICalledFunction


class ToolCallPiece(Shape, kw_only=True):
    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: OpenAICalledFunction


class OpenAIMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[Any]
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[OpenAIToolCall] | UnsetType = UNSET


class ChatChoice(Shape):
    index: int
    message: OpenAIMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class OpenAIHead(Shape):
    """The fields that a completion and each of its chunks have."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(OpenAIHead):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: OpenAIUsage
    timings: ApiTimings
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET


class Delta(Shape):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallPiece] | UnsetType = UNSET


class ChunkChoice(Shape, kw_only=True):
    index: int
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    delta: Delta
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET


class OpenAIPromptProgress(Shape):
    """Prompt progress in llama.cpp's format."""

    total: int
    cache: int
    processed: int
    time_ms: int


class OpenAIChunk(OpenAIHead):
    choices: list[Any]
    usage: OpenAIUsage | UnsetType | None = UNSET
    prompt_progress: OpenAIPromptProgress | UnsetType = UNSET
    timings: ApiTimings | UnsetType = UNSET


class ChatCompletionChunk(OpenAIChunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]


class CompletionLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionText(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    stop_reason: int | str | None


class CompletionPiece(CompletionText):
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET


class CompletionChoice(CompletionText):
    finish_reason: Finish
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET


class Completion(OpenAIHead):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: OpenAIUsage
    timings: ApiTimings


class CompletionChunk(OpenAIChunk):
    object: Literal["text_completion"]
    choices: list[CompletionPiece]


class OpenAIPrompt(Shape):
    prompt: str


class InputTokens(Shape):
    object: Literal["response.input_tokens"]
    input_tokens: int


class Tokens(Shape):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Text(Shape):
    prompt: str  # vLLM's name
    content: str  # llama.cpp's


class TokenizerInfo(Shape):
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None
    model_max_length: int


class ModelState(Shape):
    value: str
    phase: str | UnsetType = UNSET
    progress: float | UnsetType | None = UNSET


class ImageFacts(Shape):
    """The pictures that a model reads."""

    min_tokens: int
    max_tokens: int
    px_per_token: int | None  # null: the number of tokens does not follow from the size alone


class OpenAIModel(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    status: ModelState
    max_model_len: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET  # served if the model is loaded, else as trained
    capabilities: list[str] | UnsetType = UNSET  # completion, tools, reasoning, vision; embedding; rerank
    image: ImageFacts | UnsetType = UNSET  # of a model that sees
    meta: dict[str, Any] | UnsetType = UNSET


class CodexModel(Shape):
    """A model as Codex reads it, whose fields are named as in its catalogue."""

    slug: str
    display_name: str
    description: str
    supported_reasoning_levels: list[Any]
    shell_type: str
    visibility: str
    supported_in_api: bool
    priority: int
    base_instructions: str
    supports_reasoning_summaries: bool
    support_verbosity: bool
    truncation_policy: dict[str, Any]
    supports_parallel_tool_calls: bool
    context_window: int | None
    experimental_supported_tools: list[str]
    input_modalities: list[str]


class Models(Shape):
    object: Literal["list"]
    data: list[OpenAIModel]
    models: list[CodexModel] | UnsetType = UNSET  # for Codex, which sends client_version


class PoolingUsage(Shape):
    prompt_tokens: int
    total_tokens: int


class OpenAIEmbedding(Shape):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # str: base64 of little-endian fp32


class Embeddings(Shape):
    object: Literal["list"]
    data: list[OpenAIEmbedding]
    model: str
    usage: PoolingUsage


class RankedText(Shape):
    text: str


class Ranked(Shape):
    index: int
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class Ranking(Shape):
    id: str
    model: str
    results: list[Ranked]
    usage: PoolingUsage


class OpenAIScore(Shape):
    index: int
    object: Literal["score"]
    score: float


class Scores(Shape):
    id: str
    object: Literal["list"]
    model: str
    data: list[OpenAIScore]
    usage: PoolingUsage


class PooledText(Shape):
    """`data` is a vector, or a list of vectors for the tokens; texts are vectors in base64."""

    index: int
    object: Literal["pooling"]
    data: str | list[Any]


class Pooled(Shape):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PooledText]
    usage: PoolingUsage


class ClassifiedText(Shape):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classes(Shape):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ClassifiedText]
    usage: PoolingUsage


class SoundUsage(Shape):
    type: Literal["duration"]
    seconds: float


class TranscribedToken(Shape):
    token: str
    bytes: list[int]
    logprob: float


class Transcription(Shape):
    text: str
    usage: SoundUsage
    logprobs: list[TranscribedToken] | UnsetType = UNSET  # if include[] asks for them


class TranscribedWord(Shape):
    word: str
    start: float
    end: float
    probability: float


class TranscribedSegment(Shape):
    id: int
    seek: int  # frames of 10 ms before the segment
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class VerboseTranscription(Shape):
    task: Literal["transcribe", "translate"]
    language: str  # code of the text's language; empty: the model does not say
    duration: float
    text: str
    usage: SoundUsage
    segments: list[TranscribedSegment] | UnsetType = UNSET
    words: list[TranscribedWord] | UnsetType = UNSET


class TranscriptDelta(Shape):
    type: Literal["transcript.text.delta"]
    delta: str
    logprobs: list[TranscribedToken] | UnsetType = UNSET  # if include[] asks for them


class TranscriptDone(Shape):
    type: Literal["transcript.text.done"]
    text: str
    usage: SoundUsage
