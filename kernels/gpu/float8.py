"""The cache's eight-bit floats (e4m3) in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unpack_pairs(pairs: tl.tensor, NATIVE: tl.constexpr) -> tl.tensor:
    """The eight-bit floats (e4m3) in the low halves of whole numbers, and those in the high halves.

    Two by two because products' operands come out of shared memory in 16 bits; eight would be fetched one by one.

    Args:
        pairs: int16.
        NATIVE: with the instruction that NVIDIA has from sm_89 on.

    Returns:
        Two tensors of float16.
    """
    if NATIVE:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b16 first, second;
            .reg .b32 wide_first, wide_second;
            mov.b32 {first, second}, $2;
            cvt.rn.f16x2.e4m3x2 wide_first, first;
            cvt.rn.f16x2.e4m3x2 wide_second, second;
            prmt.b32 $0, wide_first, wide_second, 0x5410;
            prmt.b32 $1, wide_first, wide_second, 0x7632;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        # Sign, exponent and mantissa in their places; the exponents' biases differ by eight.
        low = (((pairs << 8) & -32768) | ((pairs << 7) & 0x3F80)).to(tl.float16, bitcast=True) * 256.0
        high = ((pairs & -32768) | ((pairs >> 1) & 0x3F80)).to(tl.float16, bitcast=True) * 256.0
    return low, high
