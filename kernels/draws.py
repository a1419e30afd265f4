"""What the operations on logits are given."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class SamplingColumns(NamedTuple):
    """How each seat samples.

    Attributes:
        temperature: [seats] float32; 0 takes the likeliest token.
        top_k: [seats] int32; 0 keeps all.
        top_p: [seats] float32; 1 keeps all.
        min_p: [seats] float32, relative to the likeliest token; 0 keeps all.
        keys: [seats, 2] int32, the lower and the upper half of each answer's key.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    keys: torch.Tensor


class Adjustments(NamedTuple):
    """One line for each logit to be changed; no token of a row comes twice.

    Attributes:
        rows: [A] int32, of the logits.
        token_ids: [A] int32.
        biases: [A] float32, added first; -inf forbids the token.
        counts: [A] int32, how often the token stands in the answer; -1 for one that is only biased.
        penalties: [A, 3] float32, its row's for repetition (1 for none), frequency and presence.
    """

    rows: torch.Tensor
    token_ids: torch.Tensor
    biases: torch.Tensor
    counts: torch.Tensor
    penalties: torch.Tensor
