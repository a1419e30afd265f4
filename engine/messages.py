"""What travels between the actors: frozen values over bounded channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import trio

    from engine.batch import StepUpdate
    from engine.handle import Handle
    from engine.sequence import FinishReason, Sequence


@dataclass(frozen=True, slots=True)
class Add:
    """ingress → scheduling: a sequence that fits wants to be answered."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class End:
    """handle or streaming → scheduling: this sequence ends now (abort, or a stop string was found)."""

    sequence_id: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class SetLimits:
    """admin → scheduling: new values from the next step on; `done` is set when they hold.

    Attributes:
        flush: forget the prefix cache, too.
    """

    changes: Mapping[str, Any]
    done: trio.Event
    flush: bool = False


@dataclass(frozen=True, slots=True)
class Drain:
    """engine → scheduling: nobody comes any more."""


Command = Add | End | SetLimits | Drain


@dataclass(frozen=True, slots=True)
class Opened:
    """ingress → streaming: tokens of this request will follow."""

    handle: Handle


@dataclass(frozen=True, slots=True)
class StepResult:
    """scheduling → streaming: what a step, or an abort between two steps, meant for each sequence.

    Attributes:
        planned: when the step was planned; those in `seated` sat down then.
        seated: sequence id, and how many of its tokens came from the prefix cache.
        finished: when its results were there.
    """

    planned: float
    finished: float
    update: StepUpdate
    seated: tuple[tuple[int, int], ...] = ()
    preempted: tuple[int, ...] = ()


Result = Opened | StepResult
