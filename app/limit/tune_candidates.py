"""Settings that are tried, and what is known of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from app.limit.search import edge
from app.limit.statistics import Interval, limit_of
from engine.errors import RelevoError

if TYPE_CHECKING:
    from app.limit.runs import Run
    from app.limit.tune_controls import Value, Values


class RefusedError(RelevoError):
    """The server does not take these settings; nothing was changed."""


class Measure(Protocol):
    """Measures settings."""

    def __call__(self, values: Values, rate: float, seed: int, *, whole: bool = False) -> Run:
        """One run.

        Args:
            rate: requests a second.
            whole: go on where it is certain to be lost.

        Raises:
            RefusedError: these settings cannot be.
        """


@dataclass(frozen=True)
class Standing:
    """Settings, and the runs that tell how good they are."""

    values: Values
    runs: tuple[Run, ...]

    @cached_property
    def limit(self) -> Interval | None:
        """The highest rate at which they hold under every seed that was tried; `None` where they hold at none."""
        valid = [run for run in self.runs if run.is_valid]
        return limit_of(valid) if valid else None

    @cached_property
    def edge(self) -> tuple[float | None, float | None]:
        """The highest rate at which they hold, and the next above it that was tried; `None` for none."""
        return edge(self.runs)

    @property
    def is_lost(self) -> bool:
        """Whether they hold at no rate that was tried."""
        return self.edge[0] is None

    @property
    def bar(self) -> Run | None:
        """The run at the lowest rate at which they do not hold; `None` where that is not known of any rate.

        The last one, where there are several. One in which the generator was late knows nothing.
        """
        low = self.edge[0] or 0.0
        valid = [run for run in self.runs if run.is_valid and run.rate > low]
        rate = min([run.rate for run in valid if not run.holds], default=None)
        return next((run for run in reversed(valid) if run.rate == rate), None)

    @property
    def reached(self) -> float:
        """The highest rate at which they hold, else the lowest that was tried: requests a second."""
        return self.edge[0] or min(run.rate for run in self.runs)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings that were tried.

    Attributes:
        control: the one that was turned, to `value`.
        against: those that held until then, whose run at the same rate, of the same requests, is `theirs`.
        run: its first one; `None` where the server refused it.
        margin: how far it was from the promise over how far they were, below 1 where it was nearer; `None` where one of
            the two runs was ended early.
        verdict: `better`, `no better`, `lost`, `refused` or `unknown`.
        beyond: its run at the higher rate, where it held at the first.
        standing: its own, where it is better.
    """

    control: str
    value: Value
    against: Values
    theirs: Run
    run: Run | None
    margin: Interval | None
    verdict: str
    beyond: Run | None = None
    standing: Standing | None = None
    why: str = ""
