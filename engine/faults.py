"""What kinds of faults there are, what is done about a lack of memory, and how the outside is told."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.config import Limits

# How torch and CUDA say that memory ran out; the native kernels and numpy raise `MemoryError`.
_NO_MEMORY: Final = re.compile(r"out of memory|not enough memory|can't allocate memory|ALLOC_FAILED", re.IGNORECASE)


class IntegrityError(RuntimeError):
    """What the scheduler knows contradicts itself."""


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that the engine did by itself, for whoever keeps events and the history of the settings.

    Attributes:
        kind: `fault` (a step failed), `memory` (it lacked some) or `integrity` (the state contradicted itself).
        text: a sentence for people, without anything of a request.
        changes: live limits that were lowered, with their old and new values.
    """

    kind: str
    text: str
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)


def lacks_memory(error: BaseException) -> bool:
    """Whether a step failed because memory ran out, here or on an accelerator."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error))))


def smaller_steps(limits: Limits) -> dict[str, int]:
    """The next lower limits: half the token budget down to a token a seat, then half the seats as well.

    Returns:
        Fields of `Limits`; none where a step is one row of one token already.
    """
    seats, budget = limits.max_num_seqs, limits.max_num_batched_tokens
    if budget > seats:
        return {"max_num_batched_tokens": max(budget // 2, seats)}
    return {"max_num_seqs": seats // 2, "max_num_batched_tokens": min(budget, seats // 2)} if seats > 1 else {}
