"""`relevo bench` on a tiny model: every figure is there and they belong together."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from app.bench import run_bench
from engine.config import EngineConfig
from engine.cost_model import CostModel, StepShape, read_cost_model
from engine.errors import ConfigError
from tests.tiny_models import make_config, make_tensors, write_gguf

if TYPE_CHECKING:
    from pathlib import Path


def tiny_config(tmp_path: Path, dtype: str) -> EngineConfig:
    config = make_config()
    path = write_gguf(tmp_path / "tiny.gguf", config, make_tensors(config))
    return EngineConfig(model=str(path), dtype=dtype, num_threads=1, cache_memory_bytes=1 << 20)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_result_has_every_figure(tmp_path: Path, dtype: str) -> None:
    lines: list[str] = []
    target = tmp_path / "speed.json"
    code = run_bench(
        tiny_config(tmp_path, dtype),
        batches=(1, 5),
        contexts=(20, 33),
        seconds_per_row=0.0,
        seconds_for_steps=0.0,
        seconds_in_engine=0.0,
        quality_tokens=300,
        json_path=target,
        echo=lines.append,
    )
    assert code == 0
    result = json.loads(target.read_text())
    assert (result["model"], result["dtype"]) == ("tiny", dtype)
    assert [(row["context"], row["batch"]) for row in result["rows"]] == [(20, 1), (20, 5), (33, 1), (33, 5)]
    for row in result["rows"]:
        assert row["gemm_seconds"] > 0
        assert row["attention_seconds"] > 0
        assert row["parts"].keys() == {"inputs", "glue", "products", "attention", "head", "sampling", "rest"}
        assert row["gemm_seconds"] == pytest.approx(row["parts"]["products"] + row["parts"]["head"])
        assert row["tokens_per_second"] == pytest.approx(row["batch"] / row["step_seconds"])
        assert row["share_of_floor"] == pytest.approx(row["floor_seconds"] / row["step_seconds"])
    assert [(row["context"], row["new_tokens"]) for row in result["prefill"]] == [(20, 20), (33, 33)]
    assert result["machine"]["threads"] == 1
    assert result["quality"]["mean_nll"] > 0
    assert result["quality"]["reference_mean_nll"] is None  # known for the built-in model alone
    if dtype == "float32":
        assert (result["quality"]["tokens"], result["quality"]["kl_mean"]) == (0, None)
        assert lines[-3] == "divergence from float32: not measured (float32 is the reference)"
    else:
        assert (result["quality"]["tokens"], 0.0 < result["quality"]["kl_mean"] < 0.01) == (300, True)
        assert lines[-3].startswith("divergence from float32 over 300 tokens of text: KL mean 0.00")
    fit = result["cost_model"]["fit"]
    assert fit["steps"] >= 40
    assert fit["engine_steps"] >= 30
    assert all(fit[name] >= 0 for name in ("held_out_error_median", "held_out_error_p95", "stretch"))
    model = read_cost_model(target)
    assert model == CostModel.from_json(result["cost_model"])
    assert model.engine_step_seconds + model.engine_row_seconds > 0
    assert model.seconds(StepShape(4, 4, 4, 100)) > 0
    engine = result["engine"]
    assert engine["seats"] == EngineConfig(model="").max_num_seqs
    parts = [engine[f"{part}_seconds"] for part in ("execute", "scheduling", "hop")]
    assert all(0 < part < engine["step_seconds"] for part in (*parts, engine["text_seconds"]))
    assert sum(parts) < 1.1 * engine["step_seconds"]
    assert engine["loop_lag_p99_seconds"] > 0
    assert lines[-1].startswith(f"a step with {engine['seats']} seats in a running engine")
    assert len(lines) == 15
    assert {len(line) for line in lines[3:10]} == {len(lines[3])}


def test_a_context_beyond_the_model_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too short to measure"):
        run_bench(tiny_config(tmp_path, "float32"), batches=(1,), contexts=(100,), echo=lambda line: None)
