"""The API keys: those of the configuration and those made while the server runs, and what is known about each.

Of a key nothing is kept but digests. One round of SHA-256 is enough for them: slow hashing protects words that people
choose, and a key made here is 256 random bits, which nobody guesses however fast. (A key of the configuration stands
in plain text there anyway.) The digest of the login cookie is another one, so that who reads the digests cannot make
a cookie of them either.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from app.config_schema import KeyLimits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from app.config import Settings
    from engine.handle import GenerationRequest

SECRET_PREFIX: Final = "sk-relevo-"  # noqa: S105 - what scanners for leaked secrets look for
SECRET_BYTES: Final = 32
NO_LIMITS: Final = KeyLimits()


@dataclass(frozen=True, slots=True)
class Digests:
    """What is kept of a secret: enough to recognise it and its cookie, not enough to make either."""

    key: bytes
    cookie: bytes

    @classmethod
    def of(cls, secret: str) -> Digests:
        """Of a secret that was chosen or made."""
        return cls(sha256(secret.encode()).digest(), sha256(cookie_for(secret).encode()).digest())


@dataclass(slots=True)
class KeyRecord:
    """One API key.

    Attributes:
        name: what it goes by; of the keys that are valid each has another.
        digests: how it is recognised.
        limits: how much may be asked for with it.
        key_id: number in the database; `None` for a key of the configuration.
        created: seconds since the epoch; `None` for a key of the configuration.
        last_used: seconds since the epoch; `None` where it was not used, or not since the start.
        revoked: seconds since the epoch, once it is.
        is_background: whether whatever is asked with it is background work.
    """

    name: str
    digests: Digests = field(repr=False)
    limits: KeyLimits = NO_LIMITS
    key_id: int | None = None
    created: float | None = None
    last_used: float | None = None
    revoked: float | None = None
    is_background: bool = False

    @property
    def identity(self) -> str:
        """Another one for each key, also for two that had the same name one after the other."""
        return f"{self.key_id or 0} {self.name}"


class Keyring:
    """Every key there is. It is looked at with each request and changed by `KeyService` alone.

    A server without any key is open to its machine. With the first key it is closed, and it stays closed when that key
    is revoked: taking a right away must not give one to everybody else. It opens again when the revoked are forgotten.

    Attributes:
        lent: a key that the server has lent itself, or `None`.
    """

    def __init__(self, settings: Settings) -> None:
        self._limits = settings.security_limits
        self._configured = [
            KeyRecord(entry.name, Digests.of(entry.key.get_secret_value()), self._limits.get(entry.name, NO_LIMITS))
            for entry in settings.security.api_keys
        ]
        self._made: list[KeyRecord] = []
        self._revoked: dict[int, float] = {}
        self._by_name = {record.name: record for record in self._configured}
        self.lent: KeyRecord | None = None

    def __iter__(self) -> Iterator[KeyRecord]:
        yield from self._configured
        yield from self._made

    def __len__(self) -> int:
        return len(self._configured) + len(self._made)

    @property
    def is_closed(self) -> bool:
        """Whether a key is needed."""
        return len(self) > 0

    @property
    def names(self) -> frozenset[str]:
        """Of all keys, the revoked too: a setting may still name them."""
        return frozenset(record.name for record in self)

    def get(self, name: str) -> KeyRecord | None:
        """The valid key of that name."""
        return self._by_name.get(name)

    def find(self, secret: bytes, now: float, *, is_cookie: bool = False) -> KeyRecord | None:
        """The valid key that was sent, or whose cookie was, marked as used at `now` (seconds since the epoch)."""
        digest = sha256(secret).digest()
        # Every one is compared, so that the time taken tells nothing.
        found = None
        for record in self._by_name.values():
            if hmac.compare_digest(digest, record.digests.cookie if is_cookie else record.digests.key):
                found = record
        if found is not None:
            found.last_used = now
        return found

    def set_made(self, records: Iterable[KeyRecord]) -> None:
        """Take over the keys of the database; what the file says about limits goes before what was said on the page."""
        used = {record.key_id: record.last_used for record in self._made}
        self._made = list(records)
        for record in self._made:
            record.limits = self._limits.get(record.name, record.limits)
            record.last_used = max(record.last_used or 0, used.get(record.key_id) or 0) or None
        self._index()

    def revoke(self, key_id: int, now: float) -> None:
        """Refuse that key from now on, whatever the database says."""
        self._revoked.setdefault(key_id, now)
        self._index()

    def lend(self, name: str, *, is_background: bool = False) -> str:
        """Make a key that lives in memory until it is taken back, for a helper of the server; gives the secret.

        It is not among the keys that there are: it does not close the API and is not listed. One at a time.
        """
        secret = make_secret()
        self.lent = KeyRecord(name, Digests.of(secret), is_background=is_background)
        self._index()
        return secret

    def is_own(self, request: GenerationRequest) -> bool:
        """Whether a request came with the key that is lent, if one is."""
        return self.lent is not None and request.key == self.lent.identity

    def take_back(self) -> None:
        """Let the lent key open nothing any more."""
        self.lent = None
        self._index()

    def is_valid(self, record: KeyRecord) -> bool:
        """Whether it opens anything; one whose name the configuration gave to another key does not."""
        return self._by_name.get(record.name) is record

    def _index(self) -> None:
        for record in self._made:
            if record.revoked is None and record.key_id is not None:
                record.revoked = self._revoked.get(record.key_id)
        valid = [record for record in self._made if record.revoked is None]
        lent = () if self.lent is None else (self.lent,)
        self._by_name = {record.name: record for record in (*lent, *valid, *self._configured)}


def make_secret() -> str:
    """A fresh key: 256 random bits, written so that it can stand in a header, a file or an address."""
    return SECRET_PREFIX + secrets.token_urlsafe(SECRET_BYTES)


def cookie_for(secret: str) -> str:
    """The cookie that stands for a secret: it proves knowledge of it without holding it, and outlives a restart."""
    return hmac.new(secret.encode(), b"relevo page login", "sha256").hexdigest()
