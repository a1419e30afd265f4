"""`/ops/requests`: the requests one by one, and the operator's way to end one; `/ops/table`: earlier steps."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from quart import Blueprint, Response, g, jsonify, redirect, request

from app.drawing import html_response
from app.errors import ApiError
from app.render.life import life_variables
from app.render.requests import begins_with, ended_row, request_row
from app.render.table import NUM_STEPS
from app.render.templates import make_environment
from engine.request_log import MAX_FINISHED
from engine.step_log import SHOWN_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from werkzeug.wrappers import Response as WerkzeugResponse

    from app.http import Context
    from engine.request_view import RequestView

log = logging.getLogger("relevo.requests")

LARGEST_NUMBER: Final = 1 << 62


def requests_blueprint(context: Context) -> Blueprint:
    """The routes, bound to `context`."""
    pages = Blueprint("requests", __name__)
    templates = make_environment()
    requests, telemetry = context.engine.requests, context.telemetry

    async def page(name: str, make: Callable[[], Mapping[str, Any]]) -> Response:
        own = {"page": "ops", "state_html": telemetry.draw_part("state"), "keeps_texts": requests.keeps_texts}
        return await context.drawing.page(templates.get_template(f"{name}.html"), lambda: {**own, **make()})

    @pages.get("/ops/requests")
    async def show_all() -> Response | WerkzeugResponse:
        asked = request.args.get("id", "")
        opened, ended = _found(requests, asked)
        if asked and len(opened) + len(ended) == 1:
            return redirect(f"/ops/requests/{(opened or ended)[0]['number']}", 303)
        rows = [request_row(entry, telemetry.palette) for entry in opened]
        keyed = any(entry["key"] for entry in (*opened, *ended))
        shown = {"rows": rows, "keyed": keyed, "asked": asked, "max_ended": MAX_FINISHED}
        return await page("requests", lambda: {**shown, "ended": [ended_row(entry) for entry in ended]})

    @pages.get("/ops/requests.json")
    async def show_all_as_json() -> Response:
        opened, ended = _found(requests, request.args.get("id", ""))
        return await context.drawing.json(lambda: {"open": opened, "finished": ended})

    @pages.get("/ops/requests/<number>")
    async def show(number: str) -> Response:
        life = _life(requests, number)
        tokens, wanted = requests.tokens(life["number"]), "tokens" in request.args

        def make() -> dict[str, Any]:
            shown = _shown(tokens()) if tokens is not None and wanted else None
            return {"life": life_variables(life), "tokens": shown, "has_tokens": tokens is not None}

        return await page("request", make)

    @pages.get("/ops/requests/<number>.json")
    async def show_as_json(number: str) -> Response:
        life = _life(requests, number)
        if "tokens" not in request.args:
            return await context.drawing.json(lambda: life)
        tokens = requests.tokens(life["number"])
        return await context.drawing.json(lambda: life | {"tokens": None if tokens is None else tokens()}, levels=2)

    @pages.post("/ops/requests/<number>/abort")
    async def abort(number: str) -> Response | WerkzeugResponse:
        life = _life(requests, number)
        aborted = requests.abort(life["number"])
        if aborted:
            log.info("%s aborted the request %s", g.who, life["request_id"])
        if "text/html" in request.headers.get("Accept", ""):
            return redirect(f"/ops/requests/{life['number']}", 303)
        if not aborted:
            raise ApiError(409, f"The request {life['number']} has ended already.", code="not_open")
        return jsonify({"number": life["number"], "aborted": True})

    return pages


def table_blueprint(context: Context) -> Blueprint:
    """The table's routes, bound to `context`."""
    pages = Blueprint("table", __name__)
    telemetry = context.telemetry

    @pages.get("/ops/table")
    async def table() -> Response:
        if "to" not in request.args:
            return html_response(telemetry.latest.parts["table"])
        draw = telemetry.past_table(whole_argument("to", LARGEST_NUMBER))
        return html_response(await context.drawing.run(draw))

    @pages.get("/ops/table.json")
    async def table_as_json() -> Response:
        num_steps = whole_argument("steps", SHOWN_STEPS, NUM_STEPS)
        told = context.engine.table(num_steps, whole_argument("to", LARGEST_NUMBER))
        return await context.drawing.json(lambda: told)

    return pages


def _found(requests: RequestView, asked: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Those that are open and those that have ended; of that id where one is asked for, in full or as pages show it."""
    opened, ended = requests.open(), requests.finished()
    if not asked:
        return opened, ended
    names = {line["request_id"] for line in (*opened, *ended)}
    wanted = {asked} if asked in names else {name for name in names if begins_with(name, asked)}
    return [line for line in opened if line["request_id"] in wanted], [x for x in ended if x["request_id"] in wanted]


def _life(requests: RequestView, number: str) -> dict[str, Any]:
    """The request of that number.

    Raises:
        ApiError: 404, there is none, or not any more.
    """
    is_number = number.isascii() and number.isdigit() and len(number) < 19
    life = requests.life(int(number)) if is_number else None
    if life is None:
        message = f"Of the requests that have ended the last {MAX_FINISHED} are known. This one is not among them."
        raise ApiError(404, message, code="request_not_found")
    return life


def _shown(tokens: dict[str, Any]) -> dict[str, Any]:
    """What the page shows of the tokens: id and text of each."""
    parts = [
        (title, list(zip(tokens[f"{name}_token_ids"], tokens[f"{name}_pieces"], strict=True)))
        for title, name in (("The rendered prompt", "prompt"), ("The answer", "output"))
    ]
    return {"parts": parts, "left_out": tokens["left_out"]}


def whole_argument(name: str, most: int, default: int | None = None) -> int:
    """A number that the address has, not negative.

    Raises:
        ApiError: 400, it is none, or too large.
    """
    given = request.args.get(name, "" if default is None else str(default))
    value = int(given) if given.isascii() and given.isdigit() and len(given) < 20 else -1
    if not 0 <= value <= most:
        raise ApiError(400, f"'{name}' must be a whole number from 0 to {most}.", param=name, code="invalid_value")
    return value
