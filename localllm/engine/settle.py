"""Apply the results of a step to its requests: accept tokens, end requests, report outputs.

Each row of the step is settled by itself. A row that fails ends its own request, and the other rows are settled
normally; a row with NaN also makes the table forget the prefix cache.
Does not know: how a step is planned, torch, text, threads.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from localllm.engine.outputs import HANDED_OVER, EngineOutput
from localllm.engine.recorder import now_s
from localllm.engine.request import Request, State
from localllm.engine.request_table import RequestTable
from localllm.engine.speculation import Speculation
from localllm.engine.step import Row, RowResult, StepPlan, StepResult, TokenLogprobs
from localllm.errors import LocalLLMError, RequestError, StepFailed

log = logging.getLogger(__name__)


class LaunchedStep(NamedTuple):
    """A planned step whose result is not settled yet."""

    plan: StepPlan
    requests: tuple[Request, ...]  # in the order of plan.rows; objects, since an id may be reused


def settle_step(
    table: RequestTable, step: LaunchedStep, result: StepResult, speculation: Speculation | None = None
) -> list[EngineOutput]:
    """Settle every row of the step, and return the outputs. Rows of requests that ended since are dropped.

    speculation: is told what became of the drafts.
    """
    started_s = now_s()
    plan, requests = step
    assert result.step_id == plan.step_id, f"step {result.step_id} came back before step {plan.step_id}"
    assert len(result.rows) == len(requests), f"{len(result.rows)} results for {len(requests)} rows"
    for request, row in zip(requests, plan.rows, strict=True):
        request.num_in_flight_tokens -= row.num_scheduled_tokens
    outputs, generated = [], 0
    for request, row, row_result in zip(requests, plan.rows, result.rows, strict=True):
        if row_result.fault == "model":
            table.cache.forget_all(table.running)
        if request.state is State.FINISHED:
            continue
        if speculation is not None:
            speculation.settle(request, row, row_result)
        try:
            output = _settle_row(table, request, row, row_result, started_s)
        except Exception as error:
            output = table.finish_with_error(request, as_localllm_error(error, request))
        if output is not None:
            outputs.append(output)
            generated += len(output.token_ids)
    timings = result.timings
    try:
        encoded_rows = sum(each.rows for each in plan.encodes)
        table.recorder.on_settled(plan.step_id, generated, timings, now_s() - started_s, encoded_rows)
    except Exception:
        log.exception("statistics of a step were not recorded step=%d", plan.step_id)
    return outputs


def _settle_row(table: RequestTable, request: Request, row: Row, result: RowResult, at_s: float) -> EngineOutput | None:
    if result.error is not None:
        return table.finish_with_error(request, _error_of(table, result))
    if result.prompt_logprobs:
        known = len(request.prompt_logprobs)  # positions 1 .. known are scored: after a preemption, not twice
        request.prompt_logprobs += result.prompt_logprobs[max(0, known - row.num_computed_tokens) :]
    done = _prompt_tokens_done(request, row) if request.reports_progress else None
    if not row.samples:
        return None if done is None else _progress(request, done)
    if request.state is State.RUNNING:  # otherwise it was preempted since, and its counters were reset
        request.num_output_placeholders -= 1 + row.num_drafts
        request.num_computed_tokens -= 1 + row.num_drafts - len(result.token_ids)
        request.num_proposed, request.proposed = result.num_proposed, result.proposed
        request.num_accepted, request.are_predicted = len(result.token_ids), result.are_predicted
        if result.num_proposed:
            request.last_proposed = request.num_output_tokens
    if not result.token_ids:
        return table.finish_with_error(request, StepFailed("The runner returned no token for this request."))
    first = request.first_token_s is None
    if request.is_redrawn:  # drawn behind a token that its grammar refused
        return None if done is None else _progress(request, done)
    drawn, result = result.token_ids, _with_forced_end(request, result)
    kept, finish_reason, stop_reason = _accept(request, result.token_ids)
    if finish_reason == "stop" and result.token_ids[:kept] != drawn[:kept]:
        finish_reason = "length"
    if kept < len(result.token_ids) and finish_reason is None:
        request.is_redrawn = True
        if request.state is State.RUNNING:
            table.preempt(request)
    if not kept:
        return None if done is None else _progress(request, done)
    table.recorder.on_tokens(request, kept, at_s)
    if finish_reason == "length" and request.options.hands_over:
        table.finish(request, HANDED_OVER)
        finish_reason = None  # its last output follows its blocks
    elif finish_reason is not None:
        table.finish(request, finish_reason)
    return EngineOutput(
        request.request_id,
        result.token_ids[:kept],
        result.logprobs[:kept],
        tuple(request.prompt_logprobs) if first and request.params.prompt_logprobs is not None else None,
        finish_reason,
        stop_reason,
        request.num_cached_tokens,
        request.scheduled_s or 0.0,
        done,
        drafts=request.acceptance.counts,
        cache_miss=request.cache_miss,
    )


def _with_forced_end(request: Request, result: RowResult) -> RowResult:
    """Return the result with the end as the last token that a request may have, of models that were trained so (BART):
    its log probability is then 0."""
    last = request.max_output_tokens - request.num_output_tokens - 1  # its place among the row's tokens
    end = None if request.source is None else request.source.forced_end
    is_free = request.grammar is None and not request.params.ignore_eos
    if end is None or not is_free or last >= len(result.token_ids) or result.token_ids[last] == end:
        return result
    token_ids, logprobs = list(result.token_ids), list(result.logprobs)
    token_ids[last] = end
    if logprobs:
        shown = logprobs[last]
        logprobs[last] = TokenLogprobs((end, *shown.token_ids[1:]), (0.0, *shown.logprobs[1:]), shown.rank)
    return result._replace(token_ids=tuple(token_ids), logprobs=tuple(logprobs))


def _prompt_tokens_done(request: Request, row: Row) -> int | None:
    """Return the computed prompt tokens;
    None after the first token, since a recomputation is not progress of the prompt."""
    done = min(row.num_computed_tokens + row.num_scheduled_tokens, request.prompt_len)
    return done if request.first_token_s is None else None


def _accept(request: Request, token_ids: tuple[int, ...]) -> tuple[int, str | None, int | None]:
    """Append tokens until one of them ends the request. Return (tokens kept, finish reason, stop token).

    A token that its grammar refuses was drawn before the host saw that the grammar begins. It is drawn again, with its
    mask, after the request has been preempted: rows in flight behind it are void, and KV is found in the prefix cache.
    """
    for kept, token_id in enumerate(token_ids, start=1):
        if request.grammar is not None and request.grammar.refuses(token_id):
            return kept - 1, None, None
        request.token_ids.append(token_id)
        output_len = len(request.token_ids) - request.prompt_len
        if token_id in request.stop_token_ids and output_len >= request.params.min_tokens:
            is_eos = token_id in request.eos_token_ids and not request.params.ignore_eos
            return kept, "stop", None if is_eos else token_id
        if request.grammar is not None:
            request.grammar.accept(token_id)
            if request.grammar.is_over:
                return kept, "stop", None
        if output_len >= request.max_output_tokens:
            return kept, "length", None
    return len(token_ids), None, None


def _error_of(table: RequestTable, result: RowResult) -> LocalLLMError:
    why = result.error or ""
    if result.fault == "model":
        table.recorder.corrupted_requests += 1
        return StepFailed("The model produced no usable logits for this request.", why)
    if result.fault == "request":
        return RequestError(
            "The answer cannot continue.", why, "Send a smaller request; the same one would fail again."
        )
    return StepFailed("This request could not be computed.", why, "The other requests were not affected.")


def _progress(request: Request, done: int) -> EngineOutput:
    """Return the output of a step that advanced the prompt and produced no token."""
    return EngineOutput(
        request.request_id,
        num_cached_tokens=request.num_cached_tokens,
        scheduled_s=request.scheduled_s or 0.0,
        num_prompt_tokens_done=done,
    )


def as_localllm_error(error: BaseException, request: Request | None = None) -> LocalLLMError:
    """Return the exception as the error of the requests that it ended. A foreign exception of one request is logged."""
    if isinstance(error, LocalLLMError):
        return error
    if request is not None:
        log.error("request failed id=%s", request.request_id, exc_info=error)
    return StepFailed(
        "The step that carried this request failed.",
        f"{type(error).__name__}: {error}",
        "Send the request again: the engine is still running. The log has the details.",
    )
