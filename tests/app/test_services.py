"""What runs beside the server cannot end it, and what the engine did by itself is written down."""

from __future__ import annotations

import logging
import threading
from itertools import chain, count
from typing import TYPE_CHECKING

import pytest
import trio

from app import services
from app.drawing import Drawing
from app.errors import ApiError
from app.journal.journal import Journal
from app.services import HUNG_LOOKS, RESTART_SECONDS, Services, keep_notices, watch_stalls, watching_loop
from app.start import is_fault
from engine.errors import ConfigError, EngineError
from engine.handle import GenerationRequest, TextPrompt
from engine.sequence import SamplingParams
from tests.app.serving import open_app
from tests.fakes import FakeRunner, Poison
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from trio.testing import MockClock

    from engine.batch import ScheduledBatch
    from engine.engine import Engine


def ask(text: str, max_tokens: int = 3) -> GenerationRequest:
    return GenerationRequest(text, TextPrompt(text), SamplingParams(max_tokens=max_tokens))


async def test_what_fails_is_logged_counted_and_begun_again(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    begun: list[float] = []

    async def service() -> None:
        begun.append(trio.current_time())
        if len(begun) < 3:
            raise KeyError("a slip")

    services = Services()
    await services.run("history", service)
    assert [begun[1] - begun[0], begun[2] - begun[1]] == pytest.approx([RESTART_SECONDS] * 2)
    assert services.num_faults == {"history": 2}
    assert caplog.text.count("history failed and is begun again") == 2
    assert "a slip" in caplog.text


async def test_a_lack_of_memory_is_a_change_of_the_settings_by_the_engine(autojump_clock: MockClock) -> None:
    def before_step(batch: ScheduledBatch) -> None:
        if batch.num_tokens > 32:
            raise MemoryError

    async with (
        open_app(runner=FakeRunner(256, 4, before_step=before_step)) as (_, context),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(keep_notices, context.engine, context.journal, context.live)
        context.engine.submit(ask("x" * 60))
        await context.engine.wait_idle()
        await trio.sleep(0.1)
        [entry] = context.journal.audit.entries
        assert (entry.who, entry.generation) == ("the engine", 1)
        assert entry.changes == {"max_num_batched_tokens": (64, 32)}
        assert context.live.undo == {"max_num_batched_tokens": 64}
        [event] = context.journal.events.latest(9)
        assert event.text == "Token budget 64 → 32, by the engine: a step ran out of memory (MemoryError)"
        nursery.cancel_scope.cancel()


async def test_faults_are_events(autojump_clock: MockClock) -> None:
    async with (
        open_app(runner=FakeRunner(256, 4, before_step=Poison())) as (_, context),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(keep_notices, context.engine, context.journal, context.live)
        context.engine.submit(ask("poison"))
        await context.engine.wait_idle()
        await trio.sleep(0.1)
        [event] = context.journal.events.latest(9)
        assert (event.kind, event.title, event.level) == ("fault", "Fault", "warn")
        assert event.text == "A request failed each step it was in (ArithmeticError) and ended with an error"
        nursery.cancel_scope.cancel()


def logged(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.getMessage() for record in caplog.records)


async def stall_twice(engine: Engine) -> None:
    for _ in range(2):
        engine.submit(ask("hangs", 1))
        await trio.sleep(100)


async def test_a_stall_tells_once_where_every_thread_is(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait, name="somewhere_to_be_seen")
    thread.start()
    try:
        async with open_app(step_seconds=60) as (_, context), trio.open_nursery() as nursery:
            nursery.start_soon(watch_stalls, context.engine)
            await stall_twice(context.engine)
            nursery.cancel_scope.cancel()
    finally:
        leave.set()
        thread.join()
    assert logged(caplog, "where the threads are") == 2
    assert logged(caplog, "Current thread") == 2
    assert logged(caplog, "in wait") >= 2
    assert logged(caplog, "in stall_twice") == 0  # a task is no thread
    assert logged(caplog, "the engine goes on") == 2


def test_an_event_loop_that_hangs_is_told_of_once_by_a_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(services, "LOOK_SECONDS", 0.001)
    looks = chain([1, 2], [3] * HUNG_LOOKS, range(4, 9), [9] * 20, count(10))
    over = threading.Event()

    def num_beats() -> int:
        number = next(looks)
        if number > 15:
            over.set()
        return number

    with watching_loop(num_beats):
        assert over.wait(PATIENCE_SECONDS)
    assert logged(caplog, "the event loop has hung for 0.005 s") == 1
    assert logged(caplog, "in num_beats") + logged(caplog, "in wait") >= 1, "where the threads are"
    assert logged(caplog, "the event loop goes on") == 1


async def test_a_drawing_that_hangs_is_told_of_and_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drawing, leave = Drawing(), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr("app.drawing.LIMIT_SECONDS", 0.02)
        for work in (leave.wait, bool):
            with pytest.raises(ApiError, match=r"was not drawn within 0\.02 s"):
                await drawing.run(work)
    leave.set()
    assert await drawing.run(lambda: "drawn") == "drawn"
    assert logged(caplog, "where the threads are") == 1
    assert logged(caplog, "in wait") >= 1


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (RuntimeError("a slip"), True),
        (ExceptionGroup("", [ExceptionGroup("", [KeyError("a slip")])]), True),
        (EngineError("nothing can be computed any more"), True),
        (ConfigError("a setting is wrong"), False),
        (ExceptionGroup("", [ConfigError("the port is taken")]), False),
        (KeyboardInterrupt(), False),
        (BaseExceptionGroup("", [KeyboardInterrupt(), ConfigError("")]), False),
    ],
)
def test_only_what_nobody_wanted_and_no_user_can_mend_leaves_a_traceback(error: BaseException, is_one: bool) -> None:
    assert is_fault(error) is is_one


async def test_a_journal_that_breaks_off_does_not_end_the_others(autojump_clock: MockClock) -> None:
    """An error that is none of the disk's."""

    class Torn(Journal):
        async def flush(self) -> bool:
            raise AttributeError("a slip")

    services, journal = Services(), Torn()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(services.run, "history", journal.run)
        await trio.sleep(60)
        assert services.num_faults["history"] >= 5
        nursery.cancel_scope.cancel()
