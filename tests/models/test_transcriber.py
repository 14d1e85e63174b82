"""Models that transcribe give transformers' features and tokens, alone and in a batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.models.encoders.recipe import spec_of_any, task_of
from localllm.models.encoders.transcriber import Transcriber, count_transcriber_parameters, load_transcriber
from tests.media.sounds import sounds
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
        assert count_transcriber_parameters(folders[kind]) >= sum(each.numel() for each in module.parameters())


def test_other_features_are_refused(tmp_path: Path) -> None:
    path = save_parakeet(tmp_path / "model", "ctc")
    for name, value, error in (("sampling_rate", 8000, UnsupportedModel), ("feature_size", 128, CorruptModel)):
        (path / "preprocessor_config.json").write_text(json.dumps({name: value}))
        with pytest.raises(error):
            load_transcriber(path, torch.device("cpu"), torch.float32)
