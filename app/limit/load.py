"""The requests of a run: their lengths and classes of work, and when each is due."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Final

from app.limit.lengths import Ranges, Recorded
from engine.errors import ConfigError
from engine.workload import WorkItem, Workload, at_rate, choose_factor

if TYPE_CHECKING:
    from app.limit.lengths import Lengths
    from app.limit.runs import Promise
    from engine.config import SloTargets

ARRIVALS: Final = ("poisson", "constant", "gamma", "own")
NUM_LOOKED_AT: Final = 2000
# Of the requests that count: sent before them until the server is in its stride, and after them so that it stays so
# until they have ended. A run against a server is over then, so a long tail costs little.
WARM_UP_SHARE, TAIL_SHARE = 0.2, 0.3
MIN_WARM_UP, MIN_TAIL = 5, 2
# So many for each that is served at once, too: with as many as that the seats are filled, were all answers as long.
PER_SEAT: Final = 1.5
# No more for seats that no run may ever fill.
MAX_FOR_SEATS: Final = 1000
# Of the requests that count, how many are sent after them until the last of them has ended.
SENT_AFTER: Final = 0.1
# More requests than this longer than the context is not what was asked for.
MAX_CUT_SHARE: Final = 0.01


@dataclass(frozen=True, slots=True)
class WorkClass:
    """One kind of requests.

    Attributes:
        share: of all requests, in proportion to the others'.
        targets: its own.
        factor: its lengths are divided by it, beside what all are divided by.
        is_background: asked for as work that waits for the interactive (`service_tier: flex`).
    """

    name: str
    share: float
    lengths: Lengths
    targets: SloTargets
    factor: float = 1.0
    is_background: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of one run.

    Attributes:
        workload: all of them, in the order in which they are due.
        classes: the class of work of each, as an index.
        counted: the first that counts, and the one after the last.
    """

    workload: Workload
    classes: tuple[int, ...]
    counted: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Source:
    """Makes loads.

    Attributes:
        arrivals: one of `ARRIVALS`; `own` are those of the lengths' source, and only of a single class.
        gap_cv: coefficient of variation of the gaps between arrivals, for `gamma`.
        factor: all lengths are divided by it.
        max_model_len: what is longer is cut; `None` cuts nothing.
        seats: requests that are served at once; 0 where that is not known.
        stay_seconds: that a request is there, about: at a rate at which fewer are there than seats, no more are filled.
        is_recorded: the classes are the interactive and the background requests of one recording, both of whose
            `lengths` are the whole of it: each request has the class and the place in time that it had.
    """

    classes: tuple[WorkClass, ...]
    promise: Promise
    arrivals: str = "poisson"
    gap_cv: float = 1.0
    factor: float = 1.0
    max_model_len: int | None = field(default=None)
    seats: int = 0
    stay_seconds: float = math.inf
    is_recorded: bool = False

    def make(self, num_counted: int, rate: float, seed: int) -> Load:
        """A load of which so many requests count.

        Its mean rate is `rate` exactly, whatever the pattern. With the same seed the same requests count at every rate,
        and come in the same pattern; of those before and after them there are fewer where fewer seats are to be filled.

        Raises:
            ConfigError: the requests' own arrivals have no pattern.
        """
        most, warm_up = self._num_before(num_counted, math.inf), self._num_before(num_counted, rate)
        workload, classes = self._mixed(most + num_counted + self._num_after(num_counted, math.inf), seed)
        if self.arrivals != "own":
            workload = replace(workload, items=self._spread(workload, seed))
        sent = slice(most - warm_up, most + num_counted + self._num_after(num_counted, rate))
        workload = at_rate(replace(workload, items=workload.items[sent]), rate)
        return Load(workload, classes[sent], (warm_up, warm_up + num_counted))

    def num_sent(self, num_counted: int, rate: float = math.inf) -> float:
        """Requests that are sent until so many that count have ended, about, at a rate at which all seats are taken."""
        return self._num_before(num_counted, rate) + (1 + SENT_AFTER) * num_counted

    def num_counted(self, num_sent: float, rate: float = math.inf) -> int:
        """How many count where so many are sent until they have ended."""
        before_some = num_sent / (1 + WARM_UP_SHARE + SENT_AFTER)
        return max(0, int(min(before_some, (num_sent - self._for_seats(rate)) / (1 + SENT_AFTER))))

    def _for_seats(self, rate: float) -> int:
        there = rate * self.stay_seconds if self.stay_seconds else 0.0
        return min(MAX_FOR_SEATS, math.ceil(PER_SEAT * min(self.seats, there)))

    def _num_before(self, num_counted: int, rate: float) -> int:
        """Requests that are sent before those that count."""
        return max(MIN_WARM_UP, round(WARM_UP_SHARE * num_counted), self._for_seats(rate))

    def _num_after(self, num_counted: int, rate: float) -> int:
        return max(MIN_TAIL, round(TAIL_SHARE * num_counted), self._for_seats(rate))

    @property
    def num_recorded(self) -> int | None:
        """Requests that were written down, of the class that has the fewest; `None` where none were."""
        lengths = [one.lengths for one in self.classes]
        return min([len(one.workload.items) for one in lengths if isinstance(one, Recorded)], default=None)

    def least_factor(self) -> float:
        """What lengths must be divided by for nearly all requests to fit into the context."""
        if self.max_model_len is None:
            return 1.0
        return choose_factor(
            replace(self, factor=1.0, max_model_len=None)._mixed(NUM_LOOKED_AT, 0)[0], self.max_model_len
        )

    def mean_answer(self, factor: float) -> float:
        """Tokens of an answer on average, with lengths divided by a factor."""
        workload, _ = replace(self, factor=factor)._mixed(NUM_LOOKED_AT, 0)
        return fmean([item.num_output_tokens for item in workload.items])

    def num_cut(self) -> tuple[int, int]:
        """Of how many requests that were looked at how many are longer than the context."""
        return self._mixed(NUM_LOOKED_AT, 0)[0].num_shortened, NUM_LOOKED_AT

    def _mixed(self, total: int, seed: int) -> tuple[Workload, tuple[int, ...]]:
        """So many requests of all classes, arrivals not settled; draws of one class do not change another's lengths."""
        if self.is_recorded:
            recorded = self.classes[0].lengths.take(total, seed, self.factor, self.max_model_len)
            return recorded, tuple([int(item.is_background) for item in recorded.items])
        chooser = random.Random(f"classes {seed}")  # noqa: S311
        shares = [one.share for one in self.classes]
        classes = tuple(chooser.choices(range(len(self.classes)), shares, k=total))
        parts = [
            one.lengths.take(max(1, classes.count(number)), seed, self.factor * one.factor, self.max_model_len)
            for number, one in enumerate(self.classes)
        ]
        if len(parts) == 1:
            return parts[0], classes
        left = [iter(part.items) for part in parts]
        # Names of blocks are of one class alone, so in a mix nothing is said to be shared.
        items = tuple(
            [
                replace(next(left[number]), prefix_ids=(), is_background=self.classes[number].is_background)
                for number in classes
            ]
        )
        longest = max(item.num_output_tokens for item in items)
        shortened = sum(part.num_shortened for part in parts)
        name = ", ".join(one.name for one in self.classes)
        return Workload(name, items, self.factor, 0, longest, shortened), classes

    def _spread(self, workload: Workload, seed: int) -> tuple[WorkItem, ...]:
        rng = random.Random(f"gaps {seed}")  # noqa: S311
        shape = 1 / self.gap_cv**2 if self.arrivals == "gamma" else 1.0
        items, now = [], 0.0
        for item in workload.items:
            items.append(replace(item, arrival_seconds=now))
            now += 1.0 if self.arrivals == "constant" else rng.gammavariate(shape, 1 / shape)
        return tuple(items)


def check_lengths(source: Source, factor: float | None) -> None:
    """Refuse requests that would be cut to the context, and so be others than those that were asked for.

    Args:
        source: knows the context (`max_model_len`).
        factor: that was asked for; `None` takes what fits, of which a class that was described in tokens must have
            something to begin with: else what divides it makes nothing of the others.

    Raises:
        ConfigError: there are such requests.
    """
    context = source.max_model_len
    if context is None:
        return
    for one in source.classes[:1] if source.is_recorded else source.classes:
        alone = replace(source, classes=(one,), factor=factor or 1.0, is_recorded=False)
        (cut, of), least = alone.num_cut(), alone.least_factor()
        which = f" of the class {one.name}" if len(source.classes) > 1 and not source.is_recorded else ""
        if factor is not None and cut > MAX_CUT_SHARE * of:
            raise ConfigError(
                f"With --factor {factor:g}, {cut} of {of} requests{which} are longer than the context of {context} "
                f"tokens; --factor {least:g} makes nearly all of them fit."
            )
        if factor is None and cut == of and (which or isinstance(one.lengths, Ranges)):
            raise ConfigError(
                f"No request of the class {one.name} fits into the context of {context} tokens; give it factor = "
                f"{one.factor * least:g} in the mix, or have all lengths divided with --factor {least:g}."
            )


def check_arrivals(source: Source) -> None:
    """Refuse arrivals that such a source does not have.

    Raises:
        ConfigError: it has several classes, each of which would have arrivals of its own.
    """
    if source.arrivals == "own" and len(source.classes) > 1 and not source.is_recorded:
        raise ConfigError("A mix of classes has no arrivals of its own; take poisson, constant or gamma.")
