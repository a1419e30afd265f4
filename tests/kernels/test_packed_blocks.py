"""Quantized matrices in the order of the Triton kernels: nothing is lost on the way there."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import blocks as plain
from kernels.blocks import Blocks
from kernels.packed_blocks import pack, stack

CPU = torch.device("cpu")
BITS = st.sampled_from([4, 5, 6, 8])
COLS = st.sampled_from([32, 64, 96, 128, 192, 384])


def random_blocks(bits: int, rows: int, cols: int, seed: int) -> Blocks:
    """Any codes, the smallest and the largest of them for sure."""
    generator = np.random.default_rng(seed)
    least, signed = (-(1 << bits - 1), True) if bits in (6, 8) else (0, False)
    most = least + (1 << bits) - 1
    codes = generator.integers(least, most, (rows, cols), endpoint=True).astype(np.int8 if signed else np.uint8)
    codes[0, :2] = least, most
    groups = rows, cols // (16 if bits == 6 else 32)
    scales = generator.standard_normal(groups).astype(np.float16)
    return Blocks(bits, codes, scales, None if signed else generator.standard_normal(groups).astype(np.float16))


@settings(deadline=None, max_examples=25)
@given(BITS, st.integers(1, 130), COLS, st.integers(0, 99))
def test_a_packed_matrix_is_the_matrix(bits: int, rows: int, cols: int, seed: int) -> None:
    blocks = random_blocks(bits, rows, cols, seed)
    packed = pack(blocks, CPU)
    assert torch.equal(packed.dequantize(), blocks.dequantize())
    # The kernels walk over it as over one run of memory.
    assert all(part.is_contiguous() for part in (packed.codes, packed.planes, packed.scales))


@settings(deadline=None, max_examples=25)
@given(BITS, st.lists(st.integers(1, 90), min_size=1, max_size=4), COLS)
def test_stacked_matrices_of_a_kind_are_one_below_the_other(bits: int, heights: list[int], cols: int) -> None:
    parts = [random_blocks(bits, rows, cols, seed) for seed, rows in enumerate(heights)]
    stacked = stack([pack(part, CPU) for part in parts])
    together = torch.cat([part.dequantize() for part in stacked])
    assert torch.equal(together, plain.stack(parts).dequantize())


def test_matrices_of_one_kind_and_whole_tiles_become_one_without_waste() -> None:
    parts = [pack(random_blocks(4, rows, 128, rows), CPU) for rows in (48, 16, 64)]
    (matrix,) = stack(parts)
    assert (matrix.rows, matrix.codes.shape[0]) == (128, 8)
    assert matrix.nbytes == 128 * 128 * 5 // 8
    other = pack(random_blocks(6, 32, 128, 0), CPU)
    assert [part.bits for part in stack([matrix, other, other])] == [4, 6]
