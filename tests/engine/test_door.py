"""Who is let in, who is told to come back, and when: shares of a full queue, drain rates, predicted first tokens."""

from __future__ import annotations

import math
import random
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from engine.config import Limits, SloTargets
from engine.door import FARTHEST_SECONDS, Door
from engine.errors import DrainingError, LateError, QueueFullError, UnavailableError
from engine.handle import GenerationRequest, Handle, TextPrompt, TokensPrompt
from engine.kv_cache import KVCache
from engine.scheduler import Scheduler
from engine.sequence import SamplingParams
from engine.stats import BUSY_SECONDS, BusyRate, RequestTimes, Stats
from tests.fakes import FakeRunner, FakeTokenizer, fake_config, open_fake_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from trio.testing import MockClock

    from engine.batch import ScheduledBatch
    from engine.engine import Engine

PATIENT = 1e9  # nobody reads the answers here


def ask(length: int = 10, max_tokens: int = 10, **fields: Any) -> GenerationRequest:
    return GenerationRequest("r", TextPrompt("x" * length), SamplingParams(max_tokens=max_tokens), **fields)


class Room:
    """A door before a scheduler in which nobody sits down but in its one seat.

    Attributes:
        step_started: what the door is told.
    """

    def __init__(self, **limits: Any) -> None:
        scheduler = Scheduler(KVCache(64, 4), limits=Limits(1, 64, **limits), num_seats=1, max_model_len=256)
        self.stats = Stats(SloTargets())
        self.step_started: float | None = None
        self.door = Door(scheduler, self.stats, lambda: self.step_started)
        self._number = 0

    def come(self, key: str = "", *, now: float = 0.0, background: bool = False) -> Handle:
        """One comes in, or this raises."""
        self.door.check_open(background=background, key=key, now=now)
        self._number += 1
        handle = Handle(ask(key_name=key, background=background), self._number, now)
        self.door.add(handle)
        return handle

    def refusal(self, *, now: float, background: bool = False) -> QueueFullError:
        with pytest.raises(QueueFullError) as refused:
            self.come(now=now, background=background)
        return refused.value

    def finish(self, number: int, *, now: float, reason: str = "stop", background: bool = False) -> None:
        """So many requests have ended."""
        for _ in range(number):
            self.stats.record_finish(RequestTimes(now, background, 10), now, reason)


@given(
    limit=st.integers(1, 12),
    moves=st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=120),
)
def test_a_key_below_its_share_gets_in_and_one_above_keeps_nobody_out(
    limit: int, moves: list[tuple[int, bool]]
) -> None:
    room = Room(max_waiting=limit)
    inside: dict[str, list[Handle]] = {}
    for number, comes in moves:
        key = f"key {number}"
        held = inside.setdefault(key, [])
        if not comes:
            if held:
                room.door.remove(held.pop())
            continue
        total = len(room.door)
        busy = len([name for name, handles in inside.items() if handles or name == key])
        may_come = total - 1 < limit or len(held) < limit // busy  # one of them will sit
        if may_come:
            held.append(room.come(key))
        else:
            with pytest.raises(QueueFullError, match=f"{total - 1} requests wait, the limit is {limit}"):
                room.come(key)
        busy = len([handles for handles in inside.values() if handles])
        assert len(room.door) <= 1 + limit * sum(1 / n for n in range(1, busy + 1))


def test_callers_without_a_key_are_one() -> None:
    room = Room(max_waiting=4)
    for _ in range(5):
        room.come()
    room.refusal(now=0.0)
    room.come("somebody")
    room.come("somebody")
    with pytest.raises(QueueFullError, match="6 requests wait, the limit is 4"):
        room.come("somebody")


def test_whoever_is_refused_comes_back_when_half_of_the_queue_is_gone() -> None:
    room = Room(max_waiting=40)
    for _ in range(41):
        room.come()
        room.come(background=True)
    assert room.refusal(now=0.0).retry_after_seconds == 5  # nothing has ended yet
    assert room.refusal(now=17.2).retry_after_seconds == 18  # nor since: as long again
    assert room.refusal(now=100.0).retry_after_seconds == 60
    room.finish(120, now=100.0)
    room.finish(500, now=100.0, reason="abort")
    room.finish(500, now=100.0, reason="error")
    room.finish(15, now=100.0, background=True)
    refused = room.refusal(now=160.0)
    assert refused.facts == {"what": "requests", "depth": 40, "limit": 40, "retry_after_seconds": 10}
    assert room.refusal(now=160.0, background=True).retry_after_seconds == 60
    room.step_started = 125.0  # a step that hangs ends nothing, whatever ended before
    assert room.refusal(now=160.0).retry_after_seconds == 35
    room.step_started = 159.99
    assert room.refusal(now=160.0).retry_after_seconds == 10


async def keep_full(engine: Engine, request: GenerationRequest, seconds: float) -> list[UnavailableError]:
    """Hand in whatever finds room; gives the refusals."""
    refusals: list[UnavailableError] = []
    end = trio.current_time() + seconds
    while trio.current_time() < end:
        try:
            await engine.submit(request).accepted()
        except UnavailableError as error:
            refusals.append(error)
            await trio.sleep(0.25)
    return refusals


async def test_the_rate_is_that_of_what_was_refused(autojump_clock: MockClock) -> None:
    """One request of 50 prompt tokens a second; the queue is full of requests, then of their tokens."""
    for limits, what, depth in (
        ({"max_waiting": 20}, "requests", 20),
        ({"max_waiting_tokens": 800}, "prompt_tokens", 800),
    ):
        config = fake_config(max_num_seqs=1, slow_client_seconds=PATIENT, **limits)
        async with open_fake_engine(config, step_seconds=0.1) as engine:
            refused = (await keep_full(engine, ask(50), 100))[-1]
            engine.abort_all("admin")
            assert refused.facts["what"] == what
            assert refused.facts["depth"] == pytest.approx(depth, abs=50)
            # 20 requests at one a second; 800 tokens at 50 a second.
            expected = {"requests": 10, "prompt_tokens": 8}[what]
            assert refused.retry_after_seconds == pytest.approx(expected, abs=1)
            await engine.wait_idle()


async def test_who_comes_while_the_server_ends_is_told_when_it_will_have_ended(autojump_clock: MockClock) -> None:
    async with open_fake_engine() as engine:
        engine.drain(30.0)
        for waited, seconds in ((0, 30), (10.5, 20), (30, 1)):
            await trio.sleep(waited)
            with pytest.raises(DrainingError) as refused:
                engine.submit(ask())
            assert refused.value.facts == {"retry_after_seconds": seconds}


async def test_what_cannot_be_served_now_is_not_counted_as_wrong(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: object, **__: object) -> list[int]:
        raise UnavailableError("not now", retry_after_seconds=3)

    async with open_fake_engine() as engine:
        monkeypatch.setattr(FakeTokenizer, "encode", cannot)
        with pytest.raises(UnavailableError, match="not now"):
            await engine.submit(ask()).accepted()
        rejected = engine.snapshot()["requests"]["rejected_by_reason"]
        assert {reason: number for reason, number in rejected.items() if number} == {"unavailable": 1}


def test_a_busy_rate_knows_nothing_of_idle_time_and_forgets() -> None:
    rate = BusyRate(10.0)
    assert rate.per_second is None
    for _ in range(1000):
        rate.add(5, 0.1)
    assert rate.per_second == pytest.approx(50)
    for _ in range(1000):
        rate.add(0, 0.1)
    assert rate.per_second == pytest.approx(0, abs=0.01)


async def overload(
    *, slo_admission: bool, seconds: float = 120.0, rate: float = 8.0, refused: list[float] | None = None, **fields: Any
) -> dict[str, Any]:
    """Requests of mixed lengths, at random times: twice as many as four seats can serve, unless told otherwise.

    Args:
        rate: requests a second.
        refused: gets the seconds that each refusal took.
    """
    config = fake_config(
        max_num_seqs=4, max_waiting=100_000, slow_client_seconds=PATIENT, slo_admission=slo_admission,
        slo=SloTargets(2.0, None, None),
    )  # fmt: skip
    draw = random.Random(7)

    async def come(handle: Handle) -> None:
        begin = trio.current_time()
        try:
            await handle.accepted()
        except UnavailableError:
            if refused is not None:
                refused.append(trio.current_time() - begin)

    async with open_fake_engine(config, num_blocks=1024, step_seconds=0.05) as engine, trio.open_nursery() as nursery:
        due = trio.current_time()
        end = due + seconds
        while (due := due + draw.expovariate(rate)) < end:
            await trio.sleep_until(due)
            nursery.start_soon(come, engine.submit(ask(draw.randint(10, 60), draw.randint(5, 35), **fields)))
        snapshot = engine.snapshot()
        engine.abort_all("admin")
        await engine.wait_idle()
        return snapshot


async def test_at_twice_the_load_who_is_let_in_has_its_first_token_in_time(autojump_clock: MockClock) -> None:
    plain, strict = await overload(slo_admission=False), await overload(slo_admission=True)
    assert plain["latency"]["ttft"]["p50"] > 10
    assert strict["latency"]["ttft"]["p95"] <= 2.0
    # Not by leaving seats empty: as much is served, and all of it counts.
    done = [one["requests"]["finished_by_reason"]["length"] for one in (plain, strict)]
    assert done[1] >= 0.95 * done[0]
    assert plain["slo"]["attainment"]["ttft_p95_seconds"] < 0.3
    assert strict["slo"]["attainment"]["ttft_p95_seconds"] >= 0.95
    late = strict["requests"]["rejected_by_reason"]
    assert late["late"] > 200
    assert late["queue_full"] == 0


async def test_at_three_times_the_load_the_surplus_is_refused_at_once_and_the_rest_is_served(
    autojump_clock: MockClock,
) -> None:
    """Whatever the load: no step passes before a refusal, and as many have their first token in time as at the best."""

    def good(snapshot: dict[str, Any]) -> float:
        share: float = snapshot["slo"]["attainment"]["ttft_p95_seconds"]
        return share * float(snapshot["requests"]["finished_by_reason"]["length"])

    refused: list[float] = []
    run = partial(overload, slo_admission=True, seconds=45.0)
    below = [good(await run(rate=rate)) for rate in (3.5, 4.0)]
    assert good(await run(rate=12.0, refused=refused)) >= 0.9 * max(below)
    assert len(refused) > 300
    assert max(refused) == 0


def test_what_was_measured_of_an_age_without_prompts_is_no_number_beyond_all() -> None:
    """Six hours in which everybody answered and nobody was read: the rate is next to nothing, and not nothing."""
    room = Room(slo_admission=True)
    room.stats.full_prompt_rate.add(1, 1.0)
    while (room.stats.full_prompt_rate.per_second or 0) > 1e-310:
        room.stats.full_prompt_rate.add(0, 10.0)
    room.come()
    handle = Handle(ask(timeout_seconds=2.0), 2, 0.0)
    room.door.add(handle)
    with pytest.raises(LateError) as late:
        room.door.check_tokens(handle, (1,) * 50, 0.0)
    assert late.value.facts["predicted_ttft_seconds"] == FARTHEST_SECONDS
    assert late.value.retry_after_seconds == 60


async def test_a_requests_own_deadline_goes_before_the_target(autojump_clock: MockClock) -> None:
    snapshot = await overload(slo_admission=True, seconds=60.0, timeout_seconds=6.0)
    assert 2.0 < snapshot["latency"]["ttft"]["p95"] <= 6.0


async def test_the_refusal_says_what_was_expected(autojump_clock: MockClock) -> None:
    config = fake_config(max_num_seqs=1, slo_admission=True, slow_client_seconds=PATIENT, slo=SloTargets(2.0))
    async with open_fake_engine(config, step_seconds=0.1) as engine:
        await keep_full(engine, ask(50), 0.01)
        await engine.wait_idle()
        refused = [error for error in await keep_full(engine, ask(50), 60) if isinstance(error, LateError)][-1]
        assert refused.facts["allowed_ttft_seconds"] == 2.0
        # A second for each of those before it, at 50 tokens a second.
        assert refused.facts["predicted_ttft_seconds"] == pytest.approx(3.0, abs=1.0)
        assert refused.retry_after_seconds == math.ceil(float(refused.facts["predicted_ttft_seconds"]) - 2.0)
        # Nobody was promised anything, or waits for it: background work is taken.
        await engine.submit(replace(ask(50), background=True)).accepted()
        await engine.set_limits({"slo_admission": False})
        await engine.submit(ask(50)).accepted()
        engine.abort_all("admin")
        await engine.wait_idle()


class Costly:
    """A stepper whose steps take 7 ms and a millisecond for each token.

    Attributes:
        factor: all that is longer by it.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._num_tokens = 0

    def note(self, batch: ScheduledBatch) -> None:
        self._num_tokens = batch.num_tokens

    async def run(self, function: Callable[[], Any]) -> Any:
        result = function()
        num_tokens, self._num_tokens = self._num_tokens, 0
        with trio.CancelScope(shield=True):
            await trio.sleep(self.factor * (0.007 + 0.001 * num_tokens) if num_tokens else 0)
        return result


@asynccontextmanager
async def open_costly() -> AsyncIterator[tuple[Engine, Costly]]:
    """Sixteen seats and 128 tokens a step: 948 tokens of a long prompt a second. First tokens are due within 2 s."""
    costly = Costly()

    @asynccontextmanager
    async def open_stepper() -> AsyncIterator[Costly]:
        yield costly

    config = fake_config(
        max_num_seqs=16, max_num_batched_tokens=128, slow_client_seconds=PATIENT, slo_admission=True,
        slo=SloTargets(2.0, None, None),
    )  # fmt: skip
    runner = FakeRunner(2048, config.block_size, before_step=costly.note)
    options: dict[str, Any] = {"num_blocks": 2048, "max_model_len": 4096, "runner": runner, "stepper": open_stepper}
    async with open_fake_engine(config, **options) as engine:
        yield engine, costly


def ask_for(number: int, length: int, **fields: Any) -> GenerationRequest:
    """A prompt whose first block no other number has."""
    return GenerationRequest(
        "r", TokensPrompt((number % 200, number // 200, *[7] * (length - 2))), SamplingParams(max_tokens=2), **fields
    )


async def ttft(engine: Engine, request: GenerationRequest) -> float:
    """Seconds to the first token of one request, read to its end."""
    begin = trio.current_time()
    handle = engine.submit(request)
    await handle.accepted()
    delta = await handle.take()
    seconds = trio.current_time() - begin
    while delta.finish_reason is None:
        delta = await handle.take()
    return seconds


async def test_short_prompts_say_nothing_of_how_fast_a_long_one_is_read(autojump_clock: MockClock) -> None:
    async with open_costly() as (engine, _):
        for number in range(120):
            assert await ttft(engine, ask_for(number, 8)) < 0.1
            await trio.sleep(1)
        assert await ttft(engine, ask_for(200, 800)) == pytest.approx(0.85, abs=0.05)
        # Now it is known, and longer ones are out of reach.
        for number in range(3):
            assert await ttft(engine, ask_for(number, 8)) < 0.1
            with pytest.raises(LateError):
                await ttft(engine, ask_for(201 + number, 3000))
            assert await ttft(engine, ask_for(210 + number, 800)) < 1.0


async def test_a_machine_that_was_slow_for_a_while_refuses_nobody_for_good(autojump_clock: MockClock) -> None:
    async with open_costly() as (engine, costly):
        costly.factor = 10
        assert await ttft(engine, ask_for(1, 800)) > 8
        with pytest.raises(LateError):
            await ttft(engine, ask_for(2, 800))
        costly.factor = 1
        with pytest.raises(LateError):
            await ttft(engine, ask_for(2, 800))
        await trio.sleep(BUSY_SECONDS + 1)
        for number in range(3, 6):
            assert await ttft(engine, ask_for(number, 800)) < 1.0


async def test_what_is_cached_of_a_prompt_takes_no_time(autojump_clock: MockClock) -> None:
    async with open_costly() as (engine, _):
        assert await ttft(engine, ask_for(1, 800)) < 1.0
        with pytest.raises(LateError):
            await ttft(engine, ask_for(2, 800, timeout_seconds=0.5))
        with pytest.raises(LateError):  # whose blocks these are is no matter of its tokens
            await ttft(engine, ask_for(1, 800, timeout_seconds=0.5, cache_root="other"))
        assert await ttft(engine, ask_for(1, 800, timeout_seconds=0.5)) < 0.1


async def test_who_comes_in_a_crowd_after_a_rest_is_in_time_or_refused(autojump_clock: MockClock) -> None:
    async with open_costly() as (engine, _):
        await ttft(engine, ask_for(1, 800))
        await trio.sleep(10 * BUSY_SECONDS)
        handles = [engine.submit(ask_for(number, 400)) for number in range(10, 26)]
        taken = []
        for handle in handles:
            with suppress(LateError):
                await handle.accepted()
                taken.append(handle)
        await engine.wait_idle()
        sequences = [handle.sequence for handle in taken if handle.sequence is not None]
        waits = [(sequence.first_token_time or math.inf) - sequence.arrival_time for sequence in sequences]
        assert 3 <= len(waits) <= 5
        assert max(waits) <= 2.0


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"ends_within_seconds": 4.0}, "ttft"),
        ({"ends_within_seconds": 4.0, "timeout_seconds": 1e9}, "ttft"),
        ({"seated_within_seconds": 4.0, "timeout_seconds": 1e9}, "queue"),
    ],
    ids=["the server's", "the server's before its own", "for a seat"],
)
async def test_every_deadline_counts(fields: dict[str, float], what: str, autojump_clock: MockClock) -> None:
    """One seat, and an answer a second: nobody who is let in is there to meet his deadline."""
    config = fake_config(max_num_seqs=1, slo_admission=True, slow_client_seconds=PATIENT, slo=SloTargets(None))
    async with open_fake_engine(config, step_seconds=0.1) as engine:
        engine.submit(ask(50))
        await engine.wait_idle()
        refused = await keep_full(engine, ask(50, **fields), 60)
        assert {error.code for error in refused} == {"late"}
        facts = refused[-1].facts
        assert facts[f"allowed_{what}_seconds"] == 4.0
        assert 4.0 < float(facts[f"predicted_{what}_seconds"]) < 6.0
        assert str(refused[-1]).startswith("A seat" if what == "queue" else "The first token")
        snapshot = engine.snapshot()
        assert snapshot["latency"]["queue"]["p95"] <= 4.0
        assert snapshot["requests"]["finished_by_reason"]["length"] > 50
        engine.abort_all("admin")
        await engine.wait_idle()


async def test_a_key_keeps_a_share_of_the_prompt_tokens_that_may_wait(autojump_clock: MockClock) -> None:
    config = fake_config(max_num_seqs=1, max_waiting_tokens=200)
    async with open_fake_engine(config, step_seconds=1.0) as engine:
        await engine.submit(ask(40, 400, key_name="greedy")).accepted()
        await trio.sleep(1.5)
        for _ in range(5):
            await engine.submit(ask(40, key_name="greedy")).accepted()
        for key, most in (("greedy", 0), ("other", 2), ("third", 1)):
            for _ in range(most):
                await engine.submit(ask(40, key_name=key)).accepted()
            with pytest.raises(QueueFullError, match="prompt tokens"):
                await engine.submit(ask(40, key_name=key)).accepted()
        engine.abort_all("admin")
        await engine.wait_idle()
