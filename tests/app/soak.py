"""Loads a server over the fake model with everything at once, and holds every answer to what it must be.

    python -m tests.app.soak --port 8000 --requests 2000 [--first 0]

The requests come in waves of twice what seats and queue take. They are of several keys, streams and whole answers, on
four routes over HTTP/1.1 and HTTP/2, of one choice or several, with stop strings, interactive or not; some are given up
at a random moment, some have too little time, some are wrong; and all the while every live setting is changed at
random. What a request is follows from its number. Prints as JSON what came of them.
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
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
ABORTED, WRONG, TIMED = 0.15, 0.05, 0.05
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
    **{f"{work}ttft_p95_seconds": (0, 0.5, 2.0) for work in ("", "background_")},
    **{f"{work}itl_p95_seconds": (0, 0.05, 0.25) for work in ("", "background_")},
    **{f"{work}e2e_p95_seconds": ("none", 5.0) for work in ("", "background_")},
}


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        expected: what each of its choices says, if it comes to its end.
    """

    number: int
    kind: str
    path: str
    body: dict[str, Any]
    key: str
    over_http2: bool
    leaves_after: float
    expected: str


def make_ask(number: int) -> Ask:
    """The request of that number."""
    rng = random.Random(number)
    kinds, shares = ["served", "left", "wrong", "timed"], [1 - ABORTED - WRONG - TIMED, ABORTED, WRONG, TIMED]
    kind = rng.choices(kinds, shares)[0]
    text = (SHARED if rng.random() < 0.5 else "") + f"{number} " + "x" * rng.randrange(100)
    max_tokens = 300 if kind in ("left", "timed") else rng.choice([1, 2, 5, 20, 40])
    path = rng.choices([CHAT, COMPLETIONS, MESSAGES, RESPONSES], [4, 4, 1, 1])[0]
    fields: dict[str, Any] = {"max_tokens": max_tokens, "stream": rng.random() < 0.5}
    prompt = text.encode() if path == COMPLETIONS else [257, *text.encode(), 258]
    expected = bytes(expected_output(prompt, max_tokens)).decode()
    if path in (CHAT, COMPLETIONS):
        fields |= rng.choice([{}, {}, {"n": 2}, {"service_tier": "flex"}])
        if kind == "timed":
            fields["timeout"] = 0.3 * rng.random() + 0.01
    if path != RESPONSES and kind == "served" and rng.random() < 0.2:
        begin = rng.randrange(max_tokens)
        stop = expected[begin : begin + 3]
        fields["stop_sequences" if path == MESSAGES else "stop"] = [stop]
        expected = expected[: expected.index(stop)]
    body = {CHAT: chat_body, COMPLETIONS: _completion_body, MESSAGES: chat_body, RESPONSES: _response_body}[path](
        text, **fields
    )
    if kind == "wrong":
        body |= rng.choice([{"temperature": "hot"}, {"model": "none"}, {next(n for n in body if "max_" in n): -1}])
    leaves_after = rng.random() ** 3 * 0.5
    return Ask(number, kind, path, body, rng.choice(KEYS), rng.random() < 0.3, leaves_after, expected)


def _completion_body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "prompt": text, **fields}


def _response_body(text: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "input": text, "max_output_tokens": max_tokens, **fields}


def texts_of(ask: Ask, content: str) -> tuple[list[str], bool]:
    """What each choice says, and whether the answer has come to its end."""
    texts = [""] * ask.body.get("n", 1)
    if not ask.body["stream"]:
        answer = json.loads(content)
        for block in answer.get("content", []):  # a message's
            texts[0] += block["text"]
        for item in answer.get("output", []):  # a response's
            texts[0] += "".join([part["text"] for part in item["content"]])
        for choice in answer.get("choices", []):
            texts[choice["index"]] = choice["message"]["content"] if ask.path == CHAT else choice["text"]
        return texts, True
    *told, last = events(content)
    for event in told:
        match event:
            case {"type": "content_block_delta", "delta": {"text": text}}:
                texts[0] += text
            case {"type": "response.output_text.delta", "delta": text}:
                texts[0] += text
            case {"choices": choices}:
                for choice in choices:
                    text = choice["delta"].get("content", "") if ask.path == CHAT else choice["text"]
                    texts[choice["index"]] += text
    if ask.path in (MESSAGES, RESPONSES):
        return texts, last["type"] in ("message_stop", "response.completed", "response.incomplete")
    return texts, last == "[DONE]"


class Soak:
    """A run.

    Attributes:
        told: how many requests were served, left, or refused and why.
        changes: of the live settings, by name and status.
        choices: of the requests that were served, and of those that may have been (`open`).
        faults: answers that are wrong, with the number of their request.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.told: Counter[str] = Counter()
        self.choices: Counter[str] = Counter()
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
        self._note(ask, "left")

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
            fits, word = status in (400, 404, 429, 503, 529), f"wrong {status}"
        elif status == 200:
            texts, has_ended = texts_of(ask, content)
            in_time = has_ended or "timeout" not in ask.body
            fits = all([text == ask.expected if in_time else ask.expected.startswith(text) for text in texts])
            fits, word = fits and has_ended == in_time, "served" if in_time else "timed out"
        elif ask.path == MESSAGES:  # there errors have no codes
            fits, word = status in (429, 529), f"{status}"
        else:
            code = json.loads(content)["error"]["code"]
            word = f"{status} {code}"
            fits = word in ("503 queue_full", "503 draining", "503 late", "429 rate_limit_exceeded", "429 concurrent")
            if word == "408 timeout":
                fits, word = "timeout" in ask.body, "timed out"
            if word == "400 None" and "may wait here" in content:  # so few for a moment
                fits, word = ask.body.get("n", 1) > 1, "more choices than may wait"
        self._note(ask, word)
        if not fits:
            self.faults.append((ask.number, f"{word}: {content[:300]}"))

    def _note(self, ask: Ask, word: str) -> None:
        self.told[word] += 1
        self.choices["served" if word == "served" else "open"] += ask.body.get("n", 1)


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
    told = {"told": soak.told, "choices": soak.choices, "changes": soak.changes, "faults": soak.faults}
    print(json.dumps({**told, "seconds": seconds}))


if __name__ == "__main__":
    trio.run(main)
