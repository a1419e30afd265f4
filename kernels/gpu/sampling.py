"""Choosing the next token of each row on the device, so that logits never leave it.

A token is drawn by the Gumbel-max trick: of the kept tokens the one with the largest `logit / temperature + noise`.
The noise is a hash of (key of the answer, position, token id), see kernels/noise.py, so that a draw does not depend on
the batch. What is kept is what engine/sampler.py keeps: top-k, then top-p of what is left, then min-p; tokens as likely
as the last one kept are kept as well. The least kept logit is found without a sort: floats ordered as whole numbers,
two bits of it a pass over the row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from kernels.draws import SamplingColumns

# A row is cut into parts of so many tokens, a program each.
SEGMENT = 8192
# Below this a division by the temperature leaves what float32 holds; such a draw takes the likeliest token.
LEAST_TEMPERATURE = 1e-5


class Scratch(NamedTuple):
    """Where the parts of a row meet.

    Attributes:
        bars: [R] int32, the least kept logit as a whole number.
        scores: [R, segments] float32, of each part's best token.
        token_ids: [R, segments] int32, which that is.
    """

    bars: torch.Tensor
    scores: torch.Tensor
    token_ids: torch.Tensor


@triton.jit
def _as_ordered(logits: tl.tensor) -> tl.tensor:
    """Whole numbers without a sign in the order of the floats."""
    bits = logits.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _measure(
    row_ptr: tl.tensor,
    vocab_size: tl.tensor,
    maximum: tl.tensor,
    scale: tl.tensor,
    cut: tl.tensor,
    bar: tl.tensor,
    step: tl.tensor,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """How many of a row's logits from `cut` on reach the bar, the bar + step, + 2 steps and + 3 steps.

    MASS: their probabilities instead of their number, as multiples of the likeliest one's.
    """
    lanes = tl.arange(0, BLOCK)
    first = tl.zeros([BLOCK], tl.float32)
    second = tl.zeros([BLOCK], tl.float32)
    third = tl.zeros([BLOCK], tl.float32)
    fourth = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        inside = start + lanes < vocab_size
        logits = tl.load(row_ptr + start + lanes, mask=inside, other=float("-inf")).to(tl.float32)
        ordered = _as_ordered(logits)
        amounts = tl.exp2((logits - maximum) * scale) if MASS else inside.to(tl.float32)
        amounts = tl.where(inside & (ordered >= cut), amounts, 0.0)
        first += tl.where(ordered >= bar, amounts, 0.0)
        second += tl.where(ordered >= bar + step, amounts, 0.0)
        third += tl.where(ordered >= bar + 2 * step, amounts, 0.0)
        fourth += tl.where(ordered >= bar + 3 * step, amounts, 0.0)
    return tl.sum(first, axis=0), tl.sum(second, axis=0), tl.sum(third, axis=0), tl.sum(fourth, axis=0)


@triton.jit
def _largest_bar(
    row_ptr: tl.tensor,
    vocab_size: tl.tensor,
    maximum: tl.tensor,
    scale: tl.tensor,
    cut: tl.tensor,
    goal: tl.tensor,
    lowest: tl.tensor,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The largest bar that logits of so great a number, or mass, reach; 0 if no bar is low enough.

    Bits below `lowest`, an even number, tell no logit of the row from another, and are 0.
    """
    bar = tl.zeros((), tl.uint32)
    for shift in range(30, -2, -2):
        if shift >= lowest:
            step = tl.full((), 1, tl.uint32) << shift
            _, second, third, fourth = _measure(row_ptr, vocab_size, maximum, scale, cut, bar, step, MASS, BLOCK)
            # Sums of the same order fall as the bar rises, to the last bit: how many steps hold is the step taken.
            taken = (second >= goal).to(tl.uint32) + (third >= goal).to(tl.uint32) + (fourth >= goal).to(tl.uint32)
            bar += taken * step
    return bar


@triton.jit
def find_bars_kernel(
    logits_ptr: tl.tensor,
    seats_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    bars_ptr: tl.tensor,
    vocab_size: tl.tensor,
    logits_stride: tl.tensor,
    LEAST_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The least kept logit of row `program_id(0)`, as a whole number; 0 keeps all, at once."""
    row = tl.program_id(0)
    seat = tl.load(seats_ptr + row)
    temperature = tl.load(temperature_ptr + seat)
    top_k, top_p, min_p = tl.load(top_k_ptr + seat), tl.load(top_p_ptr + seat), tl.load(min_p_ptr + seat)
    filters = (top_k > 0) | (top_p < 1) | (min_p > 0)
    if (filters == 0) | (temperature < LEAST_TEMPERATURE):
        tl.store(bars_ptr + row, 0)
        return

    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    bits = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        inside = start + lanes < vocab_size
        logits = tl.load(row_ptr + start + lanes, mask=inside, other=float("-inf")).to(tl.float32)
        best = tl.maximum(best, logits)
        bits |= logits.to(tl.int32, bitcast=True)
    maximum = tl.max(best, axis=0)
    # Logits that a product rounded to bfloat16 or float16 end with so many zeros: half the passes.
    lowest = tl.where(tl.max(bits & 0xFFFF, axis=0) == 0, 16, tl.where(tl.max(bits & 0xFFF, axis=0) == 0, 12, 0))
    unit = tl.full((), 1, tl.uint32) << lowest
    scale = 1.4426950408889634 / temperature  # to exponents of 2

    nothing = tl.zeros((), tl.uint32)
    bar = nothing
    if top_k > 0:
        goal = top_k.to(tl.float32)
        bar = _largest_bar(row_ptr, vocab_size, maximum, scale, nothing, goal, lowest, False, BLOCK)
    if top_p < 1:
        total, above, _, _ = _measure(row_ptr, vocab_size, maximum, scale, bar, bar, unit, True, BLOCK)
        if top_k > 0:
            # Of equal logits at the bar only as many as top-k has room for are part of the whole.
            count, num_above, _, _ = _measure(row_ptr, vocab_size, maximum, scale, bar, bar, unit, False, BLOCK)
            room = tl.minimum(top_k - num_above, count - num_above)
            total = above + (total - above) / (count - num_above) * room
        found = _largest_bar(row_ptr, vocab_size, maximum, scale, bar, top_p * total, lowest, True, BLOCK)
        bar = tl.maximum(bar, found)
    highest = _as_ordered(maximum)
    bar = tl.minimum(bar, highest)
    if min_p > 0:
        least = tl.full([BLOCK], 0xFFFFFFFF, tl.uint32)
        for start in range(0, vocab_size, BLOCK):
            inside = start + lanes < vocab_size
            logits = tl.load(row_ptr + start + lanes, mask=inside, other=float("-inf")).to(tl.float32)
            likely = inside & (tl.exp2((logits - maximum) * scale) >= min_p)
            least = tl.minimum(least, tl.where(likely, _as_ordered(logits), 0xFFFFFFFF))
        bar = tl.minimum(tl.maximum(bar, tl.min(least, axis=0)), highest)
    tl.store(bars_ptr + row, bar.to(tl.int32, bitcast=True))


@triton.jit
def _finish(words: tl.tensor) -> tl.tensor:
    """MurmurHash3's finalizer."""
    words = (words ^ (words >> 16)) * 0x85EBCA6B
    words = (words ^ (words >> 13)) * 0xC2B2AE35
    return words ^ (words >> 16)


@triton.jit
def _word_of(keys_ptr: tl.tensor, seat: tl.tensor, position: tl.tensor) -> tl.tensor:
    """The word of one draw: SplitMix64 of the answer's key and the position."""
    low = tl.load(keys_ptr + 2 * seat).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(keys_ptr + 2 * seat + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    golden_ratio = 0x9E3779B97F4A7C15
    word = ((high << 32) | low) + position.to(tl.uint64) * golden_ratio + golden_ratio
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def _gumbel(token_ids: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """-log(-log(1 - u)) with u of 32 bits, whose small values, those that win, are kept apart."""
    words = _finish(_finish(token_ids.to(tl.uint32) + low) ^ high)
    u = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    series = u * (1.0 + u * (0.5 + u * 0.33333334))
    return -tl.log(tl.where(u < 0.0009765625, series, -tl.log(1.0 - u)))


@triton.jit
def score_tokens_kernel(
    logits_ptr: tl.tensor,
    seats_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    bars_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    vocab_size: tl.tensor,
    logits_stride: tl.tensor,
    FILTERED: tl.constexpr,
    LEAST_TEMPERATURE: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (row, segment): the best token of a part of the row, -1 where a logit is no number."""
    row, segment = tl.program_id(0), tl.program_id(1)
    seat = tl.load(seats_ptr + row)
    temperature = tl.load(temperature_ptr + seat)
    word = _word_of(keys_ptr, seat, tl.load(positions_ptr + row))
    low, high = word.to(tl.uint32), (word >> 32).to(tl.uint32)
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    # Where all are -inf this stays, and the score tells.
    best_id = tl.zeros([BLOCK], tl.int32) + segment * SEGMENT
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(segment * SEGMENT, tl.minimum((segment + 1) * SEGMENT, vocab_size), BLOCK):
        token_ids = start + lanes
        inside = token_ids < vocab_size
        logits = tl.load(row_ptr + token_ids, mask=inside, other=float("-inf")).to(tl.float32)
        broken += (logits != logits).to(tl.int32)
        scores = logits
        if temperature >= LEAST_TEMPERATURE:
            scores = logits / temperature + _gumbel(token_ids, low, high)
        if FILTERED:
            bar = tl.load(bars_ptr + row).to(tl.uint32, bitcast=True)
            scores = tl.where(_as_ordered(logits) >= bar, scores, float("-inf"))
        better = scores > best
        best = tl.where(better, scores, best)
        best_id = tl.where(better, token_ids, best_id)
    score = tl.max(best, axis=0)
    # Of equal ones the first, whichever lane saw it.
    token_id = tl.min(tl.where(best == score, best_id, 0x7FFFFFFF), axis=0)
    token_id = tl.where(tl.max(broken, axis=0) > 0, -1, token_id)
    place = row * tl.num_programs(1) + segment
    tl.store(scores_ptr + place, score)
    tl.store(token_ids_ptr + place, token_id)


@triton.jit
def choose_tokens_kernel(
    scores_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_segments: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """The best token of row `program_id(0)` over its segments."""
    row = tl.program_id(0)
    segments = tl.arange(0, BLOCK)
    inside = segments < num_segments
    places = row * num_segments + segments
    scores = tl.load(scores_ptr + places, mask=inside, other=float("-inf"))
    token_ids = tl.load(token_ids_ptr + places, mask=inside, other=0x7FFFFFFF)
    score = tl.max(scores, axis=0)
    token_id = tl.min(tl.where(scores == score, token_ids, 0x7FFFFFFF), axis=0)
    is_finite = (score > float("-inf")) & (score < float("inf"))
    tl.store(out_ptr + row, tl.where(is_finite & (tl.min(token_ids, axis=0) >= 0), token_id, -1))


def make_scratch(num_rows: int, vocab_size: int, device: torch.device) -> Scratch:
    """Room for the parts of so many rows."""
    parts = (num_rows, triton.cdiv(vocab_size, SEGMENT))
    return Scratch(
        torch.empty(num_rows, dtype=torch.int32, device=device),
        torch.empty(parts, dtype=torch.float32, device=device),
        torch.empty(parts, dtype=torch.int32, device=device),
    )


def sample(
    logits: torch.Tensor,
    columns: SamplingColumns,
    seats: torch.Tensor,
    positions: torch.Tensor,
    *,
    filtered: bool = True,
    scratch: Scratch | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Choose a token for each row.

    Args:
        logits: [R, V] of any float dtype; of a row the elements lie side by side. -inf is never drawn.
        columns: of all seats.
        seats: [R] int32, each row's line of the columns.
        positions: [R] int32, where the drawn tokens will stand in their sequences.
        filtered: whether any row has top-k, top-p or min-p; false spares the look at each.
        scratch: of `make_scratch`, for as many rows.
        out: [R] int32, where to write; made when it is not given.

    Returns:
        [R] int32 token ids; of equally good ones the lowest. -1 where the logits are no numbers or none is above -inf.
    """
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int32, device=logits.device) if out is None else out
    bars, scores, token_ids = scratch or make_scratch(num_rows, vocab_size, logits.device)
    if num_rows == 0:
        return out
    if filtered:
        find_bars_kernel[(num_rows,)](
            logits, seats, *columns[:4], bars, vocab_size, logits.stride(0),
            LEAST_TEMPERATURE=LEAST_TEMPERATURE, BLOCK=4096, num_warps=16,
        )  # fmt: skip
    num_segments = scores.shape[1]
    score_tokens_kernel[(num_rows, num_segments)](
        logits, seats, positions, columns.temperature, columns.keys, bars, scores, token_ids, vocab_size,
        logits.stride(0), FILTERED=filtered, LEAST_TEMPERATURE=LEAST_TEMPERATURE, SEGMENT=SEGMENT, BLOCK=1024,
        num_warps=4,
    )  # fmt: skip
    choose_tokens_kernel[(num_rows,)](
        scores, token_ids, out, num_segments, BLOCK=triton.next_power_of_2(num_segments), num_warps=1
    )
    return out
