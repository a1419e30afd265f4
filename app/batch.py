"""OpenAI's batch files: answered at full width, line by line, and gone on with where an earlier run was interrupted."""

from __future__ import annotations

import json
import logging
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TextIO

import trio

from app.api.errors import describe
from app.api.schemas import check_numbers, load_json_object
from app.batch_output import FINGERPRINT, Earlier, fingerprint
from app.offline import PLANS, answer, plan_whole
from engine.errors import InvalidRequestError, RelevoError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from engine.engine import Engine
    from engine.outbox import Delta

log = logging.getLogger("relevo.batch")

INVALID_LINE: Final = "invalid_line"
# Longer ones are not read to their end. A token is seldom more than 16 bytes of JSON, and few contexts are longer.
MAX_LINE_BYTES: Final = 16 << 20
_SKIP_BYTES: Final = 1 << 20


@dataclass(slots=True)
class Counts:
    """How a batch goes.

    Attributes:
        answered: those of earlier runs included.
        failed: in this run.
        before: answered in earlier runs.
        num_tokens: tokens generated in this run.
        started: when it began, on trio's clock.
    """

    answered: int = 0
    failed: int = 0
    before: int = 0
    num_tokens: int = 0
    started: float = field(default_factory=trio.current_time)

    @property
    def total(self) -> int:
        """Lines that have a result."""
        return self.answered + self.failed

    @property
    def tokens_per_second(self) -> float:
        """Generated, on average since the start."""
        seconds = trio.current_time() - self.started
        return self.num_tokens / seconds if seconds > 0 else 0.0

    def add(self, *, ok: bool) -> None:
        """A line has its result."""
        self.answered += ok
        self.failed += not ok

    def add_before(self) -> None:
        """A line has had its answer from before."""
        self.answered += 1
        self.before += 1


def read_lines(source: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """The lines of a file that are not blank, with their numbers from 1; `None` for one that is far too long."""
    number = 0
    while line := source.readline(MAX_LINE_BYTES):
        number += 1
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            while (rest := source.readline(_SKIP_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield number, None
        elif line.strip():
            yield number, line


def read_wanted(lines: Iterable[tuple[int, bytes | None]]) -> dict[str, str | None]:
    """Every `custom_id` of a batch file, to the fingerprint of its line; `None` where that line is wrong."""
    wanted: dict[str, str | None] = {}
    taken: set[str] = set()
    for _, line in lines:
        try:
            entry = _read_entry(line, taken)
        except _WrongLineError as error:
            if error.custom_id is not None:
                wanted.setdefault(error.custom_id, None)
            continue
        taken.add(entry.custom_id)
        wanted[entry.custom_id] = entry.fingerprint
    return wanted


async def run_batch(
    engine: Engine,
    lines: Iterable[tuple[int, bytes | None]],
    target: TextIO,
    *,
    earlier: Earlier | None = None,
    progress: Callable[[Counts], object] = lambda _counts: None,
) -> Counts:
    """Answer an OpenAI batch file. Results are written as they come, which is not the order of the lines.

    Of a file no more is held than the lines that are being answered, and every `custom_id`.

    Args:
        lines: with their numbers; one JSON object each, in UTF-8, with `custom_id`, `method`, `url` and `body`.
        target: gets one JSON object a line: `id`, `custom_id`, `response`, `error`, and the fingerprint of its line.
        earlier: what it holds already; lines that are answered there are left out.
        progress: told with each piece of an answer and with each line.

    Returns:
        How many lines were answered and how many were not.
    """
    run = _Run(engine, target, earlier or Earlier(), progress)
    async with trio.open_nursery() as nursery:
        for number, line in lines:
            entry = run.open(number, line)
            if entry is not None:
                await run.places.acquire()
                nursery.start_soon(run.answer, entry)
    return run.counts


class _Run:
    """One pass through a batch file."""

    def __init__(self, engine: Engine, target: TextIO, earlier: Earlier, progress: Callable[[Counts], object]) -> None:
        self._engine = engine
        self._target = target
        self._earlier = earlier
        self._progress = progress
        self._taken: set[str] = set()
        self.counts = Counts()
        # Twice the seats: whoever leaves finds a successor waiting, and the queue stays short.
        self.places = trio.Semaphore(2 * engine.config.max_num_seqs)

    def open(self, number: int, line: bytes | None) -> _Entry | None:
        """What a line asks for; nothing where it is wrong itself, or has its answer from before."""
        try:
            entry = _read_entry(line, self._taken)
        except _WrongLineError as error:
            self._finish(_wrong(error, number), fingerprint(line))
            return None
        self._taken.add(entry.custom_id)
        if self._earlier.answers.get(entry.custom_id) == entry.fingerprint:
            self.counts.add_before()
            return None
        return entry

    async def answer(self, entry: _Entry) -> None:
        """Answer a line and write its result down."""
        try:
            result = await _answer(self._engine, entry, self._watch)
        finally:
            self.places.release()
        self._finish(result, entry.fingerprint)

    def _watch(self, delta: Delta) -> None:
        self.counts.num_tokens += len(delta.token_ids)
        self._progress(self.counts)

    def _finish(self, result: dict[str, Any], line: str | None) -> None:
        self._target.write(json.dumps({**result, FINGERPRINT: line}, ensure_ascii=False) + "\n")
        self._target.flush()
        self.counts.add(ok=result["error"] is None and result["response"]["status_code"] == 200)
        self._progress(self.counts)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One line of a batch file."""

    custom_id: str
    url: str
    body: dict[str, Any]
    fingerprint: str | None


class _WrongLineError(Exception):
    """A line that asks for nothing; `custom_id` is set where it has one."""

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


def _wrong(error: _WrongLineError, number: int) -> dict[str, Any]:
    """The result of a line that is wrong itself."""
    told = {"code": INVALID_LINE, "message": str(error), "line": number}
    return {"id": _make_id("batch_req"), "custom_id": error.custom_id, "response": None, "error": told}


async def _answer(engine: Engine, entry: _Entry, watch: Callable[[Delta], object]) -> dict[str, Any]:
    """The result of a line; what the route would refuse is its `response`, with the status that it would have.

    As over HTTP, a mistake of ours costs the one line that met it, and the log has it.
    """
    try:
        check_numbers(entry.body)
        job = plan_whole(engine, entry.url, entry.body)
        status, content = 200, await answer(engine, job, watch=watch)
    except Exception as error:
        if not isinstance(error, RelevoError):
            log.exception("line %r of the batch could not be answered", entry.custom_id)
        described = describe(error)
        status, content = described.status, described.body
    response = {"status_code": status, "request_id": _make_id("req"), "body": content}
    return {"id": _make_id("batch_req"), "custom_id": entry.custom_id, "response": response, "error": None}


def _read_entry(line: bytes | None, taken: set[str]) -> _Entry:
    if line is None:
        raise _WrongLineError(f"The line is longer than {MAX_LINE_BYTES >> 20} MiB.")
    try:
        entry = load_json_object(line, what="line")
    except InvalidRequestError as error:
        raise _WrongLineError(str(error)) from None
    custom_id, url, body = entry.get("custom_id"), entry.get("url"), entry.get("body")
    if not isinstance(custom_id, str):
        raise _WrongLineError("'custom_id' must be a string.")
    if custom_id in taken:
        raise _WrongLineError(f"The 'custom_id' {custom_id!r} is that of an earlier line.", custom_id)
    if entry.get("method", "POST") != "POST":
        raise _WrongLineError("'method' must be POST.", custom_id)
    if not isinstance(url, str) or url not in PLANS:
        raise _WrongLineError(f"'url' must be one of {', '.join(PLANS)}.", custom_id)
    if not isinstance(body, dict):
        raise _WrongLineError("'body' must be an object.", custom_id)
    return _Entry(custom_id, url, body, fingerprint(line))


def _make_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
