"""The settings of speculation: what is read, what is refused and how."""

from dataclasses import replace
from typing import Any

import pytest

from localllm.config.settings import EngineConfig
from localllm.config.speculative import read_speculative_config
from localllm.errors import ConfigError, UnsupportedOption


@pytest.mark.parametrize(
    ("given", "method", "most"),
    [
        ({}, "auto", None),
        ({"speculative": "off"}, "off", None),
        ({"speculative": "ngram", "draft_max": 3}, "ngram", 3),
        ({"speculative_config": '{"method": "ngram", "num_speculative_tokens": 5}'}, "ngram", 5),
        ({"speculative_config": '{"num_speculative_tokens": 5}', "draft_max": 5}, "ngram", 5),
        ({"speculative_config": '{"method": "ngram"}', "draft_max": 2}, "ngram", 2),
        ({"speculative_config": '{"method": "ngram", "rejection_sample_method": "strict"}'}, "ngram", None),
    ],
)
def test_three_settings_are_one_choice(given: dict[str, Any], method: str, most: int | None) -> None:
    choice = EngineConfig(**given).speculation
    assert (choice.method, choice.most) == (method, most)
    assert choice.is_off == (method == "off")


@pytest.mark.parametrize(
    ("given", "kind", "drafter", "most"),
    [
        ({"draft": "org/small"}, "", "org/small", None),
        ({"draft": "demo", "draft_max": 3}, "", "demo", 3),
        ({"speculative": "org/small"}, "", "org/small", None),
        ({"speculative": "./folder"}, "", "./folder", None),
        ({"speculative": "mtp"}, "mtp", "", None),
        ({"speculative_config": '{"method": "deepseek_mtp", "num_speculative_tokens": 1}'}, "mtp", "", 1),
        ({"speculative_config": '{"model": "org/small"}'}, "draft_model", "org/small", None),
        ({"speculative_config": '{"method": "eagle3", "model": "org/e", "revision": null}'}, "eagle3", "org/e", None),
    ],
)
def test_a_drafter_has_a_name_and_a_kind(given: dict[str, Any], kind: str, drafter: str, most: int | None) -> None:
    choice = EngineConfig(**given).speculation
    assert (choice.method, choice.kind, choice.drafter, choice.most) == ("draft", kind, drafter, most)
    assert choice.has_drafter
    assert not replace(choice, most=0).has_drafter


def test_the_keys_of_a_drafter_are_kept() -> None:
    raw = {"model": "org/small", "revision": "main", "quantization": "int8", "max_model_len": 99}
    choice = EngineConfig(speculative_config=read_speculative_config(raw)).speculation
    assert (choice.revision, choice.quantization, choice.max_model_len) == ("main", "int8", 99)


def test_no_drafts_is_off() -> None:
    assert EngineConfig(draft_max=0).speculation.is_off


def test_a_table_of_a_file_is_read_like_json() -> None:
    assert read_speculative_config({"method": "ngram"}) == read_speculative_config('{"method":"ngram"}')


@pytest.mark.parametrize(
    ("raw", "kind", "word"),
    [
        ("{", ConfigError, "JSON"),
        ("[]", ConfigError, "object"),
        ('{"method": "ngrams"}', ConfigError, "ngrams"),
        ('{"method": "medusa"}', UnsupportedOption, "medusa"),
        ('{"method": "eagle3", "num_speculative_tokens": 3}', ConfigError, "model"),
        ('{"method": "draft_model", "model": 3}', ConfigError, "model"),
        ('{"method": "ngram", "model": "org/name"}', ConfigError, "model"),
        ('{"model": "org/name", "draft_tensor_parallel_size": 2}', UnsupportedOption, "draft_tensor_parallel_size"),
        ('{"model": "org/name", "max_model_len": 0}', ConfigError, "max_model_len"),
        ('{"prompt_lookup_max": 4}', UnsupportedOption, "prompt_lookup_max"),
        ('{"rejection_sample_method": "lossy"}', UnsupportedOption, "rejection_sample_method"),
        ('{"num_tokens": 4}', ConfigError, "num_tokens"),
        ('{"num_speculative_tokens": 0}', ConfigError, "num_speculative_tokens"),
        ('{"num_speculative_tokens": true}', ConfigError, "num_speculative_tokens"),
    ],
)
def test_what_is_wrong_is_refused_by_name(raw: str, kind: type[ConfigError], word: str) -> None:
    with pytest.raises(kind, match=word) as caught:
        read_speculative_config(raw)
    assert (type(caught.value) is UnsupportedOption) == (kind is UnsupportedOption)


@pytest.mark.parametrize(
    "given",
    [
        {"speculative": "off", "speculative_config": '{"method": "ngram"}'},
        {"draft_max": 3, "speculative_config": '{"num_speculative_tokens": 5}'},
        {"draft": "org/small", "speculative": "off"},
        {"draft": "org/small", "speculative": "mtp"},
        {"draft": "org/small", "speculative_config": '{"method": "ngram"}'},
    ],
)
def test_contradictions_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="contradict"):
        EngineConfig(**given)
