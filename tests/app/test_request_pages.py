"""The requests one by one: pages without a script, JSON twins, abort with its rules, steps of the past."""

from __future__ import annotations

import json
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from tests.app.serving import COMPLETIONS, make_settings, open_server
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.app.serving import Server

HTML = {"Accept": "text/html"}
HOSTILE = "<img src=x onerror=alert(1)>"


async def ask(server: Server, prompt: str = "hello", **fields: Any) -> dict[str, Any]:
    headers = fields.pop("headers", {})
    body = {"model": fields.pop("model", "fake"), "prompt": prompt, "max_tokens": 5, "ignore_eos": True, **fields}
    answer = await server.client.post(COMPLETIONS, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@asynccontextmanager
async def running(server: Server, **fields: Any) -> AsyncIterator[int]:
    """The number of a request that runs."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: server.client.post(COMPLETIONS, json={
            "model": "fake", "prompt": "wait for it", "max_tokens": 400, "ignore_eos": True, **fields}))  # fmt: skip
        with trio.fail_after(PATIENCE_SECONDS):
            while not any(line["output_tokens"] for line in server.engine.requests.open()):
                await trio.sleep(0.01)
        yield server.engine.requests.open()[0]["number"]
        nursery.cancel_scope.cancel()


async def test_a_finished_request_has_a_page_and_its_twin() -> None:
    async with open_server() as server:
        answer = await ask(server, "x" * 100)
        await server.settle()
        listed = (await server.client.get("/ops/requests.json")).json()
        assert listed["open"] == []
        (line,) = listed["finished"]
        assert line["request_id"] == answer["id"]
        found = await server.client.get("/ops/requests", params={"id": answer["id"]}, headers=HTML)
        assert (found.status_code, found.headers["location"]) == (303, f"/ops/requests/{line['number']}")
        short = answer["id"].partition("-")[2][:8]
        found_too = await server.client.get("/ops/requests", params={"id": short}, headers=HTML)
        assert found_too.headers["location"] == found.headers["location"], "as the pages show it"
        nothing = (await server.client.get("/ops/requests", params={"id": "no-such"}, headers=HTML)).text
        assert "0 requests of this id" in nothing
        assert "None has ended yet" not in nothing
        assert "Nothing runs" not in nothing
        life = (await server.client.get(f"/ops/requests/{line['number']}.json")).json()
        assert [span["phase"] for span in life["spans"]] == ["queued", "prefill", "prefill", "decode"]
        assert (life["prompt_tokens"], life["output_tokens"], life["finish_reason"]) == (100, 5, "length")
        page = (await server.client.get(found.headers["location"], headers=HTML)).text
        told = (answer["id"], "Cut at its limit", "100 tokens, 0 cached", "reads its prompt", "keep_request_texts")
        for words in told:
            assert words in page
        for shown in (page, (await server.client.get("/ops/requests", headers=HTML)).text):
            assert 'id="state" hx-get="/ops/state" hx-trigger="every 10s"' in shown, "the line at the top goes on"
        assert "Abort" not in page
        assert page.count("hx-get") == 1, "nothing more can happen to it"
        first = life["spans"][1]["steps"][0]
        assert f'href="/ops?to={first}#table"' in page
        everybody = (await server.client.get("/ops/requests", headers=HTML)).text
        assert f'href="/ops/requests/{line["number"]}"' in everybody


@pytest.mark.parametrize("number", ["77", "x", "-1", "1" * 30, "%C2%B2", "..%2f1"])
async def test_what_is_not_known_is_404(number: str) -> None:
    async with open_server() as server:
        for path in (f"/ops/requests/{number}", f"/ops/requests/{number}.json"):
            assert (await server.client.get(path)).status_code == 404
        assert (await server.client.post(f"/ops/requests/{number}/abort")).status_code in (404, 405)


async def test_an_operator_aborts_from_a_form_and_from_a_program() -> None:
    async with open_server(step_seconds=0.01) as server:
        async with running(server) as number:
            page = (await server.client.get(f"/ops/requests/{number}", headers=HTML)).text
            assert f'action="/ops/requests/{number}/abort"' in page
            assert "Running on seat 1" in page
            assert "hx-get" in page
            done = await server.client.post(f"/ops/requests/{number}/abort", headers=HTML)
            assert (done.status_code, done.headers["location"]) == (303, f"/ops/requests/{number}")
            await server.settle()
            page = (await server.client.get(f"/ops/requests/{number}", headers=HTML)).text
            assert "Aborted" in page
            assert "by an operator" in page
            again = await server.client.post(f"/ops/requests/{number}/abort")
            assert (again.status_code, again.json()["error"]["code"]) == (409, "not_open")
        async with running(server) as number:
            done = await server.client.post(f"/ops/requests/{number}/abort")
            assert done.json() == {"number": number, "aborted": True}
            await server.settle()
        stats = await server.stats()
        assert stats["requests"]["aborted_by_cause_and_phase"] == {"admin": {"decode": 2}}


async def test_who_asked_is_told_and_does_not_ask_again() -> None:
    async with open_server(step_seconds=0.01) as server, trio.open_nursery() as nursery:

        async def abort() -> None:
            while not server.engine.requests.abort(1):
                await trio.sleep(0.01)

        nursery.start_soon(abort)
        body = {"model": "fake", "prompt": "wait for it", "max_tokens": 400, "ignore_eos": True}
        answer = await server.client.post(COMPLETIONS, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "aborted")


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Host": "evil.example"}],
)
async def test_a_page_of_another_site_aborts_nothing(headers: dict[str, str]) -> None:
    async with open_server(step_seconds=0.01) as server, running(server) as number:
        answer = await server.client.post(f"/ops/requests/{number}/abort", headers=headers)
        assert answer.status_code == 403
        assert server.engine.num_running == 1


async def test_the_admin_token_guards_them_all() -> None:
    security = {"admin_token": "letmein", "api_keys": ["me=secret"]}
    async with open_server(make_settings(security=security)) as server:
        await ask(server, headers={"Authorization": "Bearer secret"})
        await server.settle()
        paths = ["/ops/requests", "/ops/requests.json", "/ops/requests/1", "/ops/requests/1.json", "/ops/table?to=1",
                 "/ops/table.json?to=1"]  # fmt: skip
        for bearer, status in (("nothing", 401), ("secret", 401), ("letmein", 200)):
            headers = {"Authorization": f"Bearer {bearer}"}
            for path in paths:
                assert (await server.client.get(path, headers=headers)).status_code == status, path
            aborted = await server.client.post("/ops/requests/1/abort", headers=headers)
            assert aborted.status_code == (409 if status == 200 else 401)
        (line,) = (await server.client.get("/ops/requests.json", headers={"Authorization": "Bearer letmein"})).json()[
            "finished"
        ]
        assert line["key"] == "me"


@pytest.mark.parametrize("keeps", [False, True])
async def test_texts_outlive_their_request_only_where_that_was_switched_on(keeps: bool) -> None:
    settings = make_settings(server={"keep_request_texts": keeps})
    limits = {"keep_request_texts": settings.engine_config().keep_request_texts}
    async with open_server(settings, limits=limits, answer=lambda _: b"the answer") as server:
        await ask(server, HOSTILE, max_tokens=10)
        await server.settle()
        life = (await server.client.get("/ops/requests/1.json?tokens=1")).json()
        page = (await server.client.get("/ops/requests/1?tokens=1", headers=HTML)).text
        secret = "onerror" in json.dumps(life) or "onerror" in re.sub("<[^>]*>", "", page)
        assert not secret or keeps
        if keeps:
            assert bytes(life["tokens"]["prompt_token_ids"]).decode() == HOSTILE
            assert "".join(life["tokens"]["output_pieces"]) == "the answer"
            assert re.sub("<[^>]*>", "", page).count("&lt;") == 1
            assert "tokens" not in (await server.client.get("/ops/requests/1.json")).json()
        else:
            assert life["tokens"] is None
            assert "keep_request_texts" in page
        assert "<img" not in page


async def test_an_open_request_shows_its_tokens_when_asked() -> None:
    async with open_server(step_seconds=0.01) as server, running(server) as number:
        life = (await server.client.get(f"/ops/requests/{number}.json?tokens=1")).json()
        assert "".join(life["tokens"]["prompt_pieces"]) == "wait for it"
        page = (await server.client.get(f"/ops/requests/{number}?tokens=1", headers=HTML)).text
        assert '<span title="119">w</span>' in page
        assert "wait for it" not in (await server.client.get(f"/ops/requests/{number}", headers=HTML)).text


async def test_hostile_names_are_text() -> None:
    """The server takes no such id from a header; names of keys and models can have anything that can be shown."""
    key = "<img><b>me</b>"  # the first = ends a name
    security = {"api_keys": [f"{key}=secret"], "admin_token": "letmein"}
    admin = {"Authorization": "Bearer letmein"}
    async with open_server(make_settings(security=security), name=HOSTILE) as server:
        headers = {"Authorization": "Bearer secret", "X-Request-Id": HOSTILE}
        await ask(server, model=HOSTILE, headers=headers)
        await server.settle()
        for path in ("/ops/requests", "/ops/requests/1", "/ops", "/ops/requests?id=<img+src=x>"):
            page = (await server.client.get(path, headers={**admin, **HTML}, follow_redirects=True)).text
            assert "<img" not in page
        assert "&lt;img" in (await server.client.get("/ops/requests/1", headers={**admin, **HTML})).text


async def test_earlier_steps_are_a_page_a_part_and_json() -> None:
    async with open_server() as server:
        for _ in range(4):
            await ask(server, max_tokens=60)
        await server.settle()
        server.context.telemetry.tick(trio.current_time())
        table = (await server.client.get("/ops/table.json?to=130&steps=10")).json()
        assert [step["step"] for step in table["steps"]] == list(range(121, 131))
        assert table["kept"] == [1, 240]
        part = (await server.client.get("/ops/table?to=130")).text
        assert 'data-last="130"' in part
        assert "data-past" in part
        page = (await server.client.get("/ops?to=130", headers=HTML)).text
        assert "steps 11 to 130" in page
        assert '<a href="/ops?to=10#table">Earlier steps</a>' in page
        assert '<a href="/ops?to=240#table">Later steps</a>' in page
        live = (await server.client.get("/ops", headers=HTML)).text
        assert "data-past" not in live
        assert "up to step 240" in live
        now = (await server.client.get("/ops/table")).text
        assert 'data-last="240"' in now
        assert "data-past" not in now
        for path in ("/ops/table?to=x", "/ops/table?to=-1", f"/ops?to={'9' * 30}", "/ops/table?to=",
                     "/ops/table.json?to=1&steps=999"):  # fmt: skip
            answer = await server.client.get(path)
            assert answer.status_code == 400, path
            assert "whole number" in answer.text
