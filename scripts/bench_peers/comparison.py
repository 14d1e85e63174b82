"""Rounds of A, B, C, A, B, C, ...: each engine is launched, warmed up, measured and stopped in turn.

Only one engine runs at a time, so that they do not disturb each other, and a slow hour of the machine affects all
alike.
An engine that fails is left out of the later rounds.
Does not know: how an engine is launched, what a load requests, how results are printed (report.py).
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from localllm.errors import LocalLLMError
from localllm.tuning.report import RequestTimes
from localllm.tuning.workload import WorkloadRequest
from scripts.bench_peers.engines import EngineFailed, EngineSpec, ServerEngine
from scripts.bench_peers.files import Files
from scripts.bench_peers.loads import Figures, Load
from scripts.bench_peers.texts import Texts

ANSWERS, ANSWER_LEN, ANSWER_SEED = 4, 32, 1 << 33  # greedy answers: their number, and the length of prompts and answers


@dataclass(frozen=True, slots=True)
class Row:
    """One value of one engine in one round."""

    engine: str
    round_index: int
    load: str
    figure: str
    value: float
    load_average: float  # of the machine, right afterwards


class Comparison:
    """The rounds. texts: given if one engine only reads text; then all get prompts that can be written as text."""

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        files: Files,
        loads: Sequence[Load],
        folder: Path,
        *,
        context: int,
        seed: int = 0,
        texts: Texts | None = None,
    ) -> None:
        self.specs, self.files, self.loads, self.folder = specs, files, loads, folder
        self.context, self.seed, self.texts = context, seed, texts
        self.rows: list[Row] = []
        self.answers: dict[str, list[str]] = {}  # greedy answers of the first round
        self.failures: dict[str, str] = {}
        self.prompt_tokens: dict[str, int] = {}  # as counted by each engine, over all loads

    def run(self, rounds: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "rows.jsonl").open("w", encoding="utf-8") as out:
            for round_index in range(rounds):
                for spec in self.specs:
                    if spec.name not in self.failures:
                        self._visit(spec, round_index, out)

    def _visit(self, spec: EngineSpec, round_index: int, out: TextIO) -> None:
        """Launch, warm up, measure and stop one engine."""
        _say(f"round {round_index + 1}: starting {spec.name}")
        model, started_s = self.files.gguf if spec.reads_gguf else self.files.folder, time.perf_counter()
        try:
            engine = ServerEngine(spec, model, self.folder / f"{spec.name}-{round_index}.log", self.texts)
            try:
                self._note(out, spec, round_index, "process", {"ready after s": time.perf_counter() - started_s})
                self._measure(engine, spec, round_index, out)
                used = {"RSS MiB": engine.memory_bytes() / 2**20, "peak RSS MiB": engine.peak_bytes() / 2**20}
                self._note(out, spec, round_index, "process", used)
            finally:
                engine.stop()
        except (EngineFailed, LocalLLMError, OSError) as error:
            self.failures[spec.name] = str(error)
            _say(f"{spec.name} failed and is left out: {error}")

    def _measure(self, engine: ServerEngine, spec: EngineSpec, round_index: int, out: TextIO) -> None:
        if spec.name not in self.answers:
            self.answers[spec.name] = self._greedy_answers(engine)
        for index, load in enumerate(self.loads):
            seed = self.seed + 1000 * index + round_index
            self._ask(engine, self._worded(load.warm_up(seed)), load.streams)
            requests = self._worded(load.requests(seed))
            cpu_s, started_s = engine.cpu_s(), time.perf_counter()
            times = self._ask(engine, requests, load.streams)
            duration_s, cpu_s = time.perf_counter() - started_s, engine.cpu_s() - cpu_s
            self.prompt_tokens[spec.name] = self.prompt_tokens.get(spec.name, 0) + sum(t.prompt_tokens for t in times)
            figures = load.figures(requests, times, duration_s, self.context)
            figures["CPU ms/token"] = 1e3 * cpu_s / sum(one.output_tokens for one in times)
            self._note(out, spec, round_index, load.name, figures)

    def _ask(self, engine: ServerEngine, requests: Sequence[WorkloadRequest], streams: int) -> list[RequestTimes]:
        """Run the requests. Raises `EngineFailed` if an answer is missing or has the wrong length."""
        times = engine.ask(requests, streams)
        for request, one in zip(requests, times, strict=True):
            if one.error is not None:
                raise EngineFailed(f"{engine.name}: {one.error}{engine.last_words()}")
            if one.output_tokens != request.max_tokens:
                raise EngineFailed(f"{engine.name} gave {one.output_tokens} of {request.max_tokens} tokens.")
        return times

    def _worded(self, requests: Sequence[WorkloadRequest]) -> list[WorkloadRequest]:
        return [one if self.texts is None else self.texts.worded(one) for one in requests]

    def _greedy_answers(self, engine: ServerEngine) -> list[str]:
        """Return greedy answers: if engines differ in them, their speeds cannot be compared."""
        requests = [one for load in self.loads for one in load.requests(self.seed + ANSWER_SEED)][:ANSWERS]
        short = [WorkloadRequest(one.prompt_token_ids[:ANSWER_LEN], ANSWER_LEN) for one in requests]
        try:
            return [engine.greedy_text(request) for request in self._worded(short)]
        except urllib.error.HTTPError as error:
            raise EngineFailed(f"{engine.name}: {error.read().decode(errors='replace')[:300]}") from error

    def _note(self, out: TextIO, spec: EngineSpec, round_index: int, load: str, figures: Figures) -> None:
        for figure, value in figures.items():
            row = Row(spec.name, round_index, load, figure, value, os.getloadavg()[0])
            self.rows.append(row)
            out.write(json.dumps(asdict(row)) + "\n")
        out.flush()
        _say(f"round {round_index + 1}: {spec.name} {load}: " + ", ".join(f"{n} {v:.4g}" for n, v in figures.items()))


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
