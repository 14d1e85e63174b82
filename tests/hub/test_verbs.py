"""The verbs around the hub, as they are typed: what comes out, with which code, and a process killed in mid-file."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from localllm.cli import main
from localllm.engine.memory.block_stores import DiskStore, kept_models, kv_folder
from localllm.models.library.catalog import resolve_model
from localllm.models.library.hub.cache import repository_folder
from tests.hub.local_hub import LocalHub, Trouble, wait_until_stalled

WEIGHTS = "model.safetensors"
Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """`say("pull", "org/name")`: exit code, standard output, standard error."""

    def run(*words: str) -> tuple[int, str, str]:
        code = main(words)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return run


@pytest.fixture
def tiny(hub: LocalHub, tiny_llama_path: Path) -> Path:
    hub.add_repo("org/tiny", tiny_llama_path)
    return tiny_llama_path


def events(out: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.splitlines()]


def start_pull(hub: LocalHub, home: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "localllm", "pull", *words],
        env={**os.environ, **hub.environ(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_pull_that_was_ended_goes_on(hub: LocalHub, checkpoint: Path, tmp_path: Path, number: signal.Signals) -> None:
    hub.add_repo("org/name", checkpoint)
    size = (checkpoint / WEIGHTS).stat().st_size
    hub.troubles[WEIGHTS] = Trouble(stall_after=200_000)
    first = start_pull(hub, tmp_path, "org/name")
    wait_until_stalled(hub)
    first.send_signal(number)
    _, err = first.communicate(timeout=20)
    hub.go_on.set()
    assert first.returncode == (130 if number == signal.SIGINT else -number)
    assert ("The downloaded part is kept." in err) == (number == signal.SIGINT)
    second = start_pull(hub, tmp_path, "org/name", "--json")
    out, err = second.communicate(timeout=20)
    assert second.returncode == 0, err
    told = events(out)
    assert told[0]["event"] == "plan"
    assert told[0]["cached_bytes"] >= 200_000
    assert told[-1]["event"] == "done"
    assert hub.bytes_sent(WEIGHTS) == size, "each byte left the hub once"
    assert (Path(str(told[-1]["path"])) / WEIGHTS).read_bytes() == (checkpoint / WEIGHTS).read_bytes()


def test_search_show_pull_list_and_remove(hub: LocalHub, tiny: Path, say: Say) -> None:
    assert "org/tiny" in say("search", "tiny")[1]
    assert json.loads(say("search", "tiny", "--json")[1])[0]["repo_id"] == "org/tiny"
    assert "No supported model found" in say("search", "no", "such", "thing")[2]

    code, out, _ = say("show", "org/tiny")
    assert code == 0
    for words in ("not on this machine: localllm pull org/tiny", "apache-2.0", "LlamaForCausalLM", "2,048 tokens"):
        assert words in out
    facts = json.loads(say("show", "org/tiny", "--json")[1])
    assert facts["needed_bytes"] == facts["size_bytes"] > facts["weights_bytes"] > 100_000
    assert facts["spec"]["num_layers"] == 2

    code, out, _ = say("pull", "org/tiny", "--dry-run")
    assert (code, hub.bytes_sent("tokenizer.json")) == (0, 0)
    assert "5 files" not in out
    assert "model.safetensors" in out
    code, out, _ = say("pull", "org/tiny")
    assert (code, "org/tiny is complete" in out) == (0, True)
    assert "nothing was missing" in say("pull", "org/tiny")[1]

    assert "Hugging Face cache" in say("show", "org/tiny")[1]
    listed = {model["name"]: model for model in json.loads(say("list", "--json")[1])}
    assert listed["org/tiny"]["size_bytes"] == facts["size_bytes"]
    assert "org/tiny" in say("list")[1]

    code, _, err = say("rm", "org/tiny")
    assert (code, "--yes" in err) == (2, True)
    kept = DiskStore(kv_folder(), bytes(16), 10**6, "org/tiny", str(resolve_model("org/tiny").path))
    kept.put((0, bytes(16)), np.zeros(900, np.uint8))
    kept.close()
    code, out, _ = say("rm", "org/tiny", "--yes", "--json")
    wanted = {"removed": "org/tiny", "freed_bytes": facts["size_bytes"], "freed_kv_bytes": kept.used_bytes}
    assert json.loads(out) == wanted
    assert not kept_models(kv_folder())
    assert "org/tiny" not in say("list")[1]


def test_rm_asks_at_a_terminal(hub: LocalHub, tiny: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    say("pull", "org/tiny")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    asked: list[str] = []
    answers = iter(["", "n", "y"])
    monkeypatch.setattr("builtins.input", lambda question: (asked.append(question), next(answers))[1])
    assert "Not deleted." in say("rm", "org/tiny")[1]
    assert "Not deleted." in say("rm", "org/tiny")[1]
    assert "freed" in say("rm", "org/tiny")[1]
    assert asked[0].startswith("Delete org/tiny (")


def test_an_unknown_architecture_can_still_be_shown(hub: LocalHub, checkpoint: Path, say: Say) -> None:
    (checkpoint / "config.json").write_text('{"architectures": ["NobodyKnowsIt"], "model_type": "nobody"}')
    hub.add_repo("org/odd", checkpoint)
    code, out, _ = say("show", "org/odd")
    assert (code, "runs here" in out) == (0, True)


def test_verify_finds_and_mends(hub: LocalHub, tiny: Path, say: Say) -> None:
    say("pull", "org/tiny")
    assert "All files are intact." in say("pull", "org/tiny", "--verify")[1]
    blob = (resolve_model("org/tiny").path / WEIGHTS).resolve()
    blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    assert "Damaged, downloading again: model.safetensors." in say("pull", "org/tiny", "--verify")[1]
    assert blob.read_bytes() == (tiny / WEIGHTS).read_bytes()


def test_include_fetches_just_that(hub: LocalHub, checkpoint: Path, say: Say) -> None:
    hub.add_repo("org/name", checkpoint)
    assert say("pull", "org/name", "--include", "README.md", "--include", "onnx/*")[0] == 0
    assert hub.bytes_sent(WEIGHTS) == 0
    assert hub.bytes_sent("onnx/model.onnx") > 0


def test_a_cut_download_is_named_in_the_list(hub: LocalHub, say: Say) -> None:
    partial = repository_folder("org/half") / "blobs" / "abc.incomplete"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"x" * 2048)
    assert "org/half is downloaded in part (2.0 KiB): localllm pull org/half resumes it." in say("list")[1]


def test_login_keeps_the_token_where_the_library_does(
    hub: LocalHub, tiny: Path, say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add_repo("org/tiny", tiny, gated=True, allowed={"me"})
    hub.users["hf_mine"] = "me"
    code, _, err = say("pull", "org/tiny")
    assert (code, "localllm login" in err) == (5, True)

    def type_in(text: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "localllm", *words],
            input=text, env={**os.environ, **hub.environ(tmp_path)}, capture_output=True, text=True, timeout=30,
        )  # fmt: skip

    refused = type_in("hf_wrong\n", "login")
    assert (refused.returncode, "does not accept this token" in refused.stderr) == (5, True)
    assert not (tmp_path / "hf" / "token").exists()
    answer = type_in("hf_mine\n", "login")
    assert answer.returncode == 0, answer.stderr
    assert f"Logged in as me. The token is stored in {tmp_path}/hf/token" in answer.stdout
    assert "hf_mine" not in answer.stdout + answer.stderr
    assert (tmp_path / "hf" / "token").read_text() == "hf_mine"
    assert say("pull", "org/tiny")[0] == 0
    assert "removed" in type_in("", "logout").stdout
    assert not (tmp_path / "hf" / "token").exists()


def test_run_fetches_first_and_answers_on_standard_output(
    hub: LocalHub, tiny: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("run", "org/tiny", "Hello", "--max-tokens", "3", "--max-model-len", "64", "--device", "cpu")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    code, out, err = say(*words, "--offline")
    assert (code, out) == (5, "")
    assert err.startswith("org/tiny is not on this machine, and downloads are disabled.")
    assert "Try: localllm pull org/tiny" in err
    assert hub.sent == []
    code, out, err = say(*words)
    assert code == 0
    assert "org/tiny is complete" in err
    assert "org/tiny" not in out
    hub.sent.clear()
    assert say(*words, "--offline")[0] == 0
    assert hub.sent == [], "what is here is loaded without a question"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("pull org/absent", 5, "org/absent is not on the hub, or it is private."),
        ("pull ./folder", 2, "'./folder' is not a repository."),
        ("pull ollama:llama3", 2, "'ollama:llama3' is not a repository."),
        ("pull", 2, "The following arguments are required: MODEL."),
        ("show org/absent", 5, "org/absent is not on the hub, or it is private."),
        ("rm demo --yes", 2, "demo belongs to the program."),
        ("rm org/absent --yes", 5, "'org/absent' is not a folder and not in the Hugging Face cache."),
        ("login --token ", 2, "No token was given."),
    ],
)
def test_refusals(hub: LocalHub, say: Say, words: str, code: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    found, out, err = say(*words.split(" "))
    assert (found, out) == (code, "")
    assert err.startswith(said)


def test_logging_out_without_a_token(hub: LocalHub, say: Say) -> None:
    assert "There was no token to remove." in say("logout")[1]
