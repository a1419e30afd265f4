"""Measures what a step costs inside a running engine: planning, the hop to the torch thread and back, a busy loop."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import trio

from engine.bench_running import EngineMeter
from engine.cost_fit import fit_engine_part, relative_errors
from engine.cost_model import shape_of
from engine.engine import open_engine
from engine.errors import ConfigError
from engine.handle import GenerationRequest, TokensPrompt
from engine.sequence import SamplingParams
from engine.startup import load_model
from engine.workload import choose_factor, generate, scaled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.batch import ScheduledBatch, StepOutput
    from engine.config import EngineConfig
    from engine.cost_model import CostModel, StepShape
    from engine.engine import Engine
    from engine.loaded import LoadedModel
    from engine.stepper import Runner
    from engine.workload import Workload

MIN_STEPS, NUM_DROPPED = 40, 10
LEAST_STEPS = 4  # that can be fitted, and some of them held back
NUM_WAITING = 4
MEAN_TOKENS = 200  # of a request: short enough to see many of them begin and end
NUM_REQUESTS = 2000
POLL_SECONDS = 0.05


class TimedRunner:
    """Notes when each step begins and ends; each is computed before the next one is planned."""

    overlaps = False

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.shapes: list[StepShape] = []
        self.times: list[tuple[float, float]] = []

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Compute the batch."""
        begin = time.perf_counter()
        output = self._runner.execute(batch)
        self.times.append((begin, time.perf_counter()))
        self.shapes.append(shape_of(batch))
        return output

    def launch(self, batch: ScheduledBatch) -> StepOutput:
        """As `execute`."""
        return self.execute(batch)

    def collect(self, ticket: StepOutput) -> StepOutput:
        """What came of a step that was launched."""
        return ticket

    def reset(self) -> None:
        """Forget every sequence."""
        self._runner.reset()


async def measure_engine_part(
    config: EngineConfig, model: CostModel, seconds: float
) -> tuple[CostModel, dict[str, Any], dict[str, float]]:
    """Keep an engine busy for a while and fit the part of a step that is its own.

    Every seat is taken all the time, by requests like those of the Azure conversation trace.

    Returns:
        The whole cost model, and how it fits: `engine_steps` seen, `stretch` of the executions against those measured
        alone, and `engine_step_error_median` of each execution; `engine_error` is that of the time of every other
        step, all together, where the model is fitted to the rest. Last, what `EngineMeter.summary` tells, and `seats`.

    Raises:
        ModelError: the model cannot be loaded.
        ConfigError: there are so many seats that all requests are answered in a few steps.
    """
    runners: list[TimedRunner] = []
    meter = EngineMeter()

    def load(config: EngineConfig) -> LoadedModel:
        loaded = load_model(config)
        runners.append(TimedRunner(loaded.runner))
        return replace(loaded, runner=runners[0])

    # A few more than there are seats, so that somebody always waits.
    num_clients = config.max_num_seqs + NUM_WAITING
    async with open_engine(_letting_in(config, num_clients), load=load, stepper=meter.open_stepper) as engine:
        workload = _short(engine.model.context_length)
        indices = iter(range(NUM_REQUESTS))
        async with meter.measuring(), trio.open_nursery() as nursery:
            for _ in range(num_clients):
                nursery.start_soon(_ask, engine, workload, indices)
            end = trio.current_time() + seconds
            while trio.current_time() < end or len(runners[0].times) < MIN_STEPS + NUM_DROPPED:
                await trio.sleep(POLL_SECONDS)
                if not nursery.child_tasks:
                    break  # a fast machine: all requests were answered
            shapes, times = list(runners[0].shapes), list(runners[0].times)
            nursery.cancel_scope.cancel()
        engine.abort_all("shutdown")
        await engine.wait_idle()
    if len(shapes) < NUM_DROPPED + LEAST_STEPS:
        raise ConfigError(
            f"{NUM_REQUESTS} requests were answered in {len(shapes)} steps, too few to measure; ask for fewer seats "
            "(--max-num-seqs)."
        )
    running = {"seats": config.max_num_seqs, **meter.summary(times)}
    return *_fitted(model, shapes[NUM_DROPPED:], times[NUM_DROPPED : len(shapes)]), running


def _letting_in(config: EngineConfig, num_clients: int) -> EngineConfig:
    """The settings of an engine that refuses none of its clients, whatever the server would do."""
    return replace(
        config,
        policy="continuous",
        num_speculative_tokens=0,
        max_waiting=num_clients,
        max_waiting_tokens=num_clients * (config.max_model_len or 1 << 20),
    )


def _fitted(
    model: CostModel, shapes: list[StepShape], times: list[tuple[float, float]]
) -> tuple[CostModel, dict[str, Any]]:
    begins, ends = (np.array(column) for column in zip(*times, strict=True))
    shapes, executions, gaps = shapes[:-1], (ends - begins)[:-1], begins[1:] - ends[:-1]
    whole = fit_engine_part(model, shapes, executions, gaps)
    half = fit_engine_part(model, shapes[::2], executions[::2], gaps[::2])
    predicted, seen = sum([half.seconds(shape) for shape in shapes[1::2]]), (executions + gaps)[1::2].sum()
    return whole, {
        "engine_steps": len(gaps),
        "stretch": float(executions.sum()) / sum([model.execute_seconds(shape) for shape in shapes]),
        "engine_step_error_median": float(np.median(np.abs(relative_errors(whole, shapes, executions.tolist())))),
        "engine_error": predicted / float(seen) - 1.0,
    }


def _short(context: int) -> Workload:
    """Requests of `MEAN_TOKENS` on average, or as long as fit."""
    whole = generate("azure-conversation", NUM_REQUESTS, seed=1)
    factor = max(choose_factor(whole, context), choose_factor(whole, context, MEAN_TOKENS * NUM_REQUESTS))
    return scaled(whole, factor, context)


async def _ask(engine: Engine, workload: Workload, indices: Iterator[int]) -> None:
    """One request after the other, until there are no more."""
    for index in indices:
        item = workload.items[index]
        params = SamplingParams(
            temperature=0.0,
            max_tokens=item.num_output_tokens,
            min_tokens=item.num_output_tokens,
            stop_token_ids=engine.tokenizer.stop_token_ids,
        )
        prompt = TokensPrompt(workload.prompt_token_ids(index, engine.tokenizer.vocab_size))
        handle = engine.submit(GenerationRequest(f"bench-{index}", prompt, params))
        await handle.accepted()
        while (await handle.take()).finish_reason is None:
            pass
