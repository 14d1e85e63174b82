"""The figures mean what vLLM's figures of the same names mean."""

import json

import pytest

from localllm.tuning.report import RequestTimes, distribution, quantile, summarise


def times(start_s: float = 0.0, error: str | None = None, cached: int = 0) -> RequestTimes:
    """Ten tokens: the first after 0.5 s, then one every 0.1 s."""
    return RequestTimes(
        start_s,
        start_s + 1.4,
        prompt_tokens=20,
        output_tokens=10,
        cached_tokens=cached,
        first_token_s=start_s + 0.5,
        inter_token_s=(0.1,) * 9,
        error=error,
    )


def summary(*all_times: RequestTimes, duration_s: float = 2.0):  # type: ignore[no-untyped-def]
    return summarise("serve", all_times, duration_s=duration_s, model="m", workload="w", seed=0, concurrency=2)


def test_ttft_tpot_and_e2e_of_one_request() -> None:
    one = times(start_s=100.0)
    assert one.ttft_s == pytest.approx(0.5)
    assert one.tpot_s == pytest.approx(0.1)
    assert one.e2e_s == pytest.approx(1.4)


def test_a_single_token_has_no_time_per_output_token() -> None:
    assert RequestTimes(0.0, 1.0, output_tokens=1, first_token_s=1.0).tpot_s is None


@pytest.mark.parametrize(("q", "expected"), [(0.0, 1.0), (0.5, 2.5), (0.9, 3.7), (1.0, 4.0)])
def test_quantiles_interpolate_between_neighbours(q: float, expected: float) -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0], q) == pytest.approx(expected)


def test_nothing_observed_has_no_distribution() -> None:
    assert distribution([None, None]) is None


def test_rates_count_what_succeeded_over_the_whole_duration() -> None:
    report = summary(times(), times(), times(error="status 500"))
    assert (report.num_requests, report.num_failed) == (2, 1)
    assert report.requests_per_s == pytest.approx(1.0)
    assert report.output_tokens_per_s == pytest.approx(10.0)
    assert report.total_tokens_per_s == pytest.approx(30.0)
    assert report.errors == {"status 500": 1}


@pytest.mark.parametrize(
    "line",
    [
        "Successful requests:                     2",
        "Failed requests:                         1",
        "Maximum request concurrency:             2",
        "Benchmark duration (s):                  2.00",
        "Total input tokens:                      40",
        "Total generated tokens:                  20",
        "Request throughput (req/s):              1.00",
        "Output token throughput (tok/s):         10.00",
        "Total token throughput (tok/s):          30.00",
        "Mean TTFT (ms):                          500.00",
        "Median TPOT (ms):                        100.00",
        "P99 ITL (ms):                            100.00",
        "P90 E2EL (ms):                           1400.00",
        "1 x status 500",
        "2 requests in 2.0 s: 1.00 requests/s, 10.0 tokens/s; latency mean 1.4 s, P50 1.4 s, P99 1.4 s",
    ],
)
def test_the_table_has_the_names_of_vllm_bench_serve(line: str) -> None:
    assert line in str(summary(times(), times(), times(error="status 500"))).splitlines()


def test_cached_prompt_tokens_are_never_silent() -> None:
    assert "Cached input tokens" not in str(summary(times()))
    assert "Cached input tokens:                     16" in str(summary(times(cached=16))).splitlines()


def test_the_report_is_json() -> None:
    document = json.loads(json.dumps(summary(times()).to_dict()))
    assert document["ttft"]["p99_s"] == pytest.approx(0.5)
    assert document["output_tokens_per_s"] == pytest.approx(5.0)


def test_a_run_without_streams_prints_no_empty_sections() -> None:
    report = summary(RequestTimes(0.0, 1.0, prompt_tokens=1, output_tokens=1))
    assert "TTFT" not in str(report)
    assert "E2EL" in str(report)
