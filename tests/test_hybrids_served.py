"""Hybrid decoders through the whole engine: greedy tokens are transformers', also where a second turn begins at the
state that the first one left."""

from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.engine.params import SamplingParams
from localllm.llm import LLM
from tests.gguf_hybrids import write_hybrid
from tests.models.harness import prompt, reference, reference_greedy

PathOf = Callable[[str], Path]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5", "nemotron_h", "falcon_h1"])
def test_second_turns_go_on_from_the_first(family: str, tiny_model_path: PathOf) -> None:
    path = tiny_model_path(family)
    first = [prompt(length, seed=length) for length in (3, 40, 65)]
    with LLM(str(path), device="cpu", dtype="float32", max_model_len=256) as llm:
        answers = [list(output.outputs[0].token_ids) for output in llm.generate(first, GREEDY)]
        assert answers == [reference_greedy(reference(path), tokens, 12) for tokens in first]
        second = [tokens + answer + prompt(9, seed=9) for tokens, answer in zip(first, answers, strict=True)]
        outputs = llm.generate(second, GREEDY)
    for tokens, output in zip(second, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == reference_greedy(reference(path), tokens, 12)
    assert [output.num_cached_tokens >= 16 for output in outputs] == [False, True, True]


def test_from_a_gguf_file(tiny_model_path: PathOf, tmp_path: Path) -> None:
    path, tokens = tiny_model_path("qwen3_5"), prompt(30)
    file = write_hybrid(path, tmp_path / "model.gguf")
    with LLM(str(file), device="cpu", dtype="float32", max_model_len=128) as llm:
        (output,) = llm.generate([tokens], GREEDY)
    assert list(output.outputs[0].token_ids) == reference_greedy(reference(path), tokens, 12)
