"""Writes into a cache whose blocks lie so far from its start that the way there does not fit into 32 bits."""

from __future__ import annotations

import torch

from kernels import reference
from kernels.bench.cases import assert_close
from kernels.gpu.block_copy import copy_blocks
from kernels.gpu.rope_kv import rope_kv_write
from tests.kernels.far import FAR_BYTES, far

BLOCK = (2, 1, 16, 64)
NUM_BLOCKS = 3


def check_far_keys_and_values() -> int:
    """One token of each block, and one that is written nowhere; gives the number of cases."""
    kv_cache = torch.zeros(NUM_BLOCKS, *BLOCK)
    qkv, rotations = torch.randn(4, 4, BLOCK[-1]), torch.randn(9, BLOCK[-1] // 2, 2)
    positions, slots = torch.tensor([[8, 0, 3, 5], [3, 47, -1, 16]], dtype=torch.int32)
    expected, plain = kv_cache.clone(), qkv.clone()
    reference.rope_kv_write(plain, rotations, positions, expected, slots)
    behind = FAR_BYTES // kv_cache[0].nbytes * BLOCK[2]
    rope_kv_write(qkv, rotations, positions, far(kv_cache), torch.where(slots < 0, slots, slots + behind))
    assert_close(qkv, plain, 1e-5)
    assert_close(kv_cache, expected, 1e-5)
    return 1


def check_far_copies() -> int:
    """The first block over the last; gives the number of cases."""
    kv_cache = torch.randn(NUM_BLOCKS, *BLOCK)
    sources, destinations = torch.tensor([[0], [NUM_BLOCKS - 1]], dtype=torch.int32)
    expected = kv_cache.clone()
    reference.copy_blocks(expected, sources, destinations)
    behind = FAR_BYTES // kv_cache[0].nbytes
    copy_blocks(far(kv_cache), sources + behind, destinations + behind)
    assert_close(kv_cache, expected, 0.0)
    return 1
