"""Cases of products with quantized matrices, and of their rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from kernels import reference
from kernels.bench.cases import LEAST_TOLERANCE, TOLERANCE, Case, Work, assert_close
from kernels.gpu.quantized import Tiles, quantized_linear, quantized_rows
from kernels.packed_blocks import INTEGERS, ROW_STEP, TILE, PackedBlocks, fields, low_bits, pairs, plane_lines, unit_of

NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
# Between rows of input and of output.
GAP = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """A product of [tokens, cols] with [rows, cols].

    Attributes:
        bits: of a code.
        tiles: another cut.
    """

    tokens: int
    rows: int
    cols: int
    bits: int = 4
    dtype: torch.dtype = torch.bfloat16
    tiles: Tiles | None = None

    @property
    def name(self) -> str:
        """Sizes, bits and dtype."""
        return f"{self.tokens} × {self.cols} × {self.rows}, {self.kind}"

    @property
    def kind(self) -> str:
        """Bits and dtype, and how it is cut."""
        cut = f"; {'/'.join(map(str, self.tiles))}" if self.tiles else ""
        return f"{self.bits} bits, {NAMES[self.dtype]}{cut}"


def make_matrix(bits: int, rows: int, cols: int, device: torch.device) -> PackedBlocks:
    """Random codes and scales; products with numbers of about one are of about one."""
    unit, tiles = unit_of(cols), -(-rows // ROW_STEP) * ROW_STEP // TILE
    count = fields(bits, unit)

    def random(lines: int, dtype: torch.dtype) -> torch.Tensor:
        shape = tiles, cols // unit, lines, unit // count * dtype.itemsize
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=device).view(dtype)

    codes = random(TILE, INTEGERS[low_bits(bits) * count])
    planes = random(plane_lines(bits, unit), torch.int16) if bits in (5, 6) else codes
    halves = torch.rand((tiles, cols // unit, pairs(bits, unit), TILE, 2), device=device) + 0.5
    halves *= 3.0 / (1 << bits) / cols**0.5
    if bits in (4, 5):
        halves[..., 1] *= -0.5 * (1 << bits)
    scales = halves.half().view(torch.int32).squeeze(-1)
    return PackedBlocks(bits, rows, cols, codes, planes, scales)


def make_linear(shape: Shape, device: torch.device) -> Work:
    """The product; rows of input and output lie apart. Torch's own way is with weights of x's dtype."""
    matrix = make_matrix(shape.bits, shape.rows, shape.cols, device)
    wide = torch.randn((shape.tokens, shape.cols + GAP), device=device).to(shape.dtype)
    x = wide[:, : shape.cols]
    room = torch.full((shape.tokens, shape.rows + GAP), float("nan"), dtype=shape.dtype, device=device)
    out = room[:, : shape.rows]
    run = partial(quantized_linear, x, matrix, out, tiles=shape.tiles)

    def check() -> None:
        tolerance = max(LEAST_TOLERANCE, TOLERANCE[shape.dtype])
        assert_close(run(), reference.quantized_linear(x, matrix), tolerance)
        if not room[:, shape.rows :].isnan().all():
            raise AssertionError("wrote beyond a row")

    num_bytes = matrix.nbytes + 2 * shape.tokens * (shape.cols + shape.rows)
    rival = None
    if device.type == "cuda":
        weights = torch.randn((shape.rows, shape.cols), dtype=shape.dtype, device=device)
        rival = partial(F.linear, x, weights)
    return Work(run, check, num_bytes, 2 * shape.tokens * shape.rows * shape.cols, rival)


def make_rows(count: int, shape: Shape, device: torch.device) -> Work:
    """So many rows, the last of the matrix among them."""
    matrix = make_matrix(shape.bits, shape.rows, shape.cols, device)
    ids = (shape.rows - 1 - 7 * torch.arange(count, device=device)).remainder(shape.rows).to(torch.int32)
    out = torch.full((count, shape.cols + GAP), float("nan"), dtype=shape.dtype, device=device)[:, : shape.cols]
    run = partial(quantized_rows, matrix, ids, out)

    def check() -> None:
        expected = reference.quantized_rows(matrix, ids).to(shape.dtype)
        assert_close(run(), expected, TOLERANCE[shape.dtype])

    return Work(run, check, count * (matrix.nbytes // shape.rows + shape.cols * shape.dtype.itemsize))


def _cases(shapes: list[Shape]) -> list[Case]:
    return [Case("quantized_linear", shape.name, partial(make_linear, shape)) for shape in shapes]


def _rows_case(count: int, shape: Shape) -> Case:
    name = f"{count} rows of {shape.rows} × {shape.cols}, {shape.kind}"
    return Case("quantized_rows", name, partial(make_rows, count, shape))


def main_cases() -> list[Case]:
    """Every kind: decode of many rows and a chunk, then one row and some; Llama-3.1-8B's and SmolLM2-135M's shapes."""
    kinds = [(bits, dtype) for dtype in (torch.bfloat16, torch.float16) for bits in (4, 8, 6, 5)]
    shapes = [Shape(tokens, 4096, 4096, *kind) for kind in kinds for tokens in (16, 2048)]
    shapes += [Shape(tokens, 4096, 4096, *kind) for kind in kinds for tokens in (1, 32, 64)]
    shapes += [Shape(tokens, *size) for size in ((28672, 4096), (4096, 14336)) for tokens in (1, 16, 2048)]
    shapes += [Shape(tokens, 3072, 576) for tokens in (1, 16, 2048)]
    shapes += [Shape(tokens, 4096, 4096, 4, torch.float32) for tokens in (16, 2048)]
    cases = _cases(shapes)
    return cases + [_rows_case(64, Shape(0, 128_256, 4096, bits)) for bits in (4, 6, 8)]


def small_cases() -> list[Case]:
    """Every kind, width of a tile and cut."""
    cuts = [(3, None), (17, Tiles(16, 16, 4, 4, 3)), (1, Tiles(64, 16, 2, 4, 3)), (40, Tiles(32, 32, 1, 4, 3))]
    shapes = []
    for bits in (8, 6, 5, 4):
        for index, cols in enumerate((96, 192, 384)):
            dtype = list(NAMES)[(bits + index) % 3]
            for tokens, tiles in (cuts[(bits + index) % 4], cuts[(bits + index + 2) % 4]):
                shapes.append(Shape(tokens, 37, cols, bits, dtype, tiles))
    shapes += [Shape(0, 5, 32), Shape(70, 16, 32, 8, torch.float32)]
    cases = _cases(shapes)
    odd = [Shape(0, 37, cols, bits, torch.float32) for bits in (4, 5, 6, 8) for cols in (32, 192, 1152)]
    return cases + [_rows_case(9, shape) for shape in odd]
