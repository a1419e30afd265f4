"""Log-probabilities of the model itself."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.batch import TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class ModelLogits:
    """One row of logits as the model gave it, with what turns it into log-probabilities.

    Args:
        logits: [V] float32; copied.
        num_top: how many of the likeliest tokens are told.
    """

    def __init__(self, logits: torch.Tensor, num_top: int) -> None:
        best = float(logits.max())
        # exp() in float32 is off by 1e-7 of its value; the sum is kept in float64, so the logarithm is off no more.
        total = (logits - best).exp_().sum(dtype=torch.float64)
        self._norm = best + math.log(float(total)) if math.isfinite(best) else math.nan
        self._logits: NDArray[np.float32] = logits.numpy().copy()
        self._num_top = min(num_top, len(self._logits))

    def tell(self, token_id: int) -> TokenLogprobs:
        """What is told of the token that was drawn."""
        return TokenLogprobs(token_id, float(self._logits[token_id]) - self._norm, self._top())

    def of(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities of some tokens."""
        values: list[float] = (self._logits[list(token_ids)].astype(np.float64) - self._norm).tolist()
        return values

    def _top(self) -> tuple[tuple[int, float], ...]:
        """The likeliest, of equal ones the lower id first."""
        if not self._num_top:
            return ()
        least = torch.topk(torch.from_numpy(self._logits), self._num_top).values[-1].item()
        likely = np.flatnonzero(self._logits >= least)  # more than asked for where several are equal to the last
        order = np.lexsort((likely, -self._logits[likely]))[: self._num_top]
        token_ids = likely[order].tolist()
        return tuple(zip(token_ids, self.of(token_ids), strict=True))
