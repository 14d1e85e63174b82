"""Admission: checks a request against this model and makes one engine `Request` per choice.

Every request is refused here or not at all, before it queues, with numbers and a hint.
Does not know: HTTP, torch, text beyond `encode`.
"""

from __future__ import annotations

import logging
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from localllm.engine.media import EncoderPrompt, MediaSpan
from localllm.engine.params import MAX_LOGPROBS, SamplingParams
from localllm.engine.recorder import now_s
from localllm.engine.request import NO_OPTIONS, Request, RequestOptions
from localllm.engine.step import PromptEmbeds
from localllm.errors import ContextTooLong, InvalidParameter, UnsupportedParameter
from localllm.models.spec.model_spec import SourceSpec
from localllm.text.dry_breakers import Breakers, DryBreakers
from localllm.text.grammar import Grammars, OutputGrammar
from localllm.text.reasoning_budget import ReasoningBudgets
from localllm.text.structured import UNUSABLE

log = logging.getLogger(__name__)

KEPT_BAD_WORDS = 16  # lists of bad words kept tokenised, each of up to a thousand words
MOST_LOGPROBS = 2**24
"""Most log-probabilities of one request that asks for more than the usual few per position: 128 MiB here,
about 1 GB as JSON."""


class WordEncoder(Protocol):
    """The part of a tokenizer that admission needs, to find the token ids of bad words and of breakers."""

    vocab_size: int

    def token_bytes(self, token_id: int) -> bytes: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """The request that every API dialect produces: token ids and parameters, `params.n` choices."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    options: RequestOptions = NO_OPTIONS
    prompt_embeds: PromptEmbeds | None = None  # replaces prompt_token_ids, which are as many zeros
    media: tuple[MediaSpan, ...] = ()  # pictures and sounds of the prompt, in order


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of this model as loaded."""

    max_model_len: int  # tokens, prompt and output together
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    max_logprobs: int = MAX_LOGPROBS  # per position; -1: the whole vocabulary
    takes_prompt_embeds: bool = False
    most_media_rows: int = 0  # of one picture or sound; 0: the model neither sees nor hears
    source: SourceSpec | None = None  # of an encoder-decoder, whose encoder reads the prompt
    block_size: int = 1  # tokens of a source are counted in whole blocks
    takes_processors: bool = True  # False: the model runs in other processes, to which functions cannot be sent

    def require_prompt_embeds(self) -> None:
        """Raises `InvalidParameter` if prompt embeddings are not enabled."""
        if not self.takes_prompt_embeds:
            raise InvalidParameter(
                "prompt_embeds is disabled on this server.",
                "Enabled by default: prompts as text or token ids.",
                "Start the server with --enable-prompt-embeds.",
                param="prompt_embeds",
            )

    def num_logprobs(self, asked: int, param: str) -> int:
        """Return the number of log-probabilities; -1 asks for the whole vocabulary.
        Raises `InvalidParameter` if too many."""
        if asked < -1:
            raise InvalidParameter(f"{param} must be at least 0, or -1 for all.", f"Got {asked}.", param=param)
        count = self.vocab_size if asked < 0 else min(asked, self.vocab_size)
        if 0 <= self.max_logprobs < count:
            wanted = f"{param}=-1 asks for all {count}" if asked < 0 else f"{param} asks for {asked}"
            raise InvalidParameter(
                f"{wanted} log-probabilities per position.",
                f"At most {self.max_logprobs} are allowed here.",
                f"Ask for fewer, or start the server with --max-logprobs {asked}.",
                param=param,
            )
        return count


class Admission:
    """Turns a `GenerationRequest` into engine requests (`admit`). `seed`: source of seeds for requests without one."""

    def __init__(
        self,
        limits: ModelLimits,
        tokenizer: WordEncoder,
        seed: int = 0,
        grammars: Grammars | None = None,
        budgets: ReasoningBudgets | None = None,
    ) -> None:
        self.limits = limits
        self._tokenizer, self._grammars, self._budgets = tokenizer, grammars, budgets
        self._random = random.Random(seed)
        self._spelled: OrderedDict[tuple[str, ...], tuple[tuple[int, ...], ...]] = OrderedDict()  # LRU of bad words
        self._dry: DryBreakers | None = None
        self._breakers: OrderedDict[tuple[str, ...], Breakers] = OrderedDict()  # LRU

    def admit(self, asked: GenerationRequest) -> list[Request]:
        """Return one engine request per choice. Raises `ContextTooLong` or `InvalidParameter`."""
        assert asked.options.length_penalty is None, "a beam search is made of requests of its own"
        prompt, params, max_output_tokens = self.check(asked)
        source = None
        if (own := self.limits.source) is not None:
            salt = asked.options.cache_salt
            source = EncoderPrompt.of(self._prompt(asked), self.limits.block_size, salt, own.forced_end)
        bad_words, breakers = self._bad_words(params), self._dry_breakers(params)
        arrived_s = now_s()
        return [
            Request(
                child_id(asked.request_id, index, params.n),
                prompt,
                self._with_seed(params.child(index) if params.n > 1 else params),
                asked.options,
                max_output_tokens=max_output_tokens,
                eos_token_ids=self.limits.eos_token_ids,
                bad_words_token_ids=bad_words,
                dry_breakers=breakers,
                grammar=self._within_budget(params, prompt),
                reports_progress=asked.options.progress and not index,
                prompt_embeds=asked.prompt_embeds,
                media=asked.media,
                source=source,
                arrived_s=arrived_s,
            )
            for index in range(params.n)
        ]

    def check(self, asked: GenerationRequest) -> tuple[Sequence[int], SamplingParams, int]:
        """Return the prompt, its parameters with counts in place of -1, and the most output tokens. The prompt of an
        encoder-decoder's decoder is how each answer begins. Raises like `admit`."""
        if asked.prompt_embeds is not None:
            self.limits.require_prompt_embeds()
            _check_beside_embeds(asked)
        if asked.media:
            self._check_media(asked)
        prompt = self._prompt(asked)
        if self.limits.source is not None:
            prompt = _answer_start(self.limits.source, asked, len(prompt))
        elif asked.options.decoder_prompt_token_ids:
            raise InvalidParameter(
                "decoder_prompt is not supported by this model.",
                "Its decoder reads the prompt; it has no encoder.",
                "Put both texts into prompt.",
                param="decoder_prompt",
            )
        params = self._with_logprobs(asked.params)
        self._check_token_ids(params)
        if params.logits_processors and not self.limits.takes_processors:
            raise InvalidParameter(
                "logits_processors is not supported for a model that runs in several processes.",
                "Functions cannot be sent to them.",
                "Load the model on one device, or leave logits_processors out.",
                param="logits_processors",
            )
        max_output_tokens = self._max_output_tokens(len(prompt), params)
        if params.min_tokens > max_output_tokens:
            raise InvalidParameter(
                f"min_tokens asks for {params.min_tokens} tokens.",
                f"After a prompt of {len(prompt)} tokens, at most {max_output_tokens} fit into the context.",
                "Ask for fewer, or shorten the prompt.",
                param="min_tokens",
            )
        _check_all_logprobs(params, len(prompt), max_output_tokens)
        return prompt, params, max_output_tokens

    def _check_media(self, asked: GenerationRequest) -> None:
        """Refuse pictures and sounds that cannot be encoded, and parameters that need all of the prompt's tokens."""
        most = self.limits.most_media_rows
        if not most:
            raise UnsupportedParameter(
                "This model reads neither pictures nor sound here.",
                "It was loaded without the part that reads them.",
                "Leave pictures and sound out.",
                param="messages",
            )
        largest = max(span.rows for span in asked.media)
        if largest > most:
            raise InvalidParameter(
                f"A picture or sound of the request takes {largest} tokens.",
                f"At most {most} are encoded at once here.",
                "Send a smaller picture or a shorter sound, or start with a larger --image-max-tokens.",
                param="messages",
            )
        params = asked.params
        refused = {
            "prompt_embeds": asked.prompt_embeds is not None,
            "prompt_logprobs": params.prompt_logprobs is not None,
            "truncate_prompt_tokens": params.truncate_prompt_tokens is not None,
            "use_beam_search": asked.options.length_penalty is not None,
        }
        for field, does in refused.items():
            if does:
                raise InvalidParameter(
                    f"{field} cannot be combined with pictures or sound.",
                    "Their tokens are not text, so they cannot be scored or cut.",
                    f"Leave {field} out.",
                    param=field,
                )

    def _prompt(self, asked: GenerationRequest) -> Sequence[int]:
        prompt, keep = asked.prompt_token_ids, asked.params.truncate_prompt_tokens
        if asked.media:  # a placeholder may be behind the vocabulary's end
            prompt = list(prompt)
            for span in asked.media:
                for place in range(span.start, span.end):
                    if prompt[place] >= self.limits.vocab_size:
                        prompt[place] = 0
        if keep is not None:
            prompt = prompt[-keep:]
        if not len(prompt):
            raise InvalidParameter("The prompt is empty.", "At least one token is needed.", param="prompt")
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= self.limits.vocab_size:
            raise InvalidParameter(
                f"Prompt token id {low if low < 0 else high} is outside the vocabulary.",
                f"Ids run from 0 to {self.limits.vocab_size - 1}.",
                param="prompt",
            )
        return prompt

    def _max_output_tokens(self, prompt_len: int, params: SamplingParams) -> int:
        room = self.limits.max_model_len - prompt_len
        asked = params.max_tokens or 1
        if room >= asked:
            return room if params.max_tokens is None else asked
        output = "" if params.max_tokens is None else f" and {params.max_tokens} for the output"
        raise ContextTooLong(
            f"This model's context holds {self.limits.max_model_len} tokens here.",
            f"The request needs {prompt_len + asked}: {prompt_len} in the prompt{output or ' and 1 for the output'}.",
            "Shorten the prompt, ask for fewer tokens, or start the server with a larger --max-model-len.",
            param="max_tokens" if prompt_len < self.limits.max_model_len else "messages",
        )

    def _check_token_ids(self, params: SamplingParams) -> None:
        for field in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            highest = max(getattr(params, field) or (), default=-1)
            if highest >= self.limits.vocab_size:
                raise InvalidParameter(
                    f"{field} names token id {highest}.",
                    f"Ids run from 0 to {self.limits.vocab_size - 1}.",
                    param=field,
                )

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each word, both at the start of a text and after a space."""
        if not params.bad_words:
            return ()
        words = tuple(params.bad_words)
        spelled = self._spelled.pop(words, None)
        if spelled is None:
            spellings = [text for word in words for text in (word.lstrip(), " " + word.lstrip())]
            sequences = [tuple(self._tokenizer.encode(text, add_special_tokens=False)) for text in spellings]
            spelled = tuple(dict.fromkeys(ids for ids in sequences if ids))
        self._spelled[words] = spelled
        while len(self._spelled) > KEPT_BAD_WORDS:
            self._spelled.popitem(last=False)
        return spelled

    def _dry_breakers(self, params: SamplingParams) -> Breakers:
        """Return the breakers of the sampler DRY. The texts of all tokens are read at the first use."""
        if not params.uses_dry or not params.dry_sequence_breakers:
            return ()
        strings = tuple(params.dry_sequence_breakers)
        found = self._breakers.pop(strings, None)
        if found is None:
            self._dry = self._dry or DryBreakers(self._tokenizer)
            found = self._dry.of(strings)
        self._breakers[strings] = found
        while len(self._breakers) > KEPT_BAD_WORDS:
            self._breakers.popitem(last=False)
        return found

    def prepare(self, params: SamplingParams) -> None:
        """Compile the grammar that `admit` will need. It may take a second; may be called on any thread.

        Raises `InvalidParameter` if the grammar is invalid or unsupported.
        """
        self._grammar(params)

    def tokenise(self, params: SamplingParams) -> None:
        """Tokenise the bad words and breakers that `admit` will need: a model's tokenizer may take any time over
        them."""
        self._bad_words(params)
        self._dry_breakers(params)

    def close(self) -> None:
        """Release the grammar compiler's resources."""
        if self._grammars is not None:
            self._grammars.close()

    def takes_long(self, params: SamplingParams) -> bool:
        """Return whether `prepare` may take seconds. Raises `InvalidParameter`. May be called on any thread."""
        asked = params.structured_outputs
        return asked is not None and self._grammars is not None and self._grammars.is_large(asked)

    def _grammar(self, params: SamplingParams) -> OutputGrammar | None:
        """Return a new grammar. Each choice needs its own, since a grammar follows its choice's output."""
        if params.structured_outputs is None:
            return None
        if self._grammars is None:
            raise InvalidParameter("structured_outputs is not supported by this engine.", param="structured_outputs")
        asked = params.structured_outputs
        if not asked.opened_by:
            return self._grammars.start(asked)
        if asked.compiled is UNUSABLE:
            return None
        try:
            return self._grammars.start(asked)
        except InvalidParameter as error:  # the tools may be called without it
            log.info("calls are not enforced: %s", error)
            object.__setattr__(asked, "compiled", UNUSABLE)
            return None

    def _with_logprobs(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with counts in place of -1."""
        counts = [
            None if (asked := getattr(params, field)) is None else self.limits.num_logprobs(asked, field)
            for field in ("logprobs", "prompt_logprobs")
        ]
        return params if counts == [params.logprobs, params.prompt_logprobs] else params.with_logprobs(*counts)

    def _within_budget(self, params: SamplingParams, prompt: Sequence[int]) -> OutputGrammar | None:
        """Return the grammar of the output, wrapped by the reasoning budget if there is one."""
        grammar, tokens = self._grammar(params), params.thinking_token_budget
        if tokens is None:
            return grammar
        if self._budgets is None:
            raise InvalidParameter(
                "thinking_token_budget is not supported by this engine.", param="thinking_token_budget"
            )
        return self._budgets.start(tokens, prompt, grammar)

    def _with_seed(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with a seed if they sample, so that a step never depends on hidden state."""
        if params.seed is not None or not params.needs_seed:
            return params
        return params.seeded(self._random.getrandbits(63))


def _answer_start(source: SourceSpec, asked: GenerationRequest, num_tokens: int) -> Sequence[int]:
    """Return the tokens that an encoder-decoder's answer begins with. Raises `ContextTooLong` for a prompt that is too
    long, and `UnsupportedParameter` for what needs a decoder that reads the prompt. num_tokens: of the prompt."""
    if num_tokens > source.max_length:
        raise ContextTooLong(
            f"The prompt has {num_tokens} tokens.",
            f"This model's encoder reads at most {source.max_length}.",
            f"Shorten the text, or send truncate_prompt_tokens={source.max_length}, which keeps its end.",
            param="prompt",
        )
    if asked.params.prompt_logprobs is not None:
        what, why = (
            "prompt_logprobs is not supported by this model.",
            "Its encoder reads the prompt, which has no scores.",
        )
        raise UnsupportedParameter(what, why, "Leave prompt_logprobs out.", param="prompt_logprobs")
    begun = asked.options.decoder_prompt_token_ids
    return (source.start_ids[0], *begun) if begun else source.start_ids


def _check_beside_embeds(asked: GenerationRequest) -> None:
    """Refuse parameters that need prompt tokens when the prompt is embeddings."""
    params = asked.params
    speaks = {
        "prompt_logprobs": params.prompt_logprobs is not None,
        "repetition_penalty": params.repetition_penalty != 1.0,
        "truncate_prompt_tokens": params.truncate_prompt_tokens is not None,
        "use_beam_search": asked.options.length_penalty is not None,
    }
    for field, does in speaks.items():
        if does:
            raise InvalidParameter(
                f"{field} cannot be combined with prompt_embeds.",
                "Embeddings are not tokens, so they cannot be scored, counted or cut.",
                "Send repetition_penalty 1." if field == "repetition_penalty" else f"Leave {field} out.",
                param=field,
            )


def _check_all_logprobs(params: SamplingParams, prompt_len: int, max_output_tokens: int) -> None:
    """Refuse log-probabilities of too many tokens at too many positions together."""
    for field, positions in (("logprobs", params.n * max_output_tokens), ("prompt_logprobs", prompt_len)):
        count = getattr(params, field) or 0
        if count > MAX_LOGPROBS and count * positions > MOST_LOGPROBS:
            raise InvalidParameter(
                f"{field} would return {count * positions} numbers.",
                f"{count} for each of {positions} positions; at most {MOST_LOGPROBS} are allowed for one request.",
                "Ask for fewer, or for fewer tokens (max_tokens, n, a shorter prompt).",
                param=field,
            )


def child_id(request_id: str, index: int, n: int) -> str:
    """Return the engine's id of choice `index`; with one choice, the request's own id."""
    return request_id if n == 1 else f"{request_id}/{index}"
