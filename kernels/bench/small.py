"""Cases of the small operations of a layer, of a step's inputs, and of block copies."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from kernels import reference
from kernels.bench.cases import TOLERANCE, Case, Work, assert_close
from kernels.gpu.activation import silu_mul
from kernels.gpu.block_copy import copy_blocks
from kernels.gpu.inputs import TokenInputs, append_tokens, apply_changes, gather_inputs
from kernels.gpu.norm import add_rms_norm, rms_norm
from kernels.gpu.rope_kv import rope_kv_write

NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
FLOAT8 = torch.float8_e4m3fn
EPS = 1e-5


def _randn(size: tuple[int, ...], dtype: torch.dtype, device: torch.device, gap: int = 0) -> torch.Tensor:
    """Random numbers whose rows lie `gap` elements apart, with NaN between them."""
    wide = torch.full((*size[:-1], size[-1] + gap), float("nan"), dtype=dtype, device=device)
    wide[..., : size[-1]] = torch.randn(size, device=device).to(dtype)
    return wide[..., : size[-1]]


def _check_output(out: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Right, and nothing was written between the rows."""
    assert_close(out, expected, tolerance)
    rows, columns = out.shape
    between = out.as_strided((max(0, rows - 1), out.stride(0) - columns), out.stride(), out.storage_offset() + columns)
    if not between.isnan().all():
        raise AssertionError("wrote beyond a row")


def make_rms_norm(size: tuple[int, int], dtype: torch.dtype, gap: int, adds: bool, device: torch.device) -> Work:
    """Alone, or behind the sum of a float32 residual stream; the output's rows lie apart too."""
    x, weight = _randn(size, dtype, device, gap), torch.randn(size[1], device=device).to(dtype)
    residual = _randn(size, torch.float32, device, gap)
    out = _randn(size, dtype, device, gap).fill_(float("nan"))
    tolerance = TOLERANCE[dtype]
    if not adds:
        run = partial(rms_norm, x, weight, EPS, out)

        def check() -> None:
            _check_output(run(), reference.rms_norm(x, weight, EPS), tolerance)

        rival = partial(F.rms_norm, x, (size[1],), weight, EPS)
        return Work(run, check, 2 * x.nbytes, rival=rival)
    both = partial(add_rms_norm, x, residual, weight, EPS, out)

    def check_both() -> None:
        stream = residual.clone()
        expected = reference.add_rms_norm(x, stream, weight, EPS)
        _check_output(both(), expected, tolerance)
        assert_close(residual, stream, TOLERANCE[torch.float32])

    return Work(both, check_both, 2 * x.nbytes + 2 * residual.nbytes)


def make_silu_mul(size: tuple[int, int], dtype: torch.dtype, gap: int, device: torch.device) -> Work:
    """Of so many rows and outputs."""
    gate_up = _randn((size[0], 2 * size[1]), dtype, device, gap)
    out = _randn(size, dtype, device, gap).fill_(float("nan"))
    run = partial(silu_mul, gate_up, out)

    def check() -> None:
        _check_output(run(), reference.silu_mul(gate_up), TOLERANCE[dtype])

    return Work(run, check, gate_up.nbytes + out.nbytes)


def make_rope_kv_write(
    num_tokens: int,
    heads: tuple[int, int, int],
    block_size: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
) -> Work:
    """Tokens with so many heads, key heads and elements; every fifth is written nowhere."""
    num_heads, kv_heads, size = heads
    dtype, cache_dtype = dtypes
    line = (num_heads + 2 * kv_heads) * size
    qkv = _randn((num_tokens, line), dtype, device, 16).unflatten(1, (-1, size))
    num_blocks = num_tokens // block_size + 2
    kv_cache = torch.full((num_blocks, 2, kv_heads, block_size, size), float("nan"), device=device).to(cache_dtype)
    rotations = torch.randn((4 * num_tokens + 1, size // 2, 2), device=device)
    scales = None
    if cache_dtype == FLOAT8:
        # Quarter turns of small whole numbers are eight-bit floats already: of Triton's interpreter, whose rounding
        # up to a power of two forgets the carry, nothing else can be asked.
        qkv.copy_((4 * qkv).round().clamp(-8, 8))
        rotations = F.one_hot((rotations[..., 0] > 0).long(), 2).float()
        scales = torch.tensor([0.5, 2.0], device=device).repeat(kv_heads).view(2, kv_heads)
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=device)
    positions = tokens * 3
    slots = torch.where(tokens % 5 == 4, -1, num_blocks * block_size - 1 - tokens).to(torch.int32)
    run = partial(rope_kv_write, qkv, rotations, positions, kv_cache, slots, scales=scales)

    def check() -> None:
        plain, cache = qkv.clone(), kv_cache.clone()
        reference.rope_kv_write(plain, rotations, positions, cache, slots, scales=scales)
        run()
        assert_close(qkv, plain, TOLERANCE[dtype])
        tolerance = 0.0 if cache_dtype == FLOAT8 else max(TOLERANCE[dtype], TOLERANCE[cache_dtype])
        assert_close(kv_cache.float(), cache.float(), tolerance)

    written = num_tokens * 2 * kv_heads * size * kv_cache.dtype.itemsize
    return Work(run, check, qkv.nbytes + num_tokens * num_heads * size * qkv.itemsize + written)


def make_gather_inputs(rows: tuple[tuple[int, int], ...], context: int, block_size: int, device: torch.device) -> Work:
    """Rows of (start, tokens) on seats in the opposite order; every fourth stands for nothing."""
    count = len(rows)
    token_ids = torch.arange(count * context, dtype=torch.int32).view(count, context).to(device)
    num_blocks = -(-context // block_size)
    tables = torch.arange(count * num_blocks, dtype=torch.int32).flip(0).view(count, num_blocks).to(device)
    seats = [-1 if row % 4 == 3 else count - 1 - row for row in range(count)]
    starts, lengths = zip(*rows, strict=True)
    loc = [sum(lengths[:row]) for row in range(count + 1)]
    columns = [torch.tensor(column, dtype=torch.int32, device=device) for column in (seats, starts, loc)]
    out = TokenInputs(*[torch.full((loc[-1],), -7, dtype=torch.int32, device=device) for _ in range(3)])
    run = partial(
        gather_inputs, token_ids, tables, *columns, block_size=block_size, max_query_len=max(lengths), out=out
    )

    def check() -> None:
        expected: list[tuple[int, int, int]] = []
        for seat, start, length in zip(seats, starts, lengths, strict=True):
            for position in range(start, start + length):
                slot = int(tables[seat, position // block_size]) * block_size + position % block_size
                found = (int(token_ids[seat, position]), position, slot)
                expected.append(found if seat >= 0 else (0, 0, -1))
        gathered = list(zip(*[column.tolist() for column in run()], strict=True))
        if gathered != expected:
            raise AssertionError(f"gathered {gathered} and not {expected}")

    return Work(run, check, loc[-1] * 5 * 4)


def make_apply_changes(count: int, device: torch.device) -> Work:
    """So many numbers of three times as many."""
    state = torch.arange(3 * count, dtype=torch.int32, device=device)
    places = torch.arange(count - 1, -1, -1, dtype=torch.int32, device=device) * 3 + 1
    values = -places
    run = partial(apply_changes, state, places, values)

    def check() -> None:
        expected = state.clone()
        expected[places.long()] = values
        run()
        assert_close(state, expected, 0.0)

    return Work(run, check, 12 * count)


def make_append_tokens(count: int, context: int, device: torch.device) -> Work:
    """A token a row, of which every fourth stands for nothing and every fifth drew none."""
    token_ids = torch.full((count, context), -7, dtype=torch.int32, device=device)
    rows = torch.arange(count, dtype=torch.int32, device=device)
    seats, positions = count - 1 - rows, torch.where(rows % 4 == 3, -1, rows % context).to(torch.int32)
    drawn = torch.where(rows % 5 == 4, -1, rows * 3).to(torch.int32)
    run = partial(append_tokens, token_ids, seats, positions, drawn)

    def check() -> None:
        expected = token_ids.clone()
        for seat, position, token_id in zip(seats.tolist(), positions.tolist(), drawn.tolist(), strict=True):
            if position >= 0:
                expected[seat, position] = max(0, token_id)
        run()
        assert_close(token_ids, expected, 0.0)

    return Work(run, check, 16 * count)


def make_copy_blocks(count: int, block: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Work:
    """The first blocks over the last ones."""
    kv_cache = torch.randn((2 * count + 1, *block), device=device).to(dtype)
    sources = torch.arange(count, dtype=torch.int32, device=device)
    destinations = 2 * count - sources
    run = partial(copy_blocks, kv_cache, sources, destinations)

    def check() -> None:
        expected = kv_cache.clone()
        reference.copy_blocks(expected, sources, destinations)
        run()
        assert_close(kv_cache.float(), expected.float(), 0.0)

    return Work(run, check, 2 * kv_cache[:count].nbytes)


def main_cases() -> list[Case]:
    """A decode step of many rows and of one, and a chunk, of Llama's and Qwen's shapes."""
    bf16 = torch.bfloat16
    cases = []
    for tokens in (1, 256, 2048):
        for width in (1024, 4096):
            for adds in (False, True):
                name = "add_rms_norm" if adds else "rms_norm"
                cases.append(
                    Case(name, f"{tokens} × {width}, bf16", partial(make_rms_norm, (tokens, width), bf16, 0, adds))
                )
        cases.append(Case("silu_mul", f"{tokens} × 3072, bf16", partial(make_silu_mul, (tokens, 3072), bf16, 0)))
        cases.append(Case("silu_mul", f"{tokens} × 14336, bf16", partial(make_silu_mul, (tokens, 14336), bf16, 0)))
        for heads in ((16, 8, 128), (32, 8, 64)):
            shape = f"{tokens} tokens, {heads[0]}/{heads[1]} × {heads[2]}, bf16"
            cases.append(Case("rope_kv_write", shape, partial(make_rope_kv_write, tokens, heads, 16, (bf16, bf16))))
    shape = "256 tokens, 16/8 × 128, bf16, fp8 cache"
    cases.append(Case("rope_kv_write", shape, partial(make_rope_kv_write, 256, (16, 8, 128), 16, (bf16, FLOAT8)), 89))
    decode, mixed = ((799, 1),) * 256, (*((799, 1),) * 64, (0, 1024))
    for name, rows in (("256 × 1", decode), ("64 × 1 + 1024", mixed)):
        cases.append(Case("gather_inputs", name, partial(make_gather_inputs, rows, 1824, 16)))
    cases.append(Case("apply_changes", "8192", partial(make_apply_changes, 8192)))
    cases.append(Case("append_tokens", "256", partial(make_append_tokens, 256, 1824)))
    cases.append(
        Case("copy_blocks", "64 of 2 × 8 × 16 × 128, bf16", partial(make_copy_blocks, 64, (2, 8, 16, 128), bf16))
    )
    return cases


def small_cases() -> list[Case]:
    """Odd and ragged ones."""
    cases = []
    for dtype, name in NAMES.items():
        for size, gap in (((0, 8), 0), ((1, 1), 5), ((3, 37), 0), ((5, 576), 3)):
            for adds in (False, True):
                kernel = "add_rms_norm" if adds else "rms_norm"
                cases.append(Case(kernel, f"{size}, {name}", partial(make_rms_norm, size, dtype, gap, adds)))
            cases.append(Case("silu_mul", f"{size}, {name}", partial(make_silu_mul, size, dtype, gap)))
        for heads, block_size in (((3, 1, 64), 16), ((4, 4, 80), 32), ((1, 1, 2), 1)):
            for cache_dtype in (dtype, torch.float32, FLOAT8):
                make = partial(make_rope_kv_write, 6, heads, block_size, (dtype, cache_dtype))
                cases.append(Case("rope_kv_write", f"{heads}, {name}, {cache_dtype}", make))
        cases.append(Case("copy_blocks", f"3, {name}", partial(make_copy_blocks, 3, (2, 1, 3, 7), dtype)))
    for rows in (((5, 1), (0, 1), (17, 1), (3, 1), (31, 1)), ((4, 3), (0, 20), (9, 1), (2, 2), (30, 2))):
        cases.append(Case("gather_inputs", f"{rows}", partial(make_gather_inputs, rows, 33, 16)))
    cases.append(Case("apply_changes", "1030", partial(make_apply_changes, 1030)))
    cases.append(Case("append_tokens", "130", partial(make_append_tokens, 130, 7)))
    return cases
