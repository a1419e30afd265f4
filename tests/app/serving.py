"""The whole server over the fake engine: on a real socket, or driven without one under virtual time."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import httpx
import trio

from app.config import Settings
from app.http import Context, create_app
from app.lifecycle import Lifecycle
from app.limit_page.service import LimitSearches
from app.listening import open_listening_socket
from app.server import make_context, run_http
from tests.fakes import fake_config, open_fake_engine
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest

    from app.api.envelope import Envelope
    from app.journal.journal import Journal
    from app.key_service import KeyService
    from app.recording.recorder import TrafficRecorder
    from app.server import MakeSearches
    from app.tracing import Tracing
    from engine.engine import Engine

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
ROUTES = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
# What stands in a stream only where an answer has come to its end.
ENDS = ("[DONE]", '"finish_reason":"', "response.completed", "response.incomplete", "message_delta", "message_stop")


def make_settings(**sections: dict[str, Any]) -> Settings:
    return Settings.model_validate(sections)


def chat_body(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": text}], **fields}


def body_for(path: str, text: str = "hello", *, max_tokens: int, **fields: Any) -> dict[str, Any]:
    """The same request as each of `ROUTES` wants it."""
    if path == COMPLETIONS:
        return {"model": "fake", "prompt": text, "max_tokens": max_tokens, **fields}
    if path == RESPONSES:
        return {"model": "fake", "input": text, "max_output_tokens": max_tokens, **fields}
    return chat_body(text, max_tokens=max_tokens, **fields)


@dataclass
class Server:
    """A running server.

    Attributes:
        client: an HTTP client of it.
    """

    url: str
    context: Context
    client: httpx.AsyncClient

    @property
    def engine(self) -> Engine:
        return self.context.engine

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    async def stats(self) -> dict[str, Any]:
        answer: dict[str, Any] = (await self.client.get("/ops/stats.json")).json()
        return answer

    async def settle(self) -> None:
        """Wait until nothing is open, and hold the engine to its books."""
        with trio.fail_after(PATIENCE_SECONDS):
            await self.engine.wait_idle()
            while self.engine.snapshot()["requests"]["running"] or self.engine.snapshot()["requests"]["waiting"]:
                await trio.sleep(0.001)
        kv = self.engine.snapshot()["kv"]
        assert kv["used"] == 0
        assert kv["free"] + kv["cached"] == kv["total"]


@asynccontextmanager
async def open_server(
    settings: Settings | None = None,
    *,
    limits: dict[str, Any] | None = None,
    keys: KeyService | None = None,
    journal: Journal | None = None,
    tracing: Tracing | None = None,
    recorder: TrafficRecorder | None = None,
    make_searches: MakeSearches = LimitSearches,
    host: str = "127.0.0.1",
    **fake: Any,
) -> AsyncIterator[Server]:
    """Serve on a free port of this machine. `limits` go to the engine's configuration, `fake` to the fake engine."""
    fake = {"step_seconds": 0.001, **fake}
    async with open_fake_engine(fake_config(**(limits or {})), **fake) as engine, trio.open_nursery() as nursery:
        context = make_context(
            settings or make_settings(), engine, Lifecycle(), keys, journal, tracing, recorder, make_searches
        )
        nursery.start_soon(context.live.run)
        nursery.start_soon(context.effects.run)
        nursery.start_soon(context.deadlines.run)
        nursery.start_soon(context.keys.run)
        nursery.start_soon(context.searches.run)
        nursery.start_soon(context.recorder.run)
        with open_listening_socket(host, 0) as listener:
            await nursery.start(run_http, context, listener)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            # To read the authorities' certificates takes longer than all else here, and nobody asks for one.
            async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS, verify=False) as client:
                yield Server(url, context, client)
        context.lifecycle.stopped.set()
        nursery.cancel_scope.cancel()


def break_envelope(
    monkeypatch: pytest.MonkeyPatch, envelope: type[Envelope], method: str = "piece", number: int = 1
) -> None:
    """Let one call of what wraps answers fail; those before and behind it work."""
    plain, calls = getattr(envelope, method), count(1)

    def breaks(self: Envelope, *args: Any) -> Any:
        if next(calls) == number:
            raise ZeroDivisionError("a secret")
        return plain(self, *args)

    monkeypatch.setattr(envelope, method, breaks)


def events(text: str) -> list[Any]:
    """The data of a stream's events, JSON where it is JSON."""
    found = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [entry if entry == "[DONE]" else json.loads(entry) for entry in found]


def error_at_the_end(text: str) -> dict[str, Any]:
    """What a stream's last event says went wrong, in whatever shape its route has it."""
    value: dict[str, Any] = json.loads(text.rstrip().rpartition("\n\n")[2].partition("data: ")[2])
    error: dict[str, Any] = value.get("error", value)
    return error


class Driver:
    """An ASGI call without a server: two memory channels and a connection that can be cut at any moment."""

    def __init__(
        self, app: Any, path: str, body: dict[str, Any], *, method: str = "POST", more_body: bool = False
    ) -> None:
        self._app = app
        self._to_app, self._receive = trio.open_memory_channel[dict[str, Any]](10)
        self._send, self.sent = trio.open_memory_channel[dict[str, Any]](0)
        self._to_app.send_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": more_body})
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        self.scope = {
            "type": "http", "http_version": "1.1", "method": method, "scheme": "http", "path": path,
            "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "extensions": {}, "state": {},
            "asgi": {"spec_version": "2.1", "version": "3.0"},
        }  # fmt: skip

    async def run(self) -> None:
        """The call itself, to be started in a nursery."""
        with self._send:
            await self._app(self.scope, self._receive.receive, self._send.send)

    def send_rest(self, body: bytes = b"") -> None:
        """The end of a body of which more was announced."""
        self._to_app.send_nowait({"type": "http.request", "body": body, "more_body": False})

    def leave(self) -> None:
        """The client goes away."""
        self._to_app.send_nowait({"type": "http.disconnect"})

    async def status(self) -> int:
        """Wait for the head of the answer."""
        return int((await self.sent.receive())["status"])

    async def body(self) -> bytes:
        """The next piece of the answer; empty at its end."""
        try:
            return bytes((await self.sent.receive()).get("body", b""))
        except trio.EndOfChannel:
            return b""


@asynccontextmanager
async def open_app(
    settings: Settings | None = None,
    *,
    limits: dict[str, Any] | None = None,
    journal: Journal | None = None,
    **fake: Any,
) -> AsyncIterator[tuple[Any, Context]]:
    """The application without a socket, for virtual time."""
    async with open_fake_engine(fake_config(**(limits or {})), **fake) as engine, trio.open_nursery() as nursery:
        context = make_context(settings or make_settings(), engine, Lifecycle(), journal=journal)
        nursery.start_soon(context.live.run)
        nursery.start_soon(context.effects.run)
        nursery.start_soon(context.deadlines.run)
        yield create_app(context), context
        nursery.cancel_scope.cancel()
