"""Profiles: used where everything is as it was, never over what somebody said, and with one line about it."""

import json
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from localllm import cli
from localllm.config.resolve import resolve
from localllm.config.settings import EngineConfig, ModelTable, Settings
from localllm.errors import ConfigError
from localllm.llm import LLM
from localllm.machine.hardware import Gpu, Hardware
from localllm.serving import profiles
from localllm.serving.build import build_engine
from localllm.serving.phases import Phase
from localllm.serving.profiles import (
    Profile,
    ProfileKey,
    choose,
    key_of,
    model_fingerprint,
    now,
    profiles_folder,
    read_profiles,
    save_profile,
    with_profile,
)
from localllm.serving.reopen import put_to_sleep, wake_up

KEY = ProfileKey("GPU", "580.65", "2.9.0", "3.5.0", "0.1", "abc", "dtype=auto")
FOUND = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
PROFILE = Profile(
    "chat", "chat", FOUND, KEY, "2026-11-21T10:00:00Z", applied=True, context=256, score=12.5, unit="x/min"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return profiles_folder()


def test_what_is_written_is_read(folder: Path) -> None:
    odd = replace(PROFILE, settings={"kv_cache_dtype": "int8", "enforce_eager": True, "gpu_memory_utilization": 0.95})
    odd = replace(odd, name="my-own", load={"streams": 2})
    save_profile(PROFILE, "org/model")
    path = save_profile(replace(odd, applied=False), "org/model")
    assert path.parent == folder
    assert read_profiles() == [PROFILE, replace(odd, applied=False)]


def test_one_applied_profile_takes_the_place_of_another() -> None:
    save_profile(PROFILE, "m")
    save_profile(replace(PROFILE, name="throughput", created="2026-11-22T10:00:00Z"), "m")
    assert [(each.name, each.applied) for each in read_profiles()] == [("throughput", True), ("chat", False)]


@pytest.mark.parametrize("name", ["", "none", "auto", "../up", "a b", "x" * 65])
def test_odd_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="not a valid name for a profile"):
        save_profile(replace(PROFILE, name=name), "m")


@pytest.mark.parametrize(
    "damage",
    ["", "schema = 1", "not toml [", "schema = 2", 'schema = 1\nname = "x"\n[settings]\nmax_num_seqs = -1', "\x00"],
)
def test_a_damaged_file_is_passed_over(damage: str, folder: Path) -> None:
    path = save_profile(PROFILE, "m")
    (folder / "other.toml").write_text(damage)
    assert read_profiles() == [PROFILE]
    path.write_text(path.read_text().replace("max_num_seqs = 8", "max_num_sequences = 8"))
    assert read_profiles() == []
    path.write_text(path.read_text().replace("max_num_sequences = 8", 'model = "elsewhere"'))
    assert read_profiles() == []


@pytest.mark.parametrize("field", [f.name for f in fields(ProfileKey) if f.name != "model"])
def test_a_difference_in_anything_is_said_and_the_profile_left_alone(field: str) -> None:
    other = replace(KEY, **{field: "another"})
    choice = choose("auto", other, [PROFILE])
    assert choice is not None
    assert choice.profile is None
    assert choice.why.startswith("chat, tuned 2026-11-21, is not used: ")


def test_another_models_profile_is_no_news() -> None:
    assert choose("auto", replace(KEY, model="other"), [PROFILE]) is None
    assert choose("none", KEY, [PROFILE]) is None
    assert choose("auto", KEY, [replace(PROFILE, applied=False)]) is None


def test_a_name_takes_also_what_is_not_applied_and_must_exist() -> None:
    quiet = replace(PROFILE, applied=False)
    choice = choose("chat", KEY, [quiet])
    assert choice is not None
    assert choice.profile == quiet
    with pytest.raises(ConfigError, match="no profile 'agents'") as caught:
        choose("agents", KEY, [quiet])
    assert "chat" in caught.value.why


def test_what_somebody_said_goes_first() -> None:
    asked = resolve({"max_num_seqs": 64}, {}, None)  # the default's own value, but said
    assert with_profile(asked, PROFILE).engine.max_num_seqs == 64
    assert with_profile(asked, PROFILE).engine.max_num_batched_tokens == 64
    assert with_profile(asked, PROFILE).source("max_num_batched_tokens") == "profile"
    assert with_profile(asked, PROFILE).source("max_num_seqs") == "flag"
    table = replace(Settings(), models={"demo": ModelTable("demo", {"max_num_seqs": 64})})
    assert with_profile(table, PROFILE).engine.max_num_seqs == 64


def test_the_key_names_the_device_that_is_used(tiny_llama_path: Path) -> None:
    gpu = Gpu(0, "NVIDIA Test", 1 << 34, 1 << 33, (9, 0), "580.65")
    machine = Hardware((gpu,), "Some CPU", 8, 1 << 34, 1 << 33)
    config = EngineConfig(model=str(tiny_llama_path))
    on_gpu, on_cpu = (key_of(tiny_llama_path, config, machine, device) for device in ("cuda:0", "cpu"))
    assert (on_gpu.device, on_gpu.driver) == ("NVIDIA Test", "580.65")
    assert (on_cpu.device, on_cpu.driver) == ("Some CPU, 8 cores", "")
    quantized = key_of(tiny_llama_path, replace(config, quantization="int8"), machine, "cpu")
    assert on_cpu.differs_from(quantized) == "the stored form of the weights has changed"


def test_a_copy_is_the_same_model_and_a_changed_one_is_not(tiny_llama_path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_llama_path, copy)
    assert model_fingerprint(copy) == model_fingerprint(tiny_llama_path)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rope_theta": 12345.0}))
    assert model_fingerprint(copy) != model_fingerprint(tiny_llama_path)


# ---- starts ----------------------------------------------------------------------------------------------------------


def start(path: Path, **engine: Any) -> tuple[Any, list[str]]:
    """The plan and settings of a start, and what it said of profiles."""
    said: list[str] = []

    def hear(phase: Phase) -> None:
        if phase.name == "profile" and phase.done:
            said.append(phase.detail)

    served = build_engine(Settings(EngineConfig(model=str(path), device="cpu", **engine)), hear)
    served.close()
    return served, said


@pytest.fixture
def tuned(tiny_llama_path: Path) -> Profile:
    """An applied profile of the tiny model, made on this machine."""
    from localllm.machine.hardware import read_hardware

    config = EngineConfig(model=str(tiny_llama_path), device="cpu")
    key = key_of(tiny_llama_path, config, read_hardware(), "cpu")
    made = replace(PROFILE, key=key, created=now())
    save_profile(made, "tiny")
    return made


def test_a_start_uses_an_applied_profile_and_says_so(tiny_llama_path: Path, tuned: Profile) -> None:
    served, said = start(tiny_llama_path)
    assert (served.plan.max_num_seqs, served.plan.max_num_batched_tokens) == (8, 64)
    assert said == [f"plan: chat, tuned {tuned.date}"]
    assert served.tuned == FOUND


def test_none_leaves_it_alone_and_a_script_never_asks(tiny_llama_path: Path, tuned: Profile) -> None:
    served, said = start(tiny_llama_path, profile="none")
    assert (served.plan.max_num_seqs, said) == (64, [])
    with LLM(str(tiny_llama_path), device="cpu") as llm:
        assert llm._engine.plan.max_num_seqs == 64


def test_another_version_is_told(tiny_llama_path: Path, tuned: Profile, folder: Path) -> None:
    for path in folder.glob("*.toml"):
        path.write_text(path.read_text().replace(f'torch = "{tuned.key.torch}"', 'torch = "1.0"'))
    served, said = start(tiny_llama_path)
    assert served.plan.max_num_seqs == 64
    assert said == [f"chat, tuned {tuned.date}, is not used: torch was 1.0 and is {tuned.key.torch}"]


def test_where_less_is_free_sizes_are_planned_anew(tiny_llama_path: Path, tuned: Profile) -> None:
    save_profile(replace(tuned, settings={**FOUND, "kv_cache_memory_bytes": 1 << 50}, context=512), "tiny")
    served, said = start(tiny_llama_path)
    assert served.plan.max_num_seqs == 8
    assert said[0].startswith(f"plan: chat, tuned {tuned.date} · sizes are planned again")


def test_where_nothing_of_it_fits_the_defaults_start(
    tiny_llama_path: Path, tuned: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_profile(replace(tuned, settings={"kv_cache_memory_bytes": 1 << 50}), "tiny")
    monkeypatch.setattr(profiles, "SIZES", ())
    served, said = start(tiny_llama_path)
    assert served.tuned == {}
    assert said == [f"chat, tuned {tuned.date}, is not used: too little memory is free"]


def test_a_model_wakes_with_what_it_was_tuned_to(tiny_llama_path: Path, tuned: Profile) -> None:
    settings = Settings(EngineConfig(model=str(tiny_llama_path), device="cpu"))
    awake = wake_up(put_to_sleep(build_engine(settings)), settings)
    assert awake.plan.max_num_seqs == 8
    awake.close()


# ---- the command -----------------------------------------------------------------------------------------------------


def tune(path: Path, *words: str) -> int:
    quick = ["--trial-seconds", "0.1", "--soak-seconds", "0.2", "--max-num-seqs", "4", "--kv-cache-dtype", "auto"]
    flags = ["--device", "cpu", "--kv-cache-memory-bytes", "1MiB", "--max-model-len", "256"]
    return cli.main(["tune", str(path), *quick, *flags, *words])


def test_tune_keeps_what_the_next_start_uses(tiny_llama_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune(tiny_llama_path, "--apply", "--json") == 0
    out = capsys.readouterr()
    report = json.loads(out.out)
    assert report["pick"]["settings"].keys() == {"max_num_batched_tokens"}
    assert report["soak"]["failures"] == 0
    assert Path(report["profile"]).exists()
    assert "best so far" in out.err
    assert report["flags"].startswith(f"localllm up {tiny_llama_path}")
    _, said = start(tiny_llama_path)
    assert said[0].startswith("plan: chat, tuned ")
    assert cli.main(["tune", str(tiny_llama_path), "--check", "--device", "cpu"]) in (0, 1)
    assert "answers/min then" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--goal", "fun"], "Unknown goal 'fun'"),
        (["--people", "3"], "--people is not valid here"),
        (["--goal", "share", "--people", "0"], "--people is not valid here"),
        (["--max-memory", "lots"], "--max-memory 'lots' is not valid"),
        (["--min-context", "1.5"], "--min-context '1.5' is not valid"),
        (["--max-ttft", "0"], "--max-ttft 0 is out of range"),
        (["--max-tpot", "nan"], "--max-tpot nan is out of range"),
        (["--min-context", "-5"], "--min-context -5 is out of range"),
        (["--soak-seconds", "-1"], "--soak-seconds -1.0 is out of range"),
    ],
)
def test_what_makes_no_sense_is_refused_before_the_load(
    words: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tune", "demo", *words]) == 2
    assert what in capsys.readouterr().err


def test_torch_is_not_there_before_its_threads_are_set() -> None:
    """libgomp reads the thread environment when torch loads it: the command sets it first."""
    code = "import sys, localllm.cli.tune; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
