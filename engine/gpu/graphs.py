"""Decode steps as graphs: what the processor would launch one by one is launched as a whole.

A step with fewer rows than a graph is padded with rows that stand for nothing. None of this ran on a device yet.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from engine.gpu.columns import Columns
    from engine.gpu.runner import GpuRunner

    Replay = Callable[[], object]

T = TypeVar("T")

# Of larger ones a few rows more cost little beside what a step takes.
SMALL, STEP, LARGE_STEP = (1, 2, 4), 8, 16


def sizes_for(max_num_seqs: int) -> list[int]:
    """Numbers of rows that get a graph: 1, 2, 4, by eights up to 64, by sixteens up to the seats, and those."""
    sizes = [*SMALL, *range(STEP, 64, STEP), *range(64, max_num_seqs + 1, LARGE_STEP)]
    return sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs})


def graph_size(columns: Columns, sizes: Iterable[int]) -> int | None:
    """The smallest that a step fits into; `None` for one with more than a token in a row, or a row without a draw."""
    num_rows = columns.num_rows
    if columns.num_tokens != num_rows or len(columns.sample_tokens) != num_rows:
        return None
    return min([size for size in sizes if size >= num_rows], default=None)


class Recorder(Protocol):
    """Makes graphs."""

    def record(self, call: Callable[[], T]) -> tuple[Replay, T]:
        """Note what a call launches, and on which memory; none of it is computed.

        Returns:
            What launches the same again, without the call; and what the call gave, overwritten by that. Other results
            on the way share their memory with those of all graphs.
        """
        ...


class Graphs:
    """The graphs of a runner, whose tensors keep their addresses."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._logits: dict[int, tuple[Replay, torch.Tensor]] = {}
        self._draws: dict[int, Replay] = {}

    @torch.inference_mode()
    def capture(self, runner: GpuRunner, report: Callable[[int, int], object] = lambda _done, _all: None) -> None:
        """Capture a pair for each size, the largest first: the others fit into its memory.

        Args:
            report: told (sizes done, sizes).
        """
        sizes = sizes_for(runner.sizes.max_num_seqs)
        for done, size in enumerate(reversed(sizes), start=1):
            runner.run_empty(size, size)  # compiles and chooses algorithms, which must not happen in a capture
            replay, logits = self._recorder.record(partial(runner.logits, size, size, 1, size))
            self._logits[size] = replay, logits
            self._draws[size], _ = self._recorder.record(partial(runner.draw, logits, filtered=True))
            report(done, len(sizes))

    def size_for(self, columns: Columns) -> int | None:
        """The graph for a step, or `None`."""
        return graph_size(columns, self._logits)

    def logits(self, size: int) -> torch.Tensor:
        """Replay up to the logits: [size, V], overwritten by the next replay."""
        replay, logits = self._logits[size]
        replay()
        return logits

    def draw(self, size: int) -> None:
        """Replay the draws from those logits."""
        self._draws[size]()
