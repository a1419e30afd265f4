"""Log-probabilities of the model itself."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.batch import TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

# The likeliest tokens are looked for among blocks of so many.
BLOCK = 64


class ModelLogits:
    """Some rows of logits as the model gave them.

    Args:
        logits: [R, V] float32.
        rows: those to remember; copied one by one, which stays in the processor's cache.
    """

    def __init__(self, logits: torch.Tensor, rows: Iterable[int]) -> None:
        scratch = torch.empty_like(logits[0])
        self._logits: dict[int, NDArray[np.float32]] = {row: logits[row].numpy().copy() for row in rows}
        self._norms = {row: _norm(logits[row], scratch) for row in self._logits}

    def tell(self, row: int, token_id: int, num_top: int) -> TokenLogprobs:
        """What is told of the token that was drawn for a row, with `num_top` of the likeliest."""
        logprob = float(self._logits[row][token_id]) - self._norms[row]
        return TokenLogprobs(token_id, logprob, self._top(row, num_top) if num_top else ())

    def _top(self, row: int, num_top: int) -> tuple[tuple[int, float], ...]:
        """The likeliest, of equal ones the lower id first."""
        logits = self._logits[row]
        num_top = min(num_top, len(logits))
        # All of them, and more where several are equal or share a block.
        likely = np.flatnonzero(logits >= _reached_by(torch.from_numpy(logits), num_top))
        values = logits[likely]
        order = np.lexsort((likely, -values))[:num_top]
        logprobs = values[order].astype(np.float64) - self._norms[row]
        return tuple(zip(likely[order].tolist(), logprobs.tolist(), strict=True))


def _norm(logits: torch.Tensor, scratch: torch.Tensor) -> float:
    """Logarithm of the sum of exp(logits), [V]; not a number where they are none."""
    best = float(logits.amax())
    # torch adds in a tree: the float32 sum is off by less than the logits are rounded. softmax() is not so exact.
    total = float(torch.sub(logits, best, out=scratch).exp_().sum())
    return best + math.log(total) if math.isfinite(best) else math.nan


def _reached_by(logits: torch.Tensor, count: int) -> float:
    """A value that at least `count` of [V] logits reach, and not many more.

    Of the largest ones of each block, as many reach it as are asked for: looking at those alone is several times
    cheaper than ordering the whole vocabulary.
    """
    num_blocks = len(logits) // BLOCK
    largest = logits[: num_blocks * BLOCK].view(num_blocks, BLOCK).amax(-1) if num_blocks >= count else logits
    return torch.topk(largest, count).values[-1].item()
