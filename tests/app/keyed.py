"""A server whose keys are made while it runs, and what one asks of it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from app.key_service import open_keys
from tests.app.serving import CHAT, Server, chat_body, make_settings, open_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

HTML = {"Accept": "text/html"}


@asynccontextmanager
async def serve(folder: Path, **security: Any) -> AsyncIterator[Server]:
    """A server whose keys lie in `folder`."""
    settings = make_settings(security=security)
    async with open_keys(settings, folder) as keys, open_server(settings, keys=keys) as server:
        yield server


async def make(server: Server, name: str, **limits: int) -> str:
    answer = await server.client.post("/admin/keys", json={"name": name, **limits})
    assert answer.status_code == 201, answer.text
    secret: str = answer.json()["key"]
    return secret


async def asks(server: Server, secret: str | None = None) -> int:
    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    return (await server.client.post(CHAT, json=chat_body(max_tokens=1), headers=headers)).status_code


async def listed(server: Server) -> dict[str, Any]:
    answer = await server.client.get("/admin/keys")
    assert answer.headers["content-type"] == "application/json"
    found: dict[str, Any] = answer.json()
    return found


async def id_of(server: Server, name: str) -> int:
    return next(entry["id"] for entry in (await listed(server))["keys"] if entry["name"] == name)
