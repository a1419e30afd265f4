"""The cost model: its arithmetic, its JSON, another machine's, and the fit that finds known parts again."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import Padding, ScheduledBatch
from engine.bench_steps import compositions, mixed_step
from engine.cost_fit import (
    fit_cost_model,
    fit_engine_part,
    knots_up_to,
    non_negative_least_squares,
    relative_errors,
)
from engine.cost_model import SECONDS, CostModel, Curve, StepShape, read_cost_model, shape_of
from engine.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

KNOWN = CostModel(
    products=Curve(((1, 0.010), (16, 0.015), (32, 0.025), (128, 0.100))),
    head=Curve(((1, 0.002), (16, 0.004))),
    decode_token_seconds=2e-6,
    prefill_pair_seconds=4e-8,
    prefill_context_seconds=1e-6,
    chunk_seconds=1e-3,
    row_seconds=2e-5,
    engine_step_seconds=3e-4,
    engine_row_seconds=1e-5,
)


def batch_of(*rows: tuple[int, int, bool], padding: tuple[Padding, ...] = ()) -> ScheduledBatch:
    starts, counts, samples = zip(*rows, strict=True) if rows else ((), (), ())
    seats = tuple(range(len(rows)))
    return ScheduledBatch(1, seats, seats, starts, counts, samples, padding=padding)


def test_the_shape_of_a_step() -> None:
    assert shape_of(batch_of((10, 1, True), (20, 1, True))) == StepShape(2, 2, 2, 32)
    mixed = shape_of(batch_of((10, 1, True), (0, 8, False), (16, 4, True)))
    assert mixed == StepShape(13, 3, 2, 11, num_chunks=2, prefill_context=28, prefill_pairs=36 + 4 * 20)
    padded = shape_of(batch_of((10, 1, True), padding=(Padding(1, 5, 1, samples=True), Padding(2, 0, 3))))
    assert padded == StepShape(5, 3, 2, 17, num_chunks=1, prefill_context=3, prefill_pairs=6)
    assert shape_of(batch_of(padding=(Padding(2, 0, 3),))).num_samples == 0


def test_a_step_costs_the_sum_of_its_parts() -> None:
    shape = StepShape(24, 3, 2, 100, num_chunks=1, prefill_context=50, prefill_pairs=1000)
    execute = 0.020 + 0.002 + 0.002 / 15 + 3 * 2e-5 + 100 * 2e-6 + 1e-3 + 50e-6 + 1000 * 4e-8
    assert KNOWN.execute_seconds(shape) == pytest.approx(execute)
    assert KNOWN.seconds(shape) == pytest.approx(execute + 3e-4 + 3e-5)


def test_curves_are_level_before_their_points_and_go_on_after_them() -> None:
    curve = Curve(((4, 1.0), (8, 2.0), (16, 6.0)))
    assert [curve.at(n) for n in (0, 1, 4, 6, 8, 16, 18)] == [0.0, 1.0, 1.0, 1.5, 2.0, 6.0, 7.0]
    assert Curve(((4, 1.0),)).at(100) == 1.0
    assert Curve(()).at(3) == 0.0


def test_another_machine_reads_its_weights_or_multiplies() -> None:
    """8e9 parameters of 2 bytes at 2 TB/s are 8 ms a step; at 400 TFLOP/s arithmetic takes over at 200 tokens."""
    model = CostModel.of_machine(
        memory_gb_per_second=2000,
        tflops=400,
        num_parameters=8e9,
        bytes_per_weight=2,
        kv_bytes_per_token=131_072,
    )
    assert model.products.at(1) == pytest.approx(8e-3)
    assert model.products.at(200) == pytest.approx(8e-3)
    assert model.products.at(2000) == pytest.approx(80e-3)
    assert model.decode_token_seconds == pytest.approx(131_072 / 2e12)
    assert model.seconds(StepShape(1, 1, 1, 0)) == pytest.approx(8e-3)
    with pytest.raises(ConfigError, match="above 0"):
        CostModel.of_machine(
            memory_gb_per_second=0, tflops=1, num_parameters=1, bytes_per_weight=1, kv_bytes_per_token=1
        )


def test_json_there_and_back(tmp_path: Path) -> None:
    assert CostModel.from_json(json.loads(json.dumps(KNOWN.to_json()))) == KNOWN
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"cost_model": {**KNOWN.to_json(), "fit": {"steps": 3}}, "rows": []}))
    assert read_cost_model(path) == KNOWN
    path.write_text(json.dumps(KNOWN.to_json()))
    assert read_cost_model(path) == KNOWN


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": ...}, "lacks head"),
        ({"chunk_seconds": -1.0}, "chunk_seconds holds -1.0"),
        ({"row_seconds": "1"}, "row_seconds holds '1'"),
        ({"row_seconds": True}, "row_seconds holds True"),
        ({"row_seconds": float("nan")}, "row_seconds holds nan"),
        ({"products": []}, "no points"),
        ({"products": [[1, 0.2], [2, 0.1]]}, "fall"),
        ({**dict.fromkeys(SECONDS, 0.0), "products": [[1, 0.0], [9, 0.1]], "head": []}, "takes no time"),
        ({"products": 3}, "not a list"),
        ({"products": [[1]]}, "not a list"),
        ({"products": [[2, 0.1], [1, 0.2]]}, "not ordered"),
    ],
)
def test_a_broken_cost_model_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    data = {**KNOWN.to_json(), **changes}
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))
    with pytest.raises(ConfigError, match=message):
        read_cost_model(path)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_cost_model(tmp_path / "none.json")
    path = tmp_path / "cost.json"
    for content, message in ((b"{", "not JSON"), (b"\xff\xfe", "not JSON"), (b"[1]", "JSON object")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            read_cost_model(path)


def shapes_of_bench(seats: int = 16, budget: int = 128, context: int = 1024) -> list[StepShape]:
    steps = compositions(random.Random(0), seats, budget, context)
    return [shape_of(batch_of(*pieces)) for pieces in steps]


def test_the_fit_finds_known_parts_again() -> None:
    shapes = shapes_of_bench()
    fitted = fit_cost_model(shapes, [KNOWN.execute_seconds(shape) for shape in shapes])
    others = random.Random(7)
    unseen = [shape_of(batch_of(*mixed_step(others, 16, 128, 1024))) for _ in range(50)]
    errors = relative_errors(fitted, unseen, [KNOWN.execute_seconds(shape) for shape in unseen])
    assert np.abs(errors).max() < 1e-4
    assert fitted.decode_token_seconds == pytest.approx(KNOWN.decode_token_seconds, rel=1e-3)
    assert (fitted.engine_step_seconds, fitted.engine_row_seconds) == (0.0, 0.0)


def test_the_fit_bears_noise() -> None:
    """Five per cent of noise on each step leave less than five on others."""
    noise, shapes = random.Random(3), shapes_of_bench()
    fitted = fit_cost_model(shapes, [KNOWN.execute_seconds(shape) * noise.uniform(0.95, 1.05) for shape in shapes])
    unseen = [shape_of(batch_of(*mixed_step(noise, 16, 128, 1024))) for _ in range(50)]
    errors = relative_errors(fitted, unseen, [KNOWN.execute_seconds(shape) for shape in unseen])
    assert np.abs(errors).max() < 0.05
    assert all(a <= b for (_, a), (_, b) in zip(fitted.products.points, fitted.products.points[1:], strict=False))


def test_the_part_of_the_engine() -> None:
    shapes = shapes_of_bench()
    executions = np.array([1.1 * KNOWN.execute_seconds(shape) for shape in shapes])
    gaps = np.array([4e-4 + 2e-5 * shape.num_rows for shape in shapes])
    whole = fit_engine_part(KNOWN, shapes, executions, gaps)
    assert whole.engine_step_seconds == pytest.approx(4e-4)
    assert whole.engine_row_seconds == pytest.approx(2e-5)
    assert [whole.execute_seconds(shape) for shape in shapes] == pytest.approx(executions.tolist())


def test_nothing_measured_is_no_cost_model() -> None:
    with pytest.raises(ValueError, match="make no cost model"):
        fit_cost_model([], [])


@given(st.integers(1, 64), st.integers(1, 512), st.integers(8, 1024), st.integers(0, 100))
def test_every_step_to_be_measured_can_be_executed(seats: int, budget: int, context: int, seed: int) -> None:
    rng = random.Random(seed)
    for pieces in [*compositions(rng, seats, budget, context), mixed_step(rng, seats, budget, context)]:
        assert 1 <= len(pieces) <= seats
        assert sum(piece.num_tokens for piece in pieces) <= budget
        for start, count, _ in pieces:
            assert start >= 0
            assert count >= 1
            assert start + count <= context


@given(st.integers(0, 1000), st.integers(1, 6), st.integers(1, 20))
def test_least_squares_without_negative_entries(seed: int, num_columns: int, num_rows: int) -> None:
    """No entry can be moved for the better: the gradient is 0 where x > 0, and not downhill elsewhere."""
    rng = np.random.default_rng(seed)
    columns, goal = rng.normal(size=(num_rows, num_columns)), rng.normal(size=num_rows)
    x = non_negative_least_squares(columns, goal)
    gradient = columns.T @ (columns @ x - goal)
    assert (x >= 0).all()
    assert (gradient > -1e-6).all()
    assert np.abs(gradient[x > 0]).max(initial=0.0) < 1e-6


def test_corners_of_the_curves() -> None:
    assert knots_up_to(1) == [1]
    assert knots_up_to(20) == [1, 2, 4, 8, 16, 20]
