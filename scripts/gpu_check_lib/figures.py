"""The figures: decode steps, prefill, whole workloads, gaps between steps; each with its lower bound (floor).

A figure's floor comes from the ceilings of the same run. Targets only apply to the GPU they were set for; on others
figures are printed without judgement. Cases that do not fit into the GPU's free memory are skipped, with both numbers.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence

import torch

from localllm.engine.params import SamplingParams
from localllm.models.spec.model_spec import ModelSpec
from localllm.tuning.workload import Workload, chat_lengths, fixed_lengths
from localllm.units import format_bytes
from scripts.gpu_check_lib.activity import Activity, idle_share, record
from scripts.gpu_check_lib.ceilings import read_ceilings
from scripts.gpu_check_lib.engine import GREEDY, Options, RandomEngine, StepTimes, bytes_needed
from scripts.gpu_check_lib.roofline import (
    ASKED_OF,
    CRITICAL_PATH_S,
    CROWD_TOKENS_PER_S,
    GOALS,
    IDLE_GAP,
    OFFLINE_TOKENS_PER_S,
    Ceilings,
    Goal,
    Work,
    work_of,
)
from scripts.gpu_check_lib.stages import Context, Found, Skip, Verdict
from scripts.random_weights import shape_spec

DECODE_STEPS = 256
GAP_STEPS = 40
CROWD = 256  # concurrent requests
OFFLINE, OFFLINE_SEQS = 1000, 512  # requests at once, and how many of them run
DEFAULT_SAMPLING = SamplingParams(temperature=0.7, top_k=20, top_p=0.95, seed=1)


def figures_of(shape: str, weights: str) -> Callable[[Context], Iterator[Found]]:
    """Return a stage for all goals of one shape in one format, with one model in memory."""
    goals = goals_of(shape, weights)

    def run(context: Context) -> Iterator[Found]:
        spec, ceilings = shape_spec(shape), read_ceilings(context)
        work, device = work_of(spec), torch.device(context.device)
        fitting, refused = _fitting(goals, spec, work, device)
        for goal, why in refused:
            yield goal.name, "skipped", f"{goal.what}: {why}"
        if not fitting:
            return
        engine = RandomEngine(spec, options_for(fitting, device, dtype_of(device)))
        yield graphs(engine)
        for goal in fitting:
            if goal.kind == "decode":
                seen: list[Activity] = []
                watched = goal.batch >= 16 and goal.context == 1024
                then = (lambda step, into=seen: into.extend(record(step, GAP_STEPS))) if watched else None
                times = engine.decode(goal.batch, goal.context, DECODE_STEPS, then=then)
                yield judge_decode(goal, times, work, ceilings, context.gpu)
                yield from _judge_host(goal, times, context.gpu)
                if watched:
                    yield judge_gap(goal, idle_share(seen) if seen else None, context.gpu)
            else:
                yield judge_prefill(goal, engine.prefill(goal.context), work, ceilings, context.gpu)
        yield late_work(engine)
        engine.close()

    return run


def goals_of(shape: str, weights: str) -> list[Goal]:
    return [goal for goal in GOALS if (goal.shape, goal.weights) == (shape, weights)]


def crowd(context: Context) -> Iterator[Found]:
    """Measure G13: 256 concurrent requests on a small model, long answers, then long prompts; also sampled."""
    spec, device = shape_spec("qwen2.5-0.5b"), torch.device(context.device)
    work, ceilings = work_of(spec), read_ceilings(context)
    options = Options(device, dtype_of(device), max_num_seqs=CROWD, max_model_len=2048, num_kv_tokens=CROWD * 1200)
    require_memory(spec, options, work, "16-bit")
    engine = RandomEngine(spec, options)
    yield graphs(engine)
    for tokens_in, tokens_out in CROWD_TOKENS_PER_S:
        workload = fixed_lengths(2 * CROWD, tokens_in, tokens_out, vocab_size=spec.vocab_size)
        yield judge_crowd(workload, engine.run(workload), work, ceilings, context.gpu)
    for name, sampling in {"greedy": GREEDY, "top_k 20, top_p 0.95": DEFAULT_SAMPLING}.items():
        for batch in (1, CROWD):
            times = engine.decode(batch, 512, 64, sampling=sampling)
            yield f"{name}, batch {batch}", "note", f"{times.step_s * 1e3:.3f} ms a step", {"step_s": times.step_s}
    yield late_work(engine)
    engine.close()


def offline(context: Context) -> Iterator[Found]:
    """Measure G12, the engine alone: 1,000 chat-like requests at once, at most 512 running."""
    spec, device = shape_spec("llama-3.1-8b"), torch.device(context.device)
    workload = chat_lengths(OFFLINE, vocab_size=spec.vocab_size)
    work = work_of(spec)
    options = Options(device, dtype_of(device), max_num_seqs=OFFLINE_SEQS, max_model_len=4096,
                      num_kv_tokens=OFFLINE_SEQS * 450)  # fmt: skip
    require_memory(spec, options, work, "16-bit")
    engine = RandomEngine(spec, options)
    engine.run(chat_lengths(64, seed=1, vocab_size=spec.vocab_size))
    yield judge_offline(workload, engine.run(workload), work, read_ceilings(context), context.gpu)
    yield late_work(engine)
    engine.close()


# ---- verdicts: arithmetic, no device ---------------------------------------------------------------------------------


def judge_decode(goal: Goal, times: StepTimes, work: Work, ceilings: Ceilings | None, gpu: str) -> Found:
    text = f"{goal.what}: {times.step_s * 1e3:.3f} ms a step, {times.tokens_per_s:,.0f} tok/s"
    data = {"step_s": times.step_s, "median_s": times.median_s, "critical_s": times.critical_s,
            "tokens_per_s": times.tokens_per_s, "context": times.context, "batch": times.batch}  # fmt: skip
    if ceilings is None:
        return goal.name, "note", text, data
    floor_s = work.decode_s(goal.batch, times.context, ceilings, goal.weights)
    fraction = floor_s / times.step_s
    text += f"; floor {floor_s * 1e3:.3f} ms: {fraction:.0%}{_asked(f'{goal.asked_fraction:.0%}', gpu)}"
    return goal.name, verdict(fraction >= goal.asked_fraction, gpu), text, {**data, "floor_s": floor_s}


def judge_prefill(goal: Goal, seconds: float, work: Work, ceilings: Ceilings | None, gpu: str) -> Found:
    text = f"{goal.what}: {seconds * 1e3:,.1f} ms, {goal.context / seconds:,.0f} tok/s"
    if ceilings is not None:
        floor_s = work.prefill_s(goal.context, ceilings, goal.weights)
        text += f"; floor {floor_s * 1e3:,.1f} ms: {floor_s / seconds:.0%}"
    assert goal.asked_ms is not None
    text += _asked(f"at most {goal.asked_ms:,.0f} ms", gpu)
    return goal.name, verdict(seconds * 1e3 <= goal.asked_ms, gpu), text, {"seconds": seconds}


def judge_gap(goal: Goal, idle: float | None, gpu: str) -> Found:
    if idle is None:
        return "G15", "skipped", f"batch {goal.batch}: torch's profiler shows no GPU activity here."
    text = f"batch {goal.batch}: the GPU idles {idle:.1%} of the time between its kernels"
    return "G15", verdict(idle <= IDLE_GAP, gpu), text + _asked(f"at most {IDLE_GAP:.0%}", gpu), {"idle": idle}


def judge_offline(workload: Workload, seconds: float, work: Work, ceilings: Ceilings | None, gpu: str) -> Found:
    rate = workload.output_tokens / seconds
    text = f"{len(workload.requests)} chat-like requests at once: {rate:,.0f} output tok/s in {seconds:.1f} s"
    if ceilings is not None:
        floor_s = work.workload_s(workload, ceilings)
        text += f"; floor {floor_s:.1f} s: {floor_s / seconds:.0%}"
    text += _asked(f"at least {OFFLINE_TOKENS_PER_S:,.0f}", gpu)
    return "G12", verdict(rate >= OFFLINE_TOKENS_PER_S, gpu), text, {"tokens_per_s": rate, "seconds": seconds}


def judge_crowd(workload: Workload, seconds: float, work: Work, ceilings: Ceilings | None, gpu: str) -> Found:
    first = workload.requests[0]
    lengths = len(first.prompt_token_ids), first.max_tokens
    rate, asked = workload.output_tokens / seconds, CROWD_TOKENS_PER_S[lengths]
    text = f"{CROWD} at a time, {lengths[0]} in, {lengths[1]} out: {rate:,.0f} output tok/s"
    if ceilings is not None:
        text += f"; arithmetic alone would take {work.workload_s(workload, ceilings) / seconds:.0%} of the time"
    return "G13", verdict(rate >= asked, gpu), text + _asked(f"at least {asked:,.0f}", gpu), {"tokens_per_s": rate}


def graphs(engine: RandomEngine) -> Found:
    """Report the cost of capturing graphs, for which the memory plan must leave room."""
    stats = engine.runner.stats()
    data = {"captured": stats.captured_graphs, "seconds": engine.capture_s, "bytes": engine.capture_bytes}
    text = f"{stats.captured_graphs} captured in {engine.capture_s:.1f} s, {format_bytes(engine.capture_bytes)}"
    return "graphs", "note", text, data


def verdict(reached: bool, gpu: str) -> Verdict:
    """Return the verdict. Only the GPU that a target was set for can miss it."""
    return "note" if ASKED_OF not in gpu else "ok" if reached else "missed"


def late_work(engine: RandomEngine) -> Found:
    """Check that no kernel was compiled and no memory allocated after the engine was ready."""
    stats = engine.runner.stats()
    text = f"after ready: {stats.late_compiles} kernels compiled, {stats.late_allocations} allocations"
    return "late work", "failed" if stats.late_compiles or stats.late_allocations else "ok", text


def _judge_host(goal: Goal, times: StepTimes, gpu: str) -> Iterator[Found]:
    if goal.batch != 1 or goal.context != 1024:
        return
    text = f"{goal.what}: the host works {times.critical_s * 1e3:.3f} ms a step"
    judged = verdict(times.critical_s <= CRITICAL_PATH_S, gpu)
    yield "G15", judged, text + _asked(f"at most {CRITICAL_PATH_S * 1e3:.1f} ms", gpu), {"critical_s": times.critical_s}


def _asked(what: str, gpu: str) -> str:
    return f" (target: {what})" if ASKED_OF in gpu else f" (target for an {ASKED_OF}: {what})"


# ---- on the device ---------------------------------------------------------------------------------------------------


def options_for(goals: Sequence[Goal], device: torch.device, dtype: torch.dtype) -> Options:
    """Return options for one engine with room for each of the goals in turn."""
    steps = 2 * DECODE_STEPS + 64  # measured steps, and those during prefills before all requests decode
    tokens = max(goal.batch * (goal.context + steps) for goal in goals)
    return Options(
        device,
        dtype,
        max_num_seqs=max(goal.batch for goal in goals),
        max_model_len=max(goal.context for goal in goals) + steps,
        num_kv_tokens=tokens,
        weights=goals[0].weights,  # type: ignore[arg-type]
    )


def _fitting(
    goals: Sequence[Goal], spec: ModelSpec, work: Work, device: torch.device
) -> tuple[list[Goal], list[tuple[Goal, str]]]:
    fitting: list[Goal] = []
    refused = []
    for goal in goals:
        options = options_for([*fitting, goal], device, dtype_of(device))
        try:
            require_memory(spec, options, work, goal.weights)
            fitting.append(goal)
        except Skip as reason:
            refused.append((goal, str(reason)))
    return fitting, refused


def require_memory(spec: ModelSpec, options: Options, work: Work, weights: str) -> None:
    gc.collect()
    if options.device.type != "cuda":
        return
    free = torch.cuda.mem_get_info(options.device)[0]
    needed = bytes_needed(spec, options, work.weight_bytes(weights))
    if needed > free:
        raise Skip(f"Needs {format_bytes(int(needed))}; {format_bytes(free)} are free.")


def dtype_of(device: torch.device) -> torch.dtype:
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
