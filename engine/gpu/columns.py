"""The rows of a step as columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.batch import ScheduledBatch

    Ints = NDArray[np.int32]  # of all that goes to a device


class Columns(NamedTuple):
    """Of each row of a step, and of each row that samples; whole numbers.

    Attributes:
        seats: [R], -1 for a row that stands for nothing.
        table_seats: [R], whose block table it reads; a seat even where `seats` has none.
        starts: [R], position of its first token.
        seq_lens: [R], its tokens in the cache, the new ones included; 0 reads nothing.
        sample_tokens: [S], the token of the step behind which is drawn.
        sample_seats: [S].
        sample_positions: [S], where the drawn token will stand; -1 for a row that stands for nothing.
        query_start_loc: [R + 1], row r's tokens are query_start_loc[r] to query_start_loc[r + 1].
    """

    seats: Ints
    table_seats: Ints
    starts: Ints
    seq_lens: Ints
    sample_tokens: Ints
    sample_seats: Ints
    sample_positions: Ints
    query_start_loc: Ints

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.seats)

    @property
    def num_tokens(self) -> int:
        """N."""
        return int(self.query_start_loc[-1])

    @property
    def max_query_len(self) -> int:
        """Tokens of the longest row."""
        return int(np.diff(self.query_start_loc).max(initial=1))

    def padded(self, num_rows: int) -> Columns:
        """With rows that stand for nothing, a token each, up to so many; of a step in which every row samples."""
        more = num_rows - self.num_rows
        if not more:
            return self
        nothing, none = np.zeros(more, np.int32), np.full(more, -1, np.int32)
        loc = np.arange(self.num_tokens + 1, self.num_tokens + more + 1, dtype=np.int32)
        fill = (none, nothing, nothing, nothing, nothing, nothing, none, loc)
        return Columns(*[np.concatenate(pair) for pair in zip(self, fill, strict=True)])


def columns_of(batch: ScheduledBatch) -> tuple[Columns, NDArray[np.intp]]:
    """The rows of a batch, then its padding, which is computed and written nowhere; and which of its rows sample: [S].

    Padding that samples has a place behind the rows that do, and what is drawn there goes nowhere.
    """
    count, padding = len(batch), batch.padding
    columns: tuple[tuple[int, ...], ...] = (batch.seats, batch.starts, batch.counts, batch.samples)
    if padding:
        more = zip(*[(row.seat, row.start, row.count, row.samples) for row in padding], strict=True)
        columns = tuple([own + other for own, other in zip(columns, more, strict=True)])
    table_seats, starts, counts, samples = (np.array(column, dtype=np.int32) for column in columns)
    ends = starts + counts
    loc = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=loc[1:])
    sampling = np.flatnonzero(samples)
    own = sampling[: np.searchsorted(sampling, count)] if padding else sampling
    seats, positions, sample_seats = table_seats, ends[sampling], table_seats[sampling]
    if padding:
        seats = table_seats.copy()
        seats[count:], sample_seats[len(own) :], positions[len(own) :] = -1, 0, -1
    return Columns(seats, table_seats, starts, ends, loc[1:][sampling] - 1, sample_seats, positions, loc), own
