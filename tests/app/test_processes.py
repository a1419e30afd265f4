"""A server as its service manager and its disk see it: exit codes, kills, restarts, and what is left of it then."""

from __future__ import annotations

import json
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.app.serving import CHAT, chat_body, events
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


class Process:
    """A server in a process of its own, ready to be asked.

    Args:
        around: a command that becomes the server.

    Attributes:
        lines: of its log.
    """

    def __init__(self, folder: Path, *flags: str, around: tuple[str, ...] = ()) -> None:
        self.broken = folder / "broken"
        command = [
            *around,
            sys.executable,
            "-m",
            "tests.serve_command",
            str(self.broken),
            "--state-dir",
            str(folder),
            *flags,
        ]
        self.popen = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        assert self.popen.stderr is not None
        self.lines: list[dict[str, Any]] = []
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()
        ready = wait_for(lambda: next((line for line in self.lines if line["message"] == "ready"), None))
        self.client = httpx.Client(base_url=ready["url"], timeout=PATIENCE_SECONDS)

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            # What the command itself says at its end is for people.
            self.lines.append(json.loads(line) if line.startswith("{") else {"message": line.strip()})

    def wait(self) -> int:
        """Its exit code."""
        code = self.popen.wait(PATIENCE_SECONDS)
        self._reader.join(PATIENCE_SECONDS)
        return code

    def chat(self, **fields: Any) -> httpx.Response:
        """Ask something."""
        return self.client.post(CHAT, json=chat_body(**fields))

    def change(self, seats: int, reason: str) -> int:
        """Change a setting; gives its generation."""
        answer = self.client.patch("/admin/config", json={"max_num_seqs": seats, "reason": reason})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["generation"])

    def history(self) -> dict[str, Any]:
        """How it stands with the history."""
        told: dict[str, Any] = self.client.get("/ops/stats.json").json()["history"]
        return told

    def messages(self) -> str:
        """The log in one text."""
        return "\n".join(line["message"] for line in self.lines)

    def end(self) -> None:
        """Whatever its state is."""
        self.client.close()
        self.popen.kill()
        self.popen.wait()
        self._reader.join(PATIENCE_SECONDS)
        assert self.popen.stderr is not None
        self.popen.stderr.close()


def wait_for(look: Callable[[], Any]) -> Any:
    """The first thing that `look` finds."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not (found := look()):
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.01)
    return found


@contextmanager
def started(folder: Path, *flags: str) -> Iterator[Process]:
    process = Process(folder, *flags)
    try:
        yield process
    finally:
        process.end()


class Supervisor:
    """Starts a server again as `Restart=on-failure` does: unless it ended with 0, or by a signal that asks for the end.

    Attributes:
        codes: how each ended.
    """

    def __init__(self, folder: Path) -> None:
        self.codes: list[int] = []
        self.running = Process(folder)
        self._folder = folder

    def watch(self) -> bool:
        """Wait for the end; whether it was started again."""
        self.codes.append(self.running.wait())
        self.running.end()
        if self.codes[-1] in (0, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, -signal.SIGPIPE):
            return False
        self.running.broken.unlink(missing_ok=True)
        self.running = Process(self._folder)
        return True


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    """One with a running server."""
    made = Supervisor(tmp_path)
    yield made
    made.running.end()


@pytest.mark.long
def test_a_broken_engine_ends_the_process_which_is_started_again_and_serves(supervisor: Supervisor) -> None:
    first = supervisor.running
    assert first.chat(max_tokens=3).status_code == 200
    first.broken.touch()
    until, statuses = time.monotonic() + PATIENCE_SECONDS, set()
    with suppress(httpx.TransportError):  # it is gone
        while time.monotonic() < until:
            statuses.add(first.chat().status_code)
            time.sleep(0.01)
    assert 500 in statuses
    assert statuses <= {500, 503}
    assert supervisor.watch()
    assert supervisor.codes == [1]
    assert any("the device is lost" in line.get("exception", "") for line in first.lines), "with a traceback in the log"
    assert supervisor.running.chat(max_tokens=3).status_code == 200
    assert supervisor.running.client.get("/readyz").status_code == 200


def test_who_is_asked_to_end_ends_with_0_and_is_not_started_again(supervisor: Supervisor) -> None:
    first, texts = supervisor.running, []
    stream = Thread(target=lambda: texts.append(first.chat(max_tokens=80, stream=True).text))
    stream.start()
    wait_for(lambda: first.client.get("/load").json()["server_load"])
    first.popen.send_signal(signal.SIGTERM)
    assert not supervisor.watch()
    stream.join()
    assert supervisor.codes == [0]
    assert events(texts[0])[-1] == "[DONE]", "what ran could finish"
    assert "finished" in first.messages(), "the last lines of the log are written"


@pytest.mark.long
def test_what_was_written_before_a_kill_is_there_after_it(supervisor: Supervisor, tmp_path: Path) -> None:
    first = supervisor.running
    for number in range(3):
        assert first.chat(max_tokens=20).status_code == 200
        first.change(number + 1, f"change {number}")
        time.sleep(0.6)  # the history has a row a second

    def rows() -> list[tuple[int, int]]:
        with closing(sqlite3.connect(tmp_path / "history.db")) as connection:
            found: list[tuple[int, int]] = connection.execute(
                "SELECT time, output_tokens FROM history WHERE span = 1 ORDER BY time"
            ).fetchall()
        return found

    def entries() -> list[str]:
        with closing(sqlite3.connect(tmp_path / "history.db")) as connection:
            return [reason for (reason,) in connection.execute("SELECT reason FROM audit ORDER BY number")]

    wait_for(lambda: sum(tokens for _, tokens in rows()) >= 20 and len(entries()) == 3)
    before = rows()
    streams = [Thread(target=_stream_until_it_breaks, args=(first,)) for _ in range(4)]
    for stream in streams:
        stream.start()
    wait_for(lambda: first.client.get("/load").json()["server_load"] == 4)
    first.popen.kill()
    for stream in streams:
        stream.join()
    assert supervisor.watch()
    assert supervisor.codes == [-signal.SIGKILL]
    second = supervisor.running
    with closing(sqlite3.connect(tmp_path / "history.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert rows()[: len(before)] == before
    audit = second.client.get("/admin/audit").json()
    assert [entry["reason"] for entry in audit][:3] == ["change 0", "change 1", "change 2"]
    assert second.change(7, "after it") > max(entry["generation"] for entry in audit), "generations go on"
    told = second.client.get("/ops/stats.json").json()
    assert told["history"]["problem"] is None
    assert "The server starts after an end that was not told of" in [event["text"] for event in told["events"]]
    assert second.chat(max_tokens=3).status_code == 200


def _stream_until_it_breaks(process: Process) -> None:
    with pytest.raises(httpx.TransportError):
        process.chat(max_tokens=450, stream=True)


@contextmanager
def full_disk(process: Process, folder: Path) -> Iterator[None]:
    """No file of the server may grow."""
    size = max(path.stat().st_size for path in folder.glob("history.db*"))
    _, hard = resource.prlimit(process.popen.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.popen.pid, resource.RLIMIT_FSIZE, (size, hard))
    yield
    resource.prlimit(process.popen.pid, resource.RLIMIT_FSIZE, (hard, hard))


@contextmanager
def locked_file(_process: Process, folder: Path) -> Iterator[None]:
    """Another program has the history for itself."""
    with closing(sqlite3.connect(folder / "history.db", isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        yield
        connection.execute("ROLLBACK")


@pytest.mark.long
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="Linux only")
@pytest.mark.parametrize("sick", [full_disk, locked_file])
def test_a_sick_disk_holds_nobody_up_is_told_and_written_to_later(tmp_path: Path, sick: Any) -> None:
    with started(tmp_path) as process:
        process.change(3, "before")
        wait_for(lambda: not process.history()["unwritten_rows"])
        with sick(process, tmp_path):
            for number in range(30):
                process.change(1 + number % 4, "x" * 400)
            wait_for(lambda: process.history()["problem"])
            told = process.client.get("/admin/config").json()
            assert told["unwritten_changes"] == 30
            assert told["history_problem"]
            assert process.chat(max_tokens=3).status_code == 200
            assert "relevo:history_write_failures_total 0.0" not in process.client.get("/metrics").text
            assert "cannot be written" in process.messages()
        wait_for(lambda: process.history()["problem"] is None)
        assert process.client.get("/admin/config").json()["unwritten_changes"] == 0
        assert "is written again" in process.messages()
        process.popen.terminate()
        assert process.wait() == 0
    with closing(sqlite3.connect(tmp_path / "history.db")) as connection:
        (number,) = connection.execute("SELECT count(*) FROM audit WHERE length(reason) = 400").fetchone()
    assert number == 30, "nothing is lost"
