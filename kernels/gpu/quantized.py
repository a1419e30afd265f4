"""Products with quantized matrices in Triton, and rows of them: codes become numbers in registers.

A program computes some outputs (rows of the matrix) for some tokens. The codes of a tile, shifted alike, are the left
operand of a product with a part of the columns, rounded as weights of x's dtype would be. Few outputs would leave the
device idle, so with few tokens each warp of a program takes tiles of its own, and their sums meet at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.traits import traits_of
from kernels.packed_blocks import OFFSETS, TILE, fields, group_of, pairs, plane_lines

if TYPE_CHECKING:
    from kernels.packed_blocks import PackedBlocks


class Tiles(NamedTuple):
    """How a program is cut.

    Attributes:
        rows: of the matrix, a power of two from 16 to 64.
        tokens: a power of two from 16 on.
        ways: into how many runs the columns are dealt out; no more than warps.
        num_warps, num_stages: as Triton has them.
    """

    rows: int
    tokens: int
    ways: int
    num_warps: int
    num_stages: int


@triton.jit
def _shift(numbers: tl.tensor, LEFT: tl.constexpr) -> tl.tensor:
    """Shifted to the left, or where LEFT is negative to the right."""
    if LEFT >= 0:
        return numbers << LEFT
    return numbers >> -LEFT


@triton.jit
def _dequantize(
    numbers: tl.tensor, planes: tl.tensor, pair: tl.tensor, FIELD: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr,
    OFFSET: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Weights of a field, float32; `pair` broadcasts against the numbers.

    A code is put into the last bits of a power of two's significand, which makes a float32 of their sum without a
    conversion. The scale times that is exact, and what is too much of it goes with the minimum: all is rounded once,
    but for a minimum of its own, which loses what is below 2^-13 of the scale. A code may lie at two places, so that
    two fields share a shift.
    """
    LOW: tl.constexpr = 8 if BITS == 8 else 4
    AT: tl.constexpr = 16 if BITS < 8 and (FIELD == 2 or FIELD == 4 or FIELD >= 6) else 12
    POWER: tl.constexpr = 1 << (23 - AT)
    value = (150 - AT) << 23  # POWER as a float32
    if BITS == 5 or BITS == 6:
        value |= _shift(planes, AT + 4 - (BITS - 4) * FIELD) & (((1 << (BITS - 4)) - 1) << (AT + 4))
    value |= _shift(numbers, AT - LOW * FIELD) & (((1 << LOW) - 1) << AT)
    value = value.to(tl.float32, bitcast=True)
    upper, lower = (pair >> 16).to(tl.int16), pair.to(tl.int16)
    if BITS == 4 or BITS == 5:
        scale = lower.to(tl.float16, bitcast=True).to(tl.float32)
        minimum = upper.to(tl.float16, bitcast=True).to(tl.float32) - POWER * scale
    else:
        scale = (upper if HALF == 1 else lower).to(tl.float16, bitcast=True).to(tl.float32)
        minimum = -(POWER + OFFSET) * scale
    return value * scale + minimum


@triton.jit(do_not_specialize=["num_tokens"])
def quantized_linear_kernel(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    planes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    num_tokens: tl.tensor,
    num_rows: tl.tensor,
    num_units: tl.tensor,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SHARE: tl.constexpr,
    LINES: tl.constexpr,
    OFFSET: tl.constexpr,
    FIELDS: tl.constexpr,
    WORDS: tl.constexpr,
    PAIRS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WAYS: tl.constexpr,
    PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Program (rows, tokens). Operands are [ROWS, WORDS] and [WORDS, TOKENS], with WAYS > 1 so many of each."""
    first_row, first_token = tl.program_id(0) * ROWS, tl.program_id(1) * TOKENS
    if WAYS > 1:
        way = tl.arange(0, WAYS)[:, None, None]
        line = tl.arange(0, ROWS)[None, :, None]
        word = tl.arange(0, WORDS)[None, None, :]
        column = tl.arange(0, WORDS)[None, :, None]
        token = tl.arange(0, TOKENS)[None, None, :]
        total = tl.zeros([WAYS, ROWS, TOKENS], tl.float32)
    else:
        way = tl.full([1, 1], 0, tl.int32)
        line = tl.arange(0, ROWS)[:, None]
        word = tl.arange(0, WORDS)[None, :]
        column = tl.arange(0, WORDS)[:, None]
        token = tl.arange(0, TOKENS)[None, :]
        total = tl.zeros([ROWS, TOKENS], tl.float32)
    # All in all a matrix or its input may be beyond 2³¹, what a program sees of it is not.
    tiles = (first_row // TILE).to(tl.int64) * num_units
    codes_ptr += tiles * (TILE * WORDS)
    planes_ptr += tiles * (LINES * WORDS)
    scales_ptr += tiles * (TILE * PAIRS)
    x_ptr += first_token.to(tl.int64) * x_stride
    tile = line // TILE * num_units
    lines = tile * (TILE * WORDS) + line % TILE * WORDS
    plane_lines = tile * (LINES * WORDS) + line % LINES * WORDS
    pairs = tile * (TILE * PAIRS) + line % TILE
    real = first_token + token < num_tokens
    for start in range(0, num_units, WAYS):
        unit = start + way
        wanted = real & (unit < num_units)
        own = unit
        if WAYS > 1:
            own = tl.minimum(unit, num_units - 1)  # beyond the last the other operand is zero
        numbers = tl.load(codes_ptr + (lines + own * (TILE * WORDS) + word)).to(tl.int32)
        planes = numbers
        if BITS == 5 or BITS == 6:
            planes = tl.load(planes_ptr + (plane_lines + own * (LINES * WORDS) + word)).to(tl.int32)
            if LINES < TILE:
                planes = planes >> (line % TILE // LINES * ((BITS - 4) * FIELDS))
        for field in tl.static_range(FIELDS):
            pair = tl.load(scales_ptr + (pairs + own * (TILE * PAIRS) + field * WORDS // SHARE * TILE))
            weights = _dequantize(numbers, planes, pair, field, field * WORDS // GROUP % 2, BITS, OFFSET)
            places = token * x_stride + (unit * (FIELDS * WORDS) + field * WORDS + column)
            x = tl.load(x_ptr + places, mask=wanted, other=0.0)
            total = tl.dot(weights.to(PRODUCT), x.to(PRODUCT), total, input_precision=PRECISION)
    if WAYS > 1:
        total = tl.sum(total, axis=0)
    row = first_row + tl.arange(0, ROWS)[:, None]
    tokens = first_token + tl.arange(0, TOKENS)[None, :]
    places = tokens.to(tl.int64) * out_stride + row
    inside = (row < num_rows) & (tokens < num_tokens)
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=inside)


def choose_tiles(num_tokens: int, num_rows: int, bits: int, dtype: torch.dtype, shared_bytes: int) -> Tiles:
    """The cut for a shape: what compiles without spills, see kernels/RESULTS.md; no device has timed it yet.

    With few tokens the codes are most of what is read, and many small programs read them fastest; the more tokens
    there are, the more rows must share what is read of those.

    Args:
        shared_bytes: see `Traits`. Three tiles of a few tokens are more than a GeForce has, two more than AMD's.
    """
    if dtype == torch.float32:  # three products each fill the registers soon
        return Tiles(16, 16, 4, 8, 2) if num_tokens <= 16 else Tiles(32, 32, 1, 4, 2)
    stages = 3 if shared_bytes > 140_000 else 2 if shared_bytes > 70_000 else 1
    if num_tokens <= 4 and num_rows < 8192:
        return Tiles(16, 16, 8, 8, 3 if stages > 1 else 1)
    if num_tokens <= 16:
        return Tiles(16 if bits == 5 and stages < 3 else 32, 16, 8, 8, min(stages, 2 if bits in (6, 8) else 3))
    if num_tokens <= 32:
        return Tiles(64 if stages == 3 else 32, 32, 4, 8, stages)
    return Tiles(64, 64 if num_tokens <= 64 else 128, 1, 4, 3 if stages > 1 else 2)


def quantized_linear(
    x: torch.Tensor, matrix: PackedBlocks, out: torch.Tensor | None = None, *, tiles: Tiles | None = None
) -> torch.Tensor:
    """The product with a quantized matrix, whose weights are rounded to x's dtype; sums are float32.

    Args:
        x: [N, cols]; rows may lie apart, elements of a row may not.
        matrix: [rows, cols].
        out: [N, rows], where to write, of any float dtype; rows may lie apart. Made in x's dtype when it is not given.
        tiles: how to cut instead of `choose_tiles`.

    Returns:
        [N, rows].
    """
    num_tokens = x.shape[0]
    if out is None:
        out = torch.empty((num_tokens, matrix.rows), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    traits = traits_of(x.device)
    if tiles is None:
        tiles = choose_tiles(num_tokens, matrix.rows, matrix.bits, x.dtype, traits.shared_bytes)
    rows, tokens, ways, num_warps, num_stages = tiles
    product = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}.get(x.dtype, tl.float16)
    if x.device.type == "cpu" and product == tl.bfloat16:
        product = tl.float32  # the interpreter takes bfloat16's bits for whole numbers
    grid = (triton.cdiv(matrix.rows, rows), triton.cdiv(num_tokens, tokens))
    quantized_linear_kernel[grid](
        x, matrix.codes, matrix.planes, matrix.scales, out, x.stride(0), out.stride(0),
        num_tokens, matrix.rows, matrix.codes.shape[1], **_layout(matrix), ROWS=rows, TOKENS=tokens, WAYS=ways,
        PRODUCT=product, PRECISION="tf32x3" if traits.arch else "ieee", num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out


def _layout(matrix: PackedBlocks) -> dict[str, int]:
    """What the kernels must know of a kind and a width."""
    bits, unit, group = matrix.bits, matrix.unit, group_of(matrix.bits)
    count = fields(bits, unit)
    share = group if bits in (4, 5) else 2 * group  # columns of a number of `scales`
    return {
        "BITS": bits, "GROUP": group, "SHARE": share, "LINES": plane_lines(bits, unit), "OFFSET": OFFSETS[bits],
        "FIELDS": count, "WORDS": unit // count, "PAIRS": pairs(bits, unit), "TILE": TILE,
    }  # fmt: skip


@triton.jit
def quantized_rows_kernel(
    codes_ptr: tl.tensor,
    planes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_stride: tl.tensor,
    num_units: tl.tensor,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SHARE: tl.constexpr,
    LINES: tl.constexpr,
    OFFSET: tl.constexpr,
    FIELDS: tl.constexpr,
    WORDS: tl.constexpr,
    PAIRS: tl.constexpr,
    TILE: tl.constexpr,
    UNITS: tl.constexpr,
) -> None:
    """Program (id, part): UNITS tiles of a row."""
    line = tl.program_id(0)
    row = tl.load(ids_ptr + line)
    units = tl.program_id(1) * UNITS + tl.arange(0, UNITS)[:, None]
    words = tl.arange(0, WORDS)[None, :]
    inside = units < num_units
    tiles = (row // TILE).to(tl.int64) * num_units + units
    places = (tiles * TILE + row % TILE) * WORDS + words
    numbers = tl.load(codes_ptr + places, mask=inside, other=0).to(tl.int32)
    planes = numbers
    if BITS == 5 or BITS == 6:
        planes = tl.load(planes_ptr + (tiles * LINES + row % LINES) * WORDS + words, mask=inside, other=0).to(tl.int32)
        planes = planes >> (row % TILE // LINES * ((BITS - 4) * FIELDS))
    out_ptr += line.to(tl.int64) * out_stride
    for field in tl.static_range(FIELDS):
        places = (tiles * PAIRS + field * WORDS // SHARE) * TILE + row % TILE
        pair = tl.load(scales_ptr + places, mask=inside, other=0)
        weights = _dequantize(numbers, planes, pair, field, field * WORDS // GROUP % 2, BITS, OFFSET)
        columns = units * (FIELDS * WORDS) + field * WORDS + words
        tl.store(out_ptr + columns, weights.to(out_ptr.dtype.element_ty), mask=inside)


def quantized_rows(matrix: PackedBlocks, ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Rows of a quantized matrix: what a lookup of embeddings wants.

    Args:
        matrix: [rows, cols].
        ids: [N] int32 or int64, each below `matrix.rows`.
        out: [N, cols], where to write, of any float dtype; rows may lie apart. Made in float32 when it is not given.

    Returns:
        [N, cols].
    """
    if out is None:
        out = torch.empty((len(ids), matrix.cols), dtype=torch.float32, device=ids.device)
    if len(ids) > 0:
        num_units = matrix.codes.shape[1]
        units = min(triton.next_power_of_2(num_units), 16)
        quantized_rows_kernel[(len(ids), triton.cdiv(num_units, units))](
            matrix.codes, matrix.planes, matrix.scales, ids, out, out.stride(0), num_units, **_layout(matrix),
            UNITS=units, num_warps=4,
        )  # fmt: skip
    return out
