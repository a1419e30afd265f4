"""What a neighbour's stream notices while bytes that no honest client sends come in: gaps between its tokens, in pairs.

    python -m tests.bench.neighbour [--pairs 5] [--seconds 10] [--connections 4] [--step 0.02] [--flood pings|crumbs]

One process serves the fake model, one sends the cases of `tests.app.raw_cases` as fast as they are answered, or what
`tests.bench.flood` sends without end, and this one reads one stream after the other. Half of the time nothing else is
sent; the two halves take turns, so that what the machine does beside them meets both. The sender has the lowest
priority: elsewhere it would be another machine, and its own work is not to be taken for what the server does about it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from statistics import median
from typing import TYPE_CHECKING, Any

import httpx

from tests.bench.flood import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterator

LONGEST = 400  # tokens of one stream


def gaps(url: str, seconds: float) -> list[float]:
    """Seconds between the tokens that come within so many seconds; never across two streams."""
    found, end = [], time.perf_counter() + seconds
    with httpx.Client(base_url=url, timeout=60) as client:
        while time.perf_counter() < end:
            body = {"prompt": "neighbour", "max_tokens": LONGEST, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as answer:
                last = None
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        now = time.perf_counter()
                        if last is not None:
                            found.append(now - last)
                        last = now
                    if time.perf_counter() > end:
                        break
    return found


def pair(options: argparse.Namespace, url: str, number: int) -> dict[str, Any]:
    """One turn without and one with."""
    alone = gaps(url, options.seconds)
    port = url.rsplit(":", 1)[1]
    connections = str(options.connections)
    command = ["tests.app.raw_fuzz", "--port", port, "--cases", "1000000", "--first", str(number * 1_000_000)]
    command += ["--connections", connections]
    if options.flood is not None:
        command = ["tests.bench.flood", port, options.flood, connections]
    with subprocess.Popen(["nice", "-n", "19", sys.executable, "-m", *command]) as sender:
        time.sleep(1)
        together = gaps(url, options.seconds)
        sender.terminate()
    return {"alone": told(alone), "together": told(together)}


def told(found: list[float]) -> dict[str, float]:
    """Quantiles in milliseconds."""
    found.sort()
    return {f"p{share}": round(1000 * found[len(found) * share // 100], 2) for share in (50, 95, 99)} | {
        "n": len(found)
    }


def lines(pairs: list[dict[str, Any]]) -> Iterator[str]:
    yield "  alone p50    p99   together p50    p99   ratio of p99"
    for each in pairs:
        a, b = each["alone"], each["together"]
        yield f"{a['p50']:11.1f} {a['p99']:6.1f} {b['p50']:14.1f} {b['p99']:6.1f} {b['p99'] / a['p99']:14.2f}"
    middle = median([each["together"]["p99"] / each["alone"]["p99"] for each in pairs])
    yield f"{'median':>40} {middle:14.2f}"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--flood", choices=KINDS, help="send this instead of the cases")
    parser.add_argument("--step", type=float, default=0.02, help="seconds of a step of the fake model")
    options = parser.parse_args()
    fake = json.dumps({"step_seconds": options.step})
    with subprocess.Popen(
        [sys.executable, "-m", "tests.serve_fake", fake], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        try:
            pairs = [pair(options, url, number) for number in range(options.pairs)]
        finally:
            server.terminate()
    print("\n".join(lines(pairs)))


if __name__ == "__main__":
    main()
