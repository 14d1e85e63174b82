"""`localllm fit` of hybrids and of models with windows, at the sizes of published models: layers that keep K and V,
states, and the memory of a request."""

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm import cli
from localllm.kernels.cpu.native.library import native
from localllm.machine import hardware
from tests.hollow import make_hollow_model
from tests.models.harness import GIB, NO_GPU, gpu_machine

KIB, MIB = 1024, 1024**2
LENGTHS = ("4096", "8192", "32768")
WINDOW, FULL = "sliding_attention", "full_attention"
QWEN_27B: dict[str, Any] = {
    "hidden_size": 5120, "intermediate_size": 17_408, "num_hidden_layers": 64, "num_attention_heads": 24,
    "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248_320, "max_position_embeddings": 262_144,
    "layer_types": [*["linear_attention"] * 3, FULL] * 16, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
GEMMA_31B: dict[str, Any] = {
    "hidden_size": 5376, "intermediate_size": 21_504, "num_hidden_layers": 60, "num_attention_heads": 32,
    "num_key_value_heads": 16, "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 4,
    "attention_k_eq_v": True, "layer_types": [*[WINDOW] * 5, FULL] * 10, "sliding_window": 1024,
    "vocab_size": 262_144, "max_position_embeddings": 262_144, "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
}  # fmt: skip
GEMMA_E4B: dict[str, Any] = {
    "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 42, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512, "layer_types": [*[WINDOW] * 5, FULL] * 7,
    "sliding_window": 512, "vocab_size": 262_144, "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 18, "max_position_embeddings": 131_072,
}  # fmt: skip


@pytest.fixture(scope="module")
def hollow(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, dict[str, Any]], Path]:
    parent, made = tmp_path_factory.mktemp("hollow"), dict[str, Path]()

    def make(family: str, sizes: dict[str, Any]) -> Path:
        name = f"{family}-{sizes.get('num_hidden_layers')}"
        if name not in made:
            made[name] = make_hollow_model(parent / name, family, **sizes)
        return made[name]

    return make


@pytest.fixture
def fit(
    hollow: Callable[[str, dict[str, Any]], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> Any:  # fmt: skip
    """`localllm fit` on a machine with a GPU of 80 GiB: its exit code, and its text or the devices of its JSON."""
    large = replace(gpu_machine(79, 80), ram_total_bytes=256 * GIB, ram_available_bytes=200 * GIB)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(hardware, "read_hardware", lambda: large)

    def run(family: str, sizes: dict[str, Any], *flags: str) -> Any:
        code = cli.main(["fit", str(hollow(family, sizes)), *flags])
        out = capsys.readouterr().out
        return code, json.loads(out)["devices"] if "--json" in flags else out

    return run


def test_a_hybrid_of_27b(fit: Any) -> None:
    """48 layers with states and 16 with K and V, each at its own cost: 149.6 MiB a request where convolutions keep
    fp32, as llama.cpp prints for this model and as the native library computes, and 64 KiB a token in 16 bits."""
    code, (card, cpu) = fit("qwen3_5", QWEN_27B, "--json")
    assert (code, card["verdict"]) == (0, "fits with a shorter context")
    assert card["plan"]["weights_bytes"] == pytest.approx(50.1 * GIB, rel=0.002)
    assert card["kv_groups"] == [{"num_layers": 16, "window": None, "token_bytes": 64 * KIB}]
    assert (card["state_layers"], cpu["state_layers"]) == (48, 48)
    in_fp32 = native() is not None
    assert cpu["state_bytes_per_request"] == int((144 + 5.625 / (1 if in_fp32 else 2)) * MIB)  # S 144.00 + R 5.62
    assert card["state_bytes_per_request"] == int((144 + 5.625 / 2) * MIB)
    made = card["plan"]
    assert made["state_bytes"] == made["num_places"] * card["state_bytes_per_request"]
    assert made["kv_bytes"] == made["num_blocks"][0] * made["block_size"] * 64 * KIB
    assert card["request_bytes"] == {n: card["state_bytes_per_request"] + int(n) * 64 * KIB for n in LENGTHS}

    _, told = fit("qwen3_5", QWEN_27B)
    rows = [line.split("  ") for line in told.splitlines()]
    cells = {row[0] or row[1]: [cell.strip() for cell in row[2:] if cell.strip()] for row in rows if len(row) > 2}
    on_card = "64.0 KiB", "147 MiB", "2.1 GiB"
    per_token, state, request = zip(on_card, ("128 KiB", "150 MiB", "4.1 GiB") if in_fp32 else on_card, strict=True)
    assert cells["KV cache, per token"] == cells["16 layers that see all tokens"] == [*per_token]
    assert cells["recurrent state, per request"] == [*state]
    assert cells["of 48 layers, as much as"][0] == "the KV cache of 2,349 tokens"
    assert cells["one request of 32,768 tokens"] == [*request]


def test_the_table_names_what_is_kept_in_ram_and_on_disk(fit: Any) -> None:
    asked = ("--kv-disk-gib", "2", "--kv-offloading-size", "3", "--swap-space", "1")
    code, told = fit("llama", {}, *asked)
    rows = dict(line.split("  ", 1) for line in told.splitlines() if line.startswith("KV blocks"))
    assert code == 0
    assert rows["KV blocks in RAM"].split() == ["up", "to", "3.0", "GiB"] * 2
    assert rows["KV blocks on disk"].split() == ["up", "to", "2.0", "GiB"] * 2
    assert re.search(r"of preempted requests +up to 1.0 GiB", told)


MEASURED = ("llama-4", "deepseek-v3.2", "glm-5", "muse-glimmer", "qwen3.5", "granite-4-h", "nemotron-h", "falcon-h1",
            "lfm2", "gemma3n", "gemma4-e4b", "deepseek-v4", "hy-v4", "minimax-m3", "inkling", "qwen4-exp",
            "glm-5.3-flash")  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MEASURED)
def test_a_process_takes_what_was_predicted(name: str) -> None:
    """Within 3 %: weights, a full cache, states, and the largest steps of a model of about a hundred million
    parameters, drafts included where states are copied."""
    script = Path(__file__).parents[2] / "scripts" / "check_fit"
    ended = subprocess.run([script, name, "--live", "--json"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
    assert "1 of 1 within 3%" in ended.stdout


@pytest.mark.slow
def test_windows_and_two_sizes_of_heads(fit: Any) -> None:
    """Each group counts its own layers with its own heads, and a windowed group no more than its window."""
    code, (card, _) = fit("gemma4", GEMMA_31B, "--json")
    assert (code, card["verdict"]) == (0, "fits with a shorter context")
    windowed, full = 50 * 2 * 16 * 256 * 2, 10 * 2 * 4 * 512 * 2
    assert card["kv_groups"] == [
        {"num_layers": 50, "window": 1024, "token_bytes": windowed},
        {"num_layers": 10, "window": None, "token_bytes": full},
    ]
    assert (card["state_layers"], card["state_bytes_per_request"]) == (0, 0)
    assert card["plan"]["block_size"] == 64
    held = 18 * 64  # a window of 1,024 begins and ends inside blocks
    assert card["request_bytes"] == {n: held * windowed + int(n) * full for n in LENGTHS}

    _, told = fit("gemma4", GEMMA_31B)
    for words in ("50 layers that see 1,024 tokens  800 KiB", "10 layers that see all tokens    80.0 KiB"):
        assert words in told
    assert "one request of 32,768 tokens       3.4 GiB" in told
    assert "per 1,000 tokens" not in told  # the first thousand cost more than the next
    assert "recurrent" not in told


def test_layers_that_read_the_k_and_v_of_others_cost_nothing(fit: Any) -> None:
    _, (card, _) = fit("gemma4", GEMMA_E4B, "--json")
    assert card["kv_groups"] == [
        {"num_layers": 20, "window": 512, "token_bytes": 20 * 2 * 2 * 256 * 2},
        {"num_layers": 4, "window": None, "token_bytes": 4 * 2 * 2 * 512 * 2},
    ]


def test_a_model_with_one_kind_of_layers_needs_no_such_rows(fit: Any) -> None:
    _, told = fit("llama", {})
    assert "per 1,000 tokens" in told
    assert "layers that see" not in told
    assert "one request of" not in told


def test_a_hybrid_that_does_not_fit_names_its_states(fit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "read_hardware", lambda: NO_GPU)
    code, told = fit("qwen3_5", QWEN_27B)
    assert code == 4
    assert "the recurrent states of 2 requests and their checkpoints 1.0 GiB" in told
