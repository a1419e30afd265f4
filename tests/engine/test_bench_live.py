"""The part of `relevo bench` that runs inside an engine, over the fake model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from engine import bench_live
from engine.bench_live import MIN_STEPS, measure_engine_part
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
    model, fit = await measure_engine_part(fake_config(**limits), MODEL, 0.0)
    assert fit["engine_steps"] >= MIN_STEPS - 1
    assert model.engine_step_seconds + model.engine_row_seconds > 0
    assert math.isfinite(fit["engine_error"])


async def test_too_few_steps_are_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    few = Workload("few", tuple([WorkItem(0.0, 1, 1)] * 4), max_output_tokens=1)
    monkeypatch.setattr(bench_live, "NUM_REQUESTS", 4)
    monkeypatch.setattr(bench_live, "_short", lambda context: few)
    with pytest.raises(ConfigError, match="steps, too few to measure; ask for fewer seats"):
        await measure_engine_part(fake_config(), MODEL, 0.0)
