"""Percentiles are exact over the window; counters and buckets count what they say."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import SloTargets
from engine.stats import Histogram, Rate, RequestTimes, SlidingWindow, Stats


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 100)), min_size=1, max_size=80), st.integers(1, 99))
def test_percentiles_equal_a_sort_of_what_is_in_the_window(samples: list[tuple[float, float]], p: int) -> None:
    window, now, inside = SlidingWindow(seconds=10.0), 0.0, []
    for gap, value in samples:
        now += gap
        window.add(now, value)
        inside.append((now, value))
    summary = window.summary(now)
    values = sorted(value for time, value in inside if time >= now - 10.0)
    assert summary["count"] == len(values)
    assert window.percentile(p) == values[max(0, math.ceil(len(values) * p / 100) - 1)]


def test_a_full_window_says_how_far_it_reaches() -> None:
    window = SlidingWindow(seconds=100.0, max_samples=10)
    for second in range(20):
        window.add(float(second), float(second))
    summary = window.summary(20.0)
    assert summary["count"] == 10
    assert summary["window_seconds"] == 10.0
    assert summary["p50"] == 14.0


def test_an_empty_window_has_no_percentiles() -> None:
    assert SlidingWindow().summary(0.0)["p95"] is None


def test_a_rate_forgets() -> None:
    rate = Rate(10.0)
    for second in range(10):
        rate.add(float(second), 5)
    assert rate.per_second(10.0) == pytest.approx(5.0)
    assert rate.per_second(30.0) == 0.0


def test_histogram_buckets_are_cumulative() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2), ("2.0", 3), ("+Inf", 4)]
    assert histogram.sum == 12.0


def test_own_buckets_reach_from_a_millisecond_to_two_hours() -> None:
    histograms = Stats(SloTargets()).histograms
    assert histograms["inter_token_latency_seconds"].bounds[0] == 0.001
    assert histograms["time_to_first_token_seconds"].bounds[0] == 0.01
    assert histograms["time_to_first_token_seconds"].bounds[-1] == 7200.0


def test_a_request_counts_once_and_its_gaps_each() -> None:
    stats = Stats(SloTargets(ttft_p95_seconds=1.0, itl_p95_seconds=0.5, e2e_p95_seconds=None))
    times = RequestTimes(arrival=10.0, num_prompt_tokens=3)
    stats.record_seated(times, 10.1)
    for now in (10.5, 10.6, 10.8):
        stats.record_token(times, now)
    stats.record_finish(times, 10.8, "stop")
    assert stats.interactive.windows["ttft"].percentile(50) == pytest.approx(0.5)
    assert stats.interactive.windows["itl"].summary(11.0)["count"] == 2
    assert stats.interactive.windows["tpot"].percentile(50) == pytest.approx(0.15)
    assert stats.finished == {"stop": 1}
    assert stats.interactive.attainment(11.0) == {"ttft": 1.0, "itl": 1.0, "e2e": None}


def test_a_request_misses_a_target_when_too_many_gaps_are_long() -> None:
    stats = Stats(SloTargets(ttft_p95_seconds=1.0, itl_p95_seconds=0.1, e2e_p95_seconds=None))
    times = RequestTimes(arrival=0.0)
    stats.record_seated(times, 0.0)
    for token in range(10):
        stats.record_token(times, 0.05 * token + (1.0 if token == 9 else 0.0))
    stats.record_finish(times, 2.0, "length")
    assert stats.interactive.attainment(2.0)["itl"] == 0.0
    assert stats.interactive.good_rate.per_second(2.0) == 0.0


def test_an_abort_is_counted_by_cause_and_phase() -> None:
    stats = Stats(SloTargets())
    stats.record_finish(RequestTimes(arrival=0.0), 1.0, "abort", "client")
    seated = RequestTimes(arrival=0.0, seated=0.5)
    stats.record_finish(seated, 1.0, "abort", "timeout")
    assert stats.aborted == {("client", "queued"): 1, ("timeout", "prefill"): 1}
    assert stats.interactive.windows["e2e"].summary(1.0)["count"] == 0


def test_each_class_of_work_has_its_own_windows_and_targets_and_all_count_in_the_histograms() -> None:
    stats = Stats(SloTargets(ttft_p95_seconds=1.0), SloTargets(ttft_p95_seconds=9.0, itl_p95_seconds=None))
    for background in (False, True, True):
        times = RequestTimes(0.0, background)
        stats.record_seated(times, 1.0)
        stats.record_token(times, 5.0)
        stats.record_finish(times, 5.0, "stop")
    assert stats.interactive.windows["ttft"].summary(5.0)["count"] == 1
    assert stats.background.windows["ttft"].summary(5.0)["count"] == 2
    assert stats.interactive.attainment(5.0)["ttft"] == 0.0
    assert stats.background.attainment(5.0) == {"ttft": 1.0, "itl": None, "e2e": None}
    assert stats.histograms["time_to_first_token_seconds"].cumulative()[-1] == ("+Inf", 3)
    assert stats.finished["stop"] == 3
