"""Tensors that lie far from where they begin, so that offsets pass 2³¹ without the memory for it."""

from __future__ import annotations

import torch

# More than 2³¹ elements of up to four bytes; a multiple of every block's size that is a power of two.
FAR_BYTES = 2**34


class Far(torch.Tensor):
    """Begins `FAR_BYTES` before its memory. For Triton's interpreter alone, which asks for nothing but the address."""

    def data_ptr(self) -> int:
        return super().data_ptr() - FAR_BYTES


def far(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory; what was element i is now element i + FAR_BYTES / itemsize."""
    return tensor.as_subclass(Far)
