"""Where an open request is: on which seat, or why on none yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.handle import Handle
    from engine.scheduler import Scheduler
    from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Place:
    """Of one open request.

    Attributes:
        seat: the row of the batch, from 0; `None` while it waits.
        reason: why it waits, one of `WAIT_REASONS`; `None` on a seat, and before the scheduler has seen it.
        waited_seconds: from its arrival until it first sat down, or until now.
        prompt_tokens, cached_tokens: of the prompt; how many of them were in the cache.
        output_tokens: generated so far.
    """

    seat: int | None
    reason: str | None
    waited_seconds: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


def place_of(handle: Handle, scheduler: Scheduler, now: float) -> Place:
    """The place of an open request at time `now` of the engine's clock."""
    sequence = handle.sequence
    if sequence is None:
        return Place(None, None, now - handle.arrival_time)
    waits = sequence.seat < 0
    seated_at = sequence.first_seated_time
    return Place(
        seat=None if waits else sequence.seat,
        reason=why_waits(sequence, scheduler) if waits else None,
        waited_seconds=(now if seated_at is None else seated_at) - handle.arrival_time,
        prompt_tokens=sequence.num_prompt_tokens,
        cached_tokens=sequence.num_cached_tokens,
        output_tokens=sequence.num_output_tokens,
    )


def line_of(sequence: Sequence, scheduler: Scheduler, now: float) -> dict[str, Any]:
    """An open request in a line of `active` of the statistics."""
    waits = sequence.seat < 0
    first = sequence.first_token_time
    return {
        "number": sequence.sequence_id,
        "request_id": sequence.request_id,
        "key": sequence.key_name or None,
        "class": sequence.class_name,
        "priority": sequence.priority,
        "state": sequence.status.value,
        "reason": why_waits(sequence, scheduler) if waits else None,
        "phase": None if waits else ("prefill" if sequence.num_output_tokens == 0 else "decode"),
        "seat": None if waits else sequence.seat,
        "prompt_tokens": sequence.num_prompt_tokens,
        "computed_tokens": sequence.num_computed_tokens,
        "output_tokens": sequence.num_output_tokens,
        "age_seconds": round(now - sequence.arrival_time, 6),
        "ttft_seconds": None if first is None else round(first - sequence.arrival_time, 6),
        "num_preemptions": sequence.num_preemptions,
    }


def why_waits(sequence: Sequence, scheduler: Scheduler) -> str:
    """Of one that waits, one of `WAIT_REASONS`."""
    if sequence.sequence_id in scheduler.aside:
        return "fault"  # until the others were tried
    return scheduler.classes[sequence.background].why_waits(sequence)
