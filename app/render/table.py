"""The table: one row a seat, one column a step, the colour of whoever sat there.

One rectangle is what a request computed on a seat without a gap; hatching on it says where a prompt was read. Positions
along the steps are percentages, so the picture fills any width while text and hatching keep their size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from markupsafe import escape

from app.render.svg import axis_svg, number, rect, svg, text
from app.render.table_runs import NUM_STEPS as NUM_STEPS
from app.render.table_runs import (
    count_tokens,
    encode_cells,
    find_changes,
    find_drafts,
    find_mixed,
    find_runs,
    find_sittings,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from markupsafe import Markup

    from app.render.palette import Palette
    from app.render.table_runs import Drafted, Run, Tokens

STRIP_HEIGHT = 44
STRIP_GAP = 10
# Nobody points at a lower row; the script tells of it by the keyboard.
POINTED_PITCH = 4.0
_STEP = 100 / NUM_STEPS


@dataclass(frozen=True, slots=True)
class TablePicture:
    """The drawn table and what its caption says.

    Attributes:
        labels: the seats' numbers, to the left of the plot.
        plot: seats × steps, with the strip of tokens a step below.
        cells: what each cell is, as JSON for the script that tells it.
        seats: rows drawn.
        pitch: height of a row, in pixels.
        budget: tokens a step may compute.
        first_step, last_step: the steps shown, 0 where there are none.
        kept: the first and the last step that can be shown.
        phases: what is to be seen in it beside decodes.
        has_several: whether a step gave an answer more than one token.
    """

    labels: Markup
    plot: Markup
    cells: str
    seats: int
    pitch: float
    budget: int
    first_step: int
    last_step: int
    kept: tuple[int, int]
    phases: frozenset[str]
    has_several: bool = False

    @property
    def has_padding(self) -> bool:
        """Whether something was computed for nothing."""
        return "padding" in self.phases


def draw_table(table: Mapping[str, Any], palette: Palette, *, seats: int, label: str = "") -> TablePicture:
    """Draw the newest steps of a table, the last one at the right edge.

    Args:
        seats: the limit that holds now.
        label: what the picture shows, for those who do not see it; without one the last step is described.
    """
    steps: Sequence[Mapping[str, Any]] = table["steps"][-NUM_STEPS:]
    offset = NUM_STEPS - len(steps)
    runs, drafts = find_runs(steps, offset), find_drafts(steps, offset)
    # After a lowered limit those who sat beyond it are shown until their steps have moved out of sight.
    seats = max([seats, *(run.seat + 1 for run in runs)])
    pitch = _row_pitch(seats)
    gap = 1.5 if pitch >= 8 else 0.5 if pitch >= 3 else 0.0  # thin rows are told apart by their colours
    height = round(seats * pitch)
    total = height + STRIP_GAP + STRIP_HEIGHT
    rows = "".join(f"M0 {number(seat * pitch)}h{NUM_STEPS}v{number(pitch - gap)}H0Z" for seat in range(seats))
    body = [_stretched(height, f'<path class="seat" d="{rows}"/>')]
    first = steps[0]["step"] - offset if steps else 0
    body += _sittings(runs, pitch, gap, palette, first)
    body += _without_a_sitting(runs, pitch, gap, palette)
    body.append(_stretched(height, _edges(runs, pitch, gap) + _several(drafts, pitch, gap)))
    body += _preemptions(steps, offset, pitch)
    body += _changes(steps, offset, total)
    body.append(
        _strip(
            steps,
            count_tokens(runs, drafts, find_mixed(steps, offset))[offset:],
            offset,
            table["budget"],
            height + STRIP_GAP,
        )
    )
    return TablePicture(
        labels=_labels(seats, pitch, total),
        plot=svg("steps", body, height=total, label=label or _describe(steps, seats)),
        cells=encode_cells(steps, runs, drafts, offset, table["budget"]),
        seats=seats,
        pitch=pitch,
        budget=table["budget"],
        first_step=steps[0]["step"] if steps else 0,
        last_step=steps[-1]["step"] if steps else 0,
        kept=tuple(table.get("kept", (0, 0))),
        phases=frozenset(run.phase for run in runs),
        has_several=any(cell.right for cell in drafts),
    )


def _row_pitch(seats: int) -> float:
    """Height of a row, its gap included, in pixels: few seats have high rows, very many rows of two pixels."""
    high = max(18.0, min(28.0, 140 / seats))
    return max(2.0, min(high, 400 / seats))


@cache
def _x(column: float) -> str:
    return f"{number(column * _STEP)}%"


def _width(run: Run) -> str:
    return _x(run.last - run.first + 1)


def _sittings(runs: Sequence[Run], pitch: float, gap: float, palette: Palette, first_step: int) -> list[str]:
    """Who sat where, and on it what they read."""
    shapes: list[str] = []
    for sitting in find_sittings(runs):
        begin, end = sitting[0], sitting[-1]
        y, height = begin.seat * pitch, pitch - gap
        width = _x(end.last - begin.first + 1)
        css = palette.css(begin.request_id)
        title = _title(sitting, first_step) if pitch >= POINTED_PITCH else ""
        shapes.append(rect(css, _x(begin.first), y, width, height, title))
        shapes += [
            rect("hatch" if run.phase == "prefill" else "hatch again", _x(run.first), y, _width(run), height)
            for run in _joined(sitting)
            if run.phase != "decode"
        ]
    return shapes


def _edges(runs: Sequence[Run], pitch: float, gap: float) -> str:
    """A light line where one request takes over from another."""
    lines: list[str] = []
    before = (-1, "")
    for run in runs:
        if run[:2] != before:
            lines.append(f"M{run.first} {number(run.seat * pitch)}v{number(pitch - gap)}")
        before = run[:2]
    return f'<path class="edges" d="{"".join(lines)}"/>'


def _joined(sitting: Sequence[Run]) -> list[Run]:
    """Chunks of different sizes are hatched as one."""
    joined: list[Run] = []
    for run in sitting:
        if joined and joined[-1].phase == run.phase:
            joined[-1] = joined[-1]._replace(last=run.last)
        else:
            joined.append(run)
    return joined


def _title(sitting: Sequence[Run], first_step: int) -> str:
    begin, end = sitting[0], sitting[-1]
    tokens: dict[str, int] = {}
    for run in sitting:
        tokens[run.phase] = tokens.get(run.phase, 0) + run.total
    what = ", ".join([f"{phase} {amount}" for phase, amount in tokens.items()])
    steps = f"steps {first_step + begin.first} to {first_step + end.last}"
    return f"{begin.request_id} · seat {begin.seat + 1} · {what} · {steps}"


def _without_a_sitting(runs: Sequence[Run], pitch: float, gap: float, palette: Palette) -> list[str]:
    """Seats that are held without tokens, and those that compute for nothing."""
    shapes: list[str] = []
    for run in runs:
        y, height = run.seat * pitch, pitch - gap
        if run.phase == "idle":
            thick = min(1.5, height)
            title = f"{run.request_id} · seat {run.seat + 1} · no tokens"
            shapes.append(rect("held", _x(run.first), y + (height - thick) / 2, _width(run), thick, title))
        elif run.phase == "padding":
            title = f"{run.request_id} · seat {run.seat + 1} · padding"
            css = f"{palette.css(run.request_id)} wasted"
            shapes.append(rect(css, _x(run.first), y, _width(run), height, title))
    return shapes


def _several(drafts: Sequence[Drafted], pitch: float, gap: float) -> str:
    """Cells in which drafts were right are cut into as many pieces as the answer had tokens."""
    lines: list[str] = []
    tall = pitch - gap
    for column, seat, _, right in drafts:
        pieces = min(right + 1, max(2, int(tall / 3)))
        if right:
            lines += [f"M{column} {number(seat * pitch + tall * cut / pieces)}h1" for cut in range(1, pieces)]
    return f'<path class="several" d="{"".join(lines)}"/>' if lines else ""


def _stretched(height: int, body: str) -> str:
    """A drawing whose columns are one wide, whatever width there is."""
    frame = f'<svg width="100%" height="{height}" viewBox="0 0 {NUM_STEPS} {height}" preserveAspectRatio="none">'
    return f"{frame}{body}</svg>"


def _preemptions(steps: Sequence[Mapping[str, Any]], offset: int, pitch: float) -> list[str]:
    """A cross where a request lost its seat: on the seat it held in an earlier step."""
    crosses: list[str] = []
    lost = [(column, step, name) for column, step in enumerate(steps, offset) for name in step["preempted"]]
    small = "" if pitch >= 8 else " small"
    for column, step, request_id in lost:
        held = (
            row[0] for before in reversed(steps[: column - offset]) for row in before["rows"] if row[1] == request_id
        )
        seat = next(held, None)
        if seat is None:
            continue
        cross = f"<tspan>×</tspan><title>{escape(request_id)} was preempted in step {step['step']}</title>"
        y = number(seat * pitch + pitch / 2 + (3 if small else 4.5))
        crosses.append(f'<text class="cross{small}" x="{_x(column + 0.5)}" y="{y}">{cross}</text>')
    return crosses


def _changes(steps: Sequence[Mapping[str, Any]], offset: int, height: int) -> list[str]:
    """A dashed line before the first step that was planned under a new setting."""
    marks: list[str] = []
    for column, generation in find_changes(steps, offset):
        x = _x(column)
        line = f'<line class="mark" x1="{x}" x2="{x}" y1="0" y2="{height}"/>'
        marks.append(f"<g>{line}<title>Generation {generation}</title></g>")
    return marks


def _strip(steps: Sequence[Mapping[str, Any]], amounts: Sequence[Tokens], offset: int, budget: int, y: int) -> str:
    """Tokens a step, from the bottom: decode, prefill, what is computed again, padding; the budget as a dashed line."""
    budgets = [step.get("budget", budget) for step in steps] or [budget]
    scale = (STRIP_HEIGHT - 4) / max(1, *budgets, *(sum(kinds) for kinds in amounts))
    paths: list[list[str]] = [[], [], [], []]
    for column, kinds in enumerate(amounts, offset):
        left, right, low = number(column + 0.08), number(column + 0.92), 0.0
        for path, amount in zip(paths, kinds, strict=True):
            if not amount:
                continue
            # One token in a budget of thousands is still a line that can be seen.
            high = low + (amount * scale if path is not paths[0] else max(amount * scale, 1.5))
            bottom, top = number(STRIP_HEIGHT - low), number(STRIP_HEIGHT - high)
            path.append(f"M{left} {bottom}V{top}H{right}V{bottom}Z")
            low = high
    limit = [
        f"{'L' if index else 'M'}{column} {number(STRIP_HEIGHT - most * scale)}H{column + 1}"
        for index, (column, most) in enumerate(zip(range(offset, NUM_STEPS), budgets, strict=False))
    ]
    names = ("decode", "prefill", "again", "padding")
    drawn = [f'<path class="tokens-{name}" d="{"".join(path)}"/>' for name, path in zip(names, paths, strict=True)]
    base = f'<path class="grid" d="M0 {STRIP_HEIGHT - 0.5}H{NUM_STEPS}"/>'
    return (
        f'<svg y="{y}" width="100%" height="{STRIP_HEIGHT}" viewBox="0 0 {NUM_STEPS} {STRIP_HEIGHT}" '
        f'preserveAspectRatio="none">{base}{"".join(drawn)}'
        f'<path class="limit" d="{"".join(limit) or f"M0 4H{NUM_STEPS}"}"/></svg>'
    )


def _labels(seats: int, pitch: float, height: int) -> Markup:
    every = 1 if pitch >= 11 else 2 if pitch >= 6 else 16 if pitch < 3 else 8
    shown = [seat for seat in range(seats) if seat == 0 or (seat + 1) % every == 0]
    words = [text("tick", "22", seat * pitch + pitch / 2 + 3, str(seat + 1)) for seat in shown]
    return axis_svg(words, width=26, height=height)


def _describe(steps: Sequence[Mapping[str, Any]], seats: int) -> str:
    if not steps:
        return f"The table: {seats} seats, no step yet."
    taken = [row for row in steps[-1]["rows"] if row[2] in ("prefill", "decode")]
    return f"The table: {seats} seats, the last {len(steps)} steps. In the last step {len(taken)} seats computed."
