"""Blocks outside of the cache with a real model: a restart that is answered from disk, and what is refused."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.cli import main
from localllm.engine.memory.block_stores import DiskStore
from localllm.errors import ConfigError, UnsupportedOption
from localllm.serving.build import build_engine
from tests.serving import ROOT, Server, answer, settings_for


def served(path: Path, folder: Path, **engine: Any) -> tuple[list[int], int, int]:
    """Return a server's answer to a prompt of 200 tokens, and how many of them it computed and loaded."""
    model = build_engine(settings_for(path, kv_disk_gib=0.1, kv_offload_dir=str(folder), **engine))
    told = answer(model, 200)
    model.close()
    recorder = model.loop.scheduler.recorder
    return told, recorder.prompt_tokens, recorder.recent[0].num_loaded_tokens


@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_a_restarted_server_reads_what_it_has_computed_before(tiny_llama_path: Path, tmp_path: Path, kv: str) -> None:
    """Also that blocks of another cache format are not even found."""
    first, computed, loaded = served(tiny_llama_path, tmp_path, kv_cache_dtype=kv)
    assert (computed, loaded) == (200, 0)
    assert served(tiny_llama_path, tmp_path, kv_cache_dtype=kv) == (first, 200 - 192, 192)
    other = {"auto": "int8", "int8": "auto"}[kv]
    assert served(tiny_llama_path, tmp_path, kv_cache_dtype=other)[1:] == (200, 0)


def test_the_verb_lists_and_deletes_what_is_kept(
    tiny_llama_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--kv-offload-dir", str(tmp_path)]
    assert main(["kv", *where]) == 0
    assert "No KV blocks" in capsys.readouterr().out
    served(tiny_llama_path, tmp_path)
    assert main(["kv", "list", "--json", *where]) == 0
    [kept] = json.loads(capsys.readouterr().out)
    assert (kept["model"], kept["blocks"]) == (tiny_llama_path.name, 12)
    assert main(["kv", "clear", "another", *where]) != 0
    assert tiny_llama_path.name in capsys.readouterr().err
    assert main(["kv", "clear", tiny_llama_path.name, *where]) == 0
    assert "12 blocks" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_model_with_recurrent_states_is_refused_by_name_before_its_weights_are_read(
    tiny_model_path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localllm.serving.build._load", None)
    with pytest.raises(UnsupportedOption, match="recurrent states"):
        served(tiny_model_path("qwen3_5"), tmp_path)


def test_a_folder_that_cannot_be_made_is_an_error_of_the_setting(tiny_llama_path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="KV blocks cannot be kept"):
        served(tiny_llama_path, tmp_path / "file")


# ---- crashes, limits and neighbours ----------------------------------------------------------------------------------

FINGERPRINT = bytes(16)
WRITER = """
import sys
from pathlib import Path
import numpy as np
from localllm.engine.memory.block_stores import DiskStore

if len(sys.argv) > 2:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
store = DiskStore(Path(sys.argv[1]), bytes(16), 10**9)
print("ready", flush=True)
for number in range(10**6):
    store.put((0, number.to_bytes(16, "big")), np.full(400_000, number % 251, np.uint8))
    if not store.accepts:
        print("paused", flush=True)
        break
"""


def writer(folder: Path, *limits: str) -> subprocess.Popen[str]:
    """Return a process that has begun to write blocks to a folder."""
    command = [sys.executable, "-c", WRITER, str(folder), *limits]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_writer_that_is_killed_leaves_whole_blocks_or_none(tmp_path: Path) -> None:
    """SIGKILL at three moments: whatever is there is right, half a file is deleted, and the next server writes."""
    num_kept = 0
    for wait_s in (0.0, 0.02, 0.06):
        with writer(tmp_path) as process:
            while len(list(tmp_path.rglob("*.kv"))) <= num_kept:
                time.sleep(0.001)
            time.sleep(wait_s)
            process.kill()
        store = DiskStore(tmp_path, FINGERPRINT, 10**9)
        assert store.accepts, "the lock of a killed process is free"
        assert not [path for path in tmp_path.rglob("*.kv*") if path.suffix != ".kv"]
        keys = list(store._keys)
        for key in keys:
            assert (store.get(key) == int.from_bytes(key[1], "big") % 251).all()
        num_kept = len(keys)
        assert store.used_bytes == sum(path.stat().st_size for path in tmp_path.rglob("*.kv"))
        store.close()
    assert num_kept > 2


@pytest.mark.skipif(sys.platform == "win32", reason="no limit of file sizes")
def test_a_write_that_the_system_cuts_off_leaves_nothing(tmp_path: Path) -> None:
    """The kernel takes a part of the block, then refuses the rest, as a disk does that fills up."""
    with writer(tmp_path, "100000") as process:
        assert process.stdout is not None
        assert process.stdout.read() == "paused\n"
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name not in ("lock", "about.json")]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_became_read_only_is_still_read(tiny_llama_path: Path, tmp_path: Path) -> None:
    first, *_ = served(tiny_llama_path, tmp_path)
    for path in (*tmp_path.rglob("*"), tmp_path):
        path.chmod(0o500 if path.is_dir() else 0o400)
    try:
        assert served(tiny_llama_path, tmp_path) == (first, 200 - 192, 192)
    finally:
        for path in (tmp_path, *tmp_path.rglob("*")):
            path.chmod(0o700 if path.is_dir() else 0o600)


def test_two_servers_with_one_folder_give_the_same_answers(tiny_llama_path: Path, tmp_path: Path) -> None:
    """The second one reads what the first one writes, and takes over when that has ended."""
    first = build_engine(settings_for(tiny_llama_path, kv_disk_gib=0.1, kv_offload_dir=str(tmp_path)))
    told = answer(first, 200)
    first.loop.scheduler.cache.tiers.transfers.close()  # everything is written
    second = build_engine(settings_for(tiny_llama_path, kv_disk_gib=0.1, kv_offload_dir=str(tmp_path)))
    try:
        assert answer(second, 200) == told
        assert second.loop.scheduler.recorder.prompt_tokens == 200 - 192
    finally:
        second.close()
        first.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_that_is_killed_while_it_writes_answers_the_same_after_a_restart(
    tiny_llama_path: Path, tmp_path: Path
) -> None:
    """Prompts come until SIGKILL, three times; then each is asked again, and compared with a server without tiers."""
    prompts = [[5 + (7 * number + place) % 40 for place in range(200)] for number in range(12)]

    def ask(server: Server, prompt: list[int]) -> str:
        body = {"model": tiny_llama_path.name, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        told = httpx.post(f"{server.events[-1]['url']}/v1/completions", json=body, timeout=60)
        told.raise_for_status()
        return str(told.json()["choices"][0]["text"])

    words = ("serve", str(tiny_llama_path), "--device", "cpu", "--max-model-len", "256", "--max-num-seqs", "2")
    tier = ("--kv-disk-gib", "0.1", "--kv-offload-dir", str(tmp_path / "kv"), "--kv-cache-memory-bytes", "1MiB")
    with Server(tmp_path, *words) as plain:
        plain.wait_for("ready")
        expected = [ask(plain, prompt) for prompt in prompts]
        plain.stop()
    for number in range(3):
        with Server(tmp_path, *words, *tier) as server:
            server.wait_for("ready")
            assert [ask(server, prompt) for prompt in prompts[: 4 * (number + 1)]] == expected[: 4 * (number + 1)]
            server.process.kill()
            server.process.wait(20)
    with Server(tmp_path, *words, *tier) as server:
        server.wait_for("ready")
        assert [ask(server, prompt) for prompt in prompts] == expected
        metrics = httpx.get(f"{server.events[-1]['url']}/metrics", timeout=60).text
        [loaded] = re.findall(r"external_prefix_cache_hits_total\{.*\} (\S+)", metrics)
        assert float(loaded) > 0
        server.stop()
