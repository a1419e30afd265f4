"""All calls happen on one thread, one after the other, and none is abandoned."""

from __future__ import annotations

import threading
import time

import pytest
import trio

from engine.stepper import open_stepper


async def test_every_call_runs_on_the_same_thread() -> None:
    async with open_stepper() as stepper:
        names = {await stepper.run(lambda: threading.current_thread().name) for _ in range(5)}
    assert names == {"relevo-torch"}


async def test_an_exception_reaches_the_caller() -> None:
    async with open_stepper() as stepper:
        with pytest.raises(ZeroDivisionError):
            await stepper.run(lambda: 1 / 0)
        assert await stepper.run(lambda: 7) == 7


@pytest.mark.slow
async def test_a_cancelled_caller_still_waits_for_the_call() -> None:
    done = threading.Event()

    def work() -> None:
        time.sleep(0.2)
        done.set()

    async with open_stepper() as stepper:
        with trio.move_on_after(0.01):
            await stepper.run(work)
        assert done.is_set()
