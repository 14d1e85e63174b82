"""Sampling parameters of a request: vLLM's names and meanings, validated once, frozen afterwards.

Each field of `SamplingParams` carries its `ParamInfo`: a new parameter is one field here, one field in the body of each
dialect that accepts it, and the code that obeys it.

Does not know: the model (context length and vocabulary are checked in admission.py), torch, HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from localllm.errors import InvalidParameter

if TYPE_CHECKING:
    from localllm.text.structured import StructuredOutputsParams

MAX_LOGPROBS = 20
"""Default of --max-logprobs, per position, and the number that samplers reserve room for."""
MOST_ITEMS = {"stop": 256, "bad_words": 1024, "stop_token_ids": 1024, "logit_bias": 8192, "allowed_token_ids": 2**20,
              "dry_sequence_breakers": 64, "logits_processors": 64}  # fmt: skip
"""Most items per field: more than a real request needs, few enough to be checked without delaying other requests."""
MAX_WORD_CHARS = 1000
"""Most characters of one stop string or bad word.
That much of an answer may be held back until it is known not to match."""
MAX_STOP_CHARS = 4096
"""Most characters of all stop strings of a request: their automaton is built while other requests wait."""
MAX_BAD_WORD_CHARS = 16_384
"""Most characters of all bad words of a request."""
LEAST_REPETITION_PENALTY = 0.01
"""Smallest repetition penalty. Logits are divided by it in fp32, so a penalty near 0 would make them infinite."""
GREEDY_TEMPERATURE = 1e-5
"""Temperature up to which sampling takes the argmax of the processed logits and divides nothing."""

DRY_BREAKERS = ("\n", ":", '"', "*")
"""llama.cpp's default strings at which DRY's repeated sequences end."""
MAX_BREAKER_BYTES = 40
"""Most bytes of one of them, as in llama.cpp."""
LogitsProcessor = Callable[..., Any]
"""vLLM's logits processor of a request: (output ids, logits [V]) or (prompt ids, output ids, logits [V]) -> logits."""

Kind = Literal["whole", "real", "strings", "other"]


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """The description of one field of `SamplingParams`, for its checks, API dialects, pages and the command line."""

    text: str  # one sentence
    default: Any
    kind: Kind = "other"
    low: float | None = None  # smallest value
    high: float | None = None  # largest value; None: any
    above_low: bool = False  # the smallest value itself is refused
    optional: bool = False  # None is allowed
    label: str = ""  # name on pages; empty: not on pages
    unset: str = ""  # what applies if neither the user nor the model sets a value, in words; empty: the default
    is_openai: bool = False  # the default is OpenAI's
    spellings: Mapping[str, str] = field(default_factory=dict)  # dialect -> its own name of the field

    def check(self, value: object, name: str) -> None:
        """Raise `InvalidParameter` for a value that is not a number of this kind within the bounds."""
        if self.low is None or (value is None and self.optional):
            return
        if self.kind == "whole":
            _whole(value, name, self.low, self.high)
        else:
            assert self.high is not None
            _real(value, name, self.low, self.high, above_low=self.above_low)


def _param(default: Any, text: str, kind: Kind = "other", *more: Any, **info: Any) -> Any:
    """Return a dataclass field. `more` and `info`: the further fields of `ParamInfo`."""
    info.setdefault("optional", default is None)
    return field(default=default, metadata={"info": ParamInfo(text, default, kind, *more, **info)})


GENERATION_CONFIG = "generation_config"
"""The checkpoint's file, as a key of `ParamInfo.spellings`: it may recommend values of the fields with this key."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters for choosing tokens and for stopping. Raises `InvalidParameter` that names the wrong field."""

    n: int = _param(1, "Completions of the same prompt.", "whole", 1, 256)
    temperature: float = _param(
        1.0, "0 always picks the most likely token.", "real", 0.0, 100.0, label="Temperature", is_openai=True,
        spellings={GENERATION_CONFIG: "temperature"},
    )  # fmt: skip
    max_tokens: int | None = _param(  # None: up to the context length
        16, "Most tokens in one reply.", "whole", 1, optional=True, label="Max tokens",
        unset="up to the context",
        spellings={GENERATION_CONFIG: "max_new_tokens", "responses": "max_output_tokens", "ollama": "num_predict",
                   "llamacpp": "n_predict"},
    )  # fmt: skip
    top_p: float = _param(
        1.0, "Sample only from the likeliest tokens, up to this total probability.", "real", 0.0, 1.0, above_low=True,
        label="Top p", is_openai=True, spellings={GENERATION_CONFIG: "top_p"},
    )  # fmt: skip
    top_k: int = _param(  # 0 or -1: all
        0, "Sample only from this many of the likeliest tokens.", "whole", 0, label="Top k", unset="off",
        spellings={GENERATION_CONFIG: "top_k"},
    )  # fmt: skip
    min_p: float = _param(
        0.0, "Exclude tokens below this share of the top token's probability.", "real", 0.0, 1.0, label="Min p",
        spellings={GENERATION_CONFIG: "min_p"},
    )  # fmt: skip
    repetition_penalty: float = _param(  # over prompt and output (Keskar et al. 2019, arXiv:1909.05858)
        1.0, "Above 1, tokens that already occurred become less likely.", "real", LEAST_REPETITION_PENALTY, 100.0,
        label="Repetition penalty",
        spellings={GENERATION_CONFIG: "repetition_penalty", "ollama": "repeat_penalty", "llamacpp": "repeat_penalty"},
    )  # fmt: skip
    presence_penalty: float = _param(
        0.0, "-2 to 2, applied once to each token in the reply.", "real", -2.0, 2.0, label="Presence penalty",
        is_openai=True,
    )  # fmt: skip
    frequency_penalty: float = _param(
        0.0, "-2 to 2, applied for each time a token occurred.", "real", -2.0, 2.0, label="Frequency penalty",
        is_openai=True,
    )  # fmt: skip
    repeat_last_n: int = _param(-1, "Penalties look at the last N tokens only; 0: none, -1: all.", "whole", -1)
    # llama.cpp's samplers (runner/sampler_chain.py), with its names and defaults
    dry_multiplier: float = _param(  # DRY (p-e-w 2024, oobabooga/text-generation-webui#5677)
        0.0, "Penalty of a token that would continue a repeated sequence; 0: off.", "real", 0.0, 100.0,
    )  # fmt: skip
    dry_base: float = _param(
        1.75, "The penalty grows by this factor with each repeated token; below 1: off.", "real", 0.0, 100.0
    )
    dry_allowed_length: int = _param(2, "Longest repeated sequence without a penalty.", "whole", 0, 4096)
    dry_penalty_last_n: int = _param(64, "Repetitions are searched in this many of the last tokens; -1: in all.",
                                     "whole", -1)  # fmt: skip
    dry_sequence_breakers: Sequence[str] = _param(DRY_BREAKERS, "Strings at which a repeated sequence ends.", "strings")
    top_n_sigma: float = _param(  # Tang et al. 2024, arXiv:2411.07641
        -1.0, "Keep tokens within this many standard deviations of the largest logit; 0 or less: off.", "real", -1.0,
        1000.0,
    )  # fmt: skip
    typical_p: float = _param(  # Meister et al. 2022, arXiv:2202.00666
        1.0, "Keep the most typical tokens, up to this total probability; 1: off.", "real", 0.0, 1.0
    )
    xtc_probability: float = _param(0.0, "Chance that XTC excludes the likeliest tokens; 0: off.", "real", 0.0, 1.0)
    xtc_threshold: float = _param(
        0.1, "XTC excludes all tokens of at least this probability but the last; above 0.5: off.", "real", 0.0, 1.0
    )
    dynatemp_range: float = _param(
        0.0, "The temperature varies by up to this much with the entropy; 0: off.", "real", 0.0, 100.0
    )
    dynatemp_exponent: float = _param(1.0, "Exponent of the entropy in the dynamic temperature.", "real", 0.0, 100.0)
    mirostat: int = _param(  # Basu et al. 2020, arXiv:2007.14966
        0, "Mirostat 1 or 2 aims at a constant surprise and replaces top_k, top_p and their like; 0: off.", "whole",
        0, 2,
    )  # fmt: skip
    mirostat_tau: float = _param(5.0, "Surprise that mirostat aims at, in bits.", "real", 0.0, 100.0)
    mirostat_eta: float = _param(0.1, "Learning rate of mirostat.", "real", 0.0, 100.0)
    logits_processors: Sequence[LogitsProcessor] = _param(
        (), "Functions that change the logits of each token: (output ids, logits) or (prompt ids, output ids, logits)."
    )
    logit_bias: Mapping[int, float] | None = _param(None, "Numbers from -100 to 100 to add to the logits of tokens.")
    allowed_token_ids: Sequence[int] | None = _param(None, "The only tokens that may be sampled.")
    bad_words: Sequence[str] = _param((), "Words that must not be completed.")
    seed: int | None = _param(  # the same tokens in any batch, as far as the logits do not depend on the batch
        None, "The same seed gives the same reply.", "whole", -(2**63), 2**63 - 1, label="Seed",
        unset="a new one each time",
    )  # fmt: skip
    thinking_token_budget: int | None = _param(  # then the end of reasoning is forced; None, -1: unlimited
        None, "Most reasoning tokens; 0 turns reasoning off.", "whole", 0, label="Thinking budget", unset="no limit",
    )  # fmt: skip
    stop: str | Sequence[str] | None = _param(
        None, "Strings that end the reply.", "strings", label="Stop at", unset="nothing", is_openai=True,
        spellings={"anthropic": "stop_sequences"},
    )  # fmt: skip
    min_tokens: int = _param(0, "No end token and no stop string before this many tokens.", "whole", 0)
    stop_token_ids: Sequence[int] = _param((), "Tokens that end the reply.")
    include_stop_str_in_output: bool = _param(False, "Keep the stop string in the reply.")
    ignore_eos: bool = _param(False, "Continue after the model's end token.")
    logprobs: int | None = _param(
        None, "This many of the likeliest tokens at each token of the reply; -1: the whole vocabulary.", "whole", -1
    )
    prompt_logprobs: int | None = _param(
        None, "This many of the likeliest tokens at each token of the prompt; -1: the whole vocabulary.", "whole", -1
    )
    detokenize: bool = _param(True, "Return text, and not only token ids.")
    skip_special_tokens: bool = _param(True, "Leave special tokens out of the text.")
    structured_outputs: StructuredOutputsParams | None = _param(None, "The format that the reply must have.")  # noqa: RUF009
    truncate_prompt_tokens: int | None = _param(  # never done unless requested
        None, "Keep only the last N tokens of the prompt.", "whole", 1
    )

    def __post_init__(self) -> None:
        put = object.__setattr__  # only here a frozen field is normalised
        for name, most in MOST_ITEMS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, str) and len(value) > most:
                raise InvalidParameter(f"{name} has {len(value)} items.", f"At most {most} are allowed.", param=name)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        put(self, "stop", stop)
        put(self, "bad_words", tuple(self.bad_words or ()))
        put(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        put(self, "dry_sequence_breakers", tuple(self.dry_sequence_breakers or ()))
        put(self, "logits_processors", tuple(self.logits_processors or ()))
        put(self, "top_k", max(0, self.top_k) if _is_int(self.top_k) and self.top_k >= -1 else self.top_k)
        if _is_int(self.thinking_token_budget) and self.thinking_token_budget == -1:
            put(self, "thinking_token_budget", None)
        if self.logit_bias is not None:
            put(self, "logit_bias", {_token_id(k, "logit_bias"): v for k, v in dict(self.logit_bias).items()})
        if self.allowed_token_ids is not None:
            put(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        self._check()

    def _check(self) -> None:
        for name, info in _BOUNDED:
            info.check(getattr(self, name), name)
        for bias in (self.logit_bias or {}).values():
            _real(bias, "logit_bias", -100.0, 100.0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens}).", param="min_tokens"
            )
        for name in ("stop", "bad_words", "dry_sequence_breakers"):
            for word in getattr(self, name):
                if not isinstance(word, str) or not word:
                    raise InvalidParameter(f"{name} must hold non-empty strings.", f"Got {word!r}.", param=name)
                if len(word) > MAX_WORD_CHARS:
                    why = f"It has {len(word)} characters; at most {MAX_WORD_CHARS} are allowed."
                    raise InvalidParameter(f"{name} holds a string that is too long.", why, param=name)
        for breaker in self.dry_sequence_breakers:
            if (size := len(breaker.encode(errors="replace"))) > MAX_BREAKER_BYTES:
                why = f"It has {size} bytes; at most {MAX_BREAKER_BYTES} are allowed."
                raise InvalidParameter(
                    "dry_sequence_breakers holds a string that is too long.", why, param="dry_sequence_breakers"
                )
        if not all(map(callable, self.logits_processors)):
            raise InvalidParameter("logits_processors must hold functions.", param="logits_processors")
        for name, most in {"stop": MAX_STOP_CHARS, "bad_words": MAX_BAD_WORD_CHARS}.items():
            if (chars := sum(map(len, getattr(self, name) or ()))) > most:
                why = f"Together its strings have {chars} characters; at most {most} are allowed."
                raise InvalidParameter(
                    f"{name} holds too much text.", why, "Send fewer or shorter strings.", param=name
                )
        for name in ("stop_token_ids", "allowed_token_ids"):
            token_ids = getattr(self, name) or ()
            if set(map(type, token_ids)) - {int} or min(token_ids, default=0) < 0:  # fast path: there may be 2**20 ids
                for token_id in token_ids:
                    _whole(token_id, name, 0)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidParameter("allowed_token_ids is empty: no token could be sampled.", param="allowed_token_ids")
        if self.structured_outputs is not None:
            _require_structured_outputs(self.structured_outputs)
        if self.stop and not self.detokenize:
            raise InvalidParameter("Stop strings need detokenize=True.", param="stop")

    @property
    def is_greedy(self) -> bool:
        """True if the largest processed logit is chosen."""
        return self.temperature <= GREEDY_TEMPERATURE and (self.dynatemp_range <= 0 or self.mirostat > 0)

    @property
    def needs_seed(self) -> bool:
        """True if the choice of a token depends on random numbers."""
        return not self.is_greedy or self.xtc_probability > 0

    @property
    def uses_dry(self) -> bool:
        return self.dry_multiplier > 0 and self.dry_base >= 1 and self.dry_penalty_last_n != 0

    @property
    def uses_chain(self) -> bool:
        """True if a sampler is used that only llama.cpp has: then all apply in its order."""
        return (
            self.uses_dry
            or self.top_n_sigma > 0
            or self.typical_p < 1
            or (self.xtc_probability > 0 and self.xtc_threshold <= 0.5)
            or self.dynatemp_range > 0
            or self.mirostat > 0
        )

    @property
    def penalises(self) -> bool:
        """True if a token's logit depends on its earlier occurrences."""
        changes = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)
        return changes and self.repeat_last_n != 0

    def child(self, index: int) -> SamplingParams:
        """Return the parameters of choice `index` of `n`: one completion, with its own seed."""
        return self._changed(n=1, seed=None if self.seed is None else self.seed + index)

    def seeded(self, seed: int) -> SamplingParams:
        """Return a copy with this seed."""
        return self._changed(seed=seed)

    def with_logprobs(self, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
        """Return a copy with these counts."""
        return self._changed(logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def _changed(self, **values: int | None) -> SamplingParams:
        """Return a changed copy. It is not validated again, since there may be 256 choices."""
        changed = copy(self)
        for name, value in values.items():
            object.__setattr__(changed, name, value)
        return changed

    def changed(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, for logs and the dashboard."""
        plain = SamplingParams()
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != getattr(plain, f.name)}


SAMPLING_PARAMS: Mapping[str, ParamInfo] = {f.name: f.metadata["info"] for f in fields(SamplingParams)}
"""The one table of sampling parameters, by name."""
_BOUNDED = tuple((name, info) for name, info in SAMPLING_PARAMS.items() if info.low is not None)


def given_params(body: object, dialect: str = "") -> dict[str, Any]:
    """Return the fields that a request's body sets, by our names. `dialect`: whose names the body has."""
    named = {name: getattr(body, info.spellings.get(dialect, name), None) for name, info in SAMPLING_PARAMS.items()}
    return {name: value for name, value in named.items() if value is not None}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _token_id(key: object, param: str) -> int:
    """Parse a logit_bias key. JSON keys are strings."""
    try:
        token_id = int(key)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        token_id = -1
    if token_id < 0:
        raise InvalidParameter(f"The keys of {param} must be token ids.", f"Got {key!r}.", param=param)
    return int(token_id)


def _require_structured_outputs(value: object) -> None:
    from localllm.text.structured import StructuredOutputsParams  # the command line's parsers need only the fields

    if not isinstance(value, StructuredOutputsParams):
        raise InvalidParameter(
            "structured_outputs must be a StructuredOutputsParams.",
            f"Got {type(value).__name__}.",
            param="structured_outputs",
        )


def _whole(value: object, param: str, low: float, high: float | None = None) -> None:
    if not _is_int(value):
        raise InvalidParameter(f"{param} must be a whole number.", f"Got {value!r}.", param=param)
    assert isinstance(value, int)
    if value < low or (high is not None and value > high):
        span = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidParameter(f"{param} must be {span}.", f"Got {value}.", param=param)


def _real(value: object, param: str, low: float, high: float, *, above_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidParameter(f"{param} must be a finite number.", f"Got {value!r}.", param=param)
    if value > high or value < low or (above_low and value == low):
        span = f"above {low:g} and at most {high:g}" if above_low else f"between {low:g} and {high:g}"
        raise InvalidParameter(f"{param} must be {span}.", f"Got {value:g}.", param=param)
