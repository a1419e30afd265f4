"""Who asks, as far as the engine is concerned: whose turn it is counted as, which class of work, whose cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

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
        background: whether whatever it asks for is background work.
    """

    cache_root: CacheRoot = no_sharing_rules
    key_name: str = ""
    background: bool = False


NOBODY: Final = Caller()


class Callers:
    """What the settings say about each API key.

    Raises:
        ConfigError: `background_keys` or `cache_sharing` names a key that does not exist.
    """

    def __init__(self, settings: Settings) -> None:
        security = settings.security
        self._sharing = Sharing(settings)
        self._names = frozenset(key.name for key in security.api_keys)
        self._background = frozenset(security.background_keys)
        for name in security.background_keys:
            if name not in self._names:
                known = ", ".join(sorted(self._names)) or "none"
                raise ConfigError(
                    f"security.background_keys names the API key {name!r}, which is not in security.api_keys ({known})."
                )

    def of(self, who: str) -> Caller:
        """The caller of this name; what is not the name of a key is somebody on a server without keys."""
        return Caller(
            partial(self._sharing.root, who), who if who in self._names else "", background=who in self._background
        )
