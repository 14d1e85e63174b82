"""Turns the engine's token ids into text events: detokenises, finds stop strings, counts tokens.

One `OutputProcessor` serves all open choices, on its caller's thread (the event loop, or the offline API).
Does not know: asyncio, HTTP, the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

from localllm.engine.outputs import (
    EngineOutput,
    ExplainedMiss,
    GenerationEvent,
    PromptProgress,
    Timings,
    Usage,
    explained,
)
from localllm.engine.recorder import now_s
from localllm.engine.request import Request
from localllm.engine.stats import missed_seconds
from localllm.errors import LocalLLMError
from localllm.text.cursor import TextCursor, TextDelta
from localllm.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _OpenChoice:
    index: int
    cursor: TextCursor | None  # None: detokenize=False
    prompt_tokens: int
    arrived_s: float
    stop_token_ids: frozenset[int]
    timed: bool  # every event carries usage and timings
    completion_tokens: int = 0
    first_token_s: float | None = None
    miss: ExplainedMiss | None = None


class OutputProcessor:
    """Makes events of outputs: `open` a choice, then `process` its outputs until an event carries a finish reason."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._choices: dict[str, _OpenChoice] = {}

    def open(self, request: Request, index: int = 0, *, timed: bool = False) -> None:
        params, cursor = request.params, None
        before = [] if request.prompt_embeds is not None else request.token_ids[-16:].tolist()
        num_prompt_tokens = request.prompt_len
        if request.source is not None:  # the answer is a text of its own
            before = [token_id for token_id in before if token_id not in self._tokenizer.special_ids]
            num_prompt_tokens = len(request.source.token_ids)
        if params.detokenize:
            assert isinstance(params.stop, tuple)
            cursor = TextCursor(
                self._tokenizer,
                before,
                stop=params.stop,
                include_stop_str_in_output=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
            )
        self._choices[request.request_id] = _OpenChoice(
            index, cursor, num_prompt_tokens, request.arrived_s, request.stop_token_ids, timed
        )

    def close(self, request_id: str) -> bool:
        """Forget a choice. Return True if it was still open."""
        return self._choices.pop(request_id, None) is not None

    def process(self, output: EngineOutput) -> GenerationEvent | None:
        """Return the event of an output; None if there is nothing to report yet, or if the choice is closed."""
        choice = self._choices.get(output.request_id)
        if choice is None:
            return None
        if output.token_ids and choice.first_token_s is None:
            choice.first_token_s = now_s()
        delta = self._advance(choice, output)
        stopped = delta.stop_string is not None
        finish_reason = "stop" if stopped else output.finish_reason
        progress = self._progress(choice, output) if output.num_prompt_tokens_done is not None else None
        has_news = delta.text or delta.token_ids or output.prompt_logprobs is not None or progress is not None
        if finish_reason is None and not has_news:
            return None
        told = finish_reason is not None or choice.timed
        event = GenerationEvent(
            index=choice.index,
            text=delta.text,
            token_ids=delta.token_ids,
            logprobs=delta.logprobs,
            prompt_logprobs=output.prompt_logprobs,
            finish_reason=finish_reason,
            stop_reason=delta.stop_string if stopped else output.stop_reason,
            usage=Usage(choice.prompt_tokens, choice.completion_tokens, output.num_cached_tokens, output.drafts)
            if told
            else None,
            timings=self._timings(choice, output) if told else None,
            prompt_progress=progress,
            error=output.error,
        )
        if finish_reason is not None:
            del self._choices[output.request_id]
        return event

    def fail(self, request_id: str, error: LocalLLMError) -> GenerationEvent | None:
        """Return the last event of a choice that fails; None if the choice is closed."""
        choice = self._choices.pop(request_id, None)
        return None if choice is None else GenerationEvent(choice.index, finish_reason="error", error=error)

    def _advance(self, choice: _OpenChoice, output: EngineOutput) -> TextDelta:
        """Push the new tokens; at the end also flush held-back text."""
        if choice.cursor is None:
            choice.completion_tokens += len(output.token_ids)
            return TextDelta("", output.token_ids, output.logprobs, None)
        if output.finish_reason is None:
            delta = choice.cursor.push(output.token_ids, output.logprobs)
        else:
            last = output.token_ids[-1:]  # none where the reader of the answer ended it
            by_token = output.finish_reason == "stop" and not choice.stop_token_ids.isdisjoint(last)
            delta = choice.cursor.finish(output.token_ids, output.logprobs, eos_is_last=by_token)
        choice.completion_tokens = choice.cursor.num_tokens
        return delta

    def _progress(self, choice: _OpenChoice, output: EngineOutput) -> PromptProgress:
        done = output.num_prompt_tokens_done or 0
        return PromptProgress(choice.prompt_tokens, output.num_cached_tokens, done, now_s() - output.scheduled_s)

    def _timings(self, choice: _OpenChoice, output: EngineOutput) -> Timings:
        end_s = now_s()
        scheduled_s = output.scheduled_s or end_s
        first_s = choice.first_token_s or end_s
        prefill_s = max(0.0, first_s - scheduled_s)
        if choice.miss is None and choice.first_token_s is not None and (miss := output.cache_miss) is not None:
            seconds = missed_seconds(miss.num_tokens, choice.prompt_tokens - output.num_cached_tokens, prefill_s)
            choice.miss = explained(miss, seconds, self._tokenizer.decode)
        return Timings(
            queue_s=max(0.0, scheduled_s - choice.arrived_s),
            prefill_s=prefill_s,
            decode_s=end_s - first_s,
            ttft_s=first_s - choice.arrived_s,
            cache_miss=choice.miss,
        )
