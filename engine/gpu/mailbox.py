"""What goes to the device before a step, in one copy: the batch's columns, and what changes of the seats.

All copies, and those of drawn tokens back, are on the stream of the kernels. They are of some kilobytes, and wanted in
just this order: a stream of their own would have to be waited for at once, and hide nothing.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from engine.gpu.columns import Columns
from kernels.gpu.inputs import apply_changes

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from engine.gpu.columns import Ints
    from engine.gpu.events import Event

# Changes that travel with the columns; of long prompts so many at a time go before them, in copies of their own.
MAX_CHANGES: Final = 8192


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
        while len(places) > MAX_CHANGES:
            apply_changes(state, *self.bring(places[:MAX_CHANGES], values[:MAX_CHANGES]))
            places, values = places[MAX_CHANGES:], values[MAX_CHANGES:]
        count = len(places)
        first, second = self._end, self._end + _whole(count)
        host[first : first + count] = places
        host[second : second + count] = values
        self._box[: second + count].copy_(self._hosts[0][: second + count], non_blocking=True)
        self._arrivals[0].record()
        apply_changes(state, self._box[first : first + count], self._box[second : second + count])

    def bring(self, *arrays: NDArray[np.generic]) -> list[torch.Tensor]:
        """Copies of int32 and float32 arrays on the device, all by one; does not wait."""
        spans = list(pairwise(accumulate([_whole(array.size) for array in arrays], initial=0)))
        numbers = np.zeros(spans[-1][1], dtype=np.int32)
        for (start, _), array in zip(spans, arrays, strict=True):
            numbers[start : start + array.size] = array.reshape(-1).view(np.int32)
        host = torch.from_numpy(numbers)
        there = host.pin_memory().to(self._device, non_blocking=True) if self._pinned else host
        brought = []
        for (start, _), array in zip(spans, arrays, strict=True):
            part = there[start : start + array.size].view(array.shape)
            brought.append(part.view(torch.float32) if array.dtype == np.float32 else part)
        return brought


def _whole(count: int) -> int:
    """Rounded up to four numbers, so that what comes behind is aligned as the compiler found it the first time."""
    return -(-count // 4) * 4
