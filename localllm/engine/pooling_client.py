"""The asyncio interface of a `PoolingLoop`: texts or other inputs in, vectors, scores or other results out.

Its life cycle is that of an `EngineClient` (start, stop, stats), so the model manager treats both alike.
Does not know: HTTP, dialects, torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from localllm.engine.memory.ledger import Ledger
from localllm.engine.pooling import BatchInput, PooledValues, PoolingInput, PoolingLoop
from localllm.engine.pulse import LoopClient, TimedPool
from localllm.engine.recorder import StatsRecorder
from localllm.engine.stats import EngineStats
from localllm.engine.step import RunnerStats
from localllm.errors import ContextTooLong, InvalidParameter, UnsupportedParameter
from localllm.models.encoders.recipe import Want
from localllm.text.chat_template import ChatTemplate
from localllm.text.tokenizer import Tokenizer

Text = str | Sequence[int]
"""A text, or its token ids."""


@dataclass(frozen=True, slots=True)
class PoolingLimits:
    max_length: int  # tokens of one input, special ones included
    max_num_seqs: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Answers:
    """One vector or score per input, and the number of tokens read."""

    values: list[list[float]]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """Converts a text to the token ids that an embedding model reads: of the text, or of the rendering of a chat
    template, which sentence-transformers also saves; there the text is a user's message, and a prompt the system's."""

    tokenizer: Tokenizer
    template: ChatTemplate | None = None  # None: plain text
    switches: Mapping[str, Any] = field(default_factory=dict)  # further variables of the template
    lower_case: bool = False  # texts are lower-cased first

    def encode(self, text: str, prompt: str = "") -> list[int]:
        """Return the token ids with special tokens. prompt: a prefix of the text, or the system's message."""
        if self.lower_case:
            text, prompt = text.lower(), prompt.lower()
        if self.template is None:
            return self.tokenizer.encode(prompt + text)
        messages = [{"role": "system", "content": prompt}] if prompt else []
        messages.append({"role": "user", "content": text})
        switches = {"add_generation_prompt": False, **self.switches}
        return self.tokenizer.encode(self.template.render(messages, **switches), add_special_tokens=False)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Return the ids of two texts as one input, and for each token which text it is from."""
        if self.lower_case:
            first, second = first.lower(), second.lower()
        return self.tokenizer.encode_pair(first, second)

    def cut(self, token_ids: Sequence[int], length: int, prompt: str = "") -> list[int]:
        """Return at most `length` of a text's ids.
        Keeps what ends every text: a closing token, or the template's end."""
        if len(token_ids) <= length:
            return list(token_ids)
        tail = _common_tail(self.encode("0", prompt), self.encode("1 2 3 4", prompt))
        return _with_tail(token_ids, tail, length)

    def cut_pair(self, token_ids: Sequence[int], types: Sequence[int], length: int) -> tuple[list[int], list[int]]:
        """Cut a pair to `length` tokens: its second text becomes shorter."""
        if len(token_ids) <= length:
            return list(token_ids), list(types)
        tail = _common_tail(self.encode_pair("0", "0")[0], self.encode_pair("0", "1 2 3 4")[0])
        return _with_tail(token_ids, tail, length), _with_tail(types, types[len(types) - len(tail) :], length)


class BatchClient(LoopClient):
    """The part of a client that does not depend on what the inputs are."""

    def __init__(self, loop: PoolingLoop, limits: PoolingLimits) -> None:
        self.limits = limits
        super().__init__(loop)
        self._loop = loop
        self._open = 0
        self._resting = replace(
            StatsRecorder().snapshot(
                Ledger((2,), 1), (), (), block_size=1, max_num_seqs=limits.max_num_seqs,
                max_model_len=limits.max_length, async_depth=1, runner=RunnerStats(),
            ),
            total_blocks=0,
            free_blocks=0,
            kv_groups=(),
        )  # fmt: skip

    async def start(self) -> None:
        event_loop = asyncio.get_running_loop()

        def on_ended() -> None:
            with suppress(RuntimeError):  # the event loop is closed: no reader is left
                event_loop.call_soon_threadsafe(self._ended.set)

        self._loop.on_ended = on_ended
        self._loop.start()

    async def stop(self) -> None:
        await asyncio.to_thread(self._loop.stop)

    @property
    def compilers(self) -> tuple[TimedPool, ...]:
        """Always empty: nothing is compiled."""
        return ()

    @property
    def num_open(self) -> int:
        return self._open

    def stats(self) -> EngineStats:
        """Return statistics with counts of inputs; there are no blocks and no generated tokens."""
        now = self._loop.stats()
        return replace(
            self._resting,
            num_waiting=now.num_waiting,
            num_running=now.num_running,
            prompt_tokens=now.num_tokens,
            finished={"stop": now.num_requests},
        )

    async def run(self, inputs: Sequence[BatchInput], is_background: bool) -> list[PooledValues]:
        """Return one answer per input. Raises `QueueFull`, `EngineStopped`."""
        self._open += 1
        try:
            return await asyncio.wrap_future(self._loop.submit(inputs, is_background=is_background))
        finally:
            self._open -= 1

    async def run_in_order(
        self, inputs: Sequence[BatchInput], is_background: bool
    ) -> AsyncGenerator[PooledValues, None]:
        """Yield one answer per input, in order, each as soon as it and those before it are known. Closing the iterator
        drops the other inputs. Raises like `run`."""
        event_loop = asyncio.get_running_loop()
        answers: list[asyncio.Future[PooledValues]] = [event_loop.create_future() for _ in inputs]

        def on_answer(index: int, answer: PooledValues) -> None:
            with suppress(RuntimeError):  # the event loop is closed: no reader is left
                event_loop.call_soon_threadsafe(answers[index].set_result, answer)

        self._open += 1
        whole = None
        try:
            future = self._loop.submit(inputs, is_background=is_background, on_answer=on_answer)
            whole = asyncio.wrap_future(future)
            for answer in answers:
                await asyncio.wait((answer, whole), return_when=asyncio.FIRST_COMPLETED)
                if not answer.done():
                    await whole  # raises: its answers are told before it is over
                yield await answer
        finally:
            self._open -= 1
            if whole is not None:
                whole.cancel()


class PoolingClient(BatchClient):
    def __init__(
        self,
        loop: PoolingLoop,
        encoder: TextEncoder,
        limits: PoolingLimits,
        dim: int,
        prompts: Mapping[str, str] | None = None,
        labels: Sequence[str] = (),
        wants: frozenset[Want] = frozenset({"pooled"}),
    ) -> None:
        """dim: numbers in one answer. prompts: by name, prefixes such as `query: ` that `embed` accepts.
        labels: names of a classifier's classes. wants: what an input can ask for."""
        super().__init__(loop, limits)
        self.dim, self.prompts = dim, dict(prompts or {})
        self.labels, self.wants = tuple(labels), wants
        self._encoder = encoder

    async def embed(
        self, texts: Sequence[Text], *, truncate: int | None = None, prompt: str = "", is_background: bool = False
    ) -> Answers:
        """Return one vector per text. truncate: most tokens to keep of each;
        -1: the model's limit. prompt: added to every text. is_background: every other request runs first.

        Raises `ContextTooLong`, `InvalidParameter`, `QueueFull`, `EngineStopped`.
        """
        return await self._answer(await asyncio.to_thread(self.inputs, texts, truncate, prompt), is_background)

    async def score(
        self, pairs: Sequence[tuple[str, str]], *, truncate: int | None = None, is_background: bool = False
    ) -> Answers:
        """Return one score per pair. A cross-encoder reads both texts at once. Raises like `embed`."""
        return await self._answer(await asyncio.to_thread(self.pair_inputs, pairs, truncate), is_background)

    async def pool(
        self, texts: Sequence[Text], want: Want, *, truncate: int | None = None, is_background: bool = False
    ) -> Answers:
        """Return for each text what it wants: `dim` numbers, or as many for each of its tokens. Raises like `embed`,
        and `UnsupportedParameter` for what the model does not have."""
        return await self._answer(await asyncio.to_thread(self.pool_inputs, texts, want, truncate), is_background)

    def pool_inputs(self, texts: Sequence[Text], want: Want, truncate: int | None = None) -> list[PoolingInput]:
        if want not in self.wants:
            known = ", ".join(sorted(self.wants))
            what = f"This model has no {want} outputs."
            raise UnsupportedParameter(what, f"It has: {known}.", "Leave out task and use_activation.", param="task")
        return [replace(each, want=want) for each in self.inputs(texts, truncate)]

    def inputs(self, texts: Sequence[Text], truncate: int | None = None, prompt: str = "") -> list[PoolingInput]:
        return [self._input(text, truncate, prompt) for text in texts]

    def pair_inputs(self, pairs: Sequence[tuple[str, str]], truncate: int | None = None) -> list[PoolingInput]:
        inputs = []
        for first, second in pairs:
            ids, types = self._encoder.encode_pair(first, second)
            ids, types = self._encoder.cut_pair(ids, types, self._kept(len(ids), truncate))
            inputs.append(PoolingInput(tuple(ids), tuple(types)))
        return inputs

    def _input(self, text: Text, truncate: int | None, prompt: str) -> PoolingInput:
        ids = self._encoder.encode(text, prompt) if isinstance(text, str) else text
        if not ids:
            raise InvalidParameter("An input is empty.", "At least one token is needed.", param="input")
        if not isinstance(text, str):
            outside = [token for token in ids if not 0 <= token < self.limits.vocab_size]
            if outside:
                raise InvalidParameter(
                    f"Token id {outside[0]} is not in the vocabulary.",
                    f"It has {self.limits.vocab_size} tokens.",
                    param="input",
                )
        kept = self._kept(len(ids), truncate)
        return PoolingInput(tuple(self._encoder.cut(ids, kept, prompt) if isinstance(text, str) else ids[:kept]))

    def _kept(self, length: int, truncate: int | None) -> int:
        if truncate is not None:
            if truncate < -1 or truncate == 0:
                raise InvalidParameter(
                    f"truncate_prompt_tokens {truncate} is out of range.", "It must be a count above 0, or -1.",
                    param="truncate_prompt_tokens",
                )  # fmt: skip
            return min(length, self.limits.max_length if truncate == -1 else truncate)
        if length > self.limits.max_length:
            raise ContextTooLong(
                f"An input has {length} tokens, and this model's longest input has {self.limits.max_length}.",
                "Inputs are truncated only on request.",
                "Split the text, or send truncate_prompt_tokens: -1.",
                param="input",
            )
        return length

    async def _answer(self, inputs: list[PoolingInput], is_background: bool) -> Answers:
        return Answers(await self.run(inputs, is_background), sum(each.length for each in inputs))


def _with_tail(values: Sequence[int], tail: Sequence[int], length: int) -> list[int]:
    return [*values[: length - len(tail)], *tail] if len(tail) < length else list(values[:length])


def _common_tail(first: Sequence[int], second: Sequence[int]) -> list[int]:
    count = 0
    while count < min(len(first), len(second)) and first[-1 - count] == second[-1 - count]:
        count += 1
    return list(first[len(first) - count :])
