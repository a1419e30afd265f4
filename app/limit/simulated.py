"""Runs in virtual time: the server's own scheduler, and a cost model in place of the model."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from app.limit.runs import Run, Seen
from app.limit.scrapes import Observed
from app.limit.search import FIRST_SHARE, search
from app.limit.summary import Outcome
from engine.errors import ConfigError
from engine.simulator import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from app.compare.simulated import Machine
    from app.limit.load import Load, Source
    from app.limit.options import Options
    from app.limit.watch import Watch
    from engine.config import EngineConfig
    from engine.simulator import SimulationResult

DEFAULT_REQUESTS: Final = 1000


@dataclass(frozen=True, slots=True)
class SimulatedMeasure:
    """Measures rates of a machine that is simulated; requests are of one class of work.

    Attributes:
        num_counted: requests that count in each run.
    """

    machine: Machine
    config: EngineConfig
    source: Source
    num_counted: int

    def __call__(self, rate: float, seed: int) -> Run:
        """One run."""
        load = self.source.make(self.num_counted, rate, seed)
        return self._as_run(rate, seed, load, self._simulate(load, open_loop=True))

    def capacity(self, seed: int) -> float:
        """Requests a second where all wait from the start."""
        result = self._simulate(self.source.make(self.num_counted, 1.0, seed), open_loop=False)
        return len(result.requests) / result.makespan if result.requests else 0.0

    def _simulate(self, load: Load, *, open_loop: bool) -> SimulationResult:
        return simulate(
            load.workload,
            limits=self.config.limits,
            num_blocks=self.machine.num_blocks,
            block_size=self.config.block_size,
            max_model_len=self.machine.context_length,
            cost_model=self.machine.cost_model,
            open_loop=open_loop,
            # Prompts without named blocks have nothing in common: looking them up would only take time.
            enable_prefix_caching=self.config.enable_prefix_caching and load.workload.prefix_block_tokens > 0,
            max_waiting=self.config.max_waiting if open_loop else None,
            slow_gap_seconds=self.source.promise.targets[0].itl_p95_seconds,
        )

    def _as_run(self, rate: float, seed: int, load: Load, result: SimulationResult) -> Run:
        first, last = load.counted
        items = load.workload.items
        served = [request for request in result.requests if first <= request.item < last]
        seen = [
            Seen(
                due=request.arrival,
                lag=0.0,
                watched=request.finished - request.arrival,
                ttft=request.first_token - request.arrival,
                e2e=request.finished - request.arrival,
                prompt_tokens=items[request.item].num_prompt_tokens,
                output_tokens=request.num_output_tokens,
                num_gaps=request.num_output_tokens - 1,
                num_slow_gaps=request.num_slow_gaps,
            )
            for request in sorted(served)
        ]
        refused = [index for index in (*result.refused, *result.failed) if first <= index < last]
        seen += [
            Seen(items[i].arrival_seconds, 0.0, 0.0, None, None, items[i].num_prompt_tokens, 0, 0, 0, error="refused")
            for i in refused
        ]
        begin, end = items[first].arrival_seconds, items[last - 1].arrival_seconds
        preemptions = sum(request.num_preemptions for request in served)
        # By Little's law: those who have a seat are as many as come, times how long each has it.
        seated = sum(request.finished - request.seated for request in served)
        observed = Observed(
            running=seated / (end - begin),
            max_num_seqs=self.config.max_num_seqs,
            step_tokens=sum(item.num_prompt_tokens + item.num_output_tokens for item in items) / result.num_steps,
            token_budget=self.config.max_num_batched_tokens,
            preemptions=preemptions,
        )
        return Run(rate, seed, self.source.promise, tuple(seen), preemptions=preemptions, observed=observed)


def find_simulated(
    machine: Machine,
    config: EngineConfig,
    source: Source,
    options: Options,
    report: Callable[[int, int, str], object] = lambda _gone, _planned, _what: None,
    watch: Watch | None = None,
) -> Outcome:
    """Look for the limit of a machine that is simulated.

    Args:
        report: told (seconds gone, seconds planned, a word about what is going on).
        watch: told of each run.

    Raises:
        ConfigError: there are several classes of work, or nothing can be served.
    """
    began = time.monotonic()
    measure, capacity = prepare_simulated(machine, config, source, options)

    def afford(rate: float) -> bool:
        gone = time.monotonic() - began
        report(int(gone), int(options.duration), f"{rate:.3g} requests/s")
        return gone < options.duration

    def measured(rate: float, seed: int) -> Run:
        run = measure(rate, seed)
        if watch is not None:
            watch.ran("rate", run)
        return run

    runs = search(measured, FIRST_SHARE * capacity, options.seeds, afford=afford)
    return outcome_of(measure, capacity, runs, time.monotonic() - began)


def prepare_simulated(
    machine: Machine, config: EngineConfig, source: Source, options: Options
) -> tuple[SimulatedMeasure, float]:
    """With the requests settled on; and the capacity in requests a second. Raises as `find_simulated`."""
    if len(source.classes) > 1:
        raise ConfigError("A simulation has one class of work; leave --mix out.")
    context = min(machine.context_length, machine.num_blocks * config.block_size)
    source = replace(source, max_model_len=context)
    source = replace(source, factor=options.factor or source.least_factor())
    measure = SimulatedMeasure(machine, config, source, options.requests or DEFAULT_REQUESTS)
    capacity = measure.capacity(options.seed)
    if not capacity:
        raise ConfigError("None of the requests fits into this machine's memory.")
    return measure, capacity


def outcome_of(measure: SimulatedMeasure, capacity: float, runs: Sequence[Run], seconds: float) -> Outcome:
    """Everything that was measured."""
    machine = measure.machine
    described = {"model": f"Simulated: {machine.model} in {machine.dtype}", **machine.described}
    return Outcome(described, measure.source, None, capacity, runs, seconds)
