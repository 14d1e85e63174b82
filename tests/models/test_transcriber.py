"""Models that transcribe give transformers' features and tokens, alone and in a batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from localllm.config.settings import EngineConfig
from localllm.errors import CorruptModel, UnsupportedModel, UnsupportedOption
from localllm.kernels.cpu import pack
from localllm.kernels.cpu.int8 import CpuInt8Weight, has_int8
from localllm.kernels.cpu.native.library import native
from localllm.kernels.cpu.native_product import product_speeds
from localllm.kernels.launch import INTERPRETED
from localllm.machine.bandwidth import measure
from localllm.machine.hardware import Hardware, Speeds, read_hardware
from localllm.models.decoder.native_program import NativeProgram
from localllm.models.encoders.recipe import NOT_TRANSCRIBING, spec_of_any, task_of
from localllm.models.encoders.source import HeldAs
from localllm.models.encoders.speech_rows import Read, SpeechRows
from localllm.models.encoders.transcriber import Transcriber, load_transcriber, transcriber_sizes
from localllm.models.encoders.whisper import Decoding
from localllm.models.fit.checkpoint import estimate_checkpoint
from localllm.models.fit.estimate import fit_rows
from localllm.models.fit.pooling import WINDOW_FRAMES, plan_transcriber
from localllm.models.fit.speed import SPOKEN_TOKENS, SpeechSpeeds, has_byte_products, predict_speech, speech_work
from localllm.models.formats.registry import quantization_in_words
from localllm.models.weights.parameters import held_bytes
from tests.media.sounds import sounds
from tests.models.harness import NO_GPU
from tests.models.peak_bytes import PeakBytes
from tests.models.speech_models import save_moonshine, save_parakeet, save_whisper

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
        EngineConfig(device="cpu"), spec_of_any(path), transcriber_sizes(path, HeldAs(half_weights=halves)), NO_GPU
    )
    windows = sounds(*[30] * 4)
    with PeakBytes() as meter, torch.inference_mode():
        rows = SpeechRows(model, plan.max_num_batched_tokens // WINDOW_FRAMES, halves=halves)
        for key, window in enumerate(windows):
            rows.join(key, window, model.write(window, Decoding(temperatures=(0.0,)), lambda ids: 1.0))
            rows.step()
    assert meter.peak <= plan.activation_bytes <= 1.3 * meter.peak


def forced(model: Any, window: Any, ids: Sequence[int], *, one_by_one: bool) -> torch.Tensor:
    """Return the logits [n, vocab] behind each of some tokens, read at once or, in the native library, one by one."""

    def writing() -> Any:
        if not one_by_one:
            return (yield Read([ids], 0, range(len(ids))))[0]
        parts = [(yield Read([ids[:1]], 0))[0]]
        for at, token in enumerate(ids[1:], 1):
            parts.append((yield Read([[token]], at))[0])
        return torch.cat(parts)

    rows = SpeechRows(model, 1)
    rows.join(0, window, writing())
    found: list[Any] = []
    while rows.keys:
        found = rows.step()
    [(_, result)] = found
    assert isinstance(result, torch.Tensor), result
    return result


BYTES = pytest.mark.skipif(
    INTERPRETED or not has_int8() or native() is None, reason="this torch on this processor has no such product"
)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("ctc", {"num_mel_bins": 128, "subsampling_conv_channels": 64}),  # as wide on the way in as v3
        ("tdt", {"num_attention_heads": 16, "num_key_value_heads": 16}),
        ("ctc", {"intermediate_size": 16_384, "num_attention_heads": 1, "num_key_value_heads": 1}),
    ],
)
def test_the_peak_of_parakeets_windows_is_predicted(tmp_path: Path, kind: str, sizes: dict[str, Any]) -> None:
    """Where the first convolution, attention, or the feed-forward part takes the most."""
    narrow = {"hidden_size": 256, "intermediate_size": 512, "subsampling_conv_channels": 16, "num_hidden_layers": 1}
    path = save_parakeet(tmp_path, kind, sizes={**narrow, **sizes})
    model = load_transcriber(path, torch.device("cpu"), torch.float32)
    assert isinstance(model, Transcriber)
    plan = plan_transcriber(EngineConfig(device="cpu"), spec_of_any(path), transcriber_sizes(path), NO_GPU)
    assert plan.max_num_batched_tokens == 4 * WINDOW_FRAMES
    windows = sounds(*[30] * 4)
    with PeakBytes() as meter, torch.inference_mode():
        features, mask = model.features(windows)
        model.module.encoder(features, attention_mask=mask)
    assert meter.peak <= plan.activation_bytes <= 1.3 * meter.peak


WRITING = {"whisper": save_whisper, "moonshine": save_moonshine,
           "moonshine_streaming": lambda path: save_moonshine(path, streaming=True)}  # fmt: skip


@BYTES
@pytest.mark.parametrize("kind", WRITING)
def test_eight_bits_change_logits_as_little_as_in_causal_models(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder, the decoder with its cross-attention, and the head. The bound is that of test_cpu_weights.py; of the
    likeliest tokens nine in ten are the same."""
    monkeypatch.setattr(pack, "PACK_MIN_ELEMENTS", 0)
    path = WRITING[kind](tmp_path)
    [window] = sounds(3)
    models: dict[str | None, Any] = {
        name: load_transcriber(path, torch.device("cpu"), torch.float32, HeldAs(quantization=name))
        for name in (None, "int8")
    }
    small, wide = models["int8"], models[None]
    layer = small.decoder.layers[1]
    inner = [part.linear for part in small.encoder.module.modules() if type(part).__name__ == "_DeviceLinear"]
    linears = [layer.attention.qkv, layer.cross.states, layer.cross.query, layer.cross.out, layer.mlp.down, *inner]
    assert {type(each.weight) for each in (*linears, small.decoder.lm_head)} == {CpuInt8Weight}
    assert len(inner) > 8
    assert isinstance(small.decoder.embedding.weight, torch.Tensor)
    sizes = transcriber_sizes(path, HeldAs(quantization="int8"))
    held = held_bytes(small.decoder) + held_bytes(small.encoder.module)
    assert sizes.weights_bytes("cpu", "float32") == held
    states, exact = small.encode(window), wide.encode(window)
    assert float((states - exact).norm() / exact.norm()) < 0.05
    ids = np.random.default_rng(0).integers(20, 400, 30).tolist()
    wanted = forced(wide, window, ids, one_by_one=False)
    for one_by_one in (False, True):
        found = forced(small, window, ids, one_by_one=one_by_one)
        assert float((found - wanted).norm() / wanted.norm()) < 0.05
        assert float((found.argmax(-1) == wanted.argmax(-1)).float().mean()) >= 0.9


@BYTES
def test_steps_of_eight_bits_run_in_the_native_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the width is not a multiple of 64, as Moonshine's: oneDNN pads its matrices."""
    monkeypatch.setattr(pack, "PACK_MIN_ELEMENTS", 0)
    path = save_moonshine(tmp_path)
    model: Any = load_transcriber(path, torch.device("cpu"), torch.float32, HeldAs(quantization="int8"))
    assert model.decoder.spec.hidden_size % 64
    steps = Mock(side_effect=NativeProgram.forward, autospec=True)
    monkeypatch.setattr(NativeProgram, "forward", lambda *call: steps(*call))
    forced(model, sounds(2)[0], [30, 31, 32, 33], one_by_one=True)
    assert steps.call_count == 3


@BYTES
@pytest.mark.parametrize("kind", ["ctc", "tdt"])
def test_eight_bits_of_an_encoder_alone(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "PACK_MIN_ELEMENTS", 0)
    path, cpu, eight = save_parakeet(tmp_path, kind), torch.device("cpu"), HeldAs(quantization="int8")
    small: Any = load_transcriber(path, cpu, torch.float32, eight)
    wide: Any = load_transcriber(path, cpu, torch.float32)
    assert transcriber_sizes(path, eight).weights_bytes("cpu", "float32") == held_bytes(small.module)
    states = [
        each.module.encoder(features, attention_mask=mask).last_hidden_state
        for each in (small, wide) for features, mask in [each.features(sounds(3))]
    ]  # fmt: skip
    assert 0 < float((states[0] - states[1]).norm() / states[1].norm()) < 0.05
    for refused, device in (("int4", "cpu"), ("int8", "cuda:0")):
        with pytest.raises(UnsupportedOption, match=f"{refused} does not apply to Parakeet.*: int8, on a CPU"):
            transcriber_sizes(path, HeldAs(quantization=refused)).weights_bytes(device, "float32")


@BYTES
def test_the_plan_of_eight_bits(tmp_path: Path) -> None:
    path, plans = save_wide(tmp_path, "whisper"), {}
    for name in (None, "int8", "int4"):
        config = EngineConfig(device="cpu", quantization=name)
        plans[name] = plan_transcriber(config, spec_of_any(path), transcriber_sizes(path, HeldAs.asked(config)), NO_GPU)
    assert plans["int8"].weights_bytes < plans["int4"].weights_bytes < plans[None].weights_bytes
    assert [plan.quantization for plan in plans.values()] == [
        "", quantization_in_words(None, "int8", "cpu"), quantization_in_words(None, "int4", "cpu")
    ]  # fmt: skip
    works: Any = [plan.speech for plan in plans.values()]
    assert [work.is_narrow for work in works] == [False, has_byte_products(), False]
    assert works[1].token_bytes < works[0].token_bytes / 2
    with pytest.raises(UnsupportedOption, match="awq"):
        transcriber_sizes(path, HeldAs(quantization="awq")).weights_bytes("cpu", "float32")


SPEECH = {
    "whisper": {"num_mel_bins": 80, "encoder_layers": 6, "decoder_layers": 1},  # as wide as base
    "moonshine": {"hidden_size": 416, "intermediate_size": 1664, "encoder_num_hidden_layers": 8},
    "moonshine_streaming": {"num_key_value_heads": 8},
    "parakeet_ctc": {"encoder_config": {"num_hidden_layers": 4}},
}


@pytest.mark.parametrize("kind", SPEECH)
def test_the_multiplies_of_an_encoder_are_those_that_torch_counts(kind: str) -> None:
    """Without the keys and values of the sound, which the decoder makes."""
    import transformers
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig

    config: Any = AutoConfig.for_model(kind, **SPEECH[kind])
    config._attn_implementation = "eager"
    with torch.device("meta"):
        if kind == "parakeet_ctc":
            config.encoder_config._attn_implementation = "eager"
            model: Any = transformers.ParakeetForCTC(config)
            sound = torch.zeros(1, 3000, config.encoder_config.num_mel_bins)
            call: Any = model
        else:
            model = transformers.AutoModelForSpeechSeq2Seq.from_config(config)
            call = model.get_encoder()
            sound = torch.zeros(1, 80, 3000) if kind == "whisper" else torch.zeros(1, 480_000)
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            call.eval()(sound)
    work = speech_work({**config.to_dict(), "architectures": [type(model).__name__]}, 4, 4)
    assert work is not None
    own = config.hidden_size if hasattr(config, "hidden_size") else 0
    layers = getattr(config, "decoder_num_hidden_layers", getattr(config, "decoder_layers", None))
    layers = config.num_hidden_layers if kind == "moonshine_streaming" else layers or 0
    width = (config.encoder_config if kind == "moonshine_streaming" else config).hidden_size if own else 0
    rate = 16_000 / 384 if kind == "moonshine" else 50
    sources = 30 * rate * layers * 2 * width * own
    assert work.multiplies(30) - sources == pytest.approx(counter.get_total_flops() / 2, rel=0.02)


BASE = {"architectures": ["WhisperForConditionalGeneration"], "d_model": 512, "encoder_layers": 6,
        "encoder_ffn_dim": 2048, "decoder_layers": 6, "decoder_ffn_dim": 2048, "num_mel_bins": 80,
        "vocab_size": 51_865}  # fmt: skip
MEASURED = replace(NO_GPU, speeds=Speeds(ram=3e10, narrow=1.6e11, wide=5.4e10))


def expected(config: dict[str, Any], hardware: Hardware = MEASURED) -> SpeechSpeeds:
    found = predict_speech(speech_work(config, 2, 2), "cpu", hardware)
    assert found is not None
    return found


def test_a_larger_model_and_a_slower_machine_take_longer() -> None:
    base = expected(BASE)
    for name in ("d_model", "encoder_layers", "encoder_ffn_dim", "decoder_layers", "decoder_ffn_dim", "vocab_size"):
        assert expected({**BASE, name: 2 * BASE[name]}).times_real_time < base.times_real_time, name
        assert expected({**BASE, name: 2 * BASE[name]}).dictation_s > base.dictation_s, name
    for name in ("ram", "wide"):
        half = replace(MEASURED, speeds=MEASURED.speeds._replace(**{name: getattr(MEASURED.speeds, name) / 2}))
        assert base.times_real_time / 2 < expected(BASE, half).times_real_time < base.times_real_time
    work = speech_work(BASE, 2, 2)
    assert work is not None
    assert work.multiplies(5) == work.multiplies(30), "Whisper reads 30 s always"
    moonshine = {"architectures": ["MoonshineForConditionalGeneration"], "hidden_size": 416, "vocab_size": 32_768,
                 "intermediate_size": 1664, "encoder_num_hidden_layers": 8, "decoder_num_hidden_layers": 8}  # fmt: skip
    assert expected(moonshine).dictation_s < 30 / expected(moonshine).times_real_time / 5, "and Moonshine does not"
    assert expected(BASE).dictation_s == pytest.approx(1.41, rel=0.5), "docs/lab.md: base, 16 bits, processor time"
    assert expected(moonshine).dictation_s == pytest.approx(0.36, rel=0.5)


def test_nothing_is_said_where_a_speed_or_a_size_is_unknown() -> None:
    work = speech_work(BASE, 2, 2)
    for name in ("ram", "wide"):
        assert predict_speech(work, "cpu", replace(MEASURED, speeds=MEASURED.speeds._replace(**{name: None}))) is None
    for name in BASE:
        assert speech_work({key: value for key, value in BASE.items() if key != name}, 2, 2) is None
    assert speech_work({**BASE, "architectures": ["VoxtralForConditionalGeneration"]}, 2, 2) is None
    assert predict_speech(None, "cpu", MEASURED) is None


@pytest.mark.parametrize("kind", ["whisper", "tdt"])
def test_the_fit_of_a_model_that_transcribes_tells_its_speed(tmp_path: Path, kind: str) -> None:
    path = save_wide(tmp_path, "whisper") if kind == "whisper" else save_parakeet(tmp_path, kind)
    _, [found] = estimate_checkpoint(path, EngineConfig(device="cpu"), MEASURED)
    assert found.speech is not None
    assert dict(fit_rows([found]))["expected speed"] == [found.speech.words()]
    assert " times real time; 5 s of dictation about " in found.speech.words()
    assert "4 tokens a second of speech" in found.speech.why
    assert found.speech.why.endswith("The shares are assumed.")
    _, [unknown] = estimate_checkpoint(path, EngineConfig(device="cpu"), NO_GPU)
    assert unknown.speech is None
    assert "expected speed" not in dict(fit_rows([unknown]))


@pytest.mark.slow
def test_the_speed_of_a_random_whisper_base_is_predicted_within_a_factor_of_two(tmp_path: Path) -> None:
    """By the processor time of one thread, on a machine whose speeds are measured with one thread."""
    import time

    from transformers import AutoConfig, AutoModelForSpeechSeq2Seq

    ids = {"pad_token_id": 3, "bos_token_id": 3, "eos_token_id": 3, "decoder_start_token_id": 4}
    heads = {"encoder_attention_heads": 8, "decoder_attention_heads": 8}
    AutoModelForSpeechSeq2Seq.from_config(AutoConfig.for_model("whisper", **BASE, **heads, **ids)).save_pretrained(
        tmp_path
    )
    tokens = {"decoder_start_token_id": 4, "eos_token_id": 3, "no_timestamps_token_id": 490, "suppress_tokens": [3]}
    (tmp_path / "generation_config.json").write_text(json.dumps(tokens))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        products = [each for _ in range(3) if (each := product_speeds()) is not None]
        if not products:
            pytest.skip("there is no native library for this processor")
        read = max(each.bytes_per_s for _ in range(3) if (each := measure(replace(read_hardware(), cpu_cores=1))))
        machine = replace(NO_GPU, speeds=Speeds(read, None, *map(max, *(each[:2] for each in products))))
        _, [found] = estimate_checkpoint(tmp_path, EngineConfig(device="cpu"), machine)
        assert found.speech is not None
        model: Any = load_transcriber(tmp_path, torch.device("cpu"), torch.float32, HeldAs(half_weights=True))
        rows, taken = SpeechRows(model, 1, halves=True), []
        for _ in range(3):
            begun_s = time.process_time()
            asked = Decoding("en", temperatures=(0.0,), most_tokens=round(5 * SPOKEN_TOKENS))
            window = sounds(5)[0]
            rows.join(0, window, model.write(window, asked, lambda ids: 1.0))
            while rows.keys:
                rows.step()
            taken.append(time.process_time() - begun_s)
        assert found.speech.dictation_s / 2 < min(taken) < 2 * found.speech.dictation_s
    finally:
        torch.set_num_threads(threads)
