"""What no client should send, at random and all at once, beside clients whose answers have to stay right.

    python -m tests.web.faults 60

prints how often each fault was thrown and what came of it, how the others fared, what memory and the engine are like
afterwards. The faults themselves are in fault_kinds.py.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from localllm.config import EngineConfig, ServerConfig, Settings
from tests.text.templates import CHATML
from tests.web.fault_kinds import FAULTS, Fault, Target
from tests.web.live_server import LiveServer, PacedRunner, fake_model, wait_until

ATTACKERS, CLIENTS = 6, 4
PROMPTS = ("Hello", "The sky is", "One two three", "Once")


@dataclass(slots=True)
class Report:
    thrown: dict[str, Counter[str]] = field(default_factory=dict)  # what came of each fault
    wrong: list[str] = field(default_factory=list)  # what should not have come
    right: int = 0  # answers of the others that were as they should be
    slowest_s: float = 0.0  # of these
    rss_bytes: list[int] = field(default_factory=list)  # of an idle server: before, in the middle, at the end
    engine: str = ""

    def __str__(self) -> str:
        lines = [f"{name:22} {counts.total():6}  {dict(counts)}" for name, counts in sorted(self.thrown.items())]
        before, middle, end = (f"{each / 2**20:.0f}" for each in self.rss_bytes)
        lines += [
            f"{sum(counts.total() for counts in self.thrown.values())} faults, {len(self.wrong)} answered wrongly",
            f"{self.right} answers beside them right, the slowest after {self.slowest_s:.2f} s",
            f"RSS of the idle server {before} MiB before, {middle} after half of the time, {end} at the end",
            self.engine,
        ]
        return "\n".join([*lines, *self.wrong[:20]])


async def throw(fault: Fault, target: Target, report: Report) -> None:
    counts = report.thrown.setdefault(fault.name, Counter())
    try:
        came = await asyncio.wait_for(fault.throw(target), 30)
    except TimeoutError:
        came = "no answer"
    counts[came] += 1
    if came not in fault.expected:
        report.wrong.append(f"{fault.name}: {came}")


async def attack(target: Target, faults: Sequence[Fault], report: Report, until_s: float) -> None:
    while time.monotonic() < until_s:
        await throw(target.random.choice(faults), target, report)


async def behave(url: str, report: Report, until_s: float, expected: dict[str, str]) -> None:
    """Ask in every dialect, whole and streamed; the model is greedy, so each answer is known."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        while time.monotonic() < until_s:
            for prompt, text in expected.items():
                started_s = time.monotonic()
                said = await ask(http, prompt, stream=random.random() < 0.5)
                report.slowest_s = max(report.slowest_s, time.monotonic() - started_s)
                if said == text:
                    report.right += 1
                else:
                    report.wrong.append(f"a client got {said!r} for {prompt!r}, not {text!r}")


async def ask(http: httpx.AsyncClient, prompt: str, *, stream: bool) -> str:
    body = {"prompt": prompt, "raw": True, "stream": stream, "options": {"temperature": 0, "num_predict": 24}}
    if random.random() < 0.5:
        answer = await http.post("/api/generate", json=body)
        lines = [httpx.Response(200, content=line).json() for line in answer.content.splitlines()]
        return "".join(line.get("response", f"({answer.status_code})") for line in lines)
    completion = {"prompt": prompt, "temperature": 0, "max_tokens": 24, "stream": stream}
    answer = await http.post("/v1/completions", json=completion)
    events = answer.text.split("data: ")[1:-1] if stream else [answer.text]
    try:
        return "".join(httpx.Response(200, text=event).json()["choices"][0]["text"] for event in events)
    except (ValueError, KeyError, IndexError):
        return answer.text


async def storm(server: LiveServer, faults: Sequence[Fault], seconds: float, seed: int, report: Report) -> None:
    port = int(server.url.rpartition(":")[2])
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        expected = {prompt: await ask(http, prompt, stream=False) for prompt in PROMPTS}
    until_s = time.monotonic() + seconds
    attackers = [attack(Target(port, random.Random(seed + i)), faults, report, until_s) for i in range(ATTACKERS)]
    clients = [behave(server.url, report, until_s, expected) for _ in range(CLIENTS)]
    await asyncio.gather(*attackers, *clients)


def rss() -> int:
    """What is held, without what the allocator keeps for later."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def run(folder: Path, seconds: float, seed: int, faults: Sequence[Fault] = FAULTS) -> Report:
    asked = Settings(EngineConfig(offline=True), ServerConfig(port=0, ui=True))
    model = fake_model(folder, PacedRunner(), max_num_queued_reqs=1000, chat_template=CHATML)
    report = Report()
    with LiveServer(model, asked) as server:
        state = server.server.server_state
        report.rss_bytes.append(rss())
        for half in range(2):
            asyncio.run(storm(server, faults, seconds / 2, seed + 100 * half, report))
            stats = server.wait_idle()
            wait_until(lambda: not state.tasks and not state.connections, 30)
            report.rss_bytes.append(rss())
        answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 2})
        report.engine = (
            f"engine: {stats.num_running} running, {stats.num_waiting} waiting, {stats.used_blocks} blocks held, "
            f"{stats.num_failed_steps} steps failed, {stats.num_steps} steps; the next request: {answer.status_code}"
        )
    return report


if __name__ == "__main__":
    seconds, seed = float(sys.argv[1]), int(time.time())
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"XDG_DATA_HOME": folder, "HF_HUB_OFFLINE": "1"}
        print(f"seed {seed}, {seconds:.0f} s")
        report = run(Path(folder) / "tiny", seconds, seed)
    print(report)
    sys.exit(bool(report.wrong))
