"""The value of the setting speculative_config: vLLM's JSON object for speculation.

Does not know: how drafts are found or verified.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localllm.errors import ConfigError, UnsupportedOption

METHODS = ("auto", "off", "ngram")
"""auto: lookup where the runner verifies drafts; ngram: lookup, refused where it does not."""
_PARAM = "speculative_config"
_LATER_METHODS = ("mtp", "eagle", "eagle3", "draft_model", "suffix", "medusa", "mlp_speculator")
_LATER_KEYS = (
    "model", "quantization", "revision", "draft_tensor_parallel_size", "max_model_len", "prompt_lookup_min",
    "prompt_lookup_max", "num_speculative_tokens_per_batch_size", "draft_load_config", "disable_by_batch_size",
    "disable_padded_drafter_batch", "enforce_eager", "parallel_drafting", "draft_sample_method", "code_revision",
    "max_speculative_tokens", "speculative_token_tree", "rejection_sample_method",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SpeculationChoice:
    """The speculation that was asked for."""

    method: str  # one of METHODS
    most: int | None  # drafts of a request at a time; None: as many as a step verifies

    @property
    def is_off(self) -> bool:
        return self.method == "off" or self.most == 0


def read_speculative_config(raw: Any) -> str:
    """Check the JSON object, or a table of a file, and return it as JSON.

    Raises `ConfigError` for unknown keys and wrong values, `UnsupportedOption` for methods and keys of vLLM that this
    version does not have.
    """
    given = raw
    if isinstance(raw, str):
        try:
            given = json.loads(raw)
        except ValueError as error:
            raise ConfigError(f"--speculative-config {raw} is not valid JSON.", f"{error}.", param=_PARAM) from error
    if not isinstance(given, Mapping):
        raise ConfigError(f"--speculative-config {raw} is not an object.", hint=_EXAMPLE, param=_PARAM)
    values = dict(given)
    method, count = values.pop("method", "ngram"), values.pop("num_speculative_tokens", None)
    for key in values:
        _refuse(key)
    if method in _LATER_METHODS or str(method).endswith("_mtp"):
        raise UnsupportedOption(
            f"The speculative method {method} is not supported yet.",
            "This version has ngram, which looks the text up in itself and needs no weights.",
            _EXAMPLE,
            param=_PARAM,
        )
    if method not in ("ngram", "[ngram]"):
        raise ConfigError(f"{method!r} is not a speculative method.", "Supported: ngram.", _EXAMPLE, param=_PARAM)
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise ConfigError(f"num_speculative_tokens {count!r} is not valid.", "It must be at least 1.", param=_PARAM)
    return json.dumps({"method": "ngram"} | ({} if count is None else {"num_speculative_tokens": count}))


def speculation_choice(method: str, most: int | None, config: str | None) -> SpeculationChoice:
    """Return the choice of three settings: --speculative, --draft-max and --speculative-config. Raises `ConfigError` if
    they contradict each other."""
    if config is None:
        return SpeculationChoice(method, most)
    if method == "off":
        raise ConfigError(
            "--speculative off and --speculative-config contradict each other.", hint="Leave one out.", param=_PARAM
        )
    count = json.loads(read_speculative_config(config)).get("num_speculative_tokens")
    if most is not None and count is not None and most != count:
        raise ConfigError(
            f"--draft-max {most} and num_speculative_tokens {count} contradict each other.",
            hint="Leave one out.",
            param=_PARAM,
        )
    return SpeculationChoice("ngram", most if count is None else count)


def _refuse(key: str) -> None:
    if key in _LATER_KEYS:
        raise UnsupportedOption(
            f"{key} of --speculative-config is not supported yet.",
            "Lookup needs no model, and the number of drafts follows what they are measured to bring.",
            _EXAMPLE,
            param=_PARAM,
        )
    raise ConfigError(
        f"{key!r} is not a key of --speculative-config.",
        "Supported: method, num_speculative_tokens.",
        _EXAMPLE,
        param=_PARAM,
    )


_EXAMPLE = '--speculative-config \'{"method": "ngram", "num_speculative_tokens": 7}\''
