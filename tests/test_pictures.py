"""The whole engine on prompts with pictures against transformers in fp32, one family at a time."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from localllm.config.settings import EngineConfig
from localllm.engine.adapter import Adapter
from localllm.errors import UnsupportedModel
from localllm.machine.hardware import Hardware
from localllm.models.fit import plan_memory
from localllm.models.fit.estimate import estimate, fit_rows
from localllm.models.fit.pictures import with_tower
from localllm.models.layers.lora import LoraLimits
from localllm.models.read_spec import read_spec
from localllm.models.vision.tower import load_tower
from localllm.models.weights.lora import open_lora, put_lora
from localllm.runner.pictures import rotary_positions
from localllm.units import format_bytes
from tests.adapters import make_tiny_adapter, merged
from tests.golden_engine import NUM_MEDIA_TOKENS, Engine, MediaCase
from tests.models.seeing import SEEING, make_seeing, opened, picture, prompt_of, reference_with_pictures, spans

SIZES = ((50, 70), (70, 33))
TARGETS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
QUICK = ("qwen2_5_vl", "gemma3")


@cache
def case_of(folder: Path, name: str) -> MediaCase:
    path = folder / name
    model, process = make_seeing(path, name), opened(path, read_spec(path)).process_image
    processed = [process(picture(*size, seed)) for seed, size in enumerate(SIZES)]
    return MediaCase(path, model, processed, prompt_of=prompt_of, spans=spans, reference=reference_with_pictures)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seeing")


@pytest.mark.parametrize("name", SEEING)
def test_pictures_whole_in_odd_chunks_and_from_the_cache(name: str, folder: Path) -> None:
    case = case_of(folder, name)
    engine = case.engine()
    case.check(engine, (0, 1))
    case.check(engine, (0, 1))  # from the prefix cache
    case.check(engine, (0, 0), first=True)
    case.check(case.engine(max_num_batched_tokens=8 + case.rows if case.spec.vision.both_ways else 9), (0, 1))


@pytest.mark.parametrize("name", QUICK)
def test_a_prompt_that_ends_with_a_picture(name: str, folder: Path) -> None:
    case = case_of(folder, name)
    case.check(case.engine(), (1,), last=True)


@pytest.mark.parametrize("name", QUICK)
def test_steps_that_are_staged_as_on_a_gpu(name: str, folder: Path) -> None:
    case = case_of(folder, name)
    case.check(case.engine(staged=True, max_num_batched_tokens=64), (0, 1))


@pytest.mark.parametrize("name", QUICK)
def test_a_preempted_prompt_is_not_encoded_again(name: str, folder: Path) -> None:
    """Two requests and too few blocks: one is preempted and computed again from pictures that are still encoded."""
    case = case_of(folder, name)
    ids, expected = case.prompt((0,))
    media = spans(ids, case.media((0,)))
    count = 24
    alone = case.engine().generate([ids], count, media=[media])[0]
    blocks = 1 + 2 * -(-len(ids) // 8) + 3
    engine = case.engine(num_blocks=blocks, caching=False)
    encoded = []
    engine.runner._encoder.tower.encode = lambda pixels, encode=engine.runner._encoder.tower.encode: (
        encoded.append(1) or encode(pixels)
    )
    got = engine.generate([ids, ids], count, media=[media, media])
    assert alone[:NUM_MEDIA_TOKENS] == expected
    assert got[0] == got[1] == alone
    assert engine.scheduler.recorder.num_preemptions
    assert len(encoded) == 1


def test_prompts_of_text_are_the_same_with_and_without_the_tower(folder: Path) -> None:
    """Bits, steps and names of blocks."""
    case = case_of(folder, "qwen2_5_vl")
    prompts = [prompt_of([], seed) * 3 for seed in (1, 2)]
    seen = []
    for rows in (case.rows, 0):
        engine = case.engine(max_num_batched_tokens=16) if rows else Engine(case.path, max_num_batched_tokens=16)
        if not rows:
            engine.runner._encoder = None
        tokens = engine.generate(prompts, NUM_MEDIA_TOKENS, logprobs=3)
        names = [sorted(pool.names()) for pool in engine.scheduler.ledger.pools]
        seen.append((tokens, engine.logprobs, names))
    assert seen[0] == seen[1]
    assert any(seen[0][2])


def test_pictures_are_told_apart_by_what_they_show(folder: Path) -> None:
    """The same text, other pictures: nothing is shared from the first picture's block on."""
    case = case_of(folder, "qwen2_5_vl")
    other = opened(case.path, case.spec).process_image(picture(*SIZES[0], seed=7))
    ids = prompt_of([other])
    engine = case.engine()
    seen = [
        engine.generate([ids], 1, media=[spans(ids, [each], salt)]) and engine.endings[0].num_cached_tokens
        for each, salt in ((case.processed[0], None), (other, None), (other, None), (other, "a"))
    ]
    assert seen == [0, 8, (len(ids) - 1) // 8 * 8, 8]


def test_an_adapter_changes_a_prompt_with_pictures_as_merging_it_would(folder: Path, tmp_path: Path) -> None:
    """The decoder's layers alone change, and the rows of a picture are shared by requests with and without."""
    case = case_of(folder, "qwen2_5_vl")
    targets = tuple(f"language_model.layers.{layer}.{name}" for layer in (0, 1) for name in TARGETS)
    path = make_tiny_adapter(tmp_path / "a", case.path, targets=targets)
    ids, media = prompt_of(case.processed, 1), case.processed
    expected = [
        [int(reference_with_pictures(model, ids, media)[-1].argmax())]
        for model in (case.model, merged(case.path, path))
    ]
    engine = case.engine(lora=LoraLimits(1, 4), max_num_batched_tokens=9)
    put_lora(open_lora(path), engine.model.lora, 0)
    of = spans(ids, media)
    answers = engine.generate([ids, ids], 1, media=[of, of], adapters=[None, Adapter("a", 0, "a")])
    assert answers == expected
    assert expected[0] != expected[1]


def test_an_adapter_of_the_tower_is_refused(folder: Path, tmp_path: Path) -> None:
    case = case_of(folder, "qwen2_5_vl")
    path = make_tiny_adapter(tmp_path / "a", case.path, targets=("attn.qkv", "layers.0.self_attn.q_proj"))
    engine = case.engine(lora=LoraLimits(1, 4))
    with pytest.raises(UnsupportedModel, match=r"model\.visual.*not supported for the part that reads pictures"):
        put_lora(open_lora(path), engine.model.lora, 0)


def test_positions_are_those_of_transformers(folder: Path) -> None:
    case = case_of(folder, "qwen2_5_vl")
    ids, _ = case.prompt((0, 1))
    rotary, shift = rotary_positions(len(ids), spans(ids, case.processed))
    grids = torch.cat([each.tensors["image_grid_thw"] for each in case.processed])
    tokens = torch.tensor([ids])
    expected, delta = case.model.model.get_rope_index(tokens, (tokens == 10).int(), grids)
    assert np.array_equal(rotary, expected[:, 0].numpy())
    assert shift == int(delta)


def test_the_plan_counts_the_tower_the_largest_picture_and_the_kept_rows(folder: Path) -> None:
    case = case_of(folder, "gemma3")
    hardware = Hardware((), "a CPU", 2, 2**34, 2**33)
    spec = with_tower(case.path, case.spec)
    plans = {
        limit: plan_memory(
            EngineConfig(limit_mm_per_prompt=f"image={limit},audio=0", device="cpu"), spec, 2**20, hardware
        )
        for limit in (0, 4)
    }
    sizes = plans[4].pictures
    assert plans[0].pictures is None
    assert any("--limit-mm-per-prompt image=0" in note for note in plans[0].notes)
    assert sizes is not None
    assert sizes.rows == 4
    assert sizes.tower_bytes == load_tower(case.path, case.spec.vision, torch.device("cpu"), torch.float32).bytes_held
    assert plans[4].weights_bytes - plans[0].weights_bytes == sizes.tower_bytes
    [seen] = estimate(EngineConfig(device="cpu"), spec, 2**20, hardware, None)
    rows = dict(fit_rows([seen]))
    assert rows["  of the part that sees"] == [format_bytes(sizes.tower_bytes)]
    assert rows["  largest picture"] == [format_bytes(sizes.encode_bytes)]
    assert rows["  encoded pictures"] == [format_bytes(sizes.kept_bytes)]
    assert plans[4].activation_bytes >= plans[0].activation_bytes + sizes.kept_bytes
