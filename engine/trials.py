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
MAX_STRIKES: Final = 6


class Verdict(Enum):
    """What came out of a trial."""

    INNOCENT = "nothing failed again"
    GUILTY = "one fails alone again, while the engine's own request does not"
    TOO_MANY = "they fail together again, and not apart"


class Trials:
    """Decides who is tried next after a step has failed, and when that is over. Pure: it is told what happened.

    1. The sequences of a step that failed are tried again together, and nobody beside them: most faults pass.
    2. If that fails too, each half of those in the step is tried alone, then the halves of the half that fails. If
       neither half fails, all are tried once more; if they fail, they are too many at once.
    3. One that fails alone is accused. Then the engine's own request is tried, which has no token in common with
       anybody's, and after it the accused once more. If that fails again, the accused ends with an error, alone.
    4. If the engine's own request fails, no request is to blame, and the accused is tried once more. When that has
       happened `MAX_FAILED_CONTROLS` times in a row, the engine is broken and has to end. So whoever sends one
       poisonous request again and again gets an error each time and ends nothing, while an engine that cannot
       answer anybody ends with the first request that finds out. Where a step failed with nobody in it, the engine's
       own request is all that is tried.

    A group has passed when each of it has computed, without a failure, the tokens at which the step failed and one
    more: what was known is read again as a prompt is, and what fails may do so only where an answer is continued. Some
    fail only there and only at some places, and pass so. Each fault in a row that a sequence had part in is a strike,
    and each strike doubles the tokens it has to come further, up to 2 ** `MAX_STRIKES`. One request among n is found
    within log2(n) + 3 failed steps.

    Attributes:
        group: who is tried now, with the number of tokens each has to compute; empty when nobody is.
        accused: who failed alone; `CONTROL` is nobody.
    """

    def __init__(self) -> None:
        self.group: Mapping[int, int] = {}
        self.accused = CONTROL
        self._still: list[Mapping[int, int]] = []  # to try after `group`; the last of them confirms what was found
        self._is_confirming = False
        self._passed: set[int] = set()  # of the group
        self._strikes: dict[int, int] = {}
        self._num_failed_controls = 0

    @property
    def is_hopeless(self) -> bool:
        """Whether the engine's own request failed so often that the engine has to end."""
        return self._num_failed_controls >= MAX_FAILED_CONTROLS

    def fail(self, suspects: Mapping[int, int]) -> Verdict | None:
        """A step failed; `group` is another afterwards.

        Args:
            suspects: the sequences in it, with the number of tokens each would have computed; where nothing was
                planned, all that could have been. None of them is one outside of the group that is being tried.

        Returns:
            What came out when the trial is over, else `None`.
        """
        if not self.group:
            self.accused = CONTROL
            self._strikes = {sequence_id: self._strikes.get(sequence_id, 0) + 1 for sequence_id in suspects}
        goals = {sequence_id: at + 1 + self._further(sequence_id) for sequence_id, at in suspects.items()}
        again = self._is_confirming and not self._still and len(goals) == len(self.group)
        if CONTROL in goals:
            return self._fail_control(suspects[CONTROL])
        if not goals:
            self._try({CONTROL: CONTROL_TOKENS})
        elif not self.group:
            self._try(goals)
        elif again:
            self._end()
            return Verdict.GUILTY if len(goals) == 1 else Verdict.TOO_MANY
        elif len(goals) == 1:
            [self.accused] = goals
            self._try({CONTROL: CONTROL_TOKENS + self._further(self.accused)}, goals)
        else:
            items = [*goals.items()]
            middle = (len(items) + 1) // 2
            self._try(dict(items[:middle]), dict(items[middle:]), goals)
        return None

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
        if self._still:
            self.group, *self._still = self._still
            self._passed = set()
            return None
        self._end()
        return Verdict.INNOCENT

    def _fail_control(self, num_tokens: int) -> Verdict | None:
        if num_tokens > CONTROL_TOKENS:
            # It was answered, and failed where it had to come further than ever: this fault is anybody's.
            self._end()
            return Verdict.INNOCENT
        self._num_failed_controls += 1
        self._try(self._still[-1] if self._still else {CONTROL: CONTROL_TOKENS})
        return None

    def _further(self, sequence_id: int) -> int:
        """Tokens that a sequence has to compute behind the first one after the fault."""
        return (1 << min(self._strikes.get(sequence_id, 1), MAX_STRIKES)) - 2

    def _try(self, group: Mapping[int, int], *still: Mapping[int, int]) -> None:
        self.group, self._still, self._is_confirming = group, [*still], bool(still)
        self._passed = set()

    def _end(self) -> None:
        self._try({})
        self._num_failed_controls = 0
