"""One persistent row a seat, on the device. A batch brings differences: one copy in, whatever they are.

Everything that is kept of the seats lies in one buffer of whole numbers. What a batch changes in it is collected here,
by place, and goes to the device together with the batch's own columns.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from engine.drawing import NOT_DRAWN
from engine.errors import ConfigError
from engine.faults import lacks_memory
from engine.gpu.seat_extras import SeatExtras
from engine.sampler import noise_key
from engine.sequence import SamplingParams
from kernels.draws import SamplingColumns

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from engine.batch import ScheduledBatch, Seated
    from engine.gpu.columns import Columns, Ints

log = logging.getLogger("relevo.engine")

# Columns of a seat's sampling: temperature, top-k, top-p, min-p, and the key's halves.
NUM_COLUMNS: Final = 6
NONE: Final = np.zeros(0, dtype=np.int32)


class Layout(NamedTuple):
    """Where things lie in the buffer, from row to row.

    Attributes:
        max_num_seqs: seats.
        width: token ids of a seat: one more than the context, for the last one is drawn and never computed.
        num_blocks: block ids of a seat.
    """

    max_num_seqs: int
    width: int
    num_blocks: int

    @property
    def tables(self) -> int:
        """Where the block tables begin; the token ids stand before them."""
        return self.max_num_seqs * self.width

    @property
    def sampling(self) -> int:
        """Where the columns of sampling begin, one after the other; the keys' halves lie side by side."""
        return self.tables + self.max_num_seqs * self.num_blocks

    @property
    def size(self) -> int:
        """All of it."""
        return self.sampling + self.max_num_seqs * NUM_COLUMNS


class Changes:
    """Whole numbers to be written, each place once: the last word counts."""

    def __init__(self) -> None:
        self._written: dict[int, int] = {}  # the last, one by one
        self._before: list[tuple[Ints, Ints]] = []

    def add(self, first: int, values: Ordered[int]) -> None:
        """Numbers one behind the other."""
        self._written.update(zip(range(first, first + len(values)), values, strict=True))

    def add_many(self, first: int, values: Ints) -> None:
        """The same of an array."""
        self._close()
        self._before.append((np.arange(first, first + len(values), dtype=np.int32), values))

    def take(self) -> tuple[Ints, Ints]:
        """(places, values), and there are none any more."""
        self._close()
        before, self._before = self._before, []
        if not before:
            return NONE, NONE
        if len(before) == 1:
            return before[0]
        places, values = (np.concatenate(column) for column in zip(*before, strict=True))
        # Of a place that comes several times, the last: the first one of the reversed.
        unique, first = np.unique(places[::-1], return_index=True)
        return unique, values[::-1][first]

    def _close(self) -> None:
        """What was written one by one comes before what comes now."""
        if self._written:
            written, self._written = self._written, {}
            count = len(written)
            both = np.fromiter(written, np.int32, count), np.fromiter(written.values(), np.int32, count)
            self._before.append(both)


class GpuRows:
    """The rows.

    Args:
        max_num_seqs: seats.
        max_model_len: longest sequence, in tokens.
        block_size: tokens of a KV block.
        vocab_size: stop tokens beyond it can never be drawn and are dropped.

    Raises:
        ConfigError: places of all seats' tokens would not fit into 32 bits.

    Attributes:
        token_ids: [seats, context + 1] int32 on the device.
        block_tables: [seats, blocks] int32 on the device.
        columns: how each seat samples, on the device.
        extras: what each seat asks for beside a token.
    """

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, block_size: int, vocab_size: int, device: torch.device
    ) -> None:
        self.layout = Layout(max_num_seqs, max_model_len + 1, -(-max_model_len // block_size))
        if self.layout.size >= 1 << 31:
            raise ConfigError(
                f"{max_num_seqs} seats of {max_model_len} tokens are more than a GPU counts: set capacity_num_seqs or "
                "max_model_len lower."
            )
        self.state = torch.zeros(self.layout.size, dtype=torch.int32, device=device)
        self.token_ids, self.block_tables, self.columns = _views(self.state, self.layout)
        self._block_size, self._vocab_size = block_size, vocab_size
        self.clear()

    def clear(self) -> None:
        """Nobody sits anywhere. What the buffer holds is not asked for before it is written again."""
        max_num_seqs = self.layout.max_num_seqs
        self.extras = SeatExtras(max_num_seqs, self._vocab_size)
        self._changes = Changes()
        self._sequence_ids = np.full(max_num_seqs, -1, dtype=np.int64)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self._unseated: dict[int, str] = {}  # why what is known of it could not be taken over

    def apply(self, batch: ScheduledBatch, columns: Columns) -> tuple[Ints, Ints]:
        """Take over what changed; gives the places of the buffer to be written, and what.

        Args:
            columns: the batch's.

        Raises:
            RuntimeError: afterwards a row belongs to another sequence than the batch says, or lacks blocks.
        """
        for seated in batch.seated:
            self._seat(seated)
        for seat, block_ids in batch.new_blocks:
            have = int(self._num_blocks[seat])
            self._changes.add(self.layout.tables + seat * self.layout.num_blocks + have, block_ids)
            self._num_blocks[seat] = have + len(block_ids)
        seats, ends = columns.table_seats[: len(batch)], columns.seq_lens[: len(batch)]
        wrong = (self._sequence_ids[seats] != batch.sequence_ids) | (self._num_blocks[seats] * self._block_size < ends)
        if wrong.any():
            rows = np.flatnonzero(wrong).tolist()
            raise RuntimeError(f"step {batch.step}: rows {rows} do not match what the seats were told")
        return self._changes.take()

    def append(self, seat: int, position: int, token_ids: tuple[int, ...]) -> None:
        """Tokens that followed without a draw; what does not fit the context ends the sequence."""
        room = self.layout.width - position
        self._changes.add(seat * self.layout.width + position, token_ids[:room])

    def failures_of(self, batch: ScheduledBatch) -> dict[int, str]:
        """Rows of a batch whose sequence could not be given its seat, with one line of cause."""
        if not self._unseated:
            return {}
        return {row: self._unseated[seat] for row, seat in enumerate(batch.seats) if seat in self._unseated}

    def _seat(self, seated: Seated) -> None:
        seat = seated.seat
        self._sequence_ids[seat] = seated.sequence_id
        self._num_blocks[seat] = 0
        self._unseated.pop(seat, None)
        try:
            self._changes.add_many(seat * self.layout.width, np.array(seated.token_ids, dtype=np.int32))
            self._set(seat, seated.params)
            self.extras.set(seat, seated.params, seated.token_ids, seated.num_prompt_tokens)
        except Exception as error:
            if lacks_memory(error):
                raise
            log.exception("sequence %d could not be given its seat and fails", seated.sequence_id)
            self._unseated[seat] = NOT_DRAWN
            self._set(seat, SamplingParams())
            self.extras.set(seat, SamplingParams(), (), 0)

    def _set(self, seat: int, params: SamplingParams) -> None:
        """How a sequence samples."""
        key = np.array([noise_key(params.seed, params.choice_index)])
        top_k = min(params.top_k, self._vocab_size)
        start, step = self.layout.sampling + seat, self.layout.max_num_seqs
        floats = np.array([params.temperature, params.top_p, params.min_p], dtype=np.float32).view(np.int32).tolist()
        for column, value in enumerate((floats[0], top_k, floats[1], floats[2])):
            self._changes.add(start + column * step, (value,))
        self._changes.add(start + 4 * step + seat, key.view(np.int32).tolist())


def _views(state: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor, SamplingColumns]:
    """Token ids, block tables and columns of sampling, in the buffer."""
    seats = layout.max_num_seqs
    token_ids = state[: layout.tables].view(seats, layout.width)
    tables = state[layout.tables : layout.sampling].view(seats, layout.num_blocks)
    temperature, top_k, top_p, min_p, *keys = state[layout.sampling :].view(NUM_COLUMNS, seats)
    floats = [column.view(torch.float32) for column in (temperature, top_p, min_p)]
    halves = torch.as_strided(keys[0], (seats, 2), (2, 1), keys[0].storage_offset())
    return token_ids, tables, SamplingColumns(floats[0], top_k, floats[1], floats[2], halves)
