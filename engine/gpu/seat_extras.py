"""What each seat asks for beside a token, as columns: written when it is taken, looked up for all rows of a step."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from engine.drawing import Extras
from kernels.draws import MOST, Biases

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch
    from numpy.typing import NDArray

    from engine.gpu.columns import Ints
    from engine.sequence import SamplingParams

    # Copies arrays to the device, all in one go.
    Bring = Callable[..., list[torch.Tensor]]

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
        early_values: [A], the same where no stop token may come yet.
    """

    token_ids: Ints
    values: NDArray[np.float32]
    early_values: NDArray[np.float32]

    @classmethod
    def of(cls, values: Mapping[int, float], forbidden_early: Iterable[int]) -> Bias:
        """By token id."""
        early = {**values, **dict.fromkeys(forbidden_early, -math.inf)}
        columns = [values.get(token_id, 0.0) for token_id in early], list(early.values())
        return cls(np.array(list(early), dtype=np.int32), *[np.array(column, dtype=np.float32) for column in columns])


NO_BIAS: Final = Bias.of({}, ())


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
        num_counted: [seats], tokens whose counts for the penalties the device has.
        is_biased: [seats], whether there is a bias.
        biases: of each seat, of whoever had one there last.
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
        self.num_counted = np.zeros(max_num_seqs, dtype=np.int32)
        self.is_biased = np.zeros(max_num_seqs, dtype=bool)
        self.biases = [NO_BIAS] * max_num_seqs
        self._biases_there: Biases | None = None
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
        self.num_counted[seat] = 0
        self.is_biased[seat] = bool(bias)
        self._set_bias(seat, Bias.of(bias, stop_ids if params.min_tokens else ()))
        self.is_plain[seat] = params.is_plain
        if params.constraint is not None:
            # Penalties are counted on the device, from the tokens that lie there.
            self.constraints[seat] = Extras(replace(params, **NO_PENALTIES), token_ids, num_prompt_tokens, vocab_size)

    def biases_there(self, bring: Bring) -> Biases:
        """Those of all seats on the device, brought there anew when one has changed."""
        if self._biases_there is None:
            starts = np.zeros(len(self.biases) + 1, dtype=np.int32)
            np.cumsum([len(bias.token_ids) for bias in self.biases], out=starts[1:])
            columns = [np.concatenate(column) for column in zip(*self.biases, strict=True)]
            self._biases_there = Biases(*bring(starts, *columns))
        return self._biases_there

    def _set_bias(self, seat: int, bias: Bias) -> None:
        """What a seat does not ask for any more is left there: nobody looks."""
        if len(bias.token_ids) and not all(map(np.array_equal, bias, self.biases[seat])):
            self.biases[seat], self._biases_there = bias, None
