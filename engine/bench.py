"""How fast a model runs on this machine, without a server: decode steps beside what they are made of.

Step, matrix products and attention are timed in turn, round after round, and compared by their medians: on a shared
machine only figures of the same moments can be compared.
"""

from __future__ import annotations

import random
import time
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from engine.batch import ScheduledBatch, Seated
from engine.bench_steps import measure_cost_model
from engine.errors import ConfigError
from engine.machine import Machine, measure_machine, seconds_of
from engine.memory import available_bytes
from engine.model_runner import ModelRunner
from engine.quality import measure_quality
from engine.sequence import SamplingParams
from engine.startup import load_model
from kernels.paged_attention import AttentionPlan, Workspace, paged_attention, plan_attention

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.config import EngineConfig
    from engine.loaded import LoadedModel

MIN_ROUNDS, MAX_ROUNDS = 5, 40


@dataclass(frozen=True, slots=True)
class Row:
    """Decode steps of `batch` sequences of `context` tokens each.

    Attributes:
        step_seconds: a whole step with sampling, median.
        gemm_seconds: its matrix products alone, head included, median.
        attention_seconds: its attention alone, median.
        floor_seconds: what reading weights and cache, or the arithmetic, takes at the measured rates of the machine.
        share_of_floor: floor_seconds / step_seconds; 1 is as good as the machine allows.
    """

    batch: int
    context: int
    step_seconds: float
    gemm_seconds: float
    attention_seconds: float
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
        machine, model, dtype, rows, quality and cost_model, ready to be written as JSON.

    Raises:
        ConfigError: a context is longer than the model's, or does not fit in memory.
        ModelError: the model cannot be loaded.
    """
    pairs = [(context, batch) for context in contexts for batch in batches]
    model, runner = _load(config, max(batches), max(contexts))
    total = len(pairs) + 3
    report(0, total, "")
    machine = measure_machine(runner.model)
    rows = []
    for done, (context, batch) in enumerate(pairs, start=1):
        report(done, total, "")
        rows.append(measure_row(runner, machine, batch=batch, context=context, seconds=seconds_per_row))
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
        "rows": [asdict(row) for row in rows],
        "quality": quality,
        "cost_model": {**cost_model.to_json(), "fit": fit},
    }


def _load(config: EngineConfig, batch: int, context: int) -> tuple[LoadedModel, ModelRunner]:
    """The model with at least `batch` seats, and its runner."""
    model = load_model(replace(config, capacity_num_seqs=max(batch, config.capacity_num_seqs)))
    if not isinstance(model.runner, ModelRunner):
        raise TypeError(f"cannot measure a {type(model.runner).__name__}")
    if context + MAX_ROUNDS + 2 > model.max_model_len:
        raise ConfigError(f"The model knows a context of {model.max_model_len} tokens; that is too short to measure.")
    return model, model.runner


def measure_row(runner: ModelRunner, machine: Machine, *, batch: int, context: int, seconds: float) -> Row:
    """Time decode steps of equal sequences.

    Raises:
        ConfigError: their cache does not fit in memory.
    """
    steps = DecodeSteps(runner, batch, context)
    for _ in range(2):
        for work in (steps.step, steps.products, steps.attention):
            work()
    times: list[tuple[float, float, float]] = []
    end = time.perf_counter() + seconds
    while len(times) < MIN_ROUNDS or (time.perf_counter() < end and len(times) < MAX_ROUNDS):
        times.append((seconds_of(steps.step), seconds_of(steps.products), seconds_of(steps.attention)))
    step, products, attention = (median(column) for column in zip(*times, strict=True))
    read, flops = steps.bytes_and_flops()
    floor = max(read / machine.memory_bytes_per_second, flops / machine.product_flops_per_second)
    return Row(batch, context, step, products, attention, batch / step, floor, floor / step, len(times))


class DecodeSteps:
    """Sequences of one length that decode together, and the parts of their steps.

    What is in the cache does not matter for the time, so the prompts are never computed.
    """

    def __init__(self, runner: ModelRunner, batch: int, context: int) -> None:
        self._runner, self._batch, self._context = runner, batch, context
        (group,) = runner.cache_spec.groups
        block_size = runner.kv_caches[0].shape[3]
        blocks_per_row = -(-(context + MAX_ROUNDS + 2) // block_size)
        needed = batch * blocks_per_row * block_size * runner.cache_spec.bytes_per_token(runner.kv_element_bytes)
        if needed > available_bytes():
            raise ConfigError(f"{batch} sequences of {context} tokens need {needed} bytes of cache: more than is free.")
        runner.allocate_cache(batch * blocks_per_row)
        block_ids = list(range(batch * blocks_per_row))
        random.Random(0).shuffle(block_ids)  # noqa: S311 (as scattered as after an hour of service)
        tables = torch.tensor(block_ids).view(batch, blocks_per_row)
        self._plan: AttentionPlan = plan_attention(
            tables,
            torch.arange(batch + 1),
            torch.full((batch,), context),
            block_shape=(2, group.num_kv_heads, block_size, group.head_size),
            dtype=runner.dtype,
            workspace=Workspace(),
        )
        self._query = torch.randn(batch, runner.model.config.num_heads, group.head_size)
        self._inputs = {width: torch.randn(batch, width) for width in self._widths()}
        prompt, greedy = tuple(range(1, context + 1)), SamplingParams(temperature=0.0)
        self._seated = tuple(Seated(row, row, prompt, context, greedy) for row in range(batch))
        self._new_blocks = tuple((row, tuple(tables[row].tolist())) for row in range(batch))
        self._num_steps = 0

    def step(self) -> None:
        """One decode step of all sequences."""
        first, rows = self._num_steps == 0, tuple(range(self._batch))
        batch = ScheduledBatch(
            step=self._num_steps,
            seats=rows,
            sequence_ids=rows,
            starts=(self._context - 1 + self._num_steps,) * self._batch,
            counts=(1,) * self._batch,
            samples=(True,) * self._batch,
            seated=self._seated if first else (),
            new_blocks=self._new_blocks if first else (),
        )
        self._num_steps += 1
        self._runner.execute(batch)

    @torch.inference_mode()
    def products(self) -> None:
        """The matrix products of a step, one after the other as in the model."""
        hidden, attended, inner = (self._inputs[width] for width in self._widths())
        for layer in self._runner.model.layers:
            for product, x in zip(layer.products(), (hidden, attended, hidden, inner), strict=True):
                product(x)
        self._runner.model.head(hidden)

    @torch.inference_mode()
    def attention(self) -> None:
        """The attention of a step."""
        for kv_cache in self._runner.kv_caches:
            paged_attention(self._query, kv_cache, self._plan)

    def bytes_and_flops(self) -> tuple[int, int]:
        """What a step cannot do without: bytes of weights and cache read, floating-point operations."""
        config, runner = self._runner.model.config, self._runner
        hidden, attended, inner = self._widths()
        key_value = 2 * config.num_kv_heads * config.head_size
        per_layer = hidden * (attended + key_value) + attended * hidden + 3 * hidden * inner
        weights = config.num_layers * per_layer + config.vocab_size * hidden
        tokens = self._batch * self._context
        read = weights * runner.dtype.itemsize + tokens * runner.cache_spec.bytes_per_token(runner.kv_element_bytes)
        return read, 2 * weights * self._batch + 4 * tokens * attended * config.num_layers

    def _widths(self) -> tuple[int, int, int]:
        """Columns of the inputs: residual stream, attended heads, feed-forward."""
        config = self._runner.model.config
        return config.hidden_size, config.num_heads * config.head_size, config.intermediate_size
