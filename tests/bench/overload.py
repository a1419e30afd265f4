"""What a server does with three times as much as it can: `python -m tests.bench.overload [--model M] [--seconds N]`.

This process is the client, the server another. Open loop: a request is sent when it is due, whatever became of those
before it, and every time is counted from when it was due. First the capacity is measured, with more streams than seats
and each sending its next request when its last answer is complete. Then come runs at shares of it: the most goodput of
those is what the run at three times the capacity is compared with. Meanwhile two probes are asked ten times a second,
each on a connection of its own, and at the end of the load a client of the `openai` package asks with two retries.

A request is good when its first token came within `--ttft` and at most 5 % of the gaps between its tokens were longer
than `--itl`, both in seconds, as the server's own targets say: tokens that come together have no gap between them.
Prompts are words, so that answers are words, too: half a character that a token leaves is not sent before the rest.
What is not answered `--grace` seconds after the last request was due is given up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import openai

from engine.samples import nearest_rank
from tests.bench.versus.client import HOST, Answer, make_request, read_whole, run_request
from tests.bench.versus.servers import Program, open_server

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PATH: Final = "/v1/completions"
PROBES: Final = ("/healthz", "/readyz")
PROBE_SECONDS: Final = 0.1
SHARES: Final = (0.6, 0.8, 1.0)
OVERLOAD: Final = 3.0
REFUSED: Final = "HTTP 503"
REFUSED_SECONDS: Final = 0.5  # that a stream waits with its next request while the capacity is measured
SEED: Final = 1
# Each is a token, with the space before it.
WORDS: Final = (
    "the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "his",
    "they", "at", "be", "this", "from", "have", "or", "by", "one", "had", "not", "but", "what", "all", "were",
)  # fmt: skip


@dataclass(slots=True)
class Call:
    """A request: when it was due and was sent, on this process's clock, and what came of it."""

    due: float
    length: int  # tokens of the answer
    sent: float = 0.0
    answer: Answer = field(default_factory=lambda: Answer(0))
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def is_refused(self) -> bool:
        """Whether it was told to come back later."""
        return self.answer.error.startswith(REFUSED)

    def is_good(self, ttft: float, itl: float) -> bool:
        """Whether it kept both targets."""
        answer = self.answer
        slow = sum([gap > itl for gap in answer.gaps])
        return not answer.error and answer.first - self.due <= ttft and slow <= 0.05 * (self.length - 1)


class Client:
    """Asks one server.

    Args:
        options: of the command line.
    """

    def __init__(self, port: int, model: str, options: argparse.Namespace) -> None:
        self._port, self._model, self._options = port, model, options
        self._random = random.Random(SEED)
        self._numbers = count()

    async def capacity(self, seconds: float) -> float:
        """Requests a second that end, with twice as many streams as seats; the first third of the time is warm-up."""
        ended: list[float] = []
        begin = time.perf_counter()

        async def stream() -> None:
            while True:
                request, length = self._request()
                call = Call(time.perf_counter(), length)
                await self._send(call, request)
                if call.is_refused:
                    await asyncio.sleep(REFUSED_SECONDS)
                else:
                    ended.append(time.perf_counter())

        streams = [asyncio.create_task(stream()) for _ in range(2 * self._options.seats)]
        await asyncio.sleep(seconds)
        await _stop(streams)
        warm = begin + seconds / 3
        return len([moment for moment in ended if moment > warm]) / (begin + seconds - warm)

    async def load(self, rate: float, seconds: float) -> list[Call]:
        """As many requests a second, at random times, each read to its end or given up."""
        calls, tasks = [], []
        due = begin = time.perf_counter()
        while (due := due + self._random.expovariate(rate)) < begin + seconds:
            request, length = self._request()
            await asyncio.sleep(due - time.perf_counter())
            calls.append(Call(due, length))
            tasks.append(asyncio.create_task(self._send(calls[-1], request)))
        if tasks:
            await asyncio.wait(tasks, timeout=self._options.grace)
        await _stop(tasks)
        for call in calls:
            if not call.answer.error:
                read_whole(call.answer, call.pieces)
        return calls

    async def probe(self, path: str, times: list[float]) -> None:
        """Ask a probe again and again, and note how long each answer took from when it was due."""
        due = time.perf_counter()
        while True:
            due += PROBE_SECONDS
            await asyncio.sleep(due - time.perf_counter())
            reader, writer = await asyncio.open_connection(HOST, self._port)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode())
                head = await reader.readline()
                times.append(time.perf_counter() - due)
            finally:
                writer.close()
            if b" 200 " not in head:
                raise SystemExit(f"{path} answered {head!r}")

    def ask_patiently(self) -> float:
        """Seconds until the `openai` client has an answer, with two retries; raises where it has none."""
        begin = time.perf_counter()
        with openai.OpenAI(base_url=f"http://{HOST}:{self._port}/v1", api_key="none", max_retries=2) as client:
            client.completions.create(model=self._model, prompt="Once upon a time", max_tokens=4)
        return time.perf_counter() - begin

    async def _send(self, call: Call, request: bytes) -> None:
        call.sent = time.perf_counter()
        await run_request(self._port, request, call.answer, call.pieces)
        if call.pieces and b" 503 " in call.pieces[0][1][:20]:
            read_whole(call.answer, call.pieces)

    def _request(self) -> tuple[bytes, int]:
        """A streamed completion of random lengths, whose prompt begins like no other, and the length of its answer."""
        number, words = next(self._numbers), self._random.choices(WORDS, k=self._random.randint(*self._options.prompt))
        length = self._random.randint(*self._options.output)
        body = {
            "model": self._model, "prompt": f"{number} {' '.join(words)}", "max_tokens": length, "min_tokens": length,
            "ignore_eos": True, "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        return make_request(self._port, PATH, body), length


async def measure(client: Client, options: argparse.Namespace) -> dict[str, Any]:
    """Capacity, goodput at lower load, then too much of it."""
    capacity = await client.capacity(options.capacity_seconds)
    if not capacity:
        raise SystemExit(f"no request ended within {options.capacity_seconds:g} s")
    lower = {}
    for share in SHARES:
        calls = await client.load(share * capacity, options.lower_seconds)
        lower[share] = goodput(calls, options) / options.lower_seconds
    probes: dict[str, list[float]] = {path: [] for path in PROBES}
    watching = [asyncio.create_task(client.probe(path, times)) for path, times in probes.items()]
    patient = asyncio.create_task(_after(options.seconds, client))
    calls = await client.load(OVERLOAD * capacity, options.seconds)
    await _stop(watching)
    good, best = goodput(calls, options) / options.seconds, max(lower.values())
    refused = [call for call in calls if call.is_refused]
    answered = [call for call in calls if not call.answer.error]
    first = [call.answer.first - call.due for call in answered]
    return {
        "capacity_requests_per_second": capacity,
        "goodput_by_share": lower,
        "overload": {
            "requests": len(calls),
            "refused": len(refused),
            "answered": len(answered),
            "first_token_in_time": len([seconds for seconds in first if seconds <= options.ttft]),
            "goodput": good,
            "share_of_best": good / best if best else None,
            "ttft_seconds": _spread(first),
            "refusal_seconds": _spread([call.answer.finished - call.due for call in refused]),
            "dispatch_lag_seconds": _spread([call.sent - call.due for call in calls]),
            **{f"{path[1:]}_seconds": _spread(times) for path, times in probes.items()},
        },
        "openai_seconds": await patient,
    }


async def _after(seconds: float, client: Client) -> float:
    await asyncio.sleep(seconds)
    return await asyncio.to_thread(client.ask_patiently)


async def _stop(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel them and wait for their end; what failed before is raised."""
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
            raise outcome


def goodput(calls: Sequence[Call], options: argparse.Namespace) -> int:
    """How many were good."""
    return sum([call.is_good(options.ttft, options.itl) for call in calls])


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    ordered = sorted(values)
    return {f"p{percent}": nearest_rank(ordered, percent) for percent in (50, 99)} if ordered else None


def lines_of(result: dict[str, Any]) -> Iterator[str]:
    """What was found, for people; milliseconds."""
    over = result["overload"]
    yield f"capacity {result['capacity_requests_per_second']:.2f} requests/s"
    for share, good in result["goodput_by_share"].items():
        yield f"at {share:g} of it: goodput {good:.2f}/s"
    said = f"{over['requests']} requests, {over['refused']} refused, {over['answered']} answered"
    yield f"at {OVERLOAD:g} times: {said}, goodput {over['goodput']:.2f}/s"
    share = over["share_of_best"]
    yield f"  of the answers {over['first_token_in_time']} had their first token in time"
    yield f"  share of the best goodput: {'nothing to compare with' if share is None else f'{share:.2f}'}"
    for name in ("ttft", "refusal", "healthz", "readyz", "dispatch_lag"):
        found = over[f"{name}_seconds"]
        yield f"  {name}: " + (
            "none" if found is None else f"p50 {found['p50'] * 1e3:.1f}, p99 {found['p99'] * 1e3:.1f} ms"
        )
    yield f"openai with two retries had its answer {result['openai_seconds']:.1f} s after the last request was due"


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.overload", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--command", default=f"{sys.executable} -m app.cli serve --model {{model}} --port {{port}}")
    parser.add_argument("--arguments", default="", help="more for the server, such as '--slo-admission true'")
    parser.add_argument("--seats", type=int, default=16, help="of the server")
    parser.add_argument("--seconds", type=float, default=60.0, help="of too much")
    parser.add_argument("--capacity-seconds", type=float, default=45.0, help="several times what a request takes")
    parser.add_argument("--lower-seconds", type=float, default=60.0, help="of each of the runs before")
    parser.add_argument("--grace", type=float, default=30.0)
    parser.add_argument("--ttft", type=float, default=2.0)
    parser.add_argument("--itl", type=float, default=0.25)
    parser.add_argument("--prompt", type=int, nargs=2, default=(32, 256), metavar=("LEAST", "MOST"), help="words")
    parser.add_argument("--output", type=int, nargs=2, default=(16, 64), metavar=("LEAST", "MOST"))
    parser.add_argument("--json", type=Path)
    return parser.parse_args(words)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start the server, measure, and stop it."""
    program = Program("relevo", f"{options.command} {options.arguments}")
    before = os.getloadavg()[0]
    with (
        TemporaryDirectory() as folder,
        open_server(program, model=options.model, start_timeout=120, folder=Path(folder)) as server,
    ):
        result = asyncio.run(measure(Client(server.port, server.model, options), options))
    return result | {"load_average": {"before": before, "after": os.getloadavg()[0], "cores": os.cpu_count()}}


def main() -> None:
    """Measure and print."""
    options = parse()
    result = run(options)
    print("\n".join(lines_of(result)))
    print(f"load average of the machine: {result['load_average']}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
