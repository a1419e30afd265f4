"""A device that computes late, on a processor under Triton's interpreter.

What is launched is noted: which operation, on which memory, with which numbers. It is computed when somebody waits for
it, in its order. So whoever overwrites what a copy has not fetched yet, or reads what has not come yet, finds the wrong
numbers; and a graph computes again with the numbers and on the memory that it was captured with. A note holds its
memory: who gives that back too early is not found, nor is what several streams do beside each other.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.interpreter import InterpretedFunction

from engine.gpu.graphs import Graphs
from engine.gpu.runner import GpuRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine.batch import ScheduledBatch
    from engine.gpu.runner import GpuStep

T = TypeVar("T")
aten = torch.ops.aten
# What these give is room, and nothing in it.
ROOMS = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty)


class LateDevice:
    """Satisfies `engine.gpu.graphs.Recorder`, and makes events.

    Args:
        is_slow: it never comes further than it is waited for; else, whenever it is waited for, it does all that it was
            asked for. A real one may do either.

    Attributes:
        replays: of graphs.
        before_replay: called with their number before it is asked for; may raise.
    """

    def __init__(self, *, is_slow: bool) -> None:
        self.is_slow = is_slow
        self.replays = 0
        self.before_replay: Callable[[int], object] = lambda _: None
        self._num_noted = self._num_done = 0
        self._queue: list[Callable[[], object]] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        """What is launched in the body is asked of the device."""
        with _Notes(self._note):
            yield

    def wait(self) -> None:
        """Until all is done."""
        self._come_to(self._num_noted)

    def make_event(self) -> LateEvent:
        return LateEvent(self)

    def record(self, call: Callable[[], T]) -> tuple[Callable[[], None], T]:
        self.wait()
        notes: list[Callable[[], object]] = []
        with _Notes(notes.append, captures=True):
            result = call()

        def replay() -> None:
            self.replays += 1
            self.before_replay(self.replays)
            for note in notes:
                self._note(note)

        return replay, result

    @property
    def place(self) -> int:
        return self._num_noted

    def _come_to(self, place: int) -> None:
        with torch.inference_mode(), _disable_current_modes():
            while self._num_done < place:
                self._num_done += 1
                self._queue.pop(0)()

    def wait_for(self, place: int) -> None:
        self._come_to(place if self.is_slow else self._num_noted)

    def _note(self, note: Callable[[], object]) -> None:
        self._num_noted += 1
        self._queue.append(note)


class LateEvent:
    """A place in what a late device was asked for."""

    def __init__(self, device: LateDevice) -> None:
        self._device, self._place = device, 0

    def record(self) -> None:
        self._place = self._device.place

    def synchronize(self) -> None:
        self._device.wait_for(self._place)


class LateRunner(GpuRunner):
    """A runner on a late device, its decode steps as graphs once `capture` was called."""

    def __init__(self, late: LateDevice, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, device=torch.device("cpu"), make_event=late.make_event, **kwargs)
        self.late, self._captures = late, False

    def launch(self, batch: ScheduledBatch) -> GpuStep:
        with self.late.noting():
            return super().launch(batch)

    def run_empty(self, num_rows: int, num_tokens: int, *, filtered: bool = True, params: Any = None) -> None:
        if not self._captures:  # there is nothing to compile
            with self.late.noting():
                super().run_empty(num_rows, num_tokens, filtered=filtered, params=params)

    def reset(self) -> None:
        self.late.wait()
        super().reset()

    def capture(self) -> None:
        graphs, self._captures = Graphs(self.late), True
        graphs.capture(self)
        self.graphs, self._captures = graphs, False


class _Notes(TorchDispatchMode):
    """Notes operations and launches instead of computing them; results hold anything until they are.

    Args:
        captures: for a graph, in which nothing may come from the machine's memory or be waited for.
    """

    def __init__(self, note: Callable[[Callable[[], object]], object], *, captures: bool = False) -> None:
        super().__init__()
        self._note, self._captures = note, captures
        self._launches = patch.object(InterpretedFunction, "run", self._launch())

    def __enter__(self) -> _Notes:
        self._launches.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._launches.stop()

    def _launch(self) -> Callable[..., None]:
        run, note = InterpretedFunction.run, self._note

        def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            note(lambda: run(kernel, *args, grid=grid, warmup=warmup, **kwargs))

        return launch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default or (self._captures and func is aten.lift_fresh.default):
            raise RuntimeError(f"{func} waits for the device, or brings what Python has, where neither may be")
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func._schema.is_mutable:
            self._note(lambda: func(*args, **kwargs))
            return _changed(func, args, kwargs)
        taken = {operand.untyped_storage().data_ptr() for operand in operands}
        result = func(*args, **kwargs) if not operands else _room(func, args, kwargs, taken)
        if result is None:
            return func(*args, **kwargs)  # the same memory, seen in another way

        def compute() -> None:
            for room, value in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                _spoil(room) if func.overloadpacket in ROOMS else room.copy_(value)

        self._note(compute)
        return tree_map(_spoil, result)


def _changed(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation that changes its operands gives back: those."""
    written = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[place] if place < len(args) else kwargs[argument.name])
    if not func._schema.returns:
        return None
    return written[0] if len(written) == 1 else tuple(written)


def _room(func: Any, args: Any, kwargs: Any, taken: set[int]) -> Any:
    """Room for an operation's results; `None` where they are views of its operands."""
    if any(result.alias_info is not None for result in func._schema.returns):
        seen = func(*args, **kwargs)
        if all(leaf.untyped_storage().data_ptr() in taken for leaf in tree_leaves(seen)):
            return None
        return seen
    sized = func(*tree_map(_without_data, args), **tree_map(_without_data, kwargs))
    return tree_map(lambda each: torch.empty_strided(each.shape, each.stride(), dtype=each.dtype), sized)


def _without_data(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _spoil(tensor: torch.Tensor) -> torch.Tensor:
    """As if others had used its memory."""
    return tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)
