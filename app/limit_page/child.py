"""The process that looks for the limit: started with no secret in its words, read line by line, never left behind.

It is a process of its own so that sending requests and reckoning take nothing from the server's event loop. Should the
server die, its next line meets a broken pipe, and it ends what it started.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import trio

from app.config import environment
from engine.errors import RelevoError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

COMMAND: Final = (sys.executable, "-m", "app.cli", "limit")
# It ends the process that sends requests, and waits for it.
GRACE_SECONDS: Final = 15.0
MAX_LINE_BYTES: Final = 8 << 20
MAX_SAID_BYTES: Final = 4096


class ChildError(RelevoError):
    """The process could not be started, or tells what cannot be taken in."""


async def run_child(
    words: Sequence[str],
    files: Mapping[str, str],
    variables: Mapping[str, str],
    take: Callable[[bytes], object],
    stop: trio.Event,
) -> tuple[int, str]:
    """Run a process to its end; it is gone afterwards, whatever happens.

    Args:
        files: contents that it reads from pipes, as everybody sees a process's words; by the beginning of the word that
            names the file, such as `--api-key=@`.
        variables: of its environment, beside those of this process that are no settings.
        take: is given each line of its standard output; must not raise.
        stop: when set, it is asked to end.

    Returns:
        Its exit code, and the last line of its standard error.

    Raises:
        ChildError: it cannot be started, or a line has no end.
    """
    process = await _start(words, files, variables)
    said, error = bytearray(), None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_ask_to_end, process, stop)
            nursery.start_soon(_keep_last, process, said)
            assert process.stdout is not None
            try:
                async for line in read_lines(process.stdout):
                    take(line)
                await process.wait()
            except ChildError as error_:
                error = error_
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await _end(process)
    if error is not None:
        raise error
    lines = said.decode(errors="replace").strip().splitlines()
    return process.returncode or 0, lines[-1].removeprefix("relevo: ") if lines else ""


async def _start(words: Sequence[str], files: Mapping[str, str], variables: Mapping[str, str]) -> trio.Process:
    with ExitStack() as stack:
        flags, ends = [], []
        for flag, content in files.items():
            reading, writing = os.pipe()
            stack.callback(os.close, reading)
            os.write(writing, content.encode())  # which a pipe takes: at most some 40 kB
            os.close(writing)
            flags.append(f"{flag}/dev/fd/{reading}")
            ends.append(reading)
        try:
            # In a session of its own, the key that interrupts is left to the server, which ends it.
            return await trio.lowlevel.open_process(
                [*words, *flags],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                pass_fds=ends,
                # Settings of the server, its secrets among them, are none of its business.
                env={name: value for name, value in environment().items() if not name.startswith("RELEVO_")}
                | {**variables},
            )
        except OSError as error:
            raise ChildError(f"{words[0]} cannot be started: {error.strerror or error}.") from None


async def _ask_to_end(process: trio.Process, stop: trio.Event) -> None:
    await stop.wait()
    process.terminate()
    await trio.sleep(GRACE_SECONDS)
    process.kill()


async def _keep_last(process: trio.Process, said: bytearray) -> None:
    assert process.stderr is not None
    async for piece in process.stderr:
        said += piece
        del said[:-MAX_SAID_BYTES]


async def _end(process: trio.Process) -> None:
    if process.poll() is None:
        process.terminate()
        with trio.move_on_after(GRACE_SECONDS):
            await process.wait()
        if process.poll() is None:
            process.kill()
            await process.wait()
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        await stream.aclose()


async def read_lines(stream: trio.abc.ReceiveStream) -> AsyncIterator[bytes]:
    """The lines of a stream, without their ends; what has no end is no line.

    Raises:
        ChildError: one is longer than any that makes sense.
    """
    held = bytearray()
    async for piece in stream:
        held += piece
        *lines, rest = held.split(b"\n") if b"\n" in piece else (held,)
        held = bytearray(rest)
        if max(map(len, (held, *lines))) > MAX_LINE_BYTES:
            raise ChildError(f"The search has told a line of more than {MAX_LINE_BYTES >> 20} MiB.")
        for line in lines:
            yield bytes(line)
