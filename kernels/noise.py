"""Noise that is a hash of where it is used: the same request draws the same tokens in any batch, on any step.

The words of a draw are SplitMix64's (Steele, Lea and Flood, 2014). Where each token needs a number of its own, they are
spread over the vocabulary by the finalizer of MurmurHash3 (Appleby), twice, with one half of the draw's word each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)


def mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The SplitMix64 generator's step: every input bit flips each output bit with probability one half."""
    words = words + GOLDEN_RATIO
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def words_of(keys: NDArray[np.uint64], positions: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """A word for each draw: keys [R] of the answers, positions [R] of the tokens to be drawn → [R]."""
    return mix(keys + positions.astype(np.uint64) * GOLDEN_RATIO)


def spread(words: NDArray[np.uint64], num_tokens: int) -> NDArray[np.uint32]:
    """A number for each token: words [R] → [R, num_tokens]."""
    low, high = ((words >> np.uint64(shift)).astype(np.uint32)[:, None] for shift in (0, 32))
    return _finish(_finish(np.arange(num_tokens, dtype=np.uint32)[None] + low) ^ high)


def _finish(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """MurmurHash3's finalizer."""
    words = (words ^ (words >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return words ^ (words >> np.uint32(16))
