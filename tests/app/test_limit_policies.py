"""The limit under several policies, and of mixes, in virtual time; the same by a loop that is told what to do."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from app.limit.endpoint import EndpointError
from app.limit.lengths import Ranges
from app.limit.load import Source, WorkClass
from app.limit.options import Options
from app.limit.policies import find_under
from app.limit.remarks import why_not
from app.limit.runs import Promise, Run, Seen
from app.limit.summary import Outcome, summarize
from app.limit.telling import tell
from app.limit.words import lines_of, policy_rows
from engine.config import SloTargets

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SIMULATE = (
    "limit", "--simulate", "--memory-gb-per-second", "20", "--tflops", "0.5", "--parameters", "134515008",
    "--kv-bytes-per-token", "23040", "--factor", "20",
)  # fmt: skip
TARGETS = SloTargets(1.0, None, None)
SOURCE = Source((WorkClass("requests", 1.0, Ranges((5, 5), (2, 2)), TARGETS),), Promise((TARGETS,), 0.01), factor=7.0)


def run_at(rate: float, ttft: float, seed: int = 0, num: int = 60) -> Run:
    seen = [Seen(place / rate, 0.0, ttft, ttft, 2 * ttft, 5, 2, 1, 0, (0.1,)) for place in range(num)]
    return Run(rate, seed, SOURCE.promise, tuple(seen), tokens=(5 * rate, 2 * rate))


def outcome_with_limit(rate: float) -> Outcome:
    return Outcome({}, SOURCE, run_at(1.0, 0.1), rate, [run_at(rate, 0.5), run_at(rate * 1.02, 3.0)], 1.0)


def test_the_first_settles_on_what_all_are_asked() -> None:
    asked: list[tuple[str, float | None, int | None]] = []
    told: list[str] = []

    def find(name: str, options: Options, report: Callable[[int, int, str], object]) -> Outcome:
        asked.append((name, options.factor, options.requests))
        report(1, 2, "3.00/s")
        assert options.duration <= 300
        return outcome_with_limit({"static": 2.0, "continuous": 5.0}[name])

    options = Options(targets=TARGETS, duration=300.0, think_time=4.0)
    outcome = find_under(("static", "continuous"), find, options, lambda _gone, _all, what: told.append(what))
    assert asked == [("static", None, None), ("continuous", 7.0, 60)]
    assert told == ["static, 3.00/s", "continuous, 3.00/s"]
    result = summarize(outcome, options)
    assert result["policy"] == "continuous"
    assert result["limit"] == result["policies"]["continuous"]["limit"]
    ratio = result["ratio"]["continuous_over_static"]
    assert ratio["estimate"] == pytest.approx(2.5)
    assert ratio["low"] <= ratio["estimate"] <= ratio["high"]
    # A user is there for a second and thinks for four.
    users = {name: one["limit"]["users"] for name, one in result["policies"].items()}
    assert users == {"static": pytest.approx(10, rel=0.02), "continuous": pytest.approx(25, rel=0.02)}
    lines = lines_of(result)
    assert any(line.split()[:1] == ["static"] and "2.50 (" in line for line in lines)
    assert "Under static:" in lines
    json.dumps(result)


def test_a_server_that_fails_under_one_policy_leaves_what_was_measured() -> None:
    died = "The server died, or cannot be reached any more (no)"
    half = replace(outcome_with_limit(2.0), unfinished=died, remarks=["Lengths were divided."])
    whole = outcome_with_limit(5.0)
    options = Options(targets=TARGETS, duration=300.0)

    def find(ends: dict[str, Outcome], name: str, _options: Options, _report: object) -> Outcome:
        if name not in ends:
            raise EndpointError("It does not start.")
        return ends[name]

    names = ("static", "continuous")
    ends = {"static": half, "continuous": whole}
    result = summarize(find_under(names, partial(find, ends), options, lambda *_: None), options)
    assert result["unfinished"] == f"static: {died}"
    assert result["policies"]["static"]["unfinished"] == died
    assert result["policies"]["continuous"]["unfinished"] is None
    assert "Lengths were divided." in result["remarks"]
    assert tell(result, echo=None) == 1
    cut = summarize(find_under(names, partial(find, {"static": whole}), options, lambda *_: None), options)
    assert cut["unfinished"] == "continuous: It does not start; not measured: continuous"
    assert cut["policy"] == "static"
    with pytest.raises(EndpointError, match="does not start"):
        find_under(names, partial(find, {}), options, lambda *_: None)


def test_a_policy_without_a_limit_is_told_with_the_reason() -> None:
    found = {"static": replace(outcome_with_limit(1.0), runs=[run_at(1.0, 3.0)]), "continuous": outcome_with_limit(5.0)}
    result = summarize(replace(found["continuous"], policy="continuous", policies=found), Options(targets=TARGETS))
    assert result["ratio"] == {"continuous_over_static": None}
    assert any(line.split()[:2] == ["static", "none"] and "hold at no rate" in line for line in lines_of(result))


def test_a_policy_that_held_at_every_rate_has_no_ratio_and_no_upper_end() -> None:
    best = outcome_with_limit(5.0)
    found = {"static": outcome_with_limit(1.0), "continuous": replace(best, runs=best.runs[:1])}
    result = summarize(replace(found["continuous"], policy="continuous", policies=found), Options(targets=TARGETS))
    assert result["ratio"] == {"continuous_over_static": None}
    static, continuous = (cells[:3] + cells[7:8] for cells in policy_rows(result)[1:])
    assert static[:2] == ["static", "1.01"]
    assert static[3] == "-"
    assert continuous == ["continuous", "at least 5.00", "-", "-"]


@pytest.mark.slow
def test_continuous_batching_serves_more_within_the_same_promise(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "limit.json"
    code, out, err = run(
        *SIMULATE, "--requests", "60", "--repeats", "1", "--policies", "static,continuous", "--json", path
    )
    assert (code, err) == (0, "")
    result = json.loads(path.read_text())
    assert result["ratio"]["continuous_over_static"]["low"] > 1.5
    lengths = {(one["workload"]["factor"], one["curve"][0]["requests"]) for one in result["policies"].values()}
    assert lengths == {(20.0, 60)}
    assert "how much more continuous serves" in out


@pytest.mark.parametrize("word", ["static", "static,static", "static,best", ""])
def test_policies_that_cannot_be_compared_are_wrong_use(run: Any, word: str) -> None:
    code, _, err = run("limit", "--policies", word)
    assert (code, err.count("\n")) == (2, 1)
    assert "two or more of static, dynamic, continuous" in err


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (("--url", "http://x"), "leave --url and --policy out"),
        (("--policy", "static"), "leave --url and --policy out"),
        (("--tune",), "give one of the two"),
    ],
)
def test_policies_are_those_of_a_server_that_is_started(run: Any, other: tuple[str, ...], said: str) -> None:
    code, _, err = run("limit", "--policies", "static,continuous", *other)
    assert (code, err.count("\n")) == (2, 1)
    assert said in err


@pytest.mark.slow
def test_a_mix_is_simulated_with_its_background_work(run: Any, tmp_path: Path) -> None:
    mix, path = tmp_path / "mix.toml", tmp_path / "limit.json"
    mix.write_text(
        '[[class]]\nname = "quick"\nshare = 2\nprompt_tokens = 40\noutput_tokens = [5, 15]\nttft_p95_seconds = 0.5\n'
        '[[class]]\nname = "patient"\nshare = 1\nprompt_tokens = 200\noutput_tokens = 30\ne2e_p95_seconds = 30\n'
        "background = true\n"
    )
    code, _, err = run(
        *SIMULATE[:-2], "--factor", "1", "--requests", "60", "--repeats", "1", "--mix", mix, "--json", path
    )
    assert (code, err) == (0, "")
    result = json.loads(path.read_text())
    highest = result["curve"][-1]["classes"]
    assert highest[0]["ttft_p95_seconds"] < highest[1]["ttft_p95_seconds"]
    assert all(one["itl_p95_seconds"] > 0 for one in highest)
    assert {*result["curve"][0]["excess"]} == {
        "ttft of quick",
        "e2e of patient",
        "errors",
        "waiting grows",
        "preemptions",
    }
    assert result["curve"][0]["preemptions"] == 0


def test_why_there_is_no_limit_is_told_by_what_came() -> None:
    single = run_at(1.0, 3.0)
    said = why_not(single, [], 1.0).replace("\N{NO-BREAK SPACE}", " ")
    assert said.endswith("within the targets: the first token takes 3.00 s (median), more than 1.00 s.")
    lost = run_at(4.0, 3.0, seed=1)
    assert "under one seed and under another they do not" in why_not(None, [run_at(4.0, 0.5), lost], 5.0)
    assert why_not(None, [lost], 200.0).endswith("hold at no rate that was tried, down to 4 requests/s (ttft).")
    assert "no time for lower ones, give a larger --duration, or a larger --factor" in why_not(None, [lost], 5.0)


def test_what_rests_on_little_is_told() -> None:
    outcome = outcome_with_limit(100.0)
    remarks = summarize(outcome, Options(targets=TARGETS, repeats=3))["remarks"]
    assert "A p95 wants 300 finished requests; here are runs with 60." in remarks
    assert "Only 1 of 3 seeds were tried: there was no time for more, give a larger --duration." in remarks
