"""What a launcher must know of the device that it launches on."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

import triton

if TYPE_CHECKING:
    import torch


class Traits(NamedTuple):
    """Of a device.

    Attributes:
        arch: of an NVIDIA device, 90 for a Hopper; 0 of others.
        shared_bytes: shared memory that one program may have; Triton refuses a kernel that wants more.
    """

    arch: int
    shared_bytes: int


INTERPRETER: Final = Traits(0, 65_536)


def traits_of(device: torch.device) -> Traits:
    """Of the current device; of the interpreter, for what lies on the CPU."""
    return INTERPRETER if device.type == "cpu" else _of_current(triton.runtime.driver.active.get_current_device())


@cache
def _of_current(current_device: int) -> Traits:
    """Asked for at every launch: each device is looked at once."""
    driver = triton.runtime.driver.active
    target = driver.get_current_target()
    properties = driver.utils.get_device_properties(current_device)
    return Traits(target.arch if target.backend == "cuda" else 0, properties["max_shared_mem"])
