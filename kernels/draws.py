"""What the operations on logits are given, and what they tell."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

# Marks a token of the prompt beside how often it stands in the answer.
PROMPT: Final = 1 << 30
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
    """What is added to the logits of each seat's rows; no token of a seat comes twice.

    Attributes:
        starts: [seats + 1] int32; what is seat s's stands from starts[s] to starts[s + 1] in the others.
        token_ids: [A] int32.
        values: [A] float32; -inf forbids the token.
        early_values: [A] float32, the same where no stop token may come yet.
    """

    starts: torch.Tensor
    token_ids: torch.Tensor
    values: torch.Tensor
    early_values: torch.Tensor


class Biased(NamedTuple):
    """One line for each row that something is added to.

    Attributes:
        rows: [B] int32, of the logits.
        seats: [B] int32.
        is_early: [B] int32, 1 where no stop token may come yet, else 0.
    """

    rows: torch.Tensor
    seats: torch.Tensor
    is_early: torch.Tensor


class Penalized(NamedTuple):
    """One line for each row whose logits depend on the tokens there are already.

    Attributes:
        rows: [M] int32, of the logits.
        seats: [M] int32, the row's line of the known tokens and of their counts.
        num_prompt_tokens: [M] int32.
        num_counted: [M] int32, tokens that are counted already; where there are none the counts may be another's.
        num_tokens: [M] int32, prompt and answer.
        penalties: [M, 3] float32, for repetition (1 for none), frequency and presence.
    """

    rows: torch.Tensor
    seats: torch.Tensor
    num_prompt_tokens: torch.Tensor
    num_counted: torch.Tensor
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
