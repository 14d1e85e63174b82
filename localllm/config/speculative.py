"""The values of the settings of speculation: --speculative, --draft, --draft-max, and vLLM's JSON object.

Does not know: how drafts are made or verified, which kind of drafter a checkpoint is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from localllm.errors import ConfigError, UnsupportedOption

METHODS = ("auto", "off", "ngram", "mtp")
"""auto: lookup where the runner verifies drafts; ngram: lookup, refused where it does not; mtp: the prediction layers
that the model's own checkpoint brings. Another value names a drafter with weights."""
_PARAM = "speculative_config"
_KINDS = ("draft_model", "eagle", "eagle3", "mtp")
_LATER_METHODS = ("suffix", "medusa", "mlp_speculator", "ngram_gpu", "custom_class", "dflash")
_LATER_KEYS = (
    "prompt_lookup_min", "prompt_lookup_max", "num_speculative_tokens_per_batch_size", "draft_load_config",
    "disable_by_batch_size", "disable_padded_drafter_batch", "enforce_eager", "parallel_drafting",
    "draft_sample_method", "code_revision", "max_speculative_tokens", "speculative_token_tree", "attention_backend",
    "moe_backend", "synthetic_acceptance_rates",
)  # fmt: skip
_EXAMPLE = '--speculative-config \'{"method": "draft_model", "model": "ORG/NAME", "num_speculative_tokens": 4}\''


@dataclass(frozen=True, slots=True)
class SpeculationChoice:
    """The speculation that was asked for."""

    method: str  # auto, off, ngram, or draft: a drafter with weights, and lookup where it finds something
    most: int | None  # drafts of a request at a time; None: as many as a step verifies
    kind: str = ""  # draft_model, eagle, eagle3, mtp; empty: as the drafter's checkpoint says
    drafter: str = ""  # repository, folder or file of the drafter; empty: mtp's layers, in the model's own checkpoint
    revision: str | None = None  # of the drafter, as are the next two
    quantization: str | None = None
    max_model_len: int | None = None  # tokens after which the drafter stops

    @property
    def is_off(self) -> bool:
        return self.method == "off" or self.most == 0

    @property
    def has_drafter(self) -> bool:
        return self.method == "draft" and self.most != 0

    @property
    def takes_prediction_layer(self) -> bool:
        """Return whether the drafter is the model's own layer for multi-token prediction."""
        return self.kind == "mtp" and self.has_drafter


def is_method_or_model(value: str) -> bool:
    """Return whether a value of --speculative is a method, or looks like the name of a drafter."""
    return value in METHODS or "/" in value or value.endswith(".gguf")


def without_drafter(method: str) -> str:
    """Return the value of --speculative for a model that the named drafter does not belong to."""
    return method if method in ("auto", "off", "ngram") else "auto"


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
    _refuse_other_rules(values)
    kept = {}
    for key, value in values.items():
        check = _CHECKS.get(key)
        if check is None:
            raise _refused_key(key)
        if value is not None:
            kept[key] = check(key, value)
    kept["method"] = _method(kept)
    return json.dumps(kept)


def _method(values: Mapping[str, Any]) -> str:
    """Return the method, which vLLM also takes from the presence of a model."""
    method = values.get("method", "draft_model" if "model" in values else "ngram")
    method = "mtp" if method.endswith("_mtp") else method.strip("[]")
    if method in _LATER_METHODS:
        raise UnsupportedOption(
            f"The speculative method {method} is not supported.",
            f"Supported: ngram, {', '.join(_KINDS)}.",
            _EXAMPLE,
            param=_PARAM,
        )
    if method != "ngram" and method not in _KINDS:
        why = f"Supported: ngram, {', '.join(_KINDS)}."
        raise ConfigError(f"{method!r} is not a speculative method.", why, _EXAMPLE, param=_PARAM)
    if method == "ngram" and (extra := [key for key in values if key not in ("method", "num_speculative_tokens")]):
        why = "Lookup needs no model."
        raise ConfigError(f"{extra[0]} does not apply to the method ngram.", why, _EXAMPLE, param=_PARAM)
    if method not in ("ngram", "mtp") and "model" not in values:
        why = "It names the drafter's repository or folder."
        raise ConfigError(f"The method {method} needs the key model.", why, _EXAMPLE, param=_PARAM)
    return method


def speculation_choice(
    method: str, most: int | None, config: str | None, draft: str | None = None
) -> SpeculationChoice:
    """Return the choice of four settings: --speculative, --draft-max, --speculative-config and --draft. Raises
    `ConfigError` if they contradict each other."""
    named = [("--speculative " + method, method != "auto"), ("--draft", draft), ("--speculative-config", config)]
    given = [flag for flag, is_given in named if is_given]
    if len(given) > 1 and not (given[0] == f"--speculative {draft}" and config is None):
        raise ConfigError(f"{given[0]} and {given[1]} contradict each other.", hint="Leave one out.", param=_PARAM)
    if draft is not None:
        return SpeculationChoice("draft", most, drafter=draft)
    if config is None:
        if method == "mtp":
            return SpeculationChoice("draft", most, kind="mtp")
        return (
            SpeculationChoice(method, most) if method in METHODS else SpeculationChoice("draft", most, drafter=method)
        )
    return _of_config(json.loads(read_speculative_config(config)), most)


def _of_config(values: Mapping[str, Any], most: int | None) -> SpeculationChoice:
    count = values.get("num_speculative_tokens")
    if most is not None and count is not None and most != count:
        raise ConfigError(
            f"--draft-max {most} and num_speculative_tokens {count} contradict each other.",
            hint="Leave one out.",
            param=_PARAM,
        )
    most = most if count is None else count
    if values["method"] == "ngram":
        return SpeculationChoice("ngram", most)
    return SpeculationChoice(
        "draft", most, values["method"], values.get("model", ""), values.get("revision"), values.get("quantization"),
        values.get("max_model_len"),
    )  # fmt: skip


# ---- the keys --------------------------------------------------------------------------------------------------------


def _refuse_other_rules(values: dict[str, Any]) -> None:
    """Take out the rule of acceptance, which cannot be chosen."""
    rule = values.pop("rejection_sample_method", "strict")
    if rule not in ("strict", "standard"):
        raise UnsupportedOption(
            f"rejection_sample_method {rule} is not supported.",
            "Every answer is exact: a draft is right if it would have been drawn.",
            "Leave the key out.",
            param=_PARAM,
        )


def _refused_key(key: str) -> ConfigError:
    if key in _LATER_KEYS:
        return UnsupportedOption(
            f"{key} of --speculative-config is not supported.",
            "The number of drafts follows what they are measured to bring.",
            "Leave the key out.",
            param=_PARAM,
        )
    return ConfigError(
        f"{key!r} is not a key of --speculative-config.", f"Supported: {', '.join(_CHECKS)}.", _EXAMPLE, param=_PARAM
    )


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{key} {value!r} is not valid.", "It must be a text.", _EXAMPLE, param=_PARAM)
    return value


def _count(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} {value!r} is not valid.", "It must be at least 1.", param=_PARAM)
    return value


def _one(key: str, value: Any) -> int:
    if _count(key, value) != 1:
        why = "A drafter runs on one device, with its model."
        raise UnsupportedOption(f"{key} {value} is not supported.", why, "Leave the key out.", param=_PARAM)
    return 1


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "method": _text,
    "num_speculative_tokens": _count,
    "model": _text,
    "revision": _text,
    "quantization": _text,
    "max_model_len": _count,
    "draft_tensor_parallel_size": _one,
}
