"""How fast a model runs on this machine, without a server: steps, what they are made of, what bounds them.

The parts of a step are timed within it, so they belong together; figures are medians over rounds.
"""

from __future__ import annotations

import random
import time
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from engine.batch import ScheduledBatch, Seated
from engine.bench_steps import measure_cost_model
from engine.errors import ConfigError
from engine.machine import Machine, measure_machine, work_of
from engine.memory import available_bytes
from engine.model_runner import ModelRunner
from engine.quality import measure_quality
from engine.sequence import SamplingParams
from engine.startup import load_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.config import EngineConfig
    from engine.loaded import LoadedModel

MIN_ROUNDS, MAX_ROUNDS = 5, 40


# Tokens of the chunks of prompts that are measured, at the end of each context.
PREFILL_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Row:
    """Steps of `batch` sequences that have `context` tokens with the step's own.

    Attributes:
        new_tokens: that each sequence adds: 1 for decode.
        step_seconds: a whole step with sampling, median.
        gemm_seconds: its matrix products, those of the head included, median.
        attention_seconds: its attention, median.
        parts: median seconds of `inputs`, `glue`, `products`, `attention`, `head`, `sampling` and what is left.
        floor_seconds: what reading weights and cache, or the arithmetic, takes at the measured rates of the machine.
        share_of_floor: floor_seconds / step_seconds; 1 is as good as the machine allows.
    """

    batch: int
    context: int
    new_tokens: int
    step_seconds: float
    gemm_seconds: float
    attention_seconds: float
    parts: dict[str, float]
    tokens_per_second: float
    floor_seconds: float
    share_of_floor: float
    rounds: int


def measure_speed(
    config: EngineConfig,
    *,
    batches: Sequence[int],
    contexts: Sequence[int],
    seconds_per_row: float,
    seconds_for_steps: float,
    quality_tokens: int,
    report: Callable[[int, int, str], None],
) -> dict[str, Any]:
    """Load the model and measure it.

    Args:
        batches: numbers of sequences.
        contexts: tokens each sequence has in the cache.
        seconds_per_row: time to spend on each pair of both, about.
        seconds_for_steps: time to spend on the steps that the cost model is fitted to, about.
        quality_tokens: tokens of ordinary text to compare with float32 over; 0 skips that.
        report: called with (done, total) parts of the work and a word about the next one.

    Returns:
        machine, model, dtype, rows, prefill, quality and cost_model, ready to be written as JSON.

    Raises:
        ConfigError: a context is longer than the model's, or does not fit in memory.
        ModelError: the model cannot be loaded.
    """
    decode, prefill = _shapes(batches, contexts, min(PREFILL_TOKENS, config.max_num_batched_tokens))
    model, runner = _load(config, max(batches), max(contexts))
    total = len(decode) + len(prefill) + 3
    report(0, total, "")
    machine = measure_machine(runner.model)
    rows = []
    for done, (context, batch, new_tokens) in enumerate((*decode, *prefill), start=1):
        report(done, total, "")
        steps = Steps(runner, batch, context, new_tokens)
        rows.append(measure_row(steps, machine, seconds=seconds_per_row))
    report(total - 2, total, "")
    cost_model, fit = measure_cost_model(
        runner,
        num_seats=config.max_num_seqs,
        token_budget=config.max_num_batched_tokens,
        max_model_len=model.max_model_len,
        seconds=seconds_for_steps,
    )
    report(total - 1, total, "")
    quality = measure_quality(
        model, runner, config, quality_tokens, lambda done, of: report(total - 1, total, f"{done} of {of} tokens read")
    )
    report(total, total, "")
    return {
        "machine": asdict(machine),
        "model": model.name,
        "weights_kind": model.weights_kind,
        "dtype": model.dtype,
        "rows": [asdict(row) for row in rows[: len(decode)]],
        "prefill": [asdict(row) for row in rows[len(decode) :]],
        "quality": quality,
        "cost_model": {**cost_model.to_json(), "fit": fit},
    }


def _shapes(
    batches: Sequence[int], contexts: Sequence[int], chunk: int
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """(context, batch, new tokens) of the steps that decode, and of those that read a chunk of a prompt."""
    decode = [(context, batch, 1) for context in contexts for batch in batches]
    return decode, [(context, 1, min(chunk, context)) for context in contexts]


def _load(config: EngineConfig, batch: int, context: int) -> tuple[LoadedModel, ModelRunner]:
    """The model with at least `batch` seats, and its runner."""
    model = load_model(replace(config, capacity_num_seqs=max(batch, config.capacity_num_seqs)))
    if not isinstance(model.runner, ModelRunner):
        raise TypeError(f"cannot measure a {type(model.runner).__name__}")
    if context + MAX_ROUNDS + 2 > model.max_model_len:
        raise ConfigError(f"The model knows a context of {model.max_model_len} tokens; that is too short to measure.")
    return model, model.runner


def measure_row(steps: Steps, machine: Machine, *, seconds: float) -> Row:
    """Time steps for about so long."""
    for _ in range(2):
        steps.run()
    steps.runner.take_seconds()
    times: list[dict[str, float]] = []
    end = time.perf_counter() + seconds
    while len(times) < MIN_ROUNDS or (time.perf_counter() < end and len(times) < MAX_ROUNDS):
        begin = time.perf_counter()
        steps.run()
        whole = time.perf_counter() - begin
        parts = steps.runner.take_seconds()
        times.append({**parts, "rest": whole - sum(parts.values()), "step": whole})
    parts = {name: median(row[name] for row in times) for name in times[0]}
    step = parts.pop("step")
    read, operations = steps.bytes_and_operations()
    floor = max(read / machine.memory_bytes_per_second, operations / machine.product_flops_per_second)
    return Row(
        batch=steps.batch,
        context=steps.context,
        new_tokens=steps.new_tokens,
        step_seconds=step,
        gemm_seconds=parts["products"] + parts["head"],
        attention_seconds=parts["attention"],
        parts=parts,
        tokens_per_second=steps.batch * steps.new_tokens / step,
        floor_seconds=floor,
        share_of_floor=floor / step,
        rounds=len(times),
    )


class Steps:
    """Sequences of one length that take the same step again and again.

    What is in the cache does not matter for the time, so what comes before is never computed.

    Args:
        context: tokens of each sequence, with those of the step.
        new_tokens: of each in a step.

    Raises:
        ConfigError: their cache does not fit in memory.
    """

    def __init__(self, runner: ModelRunner, batch: int, context: int, new_tokens: int) -> None:
        self.runner, self.batch, self.context, self.new_tokens = runner, batch, context, new_tokens
        block_size = runner.kv_caches[0].shape[3]
        blocks_per_row = -(-(context + 1) // block_size)
        needed = batch * blocks_per_row * block_size * runner.kv_bytes_per_token
        if needed > available_bytes():
            raise ConfigError(f"{batch} sequences of {context} tokens need {needed} bytes of cache: more than is free.")
        runner.allocate_cache(batch * blocks_per_row)
        block_ids = list(range(batch * blocks_per_row))
        random.Random(0).shuffle(block_ids)  # noqa: S311 (as scattered as after an hour of service)
        prompt, greedy = tuple(range(1, context + 1)), SamplingParams(temperature=0.0)
        seats = tuple(range(batch))
        self._batch = ScheduledBatch(
            step=0,
            seats=seats,
            sequence_ids=seats,
            starts=(context - new_tokens,) * batch,
            counts=(new_tokens,) * batch,
            samples=(True,) * batch,
        )
        tables = [tuple(block_ids[row * blocks_per_row : (row + 1) * blocks_per_row]) for row in seats]
        runner.execute(
            ScheduledBatch(
                step=0,
                seated=tuple([Seated(row, row, prompt, context, greedy) for row in seats]),
                new_blocks=tuple(enumerate(tables)),
            )
        )

    def run(self) -> None:
        """One step of all sequences."""
        self.runner.execute(self._batch)

    def bytes_and_operations(self) -> tuple[int, int]:
        """What a step cannot do without: bytes of weights and cache read, arithmetic operations."""
        runner = self.runner
        return work_of(runner.model, runner.kv_bytes_per_token, self.batch, self.context, self.new_tokens)
