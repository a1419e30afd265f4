"""Has a grammar tried in a process of its own (see `probe`): what is wrong with it, and how llguidance takes it."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Final, NamedTuple

import llguidance
import trio

from engine.errors import UnavailableError
from engine.grammar import probe
from engine.grammar.matcher import shorten

log = logging.getLogger("relevo.engine")

# On the clock on the wall; of the processor's time the process takes `probe.CPU_SECONDS` at most.
TRIAL_SECONDS: Final = 30.0
TOO_LARGE: Final = "compiling it takes too much time or memory"
RETRY_AFTER_SECONDS: Final = 5


class Verdict(NamedTuple):
    """What came of a grammar.

    Attributes:
        fault: what is wrong with it; empty where nothing is.
        source: the grammar without GBNF.
    """

    fault: str
    source: str


async def try_it(source: str) -> Verdict:
    """Try a grammar in another process.

    Args:
        source: JSON, `{"grammars": […]}` as llguidance takes it, but that grammars may be GBNF.

    Raises:
        UnavailableError: the process could not be started, or the machine was too busy for it. That says nothing about
            the grammar.
    """
    data = source.encode()
    try:
        with trio.fail_after(TRIAL_SECONDS):
            done = await trio.run_process(_command(), stdin=data, capture_stdout=True, capture_stderr=True, check=False)
    except OSError as error:
        raise _unavailable(f"no process can be started: {error}") from error
    except trio.TooSlowError as error:
        raise _unavailable(f"a process that tries one did not end within {TRIAL_SECONDS:g} s") from error
    ready, _, answer = done.stdout.decode(errors="replace").partition("\n")
    if ready != probe.READY:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2][:300]
        raise _unavailable(f"the process that tries one ended with {done.returncode} before it began: {last}")
    if done.returncode:
        return Verdict(TOO_LARGE, source)
    found = json.loads(answer)
    return Verdict(shorten(found["fault"]), found["source"] or source)


def _command() -> list[str]:
    """Isolated: nothing is imported but Python's own modules, and llguidance from where this process has it.

    So it does not matter how that was installed, nor what lies in the working directory.
    """
    place = Path(llguidance.__file__).absolute().parents[1]
    return [sys.executable, "-I", "-S", str(Path(probe.__file__).absolute()), str(place)]


def _unavailable(why: str) -> UnavailableError:
    """Told to the operator in full; the caller can do no more than come back."""
    log.error("grammars cannot be tried: %s", why)
    message = (
        "The server cannot check a grammar of this kind right now. "
        f"Try again in {RETRY_AFTER_SECONDS} s; its operator finds the cause in the log."
    )
    return UnavailableError(message, retry_after_seconds=RETRY_AFTER_SECONDS)
