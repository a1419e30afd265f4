"""Logits changed in place before a token is drawn, for the rows that ask: biases, penalties, masks of a grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from kernels.draws import Penalized

if TYPE_CHECKING:
    from kernels.draws import Biases

# Marks a token of the prompt beside how often it stands in the answer.
PROMPT = 1 << 30
# Rows whose tokens are counted at a time: a counter for each token of the vocabulary is as large as the logits.
MAX_COUNTED: Final = 32


@triton.jit(do_not_specialize=["num_lines"])
def add_biases_kernel(
    logits_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    values_ptr: tl.tensor,
    num_lines: tl.tensor,
    logits_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Lines from `program_id(0) * BLOCK` on."""
    lines = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lines < num_lines
    rows = tl.load(rows_ptr + lines, mask=inside, other=0).to(tl.int64)  # row * stride may pass 2³¹
    places = logits_ptr + rows * logits_stride + tl.load(token_ids_ptr + lines, mask=inside, other=0)
    values = tl.load(places, mask=inside, other=0.0) + tl.load(values_ptr + lines, mask=inside, other=0.0)
    tl.store(places, values, mask=inside)


def add_biases(logits: torch.Tensor, biases: Biases) -> None:
    """Add to some logits, in place.

    Args:
        logits: [R, V] float32; of a row the elements lie side by side.
        biases: no token of a row comes twice.
    """
    num_lines = biases.rows.shape[0]
    if num_lines:
        block = 256
        add_biases_kernel[(triton.cdiv(num_lines, block),)](
            logits, *biases, num_lines, logits.stride(0), BLOCK=block, num_warps=4
        )


@triton.jit
def count_tokens_kernel(
    counts_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    seats_ptr: tl.tensor,
    num_prompt_tokens_ptr: tl.tensor,
    num_tokens_ptr: tl.tensor,
    vocab_size: tl.tensor,
    token_ids_stride: tl.tensor,
    PROMPT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (line, part): BLOCK of a row's tokens. Whole numbers add up to the same in any order."""
    line = tl.program_id(0)
    seat = tl.load(seats_ptr + line).to(tl.int64)  # seat * stride may pass 2³¹
    num_prompt_tokens = tl.load(num_prompt_tokens_ptr + line)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < tl.load(num_tokens_ptr + line)
    token_ids = tl.load(token_ids_ptr + seat * token_ids_stride + places, mask=inside, other=0)
    counters = counts_ptr + line.to(tl.int64) * vocab_size + token_ids
    tl.atomic_or(counters, tl.full([BLOCK], PROMPT, tl.int32), mask=inside & (places < num_prompt_tokens))
    tl.atomic_add(counters, tl.full([BLOCK], 1, tl.int32), mask=inside & (places >= num_prompt_tokens))


@triton.jit
def penalize_kernel(
    logits_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    penalties_ptr: tl.tensor,
    vocab_size: tl.tensor,
    logits_stride: tl.tensor,
    PROMPT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (line, part): BLOCK logits of a row."""
    line = tl.program_id(0)
    row = tl.load(rows_ptr + line).to(tl.int64)  # row * stride may pass 2³¹
    repetition = tl.load(penalties_ptr + 3 * line)
    frequency = tl.load(penalties_ptr + 3 * line + 1)
    presence = tl.load(penalties_ptr + 3 * line + 2)
    token_ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token_ids < vocab_size
    seen = tl.load(counts_ptr + line.to(tl.int64) * vocab_size + token_ids, mask=inside, other=0)
    places = logits_ptr + row * logits_stride + token_ids
    values = tl.load(places, mask=inside, other=0.0)
    counts = seen & (PROMPT - 1)
    values = tl.where(values > 0, values / repetition, values * repetition)
    values -= frequency * counts.to(tl.float32)
    values -= presence * (counts > 0).to(tl.float32)
    tl.store(places, values, mask=inside & (seen != 0))


def penalize(
    logits: torch.Tensor, token_ids: torch.Tensor, lines: Penalized, *, counts: torch.Tensor | None = None
) -> None:
    """Lower the logits of tokens that there are already, in place: repetition first, as vLLM does.

    Repetition is that of Keskar et al. (CTRL), over prompt and answer; frequency and presence are OpenAI's, over the
    answer alone.

    Args:
        logits: [R, V] float32; of a row the elements lie side by side.
        token_ids: [seats, context] int32, the known tokens of each seat, below V.
        lines: no row comes twice.
        counts: [C, V] int32, room to count in, for so many rows at a time; made for `MAX_COUNTED` when it is not given.
    """
    num_lines, vocab_size = lines.rows.shape[0], logits.shape[1]
    if not num_lines:
        return
    if counts is None:
        counts = torch.empty((min(num_lines, MAX_COUNTED), vocab_size), dtype=torch.int32, device=logits.device)
    for first in range(0, num_lines, counts.shape[0]):
        part = Penalized(*[column[first : first + counts.shape[0]] for column in lines])
        _penalize_some(logits, token_ids, part, counts[: part.rows.shape[0]])


def _penalize_some(logits: torch.Tensor, token_ids: torch.Tensor, lines: Penalized, counts: torch.Tensor) -> None:
    """`penalize` with room for all of these lines."""
    num_lines, vocab_size = counts.shape
    counts.zero_()
    block = 1024
    count_tokens_kernel[(num_lines, triton.cdiv(token_ids.shape[1], block))](
        counts, token_ids, lines.seats, lines.num_prompt_tokens, lines.num_tokens, vocab_size, token_ids.stride(0),
        PROMPT=PROMPT, BLOCK=block, num_warps=4,
    )  # fmt: skip
    penalize_kernel[(num_lines, triton.cdiv(vocab_size, block))](
        logits, counts, lines.rows, lines.penalties, vocab_size, logits.stride(0),
        PROMPT=PROMPT, BLOCK=block, num_warps=4,
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
