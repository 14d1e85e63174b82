"""What is imported when: the command line answers with the standard library, and the pages without torch.

Each test starts an interpreter, since this one has imported everything.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.layout import ROOT
from tests.tiny import FAMILIES, make_tiny_model

SOUND = {"soundfile", "soxr", "av", "localllm.media.sound", "localllm.media.speech",
         "localllm.models.encoders.transcriber"}  # fmt: skip
"""What only a model that transcribes needs."""
HEAVY = SOUND | {"torch", "triton", "transformers", "pydantic", "attrs", "gguf", "huggingface_hub", "llguidance"}
MOST_MODULES_OF_HELP = 90
"""Besides those of a bare interpreter."""


def modules_after(program: str, *flags: str) -> set[str]:
    """Run a program in a fresh interpreter and return the names of the modules that it has then imported."""
    code = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{program}\nimport json\n"
    code += "print(json.dumps(sorted(set(sys.modules) - {'json', 'json.decoder', 'json.encoder', 'json.scanner'})))"
    ended = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, check=False, cwd="/")
    assert ended.returncode == 0, ended.stderr
    return set(json.loads(ended.stdout.splitlines()[-1]))


@pytest.mark.parametrize("module", ["localllm.web.pages", "localllm.up", "localllm.cli.announce"])
def test_a_module_of_the_server_is_imported_without_torch(module: str) -> None:
    assert not HEAVY & modules_after(f"import {module}")


APPLICATION = """
from localllm.config.resolve import resolve
from localllm.serving.manager import ModelManager
from localllm.web.app import create_app
create_app(ModelManager(), resolve({}))"""
MOST_MODULES_OF_THE_APPLICATION = 1330
MOST_MODULES_OF_TORCH = 1150
"""Of torch 2.13: 1,109 without what its compiler needs, 1,124 with it. Newer ones may have more."""


def test_the_application_is_created_without_torch_and_from_a_bounded_number_of_modules() -> None:
    """Importing modules is more than half of the time until the first page."""
    found = modules_after(APPLICATION)
    assert not HEAVY & found
    assert len(found) <= MOST_MODULES_OF_THE_APPLICATION


SHORT_TORCH = """
import sys
from localllm.machine.processes import ShortTorchImport
short = ShortTorchImport()
assert short.install()
import torch
left_out = sys.modules["torch._meta_registrations"]
assert left_out.__spec__.origin == "left out" and short in sys.meta_path
"""


def test_a_server_imports_torch_without_what_describes_operations_to_its_compiler() -> None:
    found = modules_after(SHORT_TORCH + "assert torch.ones(2, 3).matmul(torch.ones(3, 2)).sum() == 12")
    assert not {"torch._dynamo", "torch._inductor", "transformers"} & found
    assert len(found) <= MOST_MODULES_OF_TORCH


@pytest.mark.parametrize(
    "asks", ["left_out.meta_mm", "import torch._dynamo", "torch._meta_registrations.meta_mm", "short.complete()"]
)
def test_what_was_left_out_of_torch_is_imported_once_something_needs_it(asks: str) -> None:
    modules_after(f"""{SHORT_TORCH}
{asks}
assert short not in sys.meta_path
whole = sys.modules["torch._meta_registrations"]
assert whole is not left_out and callable(whole.meta_mm) and torch._meta_registrations is whole
torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*torch.ones(3, 1, 2, 4, 8, device="meta"))""")


def test_torch_is_imported_whole_where_it_was_imported_before_or_was_asked_to_be() -> None:
    modules_after("""
import sys
from localllm.machine.processes import ShortTorchImport
short = ShortTorchImport()
short.install()
short.complete()
import torch
assert callable(sys.modules["torch._meta_registrations"].meta_mm)
assert not ShortTorchImport().install() and not any(isinstance(each, ShortTorchImport) for each in sys.meta_path)""")


PLANNED = ("llama", "gemma4", "qwen3_next", "deepseek_v3", "gpt_oss", "nemotron_h", "bloom", "phi3")


@pytest.mark.parametrize(
    "families", [PLANNED, pytest.param(tuple(FAMILIES), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_models_are_counted_without_what_was_left_out(families: tuple[str, ...], tmp_path: Path) -> None:
    """The builders run on the device "meta", whose operations are described in what was left out."""
    for family in families:
        make_tiny_model(tmp_path / family, family)
    modules_after(f"""{SHORT_TORCH}
from pathlib import Path
from localllm.models.fit.checkpoint import count_resident
from localllm.models.read_spec import read_spec
for path in Path({str(tmp_path)!r}).iterdir():
    spec = read_spec(path)
    sizes = count_resident(path, spec)
    for device, dtype in ("cpu", "float32"), ("cuda:0", "bfloat16"):
        assert sizes(device, dtype, 64, None) > 0
        if spec.mixture is not None:
            assert sizes.experts(device, dtype, None)
assert short in sys.meta_path""")


def test_torchs_library_is_loaded_beside_the_imports_of_the_server() -> None:
    modules_after("""
import sys
from localllm.machine.processes import preload_torch_library
thread = preload_torch_library()
assert (thread is not None) == (sys.platform == "linux")
if thread is not None:
    thread.join()
    assert "libtorch_cpu" in open("/proc/self/maps").read() and "torch" not in sys.modules
    import torch
    assert torch.ones(4).sum() == 4""")


@pytest.mark.parametrize("words", [["--help"], ["up", "--help"], ["--version"], ["nonsense"]])
def test_help_needs_few_modules_and_no_packages(words: list[str]) -> None:
    """Counted instead of timed, since a count is the same on a loaded machine. -S: without site-packages."""
    program = f"""
import contextlib, io
from localllm.cli import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    with contextlib.redirect_stderr(io.StringIO()):
        main({words!r})"""
    found = modules_after(program, "-I", "-S") - modules_after("", "-I", "-S")
    assert len(found) <= MOST_MODULES_OF_HELP, sorted(found)


# ---- a running server ------------------------------------------------------------------------------------------------

PAGES = ("/", "/dashboard", "/models", "/playground", "/settings", "/logs", "/tune", "/metrics", "/v1/models")
SERVE = """
import sys
{before}
import localllm.cli.announce as announce
import localllm.serving.phases as phases
def imported():
    return sorted({names!r} & set(sys.modules))
at_phase = {{}}  # a phase is announced by another thread, later than it is reported
reported = phases.PhaseReporter.__call__
def report(self, *args, **named):
    at_phase[self.name] = imported()
    reported(self, *args, **named)
phases.PhaseReporter.__call__ = report
told = announce.JsonAnnouncer._say
def say(self, event, **facts):
    told(self, event, imported=at_phase.get(facts.get("phase"), imported()), **facts)
announce.JsonAnnouncer._say = say
from localllm.cli import main
sys.exit(main({words!r}))
"""


@contextmanager
def serving(folder: Path, *words: str, before: str = "") -> Iterator[tuple[int, Iterator[dict[str, Any]]]]:
    """Run `localllm serve ... --json` in an interpreter of its own; yield its pid and its events, each with the heavy
    packages imported by then.
    """
    code = SERVE.format(before=before, names=HEAVY, words=["serve", *words, "--port", "0", "--json"])
    environ = os.environ | {name: str(folder) for name in ("XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME")}
    quiet: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environ, **quiet) as process:
        assert process.stdout is not None
        try:
            yield process.pid, (json.loads(line) for line in process.stdout)
        finally:
            process.kill()


def ask(url: str) -> str:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=100)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_a_server_without_a_model_serves_its_pages_without_torch_and_loads_on_request(tmp_path: Path) -> None:
    with serving(tmp_path, "demo", "--no-load-at-start", "--max-model-len", "256") as (pid, events):
        ready = next(event for event in events if event["event"] == "ready")
        url = ready["url"]
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        for path in PAGES:
            assert httpx.get(url + path, timeout=60).status_code == 200, path
        mapped = Path(f"/proc/{pid}/maps")
        if mapped.exists():
            assert "libtorch" not in mapped.read_text()
        assert ready["imported"] == []
        assert ask(url)
        if mapped.exists():
            assert "libtorch" in mapped.read_text()


def test_the_demo_answers_where_triton_is_not_installed_and_torch_is_imported_in_its_phase(tmp_path: Path) -> None:
    hidden = "sys.modules['triton'] = sys.modules['triton.language'] = None"
    with serving(tmp_path, "demo", "--max-model-len", "256", before=hidden) as (_, events):
        at: dict[str, set[str]] = {}
        for event in events:
            at[event.get("phase", event["event"])] = set(event["imported"])
            if event["event"] == "ready":
                assert ask(event["url"])
                break
    assert "torch" not in at["starting"] | at["find"]
    assert "torch" in at["torch"]
