"""Models that transcribe give transformers' features and tokens, alone and in a batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from localllm.config.settings import EngineConfig
from localllm.errors import CorruptModel, UnsupportedModel
from localllm.models.encoders.recipe import NOT_TRANSCRIBING, spec_of_any, task_of
from localllm.models.encoders.speech_rows import SpeechRows
from localllm.models.encoders.transcriber import Transcriber, load_transcriber, transcriber_sizes
from localllm.models.encoders.whisper import Decoding
from localllm.models.fit.pooling import WINDOW_FRAMES, plan_transcriber
from tests.media.sounds import sounds
from tests.models.harness import NO_GPU
from tests.models.peak_bytes import PeakBytes
from tests.models.speech_models import save_parakeet

KINDS = ("ctc", "tdt")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: save_parakeet(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


def loaded(folders: dict[str, Path], kind: str) -> Transcriber:
    return load_transcriber(folders[kind], torch.device("cpu"), torch.float32)


def extracted(windows: list[np.ndarray]) -> Any:
    from transformers import ParakeetFeatureExtractor

    floats = [each.astype(np.float32) / 32768 for each in windows]
    return ParakeetFeatureExtractor(feature_size=80)(floats, sampling_rate=16_000, return_tensors="pt")


def test_features_are_transformers_s(folders: dict[str, Path]) -> None:
    windows = sounds(3, 0.51, 7.003)
    features, mask = loaded(folders, "ctc").features(windows)
    expected = extracted(windows)
    assert torch.equal(mask, expected["attention_mask"])
    assert (features - expected["input_features"]).abs().max() < 1e-5


def reference(path: Path, kind: str, window: np.ndarray) -> list[int]:
    """Return the tokens of transformers' `generate`, without blanks."""
    import transformers

    model = getattr(transformers, {"ctc": "ParakeetForCTC", "tdt": "ParakeetForTDT"}[kind])
    module = model.from_pretrained(path, attn_implementation="eager").eval()
    inputs = extracted([window])
    made = module.generate(inputs["input_features"], attention_mask=inputs["attention_mask"])
    ids = (made if kind == "ctc" else made.sequences)[0].tolist()
    blank = module.config.pad_token_id if kind == "ctc" else module.config.blank_token_id
    if kind == "ctc":
        ids = [token for before, token in zip([None, *ids], ids, strict=False) if token != before]
    return [token for token in ids if token != blank]


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default `max_length`")  # of transformers' `generate`
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_generate_and_the_same_in_a_batch(folders: dict[str, Path], kind: str) -> None:
    model, windows = loaded(folders, kind), sounds(2.5, 1.2, 4)
    alone = [model.transcribe([each])[0] for each in windows]
    assert [[each.token_id for each in row] for row in alone] == [
        reference(folders[kind], kind, each) for each in windows
    ]
    assert len({each.token_id for row in alone for each in row}) > 3
    together = model.transcribe(windows)
    assert [[each[:3] for each in row] for row in together] == [[each[:3] for each in row] for row in alone]
    assert np.allclose(
        [t.probability for r in together for t in r], [t.probability for r in alone for t in r], atol=1e-5
    )
    for row, window in zip(alone, windows, strict=True):
        assert all(0 < each.probability <= 1 and each.start_s < each.stop_s for each in row)
        assert [each.start_s for each in row] == sorted(each.start_s for each in row)
        assert not row or row[-1].stop_s <= len(window) / 16_000 + 2 * model.frame_s


def test_a_window_of_a_few_samples_is_padded(folders: dict[str, Path]) -> None:
    assert isinstance(loaded(folders, "tdt").transcribe([np.zeros(16, np.int16)])[0], list)


def test_task_spec_and_parameters_are_read_from_the_files(folders: dict[str, Path]) -> None:
    for kind in KINDS:
        spec = spec_of_any(folders[kind])
        assert (task_of(folders[kind]), spec.task, spec.num_layers, spec.hidden_size) == ("transcribe",) * 2 + (2, 32)
        module = loaded(folders, kind).module
        predicted = transcriber_sizes(folders[kind]).weights_bytes("cpu", "float32")
        assert predicted >= 4 * sum(each.numel() for each in module.parameters())


def test_other_features_are_refused(tmp_path: Path) -> None:
    path = save_parakeet(tmp_path / "model", "ctc")
    for name, value, error in (("sampling_rate", 8000, UnsupportedModel), ("feature_size", 128, CorruptModel)):
        (path / "preprocessor_config.json").write_text(json.dumps({name: value}))
        with pytest.raises(error):
            load_transcriber(path, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("name", NOT_TRANSCRIBING)
def test_families_without_support_are_refused_by_name(tmp_path: Path, name: str) -> None:
    from transformers import AutoConfig

    kind = {"CanaryForConditionalGeneration": "canary", "CohereAsrForConditionalGeneration": "cohere_asr"}[name]
    config = AutoConfig.for_model(kind)
    config.architectures = [name]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=f"{NOT_TRANSCRIBING[name]} is not supported"):
        spec_of_any(tmp_path)


def save_wide(path: Path, kind: str) -> Path:
    """Save a random model whose layers are few but as wide as in a small published one."""
    from transformers import AutoConfig, AutoModelForSpeechSeq2Seq

    sizes: dict[str, Any] = {"vocab_size": 2000}
    if kind == "whisper":
        ids = {"pad_token_id": 3, "bos_token_id": 3, "eos_token_id": 3, "decoder_start_token_id": 4}
        sizes |= {"d_model": 384, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 6,
                  "decoder_attention_heads": 6, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536, **ids}  # fmt: skip
    elif kind == "moonshine":
        sizes |= {"encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2}
    else:
        sizes |= {"num_key_value_heads": 8, "num_hidden_layers": 2}
    config = AutoConfig.for_model(kind, **sizes)
    model = AutoModelForSpeechSeq2Seq.from_config(config)
    model.save_pretrained(path)
    if kind == "whisper":
        tokens = {"decoder_start_token_id": 4, "eos_token_id": 3, "no_timestamps_token_id": 490}
        (path / "generation_config.json").write_text(json.dumps(tokens))
    return path


@pytest.mark.parametrize(
    ("kind", "halves"),
    [("whisper", True), ("moonshine", False), *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("whisper", False), ("moonshine", True), ("moonshine_streaming", False))
    )],
)  # fmt: skip
def test_the_peak_of_windows_is_predicted(tmp_path: Path, kind: str, halves: bool) -> None:
    path = save_wide(tmp_path, kind)
    model: Any = load_transcriber(path, torch.device("cpu"), torch.float32)
    plan = plan_transcriber(
        EngineConfig(device="cpu"), spec_of_any(path), transcriber_sizes(path, half_weights=halves), NO_GPU
    )
    windows = sounds(*[30] * 4)
    with PeakBytes() as meter, torch.inference_mode():
        rows = SpeechRows(model, plan.max_num_batched_tokens // WINDOW_FRAMES, halves=halves)
        for key, window in enumerate(windows):
            rows.join(key, window, model.write(window, Decoding(temperatures=(0.0,)), lambda ids: 1.0))
            rows.step()
    assert meter.peak <= plan.activation_bytes <= 1.3 * meter.peak
