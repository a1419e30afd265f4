"""Log-probabilities of the likeliest tokens of some rows and of those that were drawn, without a sort.

A row is cut into parts, a program each, that find the likeliest of their own one after the other; another program finds
the likeliest among those. Of equal logits the lower id comes first, however many are asked for: a product that rounds
to sixteen bits makes many equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from kernels.draws import MOST

if TYPE_CHECKING:
    from kernels.draws import Logprobs

# A row is cut into parts of so many tokens.
SEGMENT: Final = 4096


@triton.jit
def _take_likeliest(values: tl.tensor, token_ids: tl.tensor, left: tl.tensor) -> tl.tensor:
    """The largest of those that are left, its token id, and which are left then."""
    value = tl.max(tl.where(left, values, float("-inf")), axis=0)
    token_id = tl.min(tl.where(left & (values == value), token_ids, 0x7FFFFFFF), axis=0)
    return value, token_id, left & (token_ids != token_id)


@triton.jit(do_not_specialize=["num_top"])
def find_likeliest_kernel(
    logits_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    values_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    vocab_size: tl.tensor,
    logits_stride: tl.tensor,
    num_top: tl.tensor,
    MOST: tl.constexpr,
    SEGMENT: tl.constexpr,
) -> None:
    """Program (line, segment): the likeliest of a part of the row, its largest logit, and the sum of exp beside it."""
    line, segment = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_ptr + line).to(tl.int64)  # row * stride may pass 2³¹
    token_ids = segment * SEGMENT + tl.arange(0, SEGMENT)
    left = token_ids < vocab_size
    logits = tl.load(logits_ptr + row * logits_stride + token_ids, mask=left, other=float("-inf")).to(tl.float32)
    largest = tl.max(logits, axis=0)
    parts = tl.where(logits == float("-inf"), 0.0, tl.exp(logits - largest))
    place = line * tl.num_programs(1) + segment
    tl.store(sums_ptr + 2 * place, largest)
    tl.store(sums_ptr + 2 * place + 1, tl.sum(parts, axis=0))
    for index in range(num_top):
        value, token_id, left = _take_likeliest(logits, token_ids, left)
        tl.store(values_ptr + place * MOST + index, value)
        tl.store(token_ids_ptr + place * MOST + index, token_id)


@triton.jit(do_not_specialize=["num_top"])
def merge_likeliest_kernel(
    values_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    logprobs_ptr: tl.tensor,
    top_ids_ptr: tl.tensor,
    norms_ptr: tl.tensor,
    num_segments: tl.tensor,
    stride: tl.tensor,
    num_top: tl.tensor,
    MOST: tl.constexpr,
    SEGMENTS: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """The likeliest of line `program_id(0)` over its segments."""
    line = tl.program_id(0)
    segments = tl.arange(0, SEGMENTS)
    inside = segments < num_segments
    places = sums_ptr + 2 * (line * num_segments + segments)
    maxima = tl.load(places, mask=inside, other=float("-inf"))
    largest = tl.max(maxima, axis=0)
    parts = tl.load(places + 1, mask=inside, other=0.0) * tl.exp(maxima - largest)
    norm = largest + tl.log(tl.sum(tl.where(maxima == float("-inf"), 0.0, parts), axis=0))
    tl.store(norms_ptr + line * stride, norm)
    lanes = tl.arange(0, LANES)
    left = (lanes < num_segments * MOST) & (lanes % MOST < num_top)
    places = line * num_segments * MOST + lanes
    values = tl.load(values_ptr + places, mask=left, other=float("-inf"))
    token_ids = tl.load(token_ids_ptr + places, mask=left, other=0x7FFFFFFF)
    for index in range(num_top):
        value, token_id, left = _take_likeliest(values, token_ids, left)
        tl.store(logprobs_ptr + line * stride + index, value - norm)
        tl.store(top_ids_ptr + line * stride + index, token_id)


def top_logprobs(logits: torch.Tensor, rows: torch.Tensor, num_top: int, out: Logprobs) -> None:
    """Find the likeliest tokens of some rows.

    Args:
        logits: [R, V] of any float dtype; of a row the elements lie side by side.
        rows: [T] int32.
        num_top: how many; of more than `MOST` the first ones. Of the others in `out` nothing is written.
        out: of T rows; `drawn` is left.
    """
    num_lines, vocab_size = rows.shape[0], logits.shape[1]
    if not num_lines:
        return
    num_segments = triton.cdiv(vocab_size, SEGMENT)
    num_top = min(num_top, MOST, vocab_size)
    parts = (num_lines, num_segments, MOST)
    values = torch.empty(parts, dtype=torch.float32, device=logits.device)
    token_ids = torch.empty(parts, dtype=torch.int32, device=logits.device)
    sums = torch.empty((num_lines, num_segments, 2), dtype=torch.float32, device=logits.device)
    find_likeliest_kernel[(num_lines, num_segments)](
        logits, rows, values, token_ids, sums, vocab_size, logits.stride(0), num_top,
        MOST=MOST, SEGMENT=SEGMENT, num_warps=8,
    )  # fmt: skip
    merge_likeliest_kernel[(num_lines,)](
        values, token_ids, sums, out.logprobs, out.token_ids, out.norms, num_segments, out.logprobs.stride(0),
        num_top, MOST=MOST, SEGMENTS=triton.next_power_of_2(num_segments),
        LANES=triton.next_power_of_2(num_segments * MOST), num_warps=4,
    )  # fmt: skip


@triton.jit
def drawn_logprobs_kernel(
    logits_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    places_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    drawn_ptr: tl.tensor,
    norms_ptr: tl.tensor,
    logprobs_ptr: tl.tensor,
    logits_stride: tl.tensor,
    kept_stride: tl.tensor,
    stride: tl.tensor,
) -> None:
    """The log-probability of line `program_id(0)`'s token."""
    line = tl.program_id(0)
    row, place = tl.load(rows_ptr + line).to(tl.int64), tl.load(places_ptr + line).to(tl.int64)
    token_id = tl.maximum(tl.load(drawn_ptr + row), 0)
    logit = tl.load(logits_ptr + row * logits_stride + token_id, mask=place < 0, other=0.0).to(tl.float32)
    logit += tl.load(kept_ptr + place * kept_stride + token_id, mask=place >= 0, other=0.0).to(tl.float32)
    tl.store(logprobs_ptr + line * stride, logit - tl.load(norms_ptr + line * stride))


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
        logits: [R, V], as in `top_logprobs`, though some rows may have been changed since; of a row the elements lie
            side by side.
        kept: [K, V], what was in those before.
        places: [T] int32, where each row is kept; -1 for one that is as it was.
        rows: [T] int32, as in `top_logprobs`.
        drawn: [R] int32, of each row of the logits; -1, for no token, is taken for 0.
        out: of T rows with their norms; gets `drawn`.
    """
    num_lines = rows.shape[0]
    if num_lines:
        drawn_logprobs_kernel[(num_lines,)](
            logits, kept, places, rows, drawn, out.norms, out.drawn, logits.stride(0), kept.stride(0),
            out.norms.stride(0), num_warps=1,
        )  # fmt: skip
