"""The whole engine on prompts with sound against transformers in fp32, one family at a time."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from localllm.config.settings import EngineConfig
from localllm.errors import CorruptModel, UnsupportedModel
from localllm.machine.hardware import Hardware
from localllm.models.families.text_part import QWEN_ENDS, without_thinker
from localllm.models.fit import plan_memory
from localllm.models.fit.pictures import sound_encode_bytes, with_tower
from localllm.models.read_spec import read_spec
from localllm.models.vision.tower import load_sound_tower, sound_tower_bytes
from tests.golden_engine import NUM_MEDIA_TOKENS, Engine, MediaCase
from tests.models.hearing import (
    HEARING,
    make_hearing,
    noise,
    opened,
    prompt_of,
    publish_as_qwen,
    reference_with_sounds,
    spans,
)
from tests.models.peak_bytes import PeakBytes

SECONDS = (5.3, 0.7, 3.0)


@cache
def case_of(folder: Path, name: str) -> MediaCase:
    path = folder / name
    model, process = make_hearing(path, name), opened(read_spec(path)).process
    processed = [process(noise(seconds, seed)) for seed, seconds in enumerate(SECONDS)]
    return MediaCase(path, model, processed, prompt_of=prompt_of, spans=spans, reference=reference_with_sounds)


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
    media = [spans(ids, case.media(which)) for ids, which in zip(prompts, asked, strict=True)]
    engine = case.engine(max_num_batched_tokens=40)
    found = engine.generate(prompts, NUM_MEDIA_TOKENS, media=media, logprobs=5)
    batched = engine.logprobs
    for i, which in enumerate(asked):
        assert found[i] == case.prompt(which)[1]
        logits = reference_with_sounds(case.model, [*prompts[i], *found[i]], case.media(which))
        expected = torch.log_softmax(logits[len(prompts[i]) - 1 :], -1)
        for step, token in enumerate(found[i]):
            assert abs(batched[i][step].logprobs[0] - float(expected[step, token])) < 2e-5
    alone = case.engine(max_num_batched_tokens=40)
    assert alone.generate(prompts[:1], NUM_MEDIA_TOKENS, media=media[:1], logprobs=5)[0] == found[0]
    assert [each.logprobs[0] for each in alone.logprobs[0]] == pytest.approx(
        [each.logprobs[0] for each in batched[0]], abs=1e-5
    )


@pytest.mark.parametrize("name", HEARING)
def test_a_preempted_prompt_is_computed_again(name: str, folder: Path) -> None:
    case = case_of(folder, name)
    ids, _ = case.prompt((2,))
    media = spans(ids, case.media((2,)))
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


_WIDE: dict[str, dict[str, Any]] = {
    "voxtral": {"audio_config": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2,
                                 "num_attention_heads": 4, "num_mel_bins": 128}},
    "qwen3_asr": {"audio_config": {"d_model": 256, "encoder_ffn_dim": 1024, "encoder_layers": 2, "output_dim": 64,
                                   "encoder_attention_heads": 4, "num_mel_bins": 128, "downsample_hidden_size": 120}},
    "glmasr": {"audio_config": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2,
                                "num_attention_heads": 4, "num_mel_bins": 128}},
    "granite_speech": {"encoder_config": {"num_layers": 2, "hidden_dim": 256, "num_heads": 4}},
    "gemma4": {"audio_config": {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
                                "output_proj_dims": 64}},
}  # fmt: skip


@pytest.mark.parametrize("name", HEARING)
def test_the_plan_of_a_sound_is_what_its_tensors_hold(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class_name, text, fields = HEARING[name]
    wide = {**fields, **_WIDE[name]}
    if name == "granite_speech":
        wide["projector_config"] = {**fields["projector_config"], "encoder_hidden_size": 256}
    monkeypatch.setitem(HEARING, name, (class_name, text, wide))
    make_hearing(tmp_path, name)
    spec = read_spec(tmp_path)
    hearing, sound = spec.hearing, opened(spec).process(noise(32.0))
    assert hearing is not None
    frames = -(-sound.rows // hearing.chunk_rows) * hearing.chunk
    for dtype in (torch.float32, torch.bfloat16):
        tower = load_sound_tower(tmp_path, hearing, torch.device("cpu"), dtype)
        with PeakBytes() as measured:
            tower.encode(sound.tensors)
        held = measured.peak + sum(each.nbytes for each in sound.tensors.values())
        planned = sound_encode_bytes(hearing, frames, min(frames, hearing.piece or frames), dtype.itemsize)
        assert 0.96 < planned / held < 1.3, (dtype, planned / held)


def test_the_plan_counts_the_tower_and_what_it_keeps(folder: Path) -> None:
    case = case_of(folder, "voxtral")
    spec = with_tower(case.path, case.spec)
    hardware = Hardware((), "a CPU", 2, 2**34, 2**33)
    config = EngineConfig(model=str(case.path), device="cpu", dtype="float32")
    plan, deaf = (
        plan_memory(config, each, 2**20, hardware) for each in (spec, dataclasses.replace(spec, hearing=None))
    )
    assert plan.sounds is not None
    assert deaf.sounds is None
    assert plan.sounds.tower_bytes == spec.hearing.tower_bytes
    assert plan.weights_bytes == deaf.weights_bytes + plan.sounds.tower_bytes
    assert plan.activation_bytes >= deaf.activation_bytes + plan.sounds.kept_bytes
    assert plan.sounds.rows <= 256 < plan.sounds.rows + 25  # half of the context, in whole chunks of 2 s
    assert any(note.startswith("Sound: the tower takes") for note in plan.notes)
    silent = plan_memory(dataclasses.replace(config, limit_mm_per_prompt="image=4,audio=0"), spec, 2**20, hardware)
    assert silent.sounds is None
    assert "Without sound: --limit-mm-per-prompt audio=0." in silent.notes
    fixed = plan_memory(dataclasses.replace(config, deterministic=True), spec, 2**20, hardware)
    assert fixed.sounds is None
    assert "Without sound: sound is not supported with --deterministic on a CPU." in fixed.notes


@pytest.mark.parametrize("name", HEARING)
def test_prompts_of_text_are_the_same_with_and_without_the_tower(name: str, folder: Path) -> None:
    """Bits, steps and names of blocks."""
    case = case_of(folder, name)
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


def test_features_of_granite_are_the_definition_in_float64(folder: Path) -> None:
    """A power spectrum under a periodic Hann window, triangles on the HTK scale, logarithms of at most 8 decades."""
    samples = noise(1.0)
    made = opened(case_of(folder, "granite_speech").spec).process(samples).tensors["input_features"][0].double()
    padded = np.pad(samples / 32768, 256, mode="reflect")
    window = np.zeros(512)
    window[56:456] = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    frames = np.stack([padded[at : at + 512] * window for at in range(0, len(padded) - 511, 160)])
    power = np.abs(np.fft.rfft(frames)) ** 2
    mels = np.linspace(0, 2595 * np.log10(1 + 8000 / 700), 16 + 2)
    edges, bins = 700 * (10 ** (mels / 2595) - 1), np.linspace(0, 8000, 257)
    rise = (bins - edges[:-2, None]) / np.diff(edges)[:-1, None]
    fall = (edges[2:, None] - bins) / np.diff(edges)[1:, None]
    found = np.log10(np.maximum(power @ np.clip(np.minimum(rise, fall), 0, None).T, 1e-10))
    found = np.maximum(found, found.max() - 8) / 4 + 1
    expected = torch.from_numpy(found[: len(found) // 2 * 2].reshape(-1, 32))
    torch.testing.assert_close(made, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("num_samples", [400, 16_001, 480_000, 500_100])
def test_features_and_rows_of_glm_are_those_of_its_processor(num_samples: int, folder: Path) -> None:
    from transformers import WhisperFeatureExtractor
    from transformers.models.glmasr.processing_glmasr import GlmAsrProcessor

    samples = noise(num_samples / 16_000)
    made = opened(case_of(folder, "glmasr").spec).process(samples)
    floats = samples.astype(np.float32) / 32768
    windows = [floats[at : at + 480_000] for at in range(0, len(floats), 480_000)]
    whisper: Any = WhisperFeatureExtractor(feature_size=16)
    expected = whisper(windows, sampling_rate=16_000, return_attention_mask=True, return_tensors="pt")
    torch.testing.assert_close(made.tensors["input_features"], expected["input_features"], atol=1e-6, rtol=0)
    assert torch.equal(made.tensors["input_features_mask"], expected["attention_mask"].long())
    frames = expected["attention_mask"].sum()
    assert made.rows == int(GlmAsrProcessor._get_audio_token_length(None, frames))  # type: ignore[arg-type]


def test_qwens_own_files_answer_as_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    case = case_of(folder, "qwen3_asr")
    make_hearing(tmp_path, "qwen3_asr")
    publish_as_qwen(tmp_path)
    spec, given = read_spec(tmp_path), case.spec
    assert dataclasses.replace(spec, rope=given.rope) == given
    assert dataclasses.replace(spec.rope, parameters=given.rope.parameters) == given.rope  # one position of a token
    assert without_thinker(json.loads((tmp_path / "config.json").read_text()))["eos_token_id"] == list(QWEN_ENDS)
    ids, expected = case.prompt((0, 1))
    engine = Engine(tmp_path, encoder_rows=case.rows)
    assert engine.generate([ids], NUM_MEDIA_TOKENS, media=[spans(ids, case.media((0, 1)))])[0] == expected
    assert sound_tower_bytes(tmp_path, spec.hearing, torch.float32) == with_tower(case.path, given).hearing.tower_bytes
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for changes, error, text in (
        ({"classify_num": 5000}, UnsupportedModel, "Qwen3-ForcedAligner is not supported."),
        ({"audio_config": None}, CorruptModel, "must be an object with text_config and audio_config"),
    ):
        file.write_text(json.dumps({**config, "thinker_config": {**config["thinker_config"], **changes}}))
        with pytest.raises(error, match=text):
            read_spec(tmp_path)


@pytest.mark.parametrize("num_samples", [400, 16_000, 16_161, 79_840, 480_000])
def test_features_and_rows_of_gemma_are_those_of_its_processor(num_samples: int, folder: Path) -> None:
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

    samples = noise(num_samples / 16_000)[:num_samples]
    made = opened(case_of(folder, "gemma4").spec).process(samples)
    extract: Any = Gemma4AudioFeatureExtractor(feature_size=16)
    expected = extract([samples.astype(np.float32) / 32768], return_tensors="pt")
    mask = expected["input_features_mask"][0]
    features = made.tensors["input_features"]
    torch.testing.assert_close(features, expected["input_features"][:, : features.shape[1]], atol=2e-5, rtol=0)
    assert features.shape[1] == int(mask.sum())
    assert made.rows == int(mask[::2][::2].sum())


def test_a_family_whose_sound_is_not_read_says_so(tmp_path: Path) -> None:
    make_hearing(tmp_path, "voxtral")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "qwen2_audio"}))
    spec = read_spec(tmp_path)
    plan = plan_memory(EngineConfig(device="cpu"), spec, 2**20, Hardware((), "a CPU", 2, 2**34, 2**33))
    assert spec.hearing is None
    assert "Text only: Sound of qwen2_audio is not supported." in plan.notes


DAMAGED = [
    ({"audio_token_id": None}, "audio_token_id = None"),
    ({"audio_config": {"hidden_size": 32}}, "cannot be read"),
    ({"audio_config": 3}, "cannot be read"),
]


@pytest.mark.parametrize(("changes", "text"), DAMAGED)
def test_a_config_that_cannot_be_read_is_refused(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    make_hearing(tmp_path, "voxtral")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CorruptModel, match=text):
        read_spec(tmp_path)


def test_an_extractor_of_other_features_is_refused(tmp_path: Path) -> None:
    make_hearing(tmp_path, "voxtral")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"feature_size": 16, "sampling_rate": 16_000}))
    assert read_spec(tmp_path).hearing is not None
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"feature_size": 16, "sampling_rate": 8000}))
    with pytest.raises(CorruptModel, match="sampling_rate = 8000"):
        read_spec(tmp_path)
