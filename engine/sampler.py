"""Choosing the next token of each row.

Noise is counter-based: one uniform number a row, a hash of (seed, choice index, position of the token to be drawn).
It picks from the kept probabilities in the order of token ids, so neighbours, chunking and preemption change nothing.
A token is kept if it passes, in this order: not a stop token before `min_tokens`, top-k, top-p of what is left, min-p.
Tokens as likely as the last one kept are kept as well.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.noise import GOLDEN_RATIO, mix, words_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from engine.sequence import SamplingParams

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float32]
    Doubles = NDArray[np.float64]
    SampleRows = Callable[[torch.Tensor, "SamplingRows", Ints, Ints], Ints]

# A nucleus nearly always lies within so many tokens; where it does not, the row is sorted in full.
FIRST_CANDIDATES = 256


class SamplingRows:
    """How each seat samples, as columns.

    Args:
        max_num_seqs: seats.
        vocab_size: stop tokens beyond it are dropped.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_p = np.ones(max_num_seqs, dtype=np.float64)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.key = np.zeros(max_num_seqs, dtype=np.uint64)
        self.stops_from = np.zeros(max_num_seqs, dtype=np.int64)
        self.stop_ids: list[Ints] = [np.zeros(0, dtype=np.int64)] * max_num_seqs

    def set(self, seat: int, params: SamplingParams, num_prompt_tokens: int) -> None:
        """A sequence took the seat."""
        self.temperature[seat] = params.temperature
        self.top_k[seat] = min(params.top_k, self._vocab_size)
        self.top_p[seat] = params.top_p
        self.min_p[seat] = params.min_p
        self.key[seat] = noise_key(params.seed, params.choice_index)
        # The position from which on a stop token may stand.
        self.stops_from[seat] = num_prompt_tokens + params.min_tokens
        stop_ids = sorted(i for i in params.stop_token_ids if 0 <= i < self._vocab_size)
        self.stop_ids[seat] = np.array(stop_ids, dtype=np.int64)


def sample_rows(logits: torch.Tensor, rows: SamplingRows, seats: Ints, positions: Ints) -> Ints:
    """Choose a token for each row: the plain version of kernels/native/sampling.h.

    Args:
        logits: [R, V] float32; may be overwritten.
        seats: [R], each row's line of `rows`.
        positions: [R], where the drawn tokens will stand in their sequences.

    Returns:
        [R] token ids; -1 where the logits are no numbers or none is above -inf.
    """
    noise = uniform(rows.key[seats], positions)
    columns = rows.temperature[seats], rows.top_k[seats], rows.top_p[seats], rows.min_p[seats]
    return sample_columns(logits, *columns, noise)


def sample_columns(
    logits: torch.Tensor, temperature: Floats, top_k: Ints, top_p: Doubles, min_p: Floats, noise: Doubles
) -> Ints:
    """Choose a token for each row.

    Args:
        logits: [R, V] float32.
        temperature: [R]; 0 takes the likeliest token.
        top_k: [R]; 0 keeps all.
        top_p: [R]; 1 keeps all.
        min_p: [R]; 0 keeps all.
        noise: [R] in [0, 1).

    Returns:
        [R] token ids; -1 where the logits are no numbers or none is above -inf.
    """
    best, greedy = logits.max(dim=-1)  # NaN wins over every number
    token_ids: Ints = greedy.numpy().copy()
    drawn = np.flatnonzero(temperature > 0)
    if len(drawn) > 0:
        chosen = torch.from_numpy(drawn)
        scaled = logits[chosen].sub_(best[chosen, None]).div_(torch.from_numpy(temperature[drawn])[:, None])
        probabilities = torch.softmax(scaled, dim=-1)
        keep_likely(probabilities, top_k[drawn], top_p[drawn], min_p[drawn])
        token_ids[drawn] = pick(probabilities, noise[drawn])
    token_ids[~torch.isfinite(best).numpy()] = -1
    return token_ids


def sample(
    logits: torch.Tensor, rows: SamplingRows, seats: Ints, positions: Ints, choose: SampleRows = sample_rows
) -> Ints:
    """Draw a token for each row.

    Args:
        logits: [R, V] float32; overwritten.
        seats: [R], each row's line of `rows`.
        positions: [R], where the drawn tokens will stand in their sequences.
        choose: `sample_rows`, or what does the same.

    Returns:
        [R] token ids; -1 where the logits are no numbers or no token may be drawn.
    """
    for row in np.flatnonzero(positions < rows.stops_from[seats]).tolist():
        logits[row, torch.from_numpy(rows.stop_ids[seats[row]])] = -math.inf
    return choose(logits, rows, seats, positions)


def keep_likely(probabilities: torch.Tensor, top_k: Ints, top_p: Doubles, min_p: Floats) -> None:
    """Set what top-k, top-p and min-p drop to zero, in place; nothing is rescaled.

    Args:
        probabilities: [R, V] float32.
        top_k: [R]; 0 keeps all.
        top_p: [R]; 1 keeps all.
        min_p: [R], relative to the likeliest token; 0 keeps all.
    """
    floor = probabilities.amax(dim=-1).mul_(torch.from_numpy(min_p))
    filtered = np.flatnonzero((top_k > 0) | (top_p < 1))
    if len(filtered) > 0:
        chosen = torch.from_numpy(filtered)
        least = least_kept(probabilities[chosen], torch.from_numpy(top_k[filtered]), torch.from_numpy(top_p[filtered]))
        floor[chosen] = torch.maximum(floor[chosen], least)
    elif not min_p.any():
        return
    probabilities.masked_fill_(probabilities < floor[:, None], 0.0)


def least_kept(probabilities: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest probability that top-k and then top-p keep: [R] float32.

    Args:
        probabilities: [R, V] float32.
        top_k: [R] int64; 0 keeps all.
        top_p: [R] float64.
    """
    vocab_size = probabilities.shape[1]
    num_candidates = min(max(int(top_k.max()), FIRST_CANDIDATES), vocab_size)
    values = torch.topk(probabilities, num_candidates).values  # [R, C], descending
    limited = top_k > 0
    beyond = limited[:, None] & (torch.arange(num_candidates) >= top_k[:, None])
    values = values.masked_fill(beyond, 0.0)
    reached = values.double().cumsum(-1)
    # Without top-k the whole vocabulary is the measure, though only its likeliest part was looked at.
    total = torch.where(limited, reached[:, -1], probabilities.sum(-1, dtype=torch.float64))
    goal = top_p * total
    kept = ((reached - values < goal[:, None]) & ~beyond).sum(-1).clamp_(min=1)
    least = values.gather(-1, kept[:, None] - 1)[:, 0]
    short = ~limited & (reached[:, -1] < goal)
    if num_candidates < vocab_size and bool(short.any()):
        everything = torch.full_like(top_k[short], vocab_size)
        least[short] = least_kept(probabilities[short], everything, top_p[short])
    return least


def pick(probabilities: torch.Tensor, noise: Doubles) -> Ints:
    """Invert the cumulative distribution: [R, V] float32 of any scale, noise [R] in [0, 1) → [R] token ids."""
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Rounding must not lift the goal to the total: the token found has a probability above zero.
    goal = torch.minimum(torch.from_numpy(noise)[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    token_ids: Ints = torch.searchsorted(cumulative, goal, right=True)[:, 0].numpy()
    return token_ids


def noise_key(seed: int, choice_index: int) -> np.uint64:
    """The part of the hash that stays the same for a whole answer."""
    words = np.array([seed & (2**64 - 1), choice_index], dtype=np.uint64)
    key = mix(words[:1])
    return np.uint64(mix(key ^ (words[1:] * GOLDEN_RATIO))[0])


def uniform(key: NDArray[np.uint64], positions: Ints) -> Doubles:
    """Numbers in [0, 1), a multiple of 2⁻⁵³ each, from keys [R] and positions [R]."""
    return (words_of(key, positions) >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)
