"""The steps of the table as runs: who did what on which seat, from which column to which."""

from __future__ import annotations

import json
from itertools import accumulate
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
    """The runs, by seat and then by column; `offset` is the column of the first step.

    Only what changes from one step to the next is looked at one by one: the table of 256 seats is drawn every second.
    """
    runs: list[Run] = []
    before: dict[int, Sequence[Any]] = {}
    begun: dict[int, int] = {}
    for column, step in enumerate(steps, offset):
        rows = {row[0]: row for row in _rows_of(step)}
        changed = [seat for seat, row in rows.items() if before.get(seat) != row]
        for seat in (*changed, *(before.keys() - rows.keys())):
            if seat in before:
                runs.append(Run._make((*before[seat], begun[seat], column - 1)))
            begun[seat] = column
        before = rows
    runs += [Run._make((*row, begun[seat], offset + len(steps) - 1)) for seat, row in before.items()]
    return sorted(runs, key=lambda run: (run.seat, run.first))


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


class Tokens(NamedTuple):
    """Tokens of a step by what they were for."""

    decode: int
    prefill: int
    again: int
    padding: int


def count_tokens(runs: Iterable[Run], drafts: Iterable[Drafted]) -> list[Tokens]:
    """Tokens of each column; drafts count as those of the answer."""
    # What is added at the column where a run begins is taken away behind its last one.
    steps = {phase: [0] * (NUM_STEPS + 1) for phase in PHASES}
    for run in runs:
        steps[run.phase][run.first] += run.tokens
        steps[run.phase][run.last + 1] -= run.tokens
    sums = {phase: list(accumulate(changes)) for phase, changes in steps.items()}
    for cell in drafts:
        sums["decode"][cell.column] += cell.made
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
    column of a budget, and the budget.
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
    }
    return json.dumps(cells, separators=(",", ":"))
