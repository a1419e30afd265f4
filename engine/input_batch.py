"""One persistent row a seat. Batches bring differences; the inputs of a step are gathered without a loop over rows."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.drawing import NOT_DRAWN, Extras
from engine.faults import lacks_memory
from engine.models.llama import ModelInputs
from engine.sampler import SamplingRows
from engine.sequence import SamplingParams
from kernels.paged_attention import AttentionRows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from engine.batch import ScheduledBatch, Seated
    from engine.sampler import Ints

log = logging.getLogger("relevo.engine")


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What one step needs, in the runner's own row order: rows of one token first, the longest foremost.

    Attributes:
        order: [R], index in the batch of each row; rows of padding count on behind the batch's own.
        row_starts: [R], first token of each row.
        sampling: [S], rows that sample, as indices of this order.
        last_tokens: [S + D], the token whose logits each of them needs; behind them the drafts, in
            this order too.
    """

    model: ModelInputs
    order: Ints
    row_starts: Ints
    sampling: Ints
    last_tokens: torch.Tensor


class InputBatch:
    """The rows.

    Args:
        max_num_seqs: seats.
        max_model_len: longest sequence, in tokens.
        block_size: tokens of a KV block.
        null_block: a block that no sequence owns and that holds zeros; it fills the tables. The one behind it is
            written by padding and never read.
        vocab_size: stop tokens beyond it can never be drawn and are dropped.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        null_block: int,
        vocab_size: int,
    ) -> None:
        self._block_size = block_size
        self._null_block = null_block
        self._sequence_ids: Ints = np.full(max_num_seqs, -1, dtype=np.int64)
        # One column more than the context: the last token drawn is never computed, but it is written down.
        self._token_ids: Ints = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int64)
        self._block_tables: Ints = np.full((max_num_seqs, -(-max_model_len // block_size)), null_block, dtype=np.int64)
        self._num_blocks: Ints = np.zeros(max_num_seqs, dtype=np.int64)
        self._vocab_size = vocab_size
        self.sampling = SamplingRows(max_num_seqs, vocab_size)
        # By seat, until it changes hands; most seats have none.
        self.extras: dict[int, Extras] = {}
        self._unseated: dict[int, str] = {}  # why what is known of it could not be taken over

    def apply(self, batch: ScheduledBatch) -> None:
        """Take over what changed.

        Raises:
            RuntimeError: afterwards a row belongs to another sequence than the batch says, or lacks blocks.
        """
        for seated in batch.seated:
            self._seat(seated)
        for seat, block_ids in batch.new_blocks:
            have = self._num_blocks[seat]
            self._block_tables[seat, have : have + len(block_ids)] = block_ids
            self._num_blocks[seat] = have + len(block_ids)
        seats = np.array(batch.seats, dtype=np.int64)
        ends = np.array(batch.starts, dtype=np.int64) + np.array(batch.counts, dtype=np.int64)
        for row, draft in batch.drafts.items():
            self._token_ids[seats[row], ends[row] : ends[row] + len(draft)] = draft
            ends[row] += len(draft)
        wrong = (self._sequence_ids[seats] != batch.sequence_ids) | (self._num_blocks[seats] * self._block_size < ends)
        if wrong.any():
            rows = np.flatnonzero(wrong).tolist()
            raise RuntimeError(f"step {batch.step}: rows {rows} do not match what the seats were told")

    def failures_of(self, batch: ScheduledBatch) -> dict[int, str]:
        """Rows of a batch whose sequence could not be given its seat, with one line of cause."""
        if not self._unseated:
            return {}
        return {row: self._unseated[seat] for row, seat in enumerate(batch.seats) if seat in self._unseated}

    def prepare(self, batch: ScheduledBatch) -> StepInputs:
        """Gather the inputs of a batch that was applied."""
        seats, starts, counts, samples = _columns(batch)
        order = np.lexsort((-(starts + counts), counts > 1))
        seats, starts, counts = seats[order], starts[order], counts[order]
        loc = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=loc[1:])
        token_seats = np.repeat(seats, counts)
        positions = np.arange(loc[-1]) + np.repeat(starts - loc[:-1], counts)
        blocks = self._block_tables[token_seats, positions // self._block_size]
        if batch.padding:
            blocks[np.repeat(order >= len(batch), counts)] = self._null_block + 1
        seq_lens = starts + counts
        rows = AttentionRows(
            torch.from_numpy(self._block_tables[seats, : -(-int(seq_lens.max()) // self._block_size)]),
            torch.from_numpy(loc),
            torch.from_numpy(seq_lens),
        )
        model = ModelInputs(
            input_ids=torch.from_numpy(self._token_ids[token_seats, positions]),
            positions=torch.from_numpy(positions),
            block_ids=torch.from_numpy(blocks),
            offsets=torch.from_numpy(positions % self._block_size),
            rows=rows,
        )
        sampling = np.flatnonzero(samples[order])
        ends = loc[1:][sampling]
        last_tokens = _with_drafts(batch, order, sampling, ends) if batch.drafts else ends - 1
        return StepInputs(model, order, loc[:-1], sampling, torch.from_numpy(last_tokens))

    def append(self, seats: Ints, positions: Ints, token_ids: Ints, forced: Mapping[int, tuple[int, ...]]) -> None:
        """Write down drawn tokens, so that the next step finds them.

        Args:
            forced: row to tokens that follow the drawn one. What does not fit the context ends the sequence.
        """
        self._token_ids[seats, positions] = token_ids
        for row, following in forced.items():
            start = positions[row] + 1
            line = self._token_ids[seats[row], start : start + len(following)]
            line[:] = following[: len(line)]

    def blocks_of(self, seat: int) -> torch.Tensor:
        """Block ids of a seat: [blocks] int64."""
        return torch.from_numpy(self._block_tables[seat, : self._num_blocks[seat]])

    def _seat(self, seated: Seated) -> None:
        seat = seated.seat
        self._sequence_ids[seat] = seated.sequence_id
        self._block_tables[seat] = self._null_block
        self._num_blocks[seat] = 0
        self._unseated.pop(seat, None)
        self.extras.pop(seat, None)
        try:
            self._token_ids[seat, : len(seated.token_ids)] = seated.token_ids
            self.sampling.set(seat, seated.params, seated.num_prompt_tokens)
            if not seated.params.is_plain:
                num_prompt_tokens = seated.num_prompt_tokens
                self.extras[seat] = Extras(seated.params, seated.token_ids, num_prompt_tokens, self._vocab_size)
        except Exception as error:
            if lacks_memory(error):
                raise
            log.exception("sequence %d could not be given its seat and fails", seated.sequence_id)
            self._unseated[seat] = NOT_DRAWN
            self._token_ids[seat] = 0
            self.sampling.set(seat, SamplingParams(), seated.num_prompt_tokens)


def _columns(batch: ScheduledBatch) -> tuple[Ints, Ints, Ints, NDArray[np.bool_]]:
    """Seats, starts, counts and samples of the rows, then of the padding; counts with drafts."""
    columns: tuple[tuple[int, ...], ...] = (batch.seats, batch.starts, batch.counts, batch.samples)
    if batch.padding:
        more = zip(*[(row.seat, row.start, row.count, row.samples) for row in batch.padding], strict=True)
        columns = tuple([a + b for a, b in zip(columns, more, strict=True)])
    seats, starts, counts, samples = (np.array(column, dtype=np.int64) for column in columns)
    for row, draft in batch.drafts.items():
        counts[row] += len(draft)
    return seats, starts, counts, samples.astype(bool)


def _with_drafts(batch: ScheduledBatch, order: Ints, sampling: Ints, ends: Ints) -> Ints:
    """Tokens whose logits are needed: a row's own before its drafts; then the drafts, row by row.

    Args:
        sampling: [S], rows that sample.
        ends: [S], one behind the last token of each, drafts included.
    """
    rows = order[sampling].tolist()
    lengths = np.array([len(batch.drafts.get(row, ())) for row in rows], dtype=np.int64)
    drafts = [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True) if length]
    return np.concatenate((ends - lengths - 1, *drafts))
