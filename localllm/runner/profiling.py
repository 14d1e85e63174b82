"""Traces of the engine's steps, by torch's profiler, and named ranges around each step.

`ProfiledRunner` stands in for `TorchRunner` if --torch-profiler-dir is set, so that steps without it cost nothing. Its
ranges are in the profiler's trace, and on a GPU also NVTX ranges, which nsys shows without a trace of ours.
Does not know: HTTP, names of models.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from localllm.engine.step import PendingStep, StepPlan, TokenMasks
from localllm.errors import ConfigError, RequestError
from localllm.files.folders import translated_write
from localllm.runner.runner import TorchRunner

_RECORDING = threading.Lock()
"""Held while a trace is recorded: torch has one profiler for the whole process."""


class TraceConflict(RequestError):
    """A trace was to start while one is being recorded, or to stop while none is."""

    status, code = 409, "trace_conflict"


class StepProfiler:
    """Implements `engine.step.Profiler` for one runner. torch's profiler records the thread that starts it, so `start`,
    `stop` and `drop` are called on the thread that runs the steps."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        """folder: of the traces; it is made. Raises `ConfigError` if that is impossible."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what, why = f"--torch-profiler-dir {folder} cannot be made.", f"{error.strerror}."
            raise ConfigError(what, why, "Name a folder that you may write to.", param="torch_profiler_dir") from error
        self._folder, self._on_gpu = folder, device.type == "cuda"
        self._trace: profile | None = None

    def start(self) -> None:
        """Begin to record. Raises `TraceConflict` if a trace is being recorded."""
        if self._trace is not None:
            raise TraceConflict("A trace of this model is being recorded.", hint="POST /stop_profile writes it.")
        if not _RECORDING.acquire(blocking=False):
            why = "PyTorch records one trace at a time."
            raise TraceConflict("A trace of another model is being recorded.", why, "POST /stop_profile?model=NAME")
        try:
            gpu = (ProfilerActivity.CUDA,) if self._on_gpu else ()
            trace = profile(activities=[ProfilerActivity.CPU, *gpu])
            trace.start()
        except BaseException:
            _RECORDING.release()
            raise
        self._trace = trace

    def stop(self) -> Callable[[str], Path]:
        """End the trace. Return a function that writes it for a model's name and returns the file's path. It may take
        seconds, so call it on another thread. Raises `TraceConflict` if no trace is being recorded."""
        trace, self._trace = self._trace, None
        if trace is None:
            raise TraceConflict("No trace of this model is being recorded.", hint="POST /start_profile begins one.")
        try:
            trace.stop()
        finally:
            _RECORDING.release()
        return lambda name: self._write(trace, name)

    def drop(self) -> None:
        """End a trace without writing it, if one is being recorded."""
        if self._trace is not None:
            self.stop()

    def _write(self, trace: profile, name: str) -> Path:
        safe = re.sub(r"[^\w.-]+", "-", name).strip(".-")
        paths = (self._folder / f"localllm-{safe}-{number}.json.gz" for number in count(1))
        path = next(paths)
        with translated_write("The trace", path, param="torch_profiler_dir"):
            while True:
                try:
                    path.touch(exist_ok=False)  # two traces that are written at the same time get two numbers
                    break
                except FileExistsError:
                    path = next(paths)
            trace.export_chrome_trace(str(path))
        return path

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        with record_function(name):
            if self._on_gpu:
                torch.cuda.nvtx.range_push(name)
            try:
                yield
            finally:
                if self._on_gpu:
                    torch.cuda.nvtx.range_pop()


class ProfiledRunner(TorchRunner):
    """A `TorchRunner` whose steps have named ranges: `step: ...` until its launch, in it `forward` and `sample`."""

    profiler: StepProfiler

    def __init__(self, *model: Any, profiler: StepProfiler, **sizes: Any) -> None:
        super().__init__(*model, **sizes)
        self.profiler, self._step = profiler, ExitStack()

    def forward(self, plan: StepPlan) -> None:
        self._step.close()  # of a step whose `sample` was never called
        self._step.enter_context(self.profiler.range(_words(plan)))
        with self.profiler.range("forward"):
            super().forward(plan)

    def sample(self, plan: StepPlan, masks: TokenMasks | None = None) -> PendingStep:
        with self._step, self.profiler.range("sample"):
            return super().sample(plan, masks)

    def reset(self) -> None:
        self._step.close()
        super().reset()

    def close(self) -> None:
        self._step.close()
        self.profiler.drop()
        super().close()


def _words(plan: StepPlan) -> str:
    """Return a step's name."""
    prompt = sum(row.num_scheduled_tokens for row in plan.rows if not row.is_decode)
    return f"step: {sum(row.is_decode for row in plan.rows)} decodes, {prompt} prompt tokens"
