"""An engine around a model of random weights, driven directly: the server's scheduler, loop and runner, without HTTP.

    engine = RandomEngine(shape_spec("llama-3.1-8b"), options)
    engine.decode(batch=16, context=1024, steps=256)       seconds per step, all rows decoding
    engine.prefill(8192)                                   seconds of one prompt
    engine.generate(requests)                              the outputs of each request

It also works on a CPU, with the kernels' plain-torch twins, for its tests.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from localllm.engine.loop import EngineLoop
from localllm.engine.memory.block_names import BlockHasher
from localllm.engine.memory.cache_manager import CacheManager
from localllm.engine.memory.ledger import Ledger
from localllm.engine.memory.state_pool import StatePool
from localllm.engine.outputs import EngineOutput
from localllm.engine.params import SamplingParams
from localllm.engine.request import Request
from localllm.engine.scheduler import Scheduler
from localllm.engine.scheduler_config import SchedulerConfig
from localllm.engine.speculation import Speculation
from localllm.engine.step import PendingStep, Runner, StepPlan, StepResult, TokenMasks
from localllm.kernels.launch import DEFAULTS, LaunchOptions
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.drafters.drafter import Drafter
from localllm.models.spec.model_spec import ModelSpec, kv_groups, kv_numbers_per_token, state_group
from localllm.runner.drafter_steps import OpenDrafter
from localllm.runner.graphs import Capture, CudaCapture
from localllm.runner.kv_cache import KVCache, StateCache
from localllm.runner.runner import TorchRunner
from localllm.tuning.workload import PromptSource, Workload
from scripts.random_weights import WeightFormat, random_model

WARM_UP_STEPS = 16
GREEDY = SamplingParams(temperature=0.0)
Graphs = Literal["replayed", "padded", "none"]
"""replayed: the default on a GPU. padded: the captured shapes, launched kernel by kernel. none: unpadded steps."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to serve. On a GPU: blocks of 64, two steps in flight, graphs."""

    device: torch.device
    dtype: torch.dtype
    max_num_seqs: int
    max_model_len: int
    num_kv_tokens: int  # tokens that all requests can hold together
    weights: WeightFormat = "16-bit"
    max_num_batched_tokens: int = 8192
    block_size: int = 64
    depth: int = 2
    graphs: Graphs = "replayed"
    prefix_caching: bool = False
    max_prefill_beside_decodes: int = 0  # long_prefill_token_threshold
    seed: int = 0
    launch: LaunchOptions = DEFAULTS
    most_drafts: int = 0  # of a request at a time; 0: no speculation

    @property
    def num_blocks(self) -> int:
        """Blocks for the tokens, one more per request for its partly filled last block, and the null block."""
        return -(-self.num_kv_tokens // self.block_size) + self.max_num_seqs + 1

    @property
    def num_places(self) -> int:
        """Places of recurrent states: one for each request, a checkpoint for each, and the null place."""
        return 2 * self.max_num_seqs + 1


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of decode steps in which every row took part."""

    step_s: float  # mean
    median_s: float
    critical_s: float  # median time of the host's own work, without waiting for the device
    context: float  # mean tokens before each query
    batch: int
    tokens: float  # per step, of all requests; without drafts one each

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s


@dataclass(slots=True)
class _Waits:
    """Total time the loop has waited for results."""

    seconds: float = 0.0


class _TimedStep:
    def __init__(self, pending: PendingStep, waits: _Waits) -> None:
        self._pending, self._waits = pending, waits

    def result(self) -> StepResult:
        started_s = time.perf_counter()
        answer = self._pending.result()
        self._waits.seconds += time.perf_counter() - started_s
        return answer


class TimedRunner:
    """A `Runner` that measures how long its results were waited for."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.waits = runner, _Waits()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def sample(self, plan: StepPlan, masks: TokenMasks | None = None) -> PendingStep:
        return _TimedStep(self.runner.sample(plan, masks), self.waits)


@dataclass(slots=True)
class _Told:
    """Outputs delivered since the last `take`."""

    outputs: list[EngineOutput] = field(default_factory=list)

    def __call__(self, outputs: list[EngineOutput]) -> None:
        self.outputs += outputs

    def take(self) -> list[EngineOutput]:
        outputs, self.outputs = self.outputs, []
        return outputs


class RandomEngine:
    """One model, one KV cache, one loop on the caller's thread."""

    def __init__(
        self, spec: ModelSpec, options: Options, *, model: DecoderModel | None = None, drafter: Drafter | None = None,
        num_drafts: int = 4,
    ) -> None:  # fmt: skip
        """model: use this one, made for the same spec, device and dtype. drafter: with weights, for `num_drafts`
        drafts at a time."""
        self.spec, self.options = spec, options
        o = options
        self.model = model or random_model(
            spec, o.device, o.dtype, weights=o.weights, max_model_len=o.max_model_len, seed=o.seed
        )
        groups = kv_groups(spec)
        num_blocks = (o.num_blocks,) * len(groups)
        kv_dtype = str(o.dtype).removeprefix("torch.")
        kv = KVCache(spec, num_blocks, o.block_size, o.device, kv_dtype)
        states = StateCache(spec, o.num_places, o.device, o.dtype)
        opened = None
        if drafter is not None:
            blocks = (o.num_blocks,) * len(kv_groups(drafter.spec))
            opened = OpenDrafter(drafter, KVCache(drafter.spec, blocks, o.block_size, o.device, kv_dtype), num_drafts)
        self.runner = TimedRunner(_runner(self.model, spec, kv, states, o, opened))
        started_s, free_bytes = time.perf_counter(), self._free_bytes()
        self.runner.warm_up()
        while self.runner.use_idle_time():
            pass
        self.capture_s = time.perf_counter() - started_s
        self.capture_bytes = free_bytes - self._free_bytes()  # graphs, their pool, libraries' workspaces
        config = SchedulerConfig(
            max_num_seqs=o.max_num_seqs,
            max_num_batched_tokens=o.max_num_batched_tokens,
            max_model_len=o.max_model_len,
            block_size=o.block_size,
            long_prefill_token_threshold=o.max_prefill_beside_decodes,
            max_num_queued_reqs=1 << 20,
            enable_prefix_caching=o.prefix_caching,
            output_reserve=0.0,  # run batches of exactly the requested size
        )
        windows = [group.window for group in groups]
        self.speculation = Speculation(self.runner.drafts, most=o.most_drafts)
        cache = CacheManager(
            config,
            Ledger(num_blocks, o.block_size, windows, step_tokens=o.max_num_batched_tokens),
            BlockHasher(b"random", o.block_size),
            StatePool(states.num_places) if states.num_places else None,
        )
        self.scheduler = Scheduler(config, cache, speculation=self.speculation if self.speculation.most else None)
        self._told = _Told()
        self.loop = EngineLoop(self.scheduler, self.runner, depth=o.depth, deliver=self._told)
        self._names = itertools.count()
        self.prompts = PromptSource(options.seed, spec.vocab_size)

    def close(self) -> None:
        self.runner.close()

    # ---- measuring ---------------------------------------------------------------------------------------------------

    def decode(self, batch: int, context: int, steps: int, then: Callable[[Callable[[], None]], None] | None = None,
               sampling: SamplingParams = GREEDY) -> StepTimes:  # fmt: skip
        """Return the mean over `steps` steps in which `batch` requests decode with `context` preceding tokens on
        average.

        then(step): run more of these steps after the timed ones, for example inside a profiler.
        """
        length = max(1, context - WARM_UP_STEPS - steps // 2)
        requests = [self._request(length, self.options.max_model_len - length, sampling=sampling) for _ in range(batch)]
        self.loop.submit(*requests)
        while self.scheduler.waiting or any(request.num_output_tokens == 0 for request in requests):
            self._step()
        for _ in range(WARM_UP_STEPS):
            self._step()
        before = sum(request.num_tokens for request in requests)
        walls, hosts = self._timed_steps(steps)
        after = sum(request.num_tokens for request in requests)
        assert after - before >= batch * steps, "every request decodes in every step"
        if then is not None:
            then(self._step)
        self._end(requests)
        mean_s, context_now, tokens = sum(walls) / len(walls), (before + after) / 2 / batch, (after - before) / steps
        return StepTimes(mean_s, statistics.median(walls), statistics.median(hosts), context_now, batch, tokens)

    def prefill(self, tokens: int, repeats: int = 3) -> float:
        """Return the median seconds from a prompt's arrival to its first token, alone."""
        times = []
        for _ in range(repeats + 1):  # the first one compiles and fills caches
            self._synchronize()
            started_s = time.perf_counter()
            self.generate([self._request(tokens, 1)])
            times.append(time.perf_counter() - started_s)
        return statistics.median(times[1:])

    def run(self, workload: Workload) -> float:
        """Return the seconds for all requests of a workload, submitted at once."""
        requests = [self._request(0, r.max_tokens, r.prompt_token_ids) for r in workload.requests]
        self._synchronize()
        started_s = time.perf_counter()
        answers = self.generate(requests)
        seconds = time.perf_counter() - started_s
        got = sum(len(output.token_ids) for outputs in answers.values() for output in outputs)
        assert got == workload.output_tokens, (got, workload.output_tokens)
        return seconds

    def generate(self, requests: Sequence[Request]) -> dict[str, list[EngineOutput]]:
        """Run requests; return the outputs of each by its id."""
        answers: dict[str, list[EngineOutput]] = {request.request_id: [] for request in requests}
        self.loop.submit(*requests)
        while True:
            self.loop.step()
            for output in self._told.take():
                if output.error is not None:
                    raise output.error
                answers[output.request_id].append(output)
            if not self.scheduler.has_work:
                return answers

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def _request(
        self, length: int, max_tokens: int, prompt: Sequence[int] | None = None, sampling: SamplingParams = GREEDY
    ) -> Request:
        params = replace(sampling, max_tokens=max_tokens, ignore_eos=True)
        prompt = self.prompts.prompt(length) if prompt is None else prompt
        return Request(f"r{next(self._names)}", prompt, params, max_output_tokens=max_tokens)

    def _step(self) -> None:
        self.loop.step()
        for output in self._told.take():
            if output.error is not None:
                raise output.error

    def _timed_steps(self, steps: int) -> tuple[list[float], list[float]]:
        """Return the wall seconds, and the seconds not spent waiting, of each step."""
        walls, hosts, waits = [], [], self.runner.waits
        for _ in range(steps):
            waited_s, started_s = waits.seconds, time.perf_counter()
            self._step()
            walls.append(time.perf_counter() - started_s)
            hosts.append(walls[-1] - (waits.seconds - waited_s))
        return walls, hosts

    def _end(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.loop.cancel(request.request_id)
        self._step()
        while self.scheduler.has_work:
            self._step()

    def _synchronize(self) -> None:
        if self.options.device.type == "cuda":
            torch.cuda.synchronize()

    def _free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.options.device)[0]) if self.options.device.type == "cuda" else 0


def _runner(
    model: DecoderModel, spec: ModelSpec, kv: KVCache, states: StateCache, options: Options,
    drafter: OpenDrafter | None,
) -> TorchRunner:  # fmt: skip
    capture: Capture | None = None
    if options.graphs == "padded":
        capture = run_again
    elif options.graphs == "replayed" and options.device.type == "cuda":
        capture = CudaCapture(options.device)
    return TorchRunner(
        model,
        spec,
        kv,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=options.max_model_len,
        block_size=options.block_size,
        device=options.device,
        capture=capture,
        launch_options=options.launch,
        states=states,
        drafter=drafter,
        has_drafts=options.most_drafts > 0,
    )


def run_again(step: Callable[[], None]) -> Callable[[], None]:
    """A `Capture` that records nothing and runs the step again."""
    step()
    return step


def bytes_needed(spec: ModelSpec, options: Options, weight_bytes: float) -> float:
    """Return an upper estimate of device memory: weights, KV, recurrent states, and 3 GiB for activations, graphs and
    libraries."""
    kv = options.num_blocks * options.block_size * kv_numbers_per_token(spec) * options.dtype.itemsize
    group = state_group(spec, str(options.dtype).removeprefix("torch."))
    states = 0 if group is None else options.num_places * group.bytes_per_place
    return weight_bytes + spec.vocab_size * spec.hidden_size * 2 + kv + states + 3 * 2**30
