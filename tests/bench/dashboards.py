"""What open dashboards cost the server: `python -m tests.bench.dashboards [--model M]`.

The same requests are answered over HTTP without a dashboard (A) and with fifty that read `/ops/events` (B): A B A B.
What is measured is as in `tests.bench.overhead`: CPU time of the serving process alone, while every stream decodes.
Those who watch are a process of their own and throw away what they read. Without `--model` the model is one that
sleeps; there a token costs next to nothing, so the share that a dashboard takes is no more than a hint, but the
microseconds hold.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import trio

from app.config import let_threads_sleep
from app.listening import open_listening_socket
from tests.bench.overhead import HOST, open_bench, spread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.bench.overhead import Bench, Phase

REQUEST: Final = "GET /ops/events HTTP/1.1\r\nHost: {host}:{port}\r\nAccept-Encoding: gzip\r\n\r\n"
SETTLE_SECONDS: Final = 2.0


def watch(port: int, number: int) -> None:
    """Read that many streams until stdin ends; say how many bytes came in how many seconds."""
    with selectors.DefaultSelector() as selector:
        for _ in range(number):
            connection = socket.create_connection((HOST, port))
            connection.sendall(REQUEST.format(host=HOST, port=port).encode())
            selector.register(connection, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        amount, began = 0, time.monotonic()
        while selector.get_map():
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    json.dump([amount, time.monotonic() - began], sys.stdout)
                    return
                data = key.fileobj.recv(1 << 20)  # type: ignore[union-attr]
                if not data:
                    raise SystemExit("A stream ended.")
                amount += len(data)


@contextmanager
def dashboards(port: int, number: int) -> Iterator[list[float]]:
    """Open dashboards; afterwards the list holds bytes a second of each."""
    argv = [sys.executable, "-m", "tests.bench.dashboards", "--watch", str(port), "--dashboards", str(number)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    rates: list[float] = []
    try:
        yield rates
        out, _ = process.communicate("")
        if process.returncode:
            raise SystemExit("The dashboards did not stay open.")
        amount, seconds = json.loads(out)
        rates.append(amount / seconds / number)
    finally:
        process.kill()
        process.wait()


async def watched(bench: Bench, number: int) -> tuple[Phase, float]:
    """One run with so many dashboards, and the bytes a second of each."""
    with dashboards(bench.port, number) as rates:
        await trio.sleep(SETTLE_SECONDS)
        phase = await bench.over_http()
    return phase, rates[0]


async def measure(options: argparse.Namespace) -> None:
    """Run all rounds and print what came of them."""
    pairs: list[tuple[Phase, Phase]] = []
    with open_listening_socket(HOST, 0) as listener:
        async with open_bench(options, listener) as bench:
            print(f"{bench.engine.model.name}, {options.streams} streams, {options.dashboards} dashboards", flush=True)
            await bench.over_http()  # warm-up
            for _ in range(options.rounds):
                alone = await bench.over_http()
                crowd, rate = await watched(bench, options.dashboards)
                pairs.append((alone, crowd))
                print(
                    f"alone {alone.process:8.1f} us a token, watched {crowd.process:8.1f}; steps "
                    f"{alone.step_seconds * 1e3:.1f} and {crowd.step_seconds * 1e3:.1f} ms; "
                    f"{rate / 1e3:.0f} kB a second for each",
                    flush=True,
                )
    per_second = [
        (crowd.process - alone.process) * options.streams / crowd.step_seconds / 1e3 for alone, crowd in pairs
    ]
    print(f"watching adds {spread([100 * (crowd.process / alone.process - 1) for alone, crowd in pairs])} % a token")
    print(f"and takes {spread(per_second)} ms of CPU a second")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.dashboards", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model to serve (default: one that sleeps)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dashboards", type=int, default=50)
    parser.add_argument("--step-seconds", type=float, default=0.02, help="a step of the model that sleeps")
    parser.add_argument("--watch", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.watch:
        watch(options.watch, options.dashboards)
        return
    let_threads_sleep()
    trio.run(measure, options)


if __name__ == "__main__":
    main()
