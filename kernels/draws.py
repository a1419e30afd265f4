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


class Biases(NamedTuple):
    """One line for each logit that something is added to; no token of a row comes twice.

    Attributes:
        rows: [A] int32, of the logits.
        token_ids: [A] int32.
        values: [A] float32; -inf forbids the token.
    """

    rows: torch.Tensor
    token_ids: torch.Tensor
    values: torch.Tensor


class Penalized(NamedTuple):
    """One line for each row whose logits depend on the tokens there are already.

    Attributes:
        rows: [M] int32, of the logits.
        seats: [M] int32, the row's line of the known tokens.
        num_prompt_tokens: [M] int32.
        num_tokens: [M] int32, prompt and answer.
        penalties: [M, 3] float32, for repetition (1 for none), frequency and presence.
    """

    rows: torch.Tensor
    seats: torch.Tensor
    num_prompt_tokens: torch.Tensor
    num_tokens: torch.Tensor
    penalties: torch.Tensor
