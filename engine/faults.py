"""What kinds of faults there are, what is done about a lack of memory, and how the outside is told."""

from __future__ import annotations

import math
import re
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.config import Limits

# How torch and CUDA say that memory ran out; the native kernels and numpy raise `MemoryError`.
_NO_MEMORY: Final = re.compile(r"out of memory|not enough memory|can't allocate memory|ALLOC_FAILED", re.IGNORECASE)

# After these a GPU's context computes nothing any more, whatever it is asked: only another process gets a new one.
_DEVICE_LOST: Final = re.compile(
    r"illegal (memory access|address|instruction)|misaligned address|device-side assert|unspecified launch failure|"
    r"launch (timed out|failure)|invalid (program counter|address space)|hardware stack error|uncorrectable|"
    r"(device|GPU) (is |was |has )?(lost|fallen off)|context is destroyed|HSA_STATUS_ERROR|hipErrorIllegal",
    re.IGNORECASE,
)
_DEVICE: Final = re.compile(r"CUDA|HIP|HSA|Triton Error|ROCm")


class IntegrityError(RuntimeError):
    """What the scheduler knows contradicts itself."""


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that the engine did by itself, for whoever keeps events and the history of the settings.

    Attributes:
        kind: `fault` (a step failed), `memory` (it lacked some) or `integrity` (the state contradicted itself).
        text: a sentence for people, without anything of a request.
        changes: live limits that were lowered or raised, with their old and new values.
    """

    kind: str
    text: str
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)


class Seldom:
    """Lets what is told of again and again through once a second for each kind, and counts the rest."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}
        self._untold: dict[str, int] = {}

    def ask(self, kind: str, now: float) -> int | None:
        """How many of a kind were not told of since the last one that was; `None` where this one is not to be."""
        if now < self._told.get(kind, -math.inf) + 1.0:
            self._untold[kind] = self._untold.get(kind, 0) + 1
            return None
        self._told[kind] = now
        return self._untold.pop(kind, 0)


def let_go(error: BaseException | None) -> None:
    """Clear what the frames of a traceback hold, and of those that led to it: a step's tensors may be among it."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def lacks_memory(error: BaseException) -> bool:
    """Whether a step failed because memory ran out, here or on an accelerator."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error))))


def has_lost_device(error: BaseException) -> bool:
    """Whether a GPU has failed in such a way that this process can compute nothing on it any more."""
    text = str(error)
    return isinstance(error, RuntimeError) and bool(_DEVICE.search(text) and _DEVICE_LOST.search(text))


def smaller_steps(limits: Limits) -> dict[str, int]:
    """The next lower limits: half the token budget down to a token a seat, then half the seats as well.

    Returns:
        Fields of `Limits`; none where a step is one row of one token already.
    """
    seats, budget = limits.max_num_seqs, limits.max_num_batched_tokens
    if budget > seats:
        return {"max_num_batched_tokens": max(budget // 2, seats)}
    return {"max_num_seqs": seats // 2, "max_num_batched_tokens": min(budget, seats // 2)} if seats > 1 else {}
