"""The requests of a comparison: their lengths, and when they come."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from app.compare.lengths import Lengths, expected_seconds
from app.compare.runs import POLICIES
from app.traces import read_trace
from engine.workload import at_rate, choose_factor, generate, scaled

if TYPE_CHECKING:
    from app.compare.lengths import Costs
    from app.compare.options import Options
    from engine.workload import Workload

# Of a run on the engine. More would only make fewer rounds.
MAX_REQUESTS: Final = 2000
NUM_LOOKED_AT: Final = 2000
# Lengths are divided by one of these where the machine would not get through enough of them in time.
FACTORS: Final = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0)
# Fewer batches than this, and the last one's tail is most of what is seen; a run has at least two.
MIN_BATCHES, WANTED_BATCHES = 2, 5
MIN_ROUNDS: Final = 2


class Source:
    """Makes the workload of any number of requests, always the same ones first.

    Args:
        max_requests: how many will ever be asked for.

    Raises:
        ConfigError: there is no such workload, or the trace cannot be read.
    """

    def __init__(self, options: Options, *, max_requests: int) -> None:
        self._options = options
        self._recorded: Workload | None = None
        if options.trace is not None:
            read = read_trace(options.trace, max_requests=max_requests, skip_bad_lines=options.skip_bad_lines)
            self._recorded = read if options.rate is None else at_rate(read, options.rate)
            self._looked_at = self._recorded
        else:
            # Enough lengths to see which factor makes them fit into the context.
            self._looked_at = generate(options.workload, NUM_LOOKED_AT, seed=options.seed, rate=options.rate)
        self.max_requests = max_requests if self._recorded is None else len(self._recorded.items)

    def least_factor(self, max_model_len: int) -> float:
        """What lengths must be divided by at least, for nearly all requests to fit into the context."""
        return choose_factor(self._looked_at, max_model_len)

    def take(self, num_requests: int, factor: float, max_model_len: int) -> Workload:
        """The first requests, fitted to a model of this context."""
        options = self._options
        if self._recorded is not None:
            first = replace(self._recorded, items=self._recorded.items[:num_requests])
            return scaled(first, factor, max_model_len)
        return generate(
            options.workload,
            num_requests,
            seed=options.seed,
            rate=options.rate,
            factor=factor,
            max_model_len=max_model_len,
        )


def lengths_of(workload: Workload) -> Lengths:
    """Prompts and answers of a workload, in tokens."""
    return Lengths(
        [item.num_prompt_tokens for item in workload.items], [item.num_output_tokens for item in workload.items]
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """What will be run.

    Attributes:
        rounds: planned; more are run where time is left, fewer where it was misjudged.
        seconds: how long that should take.
    """

    workload: Workload
    rounds: int
    seconds: float


def choose(source: Source, options: Options, costs: Costs, *, seats: int, seconds: float, max_model_len: int) -> Choice:
    """Pick factor and number of requests so that the planned rounds fit into `seconds`, where they were not given.

    The least factor that leaves `WANTED_BATCHES` batches a run is taken, and then as many requests as fit.
    """
    rounds = options.repeats or MIN_ROUNDS
    seconds /= rounds
    least = source.least_factor(max_model_len)
    factors = [options.factor] if options.factor is not None else [least, *(f for f in FACTORS if f > least)]
    most, fewest = max(MIN_BATCHES, MAX_REQUESTS // seats) * seats, MIN_BATCHES * seats
    num_requests = min(options.requests or most, source.max_requests)
    wanted = min(options.requests or WANTED_BATCHES * seats, num_requests)
    if options.rate is not None:
        # However short they are, so many come in the time and no more.
        wanted = min(wanted, int(options.rate * seconds / len(POLICIES)))
        fewest = min(fewest, max(1, wanted))
    for factor in factors:
        lengths = lengths_of(source.take(num_requests, factor, max_model_len))
        fitting = _num_fitting(lengths, options, costs, seats=seats, seconds=seconds)
        if fitting >= wanted:
            break
    if options.requests is None:
        lengths = lengths.first(max(fitting, fewest))
    needed = rounds * round_seconds(lengths, options, costs, seats=seats)
    return Choice(source.take(len(lengths), factor, max_model_len), rounds, needed)


def _num_fitting(lengths: Lengths, options: Options, costs: Costs, *, seats: int, seconds: float) -> int:
    """The most requests of which a round takes no longer than `seconds`; of a backlog in whole batches."""
    unit = seats if options.rate is None else 1
    low, high = 0, -(-len(lengths) // unit)
    while low < high:
        middle = (low + high + 1) // 2
        fits = round_seconds(lengths.first(middle * unit), options, costs, seats=seats) <= seconds
        low, high = (middle, high) if fits else (low, middle - 1)
    return min(low * unit, len(lengths))


def round_seconds(lengths: Lengths, options: Options, costs: Costs, *, seats: int) -> float:
    """How long a round through all policies should take."""
    wait = 0.0 if options.rate is None else len(lengths) / options.rate
    return sum(max(wait, expected_seconds(policy, lengths, costs, seats=seats)) for policy in POLICIES)
