"""Which request breaks the steps it takes part in: found by trying them apart."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# The sequence id of the engine's own request, which nobody sent. Those of others count from 1.
CONTROL: Final = 0
CONTROL_TOKENS: Final = 2
MAX_FAILED_CONTROLS: Final = 3


class Verdict(Enum):
    """What came out of a trial."""

    INNOCENT = "nothing failed again"
    GUILTY = "one fails alone, while the engine's own request does not"
    TOO_MANY = "they fail together and not apart"


class Trials:
    """Decides who is tried next after a step has failed, and when that is over. Pure: it is told what happened.

    1. The sequences of a step that failed are tried again together, and nobody beside them: most faults pass.
    2. If that fails too, each half of those in the step is tried alone, then the halves of the half that fails.
    3. One that fails alone is accused. Then the engine's own request is tried, which has no token in common with
       anybody's. If that is answered, the accused fails, alone, and everybody else goes on.
    4. If the engine's own request fails, no request is to blame, and the accused is tried once more. When that has
       happened `MAX_FAILED_CONTROLS` times in a row, the engine is broken and has to end. So whoever sends one
       poisonous request again and again gets an error each time and ends nothing, while an engine that cannot
       answer anybody ends with the first request that finds out.

    A group has passed when each of it has computed, without a failure, the tokens at which the step failed and one
    more: what was known is read again as a prompt is, and what fails may do so only where an answer is continued. One
    request among n is found within log2(n) + 2 failed steps.

    Attributes:
        group: who is tried now, with the number of tokens each has to compute; empty when nobody is.
        accused: who failed alone.
        num_apart: after `TOO_MANY`, how many at once did not fail.
    """

    def __init__(self) -> None:
        self.group: Mapping[int, int] = {}
        self.accused = CONTROL
        self.num_apart = 0
        self._goal = 0  # of the accused
        self._other_half: Mapping[int, int] = {}
        self._first_half: Mapping[int, int] = {}  # when it has passed
        self._passed: set[int] = set()  # of the group
        self._num_failed_controls = 0

    @property
    def is_hopeless(self) -> bool:
        """Whether the engine's own request failed so often that the engine has to end."""
        return self._num_failed_controls >= MAX_FAILED_CONTROLS

    def fail(self, suspects: Mapping[int, int]) -> None:
        """A step failed.

        Args:
            suspects: the sequences in it, with the number of tokens each would have computed; where nothing was
                planned, all that could have been. None of them is one outside of the group that is being tried.
        """
        if CONTROL in suspects:
            self._num_failed_controls += 1
            self._try({self.accused: self._goal})
        elif not suspects:
            self._num_failed_controls += 1
        elif not self.group:
            self._num_failed_controls = 0
            self._try(suspects)
        elif len(suspects) == 1:
            [(self.accused, self._goal)] = suspects.items()
            self._try({CONTROL: CONTROL_TOKENS})
        else:
            items = [*suspects.items()]
            middle = (len(items) + 1) // 2
            self._try(dict(items[:middle]), dict(items[middle:]))

    def look(self, num_computed: Callable[[int], int | None], *, is_stuck: bool = False) -> Verdict | None:
        """A step did not fail; `group` may be another afterwards.

        Args:
            num_computed: of a sequence; `None` when it has ended.
            is_stuck: nobody of the group can sit.

        Returns:
            What came out when the trial is over, else `None`.
        """
        for sequence_id, goal in self.group.items():
            at = num_computed(sequence_id)
            if is_stuck or at is None or at >= goal:
                self._passed.add(sequence_id)
        if len(self._passed) < len(self.group):
            return None
        if CONTROL in self.group:
            self._num_failed_controls = 0
            self._try({})
            return Verdict.GUILTY
        if self._other_half:
            first_half = self.group
            self._try(self._other_half)
            self._first_half = first_half
            return None
        together = [*self._first_half, *self.group] if self._first_half and not is_stuck else []
        self.num_apart = len(self._first_half)
        self._try({})
        if together and all(num_computed(sequence_id) is not None for sequence_id in together):
            return Verdict.TOO_MANY
        return Verdict.INNOCENT

    def _try(self, group: Mapping[int, int], other_half: Mapping[int, int] | None = None) -> None:
        self.group, self._other_half, self._first_half = group, other_half or {}, {}
        self._passed = set()
