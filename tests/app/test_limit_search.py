"""Which rates are tried, and what limit and interval come of them: pure functions, and the simulator."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.compare.simulated import Machine
from app.limit.lengths import Ranges
from app.limit.load import Source, WorkClass
from app.limit.runs import MAX_EXCESS, Promise, Run, Seen
from app.limit.search import PRECISION, edge, search
from app.limit.simulated import SimulatedMeasure
from app.limit.statistics import crossing, isotonic, limit_of
from engine.config import EngineConfig, SloTargets
from engine.cost_model import CostModel, Curve

if TYPE_CHECKING:
    from collections.abc import Callable

TARGETS = SloTargets(1.0, None, None)


def make_run(
    rate: float, seed: int = 0, *, ttft: Callable[[int], float], num: int = 400, lag: float = 0.0, preempted: int = 0
) -> Run:
    """A run whose requests waited so long, by their place."""
    seen = tuple(Seen(place / rate, lag, ttft(place), ttft(place), ttft(place), 10, 5, 4, 0) for place in range(num))
    return Run(rate, seed, Promise((TARGETS,), 0.01), seen, preemptions=preempted)


def sharp(limit: float, *, shifts: tuple[float, ...] = (0.0, 0.0, 0.0)) -> Callable[[float, int], Run]:
    """A server that misses 5 % of its targets at `limit`, more above it; each seed has its own."""

    def measure(rate: float, seed: int) -> Run:
        own = limit * (1 + shifts[seed])
        share = min(1.0, 0.05 * math.exp(math.log(rate / own) / 0.02))
        rng = random.Random(seed)
        late = {place for place in range(400) if rng.random() < share}
        return make_run(rate, seed, ttft=lambda place: 2.0 if place in late else 0.1)

    return measure


@pytest.mark.parametrize("start", [1.0, 8.0, 10.0, 13.0, 60.0])
def test_the_limit_is_found_from_wherever_it_is_looked_for(start: float) -> None:
    runs = search(sharp(10.0), start, (0, 1, 2))
    found = limit_of(runs)
    assert found is not None
    assert found.estimate == pytest.approx(10.0, rel=0.04)
    assert found.low <= found.estimate <= found.high
    low, high = edge(runs)
    assert low is not None
    assert high is not None
    assert high / low <= 1 + PRECISION + 1e-9


def test_every_seed_holds_at_the_limit() -> None:
    runs = search(sharp(10.0, shifts=(0.0, -0.1, 0.05)), 8.0, (0, 1, 2))
    found = limit_of(runs)
    assert found is not None
    assert found.estimate == pytest.approx(9.0, rel=0.04)
    assert found.high == pytest.approx(10.0, rel=0.04)
    assert {run.seed for run in runs} == {0, 1, 2}


def test_a_server_that_holds_at_no_rate_has_no_limit() -> None:
    runs = search(lambda rate, seed: make_run(rate, seed, ttft=lambda _: 3.0), 8.0, (0, 1))
    assert limit_of(runs) is None
    assert edge(runs)[0] is None
    assert min(run.rate for run in runs) < 1.0
    assert len(runs) < 12


def test_a_server_that_holds_at_every_rate_is_not_tried_for_ever() -> None:
    runs = search(lambda rate, seed: make_run(rate, seed, ttft=lambda _: 0.1), 8.0, (0,))
    assert edge(runs) == (max(run.rate for run in runs), None)
    assert len(runs) < 12


def test_nothing_is_tried_for_which_there_is_no_time() -> None:
    measured: list[float] = []

    def measure(rate: float, seed: int) -> Run:
        measured.append(rate)
        return sharp(10.0)(rate, seed)

    search(measure, 8.0, (0, 1, 2), afford=lambda rate: len(measured) < 3)
    assert len(measured) == 3
    search(measure, 8.0, (0, 1, 2), afford=lambda rate: False)
    assert len(measured) == 4  # one is always made


def test_a_late_generator_ends_the_way_up_and_is_tried_twice() -> None:
    def measure(rate: float, seed: int) -> Run:
        return make_run(rate, seed, ttft=lambda _: 0.1, lag=0.2 if rate > 12 else 0.0)

    runs = search(measure, 8.0, (0,))
    late = [run.rate for run in runs if not run.is_valid]
    assert all(late.count(rate) == 2 for rate in late)
    low, high = edge(runs)
    assert low is not None
    assert low <= 12 < (high or 0)
    assert [run.is_valid for run in runs if run.rate == high] == [False, False]


def test_a_clearly_lost_rate_is_not_repeated() -> None:
    runs = search(sharp(10.0), 20.0, (0, 1, 2))
    repeated = {run.rate for run in runs if run.seed}
    assert max(repeated) < 10.5


def test_waiting_that_grows_and_preemptions_that_repeat_do_not_hold() -> None:
    assert make_run(10, ttft=lambda _: 0.5).holds
    growing = make_run(10, ttft=lambda place: 0.01 + 0.9 * place / 60, num=60)
    assert growing.excesses()["ttft"] == 0
    assert growing.excesses()["waiting grows"] > 1
    assert make_run(10, ttft=lambda _: 0.5, preempted=4).holds
    assert not make_run(10, ttft=lambda _: 0.5, preempted=5).holds


def test_errors_within_their_share_hold() -> None:
    fine = make_run(10, ttft=lambda _: 0.5, num=396).seen
    failed = Seen(1.0, 0.0, 0.1, None, None, 5, 0, 0, 0, error="HTTP 503")
    promise = Promise((TARGETS,), 0.01)
    assert Run(10, 0, promise, (*fine, *[failed] * 3)).holds
    assert not Run(10, 0, promise, (*fine, *[failed] * 5)).holds
    assert Run(10, 0, Promise((TARGETS,), 0.0), (*fine, failed)).excess == MAX_EXCESS


def test_who_was_not_watched_for_long_enough_says_nothing_and_who_was_missed_it() -> None:
    promise = Promise((TARGETS,), 0.01)
    watched = [Seen(0.0, 0.0, seconds, None, None, 5, 0, 0, 0) for seconds in (0.5, 1.5)]
    assert Run(10, 0, promise, tuple(watched[:1])).excess == 0
    assert Run(10, 0, promise, tuple(watched)).excess == MAX_EXCESS


pairs = st.lists(st.tuples(st.integers(1, 8), st.floats(-3, 3)), min_size=1, max_size=20)


@given(pairs)
def test_the_fit_rises_and_is_no_further_than_any_other_that_rises(points: list[tuple[int, float]]) -> None:
    rates, values = (np.array(column, float) for column in zip(*points, strict=True))
    fit = dict(isotonic(rates, values))
    heights = [fit[rate] for rate in sorted(fit)]
    assert heights == sorted(heights)
    mine = sum((fit[rate] - value) ** 2 for rate, value in zip(rates, values, strict=True))
    # Moving any part of it up or down by a little, as far as it still rises, never brings it nearer.
    for first in range(len(heights)):
        for step in (-0.01, 0.01):
            moved = [height + step * (place >= first) for place, height in enumerate(heights)]
            if moved == sorted(moved):
                other = dict(zip(sorted(fit), moved, strict=True))
                assert sum((other[r] - v) ** 2 for r, v in zip(rates, values, strict=True)) >= mine - 1e-9


def test_the_crossing_lies_between_the_rates_on_both_sides_of_it() -> None:
    rates = np.array([1.0, 2.0, 4.0])
    assert crossing(rates, np.array([-1.0, -1.0, 1.0])) == pytest.approx(math.sqrt(8))
    assert crossing(rates, np.array([1.0, 2.0, 3.0])) is None
    assert crossing(rates, np.array([-1.0, -2.0, -3.0])) == 4.0


def test_the_interval_is_wider_for_fewer_requests() -> None:
    def runs(num: int) -> list[Run]:
        shares = {9.0: 0.03, 10.0: 0.06, 11.0: 0.12}
        return [
            make_run(rate, ttft=lambda place, share=share: 2.0 if (place * 0.618) % 1 < share else 0.1, num=num)
            for rate, share in shares.items()
        ]

    few, many = limit_of(runs(100)), limit_of(runs(3000))
    assert few is not None
    assert many is not None
    assert few.high - few.low > 1.5 * (many.high - many.low)


def test_the_one_rate_of_a_repeat_is_not_taken_for_its_limit() -> None:
    def run_at(rate: float, share: float, seed: int = 0) -> Run:
        return make_run(rate, seed, ttft=lambda place: 2.0 if (place * 0.618) % 1 < share else 0.1)

    alone = [run_at(9.0, 0.03), run_at(10.0, 0.06), run_at(11.0, 0.12)]
    held, lost = run_at(9.5, 0.02, seed=1), run_at(9.5, 0.08, seed=1)
    first, better, worse = (limit_of([*alone, *more]) for more in ([], [held], [lost]))
    assert first is not None
    assert better is not None
    assert worse is not None
    assert better.high > 1.02 * first.high
    assert worse.low < 0.98 * first.low
    # The limit itself is no higher than where all were seen to hold.
    assert better.estimate == 9.5
    assert worse.estimate == 9.0


def test_growth_that_was_seen_by_chance_widens_the_interval() -> None:
    """A wait that just does not grow too much holds, and with other requests it might not have."""

    def run_at(rate: float) -> Run:
        rng = random.Random(1)
        waits = [0.05 + 0.2 * rng.random() + 0.01 * place for place in range(60)]
        return make_run(rate, ttft=waits.__getitem__, num=60)

    runs = [run_at(rate) for rate in (7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0)]
    assert all(run.excesses()["ttft"] == 0 for run in runs)
    assert runs[0].holds
    assert not runs[-1].holds
    found = limit_of(runs)
    assert found is not None
    assert found.low < 0.99 * found.estimate
    assert found.high > 1.01 * found.estimate


def simulated(num_counted: int) -> SimulatedMeasure:
    """A machine of 16 seats and requests of 15 to 25 tokens that answer prompts of 80 to 120."""
    targets = SloTargets(2.0, 0.25, None)
    lengths = Ranges((80, 120), (15, 25))
    source = Source((WorkClass("requests", 1.0, lengths, targets),), Promise((targets,), 0.01), max_model_len=512)
    machine = Machine(CostModel(Curve(((16.0, 0.02), (128.0, 0.05)))), {}, "made up", "none", 512, 1024)
    return SimulatedMeasure(machine, EngineConfig(), source, num_counted)


@pytest.mark.long
def test_below_the_limit_fresh_runs_hold_and_above_it_they_do_not() -> None:
    """Against the real scheduler in virtual time; what is true is found by trying every rate with many seeds."""
    measure = simulated(600)
    found = limit_of(search(measure, 0.8 * measure.capacity(0), (0, 1, 2)))
    assert found is not None
    fresh = range(100, 120)
    assert sum(measure(0.95 * found.estimate, seed).holds for seed in fresh) >= 19
    assert sum(not measure(1.1 * found.estimate, seed).holds for seed in fresh) >= 19


@pytest.mark.long
def test_the_limit_that_is_found_is_the_one_that_trying_every_rate_finds() -> None:
    measure = simulated(400)
    found = limit_of(search(measure, 0.8 * measure.capacity(0), (0, 1, 2)))
    assert found is not None
    rates = [found.estimate * (0.9 + 0.02 * step) for step in range(12)]
    held = [all(measure(rate, seed).holds for seed in (0, 1, 2)) for rate in rates]
    true = max(rate for rate, holds in zip(rates, held, strict=True) if holds)
    assert held == sorted(held, reverse=True)
    assert found.estimate == pytest.approx(true, rel=0.05)


def test_the_same_requests_come_at_every_rate_and_others_under_another_seed() -> None:
    measure = simulated(50)
    slow, fast, other = measure(2.0, 0), measure(4.0, 0), measure(2.0, 1)
    lengths = [[(seen.prompt_tokens, seen.output_tokens) for seen in run.seen] for run in (slow, fast, other)]
    assert lengths[0] == lengths[1] != lengths[2]
    assert [seen.due for seen in slow.seen] == pytest.approx([2 * seen.due for seen in fast.seen])
