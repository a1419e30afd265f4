"""Runs in virtual time: the server's own scheduler, and a cost model in place of the model."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Final

from app.limit.exchange import NOT_FINISHED
from app.limit.interrupted import Interrupted, number_of, words_of
from app.limit.load import check_lengths
from app.limit.options import deadline_of
from app.limit.piling import there_before
from app.limit.runs import Run, Seen, tokens_per_second
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
    from engine.simulation_result import ServedRequest, SimulationResult
    from engine.workload import WorkItem

DEFAULT_REQUESTS: Final = 1000
# Of the machine that a reader of the result wants to know.
SETTINGS: Final = ("policy", "admission", "max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold")
# So seldom that nobody ever meets another.
ALONE_REQUESTS, ALONE_RATE = 100, 1e-7


@dataclass(frozen=True, slots=True)
class SimulatedMeasure:
    """Measures rates of a machine that is simulated.

    Attributes:
        num_counted: requests that count in each run.
        deadline: seconds after which a request fails.
    """

    machine: Machine
    config: EngineConfig
    source: Source
    num_counted: int
    deadline: float = math.inf

    def __call__(self, rate: float, seed: int) -> Run:
        """One run."""
        load = self.source.make(self.num_counted, rate, seed)
        return self._as_run(rate, seed, load, self._simulate(load, open_loop=True))

    def capacity(self, seed: int) -> float:
        """Requests a second where all wait from the start."""
        result = self._simulate(self.source.make(self.num_counted, 1.0, seed), open_loop=False)
        return len(result.requests) / result.makespan if result.requests else 0.0

    def alone(self, seed: int) -> Run:
        """One user, who asks again only when the last answer is complete."""
        source = replace(self.source, seats=0)  # none of which is to be filled
        run = replace(self, source=source, num_counted=ALONE_REQUESTS)(ALONE_RATE, seed)
        stays = [seen.e2e for seen in run.finished if seen.e2e is not None]
        if not stays:
            return run
        # In a closed loop there is nothing between one stay and the next.
        begin, end = min(seen.due for seen in run.seen), max(seen.due for seen in run.seen)
        longer = (end - begin) / sum(stays)
        return replace(run, rate=1 / fmean(stays), tokens=(run.tokens[0] * longer, run.tokens[1] * longer))

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
            record_gaps=open_loop,
        )

    def _as_run(self, rate: float, seed: int, load: Load, result: SimulationResult) -> Run:
        first, last = load.counted
        items = load.workload.items
        served = sorted([request for request in result.requests if first <= request.item < last])
        there = there_before(
            [request.arrival for request in served], [(one.arrival, one.finished) for one in result.requests]
        )
        seen = [
            replace(self._seen(request, items[request.item], load.classes[request.item]), num_there=before)
            for request, before in zip(served, there, strict=True)
        ]
        refused = [index for index in (*result.refused, *result.failed) if first <= index < last]
        seen += [
            Seen(
                items[index].arrival_seconds, 0.0, 0.0, None, None, items[index].num_prompt_tokens, 0, 0, 0,
                error="refused", work_class=load.classes[index],
            )
            for index in refused
        ]  # fmt: skip
        begin, end = items[first].arrival_seconds, items[last - 1].arrival_seconds
        preemptions = sum([request.num_preemptions for request in served])
        whole = [
            (one.finished, items[one.item].num_prompt_tokens, one.num_output_tokens)
            for one in result.requests
            if one.finished - one.arrival <= self.deadline
        ]
        # By Little's law: those who have a seat are as many as come, times how long each has it.
        seated = sum(request.finished - request.seated for request in served)
        observed = Observed(
            running=seated / (end - begin),
            max_num_seqs=self.config.max_num_seqs,
            step_tokens=sum(item.num_prompt_tokens + item.num_output_tokens for item in items) / result.num_steps,
            token_budget=self.config.max_num_batched_tokens,
            preemptions=preemptions,
        )
        return Run(
            rate,
            seed,
            self.source.promise,
            tuple(seen),
            tokens=tokens_per_second(whole, begin, end),
            preemptions=preemptions,
            observed=observed,
            lead_seconds=begin,
        )

    def _seen(self, request: ServedRequest, item: WorkItem, work_class: int) -> Seen:
        slow = self.source.promise.targets[work_class].itl_p95_seconds
        e2e = request.finished - request.arrival
        is_late = e2e > self.deadline
        return Seen(
            due=request.arrival,
            lag=0.0,
            watched=min(e2e, self.deadline),
            ttft=request.first_token - request.arrival,
            e2e=None if is_late else e2e,
            prompt_tokens=item.num_prompt_tokens,
            output_tokens=request.num_output_tokens,
            num_gaps=len(request.gaps),
            num_slow_gaps=0 if slow is None else sum([gap > slow for gap in request.gaps]),
            gaps=request.gaps,
            error=NOT_FINISHED if is_late else "",
            work_class=work_class,
        )


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
        ConfigError: nothing can be served.
        Interrupted: somebody ends it while rates are tried.
    """
    began = time.monotonic()
    measure, capacity = prepare_simulated(machine, config, source, options)
    runs: list[Run] = []

    def afford(rate: float) -> bool:
        gone = time.monotonic() - began
        report(int(gone), int(options.duration), f"{rate:.3g} requests/s")
        return gone < options.duration

    def measured(rate: float, seed: int) -> Run:
        run = measure(rate, seed)
        runs.append(run)
        if watch is not None:
            watch.ran("rate", run)
        return run

    single = measure.alone(options.seed)
    if watch is not None:
        watch.ran("single", single)
    try:
        if not single.hopeless:
            search(measured, FIRST_SHARE * capacity, options.seeds, afford=afford)
        return outcome_of(measure, capacity, runs, time.monotonic() - began, single)
    except KeyboardInterrupt as key:
        cut = outcome_of(measure, capacity, runs, time.monotonic() - began, single)
        raise Interrupted(number_of(key), replace(cut, unfinished=words_of(key))) from None


def prepare_simulated(
    machine: Machine, config: EngineConfig, source: Source, options: Options
) -> tuple[SimulatedMeasure, float]:
    """With the requests settled on; and the capacity in requests a second. Raises as `find_simulated`."""
    context = min(machine.context_length, machine.num_blocks * config.block_size)
    source = replace(source, max_model_len=context)
    check_lengths(source, options.factor)
    source = replace(source, factor=options.factor or source.least_factor(), seats=config.max_num_seqs)
    deadline = deadline_of(options, source.promise)
    measure = SimulatedMeasure(machine, config, source, options.requests or DEFAULT_REQUESTS, deadline)
    capacity = measure.capacity(options.seed)
    if not capacity:
        raise ConfigError("None of the requests fits into this machine's memory.")
    return measure, capacity


def outcome_of(
    measure: SimulatedMeasure, capacity: float, runs: Sequence[Run], seconds: float, single: Run | None = None
) -> Outcome:
    """Everything that was measured."""
    machine = measure.machine
    described = {"model": f"Simulated: {machine.model} in {machine.dtype}", **machine.described}
    settings = {name: getattr(measure.config, name) for name in SETTINGS}
    caveat = [machine.caveat] if machine.caveat else []
    return Outcome(described, measure.source, single, capacity, runs, seconds, caveat, settings=settings)
