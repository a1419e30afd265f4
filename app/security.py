"""Who may do what. The matched route is the authorised one; what no rule names belongs to the operator.

    area        needs
    OPEN        nothing: probes, static files, the login page
    API         an API key, where there are any or were; else a peer on this machine
    OPERATOR    the admin token, where there is one; else a peer on this machine

A server that listens beyond loopback without keys or token (`--insecure`) lets everyone in: that was its owner's word.
A key that the server has lent to a helper of its own opens the API and those of the operator's routes that it needs.
"""

from __future__ import annotations

import hmac
import time
from enum import Enum
from hashlib import sha256
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from app.config import is_loopback
from app.errors import ApiError
from app.keys import Digests, Keyring, cookie_for

if TYPE_CHECKING:
    from quart import Request

    from app.config import Settings

KEY_COOKIE: Final = "relevo_key"
ADMIN_COOKIE: Final = "relevo_admin"
_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
PROBES: Final = frozenset({"/healthz", "/readyz", "/health", "/version", "/load", "/get_load"})
_OPEN: Final = PROBES | {"/login", "/logout"}
_API: Final = frozenset({"/", "/chat/many", "/chat/seats", "/docs", "/openapi.json", "/tokenize", "/detokenize"})
# What helpers of the server need: they measure, and may tune.
_LENT: Final = frozenset({"/metrics", "/admin/config", "/admin/audit"})
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


class Gate:
    """Judges requests by key, token, cookie or peer.

    Args:
        keyring: the API keys; those of the settings where it is not given.
    """

    def __init__(self, settings: Settings, keyring: Keyring | None = None) -> None:
        self._keyring = Keyring(settings) if keyring is None else keyring
        token = settings.security.admin_token
        self._admin = None if token is None else Digests.of(token.get_secret_value())
        self._exposed = not is_loopback(settings.server.host)
        self._began_closed = self._keyring.is_closed

    def judge(self, request: Request, area: Area, *, may_use_cookie: bool = True) -> str:
        """Who asks, for the history: `admin`, the name of a key, or the peer's address.

        Args:
            may_use_cookie: not for a page of another site, which has to bring a key itself.

        Raises:
            ApiError: 401 when a key or token would help, 403 when only being on this machine would.
        """
        peer = peer_address(request)
        if area is Area.OPEN:
            return peer
        if (lent := self._find_lent(request, area)) is not None:
            return lent
        if self._keyring.is_closed if area is Area.API else self._admin is not None:
            return self._judge_secret(request, area, may_use_cookie)
        # A server that began with keys does not open itself to the world when the last one is gone.
        is_open = self._exposed and not (area is Area.API and self._began_closed)
        if is_open or is_local(request):
            return peer
        raise ApiError(403, "This is open to this machine only.", code="not_local")

    def login(self, token: str) -> dict[str, str]:
        """The cookies that stand for `token`; none when it is neither the admin token nor a key."""
        given = token.strip()
        found = {}
        if self._find(given.encode(), Area.OPERATOR) is not None:
            found[ADMIN_COOKIE] = cookie_for(given)
        if self._find(given.encode(), Area.API) is not None:
            found[KEY_COOKIE] = cookie_for(given)
        return found

    def _judge_secret(self, request: Request, area: Area, may_use_cookie: bool) -> str:
        scheme, sent = _authorization(request)
        found = None
        if scheme == "bearer":
            found = self._find(sent, area)
        elif not scheme and area is Area.API and "X-Api-Key" in request.headers:
            # How clients of Anthropic's API send it.
            found = self._find(_header_bytes(request.headers["X-Api-Key"].strip()), area)
        elif not scheme and may_use_cookie:
            cookie = request.cookies.get(KEY_COOKIE if area is Area.API else ADMIN_COOKIE, "")
            found = self._find(_header_bytes(cookie), area, is_cookie=True)
        if found is None:
            what = "API key" if area is Area.API else "admin token"
            code = "invalid_api_key" if area is Area.API else "invalid_admin_token"
            raise ApiError(401, f"Send a valid {what} as 'Authorization: Bearer …'.", code=code)
        return found

    def _find(self, sent: bytes, area: Area, *, is_cookie: bool = False) -> str | None:
        """The name of what was sent: of a key, or `admin`."""
        if area is Area.API:
            record = self._keyring.find(sent, time.time(), is_cookie=is_cookie)
            return None if record is None else record.name
        known = self._admin
        if known is None:
            return None
        digest = known.cookie if is_cookie else known.key
        return "admin" if hmac.compare_digest(sha256(sent).digest(), digest) else None

    def _find_lent(self, request: Request, area: Area) -> str | None:
        """The name of the key that the server has lent, where it was sent and opens this."""
        lent, (scheme, sent) = self._keyring.lent, _authorization(request)
        if lent is None or scheme != "bearer" or not hmac.compare_digest(sha256(sent).digest(), lent.digests.key):
            return None
        rule = request.url_rule
        return lent.name if area is Area.API or (rule is not None and rule.rule in _LENT) else None


def _authorization(request: Request) -> tuple[str, bytes]:
    """The scheme of the header of that name, in small letters, and what follows it."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    return scheme.lower(), _header_bytes(given.strip())


def _header_bytes(text: str) -> bytes:
    """The bytes of a header's text."""
    return text.encode("latin-1", "replace")  # how they became text


def is_cross_site(request: Request) -> bool:
    """Whether another site's page makes the request, as far as its browser tells."""
    origin = request.headers.get("Origin")
    foreign = origin is not None and not _same_host(origin, request.headers.get("Host", ""))
    return foreign or request.headers.get("Sec-Fetch-Site", "").lower() == "cross-site"


def refuse_cross_site(request: Request) -> None:
    """Raise 403 for a state-changing request that another site's page makes in its visitor's name."""
    if request.method not in _SAFE_METHODS and is_cross_site(request):
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
