"""`/ops/limit`: the page, the same as JSON, its stream, and what begins, ends and forgets a search."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from quart import Blueprint, Response, g, jsonify, redirect, request

from app import sse
from app.api.requests import FORM_TYPE, read_fields, read_json
from app.errors import ApiError
from app.fields import WrongFieldsError
from app.limit_page.search import suggestion
from app.limit_page.view import LimitView
from app.limit_page.wish import (
    MAX_FORM_BYTES,
    MIX,
    RECORDING,
    WORKLOADS,
    check_mix,
    parse_form,
    parse_wish,
)
from app.render import limit
from app.render.plain import plain_of
from app.render.templates import make_environment
from engine.config import SloTargets

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from werkzeug.wrappers import Response as WerkzeugResponse

    from app.http import Context
    from app.limit_page.search import Search
    from app.limit_page.wish import Wish

JSON_LEVELS: Final = 2


def limit_blueprint(context: Context) -> Blueprint:
    """The routes, bound to `context`."""
    pages = Blueprint("limit", __name__)
    searches = context.searches
    page = LimitPage(context)

    @pages.get("/ops/limit")
    async def show() -> Response:
        return await page.draw(again=request.args.get("again"))

    @pages.get("/ops/limit.json")
    async def show_as_json() -> Response:
        told = await page.view_as_json()
        return await context.drawing.json(lambda: told)

    @pages.get("/ops/limit/events")
    async def events() -> Response:
        # After a break the browser names the last event that had a name: how it has the form.
        busy = request.headers.get("Last-Event-ID", request.args.get("busy", "")) == "1"
        return sse.response(page.view.stream(busy, context.lifecycle.stopped))

    @pages.post("/ops/limit")
    async def start() -> Response | WerkzeugResponse:
        slo = context.engine.limits.slo
        if request.mimetype != FORM_TYPE:
            search = await page.start(parse_wish(await read_json(), slo))
            answer = jsonify(search.as_json())
            answer.status_code = 202
            return answer
        form = await read_fields(MAX_FORM_BYTES)
        try:
            await page.start(parse_form(form, slo))
        except ApiError as error:
            known = {error.param: str(error)} if error.param else {}
            fields = error.fields if isinstance(error, WrongFieldsError) else known
            return await page.draw(error.status, form, {"fields": fields, "message": str(error)})
        return redirect("/ops/limit", 303)

    @pages.post("/ops/limit/stop")
    async def stop() -> Response | WerkzeugResponse:
        running = searches.running
        searches.stop("stopped", f"By {g.who}.")
        if "text/html" in request.headers.get("Accept", ""):
            return redirect("/ops/limit", 303)
        if running is None:
            raise ApiError(409, "No search runs.", code="not_searching")
        return jsonify(running.as_json())

    _add_ended(pages, context, page)
    return pages


def _add_ended(pages: Blueprint, context: Context, page: LimitPage) -> None:
    """The routes of searches one by one and two by two."""
    searches = context.searches

    @pages.get("/ops/limit/compare")
    async def compare() -> Response:
        return await page.draw_two(request.args.getlist("id"))

    @pages.get("/ops/limit/<search_id>")
    async def show_one(search_id: str) -> Response:
        return await page.draw_one(await searches.read(search_id))

    @pages.get("/ops/limit/<search_id>.json")
    async def show_one_as_json(search_id: str) -> Response:
        told = await searches.read(search_id)
        return await context.drawing.json(lambda: told, JSON_LEVELS)

    @pages.get("/ops/limit/<search_id>/report")
    async def report(search_id: str) -> Response:
        told = await searches.read(search_id)
        if told["result"] is None:
            raise ApiError(404, "That search has no result, and so no report.", code="no_report")
        html = await context.drawing.run(partial(_draw_report, told["result"]))
        # It brings its own style, which pages of this server may not: it is a file to be kept or sent.
        headers = {"Content-Disposition": f'attachment; filename="relevo-limit-{search_id}.html"'}
        return Response(html, content_type="text/html; charset=utf-8", headers=headers)

    @pages.post("/ops/limit/<search_id>/apply")
    async def apply(search_id: str) -> Response | WerkzeugResponse:
        done = await page.apply(search_id)
        if "text/html" in request.headers.get("Accept", ""):
            return redirect(f"/admin?held={done['generation']}", 303)
        return jsonify(done)

    @pages.delete("/ops/limit/<search_id>")
    async def forget(search_id: str) -> Response:
        await page.forget(search_id)
        return jsonify({"id": search_id, "deleted": True})

    @pages.post("/ops/limit/<search_id>/delete")
    async def forget_from_form(search_id: str) -> WerkzeugResponse:
        await page.forget(search_id)
        return redirect("/ops/limit", 303)


class LimitPage:
    """Draws the pages, and does what their forms ask for."""

    def __init__(self, context: Context) -> None:
        self._context, self._searches = context, context.searches
        self.view = LimitView(context.searches, context.engine, context.telemetry)
        environment = make_environment()
        self._page, self._one = (environment.get_template(f"{name}.html") for name in ("limit", "limit_search"))

    async def draw(
        self,
        status: int = 200,
        form: Mapping[str, str] | None = None,
        error: Mapping[str, Any] | None = None,
        *,
        again: str | None = None,
    ) -> Response:
        """The page.

        Args:
            form, error: what somebody typed, and what is wrong with it.
            again: the search whose questions stand in the form.

        Raises:
            ApiError: there is no such search.
        """
        await self._find_recordings()
        asked = (await self._searches.read(again))["asked"] if again else None
        parts = self.view.parts()
        if form is not None and error is not None:
            parts["ask"] = self.view.draw_ask(form, error)
        elif asked is not None:
            parts["ask"] = self.view.draw_again(asked)
        shown = {"page": "ops", "state_html": parts["state"], "parts": parts, "busy": self.view.is_busy}
        return await self._context.drawing.page(self._page, lambda: shown, status)

    async def draw_one(self, told: Mapping[str, Any]) -> Response:
        """One search."""
        shared, limits = self._shared(), self._context.engine.limits
        return await self._context.drawing.page(self._one, lambda: shared | limit.one_variables(plain_of(told), limits))

    async def draw_two(self, ids: list[str]) -> Response:
        """Two side by side, the older one pale.

        Raises:
            ApiError: 400, these are not two; 404, one is not there.
        """
        if len({*ids}) != 2:
            raise ApiError(400, "Choose two searches to compare.", param="id", code="invalid_value")
        older, newer = [await self._searches.read(search_id) for search_id in sorted({*ids})]
        shared, limits = self._shared(), self._context.engine.limits

        def make() -> dict[str, Any]:
            return shared | limit.two_variables(plain_of(newer), plain_of(older), limits)

        return await self._context.drawing.page(self._one, make)

    async def view_as_json(self) -> dict[str, Any]:
        """The object of `GET /ops/limit.json`."""
        await self._find_recordings()
        search, archive = self._searches.search, self._searches.archive
        return {
            "search": None if search is None else search.as_json(),
            "kept": archive.briefs,
            "problem": archive.problem or None,
            "workloads": [*WORKLOADS, MIX, *(RECORDING + name for name in self.view.recordings)],
        }

    async def start(self, wish: Wish) -> Search:
        """Begin a search.

        Raises:
            ApiError: 422, what is asked for cannot be; else as `LimitSearches.start`.
        """
        self._searches.check(wish)
        if wish.mix is not None:
            own = SloTargets(wish.ttft_p95_seconds, wish.itl_p95_seconds, wish.e2e_p95_seconds)
            check_mix(wish, own)
        trace = await self._find_trace(wish.recording) if wish.recording is not None else None
        return self._searches.start(wish, own_url(), g.who, trace)

    async def apply(self, search_id: str) -> dict[str, Any]:
        """Have the settings hold that a search found to be better, as `PATCH /admin/config` would.

        Raises:
            ApiError: 409, it found none; else as `LiveConfig.apply`.
        """
        told = await self._searches.read(search_id)
        better = suggestion(told)
        if not better:
            raise ApiError(409, "That search found no better settings.", code="nothing_to_apply")
        reason = f"found by the search for the limit of {told['began']}"
        return await self._context.live.apply({**better, "reason": reason}, who=g.who)

    async def forget(self, search_id: str) -> None:
        """Delete one."""
        await self._searches.delete(search_id, g.who)

    async def _find_recordings(self) -> None:
        try:
            self.view.recordings = tuple(one.name for one in await self._context.recorder.kept())
        except ApiError:
            self.view.recordings = ()  # the page of recordings says why

    async def _find_trace(self, name: str) -> Path:
        for one in await self._context.recorder.kept():
            if one.name == name:
                return one.path
        raise ApiError(422, f"There is no recording {name[:100]!r}.", param="workload", code="recording_not_found")

    def _shared(self) -> dict[str, Any]:
        return {"page": "ops", "state_html": self._context.telemetry.draw_part("state")}


def _draw_report(result: Mapping[str, Any]) -> str:
    """The page in one file; what makes it is imported when somebody wants one, and not while the server starts."""
    from app.limit.report import page_of

    return page_of(result)


def own_url() -> str:
    """The address under which this very request has reached the server, which a process on this machine can reach."""
    server = request.scope.get("server")
    if server is None or server[1] is None:
        raise ApiError(409, "The server has no address of its own to be asked at.", code="no_address")
    host, port = server
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
