"""The lines that a person reads when a server starts and when `localllm run` names no model: whole texts."""

from dataclasses import replace

import pytest

from localllm.cli.start_lines import StartedServer, first_line, machine_in_words, offer_lines, ready_lines
from localllm.config.settings import Settings
from localllm.machine.hardware import Gpu, Hardware
from localllm.models.library.picks import FittingPick, fitting_picks

GIB = 1024**3
CPU = Hardware((), "A CPU", 4, 8 * GIB, 5 * GIB)
GPU = Gpu(0, "RTX 3060", 12 * GIB, 11 * GIB, (8, 6))
OLD = Gpu(1, "GTX 980", 4 * GIB, 4 * GIB, (5, 2))
DEMO = StartedServer("http://127.0.0.1:8000", 1.94, "demo", is_demo=True, max_model_len=2048)


def pick(speed: tuple[float, float] | None = (5.85, 12.4), gpus: str = "") -> FittingPick:
    found = fitting_picks(CPU, Settings(), None, count=9)
    chosen = next(each for each in found if each.pick.title == "Qwen3.5 2B")
    return FittingPick(chosen.pick, replace(chosen.plan, max_model_len=33_536), speed, gpus)


@pytest.mark.parametrize(
    ("hardware", "line"),
    [
        (CPU, "localllm 0.2.0 · CPU, 4 cores, 5.0 GiB of 8.0 GiB free · no telemetry"),
        (replace(CPU, cpu_cores=1), "localllm 0.2.0 · CPU, 1 core, 5.0 GiB of 8.0 GiB free · no telemetry"),
        (replace(CPU, gpus=(GPU, OLD)), "localllm 0.2.0 · RTX 3060, 11.0 GiB of 12.0 GiB free · no telemetry"),
        (replace(CPU, gpus=(OLD,)), "localllm 0.2.0 · CPU, 4 cores, 5.0 GiB of 8.0 GiB free · no telemetry"),
        (None, "localllm 0.2.0 · no telemetry"),
    ],
)
def test_the_first_line_is_the_version_and_the_machine(hardware: Hardware | None, line: str) -> None:
    assert first_line("0.2.0", hardware) == line


def test_each_gpu_is_named() -> None:
    words = machine_in_words(replace(CPU, gpus=(GPU, replace(GPU, index=1, free_bytes=GIB))))
    assert words == "RTX 3060, 11.0 GiB of 12.0 GiB free; RTX 3060, 1.0 GiB of 12.0 GiB free"


TOY = "This is the demo, a toy that was trained to answer questions about localllm."


@pytest.mark.parametrize(
    ("started", "text"),
    [
        (
            replace(DEMO, pick=pick()),
            f"""\
Ready after 1.9 s: http://127.0.0.1:8000   (--open opens a browser, Ctrl+C stops)
{TOY} A real model that fits here:
  localllm up unsloth/Qwen3.5-2B-GGUF:Q8_0   1.9 GiB to download · 5.8 to 12 tokens/s · 33,536 tokens of context
For programs: http://127.0.0.1:8000/v1
All figures: localllm up --verbose, or http://127.0.0.1:8000/dashboard""",
        ),
        (
            replace(DEMO, pick=pick(None, "Runs on GPU 0 (A); GPU 1 (B) stays free.")),
            f"""\
Ready after 1.9 s: http://127.0.0.1:8000   (--open opens a browser, Ctrl+C stops)
{TOY} A real model that fits here:
  localllm up unsloth/Qwen3.5-2B-GGUF:Q8_0   1.9 GiB to download · 33,536 tokens of context
  Runs on GPU 0 (A); GPU 1 (B) stays free.
For programs: http://127.0.0.1:8000/v1
All figures: localllm up --verbose, or http://127.0.0.1:8000/dashboard""",
        ),
        (
            replace(DEMO, installed="org/name", pick=pick(), notes=("One.",)),
            f"""\
Ready after 1.9 s: http://127.0.0.1:8000   (--open opens a browser, Ctrl+C stops)
{TOY} A real model is on this machine:
  localllm up org/name
Note: One.
For programs: http://127.0.0.1:8000/v1
All figures: localllm up --verbose, or http://127.0.0.1:8000/dashboard""",
        ),
        (
            replace(DEMO, has_pages=False, needs_key=True),
            f"""\
Ready after 1.9 s: http://127.0.0.1:8000/v1   (Ctrl+C stops)
{TOY} None of the suggested real models fits here: localllm doctor says why.
For programs: http://127.0.0.1:8000/v1, with your API key
All figures: localllm up --verbose""",
        ),
        (
            StartedServer("http://h:1", 75.0, "org/name", False, 8192, notes=("One.", "Two.")),
            """\
Ready after 75.0 s: http://h:1   (--open opens a browser, Ctrl+C stops)
Model org/name: 8,192 tokens of context
Note: One.
Note: Two.
For programs: http://h:1/v1
All figures: localllm up --verbose, or http://h:1/dashboard""",
        ),
        (
            StartedServer("http://h:1", 0.5, "org/name", False),
            """\
Ready after 500 ms: http://h:1   (--open opens a browser, Ctrl+C stops)
Model org/name: loaded by the first request that needs it
For programs: http://h:1/v1
All figures: localllm up --verbose, or http://h:1/dashboard""",
        ),
        (
            StartedServer("http://h:1", 0.5, "org/embed", False, 512, generates=False, has_pages=False),
            """\
Ready after 500 ms: http://h:1/v1   (Ctrl+C stops)
Model org/embed: 512 tokens for each input at most
For programs: http://h:1/v1
All figures: localllm up --verbose""",
        ),
    ],
)
def test_a_ready_server_says_what_a_person_needs(started: StartedServer, text: str) -> None:
    assert "\n".join(ready_lines(started)) == text


def test_the_offer_of_run() -> None:
    assert list(offer_lines("org/name", None)) == ["No model was named. org/name is on this machine."]
    assert (
        "\n".join(offer_lines(None, pick(gpus="Runs on GPU 0.")))
        == """\
No model was named, and none is on this machine. This one fits: Qwen3.5 2B, unsloth/Qwen3.5-2B-GGUF:Q8_0
  1.9 GiB to download · 5.8 to 12 tokens/s · 33,536 tokens of context
  Quick on a laptop; simple questions and summaries.
  Runs on GPU 0."""
    )
