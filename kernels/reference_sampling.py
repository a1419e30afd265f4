"""The plain version of each operation on logits: what the fast ones are compared with.

Names and signatures are those of kernels/gpu/sampling.py and kernels/gpu/logits.py, but for room that they are given.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.draws import PROMPT
from kernels.noise import spread, words_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kernels.draws import Biased, Biases, Logprobs, Penalized, SamplingColumns


def sample(
    logits: torch.Tensor, columns: SamplingColumns, seats: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Choose a token for each row, by the Gumbel-max trick among those that top-k, top-p and min-p keep.

    Args:
        logits: [R, V] of any float dtype; -inf is never drawn.
        columns: of all seats.
        seats: [R] int32, each row's line of the columns.
        positions: [R] int32, where the drawn tokens will stand in their sequences.

    Returns:
        [R] int32 token ids; -1 where the logits are no numbers or none is above -inf.
    """
    temperature, top_k, top_p, min_p, halves = [column[seats.long()].cpu().numpy() for column in columns]
    keys = halves.astype(np.int64).astype(np.uint64) & np.uint64(0xFFFFFFFF)
    noise = gumbel(spread(words_of(keys[:, 0] | keys[:, 1] << np.uint64(32), positions.cpu().numpy()), logits.shape[1]))
    token_ids = []
    for row, values in enumerate(logits.float().cpu().numpy()):
        best = values.max()  # NaN if any is
        if not np.isfinite(best):
            token_ids.append(-1)
        elif temperature[row] < 1e-5:
            token_ids.append(int(values.argmax()))
        else:
            kept = _kept(values, temperature[row], int(top_k[row]), float(top_p[row]), float(min_p[row]))
            scores = np.where(kept, values / temperature[row] + noise[row], -np.inf)
            token_ids.append(int(scores.argmax()))
    return torch.tensor(token_ids, dtype=torch.int32, device=logits.device)


def gumbel(words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Noise of the Gumbel distribution from words of 32 bits: -log(-log(1 - u)), float32."""
    u = np.minimum((words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(0.99999994))
    noise: NDArray[np.float32] = (-np.log(-np.log1p(-u.astype(np.float64)))).astype(np.float32)
    return noise


def _kept(values: NDArray[np.float32], temperature: float, top_k: int, top_p: float, min_p: float) -> NDArray[np.bool_]:
    """Which tokens may be drawn: [V] truth values, of logits [V]."""
    chances = np.exp((values.astype(np.float64) - values.max()) / temperature)
    descending = -np.sort(-values)
    falling = -np.sort(-chances)
    least = -np.inf
    if top_k:
        falling, descending = falling[:top_k], descending[:top_k]
        least = descending[-1]
    if top_p < 1:
        before = falling.cumsum() - falling
        least = descending[max(1, int((before < top_p * falling.sum()).sum())) - 1]
    kept: NDArray[np.bool_] = (values >= least) & (chances >= min_p)
    return kept


def apply_token_mask(logits: torch.Tensor, masks: torch.Tensor, rows: torch.Tensor) -> None:
    """Take away what a mask does not allow, in place.

    Args:
        logits: [R, V].
        masks: [M, ⌈V / 32⌉] int32, a bit a token, the lowest first.
        rows: [M] int32, the row of each mask.
    """
    bits = masks.cpu().numpy().view(np.uint8)
    allowed = np.unpackbits(bits, axis=1, bitorder="little", count=logits.shape[1]).astype(bool)
    for row, each in zip(rows.tolist(), allowed, strict=True):
        logits[row, torch.from_numpy(~each).to(logits.device)] = -math.inf


def add_biases(logits: torch.Tensor, biases: Biases, lines: Biased) -> None:
    """Add to some logits [R, V], in place; no row comes twice."""
    for row, seat, is_early in zip(*[column.tolist() for column in lines], strict=True):
        own = slice(*biases.starts[seat : seat + 2].tolist())
        values = (biases.early_values if is_early else biases.values)[own]
        logits[row].index_add_(0, biases.token_ids[own].long(), values)


def count_tokens(counts: torch.Tensor, token_ids: torch.Tensor, lines: Penalized) -> None:
    """Count the tokens of some seats that were not counted yet, in place.

    Args:
        counts: [seats, V] int32: how often a token stands in the answer, and `PROMPT` more where the prompt has it.
        token_ids: [seats, context] int32, the known tokens of each seat.
        lines: no seat comes twice.
    """
    columns = [column.tolist() for column in lines[1:5]]
    for seat, num_prompt, num_counted, num_tokens in zip(*columns, strict=True):
        if num_counted == 0:
            counts[seat] = 0
        own = token_ids[seat, :num_tokens].long()
        counts[seat, own[num_counted:num_prompt]] |= PROMPT
        answer = own[max(num_counted, num_prompt) :]
        counts[seat].index_add_(0, answer, torch.ones_like(answer, dtype=torch.int32))


def penalize(logits: torch.Tensor, counts: torch.Tensor, lines: Penalized) -> None:
    """Lower the logits of tokens that there are already, in place: repetition first, as vLLM does.

    Args:
        logits: [R, V] float32.
        counts: [seats, V] int32, by `count_tokens`.
        lines: no row comes twice.
    """
    columns = (lines.rows.tolist(), lines.seats.tolist(), lines.penalties.tolist())
    for row, seat, (repetition, frequency, presence) in zip(*columns, strict=True):
        there = counts[seat].nonzero().flatten()
        count = (counts[seat, there] & (PROMPT - 1)).double()
        values = logits[row, there].double()
        values = torch.where(values > 0, values / repetition, values * repetition)
        logits[row, there] = (values - frequency * count - presence * (count > 0)).float()


def top_logprobs(logits: torch.Tensor, rows: torch.Tensor, num_top: int, out: Logprobs) -> None:
    """Find the likeliest tokens of some rows, of equal ones the lower id first.

    Args:
        logits: [R, V] of any float dtype.
        rows: [T] int32.
        num_top: how many.
        out: of T rows; `drawn` is left.
    """
    for line, row in enumerate(rows.tolist()):
        values = logits[row].double()
        norm = values.max() + (values - values.max()).exp().sum().log()
        order = values.sort(descending=True, stable=True).indices[:num_top]
        out.norms[line] = norm
        out.logprobs[line, : len(order)] = values[order] - norm
        out.token_ids[line, : len(order)] = order


def drawn_logprobs(
    logits: torch.Tensor,
    kept: torch.Tensor,
    places: torch.Tensor,
    rows: torch.Tensor,
    drawn: torch.Tensor,
    out: Logprobs,
) -> None:
    """Look up the log-probabilities of the tokens that were drawn.

    Args:
        logits: [R, V], some rows of which may have been changed.
        kept: [K, V], what was in those before.
        places: [T] int32, where each row is kept; -1 for one that is as it was.
        rows: [T] int32.
        drawn: [R] int32; -1 is taken for 0.
        out: of T rows with their norms; gets `drawn`.
    """
    for line, (row, place) in enumerate(zip(rows.tolist(), places.tolist(), strict=True)):
        source = logits[row] if place < 0 else kept[place]
        out.drawn[line] = source[max(0, int(drawn[row]))].float() - out.norms[line]
