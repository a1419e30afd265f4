"""The part of `relevo bench` that runs inside an engine, over the fake model."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import pytest
import trio

from engine import bench_live
from engine.bench_live import MIN_STEPS, measure_engine_part
from engine.bench_running import EngineMeter
from engine.cost_model import CostModel, Curve
from engine.errors import ConfigError
from engine.loaded import LoadedModel
from engine.workload import WorkItem, Workload
from tests.fakes import FakeRunner, FakeTokenizer, fake_config

if TYPE_CHECKING:
    from engine.config import EngineConfig

MODEL = CostModel(Curve(((1.0, 1e-4), (64.0, 1e-3))))


@pytest.fixture(autouse=True)
def _fake_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(config: EngineConfig) -> LoadedModel:
        return LoadedModel(
            name="fake",
            dtype="float32",
            weights_kind="fake",
            max_model_len=64,
            num_blocks=256,
            runner=FakeRunner(256, config.block_size),
            tokenizer=FakeTokenizer(),
            chat_template=None,
        )

    monkeypatch.setattr(bench_live, "load_model", load)


@pytest.mark.parametrize("limits", [{"max_waiting": 1}, {"max_waiting_tokens": 1}])
async def test_a_short_queue_of_the_server_is_no_hindrance(limits: dict[str, Any]) -> None:
    model, fit, running = await measure_engine_part(fake_config(**limits), MODEL, 0.0)
    assert fit["engine_steps"] >= MIN_STEPS - 1
    assert model.engine_step_seconds + model.engine_row_seconds > 0
    assert math.isfinite(fit["engine_error"])
    assert running["seats"] == 4
    assert all(running[f"{part}_seconds"] > 0 for part in ("step", "execute", "scheduling", "hop", "text"))


async def test_what_a_step_is_made_of_is_told_apart() -> None:
    meter, now = EngineMeter(), time.perf_counter()

    async with meter.open_stepper() as stepper:
        await stepper.run(lambda: None)  # loading: not a step

        async def schedule() -> None:
            for _ in range(2):
                time.sleep(0.01)  # noqa: ASYNC251 (what the loop's time goes to)
                await stepper.run(lambda: time.sleep(0.02))

        async with meter.measuring(), trio.open_nursery() as nursery:
            nursery.start_soon(schedule, name="scheduling")
    (asked, back), _ = stepper.calls
    told = meter.summary([(asked + 0.005, asked + 0.015)])
    assert len(stepper.calls) == 2
    assert told["execute_seconds"] == pytest.approx(0.01)
    assert told["hop_seconds"] == pytest.approx(back - asked - 0.01)
    assert 0.02 <= told["scheduling_seconds"] < time.perf_counter() - now
    assert told["text_seconds"] == 0.0
    assert told["loop_lag_p99_seconds"] > 0.004


async def test_too_few_steps_are_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    few = Workload("few", tuple([WorkItem(0.0, 1, 1)] * 4), max_output_tokens=1)
    monkeypatch.setattr(bench_live, "NUM_REQUESTS", 4)
    monkeypatch.setattr(bench_live, "_short", lambda context: few)
    with pytest.raises(ConfigError, match="steps, too few to measure; ask for fewer seats"):
        await measure_engine_part(fake_config(), MODEL, 0.0)
