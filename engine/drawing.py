"""One step's draws, with what some rows ask for beside a token: penalties, log-probabilities, a constraint.

Rows that ask for nothing pay nothing: without any `Extras` a draw is `sample` and nothing else.
"""

from __future__ import annotations

import logging
import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

import numpy as np
import torch

from engine.errors import ConstraintError
from engine.faults import lacks_memory
from engine.logprobs import ModelLogits
from engine.penalties import Penalties
from engine.sampler import sample, sample_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from engine.batch import TokenLogprobs
    from engine.constraint import Constraint, ConstraintState
    from engine.sampler import Ints, SampleRows, SamplingRows
    from engine.sequence import SamplingParams

T = TypeVar("T")

NONE: Final[Mapping[int, Any]] = MappingProxyType({})
log = logging.getLogger("relevo.engine")

NOT_DRAWN = "Something went wrong while a token was chosen for this request."
NOT_A_NUMBER = "The model computed values that are not finite numbers for this sequence; its weights may be damaged."


class Drawn(NamedTuple):
    """What the rows that sample were given; the keys are rows of `token_ids`.

    Attributes:
        token_ids: [R]; -1 where the logits are no numbers, or no token may be drawn.
        logprobs: for rows that asked.
        forced: tokens that follow the drawn one without a choice.
        failures: one line of cause for rows that got no token.
        accepted: tokens drawn behind the first, one for each draft of the row that was right.
    """

    token_ids: Ints
    logprobs: Mapping[int, TokenLogprobs] = NONE
    forced: Mapping[int, tuple[int, ...]] = NONE
    failures: Mapping[int, str] = NONE
    accepted: Mapping[int, tuple[int, ...]] = NONE

    def placed(self, rows: Ints, num_rows: int) -> Drawn:
        """The same by rows of a batch: draw `i` belongs to `rows[i]`. Rows without a draw have -1."""
        token_ids = np.full(num_rows, -1, dtype=np.int64)
        token_ids[rows] = self.token_ids
        if not (self.logprobs or self.forced or self.failures or self.accepted):
            return Drawn(token_ids)

        def place(found: Mapping[int, T]) -> dict[int, T]:
            return {int(rows[index]): value for index, value in found.items()}

        placed = place(self.logprobs), place(self.forced), place(self.failures), place(self.accepted)
        return Drawn(token_ids, *placed)


class Extras:
    """What one seat asks for beside its draws; made when a sequence sits down, also for one that was preempted.

    Args:
        token_ids: everything known of the sequence.
        num_prompt_tokens: how many of them are prompt.
        vocab_size: of the logits.
    """

    def __init__(
        self, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int, vocab_size: int
    ) -> None:
        prompt, output = token_ids[:num_prompt_tokens], tuple(token_ids[num_prompt_tokens:])
        self.num_logprobs = params.num_logprobs
        self._penalties = Penalties(params, prompt, output, vocab_size) if params.has_penalties else None
        self._constraint = params.constraint
        self._output = output
        ends = sorted(i for i in params.end_token_ids if 0 <= i < vocab_size)
        self._end_ids: Ints = np.array(ends, dtype=np.int64)
        self._state: ConstraintState | None = None

    def adjust(self, logits: torch.Tensor, stop_ids: Ints, *, early: bool = False) -> bool:
        """Change the seat's logits, [V] float32, before a token is drawn.

        Args:
            stop_ids: what ends the answer, but for the caller's own stop tokens before `min_tokens`.
            early: the answer has not reached `min_tokens` yet.

        Returns:
            Whether only stop tokens are left, so that one of them must be drawn now.

        Raises:
            ConstraintError: the answer cannot go on.
        """
        if self._penalties is not None:
            self._penalties.adjust(logits.numpy())
        if self._constraint is None:
            return False
        allowed, only_stops = self.allow(len(logits), stop_ids, early=early)
        logits.masked_fill_(torch.from_numpy(~allowed), -math.inf)  # three times as fast as by numpy's index
        return only_stops

    def allow(self, vocab_size: int, stop_ids: Ints, *, early: bool = False) -> tuple[NDArray[np.bool_], bool]:
        """Where there is a constraint, what it allows now: [V] truth values; and whether only stop tokens are left.

        Args:
            stop_ids, early: as for `adjust`.

        Raises:
            ConstraintError: the answer cannot go on.
        """
        if self._state is None:
            self._state = cast("Constraint", self._constraint).begin(self._output)
        allowed = _bits(self._state.allowed(), vocab_size)
        stops = stop_ids[allowed[stop_ids]]
        others = allowed.copy()
        others[stop_ids] = False
        if others.any():
            return allowed, False
        if not len(stops):
            message = "No token of the vocabulary may follow under the constraint of this request."
            raise ConstraintError(message, own_fault=True)
        if early and not np.isin(stops, self._end_ids).all():
            allowed[self._end_ids] = False  # behind the caller's own the answer goes on
        return allowed, True

    def take(self, token_id: int) -> tuple[int, ...]:
        """A token was drawn; gives those that follow it without a choice.

        Raises:
            ConstraintError: the answer cannot go on.
        """
        forced: tuple[int, ...] = ()
        if self._state is not None:
            self._state.consume(token_id)
            if self.num_logprobs is None:  # what nobody drew has no log-probability to tell
                forced = self._state.force()
        if self._penalties is not None:
            for each in (token_id, *forced):
                self._penalties.take(each)
        return forced


def draw(
    logits: torch.Tensor,
    rows: SamplingRows,
    extras: dict[int, Extras],
    seats: Ints,
    positions: Ints,
    choose: SampleRows = sample_rows,
) -> Drawn:
    """Draw a token for each row.

    Args:
        logits: [R, V] float32; overwritten.
        rows: how each seat samples.
        extras: by seat; seats without need none.
        seats: [R], each row's line of `rows`.
        positions: [R], where the drawn tokens will stand in their sequences.
        choose: `sample_rows`, or what does the same.
    """
    asking = [(row, seat, extras[seat]) for row, seat in enumerate(seats.tolist()) if seat in extras] if extras else []
    if not asking:
        token_ids = sample(logits, rows, seats, positions, choose)
        return Drawn(token_ids, failures=_broken(token_ids))
    telling = [row for row, _, extra in asking if extra.num_logprobs is not None]
    own = ModelLogits(logits, telling) if telling else None
    logprobs: dict[int, TokenLogprobs] = {}
    forced: dict[int, tuple[int, ...]] = {}
    failures: dict[int, str] = {}
    stops_from = rows.stops_from.copy()
    exempt: list[int] = []
    for row, seat, extra in asking:
        try:
            if extra.adjust(logits[row], rows.stop_ids[seat], early=bool(positions[row] < stops_from[seat])):
                exempt.append(seat)
        except Exception as error:
            failures[row] = cause_of(error)
    rows.stops_from[exempt] = 0  # for this draw alone
    token_ids = sample(logits, rows, seats, positions, choose)
    rows.stops_from[:] = stops_from
    failures = _broken(token_ids) | failures
    for row, _, extra in asking:
        if row in failures:
            continue
        token_id = int(token_ids[row])
        try:
            if following := extra.take(token_id):
                forced[row] = following
            if own is not None and extra.num_logprobs is not None:
                logprobs[row] = own.tell(row, token_id, extra.num_logprobs)
        except Exception as error:
            failures[row] = cause_of(error)
    return Drawn(token_ids, logprobs, forced, failures)


def confirm(
    drawn: Drawn,
    drafts: Mapping[int, tuple[int, ...]],
    logits: torch.Tensor,
    rows: SamplingRows,
    seats: Ints,
    positions: Ints,
    choose: SampleRows = sample_rows,
) -> Drawn:
    """Draw behind drafts too; those that equal what was drawn before them were right, and so is what follows them.

    Args:
        drawn: for each row.
        drafts: by row, what was held to be drawn there and after it. Such rows need no `Extras`.
        logits: [D, V] float32, of the drafts one after the other; overwritten.
        rows, seats, positions, choose: as for `draw`, before the drafts.
    """
    lengths = [len(draft) for draft in drafts.values()]
    behind = np.concatenate([positions[row] + 1 + np.arange(len(draft)) for row, draft in drafts.items()])
    following = sample(logits, rows, np.repeat(seats[[*drafts]], lengths), behind, choose).tolist()
    accepted: dict[int, tuple[int, ...]] = {}
    start = 0
    for row, draft in drafts.items():
        token_id, count = drawn.token_ids[row], 0
        # -1 is no token: the next step finds nothing to draw at that place again, and tells.
        while count < len(draft) and draft[count] == token_id and following[start + count] >= 0:
            token_id, count = following[start + count], count + 1
        if count:
            accepted[row] = tuple(following[start : start + count])
        start += len(draft)
    return drawn._replace(accepted=accepted)


def cause_of(error: Exception) -> str:
    """Why a row fails, alone. A lack of memory is no row's own: it is raised again."""
    if isinstance(error, ConstraintError):
        return error.cause
    if lacks_memory(error):
        raise error
    log.error("a row could not be drawn and fails", exc_info=error)
    return NOT_DRAWN


def _broken(token_ids: Ints) -> dict[int, str]:
    """Rows that got no token."""
    return {row: NOT_A_NUMBER for row in np.flatnonzero(token_ids < 0).tolist()}


def _bits(mask: bytes, size: int) -> NDArray[np.bool_]:
    """A mask of one bit a token as [size] of truth values; what it does not reach is false."""
    return np.unpackbits(np.frombuffer(mask, dtype=np.uint8), count=size, bitorder="little").view(np.bool_)
