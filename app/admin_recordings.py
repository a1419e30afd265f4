"""`/admin/recordings`: records lengths and times of the traffic. A page whose forms need no script, and JSON."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from quart import Blueprint, Response, g, redirect, request

from app.api.requests import FORM_TYPE, read_fields, read_json
from app.audit import timestamp
from app.errors import ApiError
from app.fields import WrongFieldsError
from app.recording.recorder import DEFAULT_SECONDS, MAX_RECORDINGS, MAX_REQUESTS, MAX_SECONDS
from app.recording.recording import MAX_BYTES
from app.render import numbers
from app.render.templates import make_environment
from app.security import ADMIN_COOKIE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence

    from werkzeug.wrappers import Response as WerkzeugResponse

    from app.http import Context
    from app.recording.folder import Kept
    from app.recording.recorder import TrafficRecorder

log = logging.getLogger("relevo.recording")

PIECE_BYTES: Final = 1 << 16
SPANS: Final = {"600": "10 minutes", "3600": "an hour", "21600": "6 hours", "86400": "a day", "604800": "a week"}

# What each field takes, for whoever gave it something else.
TAKES: Final = {
    "ttl_seconds": f"a number of seconds from 1 to {MAX_SECONDS:,.0f}",
    "max_requests": f"a whole number from 1 to {MAX_REQUESTS:,}",
}


class NewRecording(BaseModel):
    """Body of `POST /admin/recordings`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    ttl_seconds: float = Field(DEFAULT_SECONDS, ge=1, le=MAX_SECONDS)
    max_requests: int = Field(MAX_REQUESTS, ge=1, le=MAX_REQUESTS)


def recordings_blueprint(context: Context) -> Blueprint:
    """The routes, bound to `context`."""
    blueprint = Blueprint("recordings", __name__)
    answers, recorder = Answers(context), context.recorder

    @blueprint.get("/admin/recordings")
    async def show() -> Response:
        return await answers.page() if "text/html" in request.headers.get("Accept", "") else await answers.json()

    @blueprint.post("/admin/recordings")
    async def make() -> Response | WerkzeugResponse:
        if request.mimetype != FORM_TYPE:
            await begin(recorder, await read_json())
            return await answers.json(201)
        span = (await read_fields()).get("ttl_seconds", "")
        return await answers.to_form(begin(recorder, {"ttl_seconds": int(span) if span in SPANS else span}))

    @blueprint.post("/admin/recordings/stop")
    async def stop() -> Response | WerkzeugResponse:
        if request.mimetype == FORM_TYPE:
            return await answers.to_form(end(recorder))
        await end(recorder)
        return await answers.json()

    @blueprint.get("/admin/recordings/<name>")
    async def download(name: str) -> Response:
        lines = await recorder.read(name)
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}  # a name of ours has no quotes
        response = Response(in_pieces(lines), content_type="application/x-ndjson", headers=headers)
        # Quart would cut a long one after its own response timeout; who stops reading loses the connection.
        response.timeout = None
        return response

    @blueprint.delete("/admin/recordings/<name>")
    async def delete(name: str) -> Response:
        await recorder.delete(name, g.who)
        return await answers.json()

    @blueprint.post("/admin/recordings/<name>/delete")
    async def delete_from_form(name: str) -> Response | WerkzeugResponse:
        return await answers.to_form(recorder.delete(name, g.who))

    return blueprint


class Answers:
    """The page and its JSON twin."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._template = make_environment().get_template("recordings.html")

    async def page(self, status: int = 200, error: str = "") -> Response:
        """The page; `error` is what went wrong."""
        context, recorder = self._context, self._context.recorder
        try:
            kept = await recorder.kept()
        except ApiError as unreadable:
            kept, error = [], error or str(unreadable)
        state, signed_in = context.telemetry.draw_part("state"), ADMIN_COOKIE in request.cookies
        told = {"page": "admin", "state_html": state, "signed_in": signed_in, "error": error}
        told |= page_variables(recorder, kept)
        return await context.drawing.page(self._template, lambda: told, status)

    async def json(self, status: int = 200) -> Response:
        """The object of `GET /admin/recordings`."""
        told = view(self._context.recorder, await self._context.recorder.kept())
        answer = await self._context.drawing.json(lambda: told)
        answer.status_code = status
        return answer

    async def to_form(self, work: Awaitable[object]) -> Response | WerkzeugResponse:
        """What a form is answered when its work is done, or why it could not be."""
        try:
            await work
        except ApiError as error:
            return await self.page(error.status, str(error))
        return redirect("/admin/recordings", 303)


async def begin(recorder: TrafficRecorder, body: Mapping[str, Any]) -> None:
    """Start a recording.

    Raises:
        ApiError: the body is wrong, or it cannot be started.
    """
    wanted = parse_new(body)
    recording = await recorder.start(wanted.ttl_seconds, wanted.max_requests, g.who)
    log.info("%s began the recording %s", g.who, recording.path.name)


async def end(recorder: TrafficRecorder) -> None:
    """Stop the recording.

    Raises:
        ApiError: there is none.
    """
    recorder.stop(g.who)


async def in_pieces(lines: bytes) -> AsyncIterator[bytes]:
    """A long text bit by bit, so that the event loop does others' work between them."""
    for start in range(0, len(lines), PIECE_BYTES):
        yield lines[start : start + PIECE_BYTES]


def parse_new(data: Mapping[str, Any]) -> NewRecording:
    """Check the body of a `POST /admin/recordings`; `null` means absent.

    Raises:
        ApiError: 422, naming the field at fault.
    """
    try:
        return NewRecording.model_validate({name: value for name, value in data.items() if value is not None})
    except ValidationError as error:
        raise WrongFieldsError.of(error, NewRecording.model_fields, lambda name, _: f"must be {TAKES[name]}.") from None


def view(recorder: TrafficRecorder, kept: Sequence[Kept]) -> dict[str, Any]:
    """The object of `GET /admin/recordings`."""
    now, before = recorder.now, recorder.before
    return {
        "recording": None
        if now is None
        else {
            "name": now.path.name,
            "who": now.who,
            "began": timestamp(now.began_at),
            "until": timestamp(now.began_at + now.until - now.began),
            "requests": now.num_requests,
            "bytes": now.num_bytes,
            "open": now.num_inside,
            "left_out": now.num_left_out,
            "max_requests": now.max_requests,
            "max_bytes": MAX_BYTES,
            "ends_as": now.ends_as,
        },
        "last": recorder.last or None,
        "ended": None
        if before is None
        else {
            "name": before.path.name,
            "who": before.who,
            "ends_as": before.ends_as,
            "requests": before.num_written,
            "left_out": before.num_left_out,
            "not_awaited": before.num_not_awaited,
            "lost": before.num_lost,
        },
        "problem": recorder.problem,
        "recordings": [
            {"name": one.name, "began": timestamp(one.began), "requests": one.num_requests, "bytes": one.num_bytes}
            for one in kept
        ],
    }


def page_variables(recorder: TrafficRecorder, kept: Sequence[Kept]) -> dict[str, Any]:
    """What the template needs of it."""
    now = recorder.now
    return {
        "recording": now,
        "since": numbers.clock(now.began_at) if now else "",
        "until": numbers.clock(now.began_at + now.until - now.began) if now else "",
        "size": _size(now.num_bytes) if now else "",
        "last": recorder.last,
        "problem": recorder.problem,
        "spans": SPANS.items(),
        "span": f"{DEFAULT_SECONDS:g}",
        "max_requests": MAX_REQUESTS,
        "max_size": _size(MAX_BYTES),
        "max_recordings": MAX_RECORDINGS,
        "kept": [
            {
                "name": one.name,
                "began": numbers.clock(one.began),
                "requests": one.num_requests,
                "size": _size(one.num_bytes),
                "is_written": now is not None and now.path == one.path,
            }
            for one in kept
        ],
    }


def _size(num_bytes: int) -> str:
    """Bytes as people read them."""
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g}\N{NO-BREAK SPACE}{unit}"
    return f"{num_bytes}\N{NO-BREAK SPACE}bytes"
