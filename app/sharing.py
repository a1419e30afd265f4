"""Who may read whose cached prompts. The server decides; a client can only ask to share with fewer (`cache_salt`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.keys import Keyring
from engine.errors import ConfigError

if TYPE_CHECKING:
    from app.config import Settings


class Sharing:
    """Maps API keys to groups that share the prefix cache.

    A hit answers sooner, and so tells that somebody of the same group asked the same before.

    Args:
        keyring: the keys there are; those of the settings where it is not given.

    Raises:
        ConfigError: `cache_sharing` names a key that does not exist, or one in two groups.
    """

    def __init__(self, settings: Settings, keyring: Keyring | None = None) -> None:
        self._keyring = Keyring(settings) if keyring is None else keyring
        mode = settings.cache.cache_sharing
        self._all_share = mode == "all"
        self._groups = {} if mode in ("all", "key", "auto") else _parse_groups(mode, self._keyring.names)

    def root(self, who: str, salt: str | None) -> tuple[str, str]:
        """Where the chain of cached blocks starts for a request.

        Args:
            who: name of the API key; anything else where there are no keys.
            salt: the request's own `cache_salt`.
        """
        record = self._keyring.get(who)
        if record is None or self._all_share:
            return "", salt or ""
        # A new key has nothing to do with an old one of the same name.
        return self._groups.get(who, record.identity), salt or ""


def _parse_groups(text: str, names: frozenset[str]) -> dict[str, str]:
    """`"alice+bob, carol+dave"` as key name to group."""
    groups: dict[str, str] = {}
    for group in filter(None, (part.strip() for part in text.split(","))):
        for name in (part.strip() for part in group.split("+")):
            if name not in names:
                known = ", ".join(sorted(names)) or "none"
                raise ConfigError(
                    f"cache.cache_sharing names the API key {name!r}, which is not in security.api_keys "
                    f"({known}); it can be auto, all, key, or groups like alice+bob."
                )
            if name in groups:
                raise ConfigError(f"cache.cache_sharing names the API key {name!r} twice.")
            groups[name] = f"group {group}"
    return groups
