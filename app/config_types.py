"""What a setting may be where a plain type does not say it: sizes, secrets, keys, names, origins."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, SecretStr

# A scheme, a name or an address, perhaps a port. Programs with a built-in browser have schemes of their own.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:]+\]|[^\s/:?#@*\[\]]+)(:[0-9]{1,5})?")
_UNITS = {"B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def _parse_bytes(value: object) -> object:
    """Turn `"2GiB"` into bytes; leave the rest to the type check."""
    if not isinstance(value, str):
        return value
    text = value.strip().upper().replace(" ", "")
    number = text.rstrip("BIKMGT")
    try:
        return int(float(number) * _UNITS[text[len(number) :] or "B"])
    except (KeyError, ValueError, OverflowError):
        raise ValueError('bytes, or a size like "2GiB"') from None


def _strip(value: object) -> object:
    """Secrets that are mounted as files end in a line end, which no header can carry; an empty one is none."""
    text = value.get_secret_value() if isinstance(value, SecretStr) else value
    return (text.strip() or None) if isinstance(text, str) else value


def _parse_keys(value: object) -> object:
    """Turn `name=key` entries, a list or one comma-separated string, into `ApiKey`s."""
    entries = value.split(",") if isinstance(value, str) else value
    if not isinstance(entries, (list, tuple)):
        return value
    keys = [_parse_key(part) for entry in entries for part in (entry.split(",") if isinstance(entry, str) else [entry])]
    found = tuple(key for key in keys if key is not None)
    if len({key.name for key in found}) < len(found):
        raise ValueError("every name only once")
    return found


def _parse_key(entry: object) -> ApiKey | None:
    if isinstance(entry, ApiKey):
        return entry
    name, _, key = entry.partition("=") if isinstance(entry, str) else ("", "", "")
    if not name.strip() and not key.strip() and isinstance(entry, str) and "=" not in entry:
        return None
    if not name.strip() or not name.strip().isprintable() or not key.strip():
        raise ValueError("entries of the form name=key, with a name that can be shown")
    return ApiKey(name.strip(), SecretStr(key.strip()))


def _parse_names(value: object) -> object:
    """Turn a list or one comma-separated string into names."""
    entries = value.split(",") if isinstance(value, str) else value
    if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, str) for entry in entries):
        return value
    return tuple(name.strip() for entry in entries for name in entry.split(",") if name.strip())


def _parse_origins(value: object) -> object:
    """Turn a list or one comma-separated string into origins, spelled as browsers spell them."""
    names = _parse_names(value)
    if not isinstance(names, tuple):
        return value
    if "*" in names and len(names) > 1:
        raise ValueError('a list of origins, or "*" alone')
    return tuple(_parse_origin(name) for name in names)


def _parse_origin(text: str) -> str:
    """One origin in lower case, without the port that its scheme has anyway."""
    origin = text.lower()
    if text == "*":
        return text
    if not _ORIGIN.fullmatch(origin):
        raise ValueError('origins like "https://app.example.org" or "http://localhost:3000", without a path, or "*"')
    scheme, _, host = origin.partition("://")
    return f"{scheme}://{host.removesuffix({'http': ':80', 'https': ':443'}.get(scheme, ' '))}"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that may use `/v1`, and the name it goes by in logs and limits."""

    name: str
    key: SecretStr


Secret = Annotated[SecretStr | None, BeforeValidator(_strip)]
Bytes = Annotated[int, BeforeValidator(_parse_bytes)]
ApiKeys = Annotated[tuple[ApiKey, ...], BeforeValidator(_parse_keys)]
Names = Annotated[tuple[str, ...], BeforeValidator(_parse_names)]
Origins = Annotated[tuple[str, ...], BeforeValidator(_parse_origins)]
