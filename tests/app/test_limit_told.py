"""What `relevo limit` says of a limit, of what cannot be, and of who else was there."""

from __future__ import annotations

import copy
import fcntl
import json
import math
import os
import re
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from app.limit.against import against_lines
from app.limit.command import Looking
from app.limit.endpoint import EndpointError, find_endpoint
from app.limit.lengths import Fitted, Ranges
from app.limit.load import Source, WorkClass, check_lengths
from app.limit.options import Options, make_source
from app.limit.over_http import HttpMeasure
from app.limit.own_server import LOCK, PREFIX, open_folder
from app.limit.policies import find_under
from app.limit.report import page_of
from app.limit.runs import Promise, Run, Seen
from app.limit.scrapes import num_answered
from app.limit.search import highest_held
from app.limit.statistics import limit_of
from app.limit.summary import Outcome, summarize
from app.limit.words import interval_words, lines_of
from app.limit_page.search import make_brief
from engine.config import SloTargets
from engine.errors import ConfigError
from tests.app.endpoints import open_endpoint
from tests.app.test_limit_command import SIMULATE
from tests.app.test_limit_policies import SOURCE, TARGETS, outcome_with_limit
from tests.app.test_limit_search import make_run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from app.limit.endpoint import Endpoint


def run_at(rate: float, share: float, seed: int = 0) -> Run:
    """A run of which that share of the requests missed the promise; 5 % may."""
    return make_run(rate, seed, ttft=lambda place: 2.0 if place * 0.618 % 1 < share else 0.1)


WISH = {"workload": "mooncake", "note": "", "beside_users": False}
# What a search comes upon by chance: the one in the middle was lost, and the one above it held.
BY_CHANCE = (run_at(16.0, 0.01), run_at(16.7, 0.02), run_at(17.1, 0.055), run_at(17.4, 0.02), run_at(18.0, 0.20))


def test_the_rate_up_to_which_every_run_held_is_told_beside_a_limit_that_is_another() -> None:
    found = limit_of(BY_CHANCE)
    assert found is not None
    assert 17.1 < found.estimate < 18.0
    assert highest_held(BY_CHANCE) == 16.7
    assert highest_held(BY_CHANCE[:2]) == 16.7
    assert highest_held(BY_CHANCE[2:]) is None
    late = make_run(15.0, ttft=lambda _: 9.0, lag=0.5)
    assert highest_held((late, *BY_CHANCE)) == 16.7
    assert highest_held((run_at(16.0, 0.2, seed=1), *BY_CHANCE)) is None
    result = summarize(Outcome({}, SOURCE, None, 20.0, BY_CHANCE, 1.0), Options(targets=TARGETS))
    assert result["limit"]["held_requests_per_second"] == 16.7
    assert "Every run held up to 16.7 requests/s; the limit is told from all runs together." in lines_of(result)
    assert "; every run held up to 16.7 requests/s" in page_of(result)
    lost = summarize(Outcome({}, SOURCE, None, 20.0, BY_CHANCE[2:], 1.0), Options(targets=TARGETS))
    assert lost["limit"]["held_requests_per_second"] is None
    said = "A run at the lowest rate that was tried was lost; the limit is told from all runs together."
    assert said in lines_of(lost)


def test_it_is_not_told_twice_where_it_is_the_limit_nor_of_results_that_do_not_know_it() -> None:
    result = summarize(Outcome({}, SOURCE, None, 20.0, BY_CHANCE[:2], 1.0), Options(targets=TARGETS))
    assert result["limit"]["held_requests_per_second"] == result["limit"]["requests_per_second"] == 16.7
    assert not any("very run held" in line for line in lines_of(result))
    del result["limit"]["held_requests_per_second"]
    assert not any("very run held" in line for line in lines_of(result))


def mixed(*lengths: Ranges | Fitted, factors: tuple[float, ...] = (1.0, 1.0)) -> Source:
    classes = tuple([WorkClass(f"c{n}", 1.0, one, TARGETS, factors[n]) for n, one in enumerate(lengths)])
    return Source(classes, Promise(tuple([TARGETS] * len(classes)), 0.01), max_model_len=8192)


SHORT, LONG = Ranges((10, 20), (5, 5)), Ranges((100_000, 120_000), (60, 60))


def test_a_class_of_which_nothing_fits_is_refused_with_what_would_make_it_fit() -> None:
    with pytest.raises(ConfigError, match=r"No request of the class c1 fits .* 8192 tokens; give it factor = 15 in"):
        check_lengths(mixed(SHORT, LONG), None)
    with pytest.raises(ConfigError, match=r"class c0 fits .* factor = 30 in the mix, or .* with --factor 15"):
        check_lengths(replace(mixed(LONG, factors=(2.0,)), max_model_len=4096), None)
    with pytest.raises(ConfigError, match=r"With --factor 2, 2000 of 2000 requests of the class c1 are longer"):
        check_lengths(mixed(SHORT, LONG), 2.0)
    for fine, factor in ((mixed(SHORT, LONG, factors=(1.0, 15.0)), None), (mixed(SHORT, LONG), 15.0)):
        check_lengths(fine, factor)
    check_lengths(mixed(Fitted("mooncake")), None)  # a trace is fitted to the context
    check_lengths(replace(mixed(SHORT, LONG), max_model_len=None), None)


def test_a_mix_that_does_not_fit_is_refused_in_virtual_time_too(run: Any, tmp_path: Path) -> None:
    mix = tmp_path / "mix.toml"
    tables = [
        f'[[class]]\nname = "{name}"\nshare = 1\nprompt_tokens = {tokens}\noutput_tokens = 5\n'
        for name, tokens in (("short", 20), ("endless", 900_000))
    ]
    mix.write_text("".join(tables))
    code, out, err = run(*SIMULATE, "--mix", mix)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert (
        "No request of the class endless fits into the context of 8192 tokens; give it factor = 110 in the mix" in err
    )


@pytest.mark.parametrize("flag", ["--api-key", "--admin-token", "--context"])
def test_what_is_for_a_server_is_refused_where_none_is_asked(run: Any, flag: str) -> None:
    code, out, err = run(*SIMULATE, flag, "@nofile" if flag != "--context" else "64")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{flag} is for a server, and --simulate asks none; leave it out" in err


def with_policies(**rates: float) -> dict[str, Any]:
    found = {name: outcome_with_limit(rate) for name, rate in rates.items()}
    main = [*found][-1]
    outcome = replace(found[main], policy=main, policies=found) if len(found) > 1 else found[main]
    result = summarize(outcome, Options(targets=TARGETS))
    return json.loads(json.dumps(result)) | ({} if len(found) > 1 else {"settings": {"policy": main}})


def test_policies_that_both_have_are_compared_and_the_others_named() -> None:
    now, then = with_policies(static=2.0, continuous=8.0), with_policies(dynamic=3.0, continuous=4.0)
    same, *others = against_lines(now, then)
    assert same.startswith("continuous: Then: 4.04 requests/s")
    assert "That is 2.00 times" in same
    assert others == ["static was measured only now.", "dynamic was measured only then."]
    alone = with_policies(static=1.0)
    first, *rest = against_lines(now, alone)
    assert first.startswith("static: Then: 1.01 requests/s")
    assert rest == ["continuous was measured only now."]
    assert against_lines(then, alone)[0] == "Nothing can be compared: they are of other policies."
    untold = copy.deepcopy(alone) | {"settings": None}
    assert against_lines(now, untold)[0].startswith("continuous: Then: 1.01 requests/s")


def test_answers_that_others_got_are_counted_and_told() -> None:
    text = (
        'relevo:request_success_total{{finished_reason="stop"}} {0}\n'
        'relevo:request_success_total{{finished_reason="length"}} {1}\n'
        'relevo:request_success_total{{finished_reason="abort"}} {2}\n'
    )
    before, after = text.format(5, 10, 0), text.format(8, 30, 99)
    assert num_answered(before, after) == 23
    assert num_answered("vllm:num_requests_running 0\n", after) is None
    with open_endpoint(metrics=before) as (url, behaviour):
        measure = HttpMeasure(find_endpoint(url, "chat"), SOURCE, 5, 10.0, idle_seconds=0.0)
        assert measure(60.0, 0).others in (None, 0)
        behaviour.next_metrics = after  # others have had their answers when the first scrape of the run is over
        seen = measure(6.0, 0)
    assert seen.others is not None
    assert 23 - 12 <= seen.others <= 23 - 8
    runs = [replace(run, others=seen.others) for run in BY_CHANCE[:2]]
    result = summarize(Outcome({}, SOURCE, None, 20.0, [*runs, BY_CHANCE[-1]], 1.0), Options(targets=TARGETS))
    assert [run["requests_of_others"] for run in result["curve"]] == [seen.others, seen.others, None]
    said = (
        f"The server gave {2 * (seen.others or 0)} answers to others during 2 of 3 runs, to users or to another search"
    )
    assert any(remark.startswith(said) for remark in result["remarks"])


class VirtualTime:
    """A clock, and a server that answers each request after so many seconds of it."""

    def __init__(self, answer_seconds: float) -> None:
        self.now, self._answer_seconds = 0.0, answer_seconds

    def monotonic(self) -> float:
        return self.now

    def measure(self, _endpoint: Endpoint, source: Source, *_: object) -> VirtualTime:
        self.source = source
        return self

    num_counted = 50

    def closed(self, num_streams: int, _num_requests: int, seconds: float, _seed: int) -> Run:
        self.now += seconds
        stay = self._answer_seconds if self._answer_seconds <= seconds else None
        seen = [Seen(0.0, 0.0, seconds, stay, stay, 10, 5, 4, 0)] * num_streams
        return Run(num_streams / stay if stay else 0.0, 0, self.source.promise, tuple(seen))

    def __call__(self, rate: float, seed: int) -> Run:
        self.now += self.num_counted / rate
        return make_run(rate, seed, ttft=lambda _: 0.1)


@contextmanager
def looking(answer_seconds: float, **options: Any) -> Iterator[tuple[VirtualTime, Looking]]:
    """At a server in virtual time."""
    clock = VirtualTime(answer_seconds)
    asked = Options(targets=SloTargets(999.0, None, None), factor=400.0, streams=2, **options)
    with open_endpoint() as (url, _), pytest.MonkeyPatch.context() as patched:
        patched.setattr("app.limit.command.time", clock)
        patched.setattr("app.limit.command.HttpMeasure", clock.measure)
        yield clock, Looking(find_endpoint(url, "chat"), make_source(asked), asked, lambda *_: None)


@pytest.mark.parametrize("num_shares", [1, 3])
def test_a_time_that_is_too_short_is_told_with_one_that_is_not(num_shares: int) -> None:
    with looking(20.0, duration=60.0, num_shares=num_shares) as (clock, look):
        with pytest.raises(EndpointError, match=r"no request within 15 s; give .* or more, or a larger") as told:
            look.find()
        assert clock.now <= 60
    (duration,) = re.findall(r"--duration (\d+) ", str(told.value))
    assert int(duration) == 120 * num_shares
    with looking(20.0, duration=int(duration) / num_shares) as (_, look):
        assert look.prepare().single.finished


@pytest.mark.parametrize(
    ("duration", "deadline", "said"),
    [
        (60.0, 120.0, "within 30 s; give a larger --duration, or a larger --factor."),
        (480.0, 10.0, "within 30 s; give a larger --factor."),
        (480.0, 90.0, "within 90 s; give a larger --factor."),
    ],
)
def test_whether_an_answer_comes_at_all_is_waited_for_no_longer_than_there_is_time(
    duration: float, deadline: float, said: str
) -> None:
    with looking(math.inf, duration=duration, deadline=deadline) as (clock, look):
        with pytest.raises(EndpointError) as told:
            look.find()
        assert str(told.value).endswith(said)
        assert clock.now <= duration


@pytest.mark.slow
def test_of_a_server_that_gives_no_answer_a_closed_loop_has_none() -> None:
    with open_endpoint() as (url, behaviour):
        measure = HttpMeasure(find_endpoint(url, "chat"), SOURCE, 5, 10.0)
        behaviour.first_seconds = 600.0
        run = measure.closed(2, 5, 0.2, 0)
    assert (run.finished, run.rate, [seen.error for seen in run.seen]) == ([], 0.0, ["", ""])


def test_what_a_search_takes_is_told_of_all_that_share_the_time() -> None:
    found = []
    for num_shares in (1, 3):
        with looking(2.0, duration=120.0, num_shares=num_shares) as (_, look):
            found.append(look.find().wanted_seconds or 0)
    assert found[1] == 3 * found[0] > 0
    shared: list[tuple[float, int]] = []

    def find(name: str, options: Options, _report: object) -> Outcome:
        shared.append((options.duration, options.num_shares))
        return replace(outcome_with_limit({"static": 2.0, "continuous": 5.0}[name]), wanted_seconds=400)

    options = Options(targets=TARGETS, duration=300.0)
    result = summarize(find_under(("static", "continuous"), find, options, lambda *_: None), options)
    assert [(round(duration), num) for duration, num in shared] == [(150, 2), (300, 2)]
    said = "Only 1 of 3 seeds were tried: there was no time for more, give --duration 400 or more."
    assert all(said in one["remarks"] for one in (result, *result["policies"].values()))


def test_what_a_whole_search_takes_is_said_where_there_was_no_time_for_it() -> None:
    outcome = replace(outcome_with_limit(100.0), wanted_seconds=77)
    remarks = summarize(outcome, Options(targets=TARGETS, duration=20.0))["remarks"]
    assert "Only 1 of 3 seeds were tried: there was no time for more, give --duration 77 or more." in remarks
    lost = summarize(replace(outcome, runs=outcome.runs[1:]), Options(targets=TARGETS, duration=20.0))
    assert lost["why"].endswith("no time for lower ones, give --duration 77 or more, or a larger --factor.")
    cut = summarize(replace(outcome, unfinished="It was interrupted"), Options(targets=TARGETS, duration=20.0))
    assert "Only 1 of 3 seeds were tried." in cut["remarks"]
    assert not any("--duration" in remark for remark in cut["remarks"])


@pytest.mark.parametrize("lower", [(), (run_at(14.0, 0.01),)])  # two rates tell how fast the misses rise
def test_where_every_rate_held_neither_an_interval_nor_a_bound_is_told(lower: tuple[Run, ...]) -> None:
    result = summarize(Outcome({}, SOURCE, None, 20.0, [*lower, run_at(16.0, 0.03)], 1.0), Options(targets=TARGETS))
    assert (result["limit"]["is_at_least"], result["limit"]["high"]) == (True, None)
    said = "The limit is at least 16.0 requests/s; what bound it is unknown (every rate that was tried held)."
    assert said in lines_of(result)
    assert said in page_of(result)
    assert "between 1" not in page_of(result)
    assert against_lines(result, result)[-1] == "Then: at least 16.0 requests/s. Now: at least 16.0 requests/s."
    # A result of an older version has an upper end there, which nobody knows.
    older = {**result, "limit": {**result["limit"], "high": 18.4}}
    assert (lines_of(older), page_of(older)) == (lines_of(result), page_of(result))
    told = {"id": "x", "began": "then", "end": "found", "model": "fake", "curve": [], "asked": WISH}
    for one in (result, older):
        brief = make_brief({**told, "result": one})
        assert (brief["high"], interval_words(brief)) == (None, "at least 16.0 requests/s")


def test_a_rate_at_which_the_generator_was_late_is_no_upper_end() -> None:
    late = make_run(18.0, ttft=lambda _: 0.1, lag=0.2)
    found = summarize(
        Outcome({}, SOURCE, None, 20.0, [run_at(14.0, 0.01), run_at(16.0, 0.03), late], 1.0), Options(targets=TARGETS)
    )
    assert (found["limit"]["is_at_least"], found["limit"]["high"]) == (True, None)
    assert any(line.startswith("The limit is at least 16.0 requests/s") for line in lines_of(found))


def test_what_is_compared_with_virtual_time_is_told() -> None:
    measured, simulated = ({**with_policies(continuous=2.0), "machine": machine} for machine in ("8 cores", None))
    said = "is of a machine in virtual time (--simulate), and the other was measured."
    assert f"Then {said}" in against_lines(measured, simulated)
    assert f"Now {said}" in against_lines(simulated, measured)
    for same in (measured, simulated):
        assert not any("virtual" in line for line in against_lines(same, same))


def test_a_search_of_the_page_is_told_again(tmp_path: Path, run: Any) -> None:
    result = summarize(outcome_with_limit(2.0), Options(targets=TARGETS))
    for told, expected in (
        ({"id": "x", "result": result}, (0, "The limit is 2.02")),
        ({"id": "x", "result": None}, (2, "")),
    ):
        (tmp_path / "kept.json").write_text(json.dumps(told))
        code, out, err = run("limit", "--from", str(tmp_path / "kept.json"))
        assert (code, expected[1] in out) == (expected[0], True)
        assert ("nor a search of the dashboard with one." in err) == (code == 2)


class Closed:
    """A server of which nothing is asked but how many answers it gives a second."""

    rate = 0.0

    def __init__(self, _endpoint: Endpoint, source: Source, num_counted: int, *_: object) -> None:
        self.source, self.num_counted = source, num_counted

    def closed(self, num_streams: int, *_: object) -> Run:
        return Run(self.rate, 0, self.source.promise, (Seen(0.0, 0.0, 5.0, 1.0, 5.0, 10, 5, 4, 0),) * num_streams)


@pytest.mark.parametrize(
    ("rate", "given", "factor", "said"),
    [
        (8.0, None, 2.0, r"Lengths were divided by 2 .* such requests\. For .* --factor 1 --duration (\d+)\."),
        (
            0.2,
            None,
            48.0,
            r"Lengths were divided by 48 .* answers have 1\.0 tokens .* hardly a gap\. .*--duration (\d+)\.",
        ),
        (80.0, None, 1.0, ""),
        (8.0, 9.0, 9.0, ""),
    ],
)
def test_lengths_are_divided_no_further_than_time_and_gaps_want(
    rate: float, given: float | None, factor: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options(targets=TARGETS, factor=given, duration=600.0, streams=2)
    monkeypatch.setattr("app.limit.command.HttpMeasure", Closed)
    monkeypatch.setattr(Closed, "rate", rate)
    with open_endpoint() as (url, _):
        look = Looking(find_endpoint(url, "chat"), mixed(Ranges((10, 20), (12, 12))), options, lambda *_: None)
        outcome = look.outcome(look.prepare(), [])
    assert outcome.source.factor == factor
    divided = [remark for remark in outcome.remarks if "divided" in remark]
    assert bool(divided) == bool(said)
    for remark in divided:
        match = re.fullmatch(said, remark)
        assert match, remark
        seconds = 7 * (1.3 * 300 / (0.8 * rate / 8) + 4)  # seven runs of 300 requests, whose lengths are not divided
        assert seconds < int(match[1]) < 1.2 * seconds


def test_answers_that_are_shorter_than_was_asked_for_are_told() -> None:
    def answered(*tokens: int) -> list[str]:
        seen = [
            replace(one, output_tokens=came, asked_tokens=10)
            for one, came in zip(BY_CHANCE[0].seen, tokens, strict=False)
        ]
        runs = [replace(BY_CHANCE[0], seen=tuple(seen))]
        remarks = summarize(Outcome({}, SOURCE, None, 20.0, runs, 1.0), Options(targets=TARGETS))["remarks"]
        return [remark for remark in remarks if "ignore_eos" in remark]

    assert answered(10, 10, 9, 9) == []  # an end token may not be told
    (said,) = answered(10, 2, 4, 4)
    assert said.replace("\N{NO-BREAK SPACE}", " ").startswith("Answers had 50 % of the tokens that were asked for")


@pytest.mark.parametrize(
    ("arrivals", "gap_cv", "num", "said"),
    [
        ("gamma", 13.0, 450, "a CV of 13: for chance the 450 of a run are no more than about 3 that come singly"),
        ("gamma", 3.0, 450, ""),
        ("gamma", 3.0, 200, "the 200 of a run are no more than about 22 that"),
        ("poisson", 1.0, 20, ""),
        ("constant", 1.0, 450, ""),
    ],
)
def test_that_there_were_too_few_bursts_for_an_interval_is_told(
    arrivals: str, gap_cv: float, num: int, said: str
) -> None:
    source = replace(SOURCE, arrivals=arrivals, gap_cv=gap_cv)
    runs = []
    for rate in (5.0, 6.0):
        run, load = make_run(rate, ttft=lambda _: 0.1, num=num), source.make(num, rate, 0)
        dues = [item.arrival_seconds for item in load.workload.items[slice(*load.counted)]]
        runs.append(replace(run, seen=tuple(replace(one, due=due) for one, due in zip(run.seen, dues, strict=True))))
    options = Options(targets=TARGETS, arrivals=arrivals, gap_cv=gap_cv)
    remarks = summarize(Outcome({}, source, None, 20.0, runs, 1.0), options)["remarks"]
    told = [remark for remark in remarks if "came in bursts" in remark]
    assert len(told) == bool(said)
    assert all(said in remark for remark in told)
    # Of other arrivals, as those of a trace, it is told by the gaps themselves.
    other = Outcome({}, replace(source, arrivals="poisson"), None, 20.0, runs, 1.0)
    assert any("came in bursts" in remark for remark in summarize(other, options)["remarks"]) == bool(said)


def test_a_mix_without_a_target_is_told_what_its_file_lacks(tmp_path: Path) -> None:
    path = tmp_path / "mix.toml"
    lines = [f'{name}_p95_seconds = "none"\n' for name in ("ttft", "itl", "e2e")]
    path.write_text('[[class]]\nname = "a"\nshare = 1\nworkload = "mooncake"\n' + "".join(lines))
    with pytest.raises(ConfigError, match=r"No class of .*mix\.toml has a target, .* as ttft_p95_seconds, "):
        make_source(Options(mix=path, targets=TARGETS))


def test_what_killed_processes_have_left_goes_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names = ("left", "used", "fresh", "foreign", "bare", "begun")
    left, used, fresh, foreign, bare, begun = (tmp_path / f"{PREFIX}{name}" for name in names)
    for folder in (left, used, fresh):
        folder.mkdir()
        (folder / LOCK).touch()
        (folder / "log").touch()
    foreign.symlink_to(left)
    for folder in (bare, begun):  # without a lock: of one who was killed too early, and of one who is about to make it
        folder.mkdir()
    for folder in (left, used, bare):
        os.utime(folder, (0, time.time() - 120))
    with (used / LOCK).open("rb") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        with open_folder() as (mine, _):
            assert {*tmp_path.iterdir()} == {used, fresh, foreign, begun, mine}
        assert {*tmp_path.iterdir()} == {used, fresh, foreign, begun}
