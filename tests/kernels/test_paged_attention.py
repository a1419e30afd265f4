"""Attention over the paged cache, and the small operations, against their plain versions."""

from __future__ import annotations

import random

import pytest
import torch

from kernels import cpu, reference
from kernels.paged_attention import AttentionRows, Workspace, paged_attention, plan_attention, split_rows

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def make_case(
    rows: list[tuple[int, int]], *, heads: int, kv_heads: int, size: int, block_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, AttentionRows]:
    """Query, cache and tables of rows (tokens before, new tokens); what no row owns is NaN, the null block zero."""
    rows = sorted(rows, key=lambda row: (row[1] > 1, -(row[0] + row[1])))
    lengths = [before + new for before, new in rows]
    needs = [-(-length // block_size) for length in lengths]
    num_blocks = sum(needs) + 3
    ids = random.Random(len(rows)).sample(range(num_blocks), sum(needs))
    generator = torch.Generator().manual_seed(1)
    kv_cache = torch.full((num_blocks + 1, 2, kv_heads, block_size, size), float("nan"), dtype=dtype)
    kv_cache[num_blocks] = 0
    tables = torch.full((len(rows), max(needs)), num_blocks)
    for row, need in enumerate(needs):
        tables[row, :need] = torch.tensor([ids.pop() for _ in range(need)])
        shape = (need, 2, kv_heads, block_size, size)
        kv_cache[tables[row, :need]] = torch.randn(shape, generator=generator).to(dtype)
    loc = torch.tensor([0] + [new for _, new in rows]).cumsum(0)
    query = torch.randn(int(loc[-1]), heads, size, generator=generator)
    return query, kv_cache, AttentionRows(tables, loc, torch.tensor(lengths))


def attend(query: torch.Tensor, kv_cache: torch.Tensor, rows: AttentionRows) -> torch.Tensor:
    return paged_attention(query, kv_cache, plan_attention(rows, kv_cache, Workspace()))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (9, 3), (8, 1)])
@pytest.mark.parametrize(
    "rows",
    [
        [(0, 1)],
        [(299, 1), (0, 1), (150, 1), (149, 1), (15, 1)],
        [(0, 16), (0, 17), (5, 3)],
        [(40, 1), (7, 1), (0, 33), (31, 2), (16, 16)],
    ],
    ids=["first token", "decode", "prefill", "mixed"],
)
def test_attention_is_that_of_the_reference(
    rows: list[tuple[int, int]], heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    case = make_case(rows, heads=heads, kv_heads=kv_heads, size=16, block_size=16, dtype=dtype)
    result, expected = attend(*case), reference.paged_attention(*case)
    torch.testing.assert_close(result, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_a_strided_query_is_fine() -> None:
    query, kv_cache, rows = make_case([(9, 1), (3, 5)], heads=4, kv_heads=2, size=8, block_size=4, dtype=torch.float32)
    wide = torch.full((query.shape[0], 7, 8), float("nan"))
    wide[:, :4] = query
    expected = attend(query, kv_cache, rows)
    torch.testing.assert_close(attend(wide[:, :4], kv_cache, rows), expected)


def test_groups_are_neither_too_uneven_nor_too_large() -> None:
    lengths = sorted([1, 5, 127, 128, 300, 310, 310, 310, 700, 8000, 8000], reverse=True)
    ranges = split_rows(lengths, 1000)
    assert [first for first, _ in ranges[1:]] == [last for _, last in ranges[:-1]]
    assert (ranges[0][0], ranges[-1][1]) == (0, len(lengths))
    for first, last in ranges:
        assert lengths[first] <= max(128, 2 * lengths[last - 1])
        assert last - first == 1 or (last - first) * lengths[first] <= 1000
    assert len(ranges) == 6
    assert split_rows([], 1000) == []


@pytest.mark.parametrize("shape", [(1, 5), (7, 64), (16, 576)])
def test_norm_and_activation(shape: tuple[int, int]) -> None:
    x, weight = torch.randn(shape) * 3, torch.randn(shape[1])
    torch.testing.assert_close(cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    both = torch.randn(shape[0], 2 * shape[1])
    expected = reference.silu_mul(both)
    torch.testing.assert_close(cpu.silu_mul(both), expected)


def test_rope_keeps_lengths_and_matches_the_reference() -> None:
    x = torch.randn(5, 3, 8)
    rotation = torch.polar(torch.ones(5, 4), torch.randn(5, 4))
    expected = reference.rope(x, rotation)
    torch.testing.assert_close(expected.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(cpu.rope(x, rotation), expected)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_writing_touches_the_named_places_alone(dtype: torch.dtype) -> None:
    kv = torch.randn(3, 2, 2, 8)
    block_ids, offsets = torch.tensor([4, 0, 1]), torch.tensor([1, 0, 2])
    caches = [torch.full((5, 2, 2, 4, 8), 7.0, dtype=dtype) for _ in range(2)]
    cpu.kv_write(kv, caches[0], block_ids, offsets)
    reference.kv_write(kv, caches[1], block_ids, offsets)
    assert torch.equal(caches[0], caches[1])
    assert (caches[0] == 7).sum() == (20 - 3) * 2 * 2 * 8
