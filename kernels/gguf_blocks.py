"""Blocks as they lie in GGUF files: what is known of each kind, and how it is taken apart.

The layouts are those of ggml-common.h and of the `gguf` package. Kinds that end in _K have blocks of 256 weights whose
scales and minima are small integers times a float16 of the block. Here those products become float16 numbers, which
moves a scale or a minimum by no more than 2^-11 of itself (what is too small for that many bits is exact: an integer
times the smallest float16).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.blocks import AT_ONCE, GROUP, Blocks, stack

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Halves = NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of block.

    Attributes:
        num_bytes: of a block.
        bits: of a code, as in `Blocks`.
        parts: blocks [n, num_bytes] → codes [n, weights], scales [n, groups], minima [n, groups] or `None`.
    """

    num_bytes: int
    bits: int
    parts: Callable[[Bytes], tuple[NDArray[np.integer[Any]], Halves, Halves | None]]


def read_blocks(kind: str, data: Bytes, cols: int) -> Blocks:
    """Blocks of a file: [rows, bytes of a row] uint8 → [rows, cols].

    Args:
        kind: a key of `FORMATS`.
    """
    if (
        data.shape[0] * cols > AT_ONCE and len(data) > 1
    ):  # what lies between takes several times the memory of the codes
        step = max(1, AT_ONCE // cols)
        return stack([read_blocks(kind, data[row : row + step], cols) for row in range(0, len(data), step)])
    form = FORMATS[kind]
    codes, scales, minima = form.parts(np.ascontiguousarray(data).reshape(-1, form.num_bytes))
    rows = len(data)
    return Blocks(
        form.bits,
        codes.reshape(rows, cols),
        scales.reshape(rows, -1),
        None if minima is None else minima.reshape(rows, -1),
    )


def _q4_0(blocks: Bytes) -> tuple[Bytes, Halves, Halves]:
    scales = _float16(blocks[:, :2])
    return _nibbles(blocks[:, 2:]), scales, _times(scales, np.full(1, -8))


def _q4_1(blocks: Bytes) -> tuple[Bytes, Halves, Halves]:
    return _nibbles(blocks[:, 4:]), _float16(blocks[:, :2]), _float16(blocks[:, 2:4])


def _q5_0(blocks: Bytes) -> tuple[Bytes, Halves, Halves]:
    scales = _float16(blocks[:, :2])
    return _with_bits(blocks[:, 6:], blocks[:, 2:6]), scales, _times(scales, np.full(1, -16))


def _q5_1(blocks: Bytes) -> tuple[Bytes, Halves, Halves]:
    return _with_bits(blocks[:, 8:], blocks[:, 4:8]), _float16(blocks[:, :2]), _float16(blocks[:, 2:4])


def _q8_0(blocks: Bytes) -> tuple[NDArray[np.int8], Halves, None]:
    return blocks[:, 2:].view(np.int8), _float16(blocks[:, :2]), None


def _q4_k(blocks: Bytes) -> tuple[Bytes, Halves, Halves]:
    return _nibbles(blocks[:, 16:].reshape(-1, 4, GROUP)), *_k_scales(blocks)


def _q5_k(blocks: Bytes) -> tuple[Bytes, Halves, Halves]:
    # Bit g of byte i belongs to weight i of group g.
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, GROUP))
    return low.reshape(fifth.shape) | fifth << np.uint8(4), *_k_scales(blocks)


def _q6_k(blocks: Bytes) -> tuple[NDArray[np.int8], Halves, None]:
    # Each half of the block: 64 bytes of nibbles, and 32 bytes with two bits for each of four runs of 32 weights.
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64))
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    codes = (low | high.reshape(low.shape) << 4).view(np.int8) - np.int8(32)
    return codes, _times(_float16(blocks[:, 208:]), blocks[:, 192:208].view(np.int8)), None


def _k_scales(blocks: Bytes) -> tuple[Halves, Halves]:
    """Scales and minima [n, 8]: two float16, then eight scales and eight minima of six bits in twelve bytes."""
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((first & 63, rest & 15 | first >> 6 << 4), axis=1)
    minima = np.concatenate((second & 63, rest >> 4 | second >> 6 << 4), axis=1)
    return _times(_float16(blocks[:, :2]), scales), _times(-_float16(blocks[:, 2:4]), minima)


def _times(scales: Halves, factors: NDArray[np.integer[Any]]) -> Halves:
    """Products rounded once; one that is beyond float16 becomes infinite and its weights useless, which is seen."""
    with np.errstate(over="ignore", invalid="ignore"):
        return (scales.astype(np.float32) * factors.astype(np.float32)).astype(np.float16)


def _float16(data: Bytes) -> Halves:
    """[n, 2] bytes → [n, 1]."""
    return data.copy().view(np.float16)


def _nibbles(data: Bytes) -> Bytes:
    """Low halves of the bytes of a run, behind them the high ones: [..., n] → [..., 2n]."""
    return np.concatenate((data & 15, data >> 4), axis=-1)


def _with_bits(nibbles: Bytes, bits: Bytes) -> Bytes:
    """Codes of five bits: nibbles [n, 16] and, in order, a fifth bit for each [n, 4] → [n, 32]."""
    return _nibbles(nibbles) | np.unpackbits(bits, axis=1, bitorder="little") << np.uint8(4)


FORMATS = {
    "Q4_0": Format(18, 4, _q4_0),
    "Q4_1": Format(20, 4, _q4_1),
    "Q5_0": Format(22, 5, _q5_0),
    "Q5_1": Format(24, 5, _q5_1),
    "Q8_0": Format(34, 8, _q8_0),
    "Q4_K": Format(144, 4, _q4_k),
    "Q5_K": Format(176, 5, _q5_k),
    "Q6_K": Format(210, 6, _q6_k),
}
