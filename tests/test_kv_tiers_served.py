"""Blocks outside of the cache with a real model: a restart that is answered from disk, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from localllm.cli import main
from localllm.errors import ConfigError, UnsupportedOption
from localllm.serving.build import build_engine
from tests.serving import answer, settings_for


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


def test_a_model_with_recurrent_states_is_refused_by_name(tiny_model_path: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOption, match="recurrent states"):
        served(tiny_model_path("qwen3_5"), tmp_path)


def test_a_folder_that_cannot_be_made_is_an_error_of_the_setting(tiny_llama_path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="KV blocks cannot be kept"):
        served(tiny_llama_path, tmp_path / "file")
