"""What each seat asks for beside a token, as columns: written when it is taken, looked up for all rows of a step."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from engine.drawing import Extras
from kernels.draws import MOST

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from engine.gpu.columns import Ints
    from engine.sequence import SamplingParams

NO_PENALTIES: Final[dict[str, Any]] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": (),
}


class Bias(NamedTuple):
    """What is added to a row's logits.

    Attributes:
        token_ids: [A], none twice.
        values: [A]; -inf forbids the token.
    """

    token_ids: Ints
    values: NDArray[np.float32]

    @classmethod
    def of(cls, values: Mapping[int, float]) -> Bias:
        """By token id."""
        return cls(np.array(list(values), dtype=np.int32), np.array(list(values.values()), dtype=np.float32))


NO_BIAS: Final = Bias.of({})


class SeatExtras:
    """The columns.

    Args:
        max_num_seqs: seats.
        vocab_size: what is said of tokens beyond it is dropped.

    Attributes:
        is_plain: [seats], whether there is nothing to do in every step.
        stops_from: [seats], the position from which on a stop token may stand; 0 where that may be anywhere.
        filters: [seats], whether draws look at top-k, top-p or min-p.
        num_logprobs: [seats], of the likeliest tokens to tell of; -1 tells nothing.
        num_prompt_tokens: [seats].
        is_penalized: [seats], whether one of the penalties is one.
        penalties: [seats, 3], for repetition, frequency and presence.
        is_biased: [seats], whether there is a bias.
        biases: of each seat.
        early_biases: of each seat before `stops_from`.
        stop_ids: of each seat.
        constraints: by seat, of those under one.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.is_plain = np.ones(max_num_seqs, dtype=bool)
        self.stops_from = np.zeros(max_num_seqs, dtype=np.int64)
        self.filters = np.zeros(max_num_seqs, dtype=bool)
        self.num_logprobs = np.full(max_num_seqs, -1, dtype=np.int32)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self.is_penalized = np.zeros(max_num_seqs, dtype=bool)
        self.penalties = np.zeros((max_num_seqs, 3), dtype=np.float32)
        self.is_biased = np.zeros(max_num_seqs, dtype=bool)
        self.biases = [NO_BIAS] * max_num_seqs
        self.early_biases = [NO_BIAS] * max_num_seqs
        self.stop_ids: list[Ints] = [NO_BIAS.token_ids] * max_num_seqs
        self.constraints: dict[int, Extras] = {}

    def set(self, seat: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """A sequence took the seat, of which these tokens are known."""
        self.constraints.pop(seat, None)
        vocab_size = self._vocab_size
        stop_ids = sorted(i for i in params.stop_token_ids if 0 <= i < vocab_size)
        bias = {token_id: value for token_id, value in params.logit_bias if 0 <= token_id < vocab_size}
        penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self.stop_ids[seat] = np.array(stop_ids, np.int32)
        self.stops_from[seat] = num_prompt_tokens + params.min_tokens if stop_ids else 0
        self.filters[seat] = params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
        self.num_logprobs[seat] = -1 if params.num_logprobs is None else min(params.num_logprobs, MOST, vocab_size)
        self.num_prompt_tokens[seat] = num_prompt_tokens
        self.is_penalized[seat] = penalties != (1.0, 0.0, 0.0)
        self.penalties[seat] = penalties
        self.is_biased[seat] = bool(bias)
        self.biases[seat] = Bias.of(bias)
        self.early_biases[seat] = Bias.of(bias | dict.fromkeys(stop_ids, -math.inf))
        self.is_plain[seat] = params.is_plain
        if params.constraint is not None:
            # Penalties are counted on the device, from the tokens that lie there.
            self.constraints[seat] = Extras(replace(params, **NO_PENALTIES), token_ids, num_prompt_tokens, vocab_size)
