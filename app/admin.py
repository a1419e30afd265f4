"""`/admin/config` and `/admin/audit`: the live settings for programs. The page is in `pages.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quart import Blueprint, g

from app.api.requests import read_json

if TYPE_CHECKING:
    from app.http import Context


def admin_blueprint(context: Context) -> Blueprint:
    """The routes, bound to `context`."""
    admin = Blueprint("admin", __name__)

    @admin.get("/admin/config")
    async def show() -> dict[str, Any]:
        return context.live.view()

    @admin.patch("/admin/config")
    async def change() -> dict[str, Any]:
        return await context.live.apply(await read_json(), who=g.who)

    @admin.get("/admin/audit")
    async def audit() -> list[dict[str, Any]]:
        return [entry.as_json() for entry in context.journal.audit.entries]

    return admin
