"""Percentiles are exact as far as samples are kept, within a hundredth beyond, and memory is bounded."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.samples import PERCENTS, Samples, bucket_of, counted_ranks, edge_of
from engine.timeline import WIDTHS, WINDOWS, Timeline

latencies = st.floats(0, 8000) | st.floats(0, 0.3)


def ranks(values: list[float]) -> list[float]:
    return [sorted(values)[max(0, math.ceil(len(values) * p / 100) - 1)] for p in PERCENTS]


@given(st.lists(st.tuples(st.floats(0, 90), latencies, st.sampled_from((*WINDOWS, None))), min_size=1, max_size=80))
def test_percentiles_equal_a_sort_of_what_is_in_the_window(steps: list[tuple[float, float, int | None]]) -> None:
    """Whichever windows are looked at in between, and however late."""
    samples, now, seen = Samples(), 0.0, []
    for gap, value, look in steps:
        now += gap
        samples.add(now, value)
        seen.append((now, value))
        for seconds in (look,) if look else ():
            summary = samples.summary(now, seconds)
            inside = [value for time, value in seen if time >= now - seconds]
            assert summary["count"] == len(inside)
            assert [summary[f"p{p}"] for p in PERCENTS] == ranks(inside)
            assert summary["exact"]


@given(st.lists(st.tuples(st.floats(0, 5), latencies), min_size=30, max_size=200))
def test_beyond_the_bound_they_are_within_a_hundredth_and_say_so(steps: list[tuple[float, float]]) -> None:
    samples, now, seen = Samples(max_samples=10), 0.0, []
    for gap, value in steps:
        now += gap
        samples.add(now, value)
        seen.append((now, value))
    summary = samples.summary(now, 3600)
    assert (summary["exact"], summary["count"], summary["window_seconds"]) == (False, len(seen), 3600.0)
    for p, exact in zip(PERCENTS, ranks([value for _, value in seen]), strict=True):
        assert max(exact, 1e-4) * 0.999999 <= summary[f"p{p}"] <= max(exact * 1.01, 1e-4) * 1.000001  # type: ignore[operator]


def test_a_window_that_fits_again_is_exact_again_and_no_more_is_kept_than_the_bound() -> None:
    samples = Samples(max_samples=100)
    for number in range(1000):
        samples.add(number / 100, number / 1000)
        if not number % 7:
            samples.summary(number / 100, 60)
    assert not samples.summary(10.0, 60)["exact"]
    assert len(samples._times) < 200
    samples.add(500.0, 5.0)
    assert samples.summary(500.0, 60) == {
        "count": 1, "p50": 5.0, "p90": 5.0, "p95": 5.0, "p99": 5.0, "window_seconds": 60.0, "exact": True,
    }  # fmt: skip


def test_a_window_that_nobody_asks_for_costs_nothing() -> None:
    samples = Samples()
    samples.add(0.0, 1.0)
    samples.summary(0.0, 3600)
    samples.summary(50.0, 60)
    assert set(samples._windows) == {60, 3600}
    samples.summary(100.0, 60)
    assert set(samples._windows) == {60}


def test_an_empty_window_has_no_percentiles() -> None:
    assert Samples().summary(0.0)["p95"] is None


@given(st.floats(0, 1e5))
def test_an_edge_is_above_its_samples_and_not_far(value: float) -> None:
    edge = edge_of(bucket_of(value))
    assert value <= edge * 1.0000001
    assert edge <= max(value * 1.01, 1e-4) * 1.0000001


@given(st.lists(st.integers(0, 40), min_size=1, max_size=60))
def test_ranks_from_counts_are_those_of_the_edges(buckets: list[int]) -> None:
    assert counted_ranks(Counter(buckets)) == pytest.approx(ranks([edge_of(bucket) for bucket in buckets]))


@given(st.lists(st.tuples(st.floats(0, 300), st.sampled_from("ab")), max_size=60), st.sampled_from(WINDOWS))
def test_columns_have_what_came_in_their_time(steps: list[tuple[float, str]], seconds: int) -> None:
    timeline, now, seen = Timeline[str](), 0.0, []
    for gap, key in steps:
        now += gap
        timeline.add(now, key)
        seen.append((now, key))
    width, start = WIDTHS[seconds], timeline.start(now, seconds)
    assert now - seconds <= start < now - seconds + width
    assert start % width == 0
    columns = timeline.columns(now, seconds)
    assert len(columns) <= seconds // width + 1
    for column in columns:
        inside = [key for time, key in seen if column.start <= time // 2 * 2 < column.start + width]
        assert column.counts == Counter(inside)
    assert timeline.total(now, seconds) == Counter(key for time, key in seen if time >= start)


def test_an_hour_of_many_tokens_stays_small() -> None:
    samples, source = Samples(max_samples=1000), random.Random(3)
    for number in range(40_000):
        samples.add(number / 10, source.lognormvariate(-3, 1))
    for seconds in WINDOWS:
        assert len(samples.timeline._columns[seconds]) <= 77


@given(st.lists(st.tuples(st.floats(0, 40), latencies, st.booleans()), max_size=60), st.sampled_from(WINDOWS))
def test_what_is_made_of_a_column_is_of_all_that_came_into_it(
    steps: list[tuple[float, float, bool]], seconds: int
) -> None:
    """Whenever it was asked for before: only of a column that is over is the answer kept."""
    samples, now = Samples(), 0.0
    for gap, value, asks in steps:
        now += gap
        samples.add(now, value)
        if asks:
            samples.by_column(now, seconds, dict)
    expected = {column.start: dict(column.counts) for column in samples.timeline.columns(now, seconds)}
    assert samples.by_column(now, seconds, dict) == expected
