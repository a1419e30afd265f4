"""Faults put into a running engine, in virtual time. After each: nobody else noticed, nothing leaked, it goes on."""

from __future__ import annotations

import math
import weakref
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from engine.block_pool import BlockPool
from engine.errors import EngineError, UnavailableError
from engine.faults import has_lost_device, lacks_memory
from engine.grammar.spec import GrammarSpec
from engine.handle import GenerationRequest, TextPrompt
from engine.kv_cache import KVCache
from engine.model_runner import ModelRunner
from engine.relief import FIRST_WAIT_SECONDS
from engine.scheduler import Scheduler
from engine.sequence import FinishReason, SamplingParams
from engine.stats import Stats
from engine.trials import MAX_FAILED_CONTROLS
from tests.engine import tiny_engine
from tests.fakes import FakeRunner, Poison, expected_output, fake_config, open_fake_engine, read_deltas

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from engine.batch import ScheduledBatch, StepOutput
    from engine.engine import Engine
    from engine.faults import Notice
    from engine.handle import Handle


def ask(text: str, max_tokens: int = 12, **changes: Any) -> GenerationRequest:
    return replace(GenerationRequest(text, TextPrompt(text), SamplingParams(max_tokens=max_tokens)), **changes)


async def read(handle: Handle) -> tuple[list[int], FinishReason | None, str | None]:
    token_ids: list[int] = []
    async for delta in read_deltas(handle):
        token_ids.extend(delta.token_ids)
    return token_ids, delta.finish_reason, delta.error


async def assert_right(handle: Handle) -> None:
    """The answer is what it would have been alone, to its end."""
    max_tokens = handle.request.params.max_tokens or 0
    expected = expected_output(handle.request.request_id.encode(), max_tokens)
    assert await read(handle) == (expected, FinishReason.LENGTH, None)


async def assert_wrong(handle: Handle, error: str) -> None:
    _, reason, told = await read(handle)
    assert reason is FinishReason.ERROR
    assert error in (told or "")


async def assert_sound(engine: Engine) -> None:
    """The next request is served, and nothing is left of those before."""
    await assert_right(engine.submit(ask("the next one")))
    with trio.fail_after(10):
        await engine.wait_idle()
    snapshot = engine.snapshot()
    assert snapshot["requests"]["running"] == snapshot["requests"]["waiting"] == 0
    assert snapshot["kv"]["free"] + snapshot["kv"]["cached"] == snapshot["kv"]["total"]
    assert engine.num_streams == 0
    assert engine.health().ready


def faults_of(engine: Engine) -> dict[str, int]:
    found: dict[str, int] = engine.snapshot()["faults"]
    return found


def notices_of(engine: Engine) -> list[Notice]:
    found = []
    while engine.notices.statistics().current_buffer_used:
        found.append(engine.notices.receive_nowait())
    return found


def once(error: Exception, *, after: int = 0) -> Callable[..., None]:
    """A call that raises the time after `after` others, and no more."""
    left = [after]

    def hook(*_: object, **__: object) -> None:
        left[0] -= 1
        if left[0] == -1:
            raise error

    return hook


@asynccontextmanager
async def open_failing(before_step: Callable[[ScheduledBatch], None], **limits: Any) -> AsyncIterator[Engine]:
    runner = FakeRunner(256, 4, before_step=before_step)
    async with open_fake_engine(fake_config(**{"max_num_seqs": 16, **limits}), runner=runner) as engine:
        yield engine


@pytest.mark.parametrize("after", [0, 1, 4, 9])
async def test_a_step_that_fails_once_costs_nobody_anything(autojump_clock: MockClock, after: int) -> None:
    async with open_failing(once(ArithmeticError("a cosmic ray"), after=after)) as engine:
        handles = [engine.submit(ask(f"question {i}", 8 + i)) for i in range(6)]
        for handle in handles:
            await assert_right(handle)
        assert faults_of(engine) == {"failed_steps": 1, "integrity_violations": 0}
        assert [notice.kind for notice in notices_of(engine)] == ["fault"]
        await assert_sound(engine)


@pytest.mark.parametrize(("number", "place"), [(1, 0), (2, 1), (5, 2), (16, 0), (16, 9)])
async def test_a_poisonous_request_fails_alone(autojump_clock: MockClock, number: int, place: int) -> None:
    poison = Poison()
    async with open_failing(poison) as engine:
        texts = [f"question {i}" for i in range(number)]
        texts[place] = "poison"
        handles = [engine.submit(ask(text)) for text in texts]
        for index, handle in enumerate(handles):
            if index == place:
                await assert_wrong(handle, "ArithmeticError")
            else:
                await assert_right(handle)
        assert len(poison.sizes) <= math.ceil(math.log2(number)) + 3
        assert engine.snapshot()["requests"]["finished_by_reason"]["error"] == 1
        await assert_sound(engine)


async def test_poison_that_shows_late_and_comes_twice_fails_its_requests_alone(autojump_clock: MockClock) -> None:
    """While everybody answers; who comes meanwhile waits, and is served."""
    bad: set[int] = set()

    def hook(batch: ScheduledBatch) -> None:
        bad.update(s.sequence_id for s in batch.seated if bytes(s.token_ids).startswith(b"poison"))
        rows = zip(batch.sequence_ids, batch.starts, strict=True)
        if any(sequence_id in bad and start > 20 for sequence_id, start in rows):
            raise ArithmeticError("too far")

    async with open_failing(hook) as engine:
        texts = ["poison, one", *[f"question {i}" for i in range(5)], "poison, two"]
        handles = [engine.submit(ask(text, 30)) for text in texts]
        await trio.sleep(0.12)
        late = engine.submit(ask("late"))
        for text, handle in zip(texts, handles, strict=True):
            if text.startswith("poison"):
                await assert_wrong(handle, "ArithmeticError")
            else:
                await assert_right(handle)
        await assert_right(late)
        await assert_sound(engine)


@given(
    num_faults=st.integers(1, 6),
    num_rows=st.integers(1, 5),
    seat=st.integers(0, 5),
    number=st.integers(1, 8),
    error=st.sampled_from([ArithmeticError("a cosmic ray"), MemoryError("for a moment")]),
    after=st.integers(0, 12),
)
@settings(max_examples=20, deadline=None)
def test_faults_that_go_away_cost_nobody_anything_and_leave_the_limits_as_they_were(
    num_faults: int, num_rows: int, seat: int, number: int, error: Exception, after: int
) -> None:
    """They show in steps with so many rows and somebody in that seat; then never again."""
    failed: list[tuple[int, ...]] = []

    def hook(batch: ScheduledBatch) -> None:
        concerns = batch.step > after and len(batch) >= num_rows and seat in batch.seats
        if concerns and len(failed) < num_faults:
            failed.append(batch.sequence_ids)
            raise error

    async def main() -> None:
        async with open_failing(hook) as engine:
            handles = [engine.submit(ask(f"question {i}", 8 + i)) for i in range(number)]
            for sequence_id, handle in enumerate(handles, 1):
                if failed.count((sequence_id,)) < 2:
                    await assert_right(handle)
                else:
                    await read(handle)
            await trio.sleep(8.5 * FIRST_WAIT_SECONDS)
            assert engine.limits == replace(fake_config(max_num_seqs=16).limits, generation=engine.limits.generation)
            await assert_sound(engine)

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def test_who_trips_the_model_again_and_again_while_answering_fails_alone(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """At every third place, where an answer is continued: read again as a prompt, those places pass."""
    bad: set[int] = set()

    def hook(batch: ScheduledBatch) -> None:
        bad.update(s.sequence_id for s in batch.seated if bytes(s.token_ids).startswith(b"poison"))
        rows = zip(batch.sequence_ids, batch.starts, batch.counts, strict=True)
        if any(
            sequence_id in bad and count == 1 and start > 10 and start % 3 == 0 for sequence_id, start, count in rows
        ):
            raise ArithmeticError("at every third place")

    async with open_failing(hook) as engine:
        bad_one, good = engine.submit(ask("poison", 200)), engine.submit(ask("good", 200))
        await assert_wrong(bad_one, "ArithmeticError")
        await assert_right(good)
        assert faults_of(engine)["failed_steps"] < 8
        assert [notice.text for notice in notices_of(engine)] == [
            "A step failed (ArithmeticError); computed again it did not, and nothing was lost",
            "A request failed each step it was in (ArithmeticError) and ended with an error",
        ]
        assert caplog.text.count("Traceback") == 1
        await assert_sound(engine)


async def test_faults_are_told_of_once_a_second_with_their_number(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    def hook(batch: ScheduledBatch) -> None:
        if batch.step % 10 == 0:
            raise ArithmeticError("every tenth step")

    async with open_failing(hook) as engine:
        began = trio.current_time()
        await assert_right(engine.submit(ask("question", 300)))
        seconds = trio.current_time() - began
        notices, num_failed = notices_of(engine), faults_of(engine)["failed_steps"]
        assert num_failed > 5 * seconds
        assert 2 <= len(notices) <= seconds + 1
        assert caplog.text.count("Traceback") <= seconds + 1
        assert "times more since" in notices[-1].text


async def test_one_client_with_poison_cannot_end_an_idle_server(autojump_clock: MockClock) -> None:
    async with open_failing(Poison()) as engine:
        for _ in range(2 * MAX_FAILED_CONTROLS):
            await assert_wrong(engine.submit(ask("poison")), "ArithmeticError")
        await assert_sound(engine)


async def test_who_leaves_while_it_is_tried_leaves_nothing(autojump_clock: MockClock) -> None:
    async with open_failing(Poison()) as engine:
        for seconds in (0.001, 0.015, 0.025, 0.035, 0.045, 0.055):
            bad, good = engine.submit(ask("poison")), engine.submit(ask("good"))
            await trio.sleep(seconds)
            bad.abort("client")
            await assert_right(good)
        await assert_sound(engine)


async def test_a_command_that_fails_every_hour_ends_nothing(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slips(*_: Any) -> None:
        raise KeyError("a slip")

    monkeypatch.setattr(KVCache, "flush", slips)
    async with open_fake_engine() as engine:
        for _ in range(2 * MAX_FAILED_CONTROLS):
            await trio.sleep(3600)
            await engine.set_limits({}, flush=True)
        await assert_sound(engine)


class Scratch:
    """Memory of a step."""


class SmallDevice(FakeRunner):
    """Its memory can be made anew when that of the step that failed is given back, and then only the second time."""

    scratch: weakref.ref[Scratch] | None = None
    num_resets = 0

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        scratch = Scratch()
        if self.scratch is None:
            self.scratch = weakref.ref(scratch)
            try:
                raise KeyError("inside of it")
            except KeyError as error:
                raise RuntimeError("CUDA out of memory") from error
        return super().execute(batch)

    def reset(self) -> None:
        assert self.scratch is not None
        assert self.scratch() is None
        self.num_resets += 1
        if self.num_resets == 1:
            raise MemoryError("not yet")
        super().reset()


async def test_a_step_that_failed_holds_no_memory_when_all_is_made_anew_which_is_tried_twice(
    autojump_clock: MockClock,
) -> None:
    runner = SmallDevice(256, 4)
    async with open_fake_engine(runner=runner) as engine:
        await assert_right(engine.submit(ask("question")))
        assert runner.num_resets == 2
        await assert_sound(engine)


async def test_a_farewell_reaches_everybody_also_from_a_state_in_which_nobody_can_be_ended(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slips(*_: Any) -> None:
        raise KeyError("a slip")

    told: list[str | None] = []

    async def run() -> None:
        async with open_failing(once(ArithmeticError("once"), after=3)) as engine:
            handles = [engine.submit(ask(f"question {i}")) for i in range(3)]
            monkeypatch.setattr(Scheduler, "begin_anew", slips)
            monkeypatch.setattr(Scheduler, "abort", slips)
            for handle in handles:
                told.append((await read(handle))[2])
            await trio.sleep_forever()

    with pytest.raises(BaseExceptionGroup) as caught:
        await run()
    assert told == ["The engine cannot go on and ends: KeyError."] * 3
    assert caught.group_contains(EngineError, match="could not be made anew after a fault: KeyError")


async def test_an_engine_that_can_compute_nothing_tells_everybody_and_ends_with_the_cause(
    autojump_clock: MockClock,
) -> None:
    def always(_: ScheduledBatch) -> None:
        raise ArithmeticError("out of numbers")

    told: list[str | None] = []

    async def run() -> None:
        async with open_failing(always) as engine:
            handles = [engine.submit(ask(f"question {i}")) for i in range(3)]
            for handle in handles:
                told.append((await read(handle))[2])
            reason = engine.health().reason or ""
            assert "broken" in reason
            assert "out of numbers" not in reason, "anybody may ask for it; the log has the rest"
            with pytest.raises(UnavailableError):
                engine.submit(ask("too late"))
            await trio.sleep_forever()

    with pytest.raises(BaseExceptionGroup) as caught:
        await run()
    assert told == ["The engine cannot go on and ends: ArithmeticError."] * 3
    assert caught.group_contains(EngineError, match="times in a row, the last time with: ArithmeticError")


async def test_a_device_that_is_lost_ends_the_engine_at_once_with_the_cause(autojump_clock: MockClock) -> None:
    steps: list[int] = []

    def lose(batch: ScheduledBatch) -> None:
        steps.append(batch.step)
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported")

    told: list[str | None] = []

    async def run() -> None:
        async with open_failing(lose) as engine:
            told.append((await read(engine.submit(ask("question"))))[2])
            await trio.sleep_forever()

    with pytest.raises(BaseExceptionGroup) as caught:
        await run()
    assert told == ["The engine cannot go on and ends: RuntimeError."]
    assert caught.group_contains(
        EngineError, match="computed on it any more: CUDA error: an illegal memory access .*ed$"
    )
    assert len(steps) == 1, "nothing is tried on a device that is lost"


@pytest.mark.parametrize(
    ("error", "lacks", "lost"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"), True, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True, False),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True, False),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), False, True),
        (torch.AcceleratorError("CUDA error: device-side assert triggered\nCompile with"), False, True),
        (RuntimeError("CUDA error: unspecified launch failure"), False, True),
        (RuntimeError("HIP error: an illegal memory access was encountered"), False, True),
        (RuntimeError("CUDA error: invalid configuration argument"), False, False),
        (RuntimeError("the window was lost"), False, False),
        (ValueError("CUDA error: device-side assert triggered"), False, False),
    ],
)
def test_what_a_device_says_is_told_apart(error: Exception, lacks: bool, lost: bool) -> None:
    assert (lacks_memory(error), has_lost_device(error)) == (lacks, lost)


async def test_what_fails_with_many_and_not_with_few_lowers_the_seats(autojump_clock: MockClock) -> None:
    def hook(batch: ScheduledBatch) -> None:
        if len(batch) > 5:
            raise ArithmeticError("too many")

    async with open_failing(hook) as engine:
        handles = [engine.submit(ask(f"question {i}")) for i in range(8)]
        for handle in handles:
            await assert_right(handle)
        assert engine.limits.max_num_seqs == 4
        [notice] = notices_of(engine)
        assert notice.changes == {"max_num_seqs": (16, 4)}
        await assert_sound(engine)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Scheduler, "schedule"),
        (Scheduler, "update"),
        (KVCache, "remember"),
        (BlockPool, "free"),
        (Stats, "record_step"),
    ],
)
@pytest.mark.parametrize("after", [0, 2, 5])
async def test_a_fault_in_planning_or_applying_costs_nobody_anything(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, after: int
) -> None:
    """Also in the middle of it, where some have their tokens and others have not."""
    original, hook = getattr(owner, name), once(KeyError("a slip"), after=after)

    def slips(*args: Any, **kwargs: Any) -> Any:
        hook()
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, slips)
    async with open_fake_engine() as engine:
        handles = [engine.submit(ask(f"question {i}", 5 + i)) for i in range(6)]
        for handle in handles:
            await assert_right(handle)
        await assert_sound(engine)
        assert faults_of(engine)["failed_steps"] == 1


async def test_a_request_that_cannot_be_planned_fails_alone(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_prefix = KVCache.find_prefix

    def slips(self: KVCache, sequence: Any) -> Any:
        if sequence.request_id == "poison":
            raise KeyError("a slip")
        return find_prefix(self, sequence)

    monkeypatch.setattr(KVCache, "find_prefix", slips)
    async with open_fake_engine() as engine:
        handles = [engine.submit(ask(text)) for text in ("one", "two", "poison", "three", "four", "five")]
        for handle in handles:
            if handle.request_id == "poison":
                await assert_wrong(handle, "KeyError")
            else:
                await assert_right(handle)
        await assert_sound(engine)


async def test_an_abort_that_meets_a_broken_state_is_not_lost(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_fake_engine() as engine:
        bad, good = engine.submit(ask("leaves", 400)), engine.submit(ask("stays", 40))
        await trio.sleep(0.1)
        free, hook = BlockPool.free, once(ValueError("free already"))

        def slips(self: BlockPool, block_ids: list[int]) -> None:
            hook()
            free(self, block_ids)

        monkeypatch.setattr(BlockPool, "free", slips)
        bad.abort("client")
        await assert_right(good)
        await assert_sound(engine)


MEMORY_ERRORS = [
    MemoryError("the native kernels lack memory for this step"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:116] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB."),
]


@pytest.mark.parametrize("error", MEMORY_ERRORS, ids=str)
async def test_a_lack_of_memory_makes_steps_smaller_and_costs_nobody_anything(
    autojump_clock: MockClock, error: Exception
) -> None:
    def hook(batch: ScheduledBatch) -> None:
        if batch.num_tokens > 5:
            raise error

    async with open_failing(hook) as engine:
        handles = [engine.submit(ask(f"question {i}")) for i in range(8)]
        for handle in handles:
            await assert_right(handle)
        # 64 tokens for 16 seats: 32, 16, then with half the seats 8, and 4.
        assert (engine.limits.max_num_batched_tokens, engine.limits.max_num_seqs) == (4, 4)
        assert engine.limits.generation == 4
        notices = notices_of(engine)
        assert [dict(notice.changes) for notice in notices] == [
            {"max_num_batched_tokens": (64, 4), "max_num_seqs": (16, 4)}
        ]
        await assert_sound(engine)


async def test_a_row_of_one_token_that_does_not_fit_fails_alone(autojump_clock: MockClock) -> None:
    async with open_failing(Poison(error=MemoryError("none"))) as engine:
        bad, good = engine.submit(ask("poison")), engine.submit(ask("good"))
        await assert_wrong(bad, "MemoryError")
        await assert_right(good)
        assert engine.limits == replace(fake_config(max_num_seqs=16).limits, generation=engine.limits.generation)
        assert [notice.kind for notice in notices_of(engine)] == ["fault"]
        await assert_sound(engine)


async def test_what_a_lack_of_memory_lowered_comes_back_while_idle(autojump_clock: MockClock) -> None:
    num_faults = iter(range(6))

    def hook(_: ScheduledBatch) -> None:
        if next(num_faults, None) is not None:
            raise MemoryError("for a moment")

    async with open_failing(hook) as engine:
        await assert_right(engine.submit(ask("question")))
        assert (engine.limits.max_num_seqs, engine.limits.max_num_batched_tokens) == (2, 2)
        [notice] = notices_of(engine)
        assert notice.changes == {"max_num_batched_tokens": (64, 2), "max_num_seqs": (16, 2)}
        began = trio.current_time()
        await trio.sleep(7.5 * FIRST_WAIT_SECONDS)
        assert engine.limits == replace(fake_config(max_num_seqs=16).limits, generation=10)
        assert [dict(notice.changes) for notice in notices_of(engine)] == [
            {"max_num_seqs": (2, 4), "max_num_batched_tokens": (2, 4)},
            {"max_num_seqs": (4, 8), "max_num_batched_tokens": (4, 8)},
            {"max_num_seqs": (8, 16), "max_num_batched_tokens": (8, 16)},
            {"max_num_batched_tokens": (16, 32)},
            {"max_num_batched_tokens": (32, 64)},
        ]
        assert trio.current_time() - began == 7.5 * FIRST_WAIT_SECONDS
        await assert_sound(engine)


async def test_a_state_that_contradicts_itself_is_healed_when_idle(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_fake_engine() as engine:
        with monkeypatch.context() as patch:
            patch.setattr(BlockPool, "free", lambda *_: None)
            await assert_right(engine.submit(ask("its blocks are never given back")))
        assert engine.snapshot()["kv"]["used"] == 11
        await trio.sleep(1)
        await assert_right(engine.submit(ask("so that it becomes idle")))
        await trio.sleep(1)
        assert faults_of(engine) == {"failed_steps": 0, "integrity_violations": 1}
        assert "reference counts of blocks" in caplog.text
        assert "used=11" in caplog.text
        assert [notice.kind for notice in notices_of(engine)] == ["integrity"]
        await assert_sound(engine)


async def test_a_state_that_contradicts_itself_is_healed_while_it_works(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_fake_engine(num_blocks=512) as engine:
        long = [engine.submit(ask(f"never idle {i}", 400)) for i in range(2)]
        await trio.sleep(0.05)
        with monkeypatch.context() as patch:
            patch.setattr(BlockPool, "free", lambda *_: None)
            await assert_right(engine.submit(ask("its blocks are never given back", 3)))
        for handle in long:
            await assert_right(handle)
        assert faults_of(engine)["integrity_violations"] == 1
        await assert_sound(engine)


async def test_text_that_cannot_be_made_ends_its_request_alone(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_fake_engine() as engine:
        nonsense: Any = (5,)  # no text, and what is to be looked for in one
        bad = engine.submit(ask("cannot even begin", stop=nonsense))
        good = engine.submit(ask("good"))
        torn = engine.submit(ask("its reader raises"))
        at_the_end = engine.submit(ask("its last words cannot be told", 3))

        def raises() -> None:
            raise KeyError("a slip")

        torn.outbox.on_news = raises
        monkeypatch.setattr(type(at_the_end.outbox), "close", close_failing_for(at_the_end))
        await assert_wrong(bad, "turned into text")
        with trio.fail_after(1):
            await assert_right(good)
        await engine.wait_idle()
        assert torn.outbox.last is not None
        assert torn.outbox.last.finish_reason is FinishReason.ERROR
        _, reason, error = await read(at_the_end)
        assert (reason, error) == (FinishReason.ERROR, "Something went wrong while this answer was turned into text.")
        assert engine.snapshot()["requests"]["finished_by_reason"]["error"] == 3
        assert engine.num_running == 0
        await assert_sound(engine)


def close_failing_for(handle: Handle) -> Callable[..., None]:
    close, hook = type(handle.outbox).close, once(KeyError("a slip"))

    def closes(outbox: Any, *args: Any) -> None:
        if outbox is handle.outbox:
            hook()
        close(outbox, *args)

    return closes


class FailingRunner(FakeRunner):
    """Rows of one prompt fail, as where a seat, a grammar or a draw raises."""

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        output = super().execute(batch)
        bad = [s.sequence_id for s in batch.seated if bytes(s.token_ids) == b"poison"]
        rows = [row for row, sequence_id in enumerate(batch.sequence_ids) if sequence_id in bad]
        return replace(output, failures=dict.fromkeys(rows, "It cannot be drawn."))


async def test_a_row_that_fails_fails_alone_and_is_logged_with_its_name(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_fake_engine(runner=FailingRunner(256, 4)) as engine:
        bad, good = engine.submit(ask("poison")), engine.submit(ask("good"))
        await assert_wrong(bad, "cannot be drawn")
        await assert_right(good)
        assert "request poison ends with an error: It cannot be drawn." in caplog.text
        assert faults_of(engine)["failed_steps"] == 0
        await assert_sound(engine)


async def test_a_real_model_answers_the_same_after_steps_were_lost(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With noise, penalties and grammars, whose states begin anew behind the tokens there are."""
    requests = [
        tiny_engine.ask(
            GrammarSpec("regex", "[a-z]{40,60}", "grammar") if seed % 2 else None, seed, max_tokens=50, num_logprobs=2
        )
        for seed in range(6)
    ]
    async with tiny_engine.open_tiny_engine() as engine:
        expected = await tiny_engine.answer_all(engine, requests)
    execute, lost = ModelRunner.execute, []

    def loses(self: ModelRunner, batch: ScheduledBatch) -> StepOutput:
        output = execute(self, batch)  # rows, cache and grammars have gone on
        if batch.step in (1, 4, 5, 30):
            lost.append(batch.step)
            raise ArithmeticError("lost")
        return output

    monkeypatch.setattr(ModelRunner, "execute", loses)
    async with tiny_engine.open_tiny_engine() as engine:
        assert await tiny_engine.answer_all(engine, requests) == expected
        assert lost == [1, 4, 5, 30]
        assert faults_of(engine)["failed_steps"] == 4


async def test_a_change_of_limits_that_meets_a_broken_state_keeps_nobody_waiting(
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_fake_engine() as engine:
        handle = engine.submit(ask("stays", 40))
        await trio.sleep(0.1)
        flush, hook = KVCache.flush, once(KeyError("a slip"))

        def slips(self: KVCache, running: Any) -> None:
            hook()
            flush(self, running)

        monkeypatch.setattr(KVCache, "flush", slips)
        with trio.fail_after(1):
            assert (await engine.set_limits({"max_num_seqs": 2}, flush=True)).max_num_seqs == 2
        await assert_right(handle)
        await assert_sound(engine)
