"""What an earlier run of a batch file has left in its output: what still holds is kept, the rest is taken out."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# The member of a result that tells which line, letter by letter, it belongs to.
FINGERPRINT: Final = "line_sha256"


@dataclass(slots=True)
class Earlier:
    """The results of an earlier run.

    Attributes:
        answers: `custom_id` of every line that was answered and is the same still, to its fingerprint.
        num_failed: lines that failed; they are to be tried again.
        num_changed: lines that were answered and read differently now; they are to be answered anew.
    """

    answers: dict[str, str] = field(default_factory=dict)
    num_failed: int = 0
    num_changed: int = 0


def fingerprint(line: bytes | None) -> str | None:
    """Tells one line of a batch file from every other; `None` for one that was not read to its end."""
    return None if line is None else sha256(line.strip()).hexdigest()


def read_earlier(path: Path, wanted: Mapping[str, str | None]) -> Earlier:
    """What is in the output already.

    Results that do not hold any more leave the file, and so does a last line that was cut off. Those of lines that are
    not in the input are left alone.

    Args:
        wanted: every `custom_id` of the input, to the fingerprint of its line.

    Raises:
        ConfigError: the file holds something else, and is as it was.
    """
    earlier = Earlier()
    dropped: set[int] = set()
    end, is_cut = 0, False
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            is_cut = not line.endswith(b"\n")
            if is_cut:
                break
            end += len(line)
            try:
                holds = _note(earlier, json.loads(line), wanted)
            except (ValueError, TypeError, KeyError):
                message = f"{path}: line {number} is no result of a batch; name another --output, or --restart."
                raise ConfigError(message) from None
            if not holds:
                dropped.add(number)
    if is_cut:
        os.truncate(path, end)
    if dropped:
        _rewrite(path.resolve(), dropped)
    return earlier


def _note(earlier: Earlier, result: dict[str, Any], wanted: Mapping[str, str | None]) -> bool:
    """Whether a result still holds."""
    custom_id, error, response, line = (result[name] for name in ("custom_id", "error", "response", FINGERPRINT))
    answered = error is None and response["status_code"] == 200
    if custom_id is not None and custom_id not in wanted:
        return True
    if not answered:
        earlier.num_failed += 1
    elif wanted[custom_id] != line:
        earlier.num_changed += 1
    else:
        earlier.answers[custom_id] = line
        return True
    return False


def _rewrite(path: Path, dropped: set[int]) -> None:
    """Write the file anew without some of its lines. Whatever happens meanwhile, it is the old one or the new one."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with path.open("rb") as old, fresh.open("xb") as new:
            new.writelines(line for number, line in enumerate(old, 1) if number not in dropped)
        shutil.copymode(path, fresh)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
