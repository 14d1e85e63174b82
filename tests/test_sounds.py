"""The whole engine on prompts with sound against transformers in fp32, one family at a time."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from localllm.models.read_spec import read_spec
from localllm.models.vision.sound import ProcessedSound
from localllm.models.vision.tower import load_sound_tower, sound_tower_bytes
from tests.golden_engine import Engine
from tests.models.hearing import HEARING, make_hearing, noise, opened, prompt_of, reference_with_sounds, spans

NUM_TOKENS = 4
SECONDS = (5.3, 0.7, 3.0)


class Case:
    """A tiny model with three sounds, and what transformers computes of prompts with them."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.model = path, make_hearing(path, name)
        self.spec = read_spec(path)
        processor = opened(self.spec)
        self.processed = [processor.process(noise(seconds, seed)) for seed, seconds in enumerate(SECONDS)]
        self.rows = max(each.rows for each in self.processed)

    def engine(self, **sizes: Any) -> Engine:
        return Engine(self.path, encoder_rows=self.rows, **sizes)

    def sounds(self, which: tuple[int, ...]) -> list[ProcessedSound]:
        return [self.processed[place] for place in which]

    @cache  # noqa: B019
    def prompt(self, which: tuple[int, ...]) -> tuple[list[int], list[int]]:
        """Return a prompt with these sounds, and the greedy tokens of transformers, none of them a near tie."""
        sounds = self.sounds(which)
        for seed in range(9):
            ids = prompt_of(sounds, seed)
            tokens: list[int] = []
            for _ in range(NUM_TOKENS):
                logits = reference_with_sounds(self.model, [*ids, *tokens], sounds)[-1]
                best = torch.topk(logits, 2).values
                if best[0] - best[1] < 1e-3 * logits.abs().max():
                    break
                tokens.append(int(logits.argmax()))
            else:
                return ids, tokens
        raise AssertionError("near ties with every seed")

    def check(self, engine: Engine, which: tuple[int, ...]) -> None:
        ids, expected = self.prompt(which)
        assert engine.generate([ids], NUM_TOKENS, media=[spans(ids, self.sounds(which))])[0] == expected
        engine.scheduler.table.encoded.check_invariants([])


@cache
def case_of(folder: Path, name: str) -> Case:
    return Case(folder / name, name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hearing")


@pytest.mark.parametrize("name", HEARING)
def test_sounds_whole_in_odd_chunks_and_from_the_cache(name: str, folder: Path) -> None:
    case = case_of(folder, name)
    engine = case.engine()
    case.check(engine, (0, 1))
    case.check(engine, (0, 1))  # from the prefix cache
    case.check(engine, (1, 1))
    case.check(case.engine(max_num_batched_tokens=9), (0, 1))
    case.check(engine, ())  # text alone


@pytest.mark.parametrize("name", HEARING)
def test_log_probabilities_of_a_batch_are_those_of_transformers(name: str, folder: Path) -> None:
    """Prompts of unequal lengths, with and without sound, side by side and one of them alone."""
    case = case_of(folder, name)
    asked = [(0, 1), (2,), (), (1,)]
    prompts = [case.prompt(which)[0] for which in asked]
    media = [spans(ids, case.sounds(which)) for ids, which in zip(prompts, asked, strict=True)]
    engine = case.engine(max_num_batched_tokens=40)
    found = engine.generate(prompts, NUM_TOKENS, media=media, logprobs=5)
    batched = engine.logprobs
    for i, which in enumerate(asked):
        assert found[i] == case.prompt(which)[1]
        logits = reference_with_sounds(case.model, [*prompts[i], *found[i]], case.sounds(which))
        expected = torch.log_softmax(logits[len(prompts[i]) - 1 :], -1)
        for step, token in enumerate(found[i]):
            assert abs(batched[i][step].logprobs[0] - float(expected[step, token])) < 2e-5
    alone = case.engine(max_num_batched_tokens=40)
    assert alone.generate(prompts[:1], NUM_TOKENS, media=media[:1], logprobs=5)[0] == found[0]
    assert [each.logprobs[0] for each in alone.logprobs[0]] == pytest.approx(
        [each.logprobs[0] for each in batched[0]], abs=1e-5
    )


@pytest.mark.parametrize("name", HEARING)
def test_a_preempted_prompt_is_computed_again(name: str, folder: Path) -> None:
    case = case_of(folder, name)
    ids, _ = case.prompt((2,))
    media = spans(ids, case.sounds((2,)))
    alone = case.engine().generate([ids], 24, media=[media])[0]
    engine = case.engine(num_blocks=1 + 2 * -(-len(ids) // 8) + 3, caching=False)
    encoded = []
    engine.runner._encoder.tower.encode = lambda tensors, encode=engine.runner._encoder.tower.encode: (
        encoded.append(1) or encode(tensors)
    )
    assert engine.generate([ids, ids], 24, media=[media, media]) == [alone, alone]
    assert engine.scheduler.recorder.num_preemptions
    assert len(encoded) == 1
    engine.scheduler.table.encoded.check_invariants([])


@pytest.mark.parametrize("name", HEARING)
def test_sounds_of_other_content_share_no_block(name: str, folder: Path) -> None:
    case = case_of(folder, name)
    first, second = (opened(case.spec).process(noise(3.0, seed)) for seed in (2, 7))
    assert first.digest != second.digest
    ids, _ = case.prompt((2,))
    engine = case.engine()
    engine.generate([ids], 1, media=[spans(ids, [first])])
    engine.generate([ids], 1, media=[spans(ids, [second])], logprobs=1)
    expected = torch.log_softmax(reference_with_sounds(case.model, ids, [second])[-1], -1)
    [[found]] = [engine.logprobs[0]]
    assert abs(found.logprobs[0] - float(expected.max())) < 2e-5


@pytest.mark.parametrize("name", HEARING)
def test_the_tower_reads_pieces_as_transformers_reads_the_whole(name: str, folder: Path) -> None:
    case = case_of(folder, name)
    tower = load_sound_tower(case.path, case.spec.hearing, torch.device("cpu"), torch.float32)
    assert tower.bytes_held == sound_tower_bytes(case.path, case.spec.hearing, torch.float32)
    for sound in case.processed:
        with torch.no_grad():
            out = case.model.model.get_audio_features(**sound.tensors, return_dict=True).pooler_output
        found = tower.encode(sound.tensors)
        assert len(found) == sound.rows
        torch.testing.assert_close(found, out.reshape(-1, out.shape[-1]), atol=2e-6 * float(out.abs().max()), rtol=0)


LENGTHS = (400, 7_999, 8_001, 16_000, 16_159, 31_999, 48_160, 79_840)


@pytest.mark.parametrize("num_samples", LENGTHS)
def test_features_of_voxtral_and_qwen_are_those_of_their_extractors(num_samples: int, folder: Path) -> None:
    from transformers import WhisperFeatureExtractor
    from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor

    samples = noise(num_samples / 16_000)
    floats = samples.astype(np.float32) / 32768
    made = opened(case_of(folder, "qwen3_asr").spec).process(samples)
    expected = Qwen3ASRFeatureExtractor(feature_size=16)(
        floats, sampling_rate=16_000, return_tensors="pt", padding=True, return_attention_mask=True
    )
    torch.testing.assert_close(made.tensors["input_features"], expected["input_features"], atol=1e-6, rtol=0)
    assert torch.equal(made.tensors["input_features_mask"], expected["attention_mask"].long())
    made = opened(case_of(folder, "voxtral").spec).process(samples)
    chunk = 200 * 160  # of the tiny model
    whisper: Any = WhisperFeatureExtractor(feature_size=16)
    expected = whisper(
        floats, sampling_rate=16_000, padding=True, truncation=False, pad_to_multiple_of=chunk, return_tensors="pt"
    )["input_features"]
    expected = expected.reshape(16, -1, 200).transpose(0, 1)
    torch.testing.assert_close(made.tensors["input_features"], expected, atol=1e-6, rtol=0)


def test_rows_are_those_of_transformers_processors() -> None:
    """Qwen's and Granite's arithmetic for lengths about each boundary; Voxtral's 375 rows of 30 s."""
    from transformers.models.granite_speech.feature_extraction_granite_speech import GraniteSpeechFeatureExtractor
    from transformers.models.qwen3_asr.processing_qwen3_asr import Qwen3ASRProcessor

    from localllm.models.spec.vision import HearingSpec
    from localllm.models.vision.sound import GRANITE, QWEN3_ASR, VOXTRAL

    sizes: dict[str, Any] = {"num_mels": 80, "width": 8, "mlp_width": 8, "layers": 1, "heads": 1}
    qwen = HearingSpec("qwen3_asr", 0, **sizes, chunk=100, piece=800, chunk_rows=13)
    granite = HearingSpec("granite_speech", 0, **sizes, chunk=30, piece=0, chunk_rows=3)
    voxtral = HearingSpec("voxtral", 0, **sizes)
    like: Any = type("Like", (), {"melspec_kwargs": {"hop_length": 160}, "projector_window_size": 15,
                                  "projector_downsample_rate": 5})()  # fmt: skip
    for frames in (*range(50, 320), 1600, 3000, 3001, 12_345):
        for extra in (0, 1, 159):
            count = frames * 160 + extra
            assert QWEN3_ASR.rows(qwen, count) == Qwen3ASRProcessor._get_audio_token_length(
                like, torch.tensor([frames])
            )
            assert [GRANITE.rows(granite, count)] == GraniteSpeechFeatureExtractor._get_num_audio_features(
                like, [count]
            )
    assert [VOXTRAL.rows(voxtral, seconds * 16_000) for seconds in (1, 30, 31, 600)] == [375, 375, 750, 7500]
