"""Pages of other sites: those that are listed may use the API with a key of their own, the others nothing."""

from __future__ import annotations

from typing import Any

import pytest

from app.config import load_settings
from app.security import KEY_COOKIE
from engine.errors import ConfigError
from tests.app.serving import CHAT, Server, chat_body, events, make_settings, open_server

GOOD, OTHER, EVIL = "https://app.example", "http://localhost:3000", "https://evil.example"
KEY = "sk-one"
API_PATHS = (CHAT, "/v1/completions", "/v1/models", "/v1/nothing", "/tokenize", "/detokenize", "/openapi.json")
OTHER_PATHS = (
    "/",
    "/ops",
    "/ops/stats.json",
    "/admin",
    "/admin/config",
    "/admin/keys",
    "/metrics",
    "/login",
    "/healthz",
)


def settings_with(*origins: str, **security: Any) -> Any:
    return make_settings(server={"cors_origins": origins}, security=security)


async def preflight(server: Server, path: str, origin: str, headers: str = "authorization,content-type") -> Any:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": headers}
    return await server.client.options(path, headers={"Origin": origin, **asks})


async def test_a_listed_page_is_let_in_by_its_key() -> None:
    async with open_server(settings_with(GOOD, OTHER, api_keys=[f"me={KEY}"])) as server:
        for origin in (GOOD, OTHER):
            asked = await preflight(server, CHAT, origin, "authorization,content-type,x-stainless-os")
            assert (asked.status_code, asked.content) == (204, b"")
            assert asked.headers["access-control-allow-origin"] == origin
            assert asked.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-os"
            assert "POST" in asked.headers["access-control-allow-methods"]
            assert int(asked.headers["access-control-max-age"]) > 0
            headers = {"Origin": origin, "Authorization": f"Bearer {KEY}", "Sec-Fetch-Site": "cross-site"}
            answer = await server.client.post(CHAT, json=chat_body(max_tokens=2), headers=headers)
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == origin
            exposed = answer.headers["access-control-expose-headers"].lower().split(", ")
            assert {"x-request-id", "request-id", "retry-after"} <= set(exposed)  # the second is Anthropic's
            body = chat_body(max_tokens=2, stream=True)
            streamed = await server.client.post(CHAT, json=body, headers=headers)
            assert events(streamed.text)[-1] == "[DONE]"
            assert streamed.headers["access-control-allow-origin"] == origin
            for response in (asked, answer, streamed):
                assert "Origin" in response.headers["vary"]
                assert "access-control-allow-credentials" not in response.headers


async def test_a_listed_page_can_read_why_it_was_refused() -> None:
    async with open_server(settings_with(GOOD, api_keys=[f"me={KEY}"])) as server:
        refused = await server.client.post(CHAT, json=chat_body(), headers={"Origin": GOOD})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == GOOD
        missing = await server.client.get("/v1/nothing", headers={"Origin": GOOD})
        assert (missing.status_code, missing.headers["access-control-allow-origin"]) == (404, GOOD)


@pytest.mark.parametrize(
    "origin", [EVIL, "https://app.example.evil.example", "http://app.example", GOOD + ":8443", "null"]
)
async def test_a_page_that_is_not_listed_gets_nothing(origin: str) -> None:
    async with open_server(settings_with(GOOD)) as server:
        asked = await preflight(server, CHAT, origin)
        assert asked.status_code == 204
        refused = await server.client.post(CHAT, json=chat_body(), headers={"Origin": origin})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "cross_site")
        read = await server.client.get("/v1/models", headers={"Origin": origin})
        for response in (asked, refused, read):
            assert not [name for name in response.headers if name.startswith("access-control-")]
            assert "Origin" in response.headers["vary"]


async def test_a_listed_page_has_no_business_outside_the_api() -> None:
    async with open_server(settings_with(GOOD)) as server:
        for path in OTHER_PATHS:
            asked = await preflight(server, path, GOOD)
            answer = await server.client.get(path, headers={"Origin": GOOD})
            for response in (asked, answer):
                assert not [name for name in response.headers if name.startswith("access-control-")], path
        for path, body in (("/admin/keys", {"name": "x"}), ("/login", {"token": "x"})):
            refused = await server.client.post(path, json=body, headers={"Origin": GOOD})
            assert refused.json()["error"]["code"] == "cross_site"
        changed = await server.client.patch("/admin/config", json={"max_num_seqs": 2}, headers={"Origin": GOOD})
        assert changed.status_code == 403
        for path in API_PATHS:
            answer = await server.client.get(path, headers={"Origin": GOOD})
            assert answer.headers["access-control-allow-origin"] == GOOD, path


async def test_a_cookie_is_not_for_another_sites_page() -> None:
    """Its browser may send one along, from a page of the same site on another port: it opens nothing."""
    async with open_server(settings_with(OTHER, api_keys=[f"me={KEY}"])) as server:
        await server.client.post("/login", data={"token": KEY})
        assert KEY_COOKIE in server.client.cookies
        own = await server.client.post(CHAT, json=chat_body(max_tokens=1))
        assert own.status_code == 200
        foreign = await server.client.post(CHAT, json=chat_body(max_tokens=1), headers={"Origin": OTHER})
        assert foreign.status_code == 401
        read = await server.client.get("/v1/models", headers={"Origin": OTHER})
        assert read.status_code == 401


async def test_every_site_is_told_so_and_never_with_credentials() -> None:
    async with open_server(settings_with("*", api_keys=[f"me={KEY}"])) as server:
        asked = await preflight(server, CHAT, EVIL)
        headers = {"Origin": EVIL, "Authorization": f"Bearer {KEY}"}
        answer = await server.client.post(CHAT, json=chat_body(max_tokens=1), headers=headers)
        assert answer.status_code == 200
        for response in (asked, answer):
            assert response.headers["access-control-allow-origin"] == "*"
            assert "access-control-allow-credentials" not in response.headers


async def test_without_a_list_nothing_is_said() -> None:
    async with open_server() as server:
        for response in (
            await preflight(server, CHAT, GOOD),
            await server.client.get("/v1/models", headers={"Origin": GOOD}),
        ):
            assert "vary" not in response.headers
            assert not [name for name in response.headers if name.startswith("access-control-")]


@pytest.mark.parametrize("headers", ["x" * 5000, "a\u00e9"])
async def test_what_a_preflight_asks_for_is_bounded(headers: str) -> None:
    async with open_server(settings_with(GOOD)) as server:
        asked = await preflight(server, CHAT, GOOD, headers.encode("latin-1"))  # type: ignore[arg-type]
        assert asked.status_code == 204
        assert len(asked.headers.get("access-control-allow-headers", "")) < 10


@pytest.mark.parametrize(
    ("value", "origins"),
    [
        ("https://App.Example", ("https://app.example",)),
        ("https://a.example:443, http://b.example:80", ("https://a.example", "http://b.example")),
        (["http://localhost:3000", "tauri://localhost"], ("http://localhost:3000", "tauri://localhost")),
        ("http://[::1]:3000", ("http://[::1]:3000",)),
        ("*", ("*",)),
        ("", ()),
    ],
)
def test_origins_are_spelled_as_browsers_do(value: object, origins: tuple[str, ...]) -> None:
    assert load_settings(flags={"server.cors_origins": value}).server.cors_origins == origins


@pytest.mark.parametrize(
    "value",
    ["https://a.example/", "a.example", "https://a.example/path", "https://*.a.example", "null", "*, http://a", 5],
)
def test_what_is_no_origin_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"\[server\] cors_origins .* takes (a list of )?origins"):
        load_settings(flags={"server.cors_origins": value})
