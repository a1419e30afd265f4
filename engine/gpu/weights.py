"""Matrices on a GPU, as floats or in blocks: their products, and their rows for a lookup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from engine.models.rope import pair_neighbours
from kernels.blocks import as_blocks
from kernels.gpu.quantized import quantized_linear, quantized_rows
from kernels.packed_blocks import PackedBlocks, pack, stack

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kernels.blocks import Blocks


class Matrix(Protocol):
    """[out, in]."""

    @property
    def nbytes(self) -> int:
        """Of the device's memory, all of which a product reads."""
        ...

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] → [N, out] in x's dtype."""
        ...

    def scores(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The product in `out`, [N, out] float32."""
        ...

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """[N] int32 → [N, in] float32."""
        ...


class Floats:
    """A matrix in the model's dtype."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    @property
    def nbytes(self) -> int:
        """See `Matrix`, here and below."""
        return self.weight.nbytes

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """By torch."""
        return F.linear(x, self.weight)

    def scores(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Rounded to x's dtype before."""
        return out.copy_(F.linear(x, self.weight))

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """By torch."""
        return F.embedding(ids, self.weight).float()


class Quantized:
    """Blocks, one matrix below the other; what could be made one is one."""

    def __init__(self, parts: list[PackedBlocks]) -> None:
        self.parts = parts

    @property
    def nbytes(self) -> int:
        """See `Matrix`, here and below."""
        return sum(part.nbytes for part in self.parts)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Weights are rounded to x's dtype."""
        rows = sum(part.rows for part in self.parts)
        return self.scores(x, torch.empty((x.shape[0], rows), dtype=x.dtype, device=x.device))

    def scores(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Weights are rounded to x's dtype, sums to that of `out`."""
        columns = out.split([part.rows for part in self.parts], dim=1)
        for part, places in zip(self.parts, columns, strict=True):
            quantized_linear(x, part, places)
        return out

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Of a matrix that is in one piece."""
        (matrix,) = self.parts
        return quantized_rows(matrix, ids)


class Loading:
    """Weights on their way to a device: each goes there as it comes, so that the machine never holds all of them.

    Args:
        weights: under their Hugging Face names, each once.
        dtype: of what comes as floats.
        head_size: of the heads, within which rows of queries and keys are reordered.
    """

    def __init__(
        self,
        weights: Iterable[tuple[str, torch.Tensor | Blocks]],
        *,
        dtype: torch.dtype,
        device: torch.device,
        head_size: int,
    ) -> None:
        self._there = {name: self._bring(name, weight, dtype, device, head_size) for name, weight in weights}

    def vector(self, name: str) -> torch.Tensor:
        """Take a vector."""
        weight = self._there.pop(f"{name}.weight")
        if not isinstance(weight, torch.Tensor):
            raise TypeError(f"{name} is a matrix")
        return weight

    def matrix(self, *names: str) -> Matrix:
        """Take matrices, one below the other, all floats or all in blocks."""
        parts = [self._there.pop(f"{name}.weight") for name in names]
        blocks = [part for part in parts if isinstance(part, PackedBlocks)]
        if blocks:
            return Quantized(stack(blocks))
        floats = [part for part in parts if isinstance(part, torch.Tensor)]
        return Floats(floats[0] if len(floats) == 1 else torch.cat(floats))

    @staticmethod
    def _bring(
        name: str, weight: torch.Tensor | Blocks, dtype: torch.dtype, device: torch.device, head_size: int
    ) -> torch.Tensor | PackedBlocks:
        turned = name.endswith(("q_proj.weight", "k_proj.weight"))
        if isinstance(weight, torch.Tensor):
            weight = weight.to(device, dtype)
            return pair_neighbours(weight, head_size) if turned else weight
        if turned:
            order = pair_neighbours(torch.arange(weight.shape[0])[:, None], head_size)
            weight = weight.take(order.flatten().numpy())
        return pack(weight, device)


def in_blocks(
    weights: Iterable[tuple[str, torch.Tensor | Blocks]], *, eight_bits: bool
) -> Iterator[tuple[str, torch.Tensor | Blocks]]:
    """Every matrix in blocks: its own, or of eight bits where it has none or all are to be that."""
    for name, weight in weights:
        if isinstance(weight, torch.Tensor) and weight.dim() == 1:
            yield name, weight
        else:
            given = weight.cpu() if isinstance(weight, torch.Tensor) else weight
            yield name, as_blocks(given, eight_bits=eight_bits)
