"""What may be asked of the live settings, checked: the body of a `PATCH /admin/config`."""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

from app.config import keys
from app.errors import ApiError
from engine.batching import POLICIES
from engine.config import MAX_TARGETS, SWITCHES, live_range
from engine.policy import ADMISSIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.config import Limits

    Value = bool | int | float | str

CHOICES: Final[dict[str, tuple[str | bool, ...]]] = {
    "policy": POLICIES,
    "admission": ADMISSIONS,
    **dict.fromkeys(SWITCHES, (True, False)),
}
KEYS: Final = (
    "policy",
    "admission",
    "max_num_seqs",
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
    "dynamic_preferred_size",
    "dynamic_max_queue_delay_seconds",
    "num_speculative_tokens",
    "max_waiting",
    "max_waiting_tokens",
    "slo_admission",
    "enable_prefix_caching",
    *MAX_TARGETS,
    "draining",
)
# What files call these settings.
SOURCES: Final = {
    ("background_" if key.section == "slo.background" else "") + key.name: key
    for key in keys()
    if key.section in ("scheduler", "slo", "slo.background")
}
# The words for 0, which files and flags take for these settings.
ABSENT: Final = {name: key.absent for name, key in SOURCES.items() if name in KEYS and key.absent}
# What a change goes back to with one word.
RESTORES: Final = ("previous", "start")
# No setting, but a deed: written down as the number of blocks that were cached.
FLUSH: Final = "flush_prefix_cache"
MAX_REASON_LENGTH: Final = 500
MAX_TTL_SECONDS: Final = 7 * 86_400.0
MAX_NAME_LENGTH: Final = 64  # of what is compared with the settings' names
MAX_GENERATION: Final = 1 << 53


class OutOfRangeError(ApiError):
    """A value that cannot be taken; nothing was changed."""

    def __init__(self, param: str, message: str, allowed: tuple[float, float] | None = None) -> None:
        super().__init__(422, f"'{param}' {message}", param=param, code="out_of_range")
        if allowed is not None:
            self.extra["range"] = list(allowed)


@dataclass(frozen=True, slots=True)
class Change:
    """What somebody wants.

    Attributes:
        values: new values by the name of the setting.
        reason: for the history.
        ttl_seconds: how long it holds; `None` is until it is changed again.
        restore: one of `RESTORES`: the values come from the history.
        flush_prefix_cache: forget what is cached, too.
        if_generation: only if this is still the generation.
        dry_run: only say what it would do.
    """

    values: dict[str, Value] = field(default_factory=dict)
    reason: str | None = None
    ttl_seconds: float | None = None
    restore: str | None = None
    flush_prefix_cache: bool = False
    if_generation: int | None = None
    dry_run: bool = False


def parse_change(body: Mapping[str, Any], limits: Limits, capacity: Limits) -> Change:
    """Check a body against what holds now, without changing anything; `null` means absent.

    Raises:
        OutOfRangeError: naming the key and what it takes.
    """
    values: dict[str, Value] = {}
    for name, value in body.items():
        if name in KEYS:
            if value is not None:
                values[name] = check_value(name, value, capacity)
        elif name not in _OTHERS:
            raise OutOfRangeError(name, f"is no live setting; {_hint(name)}")
    change = Change(values=values, **{name: check(body.get(name)) for name, check in _OTHERS.items()})
    if change.restore is not None and values:
        raise OutOfRangeError("restore", f"brings its own values; leave out {', '.join(values)}.")
    if change.ttl_seconds is not None and not values and change.restore is None:
        raise OutOfRangeError("ttl_seconds", "is how long a change holds, and no setting is named that changes.")
    asked = values.get("dynamic_preferred_size")
    shrink_batch(values, limits)
    seats = values.get("dynamic_preferred_size")
    if asked is not None and asked != seats:
        message = f"must not be above the seats, which are {seats}; 0 is as many as there are."
        raise OutOfRangeError("dynamic_preferred_size", message, (0, int(seats or 0)))
    return change


def check_value(name: str, value: object, capacity: Limits) -> Value:
    """A value of a live setting as it is kept.

    Raises:
        OutOfRangeError: it cannot be taken.
    """
    if name in SWITCHES:
        if not isinstance(value, bool):
            raise OutOfRangeError(name, "must be true or false.")
        return value
    if name in CHOICES:
        if not isinstance(value, str) or value not in CHOICES[name]:
            raise OutOfRangeError(name, f"must be one of {', '.join(map(str, CHOICES[name]))}.")
        return value
    least, most = live_range(name, capacity)
    word = ABSENT.get(name)
    if word is not None and value == word:
        return 0
    kinds, words = ((int, float), "number") if name.endswith("_seconds") else ((int,), "whole number")
    # `isinstance` alone would take true and false, which count as whole numbers.
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        or_else = f', or "{word}", which is 0' if word else ""
        raise OutOfRangeError(name, f"must be a {words} from {least} to {most:.12g}{or_else}.", (least, most))
    return float(value) if name.endswith("_seconds") else value


def shrink_batch(values: dict[str, Value], limits: Limits) -> None:
    """A batch is never larger than the seats there are: it shrinks with them."""
    seats = int(values.get("max_num_seqs", limits.max_num_seqs))
    if int(values.get("dynamic_preferred_size", limits.dynamic_preferred_size)) > seats:
        values["dynamic_preferred_size"] = seats


def _hint(name: str) -> str:
    """What somebody may have meant who wrote `name`; else all there is."""
    known = (*KEYS, *_OTHERS)
    nearest = get_close_matches(name[:MAX_NAME_LENGTH], known, 1)
    return f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(known)}."


def _check_reason(value: object) -> str | None:
    if value is not None and (not isinstance(value, str) or len(value) > MAX_REASON_LENGTH):
        raise OutOfRangeError("reason", f"must be a text of at most {MAX_REASON_LENGTH} characters.")
    return value or None


def _check_ttl(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 1 <= value <= MAX_TTL_SECONDS:
        top = int(MAX_TTL_SECONDS)
        raise OutOfRangeError("ttl_seconds", f"must be a number of seconds from 1 to {top}.", (1, top))
    return float(value)


def _check_restore(value: object) -> str | None:
    if value is not None and value not in RESTORES:
        raise OutOfRangeError("restore", f"must be one of {', '.join(RESTORES)}.")
    return None if value is None else str(value)


def _check_generation(value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_GENERATION:
        raise OutOfRangeError("if_generation", "must be the number of a generation.", (0, MAX_GENERATION))
    return value


def _check_flag(name: str, value: object) -> bool:
    if value is not None and not isinstance(value, bool):
        raise OutOfRangeError(name, "must be true or false.")
    return bool(value)


_OTHERS: Final[dict[str, Any]] = {
    "reason": _check_reason,
    "ttl_seconds": _check_ttl,
    "restore": _check_restore,
    "if_generation": _check_generation,
    FLUSH: lambda value: _check_flag(FLUSH, value),
    "dry_run": lambda value: _check_flag("dry_run", value),
}
