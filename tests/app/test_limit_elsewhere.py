"""Who else takes the CPUs while a server is measured."""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import TYPE_CHECKING

import pytest

from app.limit.elsewhere import Share, Taken, look, share_between

if TYPE_CHECKING:
    from pathlib import Path

SERVER, HELPER, STRANGER = 41, 42, 43


def write_proc(proc: Path, cpu: str, ticks: dict[int, tuple[int, int, int]], *, port: int = 8000) -> Path:
    """A /proc in which `SERVER` listens at a port; of each process its parent, what it took, and its ended children."""
    (proc / "net").mkdir(parents=True, exist_ok=True)
    (proc / "stat").write_text(f"cpu  {cpu} 0 0\ncpu0 1 2 3\n")
    row = f"   0: 0100007F:{port:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 777 1 0"
    (proc / "net" / "tcp").write_text(f"  sl  local_address ...\n{row}\n")
    for pid, (parent, own, ended) in ticks.items():
        (proc / str(pid) / "fd").mkdir(parents=True, exist_ok=True)
        fields = [str(pid), "(a) b) c)", "S", str(parent), *["0"] * 9, str(own), "0", str(ended), "0", *["0"] * 30]
        (proc / str(pid) / "stat").write_text(" ".join(fields))
    link = proc / str(SERVER) / "fd" / "7"
    if not link.is_symlink():
        link.symlink_to("socket:[777]")
    return proc


def test_what_neither_server_nor_sender_took_is_that_of_others(tmp_path: Path) -> None:
    me = os.getpid()
    ticks = {SERVER: (1, 100, 0), HELPER: (SERVER, 50, 0), STRANGER: (1, 900, 0), me: (1, 10, 0)}
    before = look("127.0.0.1", 8000, write_proc(tmp_path, "1000 0 100 5000 0 0 0 40", ticks))
    # 1,000 ticks later the helper has ended, which its parent is told of, as is this process of the one that sent.
    ticks = {SERVER: (1, 300, 150), HELPER: (1, 0, 0), STRANGER: (1, 1200, 0), me: (1, 20, 40)}
    after = look("127.0.0.1", 8000, write_proc(tmp_path, "1500 50 200 5250 0 0 0 140", ticks))
    # 650 were busy: 300 by the server (200, and 100 of the helper), 50 by this process and what it has started.
    assert share_between(before, after) == Share(pytest.approx(0.3), pytest.approx(0.1))


def test_a_search_that_the_server_has_started_is_counted_once(tmp_path: Path) -> None:
    ticks = {SERVER: (1, 100, 0), os.getpid(): (SERVER, 10, 5)}
    assert look("::1", 8000, write_proc(tmp_path, "1 2 3 4 5 6 7 8", ticks)) == Taken(36, 19, 8, 115)


def test_of_a_server_that_is_elsewhere_or_anothers_nothing_is_said(tmp_path: Path) -> None:
    proc = write_proc(tmp_path, "1 2 3 4 5 6 7 8", {SERVER: (1, 1, 0)})
    assert look("localhost", 8000, proc) is not None
    for host, port in (("10.0.0.1", 8000), ("example.org", 8000), ("localhost", 8001)):
        assert look(host, port, proc) is None
    (proc / "stat").write_text("nonsense")
    assert look("localhost", 8000, proc) is None
    assert look("localhost", 8000, tmp_path / "no") is None
    assert share_between(None, Taken(1, 1, 1, 1)) is None
    assert share_between(Taken(5, 1, 1, 1), Taken(5, 1, 1, 1)) is None


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc elsewhere")
def test_a_real_machine_tells_of_itself() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        before = look("127.0.0.1", port)
        assert before is not None
        until = time.process_time() + 0.05
        while time.process_time() < until:
            pass
        after = look("127.0.0.1", port)
        assert after is not None
    assert after.known > before.known
    assert share_between(before, after) is not None
