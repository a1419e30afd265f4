"""The steps of the table as runs: who did what on which seat, from which column to which."""

from __future__ import annotations

import json
from functools import lru_cache
from itertools import accumulate, pairwise, starmap
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

NUM_STEPS: Final = 120
COMPUTED: Final = ("prefill", "recompute", "decode")
PHASES: Final = (*COMPUTED, "idle", "padding")


class Run(NamedTuple):
    """A request that did the same on its seat in each column from `first` to `last`.

    Attributes:
        phase: one of `PHASES`.
        tokens: in each of these steps; of a decode those without drafts.
    """

    seat: int
    request_id: str
    phase: str
    tokens: int
    first: int
    last: int

    @property
    def total(self) -> int:
        """Tokens of all its steps."""
        return self.tokens * (self.last - self.first + 1)


class Drafted(NamedTuple):
    """A cell that had drafts: how many, and how many of them were right."""

    column: int
    seat: int
    made: int
    right: int


def find_runs(steps: Sequence[Mapping[str, Any]], offset: int) -> list[Run]:
    """The runs, by seat and then by column; `offset` is the column of the first step."""
    runs: list[Run] = []
    open_runs: dict[int, tuple[Sequence[Any], int]] = {}
    for column, changes in enumerate(_each_change(steps), offset):
        for seat, row in changes.items():
            if seat in open_runs:
                before, first = open_runs.pop(seat)
                runs.append(Run._make((*before, first, column - 1)))
            if row is not None:
                open_runs[seat] = row, column
    runs += [Run._make((*row, first, offset + len(steps) - 1)) for row, first in open_runs.values()]
    return sorted(runs, key=lambda run: (run.seat, run.first))


def find_names(steps: Sequence[Mapping[str, Any]]) -> dict[str, None]:
    """Everybody who has a row in these steps, in the order in which they come."""
    return dict.fromkeys(row[1] for changes in _each_change(steps) for row in changes.values() if row is not None)


def _each_change(steps: Sequence[Mapping[str, Any]]) -> Iterable[Mapping[int, Sequence[Any] | None]]:
    """The rows of the first step, and of each later one what is not as it was before: by seat, `None` for who left."""
    seen = [_Seen(step) for step in steps]
    return starmap(_changes, pairwise([_NOTHING, *seen]))


class _Seen:
    """A step. It equals itself alone, and does not change: what was worked out of it holds."""

    __slots__ = ("step",)

    def __init__(self, step: Mapping[str, Any]) -> None:
        self.step = step

    def __hash__(self) -> int:
        return id(self.step)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Seen) and self.step is other.step


_NOTHING: Final = _Seen({"rows": ()})


# The table of 256 seats has thirty thousand rows and is drawn every second; then most of them have been looked at.
@lru_cache(maxsize=2 * NUM_STEPS)
def _changes(before: _Seen, after: _Seen) -> Mapping[int, Sequence[Any] | None]:
    old, new = ({row[0]: row for row in _rows_of(seen.step)} for seen in (before, after))
    changes: dict[int, Sequence[Any] | None] = {seat: row for seat, row in new.items() if old.get(seat) != row}
    return changes | dict.fromkeys(old.keys() - new.keys())


def _rows_of(step: Mapping[str, Any]) -> Iterable[Sequence[Any]]:
    """Seat, name, phase and tokens: what is computed again is a phase of its own, and drafts are left out."""
    rows: Iterable[Sequence[Any]] = step["rows"]
    drafted = {seat for seat, _, _ in step.get("drafts", ())}
    again = {seat for seat, _ in step.get("recomputed", ())}
    if not drafted and not again:
        return rows
    return [
        [seat, name, "recompute" if seat in again else phase, 1 if seat in drafted and phase == "decode" else tokens]
        for seat, name, phase, tokens in rows
    ]


def find_drafts(steps: Sequence[Mapping[str, Any]], offset: int) -> list[Drafted]:
    """The cells that had drafts."""
    return [
        Drafted(column, seat, made, right)
        for column, step in enumerate(steps, offset)
        for seat, made, right in step.get("drafts", ())
    ]


def find_mixed(steps: Sequence[Mapping[str, Any]], offset: int) -> list[tuple[int, int, int]]:
    """The cells that computed again what was thrown away, and went on: column, seat, and the tokens that were new."""
    found: list[tuple[int, int, int]] = []
    for column, step in enumerate(steps, offset):
        again = dict(step.get("recomputed", ()))
        rows = [row for row in step["rows"] if row[0] in again] if again else []
        found += [(column, seat, tokens - again[seat]) for seat, _, _, tokens in rows if tokens > again[seat]]
    return found


def find_changes(steps: Sequence[Mapping[str, Any]], offset: int) -> list[tuple[int, int]]:
    """The columns of the first steps that were planned under other settings, each with its generation."""
    pairs = enumerate(pairwise([step.get("generation", 0) for step in steps]), offset + 1)
    return [(column, after) for column, (before, after) in pairs if before != after]


class Tokens(NamedTuple):
    """Tokens of a step by what they were for."""

    decode: int
    prefill: int
    again: int
    padding: int


def count_tokens(runs: Iterable[Run], drafts: Iterable[Drafted], mixed: Iterable[tuple[int, int, int]]) -> list[Tokens]:
    """Tokens of each column; drafts count as those of the answer."""
    # What is added at the column where a run begins is taken away behind its last one.
    steps = {phase: [0] * (NUM_STEPS + 1) for phase in PHASES}
    for run in runs:
        steps[run.phase][run.first] += run.tokens
        steps[run.phase][run.last + 1] -= run.tokens
    sums = {phase: list(accumulate(changes)) for phase, changes in steps.items()}
    for cell in drafts:
        sums["decode"][cell.column] += cell.made
    for where, _, fresh in mixed:
        sums["recompute"][where] -= fresh
        sums["prefill"][where] += fresh
    columns = zip(sums["decode"], sums["prefill"], sums["recompute"], sums["padding"], strict=True)
    return [Tokens(*column) for column in columns][:NUM_STEPS]


def find_sittings(runs: Iterable[Run]) -> list[list[Run]]:
    """Runs of one request on one seat in which something was computed for it, one after the other without a gap."""
    sittings: list[list[Run]] = []
    for run in runs:
        if run.phase not in COMPUTED:
            continue
        before = sittings[-1][-1] if sittings else None
        if before and before[:2] == run[:2] and before.last == run.first - 1:
            sittings[-1].append(run)
        else:
            sittings.append([run])
    return sittings


def encode_cells(
    steps: Sequence[Mapping[str, Any]], runs: Sequence[Run], drafts: Sequence[Drafted], offset: int, budget: int
) -> str:
    """What each cell is, for the script that tells it: JSON, as short as it is plain.

    `runs`: seat, first column, last column, number of the phase, tokens a step, number of the name. `budgets`: first
    column of a budget, and the budget. `changes`: column, and the generation that holds from there on. `mixed`: as
    `find_mixed` says.
    """
    names = {name: number for number, name in enumerate(dict.fromkeys(run.request_id for run in runs))}
    budgets: list[tuple[int, int]] = []
    for column, step in enumerate(steps, offset):
        if not budgets or budgets[-1][1] != step.get("budget", budget):
            budgets.append((column, step.get("budget", budget)))
    cells = {
        "first": steps[0]["step"] if steps else 0,
        "offset": offset,
        "phases": PHASES,
        "names": list(names),
        "runs": [(r.seat, r.first, r.last, PHASES.index(r.phase), r.tokens, names[r.request_id]) for r in runs],
        "drafts": drafts,
        "lost": [(column, name) for column, step in enumerate(steps, offset) for name in step["preempted"]],
        "budgets": budgets,
        "changes": find_changes(steps, offset),
        "mixed": find_mixed(steps, offset),
    }
    return json.dumps(cells, separators=(",", ":"))
