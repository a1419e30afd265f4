"""Counters and buckets count what they say; how a request ended is told by class of work."""

from __future__ import annotations

import pytest

from engine.config import SloTargets
from engine.experience import course, experience
from engine.stats import Histogram, Rate, RequestTimes, Stats


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
    assert stats.interactive.windows["ttft"].summary(11.0)["p50"] == pytest.approx(0.5)
    assert stats.interactive.windows["itl"].summary(11.0)["count"] == 2
    assert stats.interactive.windows["tpot"].summary(11.0)["p50"] == pytest.approx(0.15)
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
    assert experience(stats.interactive, 2.0, 300)["slo"]["goodput_requests_per_second"] == 0.0


def test_an_abort_is_counted_by_cause_and_phase() -> None:
    stats = Stats(SloTargets())
    stats.record_finish(RequestTimes(arrival=0.0), 1.0, "abort", "client")
    seated = RequestTimes(arrival=0.0, seated=0.5)
    stats.record_finish(seated, 1.0, "abort", "timeout")
    assert stats.aborted == {("client", "queued"): 1, ("timeout", "prefill"): 1}
    assert stats.interactive.windows["e2e"].summary(1.0)["count"] == 0


def test_who_ran_out_of_time_failed_and_missed_every_target_and_who_left_is_not_counted() -> None:
    stats = Stats(SloTargets(ttft_p95_seconds=1.0, itl_p95_seconds=None, e2e_p95_seconds=10.0))
    for cause in ("timeout", "timeout", "queue_timeout", "client", "admin"):
        stats.record_finish(RequestTimes(arrival=0.0), 60.0, "abort", cause)
    good = RequestTimes(arrival=60.0)
    stats.record_seated(good, 60.0)
    stats.record_token(good, 60.5)
    stats.record_finish(good, 60.5, "stop")
    met = experience(stats.interactive, 61.0, 300)
    ended = {name: met["ended"][name] for name in ("finished", "failed", "timed_out", "good")}
    assert ended == {"finished": 1, "failed": 3, "timed_out": 3, "good": 1}
    assert met["slo"]["attainment"] == {"ttft_p95_seconds": 0.25, "itl_p95_seconds": None, "e2e_p95_seconds": 0.25}
    assert met["latency"]["e2e"]["count"] == 1, "how long it would have taken nobody knows"


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


def test_where_the_time_went_adds_up_and_a_stall_is_told_apart() -> None:
    stats = Stats(SloTargets())
    times = RequestTimes(arrival=10.0)
    stats.record_seated(times, 12.0)
    times.preempted = 12.5
    times.sit_again(13.0)
    stats.record_token(times, 14.0)
    times.preempted = 15.0
    times.sit_again(18.0)
    times.sit_again(19.0)
    stats.record_token(times, 20.0)
    stats.record_finish(times, 20.0, "stop")
    spent = {
        "requests": 1, "queue_seconds": 2.0, "prefill_seconds": 1.5, "decode_seconds": 3.0, "preempted_seconds": 3.5,
    }  # fmt: skip
    assert experience(stats.interactive, 21.0, 60)["spent"] == spent
    assert course(stats.interactive, 21.0, 60).spent == {20.0: (1, 2.0, 1.5, 3.0, 3.5)}
    assert experience(stats.interactive, 90.0, 60)["spent"]["requests"] == 0


def test_rates_are_over_the_time_there_was() -> None:
    stats = Stats(SloTargets(ttft_p95_seconds=1.0, itl_p95_seconds=None))
    for second in range(20):
        times = RequestTimes(arrival=float(second))
        stats.record_seated(times, times.arrival)
        stats.record_token(times, times.arrival + (0.5 if second % 2 else 2.0))
        stats.record_finish(times, float(second + 2), "stop" if second % 4 else "error")
    met = experience(stats.interactive, 22.0, 3600)
    assert (met["ended"]["finished"], met["ended"]["failed"], met["ended"]["good"]) == (15, 5, 10)
    assert met["ended"]["requests_per_second"] == 1.0
    assert met["slo"]["goodput_requests_per_second"] == 0.5
    assert met["slo"]["attainment"] == {"ttft_p95_seconds": 0.5, "itl_p95_seconds": None, "e2e_p95_seconds": None}
