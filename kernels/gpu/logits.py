"""Logits changed in place before a token is drawn, for the rows that ask: biases, penalties, masks of a grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kernels.draws import PROMPT

if TYPE_CHECKING:
    import torch

    from kernels.draws import Biased, Biases, Penalized


@triton.jit
def add_biases_kernel(
    logits_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    values_ptr: tl.tensor,
    early_values_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    seats_ptr: tl.tensor,
    is_early_ptr: tl.tensor,
    logits_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Line `program_id(0)`: BLOCK of its logits at a time."""
    line = tl.program_id(0)
    row = tl.load(rows_ptr + line).to(tl.int64)  # row * stride may pass 2³¹
    seat = tl.load(seats_ptr + line)
    is_early = tl.load(is_early_ptr + line) != 0
    end = tl.load(starts_ptr + seat + 1)
    for start in range(tl.load(starts_ptr + seat), end, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < end
        logits = logits_ptr + row * logits_stride + tl.load(token_ids_ptr + places, mask=inside, other=0)
        values = tl.load(values_ptr + places, mask=inside, other=0.0)
        early_values = tl.load(early_values_ptr + places, mask=inside, other=0.0)
        added = tl.load(logits, mask=inside, other=0.0) + tl.where(is_early, early_values, values)
        tl.store(logits, added, mask=inside)


def add_biases(logits: torch.Tensor, biases: Biases, lines: Biased) -> None:
    """Add to some logits, in place.

    Args:
        logits: [R, V] float32; of a row the elements lie side by side.
        biases: of all seats.
        lines: no row comes twice.
    """
    num_lines = lines.rows.shape[0]
    if num_lines:
        add_biases_kernel[(num_lines,)](logits, *biases, *lines, logits.stride(0), BLOCK=128, num_warps=4)


@triton.jit
def clear_counts_kernel(
    counts_ptr: tl.tensor,
    seats_ptr: tl.tensor,
    num_counted_ptr: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Program (line, part): BLOCK counts of a seat of which no token is counted yet."""
    line = tl.program_id(0)
    if tl.load(num_counted_ptr + line) == 0:
        seat = tl.load(seats_ptr + line).to(tl.int64)  # seat * size may pass 2³¹
        token_ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        places = counts_ptr + seat * vocab_size + token_ids
        tl.store(places, tl.zeros([BLOCK], tl.int32), mask=token_ids < vocab_size)


@triton.jit
def count_tokens_kernel(
    counts_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    seats_ptr: tl.tensor,
    num_prompt_tokens_ptr: tl.tensor,
    num_counted_ptr: tl.tensor,
    num_tokens_ptr: tl.tensor,
    vocab_size: tl.tensor,
    token_ids_stride: tl.tensor,
    PROMPT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (line, part): BLOCK of a row's new tokens. Whole numbers add up to the same in any order."""
    line = tl.program_id(0)
    seat = tl.load(seats_ptr + line).to(tl.int64)  # seat * stride may pass 2³¹
    num_prompt_tokens = tl.load(num_prompt_tokens_ptr + line)
    places = tl.load(num_counted_ptr + line) + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < tl.load(num_tokens_ptr + line)
    token_ids = tl.load(token_ids_ptr + seat * token_ids_stride + places, mask=inside, other=0)
    counters = counts_ptr + seat * vocab_size + token_ids
    tl.atomic_or(counters, tl.full([BLOCK], PROMPT, tl.int32), mask=inside & (places < num_prompt_tokens))
    tl.atomic_add(counters, tl.full([BLOCK], 1, tl.int32), mask=inside & (places >= num_prompt_tokens))


def count_tokens(counts: torch.Tensor, token_ids: torch.Tensor, lines: Penalized, *, most: int, anew: bool) -> None:
    """Count the tokens of some seats that were not counted yet, in place.

    Args:
        counts: [seats, V] int32: how often a token stands in the answer, and `PROMPT` more where the prompt has it.
        token_ids: [seats, context] int32, the known tokens of each seat, below V.
        lines: no seat comes twice.
        most: tokens to be counted of the line that has most.
        anew: whether a line has no token that is counted.
    """
    num_lines, vocab_size = lines.rows.shape[0], counts.shape[1]
    if not num_lines:
        return
    if anew:
        clear_counts_kernel[(num_lines, triton.cdiv(vocab_size, 1024))](
            counts, lines.seats, lines.num_counted, vocab_size, BLOCK=1024, num_warps=4
        )
    count_tokens_kernel[(num_lines, triton.cdiv(max(most, 1), 128))](
        counts, token_ids, lines.seats, lines.num_prompt_tokens, lines.num_counted, lines.num_tokens, vocab_size,
        token_ids.stride(0), PROMPT=PROMPT, BLOCK=128, num_warps=4,
    )  # fmt: skip


@triton.jit
def penalize_kernel(
    logits_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    seats_ptr: tl.tensor,
    penalties_ptr: tl.tensor,
    vocab_size: tl.tensor,
    logits_stride: tl.tensor,
    PROMPT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (line, part): BLOCK logits of a row."""
    line = tl.program_id(0)
    row = tl.load(rows_ptr + line).to(tl.int64)  # row * stride may pass 2³¹, and so may seat * size
    seat = tl.load(seats_ptr + line).to(tl.int64)
    repetition = tl.load(penalties_ptr + 3 * line)
    frequency = tl.load(penalties_ptr + 3 * line + 1)
    presence = tl.load(penalties_ptr + 3 * line + 2)
    token_ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seen = tl.load(counts_ptr + seat * vocab_size + token_ids, mask=token_ids < vocab_size, other=0)
    places = logits_ptr + row * logits_stride + token_ids
    values = tl.load(places, mask=seen != 0, other=0.0)
    counts = seen & (PROMPT - 1)
    values = tl.where(values > 0, values / repetition, values * repetition)
    values -= frequency * counts.to(tl.float32)
    values -= presence * (counts > 0).to(tl.float32)
    tl.store(places, values, mask=seen != 0)


def penalize(logits: torch.Tensor, counts: torch.Tensor, lines: Penalized) -> None:
    """Lower the logits of tokens that there are already, in place: repetition first, as vLLM does.

    Repetition is that of Keskar et al. (CTRL), over prompt and answer; frequency and presence are OpenAI's, over the
    answer alone.

    Args:
        logits: [R, V] float32; of a row the elements lie side by side.
        counts: [seats, V] int32, by `count_tokens`.
        lines: no row comes twice.
    """
    num_lines, vocab_size = lines.rows.shape[0], logits.shape[1]
    if num_lines:
        penalize_kernel[(num_lines, triton.cdiv(vocab_size, 1024))](
            logits, counts, lines.rows, lines.seats, lines.penalties, vocab_size, logits.stride(0),
            PROMPT=PROMPT, BLOCK=1024, num_warps=4,
        )  # fmt: skip


@triton.jit
def apply_token_mask_kernel(
    logits_ptr: tl.tensor,
    masks_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    vocab_size: tl.tensor,
    logits_stride: tl.tensor,
    masks_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Program (mask, part): BLOCK tokens, a word of the mask for each 32."""
    mask, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_ptr + mask).to(tl.int64)
    token_ids = part * BLOCK + tl.arange(0, BLOCK)
    inside = token_ids < vocab_size
    words = tl.load(masks_ptr + mask.to(tl.int64) * masks_stride + token_ids // 32, mask=inside, other=-1)
    forbidden = ((words >> (token_ids % 32)) & 1) == 0
    tl.store(logits_ptr + row * logits_stride + token_ids, float("-inf"), mask=inside & forbidden)


def apply_token_mask(logits: torch.Tensor, masks: torch.Tensor, rows: torch.Tensor) -> None:
    """Take away what a mask does not allow, in place.

    Args:
        logits: [R, V]; of a row the elements lie side by side.
        masks: [M, ⌈V / 32⌉] int32, a bit a token, the lowest first.
        rows: [M] int32, the row of each mask.
    """
    num_masks, vocab_size = masks.shape[0], logits.shape[1]
    if num_masks:
        block = 1024
        grid = (num_masks, triton.cdiv(vocab_size, block))
        apply_token_mask_kernel[grid](
            logits, masks, rows, vocab_size, logits.stride(0), masks.stride(0), BLOCK=block, num_warps=4
        )
