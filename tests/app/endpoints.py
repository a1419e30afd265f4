"""Servers that answer as OpenAI's API does, in threads: what `relevo limit` is tried on, with faults of all kinds."""

from __future__ import annotations

import json
import ssl
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass
class Behaviour:
    """How a server answers.

    Attributes:
        first_seconds, gap_seconds: to the first token, and between one and the next.
        stall: (from, to) in seconds since the first request: nothing is written then.
        gather: nothing is answered before so many requests have come.
        pieces_of: tokens of each piece of text.
        word: the text of a token.
        most_tokens: an answer has, whatever was asked for.
        refused: words in a body that make it a 400.
        key, metrics_key: that must be given; `None` takes everybody.
        next_metrics: what they are when they have been asked for once more.
        routes: answers to a GET of other routes, status and body.
        entry: what the list of models says beside the name.
        props: what llama-server tells of itself.
        redirect: where whoever asks is sent.
        page: answers everything with this page.
        lives_for: after so many questions it answers nobody any more, and hangs up in the middle of answers.
        is_dead: it came to that.
        bodies: all bodies that came.
    """

    first_seconds: float = 0.0
    gap_seconds: float = 0.0
    stall: tuple[float, float] = (0.0, 0.0)
    gather: int = 0
    pieces_of: int = 1
    word: str = "word "
    most_tokens: int = 1 << 20
    streams: bool = True
    has_usage: bool = True
    refused: tuple[str, ...] = ()
    key: str | None = None
    context: int | None = None
    metrics: str = ""
    next_metrics: str = ""
    metrics_key: str | None = None
    routes: dict[str, tuple[int, str]] = field(default_factory=dict)
    entry: dict[str, Any] = field(default_factory=dict)
    props: str = ""
    redirect: str = ""
    page: str = ""
    lives_for: float = float("inf")
    is_dead: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    began: float = 0.0

    def wait(self, seconds: float) -> None:
        while len(self.bodies) < self.gather:
            time.sleep(0.01)
        time.sleep(seconds)
        now = time.monotonic() - self.began
        if self.stall[0] <= now < self.stall[1]:
            time.sleep(self.stall[1] - now)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512
    behaviour: Behaviour

    def verify_request(self, _request: Any, _address: Any) -> bool:
        """Whether to answer at all."""
        return not self.behaviour.is_dead


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: Any) -> None:
        """Nobody reads it."""

    def do_GET(self) -> None:
        behaviour = self.server.behaviour
        if self.is_elsewhere():
            return
        if self.path == "/metrics" and behaviour.metrics:
            if not self.is_refused(behaviour.metrics_key):
                self.answer(200, behaviour.metrics)
                behaviour.metrics = behaviour.next_metrics or behaviour.metrics
        elif self.path == "/v1/models":
            if self.is_refused(behaviour.key):
                return
            model = {"id": "made-up", **behaviour.entry}
            model |= {"max_model_len": behaviour.context} if behaviour.context else {}
            self.answer(200, json.dumps({"data": [model]}))
        elif self.path == "/props" and behaviour.props:
            self.answer(200, behaviour.props)
        else:
            self.answer(*behaviour.routes.get(self.path, (404, "{}")))

    def is_elsewhere(self) -> bool:
        """Whether the answer was a page, or the way to another server."""
        behaviour = self.server.behaviour
        if behaviour.redirect:
            self.answer(302, "", Location=behaviour.redirect + self.path)
        elif behaviour.page:
            self.answer(200, behaviour.page)
        return bool(behaviour.redirect or behaviour.page)

    def do_POST(self) -> None:
        behaviour = self.server.behaviour
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        body = json.loads(text)
        behaviour.began = behaviour.began or time.monotonic()
        behaviour.bodies.append(body)
        behaviour.is_dead = len(behaviour.bodies) > behaviour.lives_for
        if self.is_elsewhere():
            return
        if self.is_refused(behaviour.key):
            return
        if any(word in text for word in behaviour.refused):
            self.answer(400, '{"error": {"message": "no such field"}}')
        elif not behaviour.streams:
            self.answer(200, '{"choices": [{"message": {"content": "hello"}}]}')
        else:
            self.stream(body)

    def is_refused(self, key: str | None) -> bool:
        refused = key is not None and self.headers.get("Authorization") != f"Bearer {key}"
        if refused:
            self.answer(401, '{"error": {"message": "who are you?"}}')
        return refused

    def answer(self, status: int, text: str, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(text.encode())

    def stream(self, body: dict[str, Any]) -> None:
        behaviour = self.server.behaviour
        prompt = body.get("prompt") or body["messages"][0]["content"]
        num_tokens = min(behaviour.most_tokens, body.get("max_tokens") or body["max_completion_tokens"])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for place in range(0, num_tokens, behaviour.pieces_of):
            behaviour.wait(behaviour.gap_seconds if place else behaviour.first_seconds)
            if behaviour.is_dead:
                return
            words = behaviour.word * min(behaviour.pieces_of, num_tokens - place)
            choice = {"text": words} if "prompt" in body else {"delta": {"content": words}}
            self.event({"choices": [{"index": 0, **choice}]})
        if behaviour.has_usage:
            usage = {"prompt_tokens": 7 + len(prompt.split()), "completion_tokens": num_tokens}
            self.event({"choices": [], "usage": usage})
        self.event("[DONE]")
        self.close_connection = True

    def event(self, data: Any) -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        with suppress(OSError):  # who asked has left
            self.wfile.write(b"data: " + text.encode() + b"\n\n")


@contextmanager
def open_endpoint(*, certificate: Path | None = None, **behaviour: Any) -> Iterator[tuple[str, Behaviour]]:
    """A server on a free port: its URL, and its behaviour, which can be changed.

    Args:
        certificate: a file with a certificate and its key; with it the server speaks TLS.
    """
    with Server(("127.0.0.1", 0), Handler) as server:
        server.behaviour = Behaviour(**behaviour)
        if certificate is not None:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(certificate)
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http{'s' if certificate else ''}://127.0.0.1:{server.server_port}", server.behaviour
        finally:
            server.shutdown()
            thread.join()
