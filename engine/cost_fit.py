"""Fits a cost model to measured steps: least squares on relative errors, no part below zero, no curve that falls."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from engine.cost_model import CostModel, Curve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from engine.cost_model import StepShape

    Floats = NDArray[np.float64]

LINEAR = {
    "decode_token_seconds": "decode_context",
    "prefill_pair_seconds": "prefill_pairs",
    "prefill_context_seconds": "prefill_context",
    "chunk_seconds": "num_chunks",
    "row_seconds": "num_rows",
}
TOLERANCE = 1e-10


def fit_cost_model(shapes: Sequence[StepShape], seconds: Sequence[float]) -> CostModel:
    """The cost model that comes nearest to measured executions; the engine's own part is left at 0.

    The curves have their corners where twice as many tokens, or rows that sample, are reached, from 1 to the most that
    were measured.

    Raises:
        ValueError: nothing was measured.
    """
    if not shapes or len(shapes) != len(seconds):
        raise ValueError(f"{len(shapes)} steps and {len(seconds)} times make no cost model")
    token_knots = knots_up_to(max(shape.num_tokens for shape in shapes))
    sample_knots = knots_up_to(max(shape.num_samples for shape in shapes))
    linear = np.array([[getattr(shape, name) for name in LINEAR.values()] for shape in shapes], dtype=np.float64)
    columns = np.hstack(
        [
            _ramps([shape.num_tokens for shape in shapes], token_knots),
            _ramps([shape.num_samples for shape in shapes], sample_knots),
            linear,
        ]
    )
    measured = np.array(seconds, dtype=np.float64)
    weights = non_negative_least_squares(columns / measured[:, None], np.ones(len(measured)))
    rises, head_rises = weights[: len(token_knots)], weights[len(token_knots) : -len(LINEAR)]
    return CostModel(
        products=_curve(token_knots, rises),
        head=_curve(sample_knots, head_rises),
        **dict(zip(LINEAR, weights[-len(LINEAR) :].tolist(), strict=True)),
    )


def fit_engine_part(model: CostModel, shapes: Sequence[StepShape], executions: Floats, gaps: Floats) -> CostModel:
    """The same model as it holds inside a running engine.

    Args:
        shapes: steps that the engine took.
        executions: seconds of each execution. Beside a busy event loop they are longer than alone, so all parts are
            stretched by the ratio of their sums.
        gaps: seconds from the end of each to the beginning of the next.
    """
    stretch = float(executions.sum()) / sum([model.execute_seconds(shape) for shape in shapes])
    num_rows = np.array([shape.num_rows for shape in shapes], dtype=np.float64)
    per_step, per_row = non_negative_least_squares(np.stack([np.ones_like(num_rows), num_rows], axis=1), gaps).tolist()
    return replace(
        model,
        products=Curve(tuple([(number, value * stretch) for number, value in model.products.points])),
        head=Curve(tuple([(number, value * stretch) for number, value in model.head.points])),
        **{name: getattr(model, name) * stretch for name in LINEAR},
        engine_step_seconds=per_step,
        engine_row_seconds=per_row,
    )


def relative_errors(model: CostModel, shapes: Sequence[StepShape], seconds: Sequence[float]) -> Floats:
    """(predicted - measured) / measured of each execution."""
    predicted = np.array([model.execute_seconds(shape) for shape in shapes])
    measured = np.array(seconds)
    errors: Floats = (predicted - measured) / measured
    return errors


def knots_up_to(most: int) -> list[int]:
    """1, 2, 4, … and `most`."""
    return sorted({*[2**power for power in range(max(1, most).bit_length())], max(1, most)})


def non_negative_least_squares(columns: Floats, goal: Floats) -> Floats:
    """The `x` of no negative entry that makes |columns @ x - goal| least (active sets; Lawson and Hanson, 1974).

    Args:
        columns: [N, P].
        goal: [N].

    Returns:
        [P].
    """
    scale = np.linalg.norm(columns, axis=0)
    scale[scale == 0] = 1.0
    matrix = columns / scale
    x = np.zeros(matrix.shape[1])
    passive = np.zeros(matrix.shape[1], dtype=bool)
    for _ in range(10 * matrix.shape[1]):
        gradient = matrix.T @ (goal - matrix @ x)
        gradient[passive] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= TOLERANCE:
            break
        passive[best] = True
        while True:
            trial = np.zeros_like(x)
            trial[passive] = np.linalg.lstsq(matrix[:, passive], goal, rcond=None)[0]
            negative = passive & (trial <= 0)
            if not negative.any():
                break
            # Walk towards the trial until the first entry reaches 0, which then stays there.
            steps = x[negative] / np.maximum(x[negative] - trial[negative], TOLERANCE)
            x = x + float(steps.min()) * (trial - x)
            passive &= x > TOLERANCE
            x[~passive] = 0.0
        x = trial
    result: Floats = x / scale
    return result


def _ramps(numbers: Sequence[int], knots: Sequence[int]) -> Floats:
    """[N, K]: 1 where there is anything at all, then how far each number has come between two neighbouring knots."""
    values = np.array(numbers, dtype=np.float64)
    ramps = [(values > 0).astype(np.float64)]
    ramps += [np.clip((values - low) / (high - low), 0.0, 1.0) for low, high in pairwise(knots)]
    return np.stack(ramps, axis=1)


def _curve(knots: Sequence[int], rises: Floats) -> Curve:
    return Curve(tuple(zip(map(float, knots), np.cumsum(rises).tolist(), strict=True)))
