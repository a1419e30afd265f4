"""Log-probabilities of the model itself."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.batch import TokenLogprobs

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The likeliest tokens are looked for among blocks of so many.
BLOCK = 64


class ModelLogits:
    """One row of logits as the model gave it, before anything is done to it.

    Args:
        logits: [V] float32; copied.
        num_top: how many of the likeliest tokens are told.
    """

    def __init__(self, logits: torch.Tensor, num_top: int) -> None:
        best = float(logits.max())
        # torch adds in a tree: the float32 sum is off by less than the logits themselves are rounded.
        total = float((logits - best).exp_().sum()) if math.isfinite(best) else math.nan
        self._norm = best + math.log(total)
        self._logits: NDArray[np.float32] = logits.numpy().copy()
        self._num_top = min(num_top, len(self._logits))

    def tell(self, token_id: int) -> TokenLogprobs:
        """What is told of the token that was drawn."""
        return TokenLogprobs(token_id, float(self._logits[token_id]) - self._norm, self._top())

    def _top(self) -> tuple[tuple[int, float], ...]:
        """The likeliest, of equal ones the lower id first."""
        if not self._num_top:
            return ()
        # All of them, and more where several are equal or share a block.
        likely = np.flatnonzero(self._logits >= _reached_by(torch.from_numpy(self._logits), self._num_top))
        values = self._logits[likely]
        order = np.lexsort((likely, -values))[: self._num_top]
        logprobs = values[order].astype(np.float64) - self._norm
        return tuple(zip(likely[order].tolist(), logprobs.tolist(), strict=True))


def _reached_by(logits: torch.Tensor, count: int) -> float:
    """A value that at least `count` of [V] logits reach, and not many more.

    Of the largest ones of each block, as many reach it as are asked for: looking at those alone is several times
    cheaper than ordering the whole vocabulary.
    """
    num_blocks = len(logits) // BLOCK
    largest = logits[: num_blocks * BLOCK].view(num_blocks, BLOCK).amax(-1) if num_blocks >= count else logits
    return torch.topk(largest, count).values[-1].item()
