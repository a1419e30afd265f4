"""When something is an event, and what a row says of a second: plain rules."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.journal.events import EventLog, describe_spell
from app.journal.incidents import Crowd, Incidents, Spell, State
from app.journal.journal import Journal
from app.journal.recorder import Recorder
from app.journal.rows import COLUMNS, COUNTS
from engine.engine import IS_DRAINING, IS_ENDING, Health
from tests.fake_snapshot import FakeEngine


def spells(rule: Crowd, totals: list[int]) -> list[tuple[int, Spell]]:
    """What a rule finds when it looks once a second."""
    found = [(second, rule.look(float(second), total)) for second, total in enumerate(totals)]
    return [(second, spell) for second, spell in found if spell is not None]


def test_a_crowd_begins_in_its_midst_and_is_over_after_a_silence() -> None:
    came = [0] * 5 + [1, 0, 2, 2, 1, 3] + [0] * 40
    totals = [sum(came[: n + 1]) for n in range(len(came))]
    (begun, first), (over, last) = spells(Crowd(5, 10.0, 30.0), totals)
    assert (begun, first) == (8, Spell(5.0, 8.0, amount=5))
    assert (over, last) == (40, Spell(5.0, 10.0, 40.0, amount=9))


def test_few_are_no_crowd_however_many_they_become_in_time() -> None:
    assert spells(Crowd(5, 10.0, 30.0), [second // 3 for second in range(1000)]) == []


def test_a_crowd_that_goes_on_is_one() -> None:
    (_, first), (_, last) = spells(Crowd(5, 10.0, 30.0), [*range(300), *[299] * 31])
    assert first.ended is None
    assert (last.amount, last.last) == (299, 299.0)


@given(st.lists(st.integers(0, 4), max_size=200))
def test_every_crowd_has_the_threshold_and_begins_before_it_ends(came: list[int]) -> None:
    totals = [sum(came[: n + 1]) for n in range(len(came))]
    found = spells(Crowd(5, 10.0, 8.0), totals)
    for index, (_, spell) in enumerate(found):
        assert spell.amount >= 5
        assert (spell.ended is not None) == bool(index % 2)
        if spell.ended is not None:
            assert spell.began == found[index - 1][1].began
            assert spell.began <= spell.last <= spell.ended - 8.0
            assert spell.amount == sum(came[int(spell.began) : int(spell.last) + 1])


def test_a_state_that_flickers_is_one_time_and_tells_the_worst() -> None:
    rule = State(1.0, quiet_seconds=5.0)
    values = [0.2, 1.5, 0.1, 3.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]
    found = [spell for second, value in enumerate(values) if (spell := rule.look(float(second), value)) is not None]
    assert found == [Spell(1.0, 1.0, worst=1.5), Spell(1.0, 3.0, 8.0, worst=3.0)]


def test_who_asks_for_what_cannot_be_is_no_crowd_of_refusals() -> None:
    rules = Incidents()
    lost, rejected = {"kv_memory": 0, "better_right": 0}, {"invalid": 0, "queue_full": 0}
    snapshot: dict[str, Any] = {"preemptions_by_reason": lost, "requests": {"rejected_by_reason": rejected}}
    assert rules.look(0.0, snapshot, stalled=False) == {}
    rejected["invalid"], lost["better_right"] = 1000, 1000
    assert rules.look(1.0, snapshot, stalled=False) == {}
    rejected["queue_full"], lost["kv_memory"] = 5, 10
    snapshot["loop_lag_seconds"] = 2.5
    found = rules.look(2.0, snapshot, stalled=True)
    assert set(found) == {"rejections", "preemptions", "stall", "late"}
    assert describe_spell("rejections", found["rejections"]).startswith("5 requests refused")
    assert "2.50" in describe_spell("late", found["late"])


class Watch:
    """A recorder with a wall clock of its own, over the made-up engine."""

    def __init__(self, mode: str = "idle", **options: Any) -> None:
        self.engine = FakeEngine(mode, **options)
        self.wall = 1_700_000_000.0
        self.journal = Journal(wall=lambda: self.wall)
        self.recorder = Recorder(self.journal)
        self.now = 0.0

    def look(self, seconds: float = 1.0, reason: str | None = None, **changes: Any) -> None:
        self.wall += seconds
        self.now += seconds
        self.engine.advance(seconds)
        self.recorder.look(self.now, self.engine.snapshot() | changes, Health(reason is None, reason))

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [dict(zip(COLUMNS, row, strict=True)) for row in self.journal._rows]

    @property
    def events(self) -> list[tuple[str, str]]:
        return [(event.kind, event.text) for event in self.journal.events]


async def test_counts_of_the_rows_add_up_to_the_totals() -> None:
    watch = Watch("overloaded", seats=3)
    for _ in range(600):
        watch.look()
    snapshot = watch.engine.snapshot()
    sums = {name: sum(row[name] for row in watch.rows) for name in COUNTS}
    assert sums["output_tokens"] == snapshot["tokens"]["output"] > 0
    assert sums["prompt_tokens"] == snapshot["tokens"]["prompt"] > 0
    assert sums["requests"] == sum(snapshot["requests"]["finished_by_reason"].values()) > 0
    assert sums["rejections"] == sum(snapshot["requests"]["rejected_by_reason"].values()) > 0
    last = watch.rows[-1]
    assert last["waiting"] == last["waiting_max"] == snapshot["requests"]["waiting"]
    assert last["ttft_p95"] == pytest.approx(snapshot["latency"]["ttft"]["p95"], rel=1e-5)
    assert last["attainment_e2e"] is None


async def test_each_row_has_a_second_of_its_own_also_when_the_clock_is_slewed() -> None:
    watch = Watch()
    for seconds in (1.0, 1.002, 0.4, 1.001, 0.9, 1.0):
        watch.look(seconds)
    times = [row["time"] for row in watch.rows]
    assert len(set(times)) == len(times)
    assert times == sorted(times)
    watch.wall -= 3600  # set back by an hour: what is seen now counts
    watch.look()
    assert watch.rows[-1]["time"] == int(watch.wall)


async def test_an_overload_a_stall_and_a_drain_are_events() -> None:
    watch = Watch("overloaded", seats=2)
    for _ in range(600):
        watch.look()
    assert [kind for kind, _ in watch.events] == ["rejections"]
    before = len(watch.events)
    watch.look(reason="stalled: a step has been running for 9 s")
    watch.look(reason="stalled: a step has been running for 10 s")
    assert watch.events[before:] == [("stall", "A step does not end")]
    watch.look()
    kind, text = watch.events[before]
    assert (kind, text.startswith("A step did not end for 1")) == ("stall", True)
    for _ in range(3):
        watch.look(reason=IS_DRAINING)
    assert [kind for kind, _ in watch.events[before:]] == ["stall"], "the operator's doing is a change of a setting"
    for _ in range(3):
        watch.look(reason=IS_ENDING)
    assert [kind for kind, _ in watch.events[before:]] == ["stall", "drain"]
    (event,) = [event for event in watch.journal.events if event.kind == "drain"]
    assert (event.running, event.waiting) == (2, 40)


async def test_a_clock_that_is_set_back_neither_prolongs_a_stall_nor_makes_a_crowd() -> None:
    watch = Watch()
    watch.look(reason="stalled: a step has been running for 9 s")
    (begun,) = watch.journal.events
    watch.wall -= 3600
    watch.look()
    (over,) = watch.journal.events
    assert over.end is not None
    assert over.end - begun.time == pytest.approx(1.0)
    for number in range(30):
        if number == 15:
            watch.wall -= 3600
        watch.engine.preempted_total += 1
        watch.look(10.0)
    assert [kind for kind, _ in watch.events] == ["stall"], "one every ten seconds is no crowd"


async def test_who_gave_up_has_not_come_to_an_end_and_who_ran_out_of_time_has_failed() -> None:
    watch = Watch()
    aborted = {"client": {"decode": 5}, "timeout": {"queued": 2, "decode": 1}, "queue_timeout": {"door": 3}}
    requests = watch.engine.snapshot()["requests"] | {
        "finished_by_reason": {"stop": 4, "length": 1, "abort": 8, "error": 1}, "aborted_by_cause_and_phase": aborted,
        "rejected_by_reason": {"queue_full": 3, "rate_limited": 2, "draining": 1, "invalid": 7, "error": 2},
    }  # fmt: skip
    watch.look(requests=requests)
    (seen,) = watch.rows
    assert [seen[name] for name in ("requests", "errors", "aborts", "rejections")] == [12, 7, 5, 8]


async def test_the_last_events_are_kept_and_told_anew_in_their_place() -> None:
    journal = Journal()
    for number in range(1200):
        journal.note("config", str(number))
    log: EventLog = journal.events
    assert [event.text for event in log.latest(2)] == ["1199", "1198"]
    assert len(list(log)) == 1000
