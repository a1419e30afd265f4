"""Who may read whose cached prompts. The server decides; a client can only ask to share with fewer (`cache_salt`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import ConfigError

if TYPE_CHECKING:
    from app.config import Settings


class Sharing:
    """Maps API keys to groups that share the prefix cache.

    A hit answers sooner, and so tells that somebody of the same group asked the same before.

    Raises:
        ConfigError: `cache_sharing` names a key that does not exist, or one in two groups.
    """

    def __init__(self, settings: Settings) -> None:
        names = [key.name for key in settings.security.api_keys]
        mode = settings.cache.cache_sharing
        if mode == "all" or (mode == "auto" and not names):
            self._groups = dict.fromkeys(names, "")
        elif mode in ("key", "auto"):
            self._groups = {name: name for name in names}
        else:
            self._groups = {name: name for name in names} | _parse_groups(mode, names)

    def root(self, who: str, salt: str | None) -> tuple[str, str]:
        """Where the chain of cached blocks starts for a request.

        Args:
            who: name of the API key; anything else where there are no keys.
            salt: the request's own `cache_salt`.
        """
        return (self._groups.get(who, ""), salt or "")


def _parse_groups(text: str, names: list[str]) -> dict[str, str]:
    """`"alice+bob, carol+dave"` as key name to group."""
    groups: dict[str, str] = {}
    for group in filter(None, (part.strip() for part in text.split(","))):
        for name in (part.strip() for part in group.split("+")):
            if name not in names:
                known = ", ".join(names) or "none"
                raise ConfigError(
                    f"cache.cache_sharing names the API key {name!r}, which is not in security.api_keys "
                    f"({known}); it can be auto, all, key, or groups like alice+bob."
                )
            if name in groups:
                raise ConfigError(f"cache.cache_sharing names the API key {name!r} twice.")
            groups[name] = group
    return groups
