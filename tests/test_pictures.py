"""The whole engine on prompts with pictures against transformers in fp32, one family at a time."""

from functools import cache
from pathlib import Path

import pytest
import torch

from localllm.models.read_spec import read_spec
from tests.models.seeing import SEEING, make_seeing, opened, picture, prompt_of, reference_with_pictures, spans
from tests.test_goldens import Engine

NUM_TOKENS = 6
SIZES = ((50, 70), (70, 33))


class Case:
    """A tiny model with two pictures in a prompt, and what transformers computes."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.model = path, make_seeing(path, name)
        self.spec = read_spec(path)
        self.processor = opened(path, self.spec)
        self.processed = [self.processor.process_image(picture(*size, seed)) for seed, size in enumerate(SIZES)]
        self.rows = max(each.rows for each in self.processed)

    def expected(self, ids: list[int], processed: list) -> list[int]:
        """Return the greedy tokens of transformers, and check that they are no near ties."""
        ids = list(ids)
        start = len(ids)
        for _ in range(NUM_TOKENS):
            logits = reference_with_pictures(self.model, ids, processed)[-1]
            best = torch.topk(logits, 2).values
            assert best[0] - best[1] > 1e-4 * logits.abs().max(), "a near tie: take another seed"
            ids.append(int(logits.argmax()))
        return ids[start:]


@cache
def case_of(folder: Path, name: str) -> Case:
    return Case(folder / name, name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seeing")


@pytest.mark.parametrize("name", SEEING)
def test_pictures_whole_in_odd_chunks_and_from_the_cache(name: str, folder: Path) -> None:
    case = case_of(folder, name)
    ids = prompt_of(case.processed)
    media, expected = spans(ids, case.processed), case.expected(ids, case.processed)
    least = 8 + case.rows if case.spec.vision.both_ways else 9
    engine = Engine(case.path, encoder_rows=case.rows, max_num_batched_tokens=512)
    assert engine.generate([ids], NUM_TOKENS, media=[media])[0] == expected
    assert engine.generate([ids], NUM_TOKENS, media=[media])[0] == expected  # from the prefix cache
    engine = Engine(case.path, encoder_rows=case.rows, max_num_batched_tokens=least)
    assert engine.generate([ids], NUM_TOKENS, media=[media])[0] == expected
