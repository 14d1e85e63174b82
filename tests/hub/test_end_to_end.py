"""A model's whole life: found, weighed, fetched with a break, served, swapped, put to sleep, woken, removed.

Every step is the real command in a process of its own, against a local hub; answers come over a real socket.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from tests.gguf_files import write_gguf
from tests.hub.local_hub import LocalHub, Trouble, wait_until_stalled
from tests.serving import Server
from tests.tiny import load_reference

WEIGHTS = "model.safetensors"
PROMPT = "The quick brown fox"


@pytest.fixture
def environ(hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Of every process here: the local hub, a cache and a home of this test's own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return dict(os.environ)


def localllm(*words: str) -> dict[str, Any] | list[Any]:
    """What a command says as JSON: its last line, or all of it."""
    done = subprocess.run([sys.executable, "-m", "localllm", *words, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    try:
        said: dict[str, Any] | list[Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        said = json.loads(done.stdout.splitlines()[-1])
    return said


def answer(url: str, model: str) -> str:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        made = client.completions.create(model=model, prompt=PROMPT, max_tokens=8, temperature=0)
    assert made.usage is not None
    assert made.usage.completion_tokens > 0
    return made.choices[0].text


def by_transformers(folder: Path) -> str:
    """The same greedy tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = torch.tensor([tokenizer.encode(PROMPT).ids])
    out = load_reference(folder).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, temperature=None, top_p=None,
        pad_token_id=0,
    )  # fmt: skip
    new = [token for token in out[0, ids.shape[1] :].tolist() if token != 2]
    return str(tokenizer.decode(new))


def states(url: str) -> dict[str, str]:
    models = localllm("ps", "--url", url)
    assert isinstance(models, list)
    return {model["name"]: model["state"] for model in models}


def test_the_life_of_a_model(hub: LocalHub, environ: dict[str, str], tiny_llama_path: Path, tmp_path: Path) -> None:
    ggufs = tmp_path / "ggufs"
    ggufs.mkdir()
    write_gguf(tiny_llama_path, ggufs / "tiny-Q8_0.gguf", "Q8_0", others={r"\.attn_.*": "F32"})
    hub.add_repo("org/tiny", tiny_llama_path)
    hub.add_repo("org/tiny-GGUF", ggufs)

    found = localllm("search", "tiny")
    assert {each["repo_id"] for each in found} == {"org/tiny", "org/tiny-GGUF"}
    fits = localllm("fit", "org/tiny", "--device", "cpu")
    assert "fits" in json.dumps(fits)
    looked_at = hub.bytes_sent(WEIGHTS)
    assert looked_at <= 1 << 17 < (tiny_llama_path / WEIGHTS).stat().st_size, "only headers are looked at"

    # killed in mid-file, and on from there
    hub.troubles[WEIGHTS] = Trouble(stall_after=200_000)
    first = subprocess.Popen([sys.executable, "-m", "localllm", "pull", "org/tiny"], stdout=subprocess.DEVNULL)
    wait_until_stalled(hub)
    first.send_signal(signal.SIGKILL)
    first.wait(20)
    hub.go_on.set()
    localllm("pull", "org/tiny")
    assert hub.bytes_sent(WEIGHTS) - looked_at == (tiny_llama_path / WEIGHTS).stat().st_size, "no byte left twice"
    localllm("pull", "org/tiny-GGUF:Q8_0")

    with Server(tmp_path, "serve", "org/tiny", "--device", "cpu") as server:
        url = server.wait_for("ready")["url"]
        expected = by_transformers(tiny_llama_path)
        assert answer(url, "org/tiny") == expected
        assert states(url) == {"tiny": "ready"}

        # a request names another installed model; the first one stays as long as there is room
        of_gguf = answer(url, "org/tiny-GGUF:Q8_0")
        assert of_gguf
        now = states(url)
        assert len(now) == 2
        assert set(now.values()) == {"ready"}
        other = next(name for name in now if name != "tiny")

        localllm("sleep", "tiny", "--url", url)
        assert states(url)["tiny"] == "sleeping"
        assert answer(url, other) == of_gguf
        assert answer(url, "org/tiny") == expected, "the request woke it"
        localllm("sleep", "tiny", "--url", url)
        localllm("wake", "tiny", "--url", url)
        assert states(url)["tiny"] == "ready"
        assert answer(url, "org/tiny") == expected
        localllm("unload", other, "--url", url)
        assert states(url)[other] == "unloaded"
        assert server.stop() == 0

    size = sum(path.stat().st_size for path in tiny_llama_path.iterdir())
    removed = localllm("rm", "org/tiny", "--yes")
    assert isinstance(removed, dict)
    assert 0.9 * size < removed["freed_bytes"] <= size
    localllm("rm", "org/tiny-GGUF", "--yes")
    names = {model["name"] for model in localllm("list")}  # type: ignore[call-overload]
    assert not {name for name in names if name.startswith("org/")}
