"""Weights quantized in groups along the input dimension, as GGUF files hold them.

A weight is `scale * code` or `scale * code + minimum`; scale and minimum are float16 and belong to a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

GROUP = 32
AT_ONCE = 1 << 22  # weights


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix [rows, cols], one output a row.

    Attributes:
        bits: of a code. 4 and 5: from 0 on, with a scale and a minimum for each 32. 6: -32..31, with a scale for each
            16. 8: -128..127, with a scale for each 32.
        codes: [rows, cols]; uint8 where there are minima, else int8.
        scales: [rows, groups] float16.
        minima: [rows, groups] float16, or `None`.
    """

    bits: int
    codes: NDArray[np.integer[Any]]
    scales: NDArray[np.float16]
    minima: NDArray[np.float16] | None = None

    @property
    def group(self) -> int:
        """Weights that share a scale."""
        return GROUP // 2 if self.bits == 6 else GROUP

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, cols)."""
        rows, cols = self.codes.shape
        return rows, cols

    def take(self, rows: NDArray[np.int64]) -> Blocks:
        """The rows with these indices, in this order."""
        minima = None if self.minima is None else self.minima[rows]
        return Blocks(self.bits, self.codes[rows], self.scales[rows], minima)

    def dequantize(self) -> torch.Tensor:
        """[rows, cols] float32."""
        rows, cols = self.shape
        groups = self.codes.reshape(*self.scales.shape, -1) * self.scales.astype(np.float32)[:, :, None]
        if self.minima is not None:
            groups += self.minima.astype(np.float32)[:, :, None]
        return torch.from_numpy(groups.reshape(rows, cols))


def stack(parts: list[Blocks]) -> Blocks:
    """Matrices of one kind, one below the other."""
    with_minima = [part.minima for part in parts if part.minima is not None]
    return Blocks(
        parts[0].bits,
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate(with_minima) if with_minima else None,
    )


def quantize(weight: torch.Tensor) -> Blocks:
    """Signed bytes whose largest in each group is 127: weight [rows, cols] of any float dtype.

    A group that no such scale fits, for its weights are not finite or beyond all use, becomes NaN.
    """
    if weight.numel() > AT_ONCE and len(weight) > 1:  # what lies between takes several times the memory of the weights
        return stack([quantize(part) for part in weight.split(max(1, AT_ONCE // weight.shape[1]))])
    groups = weight.float().numpy().reshape(weight.shape[0], -1, GROUP)
    largest = np.abs(groups).max(axis=-1)
    fits = largest <= 127 * np.float32(np.finfo(np.float16).max)
    scales = (np.where(fits, largest, np.nan) / 127).astype(np.float16)
    divisor = np.where(fits & (scales != 0), scales.astype(np.float32), 1)[:, :, None]
    steps = np.where(fits[:, :, None], groups, 0) / divisor
    codes = np.clip(np.rint(steps), -127, 127).astype(np.int8)
    return Blocks(8, codes.reshape(weight.shape), scales)


def as_blocks(weight: torch.Tensor | Blocks, *, eight_bits: bool = False) -> Blocks:
    """Blocks of a matrix in any form.

    Args:
        eight_bits: signed bytes, also where fewer bits are given.
    """
    if isinstance(weight, torch.Tensor):
        return quantize(weight)
    return quantize(weight.dequantize()) if eight_bits and weight.bits != 8 else weight
