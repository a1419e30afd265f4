"""Logits changed in place before a token is drawn, for the rows that ask: biases, penalties, masks of a grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

    from kernels.draws import Adjustments


@triton.jit
def adjust_logits_kernel(
    logits_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    biases_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    penalties_ptr: tl.tensor,
    num_lines: tl.tensor,
    logits_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Lines from `program_id(0) * BLOCK` on."""
    lines = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lines < num_lines
    rows = tl.load(rows_ptr + lines, mask=inside, other=0).to(tl.int64)
    places = logits_ptr + rows * logits_stride + tl.load(token_ids_ptr + lines, mask=inside, other=0)
    counts = tl.load(counts_ptr + lines, mask=inside, other=-1)
    repetition = tl.load(penalties_ptr + 3 * lines, mask=inside, other=1.0)
    frequency = tl.load(penalties_ptr + 3 * lines + 1, mask=inside, other=0.0)
    presence = tl.load(penalties_ptr + 3 * lines + 2, mask=inside, other=0.0)
    values = tl.load(places, mask=inside, other=0.0) + tl.load(biases_ptr + lines, mask=inside, other=0.0)
    lowered = tl.where(values > 0, values / repetition, values * repetition)
    lowered -= frequency * counts.to(tl.float32) + presence * (counts > 0).to(tl.float32)
    tl.store(places, tl.where(counts >= 0, lowered, values), mask=inside)


def adjust_logits(logits: torch.Tensor, adjustments: Adjustments) -> None:
    """Bias some logits, then lower those of tokens that were seen, in place: the order is vLLM's.

    Repetition is that of Keskar et al. (CTRL), over prompt and answer; frequency and presence are OpenAI's, over the
    answer alone.

    Args:
        logits: [R, V] float32; of a row the elements lie side by side.
        adjustments: no token of a row comes twice.
    """
    num_lines = adjustments.rows.shape[0]
    if num_lines:
        block = 256
        grid = (triton.cdiv(num_lines, block),)
        adjust_logits_kernel[grid](logits, *adjustments, num_lines, logits.stride(0), BLOCK=block, num_warps=4)


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
