"""The tokens of a step, gathered on the device from what it keeps of each seat."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch


class TokenInputs(NamedTuple):
    """Of each token of a step.

    Attributes:
        input_ids: [N] int32.
        positions: [N] int32, in its sequence.
        slots: [N] int32, where its keys and values go: block id times block size plus the place there; -1 for nowhere.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


@triton.jit(do_not_specialize=["num_rows"])
def gather_inputs_kernel(
    token_ids_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    seats_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    input_ids_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    num_rows: tl.tensor,
    token_ids_stride: tl.tensor,
    table_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    DECODE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """DECODE: rows from `program_id(0) * BLOCK` on, a token each. Else program (row, part): BLOCK tokens of a row."""
    lanes = tl.arange(0, BLOCK)
    if DECODE:
        tokens = tl.program_id(0) * BLOCK + lanes
        inside = tokens < num_rows
        seats = tl.load(seats_ptr + tokens, mask=inside, other=-1)
        positions = tl.load(starts_ptr + tokens, mask=inside, other=0)
    else:
        row = tl.program_id(0)
        first = tl.load(query_start_loc_ptr + row)
        offsets = tl.program_id(1) * BLOCK + lanes
        tokens = first + offsets
        inside = tokens < tl.load(query_start_loc_ptr + row + 1)
        seats = tl.load(seats_ptr + row) + tl.zeros([BLOCK], tl.int32)
        positions = tl.load(starts_ptr + row) + offsets
    seated = inside & (seats >= 0)
    positions = tl.where(seated, positions, 0)
    seats = tl.where(seated, seats, 0).to(tl.int64)  # seat * stride may pass 2³¹
    input_ids = tl.load(token_ids_ptr + seats * token_ids_stride + positions, mask=seated, other=0)
    block_ids = tl.load(block_tables_ptr + seats * table_stride + positions // BLOCK_SIZE, mask=seated, other=0)
    slots = tl.where(seated, block_ids * BLOCK_SIZE + positions % BLOCK_SIZE, -1)
    tl.store(input_ids_ptr + tokens, input_ids, mask=inside)
    tl.store(positions_ptr + tokens, positions, mask=inside)
    tl.store(slots_ptr + tokens, slots, mask=inside)


def gather_inputs(
    token_ids: torch.Tensor,
    block_tables: torch.Tensor,
    seats: torch.Tensor,
    starts: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    block_size: int,
    max_query_len: int,
    out: TokenInputs,
) -> TokenInputs:
    """Look up what a step computes.

    Args:
        token_ids: [seats, context] int32, the known tokens of each seat.
        block_tables: [seats, blocks] int32, its blocks; block id times block size stays below 2³¹.
        seats: [R] int32, of each row; -1 for a row that stands for nothing, whose tokens are written nowhere.
        starts: [R] int32, the position of each row's first token.
        query_start_loc: [R + 1] int32; row r's tokens are query_start_loc[r] to query_start_loc[r + 1].
        block_size: tokens of a block.
        max_query_len: tokens of the longest row. 1 promises that row r's only token is token r, and leaves
            `query_start_loc` unread.
        out: where to write, of as many tokens.

    Returns:
        `out`.
    """
    num_rows = seats.shape[0]
    if num_rows:
        decode = max_query_len == 1
        block = 128 if decode else min(1024, triton.next_power_of_2(max_query_len))
        grid = (triton.cdiv(num_rows, block),) if decode else (num_rows, triton.cdiv(max_query_len, block))
        gather_inputs_kernel[grid](
            token_ids, block_tables, seats, starts, query_start_loc, *out, num_rows, token_ids.stride(0),
            block_tables.stride(0), BLOCK_SIZE=block_size, DECODE=decode, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["count"])
def apply_changes_kernel(
    state_ptr: tl.tensor, places_ptr: tl.tensor, values_ptr: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Changes from `program_id(0) * BLOCK` on."""
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < count
    places = tl.load(places_ptr + lanes, mask=inside, other=0)
    tl.store(state_ptr + places, tl.load(values_ptr + lanes, mask=inside, other=0), mask=inside)


def apply_changes(state: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
    """Write a few of many numbers, in place: values [C] int32 to places [C] int32 of state [S] int32, none twice."""
    count = places.shape[0]
    if count:
        grid = (triton.cdiv(count, 1024),)
        apply_changes_kernel[grid](state, places, values, count, BLOCK=1024, num_warps=4)


@triton.jit(do_not_specialize=["count"])
def append_tokens_kernel(
    token_ids_ptr: tl.tensor,
    seats_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    drawn_ptr: tl.tensor,
    count: tl.tensor,
    token_ids_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Rows from `program_id(0) * BLOCK` on."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < count
    seats = tl.load(seats_ptr + rows, mask=inside, other=0).to(tl.int64)  # seat * stride may pass 2³¹
    positions = tl.load(positions_ptr + rows, mask=inside, other=-1)
    drawn = tl.maximum(tl.load(drawn_ptr + rows, mask=inside, other=0), 0)
    tl.store(token_ids_ptr + seats * token_ids_stride + positions, drawn, mask=positions >= 0)


def append_tokens(token_ids: torch.Tensor, seats: torch.Tensor, positions: torch.Tensor, drawn: torch.Tensor) -> None:
    """Write drawn tokens where the next step finds them, in place; of a row without a token, token 0.

    Args:
        token_ids: [seats, context] int32.
        seats: [R] int32, of each row.
        positions: [R] int32; -1 for a row that stands for nothing.
        drawn: [R] int32; -1 for no token.
    """
    count = seats.shape[0]
    if count:
        append_tokens_kernel[(triton.cdiv(count, 128),)](
            token_ids, seats, positions, drawn, count, token_ids.stride(0), BLOCK=128, num_warps=4
        )
