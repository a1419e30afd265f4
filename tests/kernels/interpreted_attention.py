"""The attention where numbers grow large: what the small cases do not reach."""

from __future__ import annotations

import itertools

import torch

from kernels import reference
from kernels.bench.attention import FLOAT8, Shape, make_operands
from kernels.bench.cases import assert_close
from kernels.gpu.attention import MAX_SEGMENTS, choose_tiles, num_segments, paged_attention
from tests.kernels.far import FAR_BYTES, far


def check_huge_block_ids() -> int:
    """Blocks so far from the cache's start that the way there does not fit into 32 bits; gives the number of cases."""
    shapes = [Shape(rows, 2, 1, 64, dtype=torch.float32) for rows in (((20, 1), (5, 1)), ((3, 17), (15, 1)))]
    for shape in shapes:
        query, kv_cache, rows, _ = make_operands(shape, torch.device("cpu"))
        expected = reference.paged_attention(query, kv_cache, rows)
        behind = FAR_BYTES // kv_cache[0].nbytes
        rows = rows._replace(block_tables=rows.block_tables + behind)
        assert_close(paged_attention(query, far(kv_cache), rows, max_query_len=shape.max_query_len), expected, 1e-5)
    return len(shapes)


def check_many_rows() -> int:
    """More rows than a program looks at in one go, some of them without tokens; gives the number of cases."""
    shape = Shape(((0, 0),) * 256 + ((0, 2), (7, 1)), 1, 1, 16, dtype=torch.float32)
    query, kv_cache, rows, _ = make_operands(shape, torch.device("cpu"))
    result = paged_attention(query, kv_cache, rows, max_query_len=2)
    assert_close(result, reference.paged_attention(query, kv_cache, rows), 1e-5)
    return 1


def check_eight_bit_floats() -> int:
    """Each of them is read for what it is: a row of one token gives its value; gives the number of cases."""
    shape = Shape(((0, 1),), 1, 1, 256, dtype=torch.float16, cache_dtype=FLOAT8)
    query, kv_cache, rows, _ = make_operands(shape, torch.device("cpu"))
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes % 128 == 127] = 0  # those two are no numbers
    kv_cache[rows.block_tables[0, 0], 1, 0, 0] = codes.view(FLOAT8)
    result = paged_attention(query, kv_cache, rows, max_query_len=1)
    assert torch.equal(result[0, 0], codes.view(FLOAT8).to(torch.float16))
    return 1


def check_cuts() -> int:
    """Segments fill a device and no more; a program has room for all heads of a group; gives the number of cases."""
    for rows, kv_heads in itertools.product(range(1, 300), (1, 2, 3, 8, 32)):
        count, room = num_segments(rows, kv_heads, 132), 2 * 132
        assert count == 1 or rows * kv_heads * count <= room
        assert count == MAX_SEGMENTS or rows * kv_heads * 2 * count > room
    dtypes = (torch.float32, torch.bfloat16, FLOAT8)
    memories = (65_536, 101_376, 232_448)
    shapes = list(itertools.product((1, 3, 8, 32, 64), (64, 80, 256), dtypes, (False, True), memories))
    for group, head_size, dtype, decode, shared_bytes in shapes:
        tiles = choose_tiles(group, head_size, dtype, decode=decode, shared_bytes=shared_bytes)
        assert tiles.lines >= max(16, group)
        assert 16 <= tiles.keys <= 128
        assert tiles.keys * head_size * dtype.itemsize <= 32768
    return len(shapes)
