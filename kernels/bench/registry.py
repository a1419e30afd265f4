"""All cases: each kernel's module gives its own.

A module has `main_cases()`, the shapes that matter, for a device's clock and for the compiler; and `small_cases()`, odd
shapes that the interpreter gets through in seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.bench import attention, quantized, sampling, small

if TYPE_CHECKING:
    from kernels.bench.cases import Case

MODULES = (attention, quantized, sampling, small)


def main_cases() -> list[Case]:
    """The shapes that matter, of every kernel."""
    return [case for module in MODULES for case in module.main_cases()]


def small_cases() -> list[Case]:
    """Odd and ragged shapes of every kernel."""
    return [case for module in MODULES for case in module.small_cases()]


def tuning_cases() -> list[Case]:
    """The attention, cut in other ways than it is."""
    return attention.tuning_cases()
