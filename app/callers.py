"""Who asks, as far as the engine is concerned: whose turn it is counted as, which class of work, whose cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from app.keys import Keyring
from app.sharing import Sharing
from engine.errors import ConfigError

if TYPE_CHECKING:
    from app.config import Settings

CacheRoot = Callable[[str | None], tuple[str, str]]


def no_sharing_rules(salt: str | None) -> tuple[str, str]:
    """One user alone: only the salt counts."""
    return ("", salt or "")


@dataclass(frozen=True, slots=True)
class Caller:
    """One who may ask.

    Attributes:
        cache_root: from a body's `cache_salt` to where its chain in the prefix cache starts.
        key_name: name of the API key; empty without keys.
        key_identity: of the API key; another one than that of an earlier key of the same name.
        background: whether whatever it asks for is background work.
    """

    cache_root: CacheRoot = no_sharing_rules
    key_name: str = ""
    background: bool = False
    key_identity: str = ""


NOBODY: Final = Caller()


class Callers:
    """What the settings say about each API key.

    Args:
        keyring: the keys there are; those of the settings where it is not given.

    Raises:
        ConfigError: `background_keys`, `cache_sharing` or a section of limits names a key that does not exist.
    """

    def __init__(self, settings: Settings, keyring: Keyring | None = None) -> None:
        self._keyring = Keyring(settings) if keyring is None else keyring
        self._sharing = Sharing(settings, self._keyring)
        self._background = frozenset(settings.security.background_keys)
        for name in settings.security.background_keys:
            self._check_name(name, "security.background_keys")
        for name in settings.security_limits:
            self._check_name(name, f"[security.limits.{name}]")

    def of(self, who: str) -> Caller:
        """The caller of this name; what is not the name of a key is somebody on a server without keys."""
        record = self._keyring.get(who)
        return Caller(
            partial(self._sharing.root, who),
            "" if record is None else record.name,
            background=who in self._background or (record is not None and record.is_background),
            key_identity="" if record is None else record.identity,
        )

    def _check_name(self, name: str, where: str) -> None:
        names = self._keyring.names
        if name not in names:
            known = ", ".join(sorted(names)) or "none"
            raise ConfigError(f"{where} names the API key {name!r}, which is not in security.api_keys ({known}).")
