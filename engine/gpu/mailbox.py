"""What goes to the device before a step, in one copy: the batch's columns, and what changes of the seats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from kernels.gpu.inputs import apply_changes

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from engine.gpu.events import Event

    Ints = NDArray[np.int32]

# Changes that travel with the columns; long prompts take a copy of their own.
MAX_CHANGES: Final = 8192


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


class Mailbox:
    """A place on the device that keeps its address, and two in the machine's memory that are filled in turn.

    Args:
        max_rows: of a step, padding among them.
        make_event: of the device.
    """

    def __init__(self, max_rows: int, device: torch.device, make_event: Callable[[], Event]) -> None:
        self._max_rows = max_rows
        self._end = _whole(len(Columns._fields) * max_rows + 1)
        size = self._end + 2 * MAX_CHANGES
        self._box = torch.zeros(size, dtype=torch.int32, device=device)
        self._device, self._pinned = device, device.type != "cpu"
        self._hosts = [torch.zeros(size, dtype=torch.int32, pin_memory=self._pinned) for _ in range(2)]
        # When what was copied out of each of them last had arrived.
        self._arrivals = [make_event() for _ in self._hosts]

    def column(self, name: str, count: int) -> torch.Tensor:
        """A column on the device: [count] int32."""
        start = Columns._fields.index(name) * self._max_rows
        return self._box[start : start + count]

    def send(self, columns: Columns, places: Ints, values: Ints, state: torch.Tensor) -> None:
        """Bring the columns, and write the values to their places of the state.

        Does not wait, but for the copy of the send before the last one, which is long done while steps are read.

        Raises:
            RuntimeError: there are more rows than there is room for.
        """
        if columns.num_rows > self._max_rows:
            raise RuntimeError(f"a step of {columns.num_rows} rows came where {self._max_rows} have room")
        self._hosts.reverse()
        self._arrivals.reverse()
        self._arrivals[0].synchronize()
        host = self._hosts[0].numpy()
        for index, column in enumerate(columns):
            host[index * self._max_rows :][: len(column)] = column
        count = len(places)
        if count > MAX_CHANGES:
            apply_changes(state, self.bring(places), self.bring(values))
            count = 0
        first, second = self._end, self._end + _whole(count)
        host[first : first + count] = places[:count]
        host[second : second + count] = values[:count]
        self._box[: second + count].copy_(self._hosts[0][: second + count], non_blocking=True)
        self._arrivals[0].record()
        apply_changes(state, self._box[first : first + count], self._box[second : second + count])

    def bring(self, array: NDArray[np.generic]) -> torch.Tensor:
        """A copy on the device; does not wait."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._pinned else tensor


def _whole(count: int) -> int:
    """Rounded up to four numbers, so that what comes behind is aligned as the compiler found it the first time."""
    return -(-count // 4) * 4
