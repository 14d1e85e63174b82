"""Beam search: keeps the likeliest partial answers and extends them token by token, without sampling.

Each step asks for the 2 * width likeliest next tokens of every beam, as one request of one token each. A token that
ends the answer ends a copy of its beam; the best `width` of the others continue. Twice the width, because up to `width`
beams may end at once. The tokens of a beam are found in the prefix cache, so a step costs about as much as a decode
step.
Beams are ranked by the sum of their tokens' log-probabilities over (length of prompt and output) ** length_penalty. The
token that ended a beam does not count in its length (vLLM's rule). Unlike in vLLM, the search ends as soon as no open
beam can reach the best ones.
`beam_batches` runs the requests of a server, llm.py its own.
Does not know: HTTP, dialects, torch.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from localllm.engine.adapter import Adapter
from localllm.engine.admission import Admission, GenerationRequest, ModelLimits
from localllm.engine.client import EngineClient
from localllm.engine.outputs import GenerationEvent, Timings, Usage
from localllm.engine.params import SamplingParams
from localllm.engine.recorder import now_s
from localllm.engine.request import RequestOptions
from localllm.engine.stats import RequestTimeline
from localllm.engine.step import TokenLogprobs
from localllm.errors import InvalidParameter, LocalLLMError, StepFailed
from localllm.text.cursor import TextCursor
from localllm.text.tokenizer import Tokenizer

MOST_PENALTY = 10.0


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Parameters of `LLM.beam_search`, with vLLM's names. Raises `InvalidParameter`."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # without effect, since nothing is sampled
    length_penalty: float = 1.0  # above 1 favours longer answers, below 1 shorter ones
    include_stop_str_in_output: bool = False  # keep the token that ends an answer

    def __post_init__(self) -> None:
        check_length_penalty(self.length_penalty)
        try:
            self._sampling()
        except InvalidParameter as error:
            if error.param == "n":
                error.param = "beam_width"
            raise

    def request(self, request_id: str, prompt: Sequence[int], adapter: Adapter | None = None) -> GenerationRequest:
        options = RequestOptions(adapter=adapter, length_penalty=self.length_penalty)
        return GenerationRequest(request_id, prompt, self._sampling(), options)

    def _sampling(self) -> SamplingParams:
        return SamplingParams(
            n=self.beam_width, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos, logprobs=2 * self.beam_width,
            temperature=self.temperature, include_stop_str_in_output=self.include_stop_str_in_output,
        )  # fmt: skip


def check_length_penalty(penalty: float) -> None:
    """Raises `InvalidParameter` if the penalty is too large: a length to such a power overflows."""
    if not isinstance(penalty, int | float) or not abs(penalty) <= MOST_PENALTY:
        span = f"between {-MOST_PENALTY:g} and {MOST_PENALTY:g}"
        raise InvalidParameter(f"length_penalty must be {span}.", f"Got {penalty!r}.", param="length_penalty")


@dataclass(frozen=True, slots=True)
class Beam:
    """A complete or partial answer."""

    token_ids: tuple[int, ...] = ()  # of the output only
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if requested
    cum_logprob: float = 0.0  # of all tokens, including the one that ended it
    finish_reason: str = "length"


class _Next(NamedTuple):
    """A candidate for the next token of a beam."""

    score: float
    beam: Beam
    answer: TokenLogprobs
    place: int  # index of the token in `answer`
    ends: bool


class BeamSearch:
    """Beam search of one prompt: run `requests`, pass their answers to `advance`, until `is_over`; then call `best`.

    asked: a request with `options.length_penalty`; `params.n` is the width. Raises `RequestError` if it is invalid or
    unsupported.
    """

    def __init__(self, asked: GenerationRequest, admission: Admission) -> None:
        penalty = asked.options.length_penalty
        assert penalty is not None, "a request that asks for a beam search"
        _check_width(asked.params.n, admission.limits)
        self.prompt, params, self._max_tokens = admission.check(asked)
        self._asked, self._width, self._length_penalty = asked, params.n, penalty
        source = admission.limits.source
        self._has_source = source is not None
        self._forced_end = None if source is None or params.ignore_eos else source.forced_end
        self._eos_token_ids = frozenset() if params.ignore_eos else frozenset(admission.limits.eos_token_ids)
        self._keeps_eos = params.include_stop_str_in_output
        self._shown = params.logprobs  # number of log-probabilities to report per token; None: none at all
        few = min(2 * self._width, admission.limits.vocab_size)
        self._one_token = SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=max(few, params.logprobs or 0), detokenize=False, ignore_eos=True
        )
        self._num_next = few
        self.num_steps = 0  # tokens of each open beam
        self._beams, self._ended = [Beam()], list[Beam]()

    @property
    def is_over(self) -> bool:
        if not self._beams or self.num_steps >= self._max_tokens:
            return True
        if len(self._ended) < self._width:
            return False
        worst = sorted(map(self._score, self._ended))[-self._width]
        return all(self._best_possible(beam) <= worst for beam in self._beams)

    def requests(self) -> list[GenerationRequest]:
        """Return one request per beam, for its next token."""
        options = replace(self._asked.options, length_penalty=None, part_of=self._asked.request_id)
        asked = replace(self._asked, params=self._one_token, options=options)
        requests = []
        for i, beam in enumerate(self._beams):
            ids = (*self.prompt, *beam.token_ids)
            if self._has_source:  # its prompt stays, and its decoder continues the beam
                own: dict[str, Any] = {"options": replace(options, decoder_prompt_token_ids=ids[1:])}
            else:
                own = {"prompt_token_ids": ids}
            requests.append(replace(asked, request_id=f"{asked.request_id}/{self.num_steps}/{i}", **own))
        return requests

    def advance(self, answers: Sequence[TokenLogprobs]) -> None:
        """Extend the beams by the answers to `requests`, in the same order."""
        following = list(self._following(answers))
        self.num_steps += 1
        if self.num_steps == self._max_tokens and self._forced_end is not None:
            self._end_all(self._forced_end)
            return
        self._ended += [self._grown(each) for each in following if each.ends]
        going_on = sorted((each for each in following if not each.ends), key=lambda each: each.score, reverse=True)
        self._beams = [self._grown(each) for each in going_on[: self._width]]

    def _end_all(self, end: int) -> None:
        """End every beam with a token whose log probability is 0, since no other may follow."""
        for beam in self._beams:
            token_ids, logprobs = beam.token_ids, beam.logprobs
            if self._keeps_eos:
                token_ids = (*token_ids, end)
                if self._shown is not None:
                    logprobs = (*logprobs, TokenLogprobs((end,), (0.0,), 1))
            self._ended.append(Beam(token_ids, logprobs, beam.cum_logprob, "stop"))
        self._beams = []

    def best(self) -> list[Beam]:
        """Return the best `width` beams, best first."""
        return sorted([*self._ended, *self._beams], key=self._score, reverse=True)[: self._width]

    def _following(self, answers: Sequence[TokenLogprobs]) -> Iterator[_Next]:
        length = len(self.prompt) + self.num_steps + 1
        for beam, answer in zip(self._beams, answers, strict=True):
            for place in range(1, 1 + self._num_next):  # place 0 is the sampled token
                score = (beam.cum_logprob + answer.logprobs[place]) / self._weight(length)
                yield _Next(score, beam, answer, place, answer.token_ids[place] in self._eos_token_ids)

    def _grown(self, grown: _Next) -> Beam:
        beam, answer, place = grown.beam, grown.answer, grown.place
        token_id, logprob = answer.token_ids[place], answer.logprobs[place]
        token_ids, logprobs = beam.token_ids, beam.logprobs
        if self._keeps_eos or not grown.ends:
            token_ids = (*token_ids, token_id)
            if (shown := self._shown) is not None:
                ids, values = answer.token_ids[1 : 1 + shown], answer.logprobs[1 : 1 + shown]
                logprobs = (*logprobs, TokenLogprobs((token_id, *ids), (logprob, *values), place))
        return Beam(token_ids, logprobs, beam.cum_logprob + logprob, "stop" if grown.ends else "length")

    def _score(self, beam: Beam) -> float:
        counted = len(beam.token_ids) - (self._keeps_eos and beam.finish_reason == "stop")
        return beam.cum_logprob / self._weight(len(self.prompt) + counted)

    def _best_possible(self, beam: Beam) -> float:
        """Return an upper bound of the beam's final score. Further tokens never increase the sum of log-probabilities;
        with a positive penalty the longest answer scores best, else the shortest."""
        length = len(self.prompt) + (self._max_tokens if self._length_penalty > 0 else self.num_steps)
        return beam.cum_logprob / self._weight(length)

    def _weight(self, length: int) -> float:
        return math.pow(length, self._length_penalty)


def _check_width(width: int, limits: ModelLimits) -> None:
    if width > limits.vocab_size:
        why = f"The vocabulary has only {limits.vocab_size} tokens."
        raise InvalidParameter(f"A beam search of width {width} is not possible.", why, param="n")
    if 0 <= limits.max_logprobs < min(2 * width, limits.vocab_size):
        raise InvalidParameter(
            f"A beam search of width {width} needs {2 * width} log-probabilities per position.",
            f"At most {limits.max_logprobs} are allowed here.",
            f"Send n={limits.max_logprobs // 2} or less, or start the server with --max-logprobs {2 * width}.",
            param="n",
        )


# ---- a search through the engine's client: its steps are requests of one token ---------------------------------------


async def beam_batches(client: EngineClient, asked: GenerationRequest) -> AsyncGenerator[list[GenerationEvent], None]:
    """Yield one event for each of the best beams, all at the end. `asked` has an `options.length_penalty`; otherwise
    like `EngineClient.generate_batches`. Closing the iterator cancels the running requests."""
    search = BeamSearch(asked, client.admission)
    ended = RequestTimeline(asked.request_id, "finished", len(search.prompt), 0, 0, 0, 0, now_s(),
                            source=asked.options.source, key_name=asked.options.key_name)  # fmt: skip
    first: GenerationEvent | None = None
    reason = "abort"
    try:
        while not search.is_over:
            events = await _run(client, search.requests())
            first = first or events[0]
            search.advance([event.logprobs[0] for event in events])
        beams = search.best()
        reason = beams[0].finish_reason
    except LocalLLMError:
        reason = "error"
        raise
    finally:
        if first is not None:
            ended = _begun(ended, first)
        if first is not None or reason == "abort":  # otherwise it was refused
            client.report(replace(ended, num_output_tokens=search.num_steps, finished_s=now_s(), finish_reason=reason))
    assert first is not None, "a search has at least one step"
    assert first.usage is not None
    assert first.timings is not None
    timings = first.timings
    decode_s = max(0.0, now_s() - ended.arrived_s - timings.ttft_s)
    timings = Timings(timings.queue_s, timings.prefill_s, decode_s, timings.ttft_s)
    yield [
        GenerationEvent(
            index=index,
            text=beam_text(client.tokenizer, search.prompt, beam, asked.params),
            token_ids=beam.token_ids,
            logprobs=beam.logprobs,
            finish_reason=beam.finish_reason,
            usage=Usage(len(search.prompt), len(beam.token_ids), first.usage.cached_tokens),
            timings=timings,
        )
        for index, beam in enumerate(beams)
    ]


def _begun(search: RequestTimeline, first: GenerationEvent) -> RequestTimeline:
    """Return the timeline of a search with the times of its first step, which reads the prompt."""
    assert first.timings is not None
    assert first.usage is not None
    scheduled_s, first_token_s = (search.arrived_s + each for each in (first.timings.queue_s, first.timings.ttft_s))
    cached = first.usage.cached_tokens
    return replace(search, num_cached_tokens=cached, scheduled_s=scheduled_s, first_token_s=first_token_s)


async def _run(client: EngineClient, requests: list[GenerationRequest]) -> list[GenerationEvent]:
    """Run the requests and return the one event of each."""
    told: dict[int, GenerationEvent] = {}
    async with aclosing(client.generate_batches(*requests)) as batches:
        async for batch in batches:
            for event in batch:
                if not event.logprobs:
                    raise event.error or StepFailed("The engine aborted this request.", "The log has the details.")
                told[event.index] = event
    return [told[index] for index in range(len(requests))]


def beam_text(tokenizer: Tokenizer, prompt: Sequence[int], beam: Beam, params: SamplingParams) -> str:
    cursor = TextCursor(tokenizer, prompt[-16:], skip_special_tokens=params.skip_special_tokens)
    return cursor.finish(beam.token_ids).text
