"""Measures whole steps of many compositions, for a cost model: decodes, chunks of prompts, and both together."""

from __future__ import annotations

import random
import time
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from engine.batch import ScheduledBatch, Seated
from engine.cost_fit import fit_cost_model, relative_errors
from engine.cost_model import shape_of
from engine.memory import available_bytes
from engine.sequence import SamplingParams

if TYPE_CHECKING:
    from engine.cost_model import CostModel
    from engine.model_runner import ModelRunner

MIN_ROUNDS, MAX_ROUNDS = 3, 15
MAX_CONTEXT = 1024
CACHE_SHARE = 0.25
NUM_HELD_OUT = 16


class Piece(NamedTuple):
    """A row of a step to be measured."""

    start: int
    num_tokens: int
    samples: bool


def measure_cost_model(
    runner: ModelRunner,
    *,
    num_seats: int,
    token_budget: int,
    max_model_len: int,
    seconds: float,
) -> tuple[CostModel, dict[str, Any]]:
    """Measure steps and fit a cost model to them.

    Steps of all compositions are measured in turn, round after round, and stand for themselves by their medians.

    Args:
        num_seats: the most rows of a step.
        token_budget: the most tokens of a step.
        seconds: time to spend, about.

    Returns:
        The model without the engine's own part, and how well it fits: `steps` measured, `rounds`, and the median and
        95th percentile of the relative error on `held_out_steps` that it was not fitted to.
    """
    bench = StepBench(runner, num_seats, min(max_model_len, max(MAX_CONTEXT, 2 * token_budget)))
    rng = random.Random(0)  # noqa: S311 (the same steps every time)
    fitted = compositions(rng, num_seats, token_budget, bench.context)
    held_out = [mixed_step(rng, num_seats, token_budget, bench.context) for _ in range(NUM_HELD_OUT)]
    batches = [bench.batch(pieces) for pieces in (*fitted, *held_out)]
    for batch in batches[:: max(1, len(batches) // 8)]:
        runner.execute(batch)
    times: list[list[float]] = [[] for _ in batches]
    end = time.perf_counter() + seconds
    for number in range(MAX_ROUNDS):
        if number >= MIN_ROUNDS and time.perf_counter() >= end:
            break
        order = list(range(len(batches)))
        rng.shuffle(order)
        for index in order:
            times[index].append(runner.execute(batches[index]).seconds)
    shapes, medians = [shape_of(batch) for batch in batches], [median(column) for column in times]
    model = fit_cost_model(shapes[: len(fitted)], medians[: len(fitted)])
    errors = np.abs(relative_errors(model, shapes[len(fitted) :], medians[len(fitted) :]))
    return model, {
        "steps": len(fitted),
        "held_out_steps": len(held_out),
        "rounds": len(times[0]),
        "held_out_error_median": float(np.median(errors)),
        "held_out_error_p95": float(np.quantile(errors, 0.95)),
    }


class StepBench:
    """A runner whose every seat is taken by a sequence as long as the context, so that any step can be asked for.

    What is in the cache does not matter for the time, so nothing is ever computed to fill it.

    Attributes:
        context: tokens of each; fewer than asked for where memory is short.
    """

    def __init__(self, runner: ModelRunner, num_seats: int, context: int) -> None:
        block_size = runner.kv_caches[0].shape[3]
        row_bytes = block_size * runner.kv_bytes_per_token
        affordable = int(available_bytes() * CACHE_SHARE) // (num_seats * row_bytes)
        num_blocks = max(1, min(-(-context // block_size), affordable))
        self.context = min(context, num_blocks * block_size)
        runner.allocate_cache(num_seats * num_blocks)
        block_ids = list(range(num_seats * num_blocks))
        random.Random(0).shuffle(block_ids)  # noqa: S311 (as scattered as after an hour of service)
        # As in a comparison with scripted lengths: greedy, and the end is held back.
        params = SamplingParams(temperature=0.0, min_tokens=self.context, stop_token_ids=frozenset((0,)))
        seats = range(num_seats)
        runner.execute(
            ScheduledBatch(
                step=0,
                seated=tuple([Seated(seat, seat, (1,) * self.context, self.context, params) for seat in seats]),
                new_blocks=tuple([(s, tuple(block_ids[s * num_blocks : (s + 1) * num_blocks])) for s in seats]),
            )
        )

    def batch(self, pieces: list[Piece]) -> ScheduledBatch:
        """A step of these rows."""
        seats = tuple(range(len(pieces)))
        starts, counts, samples = zip(*pieces, strict=True)
        return ScheduledBatch(step=0, seats=seats, sequence_ids=seats, starts=starts, counts=counts, samples=samples)


def compositions(rng: random.Random, num_seats: int, token_budget: int, context: int) -> list[list[Piece]]:
    """Steps that tell the parts of a cost model apart: each part alone in some, and all together in others."""
    steps = []
    for num_rows in _sizes(min(num_seats, token_budget)):
        for share in (0.05, 0.25, 0.6):
            steps.append(_decodes(rng, num_rows, share * context, context))
    for count in _sizes(min(token_budget, context))[1:]:
        for start in sorted({0, (context - count) // 3, context - count}):
            steps.append([Piece(start, count, rng.random() < 0.5)])
    for num_chunks in (2, 4):
        if num_chunks <= num_seats and 2 * num_chunks <= token_budget:
            for _ in range(3):
                count = min(token_budget // num_chunks, context)
                steps.append([Piece(rng.randint(0, context - count), count, True) for _ in range(num_chunks)])
    return steps + [mixed_step(rng, num_seats, token_budget, context) for _ in range(20)]


def mixed_step(rng: random.Random, num_seats: int, token_budget: int, context: int) -> list[Piece]:
    """Some rows that decode, and a chunk of a prompt or two in what the budget leaves."""
    num_decodes = rng.randint(1, max(1, min(num_seats, token_budget) - 1))
    pieces = _decodes(rng, num_decodes, rng.uniform(0.05, 0.6) * context, context)
    left = token_budget - num_decodes
    for _ in range(rng.randint(0, min(2, num_seats - num_decodes))):
        count = min(left, context, rng.choice((left, rng.randint(2, max(2, left)))))
        if count >= 2:
            pieces.append(Piece(rng.choice((0, rng.randint(0, context - count))), count, rng.random() < 0.7))
            left -= count
    return pieces


def _decodes(rng: random.Random, num_rows: int, mean: float, context: int) -> list[Piece]:
    """Rows of one token whose lengths differ as in service."""
    starts = [min(context - 1, int(mean * rng.uniform(0.3, 1.7))) for _ in range(num_rows)]
    return [Piece(start, 1, True) for start in starts]


def _sizes(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, … up to `most`."""
    doubled = [2**power for power in range(most.bit_length())]
    return sorted({size for two in doubled for size in (two, two * 3 // 2) if size <= most} | {most})
