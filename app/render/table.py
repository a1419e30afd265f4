"""The table: one row a seat, one column a step, the colour of whoever sat there.

Neighbouring steps of one request and phase are one rectangle. Positions along the steps are percentages, so the picture
fills any width while text and hatching keep their size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import escape

from app.render.svg import axis_svg, number, rect, svg, text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from markupsafe import Markup

    from app.render.palette import Palette

NUM_STEPS = 120
STRIP_HEIGHT = 44
STRIP_GAP = 10
_STEP = 100 / NUM_STEPS


@dataclass(slots=True)
class _Run:
    """A request on one seat in one phase, from column `first` up to `last`; `arrives` where another sat before."""

    seat: int
    request_id: str
    phase: str
    first: int
    last: int
    tokens: int
    arrives: bool


@dataclass(frozen=True, slots=True)
class TablePicture:
    """The drawn table and what its caption says.

    Attributes:
        labels: the seats' numbers, to the left of the plot.
        plot: seats × steps, with the strip of tokens a step below.
        seats: rows drawn.
        budget: tokens a step may compute.
        first_step, last_step: the steps shown, 0 where there are none.
        has_padding: whether something was computed for nothing.
    """

    labels: Markup
    plot: Markup
    seats: int
    budget: int
    first_step: int
    last_step: int
    has_padding: bool = False


def draw_table(table: Mapping[str, Any], palette: Palette, *, seats: int, label: str = "") -> TablePicture:
    """Draw the newest steps, the last one at the right edge.

    Args:
        seats: the limit that holds now.
        label: what the picture shows, for those who do not see it; without one the last step is described.
    """
    steps: Sequence[Mapping[str, Any]] = table["steps"][-NUM_STEPS:]
    # After a lowered limit those who sat beyond it are shown until their steps have moved out of sight.
    seats = max([seats, *(row[0] + 1 for step in steps for row in step["rows"])])
    pitch = _row_pitch(seats)
    offset = NUM_STEPS - len(steps)
    gap = 1.5 if pitch >= 8 else 0.5
    height = round(seats * pitch)
    body = [rect("seat", "0", seat * pitch, "100%", pitch - gap) for seat in range(seats)]
    runs = _runs(steps, offset)
    for run in runs:
        body += _draw_run(run, pitch, gap, palette, steps[run.first - offset]["step"])
    body += _preemptions(steps, offset, pitch)
    body += _changes(steps, offset, height + STRIP_GAP + STRIP_HEIGHT)
    body.append(_strip(steps, offset, table["budget"], height + STRIP_GAP))
    total = height + STRIP_GAP + STRIP_HEIGHT
    return TablePicture(
        labels=_labels(seats, pitch, total),
        plot=svg("steps", body, height=total, label=label or _describe(steps, seats)),
        seats=seats,
        budget=table["budget"],
        first_step=steps[0]["step"] if steps else 0,
        last_step=steps[-1]["step"] if steps else 0,
        has_padding=any(run.phase == "padding" for run in runs),
    )


def _row_pitch(seats: int) -> float:
    """Height of a row, its gap included, in pixels: the table grows to about 400 and then its rows get thinner."""
    return max(2.0, min(18.0, 400 / seats))


def _runs(steps: Sequence[Mapping[str, Any]], offset: int) -> list[_Run]:
    """Rectangles of the table: neighbouring columns with the same request, seat and phase."""
    runs: list[_Run] = []
    open_runs: dict[int, _Run] = {}
    for column, step in enumerate(steps, offset):
        for seat, request_id, phase, tokens in step["rows"]:
            run = open_runs.get(seat)
            if run and run.last == column - 1 and run.request_id == request_id and run.phase == phase:
                run.last = column
                run.tokens += tokens
            else:
                arrives = run is None or run.request_id != request_id
                run = open_runs[seat] = _Run(seat, request_id, phase, column, column, tokens, arrives)
                runs.append(run)
    return runs


def _draw_run(run: _Run, pitch: float, gap: float, palette: Palette, step: int) -> list[str]:
    x = f"{number(run.first * _STEP)}%"
    width = f"{number((run.last - run.first + 1) * _STEP)}%"
    y, height = run.seat * pitch, pitch - gap
    last = step + run.last - run.first
    title = f"{run.request_id} · seat {run.seat + 1} · {run.phase} · steps {step} to {last} · {run.tokens} tokens"
    if run.phase == "idle":
        return [rect("held", x, y + height / 2 - 0.75, width, 1.5, title)]
    if run.phase == "padding":
        return [rect(f"{palette.css(run.request_id)} wasted", x, y, width, height, title)]
    shapes = [rect(palette.css(run.request_id), x, y, width, height, title)]
    if run.phase == "prefill":
        shapes.append(rect("hatch", x, y, width, height))
    if run.arrives:
        shapes.append(rect("edge", x, y, "1.5", height))
    return shapes


def _preemptions(steps: Sequence[Mapping[str, Any]], offset: int, pitch: float) -> list[str]:
    """A cross where a request lost its seat: on the seat it held in an earlier step."""
    crosses: list[str] = []
    held: dict[str, int] = {}
    for column, step in enumerate(steps, offset):
        for request_id in step["preempted"]:
            seat = held.pop(request_id, None)
            if seat is not None:
                middle = f"{number((column + 0.5) * _STEP)}%"
                cross = f"<tspan>×</tspan><title>{escape(request_id)} was preempted in step {step['step']}</title>"
                y = number(seat * pitch + pitch / 2 + 4)
                crosses.append(f'<text class="cross" x="{middle}" y="{y}">{cross}</text>')
        held.update((row[1], row[0]) for row in step["rows"])
    return crosses


def _changes(steps: Sequence[Mapping[str, Any]], offset: int, height: int) -> list[str]:
    """A dashed line before the first step that was planned under a new setting."""
    marks: list[str] = []
    for index in range(1, len(steps)):
        if _setting(steps[index - 1]) != _setting(steps[index]):
            x = f"{number((offset + index) * _STEP)}%"
            marks.append(f'<line class="mark" x1="{x}" x2="{x}" y1="0" y2="{height}"/>')
    return marks


def _setting(step: Mapping[str, Any]) -> tuple[int | None, int | None]:
    return step.get("generation"), step.get("budget")


def _strip(steps: Sequence[Mapping[str, Any]], offset: int, budget: int, y: int) -> str:
    """Tokens a step: decode below, prefill on top of it, then padding, the budget as a dashed line."""
    rows = [_tokens(step) for step in steps]
    budgets = [step.get("budget", budget) for step in steps] or [budget]
    top = max(1, *budgets, *(sum(row) for row in rows)) if rows else max(1, budget)
    scale = (STRIP_HEIGHT - 4) / top
    decode_path: list[str] = []
    prefill_path: list[str] = []
    padding_path: list[str] = []
    limit_path: list[str] = []
    for column, ((decode, prefill, padding), limit) in enumerate(zip(rows, budgets, strict=False), offset):
        # One token in a budget of thousands is still a line that can be seen.
        low = max(decode * scale, 1.5) if decode else 0.0
        high = low + prefill * scale
        left, right = number(column + 0.08), number(column + 0.92)
        if decode:
            decode_path.append(f"M{left} {STRIP_HEIGHT}V{number(STRIP_HEIGHT - low)}H{right}V{STRIP_HEIGHT}Z")
        if prefill:
            decode_top = number(STRIP_HEIGHT - low)
            prefill_path.append(f"M{left} {decode_top}V{number(STRIP_HEIGHT - high)}H{right}V{decode_top}Z")
        if padding:
            prefill_top, padding_top = number(STRIP_HEIGHT - high), number(STRIP_HEIGHT - high - padding * scale)
            padding_path.append(f"M{left} {prefill_top}V{padding_top}H{right}V{prefill_top}Z")
        limit_path.append(f"{'L' if limit_path else 'M'}{column} {number(STRIP_HEIGHT - limit * scale)}H{column + 1}")
    base = f'<path class="grid" d="M0 {STRIP_HEIGHT - 0.5}H{NUM_STEPS}"/>'
    limits = "".join(limit_path) or f"M0 4H{NUM_STEPS}"
    return (
        f'<svg y="{y}" width="100%" height="{STRIP_HEIGHT}" viewBox="0 0 {NUM_STEPS} {STRIP_HEIGHT}" '
        f'preserveAspectRatio="none">{base}<path class="tokens-prefill" d="{"".join(prefill_path)}"/>'
        f'<path class="tokens-padding" d="{"".join(padding_path)}"/>'
        f'<path class="tokens-decode" d="{"".join(decode_path)}"/><path class="limit" d="{limits}"/></svg>'
    )


def _tokens(step: Mapping[str, Any]) -> tuple[int, int, int]:
    """Tokens of a step: decode, prefill, padding."""
    tokens = {"decode": 0, "prefill": 0, "padding": 0, "idle": 0}
    for row in step["rows"]:
        tokens[row[2]] += row[3]
    return tokens["decode"], tokens["prefill"], tokens["padding"]


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
