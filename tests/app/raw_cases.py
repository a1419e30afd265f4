"""Bytes that no honest client sends, over HTTP/1.1 and HTTP/2: what a case is follows from its number alone."""

from __future__ import annotations

import json
import random
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import hpack
import hyperframe.frame as frames

from tests.app.serving import CHAT, COMPLETIONS, chat_body

if TYPE_CHECKING:
    from collections.abc import Callable

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
REQUESTS: Final[tuple[tuple[str, str, dict[str, Any] | None], ...]] = (
    ("GET", "/healthz", None),
    ("HEAD", "/v1/models", None),
    ("GET", "/ops/state", None),
    ("OPTIONS", CHAT, None),
    ("POST", CHAT, chat_body("hi", max_tokens=2)),
    ("POST", CHAT, chat_body("hi", max_tokens=3, stream=True)),
    ("POST", COMPLETIONS, {"prompt": "hi", "max_tokens": 1, "stream": True}),
    ("POST", "/tokenize", {"prompt": "hi"}),
    ("PATCH", "/admin/config", {"max_num_seqs": 3, "dry_run": True}),
    ("DELETE", "/nowhere", None),
)
# What means something to somebody who reads HTTP.
TOKENS: Final = (
    b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b"0\r\n\r\n", b"\r\n\r\n", b"\xff", b"Content-Length: 5\r\n",
    b"Transfer-Encoding: chunked\r\n", b"HTTP/1.1", b"HTTP/2.0", PREFACE, b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n",
    b"Connection: close\r\n", b"Expect: 100-continue\r\n", b"Upgrade: websocket\r\nConnection: Upgrade\r\n",
    b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\nConnection: Upgrade, HTTP2-Settings\r\n",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What one connection sends.

    Attributes:
        family: the kind of trick.
        pieces: sent one after the other.
        most_answers: more final answers than that mean that the server saw requests in what was none.
        resets: whether the client then vanishes with a RST; otherwise it listens for a moment and closes.
    """

    number: int
    family: str
    pieces: tuple[bytes, ...]
    most_answers: int
    resets: bool


def make_case(number: int) -> Case:
    """The case of that number."""
    rng = random.Random(number)
    family = rng.choice([*HTTP1, *HTTP2])
    data, most_answers = FAMILIES[family](rng)
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice([0, 0, 1, 3])))
    pieces = tuple(data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True) if end > start)
    return Case(number, family, pieces, most_answers, resets=rng.random() < 0.3)


def http1_request(rng: random.Random, *fields: bytes) -> bytes:
    """An honest request."""
    method, path, body = rng.choice(REQUESTS)
    content = b"" if body is None else json.dumps(body).encode()
    head = [f"{method} {path} HTTP/1.1".encode(), b"Host: localhost", *fields]
    if body is not None:
        head += [b"Content-Type: application/json", b"Content-Length: %d" % len(content)]
    return b"\r\n".join([*head, b"", content])


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Change a few places."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5])):
        place = rng.randrange(len(changed) + 1)
        length = min(rng.choice([1, 2, 9, 40]), len(changed) - place)
        match rng.randrange(5):
            case 0 if length:
                changed[place] ^= 1 << rng.randrange(8)
            case 1:
                del changed[place : place + length]
            case 2:
                changed[place:place] = rng.choice(TOKENS)
            case 3:
                changed[place:place] = changed[place : place + length] * rng.choice([1, 2, 50])
            case _:
                changed[place : place + length] = rng.randbytes(length)
    return bytes(changed)


def _mutated(rng: random.Random) -> tuple[bytes, int]:
    return mutate(rng, http1_request(rng)), 100


def _truncated(rng: random.Random) -> tuple[bytes, int]:
    data = http1_request(rng)
    return data[: rng.randrange(len(data))], 1


def _pipelined(rng: random.Random) -> tuple[bytes, int]:
    number = rng.randrange(2, 7)
    data = b"".join([http1_request(rng) for _ in range(number)])
    return (mutate(rng, data), 1000) if rng.random() < 0.5 else (data, number)


def _heads(rng: random.Random) -> tuple[bytes, int]:
    big = rng.choice([100, 5000, 31_000, 34_000, 200_000])
    name = "".join(rng.choices(string.ascii_letters, k=8)).encode()
    field = rng.choice([
        name + b": " + b"x" * big, b"x" * big + b": 1", b"\r\n".join([name + b"%d: y" % i for i in range(big // 20)]),
        b"X: a\r\n b", b"X : a", b" X: a", b"X: \0", b"X", b": a", b"Host: b", b"X: a\nY: b", b"X: \x80\xff",
        b"Expect: 100-continue", b"Cookie: " + b"a=b; " * (big // 5), b"Accept: text/html", b"Host: [::1", b"\r",
    ])  # fmt: skip
    data = http1_request(rng, field)
    if rng.random() < 0.3:
        line, _, rest = data.partition(b"\r\n")
        line = rng.choice([
            b"GET http://localhost/healthz HTTP/1.1", b"GET http://[/ HTTP/1.1", b"GET /" + b"a" * big + b" HTTP/1.1",
            b"GET /%00%ff%2e%2e/ HTTP/1.1", b"CONNECT a:1 HTTP/1.1", b"GET * HTTP/1.1", b"GET /healthz HTTP/9.9",
            b"GET /healthz", b"A" * 300 + b" / HTTP/1.1", line + b" ", b"\r\n" + line, line.lower(),
        ])  # fmt: skip
        data = line + b"\r\n" + rest
    return data, 2


def _lengths(rng: random.Random) -> tuple[bytes, int]:
    """Ways to tell how long a body is, several at a time; within it stands another request."""
    inner = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    body = rng.choice([inner, b"0\r\n\r\n" + inner, b"%x\r\n" % len(inner) + inner + b"\r\n0\r\n\r\n"])
    right = len(body)
    ways = (
        b"Content-Length: %d" % right, b"Content-Length: 0", b"Content-Length: -1", b"Content-Length: +%d" % right,
        b"Content-Length: 0x10", b"Content-Length: %d, %d" % (right, right), b"Content-Length: 5, 6",
        b"Content-Length: " + b"9" * 40, b"Content-Length: ", b"Content-Length : %d" % right,
        b"Content-Length: %d " % right, b"Transfer-Encoding: chunked", b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding: chunked, identity", b"Transfer-Encoding:\x0bchunked", b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding : chunked", b"Transfer-Encoding\r\n : chunked", b"X: y\r\n Transfer-Encoding: chunked",
        b"X: y\nTransfer-Encoding: chunked", b"transfer-encoding: CHUNKED", b"Transfer-Encoding: \"chunked\"",
    )  # fmt: skip
    told = rng.choices(ways, k=rng.choice([1, 2, 2, 3]))
    head = [b"POST /tokenize HTTP/1.%d" % rng.choice([1, 1, 0]), b"Host: localhost", *told]
    end = rng.choice([b"\r\n", b"\r\n", b"\n"])
    both = b"Transfer-Encoding: chunked", b"Content-Length: "
    is_both = all(any(way.startswith(name) for way in told) for name in both)
    return end.join([*head, b"", b""]) + body, 1 if is_both else 2


def _chunks(rng: random.Random) -> tuple[bytes, int]:
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    size = rng.choice(
        [b"5", b"05", b"0" * 30 + b"5", b"5;" + b"a" * 9000, b"5;a=b", b"-5", b"0x5", b"f" * 16, b"f" * 30, b"", b" 5"]
    )
    chunk = size + rng.choice([b"\r\n", b"\n", b" \r\n"]) + b"hello" + rng.choice([b"\r\n", b"\n", b"", b"XX"])
    trailer = rng.choice([b"", b"X: y\r\n", b"Content-Length: 3\r\n", b"X: " + b"y" * 40_000 + b"\r\n", b"\0\r\n"])
    return head + chunk * rng.choice([1, 3, 400]) + b"0\r\n" + trailer + b"\r\n", 2


HTTP1: Final[dict[str, Callable[[random.Random], tuple[bytes, int]]]] = {
    "http1 mutated": _mutated,
    "http1 truncated": _truncated,
    "http1 pipelined": _pipelined,
    "http1 heads": _heads,
    "http1 lengths": _lengths,
    "http1 chunks": _chunks,
}


class Talk:
    """What a client of HTTP/2 sends, frame by frame, with no rule in the way."""

    def __init__(self, settings: dict[int, int] | None = None) -> None:
        self.encoder = hpack.Encoder()
        self.data = bytearray(PREFACE)
        self.add(frames.SettingsFrame(0, settings=settings or {}))
        self.num_requests = 0

    def add(self, frame: frames.Frame) -> None:
        self.data += frame.serialize()

    def raw(self, kind: int, flags: int, stream_id: int, body: bytes, length: int | None = None) -> None:
        """A frame of any kind, perhaps with a wrong length."""
        length = len(body) if length is None else length
        self.data += length.to_bytes(3) + bytes([kind, flags]) + stream_id.to_bytes(4) + body

    def request(self, rng: random.Random, stream_id: int, *extra: tuple[str, str]) -> None:
        method, path, body = rng.choice(REQUESTS)
        names = [(":method", method), (":path", path), (":scheme", "http"), (":authority", "localhost")]
        fields = [*names, ("content-type", "application/json"), *extra]
        content = b"" if body is None else json.dumps(body).encode()
        self.headers(stream_id, fields, ends=body is None)
        if body is not None:
            self.add(frames.DataFrame(stream_id, content, flags=["END_STREAM"]))

    def headers(self, stream_id: int, fields: list[tuple[str, str]], *, ends: bool = True) -> None:
        self.num_requests += 1
        flags = ["END_HEADERS", "END_STREAM"] if ends else ["END_HEADERS"]
        self.add(frames.HeadersFrame(stream_id, self.encoder.encode(fields), flags=flags))

    def done(self) -> tuple[bytes, int]:
        return bytes(self.data), self.num_requests


def _http2_mutated(rng: random.Random) -> tuple[bytes, int]:
    talk = Talk()
    for index in range(rng.randrange(1, 4)):
        talk.request(rng, 2 * index + 1)
    data, _ = talk.done()
    start = rng.choice([0, len(PREFACE), len(PREFACE), len(PREFACE) + 9])
    return data[:start] + mutate(rng, data[start:]), 1000


def _frames(rng: random.Random) -> tuple[bytes, int]:
    talk = Talk()
    for _ in range(rng.randrange(1, 30)):
        if rng.random() < 0.2:
            talk.request(rng, rng.randrange(1, 20))
        else:
            body = rng.randbytes(rng.choice([0, 4, 5, 6, 8, 64]))
            length = rng.choice([None, None, None, 0, 5, 20_000, (1 << 24) - 1])
            talk.raw(rng.randrange(12), rng.randrange(256), rng.randrange(12), body, length)
    return talk.done()


def _fields(rng: random.Random) -> tuple[bytes, int]:
    """Heads that break a rule."""
    talk, names = Talk(), [(":method", "GET"), (":path", "/healthz"), (":scheme", "http"), (":authority", "localhost")]
    extra = rng.choice([
        ("Upper", "a"), (":status", "200"), (":path", "/"), ("connection", "close"), ("te", "gzip"), ("x", "a\r\nb: c"),
        ("x", "\0"), ("content-length", "7"), ("content-length", "-1"), ("transfer-encoding", "chunked"), ("", "a"),
        ("host", "other"), ("x", " a "), (":protocol", "websocket"), ("upgrade", "websocket"), ("x y", "a"),
    ])  # fmt: skip
    for index in range(rng.randrange(1, 5)):
        kept = [name for name in names if rng.random() < 0.8]
        fields = rng.choice(
            [
                [*names, extra],
                [extra, *names],
                [*kept, extra],
                [(":path", rng.choice(["", "*", "a", "//", "/\x80"])), *kept],
            ]
        )
        talk.headers(2 * index + 1, fields, ends=rng.random() < 0.7)
    return talk.done()


def _bombs(rng: random.Random) -> tuple[bytes, int]:
    """Little to send that is much to unpack: one long field, referred to again and again; sizes of the table."""
    talk = Talk()
    names = [(":method", "GET"), (":path", "/healthz"), (":scheme", "http"), (":authority", "localhost")]
    block = talk.encoder.encode([*names, ("x", "y" * rng.choice([10, 3000, 4000]))])
    tail = rng.choice(
        [
            b"\xbe" * rng.choice([10, 10_000]),
            b"\x3f\xe1\xff\xff\xff\xff",
            b"\x3f\xe1\x1f" * 500,
            b"\xff" * 20,
            b"\x20" * 5000,
        ]
    )
    talk.add(frames.HeadersFrame(1, block + tail, flags=["END_HEADERS", "END_STREAM"]))
    talk.num_requests += 1
    return talk.done()


def _floods(rng: random.Random) -> tuple[bytes, int]:
    """Much of what costs its sender little."""
    talk, number = Talk(), rng.choice([10, 10, 10, 10, 200])
    kind = rng.choice(
        ["reset", "settings", "ping", "continuation", "empty data", "priority", "open", "window", "unknown"]
    )
    if kind == "continuation":
        talk.add(frames.HeadersFrame(1, b"\x82\x84\x86", flags=["END_STREAM"]))
    elif kind == "empty data":
        talk.headers(1, [(":method", "POST"), (":path", CHAT), (":scheme", "http"), (":authority", "a")], ends=False)
    for index in range(number):
        match kind:
            case "reset":
                talk.request(rng, 2 * index + 1)
                talk.add(frames.RstStreamFrame(2 * index + 1, error_code=8))
            case "open":
                talk.request(rng, 2 * index + 1)
            case "settings":
                talk.add(frames.SettingsFrame(0, settings={rng.randrange(1, 7): rng.choice([0, 1, 1 << 14])}))
            case "ping":
                talk.add(frames.PingFrame(0, rng.randbytes(8)))
            case "continuation":
                talk.add(frames.ContinuationFrame(1, rng.choice([b"", b"\x84" * 100])))
            case "empty data":
                talk.add(frames.DataFrame(1, b""))
            case "priority":
                talk.add(frames.PriorityFrame(2 * index + 1, depends_on=rng.randrange(1, 2 * number), stream_weight=3))
            case "window":
                talk.add(frames.WindowUpdateFrame(0, window_increment=1))
            case _:
                talk.raw(0xEE, 0, index, b"x" * 20)
    return talk.done()


def _windows(rng: random.Random) -> tuple[bytes, int]:
    """Answers that are asked for and not let through, or in drops."""
    talk = Talk({frames.SettingsFrame.INITIAL_WINDOW_SIZE: rng.choice([0, 1, 10, (1 << 31) - 1, 1 << 31])})
    for index in range(rng.randrange(1, 5)):
        stream_id = 2 * index + 1
        talk.request(rng, stream_id)
        if rng.random() < 0.7:
            increment = rng.choice([1, 1, 7, (1 << 31) - 1])
            talk.add(frames.WindowUpdateFrame(rng.choice([0, stream_id]), window_increment=increment))
        if rng.random() < 0.1:
            window = rng.choice([0, 5, (1 << 31) - 1])
            talk.add(frames.SettingsFrame(0, settings={frames.SettingsFrame.INITIAL_WINDOW_SIZE: window}))
        if rng.random() < 0.05:
            talk.add(frames.GoAwayFrame(0, last_stream_id=stream_id))
    return talk.done()


HTTP2: Final[dict[str, Callable[[random.Random], tuple[bytes, int]]]] = {
    "http2 mutated": _http2_mutated,
    "http2 frames": _frames,
    "http2 fields": _fields,
    "http2 bombs": _bombs,
    "http2 floods": _floods,
    "http2 windows": _windows,
}
FAMILIES: Final = {**HTTP1, **HTTP2}
