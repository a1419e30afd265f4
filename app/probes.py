"""Probes: what load balancers and routers ask, answered from memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quart import Blueprint, Response

from app.version import package_version

if TYPE_CHECKING:
    from app.http import Context


def probes_blueprint(context: Context) -> Blueprint:
    """The routes, bound to `context`."""
    probes = Blueprint("probes", __name__)
    release = package_version()

    @probes.get("/healthz")
    async def healthz() -> dict[str, Any]:
        return {"status": "alive"}

    @probes.get("/readyz")
    async def readyz() -> tuple[dict[str, Any], int]:
        reason = not_ready(context)
        return ({"ready": True}, 200) if reason is None else ({"ready": False, "reason": reason}, 503)

    @probes.get("/health")
    async def health() -> Response:
        return Response("", 200 if not_ready(context) is None else 503)

    @probes.get("/version")
    async def show_version() -> dict[str, Any]:
        return {"version": release}

    @probes.get("/load")
    async def load() -> dict[str, Any]:
        # Requests inside: being tokenized, waiting or running.
        return {"server_load": context.engine.num_open}

    @probes.get("/get_load")
    async def get_load() -> dict[str, Any]:
        return {"load": context.engine.num_open}

    return probes


def not_ready(context: Context) -> str | None:
    """Why no new request should come here, or `None`."""
    if context.lifecycle.draining:
        return "draining: the server is shutting down"
    health = context.engine.health()
    return None if health.ready else health.reason or "the engine is not ready"
