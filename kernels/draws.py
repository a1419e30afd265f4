"""What the operations on logits are given, and what they tell."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

# Of the likeliest tokens of a row, there is room for so many to be told.
MOST: Final = 20
# Numbers that are told of a row.
WIDTH: Final = 2 * MOST + 2


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


class Logprobs(NamedTuple):
    """Log-probabilities of T rows; views of one buffer, so that one copy fetches all.

    Attributes:
        logprobs: [T, MOST] float32, of the likeliest tokens, the largest first.
        token_ids: [T, MOST] int32, which these are; of equal ones the lower first.
        norms: [T] float32, the logarithm of the sum of exp(logits).
        drawn: [T] float32, of the token that was drawn.
    """

    logprobs: torch.Tensor
    token_ids: torch.Tensor
    norms: torch.Tensor
    drawn: torch.Tensor

    @classmethod
    def of(cls, buffer: torch.Tensor) -> Logprobs:
        """The views of [T, WIDTH] int32."""
        floats = buffer.view(torch.float32)
        return cls(floats[:, :MOST], buffer[:, MOST : 2 * MOST], floats[:, 2 * MOST], floats[:, 2 * MOST + 1])
