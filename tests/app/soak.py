"""Loads a server over the fake model with everything at once, and holds every answer to what it must be.

    python -m tests.app.soak --port 8000 --requests 2000 [--first 0]

The requests come in waves of twice what seats and queue take. They are of several keys, streams and whole answers, over
HTTP/1.1 and HTTP/2; some are given up at a random moment, some are wrong; and all the while every live setting is
changed at random. What a request is follows from its number. Prints as JSON what came of them.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import h2.exceptions
import httpx
import trio

from app.live_change import CHOICES
from tests.app.raw_fuzz import http1_statuses
from tests.app.serving import CHAT, COMPLETIONS, chat_body, events
from tests.app.wire import Http1Client, Http2Client, connect
from tests.fakes import expected_output

KEYS: Final = ("alice", "bob", "carol", "dave")
SETTINGS: Final[dict[str, Any]] = {
    "security": {"api_keys": [f"{name}=secret-{name}" for name in KEYS], "admin_token": "operator"},
    "security_limits": {"dave": {"max_concurrent": 6}},
}
SEATS, MAX_WAITING = 8, 32
LIMITS: Final[dict[str, Any]] = {"max_num_seqs": SEATS, "max_waiting": MAX_WAITING}
WAVE: Final = 2 * (SEATS + MAX_WAITING)
HTTP_SECONDS: Final = 60.0
SHARED: Final = "a beginning that many have in common, long enough for some blocks of it to be cached; "
ABORTED, WRONG = 0.15, 0.05
VALUES: Final[dict[str, tuple[Any, ...]]] = {
    **{name: tuple(values) for name, values in CHOICES.items() if name != "draining"},
    "max_num_seqs": (1, 2, SEATS, SEATS, 16),
    "max_num_batched_tokens": (16, 64, 64, 256),
    "long_prefill_token_threshold": (0, 8, 100),
    "dynamic_preferred_size": (0, 1),
    "dynamic_max_queue_delay_seconds": (0, 0.02),
    "num_speculative_tokens": (0, 0, 4),
    "max_waiting": (1, 10, MAX_WAITING, MAX_WAITING, MAX_WAITING),
    "max_waiting_tokens": (500, 100_000, 100_000, 100_000),
}


@dataclass(frozen=True)
class Ask:
    """One request."""

    number: int
    kind: str
    path: str
    body: dict[str, Any]
    key: str
    over_http2: bool
    leaves_after: float


def make_ask(number: int) -> Ask:
    """The request of that number."""
    rng = random.Random(number)
    kind = rng.choices(["served", "left", "wrong"], [1 - ABORTED - WRONG, ABORTED, WRONG])[0]
    text = (SHARED if rng.random() < 0.5 else "") + f"{number} " + "x" * rng.randrange(100)
    fields: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 5, 20, 40]), "stream": rng.random() < 0.5}
    path = rng.choice([CHAT, COMPLETIONS])
    body = chat_body(text, **fields) if path == CHAT else {"model": "fake", "prompt": text, **fields}
    if kind == "left":
        body["max_tokens"] = 300
    if kind == "wrong":
        body |= rng.choice([{"temperature": "hot"}, {"n": 10**9}, {"model": "none"}, {"stop": [1]}, {"max_tokens": -1}])
    return Ask(number, kind, path, body, rng.choice(KEYS), rng.random() < 0.3, rng.random() ** 3 * 0.5)


def text_of(ask: Ask, content: str) -> str | None:
    """The answer's text, where it has come to its end."""
    if not ask.body["stream"]:
        choice = json.loads(content)["choices"][0]
        return str(choice["message"]["content"] if ask.path == CHAT else choice["text"])
    *chunks, done = events(content)
    if done != "[DONE]":
        return None
    choices = [chunk["choices"][0] for chunk in chunks]
    return "".join(c["delta"].get("content", "") if ask.path == CHAT else c["text"] for c in choices)


def expected(ask: Ask) -> str:
    body = ask.body
    prompt = [257, *body["messages"][0]["content"].encode(), 258] if ask.path == CHAT else body["prompt"].encode()
    return bytes(expected_output(prompt, body["max_tokens"])).decode()


class Soak:
    """A run.

    Attributes:
        told: how many requests were served, left, or refused and why.
        changes: of the live settings, by name and status.
        faults: answers that are wrong, with the number of their request.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.told: Counter[str] = Counter()
        self.faults: list[tuple[int, str]] = []
        self.changes: Counter[str] = Counter()

    async def run(self, numbers: range) -> None:
        """Wave after wave, until each has ended."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._change, random.Random(numbers.start))
            for start in range(numbers.start, numbers.stop, WAVE):
                async with trio.open_nursery() as wave:
                    for number in range(start, min(start + WAVE, numbers.stop)):
                        wave.start_soon(self._ask, make_ask(number))
            nursery.cancel_scope.cancel()
        await self._calm()

    async def _change(self, rng: random.Random) -> None:
        """Whatever can be changed, for ever."""
        async with self._operator() as operator:
            while True:
                name = rng.choice([*VALUES, "draining", "flush_prefix_cache", "restore"])
                change: dict[str, Any] = {name: rng.choice(VALUES.get(name, (True,)))}
                if name == "restore":
                    change = {"restore": rng.choice(["previous", "start"])}
                if name == "draining":
                    change["ttl_seconds"] = 1
                elif name in VALUES and rng.random() < 0.2:
                    change["ttl_seconds"] = 2
                answer = await operator.patch("/admin/config", json=change)
                if answer.status_code not in (200, 409, 422):
                    self.faults.append((-1, f"{change}: {answer.status_code} {answer.text[:200]}"))
                self.changes[f"{name} {answer.status_code}"] += 1
                await trio.sleep(rng.random() * 0.1)

    async def _calm(self) -> None:
        """As it was at the start."""
        async with self._operator() as operator:
            for change in ({"draining": False}, {"restore": "start"}):
                (await operator.patch("/admin/config", json=change)).raise_for_status()

    def _operator(self) -> httpx.AsyncClient:
        headers = {"Authorization": "Bearer operator"}
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", headers=headers, timeout=HTTP_SECONDS)

    async def _ask(self, ask: Ask) -> None:
        with trio.move_on_after(HTTP_SECONDS) as scope:
            stream = await connect(self.port)
            client = Http2Client(stream) if ask.over_http2 else Http1Client(stream)
            headers = {"Authorization": f"Bearer secret-{ask.key}"}
            if not ask.over_http2:
                headers["Connection"] = "close"
            with suppress(trio.BrokenResourceError):
                await client.ask(ask.body, headers, path=ask.path)
            if ask.kind == "left":
                await self._leave(ask, client)
            else:
                self._judge(ask, *await self._read(client))
            await trio.aclose_forcefully(stream)
        if scope.cancelled_caught:
            self.faults.append((ask.number, "no answer"))

    async def _leave(self, ask: Ask, client: Http1Client) -> None:
        rng = random.Random(ask.number)
        with trio.move_on_after(ask.leaves_after):
            await self._read(client)
        ways = [client.reset, client.half_close]
        if isinstance(client, Http2Client):
            ways += [client.reset_stream, client.go_away]
        # Perhaps it is over already.
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError, h2.exceptions.ProtocolError):
            await rng.choice(ways)()
        self.told["left"] += 1

    async def _read(self, client: Http1Client) -> tuple[int, str]:
        """Status and content, at the end of the connection or, on HTTP/2, of the stream."""
        while not (isinstance(client, Http2Client) and client.has_ended):
            data = await client.stream.receive_some(65536)
            if not data:
                break
            client.take(data)
        if isinstance(client, Http2Client):
            return client.status, client.received.decode()
        [status] = http1_statuses(client.received)
        head, _, content = client.received.partition(b"\r\n\r\n")
        return status, (dechunk(content) if b"chunked" in head.lower() else content).decode()

    def _judge(self, ask: Ask, status: int, content: str) -> None:
        if ask.kind == "wrong":
            fits, word = status in (400, 404, 429, 503), f"wrong {status}"
        elif status == 200:
            text = text_of(ask, content)
            fits, word = text == expected(ask), "served"
        else:
            error = json.loads(content)["error"]
            word = f"{status} {error['code']}"
            fits = word in ("503 queue_full", "503 draining", "503 late", "429 rate_limit_exceeded", "429 concurrent")
        self.told[word] += 1
        if not fits:
            self.faults.append((ask.number, f"{word}: {content[:300]}"))


def dechunk(data: bytes) -> bytes:
    """The content of a chunked body."""
    content = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        content, data = content + data[: int(size, 16)], data[int(size, 16) + 2 :]
    return content


async def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    soak, began = Soak(options.port), time.perf_counter()
    await soak.run(range(options.first, options.first + options.requests))
    seconds = round(time.perf_counter() - began, 1)
    print(json.dumps({"told": soak.told, "changes": soak.changes, "faults": soak.faults, "seconds": seconds}))


if __name__ == "__main__":
    trio.run(main)
