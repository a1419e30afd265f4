"""Weights quantized in groups of 32 along the input dimension, as GGUF files hold them.

A weight is `scale * code` (code a signed byte, Q8_0) or `scale * code + minimum` (code a nibble, Q4_0 and Q4_1); scale
and minimum are float16 and belong to a group.
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
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix [rows, cols], one output a row.

    Attributes:
        codes: [rows, cols]; int8 in -128..127 without `minima`, else uint8 in 0..15.
        scales: [rows, cols / 32] float16.
        minima: [rows, cols / 32] float16, or `None`.
    """

    codes: NDArray[np.integer[Any]]
    scales: NDArray[np.float16]
    minima: NDArray[np.float16] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, cols)."""
        rows, cols = self.codes.shape
        return rows, cols

    def take(self, rows: NDArray[np.int64]) -> Blocks:
        """The rows with these indices, in this order."""
        minima = None if self.minima is None else self.minima[rows]
        return Blocks(self.codes[rows], self.scales[rows], minima)

    def dequantize(self) -> torch.Tensor:
        """[rows, cols] float32."""
        rows, cols = self.shape
        groups = self.codes.reshape(rows, -1, GROUP).astype(np.float32) * self.scales.astype(np.float32)[:, :, None]
        if self.minima is not None:
            groups += self.minima.astype(np.float32)[:, :, None]
        return torch.from_numpy(groups.reshape(rows, cols))


def stack(parts: list[Blocks]) -> Blocks:
    """Matrices of one kind, one below the other."""
    with_minima = [part.minima for part in parts if part.minima is not None]
    return Blocks(
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate(with_minima) if with_minima else None,
    )


def read_blocks(kind: str, data: NDArray[np.uint8], cols: int) -> Blocks:
    """Blocks as they lie in a GGUF file: [rows, bytes of a row] uint8.

    Args:
        kind: a key of `BLOCK_BYTES`.
    """
    blocks = np.ascontiguousarray(data).reshape(-1, BLOCK_BYTES[kind])
    shape = (-1, cols // GROUP)
    scales = blocks[:, :2].copy().view(np.float16).reshape(shape)
    if kind == "Q8_0":
        return Blocks(blocks[:, 2:].copy().view(np.int8).reshape(-1, cols), scales)
    start = BLOCK_BYTES[kind] - GROUP // 2
    codes = np.concatenate((blocks[:, start:] & 15, blocks[:, start:] >> 4), axis=1).reshape(-1, cols)
    if kind == "Q4_0":
        return Blocks(codes, scales, scales * np.float16(-8))
    return Blocks(codes, scales, blocks[:, 2:4].copy().view(np.float16).reshape(shape))


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
    return Blocks(codes.reshape(weight.shape), scales)


def as_blocks(weight: torch.Tensor | Blocks, *, eight_bits: bool = False) -> Blocks:
    """Blocks of a matrix in any form.

    Args:
        eight_bits: signed bytes, also where nibbles are given.
    """
    if isinstance(weight, torch.Tensor):
        return quantize(weight)
    return quantize(weight.dequantize()) if eight_bits and weight.minima is not None else weight
