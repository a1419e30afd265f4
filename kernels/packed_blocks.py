"""Quantized matrices in the order in which the Triton kernels read them.

A matrix is cut into tiles of `TILE` rows and of `unit` columns. A tile's codes lie one after the other, so that a warp
reads a kilobyte in one run. Within a tile, number w of a row holds in its field n (the lowest is field 0) the code of
column `n * words + w`: shifting all numbers alike gives a part of neighbouring columns, the operand of a product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels.blocks import GROUP

if TYPE_CHECKING:
    from kernels.blocks import Blocks

TILE = 16
ROW_STEP = 64  # rows come in so many, of which the last may be zeros: no kernel looks where the matrix ends
PART = 16  # the fewest columns that a product takes
INTEGERS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}
# What is added to signed codes, so that none is below zero.
OFFSETS = {4: 0, 5: 0, 6: 32, 8: 128}


@dataclass(frozen=True, slots=True)
class PackedBlocks:
    """A matrix [rows, cols] on a device.

    Attributes:
        bits: of a code, as in `Blocks`.
        rows, cols: of the matrix.
        codes: [tiles, units, 16, words]: all eight bits of each code, or the lower four.
        planes: [tiles, units, lines, words] int16: the bits above those four, in fields of one or two. A number holds
            those of rows r, r + lines, r + 2 * lines …, the first in its lowest bits. `codes` where there are none.
        scales: [tiles, units, pairs, 16] int32, two float16 each: scale and minimum of a group (the scale is the lower
            half), or without minima the scales of two neighbouring groups.
    """

    bits: int
    rows: int
    cols: int
    codes: torch.Tensor
    planes: torch.Tensor
    scales: torch.Tensor

    @property
    def unit(self) -> int:
        """Columns of a tile."""
        return unit_of(self.cols)

    @property
    def nbytes(self) -> int:
        """What the device holds, and a product reads."""
        return self.codes.nbytes + self.scales.nbytes + (self.planes.nbytes if self.bits in (5, 6) else 0)

    def dequantize(self) -> torch.Tensor:
        """[rows, cols] float32, step by step."""
        low, count = low_bits(self.bits), fields(self.bits, self.unit)
        codes = _split(self.codes, low, count)
        if self.bits in (5, 6):
            width = (self.bits - low) * count
            shifts = torch.arange(0, 16, width, dtype=torch.int32, device=self.planes.device)[:, None, None]
            planes = (self.planes[:, :, None].to(torch.int32) >> shifts).flatten(2, 3)  # [tiles, units, 16, words]
            codes += _split(planes, self.bits - low, count) << low
        halves = self.scales.view(torch.float16).unflatten(-1, (TILE, 2))  # [tiles, units, pairs, 16, 2]
        if self.bits in (4, 5):
            scales, minima = halves.permute(4, 0, 3, 1, 2).float()  # [tiles, 16, units, groups] each
        else:
            scales = halves.permute(0, 3, 1, 2, 4).flatten(-2).float()
            scales = scales[..., : self.unit // group_of(self.bits)]
            minima = -OFFSETS[self.bits] * scales
        groups = codes.view(*scales.shape, -1).float()
        values = groups * scales[..., None] + minima[..., None]
        matrix: torch.Tensor = values.reshape(-1, self.cols)[: self.rows]
        return matrix


def unit_of(cols: int) -> int:
    """Columns of a tile: as many as make a number of 32 bits full, where they divide the matrix."""
    return next(unit for unit in (128, 64, GROUP) if cols % unit == 0)


def group_of(bits: int) -> int:
    """Columns that share a scale."""
    return GROUP // 2 if bits == 6 else GROUP


def low_bits(bits: int) -> int:
    """Bits of a field in `codes`."""
    return 8 if bits == 8 else 4


def fields(bits: int, unit: int) -> int:
    """Codes in a number of `codes`."""
    return min(32 // low_bits(bits), unit // PART)


def pairs(bits: int, unit: int) -> int:
    """Numbers of `scales` for a row of a tile."""
    groups = unit // group_of(bits)
    return groups if bits in (4, 5) else -(-groups // 2)


def plane_lines(bits: int, unit: int) -> int:
    """Numbers of `planes` below each other in a tile: as few as hold its rows' bits. Without planes, its rows."""
    return (bits - 4) * fields(bits, unit) * TILE // 16 if bits in (5, 6) else TILE


def pack(blocks: Blocks, device: torch.device) -> PackedBlocks:
    """Bring a matrix to a device, and into this order there."""
    bits, (rows, cols) = blocks.bits, blocks.shape
    unit, low = unit_of(cols), low_bits(bits)
    count = fields(bits, unit)
    given = torch.from_numpy(blocks.codes).to(device)
    codes = torch.zeros((-(-rows // ROW_STEP) * ROW_STEP, cols), dtype=torch.uint8, device=device)
    codes[:rows] = given.view(torch.uint8) if not OFFSETS[bits] else given.short() + OFFSETS[bits]
    tiles = codes.view(-1, TILE, cols // unit, count, unit // count).transpose(1, 2)
    packed = _join(tiles & ((1 << low) - 1), low, INTEGERS[low * count])
    planes = packed
    if bits in (5, 6):
        planes = _join(tiles >> low, bits - low, torch.int32)
        rows_together = planes.unflatten(2, (-1, plane_lines(bits, unit))).transpose(2, 3)
        planes = _join(rows_together, (bits - low) * count, torch.int16)
    return PackedBlocks(bits, rows, cols, packed, planes, _pack_scales(blocks, device))


def _pack_scales(blocks: Blocks, device: torch.device) -> torch.Tensor:
    """As in `PackedBlocks`; what no group has is zero."""
    bits, (rows, cols) = blocks.bits, blocks.shape
    unit = unit_of(cols)
    shape = -(-rows // ROW_STEP) * ROW_STEP, cols // unit, pairs(bits, unit), 2
    halves = torch.zeros(shape, dtype=torch.float16, device=device)
    given = torch.from_numpy(blocks.scales).to(device).view(rows, cols // unit, -1)
    if blocks.minima is None:
        halves.flatten(2)[:rows, :, : given.shape[2]] = given
    else:
        halves[:rows, ..., 0] = given
        halves[:rows, ..., 1] = torch.from_numpy(blocks.minima).to(device).view(given.shape)
    numbers = halves.view(torch.int32).squeeze(-1)  # [rows, units, pairs]
    tiles: torch.Tensor = numbers.unflatten(0, (-1, TILE))
    return tiles.permute(0, 2, 3, 1).contiguous()


def _join(tiles: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of a few bits, field by field: [tiles, units, lines, fields, words] → [tiles, units, lines, words]."""
    numbers = tiles[..., 0, :].to(torch.int32)
    for field in range(1, tiles.shape[-2]):
        numbers |= tiles[..., field, :].to(torch.int32) << (bits * field)
    return numbers.to(dtype).contiguous()


def _split(numbers: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """What `_join` joined: [tiles, units, 16, words] → [tiles, 16, units, columns] int32."""
    wide = numbers.to(torch.int32)[..., None, :]
    shifts = torch.arange(0, bits * count, bits, dtype=torch.int32, device=numbers.device)[:, None]
    return ((wide >> shifts) & ((1 << bits) - 1)).flatten(-2).transpose(1, 2)


def stack(parts: list[PackedBlocks]) -> list[PackedBlocks]:
    """One matrix below the other: neighbours of one kind become one where the upper ends with a tile."""
    stacked = parts[:1]
    for part in parts[1:]:
        above = stacked[-1]
        if above.bits == part.bits and above.cols == part.cols and above.rows % TILE == 0:
            stacked[-1] = _put_below(above, part)
        else:
            stacked.append(part)
    return stacked


def _put_below(above: PackedBlocks, part: PackedBlocks) -> PackedBlocks:
    rows = above.rows + part.rows
    num_tiles = -(-rows // ROW_STEP) * ROW_STEP // TILE

    def join(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
        both = torch.cat((upper[: above.rows // TILE], lower))[:num_tiles]
        missing = num_tiles - len(both)
        return torch.cat((both, both.new_zeros((missing, *both.shape[1:])))) if missing else both

    codes = join(above.codes, part.codes)
    planes = codes if above.planes is above.codes else join(above.planes, part.planes)
    return PackedBlocks(above.bits, rows, above.cols, codes, planes, join(above.scales, part.scales))
