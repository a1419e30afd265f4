"""Cases of the attention."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels import reference
from kernels.bench.cases import LEAST_TOLERANCE, TOLERANCE, Case, Work, assert_close, num_multiprocessors
from kernels.gpu.attention import Tiles, make_segments, num_segments, paged_attention
from kernels.paged_attention import AttentionRows

FLOAT8 = torch.float8_e4m3fn
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", FLOAT8: "fp8"}


@dataclass(frozen=True, slots=True)
class Shape:
    """An attention.

    Attributes:
        rows: (tokens before, new tokens) of each. (0, 0) pads a graph: a row without tokens, or, where no row has more
            than one, with a token that stands for nothing.
        cache_dtype: the query's if it is `None`.
        split: into segments where the device has room for them.
        tiles, segments: another cut, another number of segments.
    """

    rows: tuple[tuple[int, int], ...]
    heads: int = 16
    kv_heads: int = 8
    size: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    split: bool = True
    tiles: Tiles | None = None
    segments: int | None = None

    @property
    def max_query_len(self) -> int:
        """New tokens of the row that has most."""
        return max(new for _, new in self.rows)

    @property
    def query_lens(self) -> list[int]:
        """Tokens of each row in the query."""
        return [1 if self.max_query_len == 1 else new for _, new in self.rows]

    @property
    def name(self) -> str:
        """Rows, heads, sizes and dtypes."""
        counts = dict.fromkeys(self.rows, 0)
        for row in self.rows:
            counts[row] += 1
        rows = " + ".join(f"{count} × {new} after {before}" for (before, new), count in counts.items())
        dtypes = NAMES[self.dtype] + (f", {NAMES[self.cache_dtype]} cache" if self.cache_dtype else "")
        cut = f"; {'/'.join(map(str, self.tiles))}" if self.tiles else ""
        cut += f"; {self.segments} segments" if self.segments else ""
        return f"{rows}; {self.heads}/{self.kv_heads} × {self.size}, blocks of {self.block_size}, {dtypes}{cut}"


class Operands(NamedTuple):
    """What `paged_attention` takes."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    rows: AttentionRows
    scales: torch.Tensor | None


def make_operands(shape: Shape, device: torch.device) -> Operands:
    """Random operands; what no row has written is NaN, in the rows' last blocks too, but the null block is zeros."""
    lengths = [before + new for before, new in shape.rows]
    needs = [-(-length // shape.block_size) for length in lengths]
    null = sum(needs) + 2  # two blocks that nobody owns, then the null block
    ids = random.Random(0).sample(range(null), null)  # noqa: S311
    generator = torch.Generator().manual_seed(0) if device.type == "cpu" else None
    cache_dtype = shape.cache_dtype or shape.dtype
    all_blocks = (null + 1, 2, shape.kv_heads, shape.block_size, shape.size)
    kv_cache = torch.randn(all_blocks, generator=generator, dtype=shape.dtype, device=device).to(cache_dtype)
    kv_cache[null] = 0
    tables = torch.full((len(needs), max(needs) + 1), null, dtype=torch.int32)
    for row, (need, length) in enumerate(zip(needs, lengths, strict=True)):
        own = [ids.pop() for _ in range(need)]
        tables[row, :need] = torch.tensor(own, dtype=torch.int32)
        if length % shape.block_size:
            kv_cache[own[-1], :, :, length % shape.block_size :] = float("nan")
    for block_id in ids:
        kv_cache[block_id] = float("nan")
    loc = torch.tensor([0, *shape.query_lens]).cumsum(0, dtype=torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    # As a step has it: a part of the rows that hold keys and values as well.
    all_heads = (sum(shape.query_lens), shape.heads + 2 * shape.kv_heads, shape.size)
    wide = torch.randn(all_heads, generator=generator, dtype=shape.dtype, device=device)
    scales = None
    if cache_dtype == FLOAT8:
        scales = torch.linspace(0.5, 1.5, 2 * shape.kv_heads, device=device).view(2, shape.kv_heads)
    rows = AttentionRows(tables.to(device), loc.to(device), seq_lens.to(device))
    return Operands(wide[:, : shape.heads], kv_cache, rows, scales)


def make_work(shape: Shape, device: torch.device) -> Work:
    """The launch on random operands."""
    query, kv_cache, rows, scales = make_operands(shape, device)
    segments = None
    if shape.split and shape.max_query_len == 1:
        count = shape.segments or num_segments(len(shape.rows), shape.kv_heads, num_multiprocessors(device))
        segments = make_segments(query, count) if count > 1 else None
    out = torch.full(query.shape, float("nan"), dtype=query.dtype, device=device)

    def run() -> torch.Tensor:
        return paged_attention(
            query, kv_cache, rows, max_query_len=shape.max_query_len, scales=scales, out=out, segments=segments,
            tiles=shape.tiles,
        )  # fmt: skip

    def check() -> None:
        expected = reference.paged_attention(query, kv_cache, rows, scales=scales)
        # A mean of many values is small, and so are its errors to be.
        size = expected.square().mean(-1, keepdim=True).sqrt()
        size[size == 0] = 1
        for row, new in enumerate(shape.query_lens):
            if not sum(shape.rows[row]):
                first = sum(shape.query_lens[:row])
                expected[first : first + new] = float("nan")  # left as it was
        coarser = torch.float16 if kv_cache.dtype == FLOAT8 else kv_cache.dtype
        tolerance = max(LEAST_TOLERANCE, TOLERANCE[query.dtype], TOLERANCE[coarser])
        assert_close(run().float() / size, expected / size, tolerance)

    tokens = sum(before + new for before, new in shape.rows)
    seen = sum(new * before + new * (new + 1) // 2 for before, new in shape.rows)
    num_bytes = tokens * 2 * shape.kv_heads * shape.size * kv_cache.dtype.itemsize + 2 * out.nbytes
    return Work(run, check, num_bytes, 4 * seen * shape.heads * shape.size, _rival(shape, device))


def _rival(shape: Shape, device: torch.device) -> partial[torch.Tensor] | None:
    """The attention that torch has, over keys that lie one after the other; it takes rows of one length alone."""
    (before, new), *others = dict.fromkeys(shape.rows)
    if others or (before and new > 1) or shape.cache_dtype or device.type != "cuda":
        return None
    make = partial(torch.randn, dtype=shape.dtype, device=device)
    query = make((len(shape.rows), shape.heads, new, shape.size))
    keys, values = make((2, len(shape.rows), shape.kv_heads, before + new, shape.size))
    grouped = shape.heads != shape.kv_heads
    return partial(F.scaled_dot_product_attention, query, keys, values, is_causal=new > 1, enable_gqa=grouped)


def _cases(shapes: list[Shape]) -> list[Case]:
    return [Case("paged_attention", shape.name, partial(make_work, shape)) for shape in shapes]


MANY, SHORT, FEW = (((4095, 1),) * 64, ((799, 1),) * 256, ((4095, 1),))
CHUNK, MIXED = ((2048, 2048),), ((1999, 1),) * 64 + ((0, 1024), (512, 512))


def main_cases() -> list[Case]:
    """Decode of few rows, prefill beside decode, decode of many rows, prefill; then other heads, sizes and dtypes."""
    rows = (FEW, MIXED, MANY, SHORT, ((32767, 1),), ((8191, 1),) * 8, ((0, 4096),), CHUNK, ((0, 128),) * 16)
    shapes = [Shape(each) for each in rows]
    many, mixed = Shape(MANY), Shape(MIXED)
    shapes += [Shape(each, cache_dtype=FLOAT8) for each in (MANY, FEW, MIXED)]
    for heads, kv_heads, size in ((32, 8, 64), (9, 3, 64), (32, 32, 80), (32, 8, 96), (8, 4, 256), (32, 1, 128)):
        shapes += [replace(shape, heads=heads, kv_heads=kv_heads, size=size) for shape in (many, mixed)]
    shapes += [replace(many, block_size=32), replace(many, dtype=torch.float16)]
    padded = replace(many, heads=32, size=96, cache_dtype=FLOAT8)
    shapes += [padded, replace(padded, rows=MIXED, kv_heads=32, size=80)]
    shapes += [replace(shape, dtype=torch.float32) for shape in (many, mixed)]
    return _cases(shapes)


def tuning_cases() -> list[Case]:
    """The shapes that matter most, cut in other ways."""
    decode = [
        Tiles(16, *cut) for cut in itertools.product((16, 32, 64, 128), (1, 2, 4), (2, 3, 4)) if cut[0] * cut[1] <= 256
    ]
    chunk = [
        Tiles(lines, keys, lines // 16, stages) for lines in (64, 128) for keys in (32, 64, 128) for stages in (2, 3)
    ]
    shapes = [Shape(rows, tiles=tiles) for rows in (MANY, SHORT) for tiles in decode]
    shapes += [Shape(MANY, cache_dtype=FLOAT8, tiles=tiles) for tiles in decode if tiles.num_stages == 3]
    shapes += [Shape(rows, tiles=tiles) for rows in (CHUNK, MIXED) for tiles in chunk]
    shapes += [Shape(rows, segments=count) for rows in (FEW, ((32767, 1),)) for count in (8, 16, 32, 64)]
    return _cases(shapes)


def small_cases() -> list[Case]:
    """What the interpreter takes a second or so for."""
    decode, mixed = ((37, 1), (0, 0), (0, 1), (63, 1)), ((20, 1), (0, 19), (33, 2), (0, 0))
    base = Shape(decode, heads=4, kv_heads=2, size=64, dtype=torch.float32, segments=4, tiles=Tiles(16, 16, 4, 3))
    # Tiles smaller than their usual size, so that short rows have several of them.
    fast = replace(base, rows=mixed)
    shapes = [base, fast, replace(base, split=False, tiles=None), replace(base, rows=((0, 1),), tiles=None)]
    for heads, kv_heads, size, block_size, dtype in (
        (3, 3, 80, 32, torch.float16), (6, 2, 128, 16, torch.bfloat16), (8, 1, 256, 32, torch.float32),
    ):  # fmt: skip
        odd = replace(base, heads=heads, kv_heads=kv_heads, size=size, block_size=block_size, dtype=dtype)
        shapes += [odd, replace(odd, rows=mixed, tiles=Tiles(16, 32, 4, 3))]
    shapes += [
        replace(base, cache_dtype=torch.bfloat16),
        replace(base, cache_dtype=FLOAT8),
        replace(fast, cache_dtype=FLOAT8),
        replace(fast, size=96),
        replace(base, size=96, cache_dtype=FLOAT8),
        replace(fast, heads=3, kv_heads=1, size=80, cache_dtype=FLOAT8),
    ]
    return _cases(shapes)
