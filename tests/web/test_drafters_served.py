"""A server with a draft model: answers are those without one, and a drafter that does not belong to it is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm.config.lora_modules import LoraModule
from localllm.config.settings import EngineConfig, ServerConfig, Settings
from localllm.engine.speculation import Speculation
from localllm.errors import DoesNotFit, DrafterMismatch, ModelNotFound, UnsupportedOption
from localllm.machine.hardware import Gpu, Hardware
from localllm.models.fit import plan_memory
from localllm.models.fit.checkpoint import count_resident_for
from localllm.models.read_spec import read_spec, weights_bytes
from localllm.runner import host_steps
from localllm.serving.build import build_engine
from localllm.serving.drafters import with_drafter
from tests.adapters import make_tiny_adapter
from tests.eagle_files import write_eagle
from tests.tiny import make_tiny_model
from tests.web.live_server import LiveServer

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "What is a block?"}], "max_tokens": 40}
ASKED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 4},
    {"temperature": 1.2, "seed": 5, "top_p": 0.9, "repetition_penalty": 1.2},
]


def settings_of(model: Path | str, **given: Any) -> Settings:
    sizes = {"max_model_len": 512, "kv_cache_memory_bytes": 8 << 20, "device": "cpu", "profile": "none", **given}
    return Settings(EngineConfig(model=str(model), **sizes), ServerConfig(port=0, ui=False))


def as_many_as_possible(self: Speculation, decoding: list[Any], ready: list[int], limit: int) -> int:
    return limit // len(ready) - 1


def test_a_model_that_drafts_for_itself_is_always_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """S14 over HTTP, with the demo model: the same texts in fewer steps."""
    monkeypatch.setattr(Speculation, "width", as_many_as_possible)
    with LiveServer(build_engine(settings_of("demo", draft="demo", draft_max=3))) as server:
        for asked in ASKED:
            plain, drafted = (server.post(CHAT, {**BODY, **asked, "speculative": s}).json() for s in (False, True))
            assert drafted["choices"][0]["message"] == plain["choices"][0]["message"]
            assert drafted["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
            timings = drafted["timings"]
            assert timings["draft_n"] >= drafted["usage"]["completion_tokens"] // 2
            assert "draft_n" not in plain["timings"]
        stats = server.stats().speculation
        assert stats.num_accepted_tokens > max(30, 0.8 * stats.num_draft_tokens)  # lookup may be wrong


def test_a_smaller_model_changes_no_answer(
    tmp_path: Path, tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Speculation, "width", as_many_as_possible)
    small = make_tiny_model(tmp_path / "small", seed=3, num_hidden_layers=1)
    config = json.dumps({"method": "draft_model", "model": str(small), "num_speculative_tokens": 4})
    with LiveServer(build_engine(settings_of(tiny_llama_path, speculative_config=config))) as server:
        for asked in ASKED:
            body = {**BODY, **asked, "ignore_eos": True}
            plain, drafted = (server.post(CHAT, {**body, "speculative": s}).json() for s in (False, True))
            assert drafted["choices"][0]["message"] == plain["choices"][0]["message"]
            assert drafted["timings"]["draft_n"] > 20


def test_a_drafter_guesses_for_an_adapter(
    tmp_path: Path, tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter reads no adapter: it is right less often, and the answers are those of the adapter."""
    monkeypatch.setattr(Speculation, "width", as_many_as_possible)
    adapter = make_tiny_adapter(tmp_path / "one", tiny_llama_path, seed=3)
    asked = {"draft": str(tiny_llama_path), "lora_modules": (LoraModule("one", str(adapter)),)}
    with LiveServer(build_engine(settings_of(tiny_llama_path, **asked))) as server:
        texts = {}
        for model in ("one", None):
            body = {**BODY, "temperature": 0, "ignore_eos": True, **({"model": model} if model else {})}
            plain, drafted = (server.post(CHAT, {**body, "speculative": s}).json() for s in (False, True))
            assert drafted["choices"][0]["message"] == plain["choices"][0]["message"]
            assert drafted["timings"]["draft_n"] > 10
            texts[model] = drafted["choices"][0]["message"]["content"]
    assert texts["one"] != texts[None]


def test_a_drafter_of_another_vocabulary_is_refused(tmp_path: Path, tiny_llama_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", num_hidden_layers=1)
    tokenizer = json.loads((other / "tokenizer.json").read_text("utf-8"))
    vocab = tokenizer["model"]["vocab"]
    names = {number: name for name, number in vocab.items()}
    vocab[names[70]], vocab[names[71]] = 71, 70
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    with pytest.raises(DrafterMismatch, match="Token 70 is"):
        build_engine(settings_of(tiny_llama_path, draft=str(other)))


def test_a_drafter_that_is_nowhere_is_refused() -> None:
    with pytest.raises(ModelNotFound, match="nowhere"):
        build_engine(settings_of("demo", draft="./nowhere"))


def test_a_drafter_beside_steps_that_round_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_steps, "_lone_step", lambda *_: (None, "without a library"))
    with pytest.raises(UnsupportedOption, match="verified: torch rounds steps of several tokens otherwise"):
        build_engine(settings_of("demo", draft="demo", dtype="bfloat16"))


def test_a_drafter_that_reads_layers_of_other_stages_is_refused(tmp_path: Path, tiny_llama_path: Path) -> None:
    config = json.loads((tiny_llama_path / "config.json").read_text())
    drafter = write_eagle(tmp_path / "eagle", config, taps=[0, 1])
    with pytest.raises(UnsupportedOption, match=r"2 pipeline stages\. It reads the model before layers 0, 1"):
        build_engine(settings_of(tiny_llama_path, draft=str(drafter), pipeline_parallel_size=2))


def test_a_drafter_is_counted_by_fit(tiny_llama_path: Path) -> None:
    config = settings_of(tiny_llama_path, draft=str(tiny_llama_path)).engine
    plain = read_spec(tiny_llama_path)
    drafted = with_drafter(config, tiny_llama_path, plain)
    machine = Hardware((), "CPU", 2, 8 << 30, 8 << 30)
    stored = weights_bytes(tiny_llama_path)
    plans = [
        plan_memory(config, spec, stored, machine, resident_bytes=count_resident_for(config, tiny_llama_path, spec))
        for spec in (plain, drafted)
    ]
    assert plans[1].weights_bytes == 2 * plans[0].weights_bytes
    assert plans[1].kv_bytes // plans[1].num_blocks[0] == 2 * (plans[0].kv_bytes // plans[0].num_blocks[0])
    assert plans[1].kv_bytes <= 8 << 20
    with pytest.raises(DoesNotFit):
        plan_memory(config, drafted, stored, replace(machine, ram_available_bytes=1 << 20))


def test_a_drafter_on_a_gpu_is_counted_by_fit(tiny_llama_path: Path) -> None:
    """Its weights, its keys and values in each block, and the logits of every row."""
    config = replace(settings_of(tiny_llama_path, draft=str(tiny_llama_path)).engine, device="auto")
    plain = read_spec(tiny_llama_path)
    drafted = with_drafter(config, tiny_llama_path, plain)
    machine = Hardware((Gpu(0, "Card", 24 << 30, 22 << 30, (8, 6)),), "CPU", 2, 8 << 30, 8 << 30)
    stored = weights_bytes(tiny_llama_path)
    plans = [
        plan_memory(config, spec, stored, machine, resident_bytes=count_resident_for(config, tiny_llama_path, spec))
        for spec in (plain, drafted)
    ]
    assert plans[1].device == "cuda:0"
    assert plans[1].weights_bytes == 2 * plans[0].weights_bytes
    assert plans[1].kv_bytes // plans[1].num_blocks[0] == 2 * (plans[0].kv_bytes // plans[0].num_blocks[0])
    logits = 2 * min(plans[1].max_num_seqs, plans[1].max_num_batched_tokens) * plain.vocab_size * 4
    assert plans[1].activation_bytes - plans[0].activation_bytes == logits
