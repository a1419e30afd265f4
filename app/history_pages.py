"""`/ops/history`: the charts of a month, the same as JSON and as CSV."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from quart import Blueprint, Response, request

from app.api.aside import dump_in_pieces
from app.errors import ApiError
from app.journal.reading import Question, choose_step
from app.journal.series import csv_head, csv_lines, make_series
from app.journal.store import KEPT_ROWS, MINUTE, SECOND
from app.render.history import history_variables
from app.render.templates import make_environment

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from quart.typing import ResponseReturnValue

    from app.http import Context
    from app.journal.journal import Journal
    from app.journal.reading import Answer

HOUR: Final = 3600
RANGES: Final = {
    900: "15 min", HOUR: "1 h", 6 * HOUR: "6 h", 24 * HOUR: "day", 7 * 24 * HOUR: "week", 31 * 24 * HOUR: "month",
}  # fmt: skip
LEAST_RANGE, MOST_RANGE = 10, 366 * 24 * HOUR
POINTS: Final = 600
LEAST_POINTS, MOST_POINTS = 2, 4000
MOST_EVENTS: Final = 500
PAGE_EVENTS: Final = 50
TABLE_ROWS: Final = 24
CSV_CHUNK: Final = 2000
JSON_LEVELS: Final = 2  # each series is written in one go


@dataclass(frozen=True, slots=True)
class Span:
    """The time that is asked for, in seconds since the epoch; `is_live` where it ends now."""

    start: int
    end: int
    is_live: bool

    @property
    def seconds(self) -> int:
        """Its length."""
        return self.end - self.start

    @property
    def ends(self) -> tuple[int, int]:
        """Both."""
        return self.start, self.end


def history_blueprint(context: Context) -> Blueprint:
    """The routes, bound to `context`."""
    pages = Blueprint("history", __name__)
    template = make_environment().get_template("history.html")
    journal = context.journal

    @pages.get("/ops/history")
    async def show() -> Response:
        span = parse_span(request.args, journal.wall())
        answer = await journal.ask(Question(span.start, span.end, TABLE_ROWS))
        events = await journal.ask_events(span.start, span.end, PAGE_EVENTS)
        shown = {
            "page": "ops", "state_html": context.telemetry.draw_part("state"), "span": span, "ranges": RANGES,
            "query": f"from={span.start}&to={span.end}", "problem": journal.problem,
        }  # fmt: skip
        return await context.drawing.page(template, lambda: shown | history_variables(answer, events, *span.ends))

    @pages.get("/ops/history.json")
    async def as_json() -> ResponseReturnValue:
        span = parse_span(request.args, journal.wall())
        points = _whole("points", request.args.get("points", POINTS), LEAST_POINTS, MOST_POINTS)
        events = await journal.ask_events(span.start, span.end, MOST_EVENTS)
        told = {
            "from": span.start,
            "to": span.end,
            "kept_seconds": {"seconds": KEPT_ROWS[SECOND] * SECOND, "minutes": KEPT_ROWS[MINUTE] * MINUTE},
            "problem": journal.problem,
            "targets": asdict(context.engine.limits.slo),
            "events": [event.as_json() for event in events],
        }
        question = Question(span.start, span.end, points)
        text = await journal.ask_for(question, partial(write_json, told))
        return Response(text, content_type="application/json")

    @pages.get("/ops/history.csv")
    async def as_csv() -> Response:
        span = parse_span(request.args, journal.wall())
        step = None
        if "points" in request.args:
            points = _whole("points", request.args["points"], LEAST_POINTS, KEPT_ROWS[SECOND])
            step = choose_step(span.start, span.end, points)
        name = f"relevo-{_file_time(span.start)}-{_file_time(span.end)}.csv"
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        response = Response(stream_csv(journal, span, step), content_type="text/csv; charset=utf-8", headers=headers)
        # Quart would cut a long one after its own response timeout; who stops reading loses the connection.
        response.timeout = None
        return response

    return pages


def write_json(told: Mapping[str, Any], answer: Answer) -> str:
    """The object of `/ops/history.json`; made on a thread."""
    return dump_in_pieces({**told, "step_seconds": answer.step, "series": make_series(answer)}, JSON_LEVELS)


async def stream_csv(journal: Journal, span: Span, step: int | None) -> AsyncIterator[bytes]:
    """The whole of a span, a few thousand rows at a time, each time asked anew: a slow reader holds nothing."""
    yield csv_head().encode()
    start, width = span.start, step or SECOND
    while True:
        lines, last, width = await journal.ask_for(Question(start, span.end, CSV_CHUNK, width), _csv_chunk)
        if last is None:
            return
        yield lines
        # Where seconds are no longer kept the rest is in minutes, too.
        start = last + width


def _csv_chunk(answer: Answer) -> tuple[bytes, int | None, int]:
    """The lines, the time of the last one and the seconds of each; made on a thread."""
    last = int(answer.rows[-1][0] or 0) if answer.rows else None
    return csv_lines(answer.rows).encode(), last, answer.step


def parse_span(args: Mapping[str, str], now: float) -> Span:
    """The time that a request asks for: `from` and `to`, or `range` seconds that end now; an hour without either.

    Raises:
        ApiError: 400, it is no time, or too short or too long a one.
    """
    if "from" not in args and "to" not in args:
        length = _whole("range", args.get("range", HOUR), LEAST_RANGE, MOST_RANGE)
        end = math.ceil(now)  # what has just happened is in it
        return Span(end - length, end, is_live=True)
    end = _moment("to", args["to"]) if "to" in args else math.ceil(now)
    start = _moment("from", args["from"]) if "from" in args else end - HOUR
    if not LEAST_RANGE <= end - start <= MOST_RANGE:
        message = f"'to' must be {LEAST_RANGE} to {MOST_RANGE} seconds after 'from'."
        raise ApiError(400, message, param="to", code="invalid_range")
    return Span(start, end, is_live=False)


def _moment(name: str, text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text)
            value = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            value = -1.0
    if not 0 <= value < 253_402_300_800:  # the year 10000, which dates do not know
        message = f"'{name}' must be a time: seconds since the epoch, or ISO 8601 like 2026-01-31T12:00:00Z."
        raise ApiError(400, message, param=name, code="invalid_time")
    return int(value)


def _whole(name: str, text: str | int, least: int, most: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        message = f"'{name}' must be a whole number from {least} to {most}."
        raise ApiError(400, message, param=name, code="invalid_value")
    return value


def _file_time(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y%m%dT%H%M%SZ}"
