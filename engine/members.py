"""Everybody who is inside: who sits, who waits, and who is set aside while a fault is looked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.seats import Seats
from engine.sequence import SequenceStatus
from engine.work_class import WorkClass

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from engine.sequence import Sequence


class Members:
    """The live sequences and their places. From `live` alone all the rest can be made anew.

    Args:
        num_seats: the highest number of seats there can ever be.

    Attributes:
        live: by sequence id, in the order of arrival.
        aside: those of them that do not even wait until the others were tried (`admit_only`).
    """

    def __init__(self, num_seats: int) -> None:
        self.interactive, self.background = self.classes = WorkClass(), WorkClass()
        self.live: dict[int, Sequence] = {}
        self.aside: dict[int, Sequence] = {}
        self.seats = Seats(num_seats)
        self._num_seats = num_seats
        self._admitted: frozenset[int] | None = None

    @property
    def running(self) -> list[Sequence]:
        """Everybody who sits, background work last, and in either class the youngest last."""
        return [*self.interactive.running, *self.background.running]

    @property
    def num_running(self) -> int:
        """Seats that are taken by those who run."""
        return len(self.interactive.running) + len(self.background.running)

    @property
    def waiting(self) -> list[Sequence]:
        """Everybody who waits, interactive work first, those set aside last."""
        return [*self.interactive.queue, *self.background.queue, *self.aside.values()]

    @property
    def num_waiting(self) -> int:
        """How many that are."""
        return len(self.interactive.queue) + len(self.background.queue) + len(self.aside)

    def join(self, sequence: Sequence) -> None:
        """A newcomer."""
        self.live[sequence.sequence_id] = sequence
        if self._may_wait(sequence):
            self.classes[sequence.background].queue.add(sequence)
        else:
            self.aside[sequence.sequence_id] = sequence

    def sit_down(self, sequence: Sequence) -> None:
        """One who waits takes the lowest free seat."""
        work = self.classes[sequence.background]
        work.queue.remove(sequence)
        sequence.status = SequenceStatus.RUNNING
        sequence.seat = self.seats.take()
        work.running.append(sequence)

    def stand_up(self, sequence: Sequence, *, keeps_seat: bool = False) -> None:
        """One who sits leaves its seat; nobody else may have it where it is kept."""
        work = self.classes[sequence.background]
        work.running.remove(sequence)
        work.fairness.vacated(sequence)
        if keeps_seat:
            self.seats.keep(sequence.seat)
        else:
            self.seats.leave(sequence.seat)
        sequence.seat = -1

    def stop_waiting(self, sequence: Sequence) -> None:
        """One who waits, or is set aside, does so no longer."""
        if self.aside.pop(sequence.sequence_id, None) is None:
            self.classes[sequence.background].queue.remove(sequence)

    def admit_only(self, sequence_ids: Collection[int] | None) -> None:
        """From now on nobody may wait for a seat but these, newcomers neither; `None` lets everybody.

        Those who sit are left alone; whoever does not has its place in the order of those who were preempted, or of
        its arrival.
        """
        self._admitted = None if sequence_ids is None else frozenset(sequence_ids)
        standing = [sequence for sequence in self.live.values() if sequence.seat < 0]
        for sequence in standing:
            if self.aside.pop(sequence.sequence_id, None) is None:
                queue = self.classes[sequence.background].queue
                if sequence in queue:
                    queue.remove(sequence)
        self._place(standing)

    def begin_anew(self) -> list[Sequence]:
        """Make queues and seats anew, whatever has become of them; everybody waits.

        Returns:
            Those who lost their seat by it.
        """
        lost = [s for s in self.live.values() if s.seat >= 0 or s.status is SequenceStatus.RUNNING]
        for sequence in lost:
            sequence.seat, sequence.status, sequence.lookup = -1, SequenceStatus.PREEMPTED, None
            sequence.num_tokens_thrown_away = sequence.num_computed_tokens
            sequence.num_preemptions += 1
        self.seats = Seats(self._num_seats)
        self.aside.clear()
        for work in self.classes:
            work.begin_anew()
        self._place([*self.live.values()])
        return lost

    def check_integrity(self) -> None:
        """Hold seats, queues and the live sequences against each other.

        Raises:
            RuntimeError: they differ.
        """
        self.check_sums()
        for work in self.classes:
            work.queue.check_integrity()
        holding = [sequence.sequence_id for sequence in self.waiting if sequence.block_ids]
        if holding:
            raise RuntimeError(f"sequences {holding[:8]} hold blocks without a seat")

    def check_sums(self) -> None:
        """The part of `check_integrity` that costs next to nothing."""
        self.seats.check_integrity([sequence.seat for sequence in self.running])
        if self.num_running + self.num_waiting != len(self.live):
            raise RuntimeError(f"{len(self.live)} live sequences, {self.num_running} run, {self.num_waiting} wait")

    def _may_wait(self, sequence: Sequence) -> bool:
        return self._admitted is None or sequence.sequence_id in self._admitted

    def _place(self, standing: Iterable[Sequence]) -> None:
        """Let these wait, or set them aside; the order is that of their arrival."""
        back: list[Sequence] = []
        for sequence in standing:
            if not self._may_wait(sequence):
                self.aside[sequence.sequence_id] = sequence
            elif sequence.status is SequenceStatus.PREEMPTED:
                back.append(sequence)
            else:
                self.classes[sequence.background].queue.add(sequence, lift=False)
        for sequence in reversed(back):  # the last that is put back is the first
            self.classes[sequence.background].queue.put_back(sequence)
