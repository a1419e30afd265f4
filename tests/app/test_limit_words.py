"""What a result says of the requests that it is of, wherever its limit is told."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from app.limit.against import against_lines
from app.limit.elsewhere import Share
from app.limit.lengths import Recorded
from app.limit.load import Source, WorkClass
from app.limit.options import Options
from app.limit.remarks import why_not
from app.limit.runs import Promise, Run, Seen
from app.limit.scrapes import Observed, bound_by
from app.limit.summary import Outcome, summarize
from app.limit.words import lines_of
from app.limit_page.search import Search, make_brief
from app.render.limit import control_variables, kept_variables, run_variables, tiles_of
from engine.config import SloTargets
from engine.workload import WorkItem, Workload
from tests.app.limit_lines import PROMISE, RUNS, TARGETS, result_of, run_at

if TYPE_CHECKING:
    from collections.abc import Mapping

ITL = Promise((SloTargets(None, 0.1, None),), 0.01)
ASKED = {
    "workload": "mooncake", "mix": None, "note": "", "beside_users": False, "arrivals": None, "gap_cv": None,
    "factor": None, "ttft_p95_seconds": 2.0, "itl_p95_seconds": None, "e2e_p95_seconds": None,
    "think_time": None, "price_per_hour": None,
}  # fmt: skip


def divided(factor: float = 64.0) -> dict[str, Any]:
    """A result of requests whose lengths were divided, with users and a price."""
    result = copy.deepcopy(result_of(think_time=20.0, price_per_hour=1.5))
    result["workload"] |= {"factor": factor, "mean_prompt_tokens": 18.67, "mean_output_tokens": 3.21}
    return result


def searched(result: Mapping[str, Any] | None, **more: Any) -> dict[str, Any]:
    search = Search("20260101T000000Z-00000000", {**ASKED, **more}, "the operator", "fake", 0.0)
    search.result = dict(result) if result is not None else None
    return search.as_ended("found", "", 1.0).as_json() if result is not None else search.as_json()


def test_users_and_price_say_of_what_requests_they_are() -> None:
    lines = lines_of(divided())
    (users,) = [line for line in lines if line.startswith("So many users at once")]
    (price,) = [line for line in lines if line.startswith("A million output tokens")]
    assert users.endswith(", for requests of 18.7 tokens in and 3.2 out (lengths divided by 64).")
    assert "(lengths divided by 64): the output tokens bear the price of the prompts too." in price
    (whole,) = [line for line in lines_of(divided(1.0)) if line.startswith("So many users")]
    assert whole.endswith(", for requests of 18.7 tokens in and 3.2 out.")


def test_the_page_says_by_what_lengths_were_divided_wherever_it_tells_the_limit() -> None:
    told = searched(divided())
    short = ", lengths divided by 64 (answers of 3.2 tokens)"
    assert f"mooncake{short};" in control_variables(told)["about"]
    assert kept_variables([make_brief(told)], "")["kept"][0]["divided"] == short
    tiles = {tile.title: tile for tile in tiles_of(told["result"], thinks="", priced="")}
    assert "of requests of 18.7 tokens in and 3.2 out (lengths divided by 64)" in tiles["Operating limit"].note
    assert tiles["A million output tokens"].note == "prompts included"
    told = searched(divided(1.0))
    assert "divided" not in control_variables(told)["about"]
    assert not kept_variables([make_brief(told)], "")["kept"][0]["divided"]


@pytest.mark.parametrize("factor", [None, 16.0])
def test_it_is_told_as_soon_as_it_is_known(factor: float | None) -> None:
    running = searched(None, factor=factor)
    assert (", lengths divided by 16;" in control_variables(running)["about"]) == (factor is not None)
    running["single_user"] = {**divided()["single_user"], "factor": 32.0}
    assert ", lengths divided by 32;" in control_variables(running)["about"]
    assert run_variables(running)["rows"][0]["title"] == "one user alone, lengths divided by 32"


def test_nobody_is_told_that_seats_had_room_who_was_seen_to_wait_for_one() -> None:
    assert bound_by(Observed(running=1.5, waiting=3.1, max_num_seqs=2)) == "sequences"
    assert bound_by(Observed(running=1.5, waiting=0.1, max_num_seqs=2)) == "compute"
    # Who has only just come waits for the next step, and not for a seat.
    assert bound_by(Observed(running=8.0, waiting=3.0, max_num_seqs=64)) == "compute"
    room, full = Observed(running=1.0, waiting=0.0, max_num_seqs=2), Observed(running=2.0, waiting=3.1, max_num_seqs=2)
    lost = [replace(run_at(8.0, 9.0, seed=seed), observed=one) for seed, one in enumerate((room, full))]
    limit = result_of([run_at(4.0, 0.5), *lost])["limit"]
    assert limit["bound_by"] == "sequences"
    assert result_of([run_at(4.0, 0.5), lost[0]])["limit"]["bound_by"] == "compute"


def test_a_machine_that_was_busy_with_something_else_is_told_of() -> None:
    quiet, busy, stolen = Share(0.04, 0.0), Share(0.52, 0.001), Share(0.02, 0.2)
    result = result_of(
        [replace(run, elsewhere=one) for run, one in zip(RUNS, (quiet, busy, *[quiet] * 5), strict=True)]
    )
    (remark,) = [line for line in result["remarks"] if "busy" in line]
    assert "during 1 of 7 runs" in remark
    assert "took up to 52\N{NO-BREAK SPACE}% of its CPUs. The limit is of what they left" in remark
    assert max(run["cpu_share_of_others"] for run in result["curve"]) == 0.52
    result = result_of([replace(run, elsewhere=stolen) for run in RUNS])
    assert any("its host gave up to 20\N{NO-BREAK SPACE}% to other machines" in line for line in result["remarks"])
    for runs in ([replace(run, elsewhere=quiet) for run in RUNS], RUNS):
        assert not any("busy" in line for line in result_of(runs)["remarks"])


def test_what_the_columns_count_stands_below_them() -> None:
    lines = lines_of(result_of())
    place = next(number for number, line in enumerate(lines) if line.startswith("Gaps are counted over all of a run"))
    assert lines[place - 1].split()[0] == "8.00"  # the last run
    assert not any(line.startswith("Gaps are") for line in lines_of({**result_of(), "curve": []}))


@pytest.mark.parametrize(("num_recorded", "is_told"), [(3, True), (39, True), (40, False)])
def test_a_recording_of_a_few_requests_is_no_traffic(num_recorded: int, is_told: bool) -> None:
    recorded = Recorded(Workload("short", tuple([WorkItem(float(place), 20, 11) for place in range(num_recorded)])))
    source = Source((WorkClass("requests", 1.0, recorded, TARGETS),), PROMISE)
    result = summarize(Outcome({}, source, None, 6.0, RUNS, 1.0), Options(targets=TARGETS))
    assert result["recorded_requests"] == num_recorded
    said = f"There are {num_recorded} recorded requests, and 400 of a run that count: the same come again and again"
    assert any(line.startswith(said) for line in result["remarks"]) == is_told


def test_a_described_machine_says_what_it_leaves_out_and_has_a_model(run: Any) -> None:
    words = ["limit", "--simulate", "--memory-gb-per-second", "20", "--tflops", "0.5", "--kv-bytes-per-token", "23040"]
    code, out, _ = run(*words, "--parameters", "134515008", "--requests", "50", "--factor", "40", "--repeats", "1")
    assert code == 0
    assert "attention's arithmetic and the server's own time are not counted: a real one serves less." in out
    code, out, err = run(*words, "--parameters", "8")
    assert (code, out) == (2, "")
    assert "--parameters 8 is no model: give all of its weights, such as 8e9." in err


def test_what_one_user_gets_is_said_in_words_that_fit() -> None:
    result = result_of()
    result["single_user"] |= {"requests": 0}
    assert "One user alone: no request was answered." in lines_of(result)
    assert "One user alone" not in [tile.title for tile in tiles_of(result, thinks="", priced="")]
    slow = Run(0.1, 0, ITL, tuple([Seen(place, 0.0, 9.0, 1.0, 9.0, 20, 2, 1, 1, (8.07,)) for place in range(9)]))
    assert "the gaps between tokens take 8.07" in why_not(slow, (), 1.0)


def test_equal_limits_are_called_the_same_and_one_seed_alone_is_told() -> None:
    result = result_of()
    assert against_lines(result, result)[-1].endswith("That is the same.")
    said = "The interval is of one seed: it knows nothing of how far the limits of other seeds lie apart."
    assert said not in result["remarks"]
    assert said in result_of([run for run in RUNS if run.seed == 0])["remarks"]


def test_runs_at_one_rate_are_told_apart_by_their_seeds() -> None:
    told = searched(result_of())
    told["curve"] = [*reversed(result_of()["curve"])]
    rows = [(row["title"], row["seed"]) for row in run_variables(told)["rows"]]
    assert [row for row in rows if row[0] == "5.80"] == [("5.80", 0), ("5.80", 1)]
