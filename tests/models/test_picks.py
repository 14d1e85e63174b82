"""The list of models to begin with: sound, true to the loader's arithmetic, chosen by what fits, and replaceable."""

import os
import subprocess
import sys
import warnings
from dataclasses import replace
from datetime import date
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from localllm.config.resolve import resolve
from localllm.config.settings import EngineConfig, PicksTable, Settings
from localllm.errors import ConfigError
from localllm.kernels.cpu import int8
from localllm.kernels.cpu.native.library import native
from localllm.machine.hardware import Gpu, Hardware, Speeds
from localllm.machine.links import Place
from localllm.models.fit import speed as pick_sizes
from localllm.models.fit.checkpoint import count_resident
from localllm.models.fit.speed import CPU, tokens_per_s
from localllm.models.library.names import parse_name
from localllm.models.library.pick_list import Pick, PickList, cpu_read_bytes, cpu_weight_bytes, read_picks
from localllm.models.library.picks import USEFUL_CONTEXT, FittingPick, fitting_picks
from localllm.models.read_spec import read_spec

GIB = 1024**3


def machine(
    ram_gib: float, cores: int = 8, gpus: tuple[float, ...] = (), gpu_bandwidth: float | None = None
) -> Hardware:
    found = tuple(
        Gpu(index, "GPU", int(size * GIB), int(size * GIB * 0.97), (8, 9), place=Place(bandwidth=gpu_bandwidth))
        for index, size in enumerate(gpus)
    )
    return Hardware(found, "CPU", cores, int(ram_gib * GIB), int(ram_gib * GIB * 0.85))


@pytest.fixture(params=[True, False], ids=["library", "no library"])
def has_library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(pick_sizes, "has_library", lambda: request.param)
    return bool(request.param)


# ---- the list --------------------------------------------------------------------------------------------------------


def test_every_line_of_the_list_is_sound(has_library: bool) -> None:
    picks = read_picks().picks
    assert len({pick.name.split("/")[0] for pick in picks}) >= 4
    assert [pick.parameters for pick in picks] == sorted((pick.parameters for pick in picks), reverse=True)
    for pick in picks:
        assert parse_name(pick.name).is_repository
        assert {"head_dim", "max_position_embeddings", "vocab_size"} <= pick.config.keys()
        assert pick.title
        assert pick.says.endswith(".")
        assert pick.license
        assert 0.5 < pick.bytes / pick.parameters < 2.1
        assert (pick.bytes_per_token < pick.bytes) == (
            pick.spec.mixture is not None or pick.spec.per_layer_input is not None
        )
        in_ram = pick.cpu_bytes(EngineConfig())
        assert 0.95 * pick.bytes <= in_ram + 0.1 * pick.bytes <= 2.2 * pick.bytes
        exact = pick.cpu_bytes(EngineConfig(cpu_weights="exact"))
        assert exact <= 1.08 * in_ram, "a scale for each 32 weights is more than one for each row"


def test_the_suggested_speech_models_are_sound_and_fit_by_their_size() -> None:
    speech = read_picks().speech
    assert [pick.name for pick in speech[:2]] == ["nvidia/parakeet-tdt-0.6b-v3", "openai/whisper-large-v3-turbo"]
    for pick in speech:
        assert parse_name(pick.name).is_repository
        assert pick.says.endswith(".")
        assert pick.license
        assert 1.9 < pick.bytes / pick.parameters < 4.1  # 16 or 32 bits
        assert pick.fits(machine(4 * pick.cpu_bytes / 0.85 / GIB + 0.1))
        assert not pick.fits(machine(4 * pick.cpu_bytes / 0.85 / GIB - 0.1))
        assert pick.speed_on(machine(16)) == "", "the machine was not measured"
        assert pick.speed_on(replace(machine(16), speeds=Speeds(3e10, None, 3e11, 1e11))).startswith("about ")
    assert [pick.title for pick in speech if pick.fits(machine(2))] == ["Whisper base", "Moonshine base"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name = 'a/b'\nbytes = 5", "speech 1 has no parameters"),
        ("name = 'a/b'\nbytes = 5\nparameters = 2\nbytes_per_token = 5", "unknown field 'bytes_per_token'"),
        ("name = 'a/b'\nbytes = 5\nparameters = 2\nconfig = {d_model = 8}", "no speed follows from its config"),
        ("name = 'a'\nbytes = 5\nparameters = 2", "not the name of a repository"),
        ("name = 'a/b'\nbytes = 0\nparameters = 2", "not positive"),
    ],
)
def test_a_wrong_speech_model_is_refused_by_name(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(f"[[speech]]\n{text}\n")
    with pytest.raises(ConfigError, match=words):
        read_picks(PicksTable(tmp_path, file=tmp_path / "mine.toml"))


def test_a_list_of_ones_own_may_suggest_speech_models_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[[speech]]\nname = 'a/b'\nbytes = 5\nparameters = 2\n")
    found = read_picks(PicksTable(tmp_path, file=tmp_path / "mine.toml"))
    assert (found.picks, [(pick.name, pick.title, pick.cpu_bytes) for pick in found.speech]) == ((), [("a/b", "b", 8)])
    assert read_picks(PicksTable(tmp_path)).speech == ()


def test_an_old_list_is_reported() -> None:
    """A warning, since time alone must not fail a build."""
    own = read_picks()
    assert own.written is not None
    year = own.written.year
    made = PickList((), date(2026, 3, 31), "")
    ages = [
        made.age_months(each) for each in (date(2026, 3, 1), date(2026, 4, 30), date(2027, 3, 30), date(2027, 3, 31))
    ]
    assert ages == [0, 0, 11, 12]
    assert [made.is_old(each) for each in (date(2027, 3, 30), date(2027, 3, 31))] == [False, True]
    assert not PickList((), None, "").is_old(date(year + 9, 1, 1))
    if own.is_old(date.today()):
        warnings.warn(f"picks.toml is of {own.written}: suggest newer models", stacklevel=1)


# ---- bytes and speed -------------------------------------------------------------------------------------------------


def write_holes(
    path: Path, *, hidden: int, layers: int, ffn: int, heads: int, kv_heads: int, vocab: int
) -> tuple[int, int]:
    """A Llama in Q4_K_M with a tied head, as llama.cpp's quantiser would lay it out, whose data is a hole in the file.
    Return its bytes and parameters."""
    q4, q6, f32 = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K, GGMLQuantizationType.F32
    dim = hidden // heads
    shapes: dict[str, tuple[tuple[int, ...], GGMLQuantizationType]] = {
        "token_embd.weight": ((vocab, hidden), q6), "output_norm.weight": ((hidden,), f32),
    }  # fmt: skip
    for layer in range(layers):
        more = q6 if layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2 else q4
        shapes |= {
            f"blk.{layer}.attn_norm.weight": ((hidden,), f32),
            f"blk.{layer}.ffn_norm.weight": ((hidden,), f32),
            f"blk.{layer}.attn_q.weight": ((heads * dim, hidden), q4),
            f"blk.{layer}.attn_k.weight": ((kv_heads * dim, hidden), q4),
            f"blk.{layer}.attn_v.weight": ((kv_heads * dim, hidden), more),
            f"blk.{layer}.attn_output.weight": ((hidden, heads * dim), q4),
            f"blk.{layer}.ffn_gate.weight": ((ffn, hidden), q4),
            f"blk.{layer}.ffn_up.weight": ((ffn, hidden), q4),
            f"blk.{layer}.ffn_down.weight": ((hidden, ffn), more),
        }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)
    writer.add_token_list([f"t{index}" for index in range(8)])
    total = parameters = 0
    for name, (shape, kind) in shapes.items():
        count = 1
        for each in shape:
            count *= each
        block, size = GGML_QUANT_SIZES[kind]
        stored = (*shape[:-1], shape[-1] // block * size) if kind is not f32 else shape
        writer.add_tensor_info(
            name, stored if kind is not f32 else shape, np.dtype("uint8" if kind is not f32 else "float32"),
            count // block * size, raw_dtype=None if kind is f32 else kind,
        )  # fmt: skip
        total, parameters = total + -(-count // block * size // 32) * 32, parameters + count
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, path.stat().st_size + 32 + total)
    return total, parameters


@pytest.mark.skipif(not int8.has_int8(), reason="this processor has no product of 8 bits")
@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden": 1024, "layers": 28, "ffn": 3072, "heads": 16, "kv_heads": 8, "vocab": 32_000},
        {"hidden": 2048, "layers": 16, "ffn": 8192, "heads": 32, "kv_heads": 8, "vocab": 128_256},
    ],
)
def test_the_bytes_on_a_cpu_are_those_of_the_loader(
    sizes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, parameters = write_holes(tmp_path / "m-Q4_K_M.gguf", **sizes)
    spec = read_spec(tmp_path / "m-Q4_K_M.gguf")
    held = count_resident(tmp_path / "m-Q4_K_M.gguf", spec)("cpu", "float32", 8192, None)
    config = EngineConfig()
    monkeypatch.setattr(pick_sizes, "has_library", lambda: native() is not None)
    found = cpu_weight_bytes("o/m:Q4_K_M", stored, parameters, spec, config, "float32")
    assert found == pytest.approx(held, rel=0.06)
    if native() is not None:  # the same without the library needs more, and more than a formula of 4 bits says
        monkeypatch.setattr(pick_sizes, "has_library", lambda: False)
        assert cpu_weight_bytes("o/m:Q4_K_M", stored, parameters, spec, config, "float32") > 1.2 * found


@pytest.mark.parametrize(
    ("name", "stored", "tokens"),
    [
        ("o/m:Q8_0", 525_000_000, 40.7),
        ("o/m:Q4_0", 349_000_000, 51.9),
        ("o/m:Q4_K_M", 395_000_000, 42.1),
        ("o/m", 988_000_000, 22.6),
    ],
)
def test_the_range_contains_what_was_measured(
    name: str, stored: int, tokens: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/lab.md: Qwen2.5-0.5B's shape, 494 M parameters, on a machine where a plain sum reads 33 GB/s."""
    monkeypatch.setattr(pick_sizes, "has_library", lambda: True)
    read = cpu_read_bytes(name, stored, 494_000_000, stored, EngineConfig(), "float32")
    for bandwidth in (33e9, 1.2 * 33e9):
        least, most = tokens_per_s(read, bandwidth, CPU, is_mixture=False)
        assert least < tokens < most
        assert most < 3 * least


@pytest.mark.parametrize(
    ("mode", "has_bytes", "quant", "held"),
    [
        ("fast", True, "Q5_K_M", 1000),
        ("fast", True, "Q6_K", 1000),
        ("fast", False, "Q6_K", 820),
        ("small", True, "Q6_K", 820),
        ("exact", True, "Q6_K", 820),
        ("fast", True, "Q3_K_M", 820),
        ("small", True, "Q8_0", 1000),
    ],
)
def test_q5_and_q6_get_bytes_where_these_are_multiplied_fast(
    mode: str, has_bytes: bool, quant: str, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pick_sizes, "has_library", lambda: True)
    monkeypatch.setattr(pick_sizes, "has_byte_products", lambda: has_bytes)
    config = EngineConfig(cpu_weights=mode)
    assert cpu_read_bytes(f"o/m:{quant}", 820, 1000, 820, config, "float32") == held


def test_more_bandwidth_is_faster_and_experts_are_less_sure() -> None:
    slow, fast = (tokens_per_s(2e9, bandwidth, CPU, is_mixture=False) for bandwidth in (20e9, 40e9))
    assert slow[0] < fast[0] < 2 * slow[0]
    assert slow[1] < fast[1] <= 2 * slow[1]
    mixed = tokens_per_s(2e9, 20e9, CPU, is_mixture=True)
    assert mixed[0] < slow[0]
    assert mixed[1] == slow[1]


# ---- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hardware", "bandwidth", "first", "second"),
    [
        (machine(64, gpus=(32,)), None, "Qwen3.6 35B A3B", "Nemotron 3.5 Lightning 30B A3B"),
        (machine(32, gpus=(24,)), None, "Nemotron 3.5 Lightning 30B A3B", "GLM-4.7 Flash"),
        (machine(32, gpus=(16,)), None, "gpt-oss 20B", "Qwen3.5 9B"),
        (machine(16, gpus=(8,)), None, "Gemma 4 E4B", "Granite 4 H Tiny"),
        (machine(64), 80e9, "Nemotron 3.5 Lightning 30B A3B", "Qwen3.6 35B A3B"),
        (machine(16), 40e9, "Granite 4 H Tiny", "gpt-oss 20B"),
        (machine(23.5, cores=2), 20.5e9, "Qwen3.5 0.8B", "Granite 4 H Tiny"),
        (machine(23.5, cores=2), 30e9, "Granite 4 H Tiny", "Nemotron 3.5 Lightning 30B A3B"),
        (machine(16), None, "Qwen3.5 9B", "gpt-oss 20B"),
        (machine(8, cores=4), 25e9, "Qwen3.5 0.8B", "Granite 4 H Tiny"),
        (machine(4, cores=2), None, "LFM2.5 1.2B", "Qwen3.5 0.8B"),
    ],
)
def test_the_best_that_is_quick_and_leaves_half_comes_first_and_a_larger_one_second(
    hardware: Hardware, bandwidth: float | None, first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pick_sizes, "has_library", lambda: True)
    monkeypatch.setattr(pick_sizes, "has_byte_products", lambda: False)
    found = fitting_picks(hardware, Settings(), bandwidth)
    assert [each.pick.title for each in found[:2]] == [first, second]
    assert len(found) == 3
    for each in found:
        assert each.max_model_len >= USEFUL_CONTEXT
        assert each.plan.total_bytes <= each.plan.free_bytes
        assert (each.tokens_per_s is None) == (bandwidth is None)


@given(
    ram=st.floats(2, 300), cores=st.integers(1, 64), bandwidth=st.none() | st.floats(2e9, 400e9),
    gpu=st.none() | st.tuples(st.integers(4, 80), st.none() | st.floats(100e9, 3e12)),
)  # fmt: skip
@examples(max_examples=12, deadline=None)
def test_no_better_model_than_the_first_is_quick_and_leaves_half(
    ram: float, cores: int, bandwidth: float | None, gpu: tuple[int, float | None] | None
) -> None:
    gpus, gpu_bandwidth = ((float(gpu[0]),), gpu[1]) if gpu is not None else ((), None)
    hardware = machine(ram, cores, gpus, gpu_bandwidth)
    picks = read_picks().picks
    found = fitting_picks(hardware, Settings(), bandwidth, count=len(picks))
    places = [picks.index(each.pick) for each in found]
    assert len({*places}) == len(places)
    if not found:
        return

    def is_able(each: FittingPick) -> bool:
        quick = each.tokens_per_s is None or each.tokens_per_s[0] >= 10
        if each.plan.device == "cpu" and hardware.gpus:
            return False
        if each.plan.far is not None:
            return quick and 2 * each.plan.far.ram_bytes <= hardware.ram_total_bytes
        used = each.needs[0].total_bytes if each.needs else each.plan.weights_bytes
        return quick and (each.plan.device != "cpu" or used <= hardware.ram_total_bytes / 2)

    able = [place for place, each in zip(places, found, strict=True) if is_able(each)]
    if able:
        assert places[0] == min(able)
    else:
        assert found[0].least_speed == max(each.least_speed for each in found)
    larger = [place for place in places if place < places[0]]
    assert not larger or places[1] == min(larger)
    assert fitting_picks(hardware, Settings(), bandwidth, 1) == found[:1], "each place names the same"


def test_a_machine_without_room_gets_none() -> None:
    assert fitting_picks(machine(1, cores=1), Settings(), 10e9) == []


def test_a_gpus_bandwidth_decides_its_speed() -> None:
    [slow] = fitting_picks(machine(32, gpus=(24,), gpu_bandwidth=400e9), Settings(), 10e9, count=1)
    [fast] = fitting_picks(machine(32, gpus=(24,), gpu_bandwidth=900e9), Settings(), 10e9, count=1)
    assert slow.name == fast.name
    assert slow.tokens_per_s is not None
    assert fast.tokens_per_s is not None
    assert slow.tokens_per_s < fast.tokens_per_s


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        ((24,), ""),
        ((48, 48), "Runs on GPU 0 (GPU); GPU 1 (GPU) stays free."),
        ((12, 12), "Runs on GPU 0 (GPU) and GPU 1 (GPU)."),
        ((24, 24, 24), "Runs on GPU 0 (GPU) and GPU 1 (GPU); GPU 2 (GPU) stays free."),
        ((48, 48, 48), "Runs on GPU 0 (GPU); GPU 1 (GPU) and GPU 2 (GPU) stay free."),
    ],
)
def test_the_second_gpu_is_named(gpus: tuple[float, ...], words: str) -> None:
    first = fitting_picks(machine(64, gpus=gpus, gpu_bandwidth=900e9), Settings(), None)[0]
    assert first.gpus == words
    assert (first.tokens_per_s is None) == bool(first.plan.ranks)  # nobody has measured two GPUs


@pytest.mark.parametrize(
    ("speed", "words"),
    [(None, ""), ((11.4, 23.6), "11 to 24 tokens/s"), ((5.849, 5.91), "5.8 to 5.9 tokens/s"),
     ((1234.0, 2345.0), "1,200 to 2,300 tokens/s"), ((7.0, 7.01), "about 7 tokens/s")],
)  # fmt: skip
def test_a_speed_in_words_has_two_digits(speed: tuple[float, float] | None, words: str) -> None:
    [found] = fitting_picks(machine(64), Settings(), 40e9, count=1)
    assert FittingPick(found.pick, found.plan, speed).speed == words


def test_neither_torch_nor_numpy_is_imported() -> None:
    """The page is served, and `localllm doctor` answers, before torch is imported or without it."""
    code = (
        "import sys\n"
        "from localllm.config.settings import Settings\n"
        "from localllm.machine.bandwidth import measure\n"
        "from localllm.machine.hardware import Hardware\n"
        "from localllm.models.library.picks import fitting_picks\n"
        "hardware = Hardware((), 'CPU', 2, 16 << 30, 12 << 30)\n"
        "measure(hardware)\n"
        "assert fitting_picks(hardware, Settings(), 1e11)\n"
        "print(sorted({'torch', 'numpy', 'transformers', 'triton'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


# ---- a list of one's own ---------------------------------------------------------------------------------------------

ENTRY = """
name = "my/model-GGUF:Q4_K_M"
bytes = 600_000_000
parameters = 1_000_000_000
config = { architectures = ["LlamaForCausalLM"], head_dim = 64, hidden_size = 1024, intermediate_size = 3072, \
num_hidden_layers = 16, num_attention_heads = 16, num_key_value_heads = 4, vocab_size = 32000, \
max_position_embeddings = 32768 }
"""


def settings_of(tmp_path: Path, text: str) -> Settings:
    (tmp_path / "config.toml").write_text(text)
    return resolve({}, {}, file=tmp_path / "config.toml")


@pytest.mark.parametrize("kind", ["entries", "file"])
def test_the_config_file_replaces_the_list(kind: str, tmp_path: Path) -> None:
    if kind == "file":
        (tmp_path / "mine.toml").write_text(f"date = 2020-01-31\n[[pick]]{ENTRY}")
        settings = settings_of(tmp_path, 'port = 9000\n[picks]\nfile = "mine.toml"\n')
    else:
        settings = settings_of(tmp_path, f"port = 9000\n[[picks.pick]]{ENTRY}")
    assert settings.server.port == 9000
    [found] = fitting_picks(machine(16), settings, 40e9)
    assert found.name == "my/model-GGUF:Q4_K_M"
    assert found.pick == Pick(
        found.name, 600_000_000, 1_000_000_000, found.pick.config, title="model", bytes_per_token=600_000_000
    )
    assert read_picks(settings.picks).is_old(date(2026, 1, 1)) == (kind == "file")


def test_an_empty_list_suggests_nothing(tmp_path: Path) -> None:
    assert fitting_picks(machine(16), settings_of(tmp_path, "[picks]\npick = []\n"), 40e9) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("picks = 3", "picks must be a table"),
        ("[picks]", "either file or pick"),
        ('[picks]\nfile = "a"\npick = []', "either file or pick"),
        ("[picks]\nfile = 3", "3 is not a path"),
        ("[picks]\nfiles = 3", "Unknown: 'files'"),
        ("[picks]\npick = 3", "not a list"),
        ('[picks]\nfile = "absent.toml"', "absent.toml"),
        ("[picks]\npick = [3]", "pick 1 is not a table"),
        (f"[[picks.pick]]{ENTRY}\n[[picks.pick]]\nname = 'a/b'", "pick 2 has no bytes"),
        (f"[[picks.pick]]{ENTRY}\nbites = 3", "pick 1: unknown field 'bites'"),
        (f"[[picks.pick]]{ENTRY.replace('600_000_000', '-1')}", "bytes = -1 is not positive"),
        (f"[[picks.pick]]{ENTRY.replace('600_000_000', 'true')}", "bytes = True is not a whole number"),
        (f"[[picks.pick]]{ENTRY}\nbytes_per_token = 900_000_000", "more than bytes"),
        (f"[[picks.pick]]{ENTRY.replace('my/model', '/home/model')}", "not the name of a repository"),
        (f"[[picks.pick]]{ENTRY.replace('Llama', 'Lama')}", "no model that localllm runs"),
    ],
)
def test_a_wrong_list_is_refused_by_name(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        fitting_picks(machine(16), settings_of(tmp_path, text), 40e9)
    assert words in f"{caught.value.what} {caught.value.why}"


@pytest.mark.parametrize(
    ("text", "words"),
    [("date = 'x'", "is not a date"), ("pick = 3", "not a list of tables"), ("dates = 3", "Unknown: 'dates'"),
     ("[[pick", "Cannot read")],
)  # fmt: skip
def test_a_wrong_file_is_refused_by_name(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_picks(settings_of(tmp_path, '[picks]\nfile = "mine.toml"').picks)
    assert words in f"{caught.value.what} {caught.value.why}"
