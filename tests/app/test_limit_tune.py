"""Better settings for the same targets: what is tried, what is believed, and what is said of it."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.compare.simulated import Machine
from app.limit.lengths import Ranges
from app.limit.load import Source, WorkClass
from app.limit.options import Options
from app.limit.runs import Promise, Run
from app.limit.search import search
from app.limit.simulated import SimulatedMeasure
from app.limit.statistics import limit_of, margin_of
from app.limit.tune import Clock, Tuned, least_seconds, tune
from app.limit.tune_candidates import RefusedError, Standing
from app.limit.tune_confirm import Pair, budgets_of, judge
from app.limit.tune_controls import ADMISSION, BUDGET, CHUNK, POLICY, SEATS, Control, Values, controls_of, parse_names
from app.limit.tune_result import tune_result
from app.limit.tune_simulated import TunedMeasure, view_of
from app.limit.tune_words import tune_lines
from app.limit.watch import Watch
from engine.config import EngineConfig, SloTargets
from engine.cost_model import CostModel, Curve
from engine.errors import ConfigError
from tests.app.test_limit_command import SIMULATE
from tests.app.test_limit_search import make_run, sharp

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SEATS_CONTROL = Control(SEATS, (1, 64))
POLICY_CONTROL = Control(POLICY, None, ("continuous", "static", "dynamic"))
OPTIONS = Options(targets=SloTargets(1.0, None, None))


class Made:
    """A server whose limit is a function of its settings, and which counts its runs.

    Args:
        shift: of the limit under each seed, the same for all settings.
        refused: settings that it does not take.
    """

    def __init__(
        self,
        limit: Callable[[Values], float],
        shift: Callable[[Values, int], float] = lambda _values, _seed: 0.0,
        refused: Callable[[Values], bool] = lambda _values: False,
    ) -> None:
        self._limit, self._shift, self._refused = limit, shift, refused
        self.runs: list[tuple[Values, float, int, bool]] = []

    def __call__(self, values: Values, rate: float, seed: int, *, whole: bool = False) -> Run:
        if self._refused(values):
            raise RefusedError("not that")
        self.runs.append((values, rate, seed, whole))
        shifts = tuple([self._shift(values, number) for number in range(seed + 1)])
        return sharp(self._limit(values), shifts=shifts)(rate, seed)


def hill(values: Values) -> float:
    """Best with 32 seats and the continuous policy."""
    off = math.log2(int(values.get(SEATS, 32)) / 32)
    return 10 * math.exp(-off * off / 12) * (1.0 if values.get(POLICY, "continuous") == "continuous" else 0.5)


def timeless(duration: float = 1e9, now: Callable[[], float] = lambda: 0.0, run_seconds: float = 0.0) -> Clock:
    return Clock(duration, lambda _rate: run_seconds, 0.0, now)


def tuned(measure: Made, controls: list[Control], values: Values, clock: Clock | None = None, **options: Any) -> Tuned:
    asked = Options(targets=OPTIONS.targets, **options)
    return tune(measure, controls, values, 4.0, asked, clock or timeless())


@pytest.mark.parametrize("seats", [1, 4, 16, 32, 50, 64])
def test_the_best_settings_are_found_from_wherever_it_begins(seats: int) -> None:
    values: Values = {SEATS: seats, POLICY: "static"}
    done = tuned(Made(hill), [SEATS_CONTROL, POLICY_CONTROL], values)
    assert done.best.values[POLICY] == "continuous"
    assert hill(done.best.values) > 0.93 * 10
    assert done.verdict is not None
    assert done.verdict.is_believed
    assert done.verdict.gain == pytest.approx(hill(done.best.values) / hill(values), rel=0.1)
    assert done.present.values == values


def test_where_nothing_is_better_the_settings_stay_and_it_is_said() -> None:
    measure = Made(hill)
    done = tuned(measure, [SEATS_CONTROL, POLICY_CONTROL], {SEATS: 32, POLICY: "continuous"})
    assert done.found is None
    assert done.best is done.present
    assert {one.verdict for one in done.candidates} == {"lost"}
    tried = [(one.control, one.value) for one in done.candidates]
    assert tried == [(SEATS, 64), (SEATS, 16), (POLICY, "static"), (POLICY, "dynamic"), (SEATS, 45), (SEATS, 23)]
    (last,) = tune_lines(tune_result(done, applied=False))[-1:]
    assert last == "The settings you have are as good as any that were tried: of 6 none was better."


def test_each_is_tried_with_the_requests_and_the_rate_of_those_it_is_compared_with() -> None:
    measure = Made(hill)
    done = tuned(measure, [SEATS_CONTROL], {SEATS: 8})
    for one in done.candidates:
        assert one.run is not None
        assert (one.run.rate, one.run.seed) == (one.theirs.rate, one.theirs.seed)
        assert not one.theirs.holds
        assert one.verdict == ("better" if one.run.holds else "lost")
    # What is lost takes one run.
    lost = [{**one.against, one.control: one.value} for one in done.candidates if one.verdict == "lost"]
    assert [sum(values == tried for values, *_ in measure.runs) for tried in lost] == [1] * len(lost)


def test_no_settings_are_tried_twice() -> None:
    done = tuned(Made(hill), [SEATS_CONTROL, POLICY_CONTROL], {SEATS: 4, POLICY: "dynamic"})
    tried = [tuple({**one.against, one.control: one.value}.items()) for one in done.candidates]
    assert len(tried) == len(set(tried))


def test_what_the_server_refuses_is_told_and_the_search_goes_on() -> None:
    measure = Made(hill, refused=lambda values: 30 <= int(values[SEATS]) <= 40)
    done = tuned(measure, [SEATS_CONTROL], {SEATS: 16})
    refused = [one for one in done.candidates if one.verdict == "refused"]
    assert [(one.value, one.why) for one in refused] == [(32, "not that"), (33, "not that")]
    assert done.best.values[SEATS] == 23
    assert any("refused: not that" in line for line in tune_lines(tune_result(done, applied=False)))


def test_a_late_generator_says_nothing_of_the_settings() -> None:
    def measure(values: Values, rate: float, seed: int, *, whole: bool = False) -> Run:
        late = 0.2 if values[SEATS] > 16 else 0.0
        return make_run(rate, seed, ttft=lambda _: 2.0 if rate > 10 and not late else 0.1, lag=late)

    controls = [Control(SEATS, (8, 32))]
    done = tune(measure, controls, {SEATS: 16}, 8.0, OPTIONS, timeless())
    assert {one.verdict for one in done.candidates if int(one.value) > 16} == {"unknown"}
    assert done.found is None


def test_where_no_rate_was_seen_to_be_too_much_it_is_said_that_not_everything_was_tried() -> None:
    def measure(values: Values, rate: float, seed: int, *, whole: bool = False) -> Run:
        return make_run(rate, seed, ttft=lambda _: 0.1, lag=0.2 if rate > 10 else 0.0)

    done = tune(measure, [Control(SEATS, (8, 32))], {SEATS: 16}, 8.0, OPTIONS, timeless())
    assert (done.candidates, done.found) == ([], None)
    assert not tune_result(done, applied=False)["complete"]


def test_runs_of_a_late_generator_do_not_hide_the_rate_to_be_beaten() -> None:
    held, lost = (make_run(rate, ttft=lambda _, wait=wait: wait) for rate, wait in ((10.0, 0.1), (12.0, 2.0)))
    late = make_run(11.0, ttft=lambda _: 2.0, lag=0.2)
    assert Standing({SEATS: 4}, (held, late, lost)).bar is lost
    assert Standing({SEATS: 4}, (held, late)).bar is None
    assert Standing({SEATS: 4}, (late, lost)).bar is lost


def test_settings_that_hold_at_no_rate_are_left_for_those_that_are_nearer_and_at_last_hold() -> None:
    """The further the seats are from 64, the longer everybody waits, at any rate."""

    def measure(values: Values, rate: float, seed: int, *, whole: bool = False) -> Run:
        late = 0.4 - 0.065 * math.log2(int(values[SEATS]))
        return make_run(rate, seed, ttft=lambda place: 2.0 if place * 0.618 % 1 < late else 0.1)

    done = tune(measure, [SEATS_CONTROL], {SEATS: 4}, 8.0, OPTIONS, timeless())
    assert done.present.limit is None
    assert done.best.values == {SEATS: 64}
    assert done.best.limit is not None
    result = tune_result(done, applied=False)
    assert result["present"]["limit"] is None
    assert result["evidence"]["believed"]
    assert result["evidence"]["gain"] is None


def test_where_nothing_holds_at_any_rate_nothing_is_advised() -> None:
    def measure(values: Values, rate: float, seed: int, *, whole: bool = False) -> Run:
        return make_run(rate, seed, ttft=lambda _: 3.0)

    done = tune(measure, [SEATS_CONTROL], {SEATS: 4}, 8.0, OPTIONS, timeless())
    assert done.found is None
    assert {one.verdict for one in done.candidates} == {"no better"}


def test_a_gain_of_the_search_that_fresh_seeds_do_not_show_is_not_believed() -> None:
    """32 seats are better under the first seed alone: what a search that looks for the best comes upon."""
    measure = Made(lambda _values: 10.0, lambda values, seed: 0.3 if values[SEATS] == 32 and seed == 0 else 0.0)
    done = tuned(measure, [SEATS_CONTROL], {SEATS: 16})
    assert done.found is not None
    assert done.found.values == {SEATS: 32}
    assert done.best.values == {SEATS: 16}
    result = tune_result(done, applied=False)
    assert not result["evidence"]["believed"]
    assert result["best"]["changes"] == {}
    (last,) = tune_lines(result)[-1:]
    assert last.startswith(
        "The settings you have are as good as any that were tried: max_num_seqs 16 to 32 promised 13"
    )
    assert "within the spread" in last


def test_both_are_measured_in_turn_on_seeds_that_the_search_has_not_seen() -> None:
    measure = Made(hill)
    done = tuned(measure, [SEATS_CONTROL], {SEATS: 16}, seed=3, repeats=3)
    fresh = [(values[SEATS], seed) for values, _, seed, _ in measure.runs if seed != 3]
    assert [key for key, _ in itertools.groupby(fresh)] == [(16, 4), (32, 4), (16, 5), (32, 5), (16, 6), (32, 6)]
    assert [pair.seed for pair in done.pairs] == [4, 5, 6]


def test_without_time_for_fresh_seeds_nothing_is_believed() -> None:
    measure = Made(hill)
    clock = timeless(100.0, lambda: 101.0 if any(seed for *_, seed, _ in measure.runs) else 0.0)
    done = tuned(measure, [SEATS_CONTROL], {SEATS: 4}, clock)
    assert done.found is not None
    assert done.verdict is not None
    assert not done.verdict.is_believed
    (last,) = tune_lines(tune_result(done, applied=False))[-1:]
    assert last.startswith("Whether other settings are better is not known: max_num_seqs 4 to")
    assert "there was no time" in last


def test_what_there_was_no_time_for_is_said() -> None:
    measure = Made(hill)
    clock = timeless(30.0, lambda: float(len(measure.runs)), run_seconds=1.0)
    done = tuned(measure, [SEATS_CONTROL, POLICY_CONTROL], {SEATS: 1, POLICY: "static"}, clock)
    assert done.is_cut
    assert len(measure.runs) <= 30
    assert any("time was over" in line for line in tune_lines(tune_result(done, applied=False)))


def test_a_time_that_is_too_short_for_any_other_value_is_told_with_one_that_is_not() -> None:
    assert least_seconds(10.0, 90.0, 11.0, 4.0) > 90
    for gone_share in (0.125, 0.2):
        least = least_seconds(gone_share * 90.0, 90.0, 11.0, 4.0)
        assert least_seconds(gone_share * least, least, 11.0, 4.0) == 0
    assert least_seconds(200.0, 1800.0, 50.0, 4.0) == 0
    assert least_seconds(89.0, 90.0, 11.0, 4.0) > 90


def test_where_nothing_else_was_tried_the_evidence_is_not_complete() -> None:
    measure = Made(hill)
    clock = timeless(6.0, lambda: float(len(measure.runs)), run_seconds=2.0)
    done = tuned(measure, [SEATS_CONTROL], {SEATS: 16, POLICY: "continuous"}, clock)
    result = tune_result(done, applied=False)
    assert (result["candidates"], result["complete"], result["evidence"]["complete"]) == ([], False, False)
    said = "Whether other settings are better is not known: nothing else was tried in the time there was."
    assert tune_lines(result)[-1] == said


def test_the_whole_ends_in_its_time() -> None:
    spent = [0.0]

    def measure(values: Values, rate: float, seed: int, *, whole: bool = False) -> Run:
        spent[0] += 400 / rate
        return Made(hill)(values, rate, seed)

    clock = Clock(3000.0, lambda rate: 400 / rate, 0.0, lambda: spent[0])
    values: Values = {SEATS: 16, POLICY: "static"}
    tune(measure, [SEATS_CONTROL, POLICY_CONTROL], values, 4.0, OPTIONS, clock)
    assert 1000 < spent[0] <= 3000


def pair_of(seed: int, present: float, found: float) -> Pair:
    def runs(limit: float) -> tuple[Run, ...]:
        return tuple(search(sharp(limit, shifts=(0.0,) * (seed + 1)), limit, (seed,)))

    return Pair(seed, runs(present), runs(found))


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ([(10.0, 12.0), (10.5, 11.8)], False),
        ([(10.0, 12.0), (10.5, 11.8), (9.8, 12.1)], True),
        ([(10.0, 12.0), (12.5, 14.0), (10.0, 12.0)], False),
        ([(10.0, 11.0), (11.0, 10.0), (10.0, 11.0)], False),
    ],
)
def test_a_gain_is_believed_where_it_lies_outside_the_spread(limits: list[tuple[float, float]], expected: bool) -> None:
    verdict = judge([pair_of(seed, *both) for seed, both in enumerate(limits)])
    assert verdict.is_believed == expected


def test_a_limit_that_was_only_not_reached_does_not_speak_for_what_was_found() -> None:
    """The time was over, or the generator late, before the present settings were lost."""
    whole = [pair_of(seed, 10.0, 12.0) for seed in range(4)]
    held = make_run(10.0, ttft=lambda _: 0.1)
    late = make_run(10.5, ttft=lambda _: 2.0, lag=0.2)
    cut = [replace(whole[2], present=(held,)), replace(whole[3], present=(held, late))]
    assert [pair.tells for pair in (*whole, *cut)] == [True] * 4 + [False] * 2
    verdict = judge([*whole[:2], *cut])
    assert not verdict.is_believed
    assert verdict.why.startswith("under 2 of 4 fresh seeds it was seen what is too much for the present settings")
    verdict = judge([*whole[:3], *cut])
    assert verdict.is_believed
    assert verdict.why.startswith("under 3 fresh seeds the limit is")


@pytest.mark.parametrize(("lost", "believed"), [(11.0, True), (12.5, False)])
def test_what_was_lost_at_once_has_a_limit_below_that_rate_and_not_of_nothing(lost: float, believed: bool) -> None:
    run = make_run(lost, ttft=lambda _: 2.0)
    pairs = [pair_of(0, 10.0, 12.0), pair_of(1, 10.0, 12.0), replace(pair_of(2, 10.0, 12.0), present=(run,))]
    verdict = judge(pairs)
    assert (verdict.is_believed, f"and below {lost:.3g} with the present settings" in verdict.why) == (believed, True)


@given(st.integers(1, 4096), st.integers(1, 4096), st.sampled_from([2.0, math.sqrt(2)]), st.integers(0, 512))
def test_ways_lead_from_the_value_to_the_ends_of_its_range(now: int, most: int, step: float, chunk: int) -> None:
    now = min(now, most)
    control = Control(SEATS, (1, most))
    values = [value for way in control.ways({SEATS: now}, step) for value in way]
    assert now not in values
    assert set(values) >= {1, most} - {now}
    assert all(1 <= int(value) <= most for value in values)
    assert len(values) < 60
    for way in Control(CHUNK, (0, most)).ways({CHUNK: chunk, BUDGET: now}, step):
        assert chunk not in way
        assert all(value == 0 or 1 <= int(value) < now for value in way)


def test_a_control_that_makes_no_difference_is_not_turned() -> None:
    admission = Control(ADMISSION, None, ("on_demand", "reserve"))
    measure = Made(lambda _values: 10.0)
    done = tuned(measure, [admission, Control(CHUNK, (0, 64), budget=64)], {ADMISSION: "on_demand", CHUNK: 0})
    assert done.candidates == []
    assert set(done.idle) == {ADMISSION, CHUNK}
    lines = tune_lines(tune_result(done, applied=False))
    assert any(line.startswith("admission was not turned: nobody was preempted") for line in lines)
    preempted = Standing({ADMISSION: "on_demand"}, (make_run(10, ttft=lambda _: 0.5, preempted=4),))
    assert admission.idle(preempted.runs) is None


def test_controls_are_those_of_the_server_and_of_the_user() -> None:
    assert parse_names("policy, max-num-seqs") == (SEATS, POLICY)
    with pytest.raises(ConfigError, match="no control; there are max_num_seqs"):
        parse_names("max_num_seq")
    view = view_of(EngineConfig(capacity_num_seqs=20))
    seats, policy = controls_of(view, (SEATS, POLICY))
    assert seats.span == (1, 20)
    assert policy.choices == ("continuous", "static", "dynamic")
    with pytest.raises(ConfigError, match="no control num_speculative_tokens"):
        controls_of(view, ("num_speculative_tokens",))


def test_a_margin_is_of_the_same_requests_and_narrower_than_chance_between_others() -> None:
    def run_at(share: float, seed: int = 0) -> Run:
        return make_run(10, seed, ttft=lambda place: 2.0 if place * 0.618 % 1 < share else 0.1)

    near, far = run_at(0.04), run_at(0.10)
    margin = margin_of(near, far)
    assert margin is not None
    assert margin.estimate == pytest.approx(0.4, rel=0.1)
    assert margin.low <= margin.estimate <= margin.high < 1
    same = margin_of(near, near)
    assert same is not None
    assert (same.low, same.estimate, same.high) == (1.0, 1.0, 1.0)


def test_budgets_are_compared_at_one_rate_with_the_best_of_the_others() -> None:
    control = Control(BUDGET, (1, 512))
    measure = Made(lambda values: 10.0)
    done = tuned(measure, [control], {BUDGET: 128})
    assert [budget for budget, _ in done.budgets] == [16, 32, 64, 128, 256, 512]
    assert len({run.rate for _, run in done.budgets}) == 1
    assert all(whole for *_, whole in measure.runs[-6:])
    assert done.budgets[0][1].rate == pytest.approx(8.0, rel=0.05)
    assert budgets_of({BUDGET: 4}, control) == [4, 8, 16]
    assert any("The token budget at " in line for line in tune_lines(tune_result(done, applied=False)))


def simulated(num_counted: int, **config: Any) -> SimulatedMeasure:
    """A machine on which many seats are cheap and large steps make gaps too long."""
    targets = SloTargets(2.0, 0.15, None)
    classes = (WorkClass("requests", 1.0, Ranges((60, 240), (15, 40)), targets),)
    source = Source(classes, Promise((targets,), 0.01), max_model_len=512)
    machine = Machine(CostModel(Curve(((16.0, 0.03), (512.0, 0.5)))), {}, "made up", "none", 512, 4096)
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 512, "capacity_num_batched_tokens": 512, **config}
    return SimulatedMeasure(machine, EngineConfig(**settings), source, num_counted)


@pytest.mark.long
def test_what_is_found_is_what_trying_every_combination_finds() -> None:
    """Against the real scheduler in virtual time.

    Neither more seats nor half the budget is better at first; only a quarter of it is, and then more seats are.
    """
    base = simulated(150)
    names = (SEATS, BUDGET)
    measure = TunedMeasure(base, {}, lambda _what: None, Watch())
    view = view_of(base.config)
    own: Values = {name: view["effective"][name] for name in names}
    start = 0.8 * base.capacity(0)
    clock = Clock(1e9, lambda _rate: 0.0)
    done = tune(measure, controls_of(view, names), own, start, Options(targets=base.source.promise.targets[0]), clock)
    limits = {}
    for seats, budget in itertools.product((4, 8, 16, 32), (32, 64, 128, 256, 512)):
        limit = limit_of(search(partial(measure, {SEATS: seats, BUDGET: budget}), start, (0,)))
        limits[seats, budget] = limit.estimate if limit else 0.0
    best = max(limits.values())
    found = limit_of([run for run in done.best.runs if run.seed == 0])
    assert found is not None
    assert found.estimate >= 0.95 * best
    assert best > 1.3 * limits[4, 512]
    assert done.verdict is not None
    assert done.verdict.is_believed
    assert len(done.candidates) < 30


def test_a_simulated_machine_is_tuned_from_the_command_line(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "limit.json"
    asked = ("--requests", "60", "--factor", "20", "--seats", "2", "--json", path)
    code, out, err = run(*SIMULATE, *asked, "--tune", "max_num_seqs,max_num_batched_tokens")
    assert (code, err) == (0, "")
    tune = json.loads(path.read_text())["tune"]
    assert {"controls", "candidates", "best", "evidence", "trade_off", "applied"} <= tune.keys()
    assert not tune["applied"]
    assert tune["best"]["settings"][SEATS] > 2
    assert tune["evidence"]["believed"]
    assert [one["name"] for one in tune["controls"]] == [SEATS, BUDGET]
    assert f"max_num_seqs 2 to {tune['best']['settings'][SEATS]}" in out
    assert f"--max-num-seqs {tune['best']['settings'][SEATS]}" in out
    points = tune["trade_off"]["points"]
    assert [point["value"] for point in points] == sorted(point["value"] for point in points)
    assert all(point["ttft_p95_seconds"] > 0 for point in points)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--tune", "seats"], "--tune seats is no control; there are max_num_seqs"),
        (["--apply"], "--apply is for --tune"),
        (["--tune", "--policies", "static,continuous"], "give one of the two"),
        (["--while-serving"], "--while-serving is for --tune"),
        (["--tune", "--apply"], "--apply is for the server of --url"),
        ([*SIMULATE[1:], "--tune", "num_speculative_tokens"], "nothing can be drafted"),
    ],
)
def test_wrong_use_of_tuning_is_one_line_and_code_2(run: Any, words: list[str], expected: str) -> None:
    code, out, err = run("limit", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert expected in err
