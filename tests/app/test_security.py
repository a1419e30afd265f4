"""Who may: by peer, by key, by token, by cookie, and never for a page of another site."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from app.errors import ApiError
from app.security import Area, Gate, area_of, is_local, local_path, refuse_cross_site
from tests.app.serving import CHAT, Server, chat_body, make_settings, open_server

KEY, TOKEN = "sk-one", "t0ken"
SECURITY: dict[str, Any] = {"api_keys": [f"me={KEY}", "you=sk-två"], "admin_token": TOKEN}
OPERATOR_PATHS = ("/ops", "/ops/stats.json", "/admin", "/admin/config", "/admin/audit", "/metrics")
OPEN_PATHS = ("/healthz", "/readyz", "/health", "/version", "/load", "/get_load", "/login")


class FakeRequest:
    """What the rules look at."""

    def __init__(self, method: str = "GET", peer: str | None = "127.0.0.1", **headers: str) -> None:
        self.method = method
        self.scope = {"client": (peer, 1) if peer else None}
        self.headers = httpx.Headers({name.replace("_", "-"): value for name, value in headers.items()})
        self.cookies: dict[str, str] = {}


def bearer(secret: str) -> dict[str, bytes]:
    return {"Authorization": f"Bearer {secret}".encode()}


def test_the_matched_rule_decides_and_what_is_not_named_is_the_operators() -> None:
    assert area_of("/v1/models/<path:name>") is Area.API
    assert area_of("/") is Area.API
    assert area_of("/static/<path:filename>") is Area.OPEN
    assert area_of("/healthz") is Area.OPEN
    for rule in ("/metrics", "/admin", "/admin/config", "/ops/events", "/v1x", "/anything/new"):
        assert area_of(rule) is Area.OPERATOR


@pytest.mark.parametrize(
    ("peer", "headers", "local"),
    [
        ("127.0.0.1", {"host": "localhost:8000"}, True),
        ("127.9.9.9", {"host": "127.0.0.1"}, True),
        ("::1", {"host": "[::1]:8000"}, True),
        ("::ffff:127.0.0.1", {"host": "relevo.localhost"}, True),
        ("127.0.0.1", {}, True),
        ("127.0.0.1", {"host": "evil.example"}, False),
        ("127.0.0.1", {"host": "localhost.evil.example"}, False),
        ("127.0.0.1", {"host": "[::1"}, False),
        ("127.0.0.1", {"host": "localhost", "x_forwarded_for": "203.0.113.9"}, False),
        ("127.0.0.1", {"host": "localhost", "forwarded": "for=203.0.113.9"}, False),
        ("192.168.1.5", {"host": "localhost"}, False),
        ("::ffff:192.168.1.5", {"host": "localhost"}, False),
        (None, {"host": "localhost"}, False),
    ],
)
def test_only_this_machine_by_its_own_name_is_local(peer: str | None, headers: dict[str, str], local: bool) -> None:
    assert is_local(FakeRequest(peer=peer, **headers)) is local  # type: ignore[arg-type]


def test_without_security_only_this_machine_gets_in() -> None:
    gate = Gate(make_settings())
    for area in Area:
        assert gate.judge(FakeRequest(host="localhost"), area) == "127.0.0.1"  # type: ignore[arg-type]
    for area in (Area.API, Area.OPERATOR):
        with pytest.raises(ApiError, match="this machine") as caught:
            gate.judge(FakeRequest(peer="10.0.0.1", host="localhost"), area)  # type: ignore[arg-type]
        assert caught.value.status == 403


def test_insecure_on_purpose_lets_everyone_in() -> None:
    gate = Gate(make_settings(server={"host": "0.0.0.0"}))
    for area in Area:
        assert gate.judge(FakeRequest(peer="10.0.0.1", host="box.lan"), area) == "10.0.0.1"  # type: ignore[arg-type]


def test_what_began_with_keys_does_not_open_to_the_world_when_they_are_gone() -> None:
    keyring = SimpleNamespace(is_closed=True, lent=None)
    gate = Gate(make_settings(server={"host": "0.0.0.0"}), keyring)  # type: ignore[arg-type]
    keyring.is_closed = False
    with pytest.raises(ApiError, match="this machine"):
        gate.judge(FakeRequest(peer="10.0.0.1", host="box.lan"), Area.API)  # type: ignore[arg-type]
    assert gate.judge(FakeRequest(host="localhost"), Area.API) == "127.0.0.1"  # type: ignore[arg-type]


def test_with_keys_alone_the_operator_still_has_to_sit_here() -> None:
    gate = Gate(make_settings(security={"api_keys": [f"me={KEY}"]}))
    assert gate.judge(FakeRequest(host="localhost"), Area.OPERATOR) == "127.0.0.1"  # type: ignore[arg-type]
    with pytest.raises(ApiError):
        gate.judge(FakeRequest(peer="10.0.0.1", host="x", authorization=f"Bearer {KEY}"), Area.OPERATOR)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({}, True),
        ({"origin": "http://localhost:8000", "host": "localhost:8000"}, True),
        ({"origin": "https://relevo.example", "host": "relevo.example"}, True),
        ({"origin": "https://relevo.example", "host": "RELEVO.example:443"}, True),
        ({"origin": "http://localhost:3000", "host": "localhost:8000"}, False),
        ({"origin": "http://evil.example", "host": "localhost:8000"}, False),
        ({"origin": "null", "host": "localhost:8000"}, False),
        ({"origin": "http://[::1", "host": "localhost:8000"}, False),
        ({"sec_fetch_site": "cross-site"}, False),
        ({"sec_fetch_site": "same-origin", "origin": "http://a:1", "host": "a:1"}, True),
    ],
)
def test_a_page_of_another_site_changes_nothing(headers: dict[str, str], allowed: bool) -> None:
    refuse_cross_site(FakeRequest("GET", **headers))  # type: ignore[arg-type]
    for method in ("POST", "PATCH", "DELETE"):
        if allowed:
            refuse_cross_site(FakeRequest(method, **headers))  # type: ignore[arg-type]
        else:
            with pytest.raises(ApiError, match="other sites"):
                refuse_cross_site(FakeRequest(method, **headers))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/ops?x=1", "/ops?x=1"),
        ("//evil.example", "/"),
        ("/\\evil.example", "/"),
        ("https://evil.example", "/"),
        ("javascript:alert(1)", "/"),
        ("/a\r\nSet-Cookie: x", "/"),
        ("", "/"),
    ],
)
def test_a_login_leads_to_a_path_on_this_server(target: str, path: str) -> None:
    assert local_path(target) == path


async def status(server: Server, path: str, **headers: str | bytes) -> int:
    return (await server.client.get(path, headers=headers)).status_code


async def test_keys_and_token_open_their_own_doors() -> None:
    async with open_server(make_settings(security=SECURITY)) as server:
        for path in OPEN_PATHS:
            assert await status(server, path) == 200, path
        for secret in ("x", "sk-on", "sk-onee", TOKEN, "sk-\xe9"):
            assert (await server.client.get("/v1/models", headers=bearer(secret))).status_code == 401
        refused = await server.client.post(CHAT, json=chat_body())
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"
        for secret in (KEY, "sk-två"):
            response = await server.client.post(CHAT, json=chat_body(max_tokens=1), headers=bearer(secret))
            assert response.status_code == 200
        for path in ("/tokenize", "/detokenize"):
            assert (await server.client.post(path, json={"prompt": "a", "tokens": [1]})).status_code == 401
            assert (
                await server.client.post(path, json={"prompt": "a", "tokens": [1]}, headers=bearer(KEY))
            ).status_code == 200
        for path in OPERATOR_PATHS:
            assert await status(server, path) == 401, path
            assert await status(server, path, **bearer(KEY)) == 401, path
            assert await status(server, path, **bearer(TOKEN)) == 200, path


async def test_the_pages_ask_once_and_keep_a_cookie() -> None:
    html = {"Accept": "text/html"}
    async with open_server(make_settings(security=SECURITY)) as server:
        sent = await server.client.get("/ops?a=b", headers=html)
        assert sent.status_code == 303
        assert sent.headers["location"] == "/login?next=%2Fops%3Fa%3Db"
        form = await server.client.get(sent.headers["location"])
        assert 'value="/ops?a=b"' in form.text
        wrong = await server.client.post("/login", data={"token": "no", "next": "/ops"})
        assert wrong.status_code == 401
        assert "set-cookie" not in wrong.headers
        entered = await server.client.post("/login", data={"token": TOKEN, "next": "//evil.example"})
        assert (entered.status_code, entered.headers["location"]) == (303, "/")
        cookie = entered.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert TOKEN not in cookie
        assert await status(server, "/ops") == 200
        assert await status(server, "/v1/models") == 401
        await server.client.post("/login", data={"token": KEY, "next": "/"})
        assert await status(server, "/") == 200
        assert (await server.client.post(CHAT, json=chat_body(max_tokens=1))).status_code == 200
        foreign = await server.client.post(CHAT, json=chat_body(), headers={"Origin": "http://evil.example"})
        assert (foreign.status_code, foreign.json()["error"]["code"]) == (403, "cross_site")
        changed = await server.client.patch("/admin/config", json={"max_num_seqs": 3})
        assert changed.status_code == 200
        assert server.context.journal.audit.entries[-1].who == "admin"
        for path in ("/admin", "/admin/keys"):
            page = (await server.client.get(path, headers={"Accept": "text/html"})).text
            assert 'action="/logout"' in page, path
        await server.client.post("/logout")
        assert await status(server, "/ops") == 401


async def test_another_machines_name_for_this_one_is_refused() -> None:
    async with open_server() as server:
        for path in ("/", "/ops", "/v1/models", "/admin/config"):
            assert await status(server, path, Host="evil.example") == 403
        assert await status(server, "/healthz", Host="evil.example") == 200


async def test_a_preflight_needs_no_key_and_gets_no_permission() -> None:
    async with open_server(make_settings(security=SECURITY)) as server:
        headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
        response = await server.client.options(CHAT, headers=headers)
        assert response.status_code == 204
        assert "access-control-allow-origin" not in response.headers


async def test_a_page_that_is_refused_is_a_page() -> None:
    async with open_server() as server:
        response = await server.client.get("/nothing", headers={"Accept": "text/html"})
        assert response.status_code == 404
        assert response.headers["content-type"].startswith("text/html")
        assert (await server.client.get("/v1/nothing", headers={"Accept": "text/html"})).json()["error"]
