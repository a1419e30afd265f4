"""The pages' login: a key or token once, then a cookie that scripts cannot read and other sites cannot send."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quart import Blueprint, Response, redirect, request

from app.api.requests import read_fields
from app.drawing import html_response
from app.security import ADMIN_COOKIE, KEY_COOKIE, local_path

if TYPE_CHECKING:
    from jinja2 import Environment
    from werkzeug.wrappers import Response as WerkzeugResponse

    from app.security import Gate

COOKIE_SECONDS = 30 * 86_400


def login_blueprint(gate: Gate, pages: Environment) -> Blueprint:
    """The routes `/login` and `/logout`."""
    login = Blueprint("login", __name__)

    def form(target: str, error: str | None, status: int) -> Response:
        return html_response(pages.get_template("login.html").render(next=target, error=error), status)

    @login.get("/login")
    async def show() -> Response:
        return form(local_path(request.args.get("next", "/")), None, 200)

    @login.post("/login")
    async def enter() -> Response | WerkzeugResponse:
        fields = await read_fields()
        target = local_path(fields.get("next", "/"))
        cookies = gate.login(fields.get("token", ""))
        if not cookies:
            return form(target, "This is neither an API key nor the admin token.", 401)
        answer = redirect(target, 303)
        for name, value in cookies.items():
            answer.set_cookie(name, value, max_age=COOKIE_SECONDS, httponly=True, samesite="Strict", secure=_is_https())
        return answer

    @login.post("/logout")
    async def leave() -> WerkzeugResponse:
        answer = redirect("/login", 303)
        for name in (KEY_COOKIE, ADMIN_COOKIE):
            answer.delete_cookie(name, httponly=True, samesite="Strict")
        return answer

    return login


def _is_https() -> bool:
    """Whether the browser's end of the connection is encrypted; a proxy may have taken the TLS off."""
    return request.scheme == "https" or request.headers.get("X-Forwarded-Proto", "").lower() == "https"
