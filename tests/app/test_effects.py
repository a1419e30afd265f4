"""What came of a change: the minutes before and after it, side by side, in virtual time."""

from __future__ import annotations

from contextlib import asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest
import trio

from app.audit import AuditEntry, AuditLog, timestamp
from app.effects import MAX_FOLLOWED, MAX_OTHERS, EffectWatch, make_side, tell_effects
from app.journal.journal import Journal, open_journal
from app.live_config import LiveConfig
from app.render.tuning import effect_view
from app.telemetry import Telemetry
from engine.handle import GenerationRequest, TextPrompt
from engine.sequence import SamplingParams
from tests.app.test_journal import row
from tests.fakes import fake_config, open_fake_engine, read_deltas

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from engine.engine import Engine
    from engine.handle import Handle

T0 = 1_700_000_000.0


@asynccontextmanager
async def open_watched(**limits: Any) -> AsyncIterator[tuple[Engine, LiveConfig, EffectWatch, Journal]]:
    """An engine that is looked at once a second; the wall's clock is trio's."""
    began = trio.current_time()
    journal = Journal(wall=lambda: T0 + trio.current_time() - began)
    async with open_fake_engine(fake_config(**limits), step_seconds=0.5) as engine, trio.open_nursery() as nursery:
        watch = EffectWatch(engine, journal)
        live = LiveConfig(engine, journal, watch)
        nursery.start_soon(live.run)
        nursery.start_soon(watch.run)
        nursery.start_soon(Telemetry(engine, journal=journal).run)
        yield engine, live, watch, journal
        nursery.cancel_scope.cancel()


async def serve(engine: Engine, index: int) -> None:
    """One client that asks for ten tokens again and again."""
    number = 0
    while True:
        number += 1
        request = GenerationRequest(f"{index}-{number}", TextPrompt("hello"), SamplingParams(max_tokens=10))
        async for _ in read_deltas(engine.submit(request)):
            pass


async def read_all(handle: Handle) -> None:
    async for _ in read_deltas(handle):
        pass


def told(journal: Journal, watch: EffectWatch) -> list[Any]:
    return tell_effects(journal.audit.entries, watch.followed)


async def test_a_change_is_told_after_a_minute_and_for_good_after_five(autojump_clock: object) -> None:
    """One seat for two clients: one of them waits. With two seats nobody does, and twice as many tokens come."""
    async with open_watched(max_num_seqs=1) as (engine, live, watch, journal), trio.open_nursery() as nursery:
        for index in range(2):
            nursery.start_soon(serve, engine, index)
        await trio.sleep(400)
        await live.apply({"max_num_seqs": 2}, who="me")
        (early,) = told(journal, watch)
        assert (early["state"], early["before"], early["after"]) == ("early", None, None)
        await trio.sleep(55)
        assert told(journal, watch)[0]["state"] == "early"
        await trio.sleep(10)
        (minute,) = told(journal, watch)
        assert (minute["state"], minute["window_seconds"]) == ("minute", 60)
        before, after = minute["before"], minute["after"]
        assert before["waiting"] == pytest.approx(1, abs=0.25), "one of them, but when it has just been answered"
        assert after["waiting"] == pytest.approx(0, abs=0.25)
        assert before["output_tokens_per_second"] == pytest.approx(2, rel=0.1)
        assert after["output_tokens_per_second"] == pytest.approx(4, rel=0.1)
        assert after["requests_per_second"] == pytest.approx(0.4, rel=0.2)
        assert before["ttft"]["p50"] == pytest.approx(5.5, abs=0.1)
        assert 0.5 <= after["ttft"]["p50"] <= 1.0, "a step, and what is left of the one before it"
        assert (before["itl"]["p95"], after["itl"]["p95"]) == (pytest.approx(0.5), pytest.approx(0.5))
        assert before["attainment"]["ttft_p95_seconds"] == 0
        assert after["ttft"]["count"] == pytest.approx(24, abs=3)
        assert before["seconds"] == pytest.approx(60, abs=2)
        await trio.sleep(240)
        (whole,) = told(journal, watch)
        assert (whole["state"], whole["window_seconds"], whole["at"]) == ("complete", 300, None)
        assert whole["before"]["ttft"]["count"] == pytest.approx(60, abs=3)
        assert whole["after"]["ttft"]["count"] == pytest.approx(110, abs=12)
        assert not watch.followed
        assert [event.kind for event in journal.events] == ["config"], "what came of it is no change of its own"
        nursery.cancel_scope.cancel()


async def test_a_change_of_policy_is_measured_from_when_it_holds(autojump_clock: object) -> None:
    async with open_watched(max_num_seqs=1) as (engine, live, watch, journal), trio.open_nursery() as nursery:
        request = GenerationRequest("long", TextPrompt("hello"), SamplingParams(max_tokens=100))
        nursery.start_soon(read_all, engine.submit(request))
        await trio.sleep(5)
        await live.apply({"policy": "static"}, who="me")
        assert [(effect["state"], effect["at"]) for effect in told(journal, watch)] == [("switching", None)]
        await trio.sleep(30)
        assert told(journal, watch)[0]["state"] == "switching"
        await trio.sleep(20)
        (early,) = told(journal, watch)
        assert early["state"] == "early"
        assert datetime.fromisoformat(early["at"]).timestamp() == pytest.approx(T0 + 110, abs=3)
        await trio.sleep(62)
        (minute,) = told(journal, watch)
        assert minute["state"] == "minute"
        assert minute["after"]["output_tokens_per_second"] < 0.1, "what ran under the old one is not counted"


async def test_a_silent_server_tells_of_no_latency_and_no_rate_that_was_not(autojump_clock: object) -> None:
    async with open_watched() as (_, live, watch, journal):
        await trio.sleep(5)
        await live.apply({"max_num_seqs": 2}, who="me")
        await trio.sleep(61)
        (effect,) = told(journal, watch)
        assert effect["before"]["ttft"] == {"count": 0, "p50": None, "p95": None}
        assert effect["before"]["seconds"] == pytest.approx(6, abs=1)
        assert effect["after"]["output_tokens_per_second"] == 0
        shown = effect_view(effect)
        assert shown is not None
        assert shown["rows"][0]["cells"] == [("—", True), ("—", True)]


async def test_a_flush_is_followed_and_a_longer_time_alone_is_not(autojump_clock: object) -> None:
    async with open_watched() as (_, live, watch, journal):
        await live.apply({"max_num_seqs": 8, "ttl_seconds": 1000}, who="me")
        await live.apply({"max_num_seqs": 8, "ttl_seconds": 2000}, who="me")
        await live.apply({"flush_prefix_cache": True}, who="me")
        assert [effect and effect["state"] for effect in told(journal, watch)] == ["early", None, "early"]
        await trio.sleep(61)
        assert [effect and effect["state"] for effect in told(journal, watch)] == ["minute", None, "minute"]


async def test_no_more_are_followed_than_may_be(autojump_clock: object) -> None:
    async with open_watched() as (_, live, watch, journal):
        for index in range(MAX_FOLLOWED + 2):
            await live.apply({"max_num_seqs": 2 + index % 2}, who="me")
        states = [effect["state"] for effect in told(journal, watch)]
        assert states == ["early"] * MAX_FOLLOWED + ["unknown"] * 2
        await trio.sleep(301)
        await live.apply({"max_num_seqs": 7}, who="me")
        assert told(journal, watch)[-1]["state"] == "early"


async def test_a_watch_that_has_failed_takes_up_later_changes_again(autojump_clock: object) -> None:
    """What it followed when it failed is lost, which is said; it is not waited for for ever."""
    async with open_fake_engine(fake_config()) as engine:
        journal = Journal(wall=trio.current_time)
        watch = EffectWatch(engine, journal)
        for index in range(MAX_FOLLOWED):
            journal.audit.add(entry(index, 0))
            watch.begin(journal.audit.entries[-1].entry_id)
        with trio.move_on_after(5):
            await watch.run()
        assert {effect["state"] for effect in told(journal, watch)} == {"unknown"}
        journal.audit.add(entry(MAX_FOLLOWED, 0))
        watch.begin(journal.audit.entries[-1].entry_id)
        with trio.move_on_after(301):
            await watch.run()
        assert told(journal, watch)[-1]["state"] == "complete"


def entry(generation: int, at: float, effect: dict[str, Any] | None = None) -> AuditEntry:
    return AuditEntry(generation, timestamp(T0 + at), "me", {"max_num_seqs": (1, generation)}, effect=effect)


def side(**values: Any) -> dict[str, Any]:
    latency = {name: {"count": 0, "p50": None, "p95": None} for name in ("ttft", "itl")}
    experience = {
        "ended": {"finished": 3, "failed": 1, "timed_out": 0},
        "latency": latency,
        "slo": {"attainment": {"ttft_p95_seconds": None, "itl_p95_seconds": None}},
    }
    return make_side(experience, [row(int(T0), **values)] if values else [])


def test_other_changes_within_the_window_are_named_and_bounded() -> None:
    minute = {"window_seconds": 60, "before": side(), "after": side()}
    entries = [
        entry(1, 0),
        entry(2, 100, minute),
        entry(3, 150),
        entry(4, 161),
        AuditEntry(4, timestamp(T0 + 101), "me", {}),
    ]
    effects = tell_effects(entries, {})
    assert effects[1] is not None
    assert [other["generation"] for other in effects[1]["others"]] == [3]
    assert effects[4] is None
    crowd = tell_effects([entry(number, 0) for number in range(1000)], {})
    assert all(effect is not None and len(effect["others"]) <= 2 * MAX_OTHERS for effect in crowd)


def test_rates_are_over_the_seconds_there_were() -> None:
    known = side(seconds=2.0, output_tokens=30, requests=1, waiting=4.0)
    assert (known["output_tokens_per_second"], known["requests_per_second"], known["waiting"]) == (15, 0.5, 4)
    assert known["requests"] == 4
    unknown = side()
    assert (unknown["seconds"], unknown["output_tokens_per_second"], unknown["waiting"]) == (0, None, None)


async def test_what_came_of_a_change_outlives_the_process(tmp_path: Path) -> None:
    effect = {"window_seconds": 300, "before": side(), "after": side(seconds=1.0, requests=2)}
    async with open_journal(tmp_path) as journal:
        first = entry(1, 0)
        journal.audit.add(first)
        await journal.flush()
        journal.audit.mark_effect(first.entry_id, effect)
    async with open_journal(tmp_path) as journal:
        (known,) = journal.audit.entries
        assert known.effect == effect
        assert [event.kind for event in journal.events].count("config") == 1
        (again,) = tell_effects(journal.audit.entries, {})
        assert again is not None
        assert again["state"] == "complete"


def test_the_effect_of_an_entry_that_was_forgotten_is_dropped() -> None:
    log = AuditLog()
    log.mark_effect("gone", {})
    assert log.entries == ()
