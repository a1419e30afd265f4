"""What the page of API keys shows."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from app.render import numbers

if TYPE_CHECKING:
    from collections.abc import Collection

    from app.config_schema import KeyLimits
    from app.keys import KeyRecord, Keyring

# Field of a limit to its title in the form, and to how it is said of a key that has it.
LIMIT_TITLES: Final = {
    "max_concurrent": "At once",
    "requests_per_minute": "Requests/min",
    "tokens_per_minute": "Tokens/min",
}
_LIMIT_WORDS: Final = {
    "max_concurrent": "{} at once",
    "requests_per_minute": "{} requests a minute",
    "tokens_per_minute": "{} tokens a minute",
}


def page_variables(
    keyring: Keyring, problem: str | None, unwritten: Collection[int], *, exposed: bool
) -> dict[str, Any]:
    """Everything the template needs.

    Args:
        problem: why no key can be made.
        unwritten: numbers of keys that were revoked, but not on the disk yet.
        exposed: the server listens beyond this machine.
    """
    entries = [_entry(keyring, record) for record in keyring]
    return {
        "keys": [entry for entry in reversed(entries) if not entry["revoked"]],
        "gone": [entry for entry in reversed(entries) if entry["revoked"]],
        "closed": keyring.is_closed,
        "usable": any(entry["valid"] for entry in entries),
        "exposed": exposed,
        "problem": problem,
        "unwritten": [record.name for record in keyring if record.key_id in unwritten],
        "limit_fields": LIMIT_TITLES.items(),
        "typed": {},
        "error": None,
        "made": None,
    }


def _entry(keyring: Keyring, record: KeyRecord) -> dict[str, Any]:
    return {
        "id": record.key_id,
        "name": record.name,
        "valid": keyring.is_valid(record),
        "created": _moment(record.created),
        "last_used": _moment(record.last_used),
        "revoked": _moment(record.revoked),
        "limits": " · ".join(_limits(record.limits)) or "no limits",
    }


def _limits(limits: KeyLimits) -> list[str]:
    values = {field: getattr(limits, field) for field in _LIMIT_WORDS}
    return [_LIMIT_WORDS[field].format(numbers.count(value)) for field, value in values.items() if value is not None]


def _moment(when: float | None) -> str | None:
    if when is None:
        return None
    moment = datetime.fromtimestamp(when, UTC)
    return f"{moment.day} {moment:%b %Y, %H:%M} UTC"
