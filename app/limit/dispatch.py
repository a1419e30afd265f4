"""Starts the generator as a process of its own, and reads what it tells."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from app.limit.children import end
from app.limit.exchange import Answer
from engine.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

COMMAND: Final = (sys.executable, "-m", "app.limit.generator")
SCRAPE_SECONDS: Final = 1.0
GRACE_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Planned:
    """One request to be sent.

    Attributes:
        request: the bytes of it, as text.
        due: seconds from the start; without meaning in a closed loop.
        first_within, end_within: targets for its first text and its end, in seconds; `None` where there is none.
        work_class: index of its class of work.
    """

    request: str = field(repr=False)
    due: float = 0.0
    first_within: float | None = None
    end_within: float | None = None
    work_class: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """What the generator is to do.

    Attributes:
        host, port, tls: of the server.
        planned: in the order in which they are sent.
        counted: the first that counts, and the one after the last. The job is over when these have ended.
        deadline: seconds from when a request is due; then it is given up.
        allowed_late: for each class of work, how many counted requests may miss a target before the run is lost.
        allowed_errors: how many of all may fail before it is.
        streams: of a closed loop; 0 sends each request when it is due.
        seconds: how long a closed loop lasts.
        scrape: the request for the server's metrics, once a second; empty asks for none.
    """

    host: str
    port: int
    tls: bool
    planned: Sequence[Planned] = field(repr=False)
    counted: tuple[int, int]
    deadline: float
    allowed_late: tuple[float, ...] = (float("inf"),)
    allowed_errors: float = float("inf")
    streams: int = 0
    seconds: float = 0.0
    scrape: str = field(default="", repr=False)

    def as_json(self) -> dict[str, Any]:
        """What the process reads."""
        return {
            "host": self.host,
            "port": self.port,
            "tls": self.tls,
            "calls": [
                {
                    "request": planned.request,
                    "due": planned.due,
                    "within": (planned.first_within, planned.end_within),
                    "class": planned.work_class,
                }
                for planned in self.planned
            ],
            "counted": self.counted,
            "deadline": self.deadline,
            "allowed_late": self.allowed_late,
            "allowed_errors": self.allowed_errors,
            "streams": self.streams,
            "seconds": self.seconds,
            "scrape": {"request": self.scrape, "every": SCRAPE_SECONDS} if self.scrape else None,
        }


@dataclass(frozen=True, slots=True)
class Told:
    """What came of a job. Times are seconds from its start.

    Attributes:
        answers: one for each planned request, in their order; one that was never sent has `sent` 0.
        scrapes: when the server's metrics were asked for, and the text; empty where none came.
        stopped_at: when it was ended before its end, or `None`.
        wall_seconds, cpu_seconds: of the generator while requests ran.
    """

    answers: tuple[Answer, ...]
    scrapes: tuple[tuple[float, str], ...]
    stopped_at: float | None
    wall_seconds: float
    cpu_seconds: float


def run_job(job: Job, report: Callable[[int], object] = lambda _ended: None) -> Told:
    """Run a job in a process that is gone afterwards, whatever happens.

    Args:
        report: told now and then how many of the counted requests have ended.

    Raises:
        EngineError: the process ended without telling anything.
    """
    # In a session of its own, the key that interrupts does not reach it: it ends with its standard input.
    process = subprocess.Popen(  # noqa: S603 (no word of it comes from outside)
        COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    told: dict[str, Any] | None = None
    try:
        with suppress(BrokenPipeError):  # what it had to say about that stands on stderr
            process.stdin.write(json.dumps(job.as_json()) + "\n")
            process.stdin.flush()
        for line in process.stdout:
            said = json.loads(line)
            if told := said.get("told"):
                break
            report(said["ended"])
    finally:
        with suppress(BrokenPipeError):
            process.stdin.close()
        end(process, GRACE_SECONDS)
        process.stdout.close()
    if told is None:
        raise EngineError(f"The process that sends requests ended with {process.returncode} before it told anything.")
    answers = tuple([Answer(**answer) for answer in told.pop("answers")])
    scrapes = tuple([(float(at), str(text)) for at, text in told.pop("scrapes")])
    return Told(answers, scrapes, **told)
