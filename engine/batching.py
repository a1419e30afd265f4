"""When newcomers may sit down: small strategies beside the scheduler's loop.

    continuous   whenever a seat is free, between any two steps (iteration-level scheduling, Orca)
    static       when a batch is over; it keeps its seats, and its padding, until its longest member ends
                 (FasterTransformer, Hugging Face `generate`)
    dynamic      as static, but a batch is formed when enough wait or the first has waited long enough
                 (NVIDIA Triton's dynamic batcher)

The fixed batches are here to be compared with, so they cost what they cost where they are used: prompts are padded to
the longest of the batch, and the rows of members that have ended are computed until the last one ends.
`static_dropped` leaves both out: what is left is the waiting for the longest member alone. Only memory is spared more
than where they are used: one that has ended gives its blocks back at once, and padding takes none.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from engine.batch import Padding

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engine.config import Limits
    from engine.plan import Plan
    from engine.sequence import Sequence
    from engine.waiting import WaitingQueue

    Size = Callable[["Moment"], tuple[int, float | None]]

POLICIES = ("continuous", "static", "dynamic")


class Moment(NamedTuple):
    """What a policy decides by; `now` is in seconds on the engine's clock, `is_last` where nobody else will come."""

    waiting: WaitingQueue
    num_running: int
    limits: Limits
    now: float
    is_last: bool


class Continuous:
    """Everybody sits down as soon as a seat is free, and leaves it when the answer ends."""

    # Why nobody may sit down where `num_open` is 0.
    closed_reason = "seats"
    # Whether a newcomer sits down even where the step has no token left to give it.
    forms_batches = False
    # When `num_open` changes by itself: seconds on the engine's clock.
    opens_at: float | None = None

    def num_open(self, moment: Moment) -> int:
        """How many may sit down now."""
        return moment.limits.max_num_seqs - moment.num_running

    def admit(self, newcomers: list[Sequence]) -> None:
        """These have sat down."""

    def pad(self, plan: Plan, num_running: int) -> None:
        """Add what is computed and thrown away; `num_running` rows are still to get their tokens."""

    def keeps_seat(self, _sequence: Sequence, /) -> bool:
        """Whether the seat of one that has ended stays taken."""
        return False

    def end(self) -> None:
        """Nobody runs any more."""


class FixedBatches(Continuous):
    """A batch, then the next.

    Args:
        size: how many of those who wait form a batch, and when to ask again where it is 0 so far.
        pads: compute padding of prompts and rows of members that have ended.
    """

    closed_reason = "policy"
    forms_batches = True

    def __init__(self, size: Size, *, pads: bool) -> None:
        self._size = size
        self._pads = pads
        self._prompts: list[Padding] = []  # padding of prompts that is still owed
        self._ended: list[Padding] = []

    def num_open(self, moment: Moment) -> int:
        """A whole batch when nobody runs, else nobody."""
        if moment.num_running:
            return 0
        num_open, self.opens_at = self._size(moment)
        return num_open

    def admit(self, newcomers: list[Sequence]) -> None:
        """Owe each prompt what it lacks of the longest one's length."""
        if self._pads and newcomers:
            lengths = [sequence.num_tokens - sequence.num_computed_tokens for sequence in newcomers]
            owed = [
                Padding(sequence.seat, 0, max(lengths) - length, sequence.request_id)
                for sequence, length in zip(newcomers, lengths, strict=True)
            ]
            self._prompts = [padding for padding in owed if padding.count]

    def pad(self, plan: Plan, num_running: int) -> None:
        """Prompts are padded before anybody goes on; then the rows of those that have ended, beside the others."""
        while self._prompts and plan.tokens_left:
            owed = self._prompts.pop()
            count = min(owed.count, plan.tokens_left)
            plan.pad(replace(owed, count=count))
            if count < owed.count:
                self._prompts.append(replace(owed, start=owed.start + count, count=owed.count - count))
        for row in self._ended[: max(0, plan.tokens_left - num_running)]:
            plan.pad(row)

    def keeps_seat(self, sequence: Sequence, /) -> bool:
        """It does where padding is computed: its last position again and again."""
        if self._pads:
            last = max(0, sequence.num_computed_tokens - 1)
            self._ended.append(Padding(sequence.seat, last, 1, sequence.request_id, samples=True))
        return self._pads

    def end(self) -> None:
        """The batch is over."""
        self._ended.clear()
        self._prompts.clear()
        self.opens_at = None


def whoever_waits(moment: Moment) -> tuple[int, float | None]:
    """Static batching: as many as there are seats, at once."""
    return moment.limits.max_num_seqs, None


def preferred_or_delayed(moment: Moment) -> tuple[int, float | None]:
    """Dynamic batching: the preferred number as soon as it waits, fewer when the first has waited for the delay.

    Or at once when there is nobody to wait for: nothing new is taken.
    """
    limits = moment.limits
    preferred = min(limits.dynamic_preferred_size or limits.max_num_seqs, limits.max_num_seqs)
    if len(moment.waiting) >= preferred or moment.is_last:
        return preferred, None
    first = min([sequence.arrival_time for sequence in moment.waiting])
    opens_at = first + limits.dynamic_max_queue_delay_seconds
    return (preferred, None) if moment.now >= opens_at else (0, opens_at)


_BATCHING: Final[Mapping[str, Callable[[], Continuous]]] = {
    "continuous": Continuous,
    "static": partial(FixedBatches, whoever_waits, pads=True),
    "static_dropped": partial(FixedBatches, whoever_waits, pads=False),
    "dynamic": partial(FixedBatches, preferred_or_delayed, pads=True),
}


def make_batching(name: str) -> Continuous:
    """The policy of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in _BATCHING:
        raise ValueError(f"no batching policy {name!r}: there are {', '.join(_BATCHING)}")
    return _BATCHING[name]()
