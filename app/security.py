"""Who may do what. The matched route is the authorised one; what no rule names belongs to the operator.

    area        needs
    OPEN        nothing: probes, static files, the login page
    API         an API key, where there are any; else a peer on this machine
    OPERATOR    the admin token, where there is one; else a peer on this machine

A server that listens beyond loopback without keys or token (`--insecure`) lets everyone in: that was its owner's word.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from enum import Enum
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from app.api.errors import ApiError
from app.config import is_loopback

if TYPE_CHECKING:
    from quart import Request

    from app.config import Settings

KEY_COOKIE: Final = "relevo_key"
ADMIN_COOKIE: Final = "relevo_admin"
_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_OPEN: Final = frozenset({"/healthz", "/readyz", "/health", "/version", "/load", "/get_load", "/login", "/logout"})
_API: Final = frozenset({"/", "/tokenize", "/detokenize"})
# A proxy on this machine passes on the whole world: with one of these the peer is not who asks.
_FORWARDED: Final = ("Forwarded", "X-Forwarded-For", "X-Real-Ip", "X-Forwarded-Host", "Via")


class Area(Enum):
    """What a route belongs to."""

    OPEN = "open"
    API = "api"
    OPERATOR = "operator"


def area_of(rule: str) -> Area:
    """The area of a matched route, by its rule (`/v1/models/<path:name>`), never by the path as it was written."""
    if rule in _OPEN or rule.startswith("/static/"):
        return Area.OPEN
    if rule in _API or rule.startswith("/v1/"):
        return Area.API
    return Area.OPERATOR


@dataclass(frozen=True, slots=True)
class _Secret:
    name: str
    value: bytes
    cookie: str


class Gate:
    """Judges requests by key, token, cookie or peer."""

    def __init__(self, settings: Settings) -> None:
        security = settings.security
        self._keys = tuple(_secret(entry.name, entry.key.get_secret_value()) for entry in security.api_keys)
        token = security.admin_token
        self._admin = None if token is None else _secret("admin", token.get_secret_value())
        self._exposed = not is_loopback(settings.server.host)

    def judge(self, request: Request, area: Area) -> str:
        """Who asks, for the history: `admin`, the name of a key, or the peer's address.

        Raises:
            ApiError: 401 when a key or token would help, 403 when only being on this machine would.
        """
        peer = peer_address(request)
        if area is Area.OPEN:
            return peer
        secrets = self._secrets(area)
        if secrets:
            return self._judge_secret(request, secrets, area)
        if self._exposed or is_local(request):
            return peer
        raise ApiError(403, "This is open to this machine only.", code="not_local")

    def login(self, token: str) -> dict[str, str]:
        """The cookies that stand for `token`; none when it is neither the admin token nor a key."""
        given = token.strip().encode()
        cookies = {}
        if self._admin is not None and hmac.compare_digest(given, self._admin.value):
            cookies[ADMIN_COOKIE] = self._admin.cookie
        for key in self._keys:
            if hmac.compare_digest(given, key.value):
                cookies[KEY_COOKIE] = key.cookie
        return cookies

    def _secrets(self, area: Area) -> tuple[_Secret, ...]:
        if area is Area.API:
            return self._keys
        return () if self._admin is None else (self._admin,)

    def _judge_secret(self, request: Request, secrets: tuple[_Secret, ...], area: Area) -> str:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        found = None
        if scheme.lower() == "bearer":
            found = _find(given.strip(), secrets, "value")
        elif not scheme:
            cookie = request.cookies.get(KEY_COOKIE if area is Area.API else ADMIN_COOKIE, "")
            found = _find(cookie, secrets, "cookie")
        if found is None:
            what = "API key" if area is Area.API else "admin token"
            code = "invalid_api_key" if area is Area.API else "invalid_admin_token"
            raise ApiError(401, f"Send a valid {what} as 'Authorization: Bearer …'.", code=code)
        return found.name


def _secret(name: str, value: str) -> _Secret:
    # The cookie proves knowledge of the secret without holding it, and still stands after a restart.
    return _Secret(name, value.encode(), hmac.new(value.encode(), b"relevo page login", "sha256").hexdigest())


def _find(given: str, secrets: tuple[_Secret, ...], attribute: str) -> _Secret | None:
    """The secret that was given. Every one is compared, so that the time taken tells nothing."""
    found = None
    offered = given.encode("latin-1", "replace")  # how header bytes became text
    for secret in secrets:
        known = secret.value if attribute == "value" else secret.cookie.encode()
        if hmac.compare_digest(offered, known):
            found = secret
    return found


def refuse_cross_site(request: Request) -> None:
    """Raise 403 for a state-changing request that another site's page makes in its visitor's name."""
    if request.method in _SAFE_METHODS:
        return
    origin = request.headers.get("Origin")
    foreign = origin is not None and not _same_host(origin, request.headers.get("Host", ""))
    if foreign or request.headers.get("Sec-Fetch-Site", "").lower() == "cross-site":
        raise ApiError(403, "Pages of other sites may not do this.", code="cross_site")


def _same_host(origin: str, host: str) -> bool:
    """Whether a page of `origin` was served under `host`; a proxy may have taken the TLS off, so the port decides."""
    try:
        page = urlsplit(origin)
        own = urlsplit(f"//{host}")
        default = {"http": 80, "https": 443}.get(page.scheme)
        return (
            default is not None
            and page.hostname is not None
            and page.hostname == own.hostname
            and (page.port or default) == (own.port or default)
        )
    except ValueError:
        return False


def peer_address(request: Request) -> str:
    """Address of the other end of the connection, from the socket and not from any header."""
    client = request.scope.get("client")
    return str(client[0]) if client else "unknown"


def is_local(request: Request) -> bool:
    """Whether the request comes from this machine and was addressed to it by one of its own names.

    The name matters: a page of another site can point its own name at 127.0.0.1 and then read what it likes.
    """
    try:
        peer = ip_address(peer_address(request))
    except ValueError:
        return False
    if isinstance(peer, IPv6Address) and peer.ipv4_mapped is not None:
        peer = peer.ipv4_mapped
    if not peer.is_loopback or any(name in request.headers for name in _FORWARDED):
        return False
    host = request.headers.get("Host", "")
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return not host or (name is not None and (is_loopback(name) or name.endswith(".localhost")))


def local_path(target: str) -> str:
    """`target` where it is a path on this server, else `/`: a login must not lead elsewhere."""
    plain = target.isprintable() and "\\" not in target
    return target if plain and target.startswith("/") and not target.startswith("//") else "/"
