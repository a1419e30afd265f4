"""The server that is measured where none was named: this very one, as a process of its own."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory, gettempdir
from typing import TYPE_CHECKING, Final

from app.limit.children import end
from app.limit.endpoint import EndpointError
from app.listening import open_listening_socket

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HOST: Final = "127.0.0.1"
SERVE: Final = (sys.executable, "-m", "app.cli", "serve")
START_SECONDS: Final = 300.0
POLL_SECONDS: Final = 0.1
GRACE_SECONDS: Final = 10.0
PREFIX, LOCK = "relevo-limit-", "in-use"
FRESH_SECONDS: Final = 60.0


@contextmanager
def open_own_server(flags: Sequence[str], command: Sequence[str] = SERVE) -> Iterator[str]:
    """Start a server on a free port of this machine; gives its URL when it is ready. It is gone afterwards.

    What it keeps of itself goes with it: it does not touch the history of a server that runs here.

    Args:
        flags: of `relevo serve`.

    Raises:
        EndpointError: it ends, or is not ready in time; with the last line that it said.
    """
    with open_listening_socket(HOST, 0) as probe:
        port = probe.getsockname()[1]
    url = f"http://{HOST}:{port}"
    with open_folder() as (folder, owner):
        log = folder / "log"
        own = ["--host", HOST, "--port", str(port), "--state-dir", str(folder), "--log-level", "warning"]
        words = [*command, *own, "--drain-timeout-seconds", "0", "--end-with-input", *flags]
        with log.open("wb") as out:
            # In a session of its own, the key that interrupts is left to the command, which ends it; where the command
            # is killed, the end of its input does.
            process = subprocess.Popen(  # noqa: S603
                words, stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True, pass_fds=[owner]
            )
        assert process.stdin is not None
        try:
            _wait_until_ready(process, url, log)
            yield url
        finally:
            process.terminate()  # nobody waits for an answer from it
            end(process, GRACE_SECONDS)
            process.stdin.close()


@contextmanager
def open_folder() -> Iterator[tuple[Path, int]]:
    """A folder that is gone afterwards, and the lock that says that it is in use, for those who use it too.

    A process that is killed leaves its folder behind and lets go of the lock; the next one here takes it away.
    """
    _sweep(Path(gettempdir()))
    with TemporaryDirectory(prefix=PREFIX) as name:
        folder = Path(name)
        with (folder / LOCK).open("wb") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX)
            yield folder, owner.fileno()


def _sweep(among: Path) -> None:
    """Take away what killed processes of this user have left; what cannot be looked at stays."""
    for folder in among.glob(f"{PREFIX}*"):
        with suppress(OSError):
            kind = folder.lstat()
            if not stat.S_ISDIR(kind.st_mode) or kind.st_uid != os.getuid():
                continue
            if time.time() - kind.st_mtime < FRESH_SECONDS:  # its lock may be about to be taken
                continue
            with ExitStack() as lock:
                with suppress(FileNotFoundError):  # who made the folder was killed before there was one
                    owner = lock.enter_context((folder / LOCK).open("rb"))
                    fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                rmtree(folder)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while not _is_ready(url):
        if process.poll() is not None or time.monotonic() > until:
            said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
            raise EndpointError(f"The server to be measured did not start: {said[0].removeprefix('relevo: ')}")
        time.sleep(POLL_SECONDS)


def _is_ready(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url + "/readyz", timeout=10 * POLL_SECONDS) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
