"""One server at a time: start it, wait until it answers, see what it costs, stop it with all that it started."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

HOST: Final = "127.0.0.1"
GRACE_SECONDS: Final = 15.0
POLL_SECONDS: Final = 0.1
PROBE_SECONDS: Final = 5.0
MAX_LOG_LINES, MAX_LOG_CHARS = 12, 3000
PROC: Final = Path("/proc")


class ServerError(Exception):
    """A server could not be measured; says why, with the end of what it printed."""


@dataclass(frozen=True, slots=True)
class Program:
    """A server's name and command; `{port}` and `{model}` in it are filled in."""

    name: str
    command: str

    def words(self, port: int, model: str) -> list[str]:
        """The command for a port. No shell reads it: variables go before it with `env NAME=VALUE`."""
        return [w.replace("{port}", str(port)).replace("{model}", model) for w in shlex.split(self.command)]


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process and all that it started have used.

    Attributes:
        peak_bytes: resident memory, each process at its own peak, added up; shared pages count in each of them.
    """

    cpu_seconds: float
    peak_bytes: int


@dataclass(slots=True)
class Server:
    """A server that answers.

    Attributes:
        model: the name by which it wants to be asked.
        start_seconds: from its start to its first good answer.
    """

    program: Program
    process: subprocess.Popen[bytes]
    port: int
    log: Path
    model: str = ""
    start_seconds: float = 0.0

    def usage(self) -> Usage | None:
        """What it has used so far; `None` where the system has no /proc."""
        return usage_of(self.process.pid)

    def failure(self, what: str) -> ServerError:
        """An error that ends with the last lines of the server's log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-MAX_LOG_LINES:]
        said = "\n".join(lines)[-MAX_LOG_CHARS:]
        return ServerError(f"{what}\n{said}" if said else f"{what}; it printed nothing")

    def check_alive(self) -> None:
        """Raise `ServerError` if the process has ended."""
        code = self.process.poll()
        if code is not None:
            raise self.failure(f"it ended with exit code {code}")


@contextmanager
def open_server(program: Program, *, model: str, start_timeout: float, folder: Path) -> Iterator[Server]:
    """Start a server on a free port and wait until it answers; it is gone, with all its processes, afterwards.

    Args:
        model: stands for `{model}` in its command.
        start_timeout: seconds.
        folder: for its log.

    Raises:
        ServerError: it cannot be started, ends, or does not answer in time.
    """
    port, log = free_port(), folder / f"{program.name}.log"
    begin = time.perf_counter()
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(
                program.words(port, model),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise ServerError(f"its command does not run: {error}") from None
    server = Server(program, process, port, log)
    try:
        while not is_ready(port):
            server.check_alive()
            if time.perf_counter() - begin > start_timeout:
                raise server.failure(f"it did not answer within {start_timeout:g} s")
            time.sleep(POLL_SECONDS)
        server.start_seconds = time.perf_counter() - begin
        server.model = model_name(port)
        yield server
    finally:
        stop(process)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def is_ready(port: int) -> bool:
    """Whether `/health` says so, or, where there is none, whether `/v1/models` answers."""
    status, _ = get(port, "/health")
    return status == 200 or (status in (404, 405) and get(port, "/v1/models")[0] == 200)


def model_name(port: int) -> str:
    """The first model that the server lists; one that lists none takes any name."""
    status, body = get(port, "/v1/models")
    with suppress(ValueError, KeyError, IndexError, TypeError):
        if status == 200:
            return str(json.loads(body)["data"][0]["id"])
    return "default"


def get(port: int, path: str) -> tuple[int, bytes]:
    """Status and body of a GET; status 0 where nobody answers."""
    connection = http.client.HTTPConnection(HOST, port, timeout=PROBE_SECONDS)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process, its group, and whatever of its descendants left the group: gently first."""
    members = tree_of(process.pid) if PROC.exists() else {}
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pid, start_time in members.items():
        if start_time == _stat(pid).get("start_time"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def usage_of(pid: int) -> Usage | None:
    """What a process and its descendants have used; those that ended count with the parent that waited for them."""
    if not PROC.exists():
        return None
    ticks, peak = 0, 0
    for member in tree_of(pid):
        ticks += _stat(member).get("ticks", 0)
        with suppress(OSError):
            for line in (PROC / str(member) / "status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    peak += int(line.split()[1]) * 1024
    return Usage(ticks / os.sysconf("SC_CLK_TCK"), peak)


def tree_of(pid: int) -> dict[int, int]:
    """The process, its descendants, and its session's members: by id, with the time each was started."""
    stats = {int(entry.name): _stat(int(entry.name)) for entry in PROC.iterdir() if entry.name.isdigit()}
    members = {member for member, stat in stats.items() if member == pid or stat.get("session") == pid}
    grown = True
    while grown:
        more = {member for member, stat in stats.items() if stat.get("parent") in members} - members
        members |= more
        grown = bool(more)
    return {member: stats[member]["start_time"] for member in members if stats.get(member)}


def _stat(pid: int) -> Mapping[str, Any]:
    """From /proc/PID/stat; empty where the process is gone. A name may hold spaces, so fields count from behind it."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return {}
    return {
        "parent": int(fields[1]),
        "session": int(fields[3]),
        "ticks": sum(map(int, fields[11:15])),  # its own time and that of children it waited for
        "start_time": int(fields[19]),
    }
