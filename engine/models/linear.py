"""Matrix products with fixed weights, in the way that is fastest for the dtype on this processor.

Activations are float32 everywhere; only weights and KV cache take the dtype that was asked for.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from kernels.reference import quantize_activations

# Weights are packed for about this many rows: what a decode step has. Other sizes run as well.
PACKED_ROWS = 16

# Up to this many rows a product with bfloat16 weights is bound by reading them, even in emulated arithmetic.
FEW_ROWS = 4


class Linear(Protocol):
    """x [N, in] float32 → [N, out] float32."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product."""
        ...


class PlainLinear:
    """float32 weights as they are."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product: x [N, in] → [N, out]."""
        return F.linear(x, self.weight)


class PackedLinear:
    """float32 weights in the order in which oneDNN's kernel walks them: up to twice as fast as packing in each call."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_ROWS)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product: x [N, in] → [N, out]."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, None, "none", [], "")
        return result


class Bfloat16Linear:
    """bfloat16 weights on a processor that multiplies them."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product: x [N, in] → [N, out]."""
        return F.linear(x.bfloat16(), self.weight).float()


class WidenedLinear:
    """16-bit weights on a processor without such arithmetic: widened to float32 for each larger product.

    Args:
        weight: [out, in] bfloat16 or float16.
        scratch: float32 elements shared by all products; as many as the largest weight has, or fewer: a larger
            weight is then widened in slices.
    """

    def __init__(self, weight: torch.Tensor, scratch: torch.Tensor) -> None:
        self.weight = weight
        self.slices = torch.split(weight, max(1, scratch.numel() // weight.shape[1]))
        self.scratch = scratch

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product: x [N, in] → [N, out]."""
        if x.shape[0] <= FEW_ROWS and self.weight.dtype is torch.bfloat16:
            return F.linear(x.bfloat16(), self.weight).float()
        results = []
        for part in self.slices:
            wide = self.scratch[: part.numel()].view(part.shape).copy_(part)
            results.append(F.linear(x, wide))
        return results[0] if len(results) == 1 else torch.cat(results, dim=1)


class EightBitLinear:
    """Another product after its activations were quantized: the plain form of what the native kernels compute."""

    def __init__(self, product: Linear) -> None:
        self.product = product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product: x [N, in] → [N, out]."""
        return self.product(quantize_activations(x))


class LinearFactory:
    """Chooses the kind of product for a model.

    Args:
        dtype: of the weights: float32, bfloat16 or float16.
        eight_bits: quantize activations.
    """

    # Slices of this many elements stay in a second- or third-level cache between widening and multiplying.
    SCRATCH_ELEMENTS = 2 << 20

    def __init__(self, dtype: torch.dtype, *, eight_bits: bool = False) -> None:
        self.dtype, self._eight_bits = dtype, eight_bits
        self._scratch = torch.empty(0 if dtype is torch.float32 else self.SCRATCH_ELEMENTS)
        self._packs = dtype is torch.float32 and can_pack()

    def __call__(self, weight: torch.Tensor) -> Linear:
        """A product with `weight` [out, in]; the caller's tensor is not needed afterwards."""
        weight = weight.to(self.dtype)
        if self.dtype is torch.bfloat16 and multiplies_bfloat16():
            return Bfloat16Linear(weight)
        if self.dtype is not torch.float32:
            return WidenedLinear(weight, self._scratch)
        product = PackedLinear(weight) if self._packs else PlainLinear(weight)
        return EightBitLinear(product) if self._eight_bits else product


def can_pack() -> bool:
    """Whether this build of torch has oneDNN's packed products."""
    try:
        PackedLinear(torch.zeros(16, 16))(torch.zeros(1, 16))
    except (AttributeError, RuntimeError):  # there is no such operator, or none for this processor
        return False
    return True


def multiplies_bfloat16() -> bool:
    """Whether this processor has bfloat16 products of its own."""
    cpu = torch.backends.cpu.get_cpu_capability()
    if cpu.startswith("SVE") or torch.cpu._is_amx_tile_supported():
        return True
    return bool(torch.cpu._is_avx512_bf16_supported())
