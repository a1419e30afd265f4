"""What a start takes until the first token, and what memory it leaves: `python -m tests.bench.start [FOLDER ...]`.

Starts `relevo serve` again and again with this Python, the model being in the cache; several folders (checkouts) take
turns, A B B A. Beside them a Python that has imported torch and nothing else. Needs /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
TORCH: Final = "import time; t = time.perf_counter(); import torch; print(time.perf_counter() - t, flush=True); input()"
HEAD: Final = f"{'':40} {'first token s':>13} {'CPU s':>6} {'RSS MB':>7} {'anonymous':>9} {'peak':>5}"


@dataclass(frozen=True)
class Start:
    """One start.

    Attributes:
        first_token_seconds: since the process was started.
        resident_bytes: then, mapped files included.
        anonymous_bytes: of them what no file backs.
    """

    first_token_seconds: float
    cpu_seconds: float
    resident_bytes: int
    anonymous_bytes: int
    peak_bytes: int


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folders", nargs="*", default=[str(ROOT)], metavar="FOLDER", help="checkouts (default this one)"
    )
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    starts: dict[str, list[Start]] = {name: [] for name in (*options.folders, "torch alone")}
    for round_number in range(options.rounds):
        for name in list(starts)[:: -1 if round_number % 2 else 1]:
            starts[name].append(torch_alone() if name == "torch alone" else served(Path(name)))
    print(HEAD)
    for name, all_of_it in starts.items():
        print(f"{name[-40:]:40} {row(all_of_it)}")


def row(starts: list[Start]) -> str:
    """Medians, the times with what they lay between."""
    seconds = [start.first_token_seconds for start in starts]
    spread = f"{median(seconds):.2f} ({min(seconds):.1f}-{max(seconds):.1f})"
    cpu = median(start.cpu_seconds for start in starts)
    sizes = [
        round(median(getattr(start, f"{name}_bytes") for start in starts) / 1e6)
        for name in ("resident", "anonymous", "peak")
    ]
    return f"{spread:>13} {cpu:6.2f} {sizes[0]:7} {sizes[1]:9} {sizes[2]:5}"


def served(folder: Path) -> Start:
    """Start a server, ask it for one token, look at its memory, end it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    begin = time.perf_counter()
    command = [sys.executable, "-m", "app.cli", "serve", "--port", str(port)]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while not is_listening(port):
                if process.poll() is not None:
                    raise SystemExit(f"relevo serve in {folder} ended with code {process.returncode}")
                time.sleep(0.01)
            body = json.dumps({"prompt": "Hello", "max_tokens": 1}).encode()
            asked = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(asked, timeout=60) as answer:
                answer.read()
            return look(process.pid, time.perf_counter() - begin)
        finally:
            process.send_signal(signal.SIGTERM)


def torch_alone() -> Start:
    """A Python that has imported torch."""
    command = [sys.executable, "-c", TORCH]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        found = look(process.pid, float(process.stdout.readline()))
        process.stdin.write("\n")
    return found


def is_listening(port: int) -> bool:
    """Whether somebody takes connections there."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


def look(pid: int, seconds: float) -> Start:
    """A process as it is now."""
    process = Path("/proc") / str(pid)
    fields = dict(
        line.split(":", 1)
        for name in ("smaps_rollup", "status")
        for line in (process / name).read_text().splitlines()
        if ":" in line
    )
    resident, anonymous, peak = (int(fields[name].split()[0]) << 10 for name in ("Rss", "Anonymous", "VmHWM"))
    ticks = sum(map(int, (process / "stat").read_text().rpartition(")")[2].split()[11:13]))
    return Start(seconds, ticks / os.sysconf("SC_CLK_TCK"), resident, anonymous, peak)


if __name__ == "__main__":
    main()
