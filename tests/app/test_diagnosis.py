"""What is wrong is said with its cause and the control that helps; where nothing is, that is said."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.diagnosis import ENOUGH_SAMPLES, Finding, diagnose
from app.history import History
from app.journal.rows import REFUSED
from engine.config import NO_TARGETS, Limits, SloTargets
from engine.engine import IS_DRAINING, IS_ENDING
from engine.experience import all_experience
from engine.report import PREEMPTION_REASONS, WAIT_REASONS
from engine.stats import RequestTimes, Stats
from tests.fake_snapshot import FakeEngine

QUIET = History(300).recent()
NO_ROOM = "the queue had no room for them"


def house(**changes: Any) -> dict[str, Any]:
    """Sixteen seats, four of them taken, all promises kept."""
    snapshot = FakeEngine("idle", seats=16, budget=128).snapshot() | {"recent": deepcopy(QUIET)}
    snapshot["requests"] |= {"running": 4, "waiting": 0}
    snapshot["step"]["seconds_p50"] = 0.1
    for name, value in changes.items():
        snapshot[name] = {**snapshot[name], **value} if isinstance(value, dict) else value
    return snapshot


def meets(snapshot: dict[str, Any], *, samples: int = 100, background: bool = False, **p95: float) -> dict[str, Any]:
    """The same with these p95 of latencies."""
    snapshot = deepcopy(snapshot)
    latency = (snapshot["background"] if background else snapshot)["latency"]
    for name, value in p95.items():
        latency[name] |= {"count": samples, "p50": value / 2, "p90": value, "p95": value, "p99": value}
    return snapshot


def waits(number: int, reason: str) -> dict[str, Any]:
    places = {"interactive": {"running": 16, "waiting": number}, "background": {"running": 0, "waiting": 0}}
    return {"running": 16, "waiting": number, "waiting_by_reason": {reason: number}, "by_class": places}


def refused(**reasons: int) -> dict[str, Any]:
    return {"refused": sum(reasons.values()), "refused_by_reason": reasons}


def found(snapshot: dict[str, Any], *, most_seats: int = 64) -> list[Finding]:
    return diagnose(snapshot, ready=True, reason=None, most_seats=most_seats)


def words(finding: Finding) -> str:
    text = f"{finding.what}: {finding.why}. {finding.help}"
    return text.replace("\N{NO-BREAK SPACE}", " ")


def test_all_is_well_says_what_was_promised_and_met() -> None:
    (finding,) = found(meets(house(), ttft=0.4, itl=0.06))
    assert finding.level == "good"
    met = "first token p95 400 ms of 2.00 s; between tokens p95 60 ms of 250 ms"
    assert words(finding).startswith(f"All is well: 4 requests run, nobody waits; {met}")


def test_nobody_there() -> None:
    (finding,) = found(house(requests={"running": 0, "waiting": 0}))
    assert (finding.level, finding.what) == ("good", "Nothing runs and nobody waits")


def test_late_first_tokens_for_want_of_seats_are_helped_by_seats_while_memory_has_room() -> None:
    late = meets(house(requests=waits(14, "seats"), kv={"usage": 0.37}), ttft=2.1, queue=1.9, itl=0.1)
    (finding,) = found(late)
    assert (finding.level, finding.setting) == ("bad", "max_num_seqs")
    assert words(finding) == (
        "First token p95 2.10 s, over its target of 2.00 s: 14 wait for a seat. "
        "Raise the seats (16 now, up to 64): KV memory has room, 37 % is used."
    )


@pytest.mark.parametrize(
    ("changes", "latencies", "most_seats", "said"),
    [
        ({"kv": {"usage": 0.95}}, {}, 64, "KV memory is 95 % used. More seats would not help"),
        ({"kv": {"usage": 0.2}}, {}, 16, "All 16 seats that can be had are given"),
        ({"kv": {"usage": 0.2}}, {"itl": 0.24}, 64, "More seats would make tokens later"),
    ],
)  # fmt: skip
def test_seats_are_not_recommended_where_they_do_not_help(
    changes: dict[str, Any], latencies: dict[str, float], most_seats: int, said: str
) -> None:
    late = meets(house(requests=waits(14, "seats"), **changes), ttft=2.1, queue=1.9, **latencies)
    (finding,) = found(late, most_seats=most_seats)
    assert said in words(finding)
    assert finding.setting is None


@pytest.mark.parametrize(
    ("reason", "config", "setting"),
    [
        ("kv_memory", {"admission": "reserve"}, "admission"),
        ("kv_memory", {"admission": "on_demand"}, None),
        ("token_budget", {}, "max_num_batched_tokens"),
        ("policy", {"policy": "static"}, "policy"),
        ("switching", {}, None),
        ("shared_prompt", {}, None),
        ("fault", {}, None),
    ],
)
def test_each_reason_to_wait_has_its_own_control(reason: str, config: dict[str, str], setting: str | None) -> None:
    late = meets(house(requests=waits(3, reason), config=config), ttft=5.0, queue=4.0)
    (finding,) = found(late)
    assert finding.setting == setting
    assert "3 wait" in finding.why


@pytest.mark.parametrize(
    ("config", "step", "setting"),
    [
        ({"slo_admission": True}, {}, "itl_p95_seconds"),
        ({"slo_admission": False}, {}, "max_num_batched_tokens"),
        ({"slo_admission": True, "generation": 8}, {}, "max_num_batched_tokens"),  # the budget was raised a moment ago
        ({"slo_admission": True}, {"budget": 128}, "max_num_batched_tokens"),
    ],
)
def test_where_steps_are_kept_short_for_the_gaps_a_larger_budget_is_no_help(
    config: dict[str, Any], step: dict[str, int], setting: str
) -> None:
    late = house(requests=waits(3, "token_budget"), config={"generation": 7, **config})
    steps = [{"step": number, "budget": 40, "generation": 7, "rows": [], **step} for number in range(1, 65)]
    (finding,) = found(meets(late | {"table": late["table"] | {"steps": steps}}, ttft=5.0, queue=4.0))
    assert finding.setting == setting
    is_paced = setting == "itl_p95_seconds"
    assert ("as short as the gaps between tokens" in finding.why) == is_paced
    # Nor does one finding ask for a larger budget and the next for a smaller one.
    steps = [step | {"rows": [[0, "a", "prefill", 20]]} for step in steps]
    slow = late | {"table": late["table"] | {"steps": steps}, "requests": {**late["requests"], "waiting": 0}}
    both = found(meets(slow, ttft=3.0, queue=0.1, itl=0.4))
    assert len(both) == 2
    assert not is_paced or "max_num_batched_tokens" not in [finding.setting for finding in both]


def test_who_is_refused_for_being_late_is_put_down_to_the_switch() -> None:
    (finding,) = found(house(recent={**QUIET, **refused(late=4)}))
    assert (finding.level, finding.setting) == ("warn", "slo_admission")
    assert "4 requests refused" in finding.what


def test_long_prompts_are_helped_by_the_budget_while_tokens_have_time() -> None:
    slow = house(requests={"running": 4, "waiting": 0})
    (finding,) = found(meets(slow, ttft=3.0, queue=0.1, itl=0.1))
    assert (finding.setting, "Raise the token budget (128 now)" in finding.help) == ("max_num_batched_tokens", True)
    (finding,) = found(meets(slow, ttft=3.0, queue=0.1, itl=0.24))
    assert finding.setting is None


def test_late_tokens_are_put_down_to_what_makes_them_late() -> None:
    prefills = {"steps": [{"rows": [[0, "a", "prefill", 100], [1, "b", "decode", 1]]}] * 10}
    late = meets(house(table=prefills), itl=0.4)
    (finding,) = found(late)
    assert (finding.setting, "100 % of the steps" in words(finding)) == ("max_num_batched_tokens", True)
    late = meets(house(), itl=0.4)
    (finding,) = found(late)
    assert (finding.setting, "Lower the seats (16 now)" in finding.help) == ("max_num_seqs", True)
    late["requests"]["running"] = 1
    assert "for one alone" in found(late)[0].why
    late["recent"]["preemptions_by_reason"]["better_right"] = 3
    (finding,) = found(late)
    assert "3 times a request lost its seat to one with a better right" in finding.why
    assert "With more seats" in finding.help
    late["recent"]["preemptions_by_reason"]["kv_memory"] = 4
    assert "4 times a request lost its seat for want of KV memory" in found(late)[0].why


def test_late_answers_say_where_the_time_goes() -> None:
    stats = Stats(SloTargets(None, None, e2e_p95_seconds=10.0), NO_TARGETS)
    for number in range(30):
        times = RequestTimes(number, seated=number + 1.0, first_token=number + 2.0, last_token=number + 20.0)
        stats.record_finish(times, 50.0, "stop")
    (finding,) = found(house() | all_experience(stats, 50.0, 300))
    assert "most of it is writing the answer: 18.0 s a request" in words(finding)


def test_background_work_has_promises_of_its_own() -> None:
    snapshot = house()
    snapshot["background"]["slo"]["targets"] = asdict(SloTargets(60.0, None, None))
    (finding,) = found(meets(snapshot, background=True, ttft=61.0, queue=1.0))
    assert finding.what.startswith("Background work: First token p95")
    assert found(meets(snapshot, background=True, ttft=59.0))[0].level == "good"


def test_few_samples_and_a_quiet_house_alarm_less() -> None:
    (finding,) = found(meets(house(), samples=ENOUGH_SAMPLES - 1, itl=0.4))
    assert (finding.level, "only 19 samples" in finding.what) == ("warn", True)
    (finding,) = found(meets(house(requests={"running": 0, "waiting": 0}), ttft=9.0))
    assert (finding.level, "nothing runs now" in finding.why) == ("warn", True)


@pytest.mark.parametrize(
    ("reason", "level", "what"),
    [
        (IS_ENDING, "warn", "The server is draining"),
        (IS_DRAINING, "warn", "The server is draining"),
        ("stalled: a step has been running for 31 s", "bad", "The engine is stalled"),
        ("loading: the model is read", "bad", "The server is not ready: loading"),
        (None, "bad", "The server is not ready: not ready"),
    ],
)
def test_the_state_comes_first(reason: str | None, level: str, what: str) -> None:
    late = meets(house(), itl=0.4)
    first, second = diagnose(late, ready=False, reason=reason, most_seats=64)
    assert (first.level, first.what, second.level) == (level, what, "bad")


def test_a_drain_of_an_operator_is_ended_by_one() -> None:
    for reason, help_, setting in (
        (IS_ENDING, "It ends by itself.", None),
        (IS_DRAINING, "Admit again when it is to serve.", "draining"),
    ):
        finding = diagnose(house(), ready=False, reason=reason, most_seats=64)[0]
        assert (finding.help, finding.setting) == (help_, setting)


def test_what_has_one_cause_is_helped_once() -> None:
    full = house(
        requests=waits(40, "seats"), recent=refused(queue_full=9), kv={"usage": 0.1}, config={"max_waiting": 40}
    )
    findings = found(meets(full, ttft=9.0, queue=8.0))
    assert [finding.level for finding in findings] == ["bad", "bad", "warn"]
    assert findings[0].what == "9 requests refused in 5\N{NO-BREAK SPACE}min, and the queue is full"
    assert [finding.setting for finding in findings] == ["max_num_seqs", None, None]
    assert {finding.why for finding in findings} == {"40 wait for a seat"}


def test_a_queue_that_is_not_full_any_more_is_not_said_to_be() -> None:
    (finding,) = found(house(requests=waits(1, "seats"), recent=refused(queue_full=30)))
    assert (finding.level, finding.why) == ("warn", f"{NO_ROOM}; 0.4\N{NO-BREAK SPACE}% of it is taken now")
    (finding, _) = found(house(requests=waits(208, "seats"), recent=refused(queue_full=28)))
    assert finding.level == "bad", "it may be full again in a moment"
    assert words(finding).startswith(f"28 requests refused in 5 min: {NO_ROOM}; 81 % of it is taken now: 208 wait")


def test_each_reason_of_a_refusal_is_told_by_its_name() -> None:
    told = [words(finding) for finding in found(house(recent=refused(rate_limited=100, draining=2)))]
    assert told == [
        "100 requests refused in 5 min: over the limit of its key. ",
        "2 requests refused in 5 min: taking nothing new. ",
    ]


def test_who_ran_out_of_time_is_no_error_but_waited_too_long() -> None:
    stats = Stats(SloTargets(None, None, None))
    for number in range(9):
        stats.record_finish(RequestTimes(number), 50.0, "abort", "timeout")
    late = house(requests=waits(14, "seats"), kv={"usage": 0.1}) | all_experience(stats, 50.0, 300)
    (finding,) = found(late)
    assert (finding.what.startswith("9 requests ran out of time"), finding.setting) == (True, "max_num_seqs")
    assert "9 had no seat yet, and 0 had one; now 14 wait for a seat" in finding.why
    quiet = house() | all_experience(stats, 50.0, 300)
    assert "nobody waits now" in found(quiet)[0].why


def test_who_ran_out_of_time_on_a_seat_did_not_wait_for_one() -> None:
    stats = Stats(SloTargets(None, None, None))
    for number in range(2):
        stats.record_finish(RequestTimes(number, seated=number), 50.0, "abort", "timeout")
    late = house(requests=waits(14, "seats"), kv={"usage": 0.1}) | all_experience(stats, 50.0, 300)
    (finding,) = found(late)
    assert "0 had no seat yet, and 2 had one" in finding.why
    assert (finding.help, finding.setting) == ("", None)


def test_seats_that_were_yielded_are_no_want_of_memory() -> None:
    lost = {"preemptions": 5, "preemptions_by_reason": {"kv_memory": 0, "better_right": 5}}
    assert [finding.what for finding in found(house(recent=lost))] == ["All is well"]


def test_a_long_queue_is_one_of_people_who_wait() -> None:
    long = house(requests=waits(17, "no_seat"))
    assert "The queue is long: 17 wait" in " ".join([words(finding) for finding in found(long)])
    long["requests"]["by_class"] = {
        "interactive": {"running": 16, "waiting": 16},
        "background": {"running": 0, "waiting": 1},
    }
    assert not any("The queue is long" in words(finding) for finding in found(long))


def test_failures_waste_and_a_late_loop_are_told() -> None:
    recent = {"preemptions_by_reason": {"kv_memory": 1, "better_right": 0}, "rows": {"computed": 400, "useful": 200}}
    troubled = house(ended={"failed": 2}, loop_lag_seconds=0.4, recent=recent)
    told = " | ".join(words(finding) for finding in found(troubled))
    assert "2 requests failed in 5 min" in told
    assert "Only 50 % of what was computed in 5 min" in told
    assert "The event loop is 400 ms late" in told
    assert "1 preemption in 5 min" in told
    static = house(recent=recent, config={"policy": "static"})
    assert "policy" in [finding.setting for finding in found(static)]
    assert found(house(useful_row_share=0.5))[0].level == "good", "what was long ago is over"


@given(st.data())
def test_every_house_is_told_something_and_only_of_live_settings(data: st.DataObject) -> None:
    draw = data.draw
    waiting = draw(st.dictionaries(st.sampled_from(WAIT_REASONS), st.integers(1, 50)))
    snapshot = house(
        requests={
            "running": draw(st.integers(0, 40)), "waiting": sum(waiting.values()), "waiting_by_reason": waiting,
        },
        kv={"usage": draw(st.floats(0, 1))},
        recent={
            "refused_by_reason": {reason: draw(st.integers(0, 3)) for reason in REFUSED},
            "preemptions_by_reason": {reason: draw(st.integers(0, 3)) for reason in PREEMPTION_REASONS},
            "rows": {"computed": 1000, "useful": draw(st.integers(0, 1000))},
        },
        loop_lag_seconds=draw(st.floats(0, 1)),
    )  # fmt: skip
    names = draw(st.sets(st.sampled_from(("ttft", "itl", "e2e", "queue"))))
    snapshot = meets(snapshot, samples=draw(st.integers(1, 99)), **{name: draw(st.floats(0, 99)) for name in names})
    findings = found(snapshot, most_seats=draw(st.integers(16, 64)))
    assert findings
    for finding in findings:
        assert finding.level in ("bad", "warn", "good")
        assert finding.setting is None or hasattr(Limits(1, 1), finding.setting)
        assert finding.as_json()["what"] == finding.what
