"""What is told of requests that have ended, however many of them at once."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from app.endings import Endings
from app.logs import FIELDS
from engine.request_log import MAX_FINISHED
from tests.engine.test_faults import ask, assert_right
from tests.fakes import fake_config, open_fake_engine

if TYPE_CHECKING:
    import pytest
    from trio.testing import MockClock

MANY = 256


async def test_however_many_end_in_one_step_each_is_told_of(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "relevo.requests")
    assert MANY > MAX_FINISHED
    batch = {"policy": "dynamic", "dynamic_max_queue_delay_seconds": 60.0}  # all sit down in one step
    config = fake_config(max_num_seqs=MANY, capacity_num_seqs=MANY, max_num_batched_tokens=4096, **batch)
    async with open_fake_engine(config, num_blocks=4096) as engine:
        Endings(engine)
        handles = [engine.submit(ask(f"question {number}")) for number in range(MANY)]
        for handle in handles:
            await assert_right(handle)
        with trio.fail_after(10):
            await engine.wait_idle()
        assert len(engine.table(1)["steps"][-1]["rows"]) == MANY
        assert engine.snapshot()["requests"]["finished_by_reason"]["length"] == MANY
        lines = [record for record in caplog.records if record.getMessage() == "finished"]
        assert len({getattr(record, FIELDS)["id"] for record in lines}) == len(lines) == MANY
        assert {getattr(record, FIELDS)["finish_reason"] for record in lines} == {"length"}
        assert len(engine.requests.finished(MANY)) == MAX_FINISHED
