"""The web application: everything that answers HTTP, put together around one engine."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

import trio
from quart import Response, g, redirect, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from app.admin import admin_blueprint
from app.admin_keys import keys_blueprint
from app.admin_recordings import recordings_blueprint
from app.api import api_blueprint
from app.api.anthropic import MESSAGES_URL
from app.api.anthropic_answer import error_response
from app.api.deadlines import DeadlineWatch
from app.api.errors import describe
from app.api.places import take_place
from app.api.requests import BODIES, BODY_TIMEOUT_SECONDS, Bodies
from app.assets import templates_dir
from app.call_scope import CROWDED, HANDLES, PERMITS
from app.chat import chat_blueprint
from app.cors import Cors
from app.docs import docs_blueprint
from app.drawing import Drawing
from app.endings import Refusals, this_request
from app.errors import ApiError
from app.guard import Guard
from app.history_pages import history_blueprint
from app.limit_page.routes import limit_blueprint
from app.limits import UNAVAILABLE
from app.login import login_blueprint
from app.logs import FIELDS
from app.metrics import metrics_blueprint
from app.pages import pages_blueprint
from app.probes import probes_blueprint
from app.render.templates import make_environment
from app.request_id import HEADER, choose_request_id
from app.request_pages import requests_blueprint, table_blueprint
from app.room import Room, no_room
from app.security import Area, Gate, area_of, is_cross_site, refuse_cross_site
from app.services import Services
from app.static_files import static_blueprint
from app.unread import Unread
from engine.errors import BusyError, RelevoError
from engine.timeline import DEFAULT_WINDOW

if TYPE_CHECKING:
    from jinja2 import Environment
    from werkzeug.wrappers import Response as WerkzeugResponse

    from app.callers import Callers
    from app.config import Settings
    from app.effects import EffectWatch
    from app.endings import Endings
    from app.journal.journal import Journal
    from app.key_service import KeyService
    from app.lifecycle import Lifecycle
    from app.limit_page.service import LimitSearches
    from app.limits import Limits
    from app.live_config import LiveConfig
    from app.recording.recorder import TrafficRecorder
    from app.telemetry import Telemetry
    from engine.engine import Engine

log = logging.getLogger("relevo.http")

NUM_EVENTS: Final = 20
# What people type into the address line. With a slash at the end each leads to itself; no other route does.
PAGES: Final = frozenset(
    {
        "/ops", "/ops/history", "/ops/limit", "/ops/limit/compare", "/ops/limit/<search_id>", "/ops/requests",
        "/ops/requests/<number>", "/admin", "/admin/keys", "/admin/recordings", "/docs", "/login",
    }
)  # fmt: skip
# No foreign or inline script, no frame around a page, no guessing at types.
SECURITY_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'self'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
        "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True)
class Context:
    """What the routes work with.

    Attributes:
        journal: changes of the settings, events and the history, across restarts.
        callers: what each API key may expect.
        keys: the API keys, and the only way to change them.
        limits: how much each of them may ask for.
        endings: tells the log, and traces and a recording where they are wanted, of each request that ended.
        recorder: makes recordings of lengths and times, and knows those that are kept.
        searches: looks for the limit of this server when an operator wants it.
        deadlines: ends answers whose time is over.
        room: for how many connections there is room.
        unread: answers that wait for their readers.
        live: the only way to change the settings that move.
        effects: what came of such changes.
        services: what runs beside the server.
        started_at: seconds since the epoch.
        errors: answers that are errors, by their status and their code.
        refusals: tells the log of them.
        drawing: makes pages and JSON beside the event loop.
    """

    settings: Settings
    engine: Engine
    telemetry: Telemetry
    lifecycle: Lifecycle
    journal: Journal
    live: LiveConfig
    effects: EffectWatch
    callers: Callers
    keys: KeyService
    limits: Limits
    endings: Endings
    recorder: TrafficRecorder
    searches: LimitSearches
    deadlines: DeadlineWatch = field(default_factory=DeadlineWatch)
    room: Room = field(default_factory=Room.of_process)
    unread: Unread = field(default_factory=Unread)
    services: Services = field(default_factory=Services)
    started_at: int = field(default_factory=lambda: int(time.time()))
    errors: Counter[tuple[int, str]] = field(default_factory=Counter)
    refusals: Refusals = field(default_factory=Refusals)
    drawing: Drawing = field(default_factory=Drawing)

    def stats(self, window_seconds: int = DEFAULT_WINDOW) -> dict[str, Any]:
        """The object of `GET /ops/stats.json`: the engine's numbers, the process's, and what is wrong."""
        events = [event.as_json() for event in self.journal.events.latest(NUM_EVENTS)]
        own = {**self.lifecycle.stats(), **self.searches.stats(), "events": events, "history": self.journal.stats()}
        return self.telemetry.complete({**self.engine.snapshot(), **own}, window_seconds)


def create_app(context: Context) -> QuartTrio:
    """The application with all its routes."""
    app = QuartTrio("app", template_folder=str(templates_dir()), static_folder=None)
    bodies = app.config[BODIES] = Bodies(context.engine)
    app.config["MAX_CONTENT_LENGTH"] = bodies.max_bytes
    app.config["BODY_TIMEOUT"] = BODY_TIMEOUT_SECONDS
    # `//v1/models` is another address, not a redirect to this one.
    app.url_map.merge_slashes = False
    gate = Gate(context.settings, context.keys.keyring)
    pages = make_environment()
    for blueprint in (
        api_blueprint(context),
        admin_blueprint(context),
        keys_blueprint(context),
        recordings_blueprint(context),
        probes_blueprint(context),
        metrics_blueprint(context),
        pages_blueprint(context),
        static_blueprint(),
        history_blueprint(context),
        limit_blueprint(context),
        requests_blueprint(context),
        table_blueprint(context),
        chat_blueprint(context),
        docs_blueprint(context),
        login_blueprint(gate, pages),
    ):
        app.register_blueprint(blueprint)
    _install_checks(app, context, gate)
    _install_errors(app, context, pages)
    app.asgi_app = Guard(app.asgi_app)  # type: ignore[method-assign]
    return app


def _install_checks(app: QuartTrio, context: Context, gate: Gate) -> None:
    """What happens before and after every route."""
    cors = Cors(context.settings.server.cors_origins)

    @app.before_request
    async def check() -> Response | WerkzeugResponse | None:
        g.arrived = trio.current_time()
        g.request_id = choose_request_id(request.headers.get(HEADER))
        rule = request.url_rule
        if rule is None:
            page = _page_meant(app)
            # Else there is no route: 404 or 405, which tell nothing. Whether the page is shown, its own route says.
            return None if page is None else redirect(page, 308)
        methods = rule.methods or set()
        if request.method == "OPTIONS":
            allowed = {"Allow": ", ".join(sorted(methods)), **cors.preflight_headers(request, methods)}
            return Response("", 204, allowed)
        if not cors.allows(request):
            refuse_cross_site(request)
        area = area_of(rule.rule)
        if request.scope.get(CROWDED) and area is Area.API:
            context.engine.count_refusal(BusyError.code)
            raise no_room()
        try:
            g.who = gate.judge(request, area, may_use_cookie=not is_cross_site(request))
        except ApiError as error:
            if error.status == 401 and _wants_page():
                return redirect(f"/login?{urlencode({'next': request.full_path.rstrip('?')})}", 303)
            raise
        if area is Area.API and request.method == "POST":
            take_place(context, request.scope[HANDLES])  # type: ignore[typeddict-item]
        return None

    @app.after_request
    async def finish(response: Response) -> Response:
        response.headers[HEADER] = g.get("request_id") or choose_request_id(None)
        if request.path.startswith(MESSAGES_URL):
            response.headers["Request-Id"] = response.headers[HEADER]  # where clients of Anthropic's API look
        for name, value in SECURITY_HEADERS.items():
            response.headers.setdefault(name, value)
        # What is told is for who asked. Static files have said already how long they may be kept.
        response.headers.setdefault("Cache-Control", "no-store")
        cors.add_headers(request, response.headers)
        if g.get("metered"):
            response.headers.update(context.limits.headers(g.who, trio.current_time()))
        return response


def _page_meant(app: QuartTrio) -> str | None:
    """The address of a page that was asked for with a slash behind it."""
    path = request.path.removesuffix("/")
    adapter = app.create_url_adapter(request)
    if path == request.path or request.method not in ("GET", "HEAD") or adapter is None:
        return None
    try:
        rule, _ = adapter.match(path, "GET", return_rule=True)
    except HTTPException:
        return None
    asked = request.query_string.decode("latin-1")
    return quote(path) + (f"?{asked}" if asked else "") if rule.rule in PAGES else None


def _install_errors(app: QuartTrio, context: Context, pages: Environment) -> None:
    """Every error becomes JSON, or a page where a person is looking at a page."""

    async def answer(error: Exception) -> Response:
        known = describe(error)
        if known.status >= 400:
            context.errors[known.status, known.code or known.kind] += 1
            context.refusals.note(known.status, known.code or known.kind, this_request())
        if known.status == 500 and not isinstance(error, (RelevoError, HTTPException)):
            log.error("an answer failed", extra={FIELDS: this_request()}, exc_info=error)
        if known.status == UNAVAILABLE:
            for permit in request.scope[PERMITS]:  # type: ignore[typeddict-item]
                permit.give_back(trio.current_time())
        if not _wants_page():
            # Clients of Anthropic's API expect its errors, from whatever depth they come.
            return error_response(known) if request.path.startswith(MESSAGES_URL) else known.response()
        page = pages.get_template("error.html").render(
            status=known.status, title=HTTPStatus(known.status).phrase, message=known.message
        )
        return Response(page, known.status, {**known.headers}, content_type="text/html; charset=utf-8")

    app.register_error_handler(HTTPException, answer)
    app.register_error_handler(Exception, answer)


def _wants_page() -> bool:
    """Whether a person's browser asks for a page; everything under `/v1` is for programs."""
    if request.method not in ("GET", "HEAD") or request.path.startswith("/v1"):
        return False
    return "text/html" in request.headers.get("Accept", "")
