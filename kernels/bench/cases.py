"""What a case is: a kernel's launch with its operands, and how to check it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Relative and absolute, for numbers of about one: sums in another order, and results rounded to the dtype.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# The same of what a device makes by powers of two, and by products of float32 in three parts.
LEAST_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Work:
    """A launch with its operands on some device.

    Attributes:
        run: launches, again and again on the same operands; does not wait for the device.
        check: runs, compares with the plain version, and raises AssertionError where they differ. Called before `run`
            if at all: some kernels change their operands.
        num_bytes: what one run must read and write at least.
        flops: floating-point operations of one run, where they may bound it; a multiply-add counts two.
        rival: torch's own way to the same result, where there is one.
    """

    run: Callable[[], object]
    check: Callable[[], None]
    num_bytes: int
    flops: int = 0
    rival: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel in one shape.

    Attributes:
        kernel: the launcher's name.
        shape: sizes and dtype, for a table.
        make: its operands on a device. On "meta", where tensors have no data, `run` alone works: the compiler for a
            device that is not there sees the launch. So `make` reads no value of a tensor.
        least_arch: the first NVIDIA architecture that has what it needs.
    """

    kernel: str
    shape: str
    make: Callable[[torch.device], Work]
    least_arch: int = 80


def choose(cases: Sequence[Case], kernels: Sequence[str], first: int | None, shapes: Sequence[str] = ()) -> list[Case]:
    """Of these kernels alone, if any are named; of each no more than the first so many, and those of these shapes."""
    taken = Counter[str]()
    chosen = []
    for case in cases:
        if kernels and case.kernel not in kernels:
            continue
        taken[case.kernel] += 1
        if first is None or taken[case.kernel] <= first or case.shape in shapes:
            chosen.append(case)
    return chosen


def assert_close(result: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Equal but for a tolerance; where one is NaN, because nobody wrote there, so is the other."""
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def num_multiprocessors(device: torch.device) -> int:
    """Of a device; of one that is not there, an H200's."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
