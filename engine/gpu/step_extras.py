"""What some rows ask for beside a token, on the device: biases, penalties, a constraint, log-probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from engine.batch import TokenLogprobs
from engine.drawing import cause_of
from kernels.draws import WIDTH, Biased, Logprobs, Penalized
from kernels.gpu.logits import add_biases, apply_token_mask, count_tokens, penalize
from kernels.gpu.logprobs import drawn_logprobs, top_logprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from engine.drawing import Extras
    from engine.gpu.columns import Columns, Ints
    from engine.gpu.seat_extras import Bring, SeatExtras

NO_MASKS: Final = np.zeros((0, 1), dtype=np.int32)


class LogprobRows(NamedTuple):
    """Rows that tell of log-probabilities, on the device.

    Attributes:
        buffer: [T, WIDTH] int32, what is told.
        lines: [T] int32, of the logits.
        kept: [K, V], logits of those lines whose logits were changed, as they were.
        places: [T] int32, which of these a row's are; -1 for one that is as it was.
    """

    buffer: torch.Tensor
    lines: torch.Tensor
    kept: torch.Tensor
    places: torch.Tensor


class StepExtras:
    """The rows of one step that ask for something.

    Args:
        columns: of the step; what is drawn for is a line of the logits.
        rows: of the batch, those of the first lines; the others stand for nothing.
        of_seats: what each asks for.
        bring: copies arrays to the device, all in one go.

    Attributes:
        failures: row of the batch to one line of cause, for those that cannot go on.
    """

    def __init__(self, columns: Columns, rows: NDArray[np.intp], of_seats: SeatExtras, bring: Bring) -> None:
        seats, positions = columns.sample_seats[: len(rows)], columns.sample_positions[: len(rows)]
        is_early = (positions >= 0) & (positions < of_seats.stops_from[seats])
        lines = np.flatnonzero(~of_seats.is_plain[seats] | is_early)
        self._lines = lines.astype(np.int32)
        self.failures: dict[int, str] = {}
        self._logprob_rows: LogprobRows | None = None
        self._logprobs: torch.Tensor | None = None
        if not len(lines):
            return
        self._seats, self._positions, self._is_early = seats[lines], positions[lines], is_early[lines]
        self._of_seats, self._bring = of_seats, bring
        self._rows: list[int] = rows[lines].tolist()
        # Those under a constraint: which of these it is, its seat, and what it was when the step was launched.
        self._bound: list[tuple[int, int, Extras]] = []
        if of_seats.constraints:
            found = enumerate(self._seats.tolist())
            self._bound = [
                (index, seat, of_seats.constraints[seat]) for index, seat in found if seat in of_seats.constraints
            ]
        counts = of_seats.num_logprobs[self._seats]
        self._with_logprobs = np.flatnonzero(counts >= 0)
        self._counts: list[int] = counts[self._with_logprobs].tolist()

    def __bool__(self) -> bool:
        return bool(len(self._lines))

    def adjust(self, logits: torch.Tensor, token_ids: torch.Tensor, counts: torch.Tensor) -> None:
        """Change logits before tokens are drawn; of rows that will tell, look first.

        Args:
            logits: [S, V] float32.
            token_ids: [seats, context] int32, the known tokens of each seat.
            counts: [seats, V] int32, how often each of them stands there, from step to step.
        """
        of_seats, seats = self._of_seats, self._seats
        masks = self._masks(logits.shape[1])
        biased = np.flatnonzero(of_seats.is_biased[seats] | self._is_early)
        penalized = np.flatnonzero(of_seats.is_penalized[seats])
        is_changed = np.zeros(len(self._lines), dtype=bool)
        is_changed[biased] = is_changed[penalized] = True
        is_kept = is_changed[self._with_logprobs]
        places = np.where(is_kept, np.cumsum(is_kept) - 1, -1).astype(np.int32)
        lines, biased_seats, penalized_seats = self._lines[self._with_logprobs], seats[biased], seats[penalized]
        num_counted, num_tokens = of_seats.num_counted[penalized_seats], self._positions[penalized]
        there = self._bring(
            lines, lines[is_kept], places,
            self._lines[biased], biased_seats, self._is_early[biased].astype(np.int32),
            self._lines[penalized], penalized_seats, of_seats.num_prompt_tokens[penalized_seats], num_counted,
            num_tokens, of_seats.penalties[penalized_seats],
            *masks,
        )  # fmt: skip
        if len(lines):
            self._find_logprobs(logits, *there[:3])
        if len(biased):
            add_biases(logits, of_seats.biases_there(self._bring), Biased(*there[3:6]))
        if len(penalized):
            rows, most = Penalized(*there[6:12]), int((num_tokens - num_counted).max())
            count_tokens(counts, token_ids, rows, most=most, anew=not num_counted.all())
            of_seats.num_counted[penalized_seats] = num_tokens
            penalize(logits, counts, rows)
        apply_token_mask(logits, there[13], there[12])

    def fetch_logprobs(self, logits: torch.Tensor, drawn: torch.Tensor) -> None:
        """Look at the tokens that were drawn, [S] int32, of rows that will tell; does not wait."""
        if self._logprob_rows is not None:
            buffer, lines, kept, places = self._logprob_rows
            drawn_logprobs(logits, kept, places, lines, drawn, Logprobs.of(buffer))
            self._logprobs = buffer.to("cpu", non_blocking=True)
            # The next step is launched before this one is read, and needs as much of the device's memory.
            self._logprob_rows = None

    def take(self, token_ids: Sequence[int]) -> tuple[dict[int, TokenLogprobs], dict[int, tuple[int, ...]]]:
        """Tokens were drawn, one for each row of the batch, or -1. Gives what is told of them, and what follows them.

        A step that was launched since may have given a seat to another, who knows nothing of this one's tokens; nobody
        asks for them any more.
        """
        forced: dict[int, tuple[int, ...]] = {}
        for index, seat, extras in self._bound:
            row = self._rows[index]
            if token_ids[row] < 0 or row in self.failures or self._of_seats.constraints.get(seat) is not extras:
                continue
            try:
                if following := extras.take(token_ids[row]):
                    forced[row] = following
            except Exception as error:
                self.failures[row] = cause_of(error)
        return {} if self._logprobs is None else self._token_logprobs(Logprobs.of(self._logprobs), token_ids), forced

    def _token_logprobs(self, found: Logprobs, token_ids: Sequence[int]) -> dict[int, TokenLogprobs]:
        columns = (found.drawn.tolist(), found.token_ids.tolist(), found.logprobs.tolist(), self._counts)
        logprobs = {}
        for index, drawn, top_ids, top, count in zip(self._with_logprobs.tolist(), *columns, strict=True):
            row = self._rows[index]
            if token_ids[row] >= 0 and row not in self.failures:
                pairs = tuple(zip(top_ids[:count], top[:count], strict=True))
                logprobs[row] = TokenLogprobs(token_ids[row], drawn, pairs)
        return logprobs

    def _find_logprobs(
        self, logits: torch.Tensor, lines: torch.Tensor, kept: torch.Tensor, places: torch.Tensor
    ) -> None:
        """Of these lines, before they are changed.

        Args:
            kept: [K] int32, those that will be.
            places: as in `LogprobRows`.
        """
        buffer = torch.empty((len(lines), WIDTH), dtype=torch.int32, device=logits.device)
        top_logprobs(logits, lines, max(self._counts), Logprobs.of(buffer))
        self._logprob_rows = LogprobRows(buffer, lines, logits.index_select(0, kept) if len(kept) else logits, places)

    def _masks(self, vocab_size: int) -> tuple[Ints, Ints]:
        """What constraints allow: [M] lines and [M, ⌈V / 32⌉] words. Where only stops are left they may come early."""
        lines, masks = [], []
        for index, seat, extras in self._bound:
            try:
                stop_ids = self._of_seats.stop_ids[seat].astype(np.int64)
                allowed, only_stops = extras.allow(vocab_size, stop_ids, early=bool(self._is_early[index]))
            except Exception as error:
                self.failures[self._rows[index]] = cause_of(error)
                continue
            if only_stops:
                self._is_early[index] = False
            lines.append(self._lines[index])
            masks.append(_words(allowed))
        return np.array(lines, dtype=np.int32), np.stack(masks) if masks else NO_MASKS


def _words(allowed: NDArray[np.bool_]) -> Ints:
    """Truth values [V] as a bit each, the lowest first: [⌈V / 32⌉]."""
    padded = np.zeros(-(-len(allowed) // 32) * 32, dtype=bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.int32)
