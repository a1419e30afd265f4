"""API keys that are made and revoked while the server runs: who may, what then holds, and what the page says."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from app import key_service
from app.callers import Callers
from app.config_schema import KeyLimits
from app.key_service import open_keys
from app.sharing import Sharing
from engine.errors import ConfigError
from tests.app.keyed import HTML, asks, id_of, listed, make, serve
from tests.app.serving import CHAT, chat_body, make_settings

if TYPE_CHECKING:
    from pathlib import Path

FORM = {"Content-Type": "application/x-www-form-urlencoded", **HTML}
HOSTILE = "<img src=x onerror=alert(1)>\"'&"


# ---- making, revoking, forgetting ------------------------------------------------------------------------------------


async def test_the_first_key_closes_the_api_and_only_forgetting_opens_it(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        assert await asks(server) == 200
        assert (await listed(server))["key_needed"] is False
        secret = await make(server, "alice")
        assert (await asks(server), await asks(server, "none"), await asks(server, secret)) == (401, 401, 200)
        assert (await server.client.get("/", headers=HTML)).status_code == 303
        answer = await server.client.delete(f"/admin/keys/{await id_of(server, 'alice')}")
        (entry,) = answer.json()["keys"]
        assert (entry["valid"], entry["revoked"] is not None) == (False, True)
        # Taking a right away gives it to nobody else.
        assert (await asks(server), await asks(server, secret)) == (401, 401)
        answer = await server.client.delete("/admin/keys")
        assert answer.json() == {"keys": [], "key_needed": False, "problem": None, "unwritten": []}
        assert (await asks(server), await asks(server, secret)) == (200, 200)


async def test_a_cookie_ends_with_its_key(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        secret = await make(server, "alice")
        await server.client.post("/login", data={"token": secret})
        assert await asks(server) == 200
        await server.client.delete(f"/admin/keys/{await id_of(server, 'alice')}")
        assert await asks(server) == 401
        await server.client.post("/login", data={"token": secret})
        assert await asks(server) == 401


async def test_what_runs_goes_on_when_its_key_is_revoked(tmp_path: Path) -> None:
    async with serve(tmp_path) as server, trio.open_nursery() as nursery:
        secret = await make(server, "alice")
        headers = {"Authorization": f"Bearer {secret}"}
        seen: list[int] = []

        async def ask() -> None:
            answer = await server.client.post(CHAT, json=chat_body(max_tokens=400), headers=headers)
            seen.append(answer.json()["usage"]["completion_tokens"])

        nursery.start_soon(ask)
        while not server.engine.num_running:
            await trio.sleep(0.001)
        await server.client.delete("/admin/keys/1")
        assert not seen
        assert await asks(server, secret) == 401
    assert seen == [400]


async def test_keys_of_the_configuration_are_listed_and_stay(tmp_path: Path) -> None:
    async with serve(tmp_path, api_keys=["file=k1"]) as server:
        (entry,) = (await listed(server))["keys"]
        assert (entry["id"], entry["name"], entry["configured"], entry["valid"]) == (None, "file", True, True)
        assert "key" not in entry
        taken = await server.client.post("/admin/keys", json={"name": "file"})
        assert (taken.status_code, taken.json()["error"]["code"]) == (409, "name_taken")
        for key_id in ("0", "99", "file", "None", "-1", "1" * 30):
            refused = await server.client.delete(f"/admin/keys/{key_id}")
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "key_not_found")
        assert await asks(server, "k1") == 200
        assert (await listed(server))["keys"][0]["last_used"] is not None
        await server.client.delete("/admin/keys")
        assert await asks(server) == 401


async def test_a_made_key_gives_way_to_one_of_the_same_name_in_the_configuration(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        secret = await make(server, "alice")
    async with serve(tmp_path, api_keys=["alice=k1"]) as server:
        assert (await asks(server, secret), await asks(server, "k1")) == (401, 200)
        assert [entry["valid"] for entry in (await listed(server))["keys"]] == [True, False]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "name"),
        ({"name": ""}, "name"),
        ({"name": "  "}, "name"),
        ({"name": None}, "name"),
        ({"name": 5}, "name"),
        ({"name": "x" * 65}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": "a\u202eb"}, "name"),
        ({"name": "a", "max_concurrent": 0}, "max_concurrent"),
        ({"name": "a", "max_concurrent": True}, "max_concurrent"),
        ({"name": "a", "tokens_per_minute": "5"}, "tokens_per_minute"),
        ({"name": "a", "requests_per_minute": 1.5}, "requests_per_minute"),
        ({"name": "a", "admin": True}, "admin"),
    ],
)
async def test_nonsense_is_422_naming_the_field(tmp_path: Path, body: dict[str, Any], param: str) -> None:
    async with serve(tmp_path) as server:
        answer = await server.client.post("/admin/keys", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, param)
        assert f"'{param}'" in answer.json()["error"]["message"]
        assert (await listed(server))["keys"] == []


async def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        answer = await server.client.post("/admin/keys", json={"max_concurrent": 0, "colour": "red"})
        assert answer.json()["error"]["message"] == (
            "'max_concurrent' must be greater than or equal to 1. 'name' is required. 'colour' is unknown; there are "
            "name, max_concurrent, requests_per_minute, tokens_per_minute."
        )


async def test_there_are_only_so_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_service, "MAX_KEYS", 2)
    async with serve(tmp_path) as server:
        for name in ("a", "b"):
            await make(server, name)
        refused = await server.client.post("/admin/keys", json={"name": "c"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "too_many_keys")


async def test_who_makes_and_revokes_keys_is_in_the_history_and_no_key_itself(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        secret = await make(server, "alice")
        refused = [
            await server.client.post("/admin/keys", json={"name": "alice"}),
            await server.client.delete("/admin/keys/77"),
        ]
        assert [answer.status_code for answer in refused] == [409, 404]
        await server.client.post("/admin/keys", data={"name": HOSTILE}, headers=HTML)
        for _ in range(2):  # the second time it is revoked already
            await server.client.delete("/admin/keys/1")
        await server.client.post("/admin/keys/2/revoke", headers=FORM)
        for _ in range(2):
            await server.client.delete("/admin/keys")
        answer = await server.client.get("/admin/audit")
        assert [(entry["who"], entry["deed"], entry["outcome"]) for entry in answer.json()] == [
            ("127.0.0.1", deed, "done")
            for deed in (
                "API key 'alice' made",
                f"API key {HOSTILE!r} made",
                "API key 'alice' revoked",
                f"API key {HOSTILE!r} revoked",
                "2 revoked API keys forgotten",
            )
        ]
        page = (await server.client.get("/admin", headers=HTML)).text
        assert "API key &#39;alice&#39; revoked" in page
        assert "<img src=x" not in page
        assert secret not in answer.text + page


async def test_many_at_once_are_all_kept(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        secrets: list[str] = []

        async def one(number: int) -> None:
            secrets.append(await make(server, f"k{number}"))

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(one, number)
        assert [await asks(server, secret) for secret in secrets] == [200] * 20
        twice = [await server.client.post("/admin/keys", json={"name": "k3"}) for _ in range(2)]
        assert [answer.status_code for answer in twice] == [409, 409]


async def test_a_client_that_leaves_does_not_part_memory_from_disk(tmp_path: Path) -> None:
    async with open_keys(make_settings(), tmp_path) as keys:
        with trio.move_on_after(0) as scope:
            scope.cancel()
            await keys.make("alice", KeyLimits())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keys.make, "bob", KeyLimits())
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert keys.keyring.get("bob") is not None
        names = keys.keyring.names
    async with open_keys(make_settings(), tmp_path) as keys:
        assert keys.keyring.names == names


# ---- who may ---------------------------------------------------------------------------------------------------------


async def test_only_the_operator_may_and_no_page_of_another_site(tmp_path: Path) -> None:
    async with serve(tmp_path, api_keys=["me=k1"], admin_token="t0ken") as server:
        admin = {"Authorization": "Bearer t0ken"}
        for headers, status in (({}, 401), ({"Authorization": "Bearer k1"}, 401), (admin, 200)):
            assert (await server.client.get("/admin/keys", headers=headers)).status_code == status
        for method, path in (
            ("POST", "/admin/keys"),
            ("DELETE", "/admin/keys"),
            ("DELETE", "/admin/keys/1"),
            ("POST", "/admin/keys/1/revoke"),
            ("POST", "/admin/keys/forget"),
        ):
            refused = await server.client.request(method, path, json={"name": "x"})
            assert refused.status_code == 401
            for more in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "null"}):
                refused = await server.client.request(method, path, json={"name": "x"}, headers={**admin, **more})
                assert (refused.status_code, refused.json()["error"]["code"]) == (403, "cross_site")
        assert len((await server.client.get("/admin/keys", headers=admin)).json()["keys"]) == 1


# ---- the page --------------------------------------------------------------------------------------------------------


async def test_the_page_makes_and_revokes_without_a_script(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        page = (await server.client.get("/admin/keys", headers=HTML)).text
        assert "whoever is on this machine may use the API. Making the first key closes it" in page
        assert "Make the first key and close the API" in page
        made = await server.client.post("/admin/keys", data={"name": " alice ", "max_concurrent": "4"}, headers=HTML)
        assert made.status_code == 201
        assert made.headers["cache-control"] == "no-store"
        secret = re.search(r'id="secret" value="([^"]+)"', made.text)
        assert secret is not None
        assert await asks(server, secret[1]) == 200
        page = (await server.client.get("/admin/keys", headers=HTML)).text
        assert secret[1] not in page
        assert "The API and the chat page need one of these keys." in page
        for words in ("alice", "4 at once", "last used", 'action="/admin/keys/1/revoke"'):
            assert words in page
        sent = await server.client.post("/admin/keys/1/revoke", headers=FORM)
        assert (sent.status_code, sent.headers["location"]) == (303, "/admin/keys")
        assert await asks(server, secret[1]) == 401
        page = (await server.client.get("/admin/keys", headers=HTML)).text
        assert "No key is valid: nobody can use the API until you make one." in page
        assert "whoever is on this machine may use the API again" in page
        sent = await server.client.post("/admin/keys/forget", headers=FORM)
        assert sent.status_code == 303
        assert await asks(server) == 200


async def test_the_page_says_what_is_wrong_at_the_field_and_keeps_what_was_typed(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        await make(server, HOSTILE)
        answer = await server.client.post("/admin/keys", data={"name": HOSTILE, "tokens_per_minute": "7"}, headers=HTML)
        assert answer.status_code == 409
        assert re.search(r'id="name"[^>]* aria-invalid="true"', answer.text)
        assert re.search(r'id="tokens_per_minute"[^>]* value="7"', answer.text)
        answer = await server.client.post("/admin/keys", data={"name": "a", "max_concurrent": "some"}, headers=HTML)
        assert answer.status_code == 422
        assert re.search(r'id="max_concurrent"[^>]* aria-invalid="true"', answer.text)
        missing = await server.client.post("/admin/keys/77/revoke", headers=FORM)
        assert missing.status_code == 404
        assert "There is no key 77" in missing.text


async def test_names_are_text_in_every_page_and_number(tmp_path: Path) -> None:
    async with serve(tmp_path, api_keys=["<b>file</b>=k1"]) as server:
        answer = await server.client.post("/admin/keys", data={"name": HOSTILE}, headers=HTML)
        pages = [answer.text, (await server.client.get("/admin/keys", headers=HTML)).text]
        secret = re.search(r'id="secret" value="([^"]+)"', answer.text)
        assert secret is not None
        assert await asks(server, secret[1]) == 200
        pages.append((await server.client.get("/ops", headers=HTML)).text)
        await server.client.post("/admin/keys/1/revoke", headers=FORM)
        pages.append((await server.client.get("/admin/keys", headers=HTML)).text)
        for page in pages:
            assert "<img src=x" not in page
            assert "<b>file" not in page
        assert "&lt;img src=x onerror=alert(1)&gt;&#34;&#39;&amp;" in pages[1]
        assert HOSTILE in (await server.stats())["requests"]["by_key"]


# ---- what settings say of them ---------------------------------------------------------------------------------------


async def test_settings_may_name_a_key_that_was_made_also_after_it_was_revoked(tmp_path: Path) -> None:
    async with open_keys(make_settings(), tmp_path) as keys:
        await keys.make("alice", KeyLimits(max_concurrent=9))
        record, _ = await keys.make("bob", KeyLimits())
        assert record.key_id is not None
        await keys.revoke(record.key_id)
    settings = make_settings(
        security={"background_keys": ["alice", "bob"]},
        security_limits={"alice": {"max_concurrent": 1}, "bob": {}},
        cache={"cache_sharing": "alice+bob"},
    )
    async with open_keys(settings, tmp_path) as keys:
        callers = Callers(settings, keys.keyring)
        assert (callers.of("alice").key_name, callers.of("alice").background) == ("alice", True)
        alice = keys.keyring.get("alice")
        assert alice is not None
        assert alice.limits == KeyLimits(max_concurrent=1)  # the file goes first
    with pytest.raises(ConfigError, match="'alice'"):
        Callers(settings)


async def test_a_new_key_is_another_than_an_old_one_of_the_same_name(tmp_path: Path) -> None:
    """For the engine's fairness; people see the name."""
    settings = make_settings()
    async with open_keys(settings, tmp_path) as keys:
        callers = Callers(settings, keys.keyring)
        record, _ = await keys.make("alice", KeyLimits())
        before = callers.of("alice")
        assert record.key_id is not None
        await keys.revoke(record.key_id)
        await keys.make("alice", KeyLimits())
        after = callers.of("alice")
        assert before.key_name == after.key_name == "alice"
        assert before.key_identity != after.key_identity


async def test_a_new_key_reads_nothing_of_an_old_one_of_the_same_name(tmp_path: Path) -> None:
    settings = make_settings()
    async with open_keys(settings, tmp_path) as keys:
        rules = Sharing(settings, keys.keyring)
        record, _ = await keys.make("alice", KeyLimits())
        before = rules.root("alice", None)
        await keys.make("bob", KeyLimits())
        assert rules.root("bob", None) != before
        assert record.key_id is not None
        await keys.revoke(record.key_id)
        await keys.make("alice", KeyLimits())
        assert rules.root("alice", None) != before
