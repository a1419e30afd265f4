"""The pages over a made-up engine, on a real socket: for looking at every state in a browser.

python -m tests.pages_app busy 8321
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import hypercorn.trio
import trio
from hypercorn.config import Config
from quart import Response, g
from quart_trio import QuartTrio

from app.admin import admin_blueprint
from app.history_pages import history_blueprint
from app.live_config import LiveConfig
from app.pages import pages_blueprint
from app.render.templates import make_environment
from tests.fake_snapshot import FakeEngine, watched


def make_pages_app(engine: FakeEngine, telemetry: Any) -> tuple[QuartTrio, LiveConfig]:
    """Pages, settings and history; no model behind the chat. The settings want to be run."""
    journal = telemetry.journal
    live: Any = LiveConfig(engine, journal.audit)  # type: ignore[arg-type]

    def stats(window_seconds: int) -> dict[str, Any]:
        return telemetry.complete(engine.snapshot(), window_seconds)  # type: ignore[no-any-return]

    context: Any = SimpleNamespace(
        engine=engine, telemetry=telemetry, journal=journal, live=live, effects=None, stats=stats
    )
    app = QuartTrio("pages", static_folder=None)
    app.register_blueprint(pages_blueprint(context))
    app.register_blueprint(admin_blueprint(context))
    app.register_blueprint(history_blueprint(context))
    templates = make_environment()

    @app.before_request
    async def know_who() -> None:
        g.who = "admin"

    @app.get("/login")
    async def login() -> Response:
        html = templates.get_template("login.html").render(
            next="/", error="This is neither an API key nor the admin token."
        )
        return Response(html, content_type="text/html")

    @app.get("/missing")
    async def missing() -> Response:
        html = templates.get_template("error.html").render(
            status=404, title="Not Found", message="There is nothing here."
        )
        return Response(html, content_type="text/html")

    return app, live


async def serve(mode: str, port: int, **options: Any) -> None:
    """Serve until interrupted; the made-up engine lives in real time."""
    engine = FakeEngine(mode, **options)
    telemetry = watched(engine)

    async def live() -> None:
        while True:
            await trio.sleep(1)
            engine.advance()
            telemetry.tick(engine.now)

    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(live)
        app, config_changes = make_pages_app(engine, telemetry)
        nursery.start_soon(config_changes.run)
        await hypercorn.trio.serve(app, config)  # type: ignore[arg-type]


if __name__ == "__main__":
    trio.run(serve, sys.argv[1], int(sys.argv[2]))
