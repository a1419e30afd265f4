"""What a simulation gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.counters import Counters
    from engine.step_log import StepRecord


class ServedRequest(NamedTuple):
    """One request that was served; seconds from the start of the workload.

    Attributes:
        item: its index in the workload.
        arrival, seated, first_token, finished: when that happened.
        num_output_tokens: of its answer; fewer than asked for where the usable capacity ended it.
        num_preemptions: how often it lost its seat for want of blocks.
        gaps: seconds from each of its tokens to the next; empty where they were not recorded.
    """

    item: int
    arrival: float
    seated: float
    first_token: float
    finished: float
    num_output_tokens: int
    num_preemptions: int
    gaps: Sequence[float]


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What came of it.

    Attributes:
        requests: those that were served, in the order in which they ended.
        refused: item indices that found the queue full.
        failed: item indices that could not be served: longer than the pool or the context.
        num_steps: model executions.
        makespan: seconds from the start to the last ending.
        counters: the scheduler's own: rows, padding, preemptions, KV slots.
        steps: the first of the steps, as many as were asked for; item 0 goes by the name `r1`.
    """

    requests: tuple[ServedRequest, ...]
    refused: tuple[int, ...]
    failed: tuple[int, ...]
    num_steps: int
    makespan: float
    counters: Counters
    steps: tuple[StepRecord, ...]

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum([request.num_output_tokens for request in self.requests])

    @property
    def output_tokens_per_second(self) -> float:
        """Over the whole makespan."""
        return self.num_output_tokens / self.makespan if self.makespan else 0.0

    @property
    def ttft_seconds(self) -> list[float]:
        """Arrival to first token, of every request served."""
        return [request.first_token - request.arrival for request in self.requests]

    @property
    def e2e_seconds(self) -> list[float]:
        """Arrival to the end, of every request served."""
        return [request.finished - request.arrival for request in self.requests]

    @property
    def kv_waste(self) -> float:
        """Share of the KV slots set aside that was never written."""
        set_aside = self.counters.num_set_aside_slots
        return self.counters.num_unwritten_slots / set_aside if set_aside else 0.0

    @property
    def useful_row_share(self) -> float:
        """Rows that brought a request forward, of all that were computed."""
        return self.counters.num_useful_rows / self.counters.num_rows if self.counters.num_rows else 1.0
