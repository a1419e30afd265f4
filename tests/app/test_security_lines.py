"""What is promised about security and is tested nowhere else; the README lists all of it."""

from __future__ import annotations

import hmac
from contextlib import suppress
from typing import Any

import pytest

from app.assets import asset
from app.errors import ApiError
from app.http import create_app
from app.keys import Keyring
from app.security import Area, Gate
from tests.app.serving import CHAT, COMPLETIONS, chat_body, make_settings, open_app, open_server
from tests.app.test_security import FakeRequest

MANY_KEYS = {"api_keys": [f"key{number}=secret-{number}" for number in range(20)], "admin_token": "t0ken"}


@pytest.mark.parametrize("sent", ["secret-0", "secret-19", "secret-x", "s", "", "t0ken"])
def test_how_long_a_key_is_compared_tells_nothing_of_it(sent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def counted(ours: bytes, theirs: bytes) -> bool:
        lengths.append((len(ours), len(theirs)))
        return compare(ours, theirs)

    settings = make_settings(security=MANY_KEYS)
    gate = Gate(settings, Keyring(settings))
    monkeypatch.setattr(hmac, "compare_digest", counted)
    for area, comparisons in ((Area.API, 20), (Area.OPERATOR, 1)):
        lengths.clear()
        request: Any = FakeRequest(peer="10.0.0.1", host="x", authorization=f"Bearer {sent}")
        with suppress(ApiError):
            gate.judge(request, area)
        assert lengths == [(32, 32)] * comparisons, "each key, and always in full"


async def test_nothing_that_is_told_is_kept_by_browsers_and_proxies() -> None:
    async with open_app() as (app, context):
        rules = [rule.rule for rule in create_app(context).url_map.iter_rules() if "GET" in (rule.methods or set())]
    assert app is not None
    streams, static = {"/ops/events", "/ops/limit/events"}, {rule for rule in rules if rule.startswith("/static/")}
    plain = [rule for rule in rules if "<" not in rule and rule not in streams | static]
    async with open_server() as server:
        await server.client.post(COMPLETIONS, json={"prompt": "private", "max_tokens": 1})
        for path in (*plain, "/v1/models/fake", "/ops/requests/1", "/ops/requests/1.json?tokens=1", "/nothing"):
            answer = await server.client.get(path)
            assert answer.headers["cache-control"] == "no-store", path
        for path in (CHAT, "/tokenize"):
            answer = await server.client.post(path, json=chat_body(max_tokens=1))
            assert answer.headers["cache-control"] == "no-store", path
        kept = await server.client.get(asset("relevo.css"))
        assert kept.headers["cache-control"] == "public, max-age=31536000, immutable"
        async with server.client.stream("GET", "/ops/events") as stream:
            assert "no-cache" in stream.headers["cache-control"]


def test_without_asserts_these_tests_still_check() -> None:
    """They run under `python -O`, too: pytest makes code of its asserts that Python does not leave out."""
    with pytest.raises(AssertionError):
        assert Area.OPEN is Area.API
