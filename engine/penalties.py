"""Logits that depend on the tokens there are already, and a bias: one seat's, adjusted in place.

The order is vLLM's: first the bias, so that it is part of the logit whose sign decides how repetition is penalised;
then repetition (Keskar et al., CTRL: over prompt and answer); then frequency and presence as OpenAI defines them (over
the answer alone): `logit − frequency_penalty · count − presence_penalty · (count > 0)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from engine.sequence import SamplingParams


class Penalties:
    """What one seat has seen. The work of a step depends on the number of different tokens seen, not on the vocabulary.

    Args:
        params: penalties and bias; a bias for a token beyond the vocabulary is dropped.
        prompt: token ids of the prompt.
        output: token ids of the answer so far.
        vocab_size: of the logits.
    """

    def __init__(self, params: SamplingParams, prompt: Iterable[int], output: Iterable[int], vocab_size: int) -> None:
        self._frequency = np.float32(params.frequency_penalty)
        self._presence = np.float32(params.presence_penalty)
        self._repetition = np.float32(params.repetition_penalty)
        bias = {token_id: value for token_id, value in params.logit_bias if 0 <= token_id < vocab_size}
        self._biased = np.array(list(bias), dtype=np.int64)
        self._bias = np.array(list(bias.values()), dtype=np.float32)
        self._counts_output = bool(params.frequency_penalty or params.presence_penalty)
        # Different tokens seen in prompt or answer, and how often each stands in the answer.
        self._places: dict[int, int] = {}
        self._seen = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)
        if params.repetition_penalty != 1.0:
            for token_id in dict.fromkeys(prompt):
                self._place(token_id)
        for token_id in output:
            self.take(token_id)

    def take(self, token_id: int) -> None:
        """Another token of the answer."""
        if self._counts_output or self._repetition != 1.0:
            place = self._place(token_id)  # first, for it may replace the columns
            self._counts[place] += 1

    def adjust(self, logits: NDArray[np.float32]) -> None:
        """Change one row of logits, [V] float32."""
        logits[self._biased] += self._bias
        num_seen = len(self._places)
        if not num_seen:
            return
        seen, counts = self._seen[:num_seen], self._counts[:num_seen]
        values = logits[seen]
        if self._repetition != 1.0:
            values = np.where(values > 0, values / self._repetition, values * self._repetition)
        if self._counts_output:
            values -= self._frequency * counts
            values -= self._presence * (counts > 0)
        logits[seen] = values

    def _place(self, token_id: int) -> int:
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = len(self._places)
            if place == len(self._seen):
                self._seen = np.concatenate((self._seen, np.zeros_like(self._seen)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._seen[place] = token_id
        return place
