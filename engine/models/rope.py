"""Rotary position embedding: angles, and the order of weight rows that it wants."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from engine.errors import UnsupportedModelError

if TYPE_CHECKING:
    from engine.models.config import RopeConfig


def rotation_table(config: RopeConfig, head_size: int, num_positions: int) -> torch.Tensor:
    """The rotation of every pair at every position: [num_positions, head_size / 2] complex64, unit length."""
    frequencies = rope_frequencies(config, head_size)
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def rope_frequencies(config: RopeConfig, head_size: int) -> torch.Tensor:
    """Radians per position of each pair: [head_size / 2] float64.

    Raises:
        UnsupportedModelError: the kind is not known.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
    frequencies = config.theta**-exponents
    if config.kind == "default":
        return frequencies
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        # Turns a pair makes within the context of the first training: many are kept, few are stretched.
        turns = config.original_context * frequencies / (2 * math.pi)
        span = config.high_freq_factor - config.low_freq_factor
        kept = ((turns - config.low_freq_factor) / span).clamp(0, 1)
        return frequencies * kept + frequencies / config.factor * (1 - kept)
    raise UnsupportedModelError(f"RoPE kind {config.kind!r} is not supported: default, linear and llama3 are.")


def neighbour_order(head_size: int) -> torch.Tensor:
    """Where the rows of a head are taken from so that half-split pairs become neighbours: [head_size] int64."""
    return torch.arange(head_size).view(2, -1).T.flatten()


def pair_neighbours(weight: torch.Tensor, head_size: int) -> torch.Tensor:
    """Reorder the rows of a query or key matrix from half-split to neighbouring pairs.

    Both orders give the same scores, as queries and keys are reordered alike; neighbours rotate as complex numbers.

    Args:
        weight: [heads * head_size, in].
    """
    heads = weight.view(-1, head_size, weight.shape[1])
    return heads[:, neighbour_order(head_size)].view(weight.shape)
