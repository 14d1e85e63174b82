"""The settings of speculation: what is read, what is refused and how."""

from __future__ import annotations

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
    ],
)
def test_three_settings_are_one_choice(given: dict[str, Any], method: str, most: int | None) -> None:
    choice = EngineConfig(**given).speculation
    assert (choice.method, choice.most) == (method, most)
    assert choice.is_off == (method == "off")


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
        ('{"method": "mtp"}', UnsupportedOption, "mtp"),
        ('{"method": "deepseek_mtp"}', UnsupportedOption, "deepseek_mtp"),
        ('{"method": "eagle3", "num_speculative_tokens": 3}', UnsupportedOption, "eagle3"),
        ('{"method": "draft_model"}', UnsupportedOption, "draft_model"),
        ('{"model": "org/name"}', UnsupportedOption, "model"),
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
    ],
)
def test_contradictions_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="contradict"):
        EngineConfig(**given)
