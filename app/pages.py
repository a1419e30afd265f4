"""The pages for people: chat and dashboard, rendered here; and the dashboard's stream and its JSON twin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quart import Blueprint, Response, request

from app import sse
from app.drawing import html_response
from app.errors import ApiError
from app.render.glossary import TERMS
from app.render.templates import make_environment
from app.request_pages import LARGEST_NUMBER, whole_argument
from engine.samples import MAX_SAMPLES
from engine.timeline import DEFAULT_WINDOW, WINDOWS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from app.http import Context


def pages_blueprint(context: Context) -> Blueprint:
    """The routes, bound to `context`."""
    pages = Blueprint("pages", __name__)
    templates = make_environment()
    telemetry, model = context.telemetry, context.engine.model

    def page(name: str, **variables: Any) -> Response:
        return html_response(templates.get_template(f"{name}.html").render(page=name, **variables))

    @pages.get("/")
    async def chat() -> Response:
        state = telemetry.draw_part("state")
        return page("chat", state_html=state, model=model.name, context_length=model.context_length)

    @pages.get("/ops")
    async def ops() -> Response:
        seconds = parse_window(request.args)
        parts = telemetry.frame(seconds).parts
        if "to" in request.args:
            draw = telemetry.past_table(whole_argument("to", LARGEST_NUMBER))
            parts = {**parts, "table": await context.drawing.run(draw)}
        windows = {"window": seconds // 60, "windows": [window // 60 for window in WINDOWS]}
        return page("ops", state_html=parts["state"], parts=parts, terms=TERMS, max_samples=MAX_SAMPLES, **windows)

    @pages.get("/ops/events")
    async def events() -> Response:
        return sse.response(telemetry.stream(parse_window(request.args)))

    @pages.get("/ops/stats.json")
    async def stats() -> Response:
        told = context.stats(parse_window(request.args))
        return await context.drawing.json(lambda: told)

    @pages.get("/ops/state")
    async def state() -> Response:
        """The line at the top of each page, alone: what pages ask for that show nothing else of now."""
        return html_response(telemetry.draw_part("state"))

    return pages


def parse_window(args: Mapping[str, str]) -> int:
    """The seconds of the window that a request asks for in minutes; five minutes where it does not.

    Raises:
        ApiError: 400, there is no such window.
    """
    given = args.get("window", str(DEFAULT_WINDOW // 60))
    minutes = {str(seconds // 60): seconds for seconds in WINDOWS}
    if given not in minutes:
        raise ApiError(400, f"'window' must be one of {', '.join(minutes)}, in minutes.", param="window")
    return minutes[given]
