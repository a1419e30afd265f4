"""What was asked for, and the source of requests that it amounts to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from app.limit.lengths import Fitted, Recorded, read_conversations
from app.limit.load import Source, WorkClass, check_arrivals
from app.limit.mix import read_mix
from app.limit.runs import Promise, given
from app.traces import read_trace
from engine.config import NO_TARGETS, SloTargets
from engine.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from engine.workload import Workload

DEFAULT_WORKLOAD: Final = "azure-conversation"
DEFAULT_SECONDS: Final = 480.0
DEFAULT_ERROR_SHARE: Final = 0.01
# A request is given up after so long, or after so many times the largest target: who only misses one is no error.
LEAST_DEADLINE, DEADLINE_PER_TARGET = 120.0, 1.5
DEFAULT_CHARS_PER_TOKEN: Final = 4.0
MAX_RECORDED: Final = 100_000
NUM_TRIED: Final = 100


@dataclass(frozen=True, slots=True)
class Options:
    """How to look for the limit.

    Attributes:
        workload: name of a fitted workload, where none of the three files is given.
        trace, conversations, mix: files that say what is asked; at most one of them.
        skip_bad_lines: leave bad lines of the trace out, instead of refusing it.
        chars_per_token: of the texts of conversations.
        targets: in seconds; of those classes of work that have none of their own.
        background_targets: of the background requests of a recording that has interactive ones, too.
        max_error_share: of the requests that may fail.
        factor: divide lengths by it; `None` takes what fits the context and the time.
        context: longest prompt plus answer, in tokens; `None` takes what the server says.
        arrivals: one of `app.limit.load.ARRIVALS`; `None` is a trace's own, else `poisson`.
        gap_cv: of the gaps, for `gamma`.
        requests: that count in each run; `None` takes what fits into the time.
        duration: seconds that all of it may take, aimed at.
        num_shares: searches among which a longer time was shared out, of which `duration` is the share of one.
        streams: requests at once while the capacity is measured; `None` takes the server's seats.
        deadline: seconds until a request is given up; `None` takes what leaves room for every target (`deadline_of`).
        repeats: seeds that are tried near the limit.
        price_per_hour: of the machine, in any currency.
        think_time: seconds between an answer and the same user's next request.
    """

    workload: str = DEFAULT_WORKLOAD
    trace: Path | None = None
    conversations: Path | None = None
    mix: Path | None = None
    skip_bad_lines: bool = False
    chars_per_token: float = DEFAULT_CHARS_PER_TOKEN
    targets: SloTargets = field(default_factory=SloTargets)
    background_targets: SloTargets = NO_TARGETS
    max_error_share: float = DEFAULT_ERROR_SHARE
    factor: float | None = None
    context: int | None = None
    arrivals: str | None = None
    gap_cv: float = 1.0
    requests: int | None = None
    duration: float = DEFAULT_SECONDS
    num_shares: int = 1
    streams: int | None = None
    deadline: float | None = None
    repeats: int = 3
    seed: int = 0
    price_per_hour: float | None = None
    think_time: float | None = None

    @property
    def seeds(self) -> tuple[int, ...]:
        """Of the runs: the first for the search, the others for repeats."""
        return tuple(range(self.seed, self.seed + self.repeats))


def deadline_of(options: Options, promise: Promise) -> float:
    """Seconds from when a request is due until it is given up."""
    if options.deadline is not None:
        return options.deadline
    return max(LEAST_DEADLINE, DEADLINE_PER_TARGET * promise.largest)


def make_source(options: Options) -> Source:
    """The requests that are asked for, lengths as they come.

    Raises:
        ConfigError: a file cannot be used, or there is no target to be met.
    """
    classes = _classes(options)
    if not any(given(one.targets) for one in classes):
        if options.mix is not None and given(options.targets):  # so each class says that it has none
            raise ConfigError(
                f"No class of {options.mix} has a target, and without any there is no limit; give one of them a number "
                "of seconds as ttft_p95_seconds, itl_p95_seconds or e2e_p95_seconds."
            )
        raise ConfigError("Without a target there is no limit; give one of --ttft-p95, --itl-p95 and --e2e-p95.")
    targets, names = zip(*[(one.targets, one.name) for one in classes], strict=True)
    promise = Promise(targets, options.max_error_share, names)
    arrivals = options.arrivals or ("own" if options.trace else "poisson")
    is_recorded = options.trace is not None and len(classes) > 1
    source = Source(classes, promise, arrivals=arrivals, gap_cv=options.gap_cv, is_recorded=is_recorded)
    check_arrivals(source)
    source.make(NUM_TRIED, 1.0, options.seed)  # what cannot be made is told before a server is started
    return source


def _classes(options: Options) -> tuple[WorkClass, ...]:
    if options.mix is not None:
        return read_mix(options.mix, options.targets)
    if options.trace is not None:
        return _recorded(
            read_trace(options.trace, max_requests=MAX_RECORDED, skip_bad_lines=options.skip_bad_lines), options
        )
    lengths: Fitted | Recorded = Fitted(options.workload)
    if options.conversations is not None:
        per_token = options.chars_per_token
        lengths = read_conversations(options.conversations, lambda text: round(len(text) / per_token), MAX_RECORDED)
    return (WorkClass("requests", 1.0, lengths, options.targets),)


def _recorded(workload: Workload, options: Options) -> tuple[WorkClass, ...]:
    """The requests of a trace, or the two classes of a recording that has both."""
    lengths, num_items = Recorded(workload), len(workload.items)
    num_background = sum(item.is_background for item in workload.items)
    if num_background in (0, num_items):
        return (WorkClass("requests", 1.0, lengths, options.targets, is_background=num_background > 0),)
    share = num_background / num_items
    return (
        WorkClass("interactive", 1 - share, lengths, options.targets),
        WorkClass("background", share, lengths, options.background_targets, is_background=True),
    )
