"""Each control of the tuning page, over HTTP and under load; its forms, which need no script; two admins at once."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import trio

from app.audit import MAX_ENTRIES
from tests.app.serving import CHAT, COMPLETIONS, chat_body, make_settings, open_app, open_server
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from tests.app.serving import Server

HOSTILE = "<img src=x onerror=alert(1)>"
VALUES: list[tuple[str, Any]] = [
    ("policy", "dynamic"),
    ("admission", "predicted"),
    ("max_num_seqs", 7),
    ("max_num_batched_tokens", 200),
    ("long_prefill_token_threshold", 12),
    ("dynamic_preferred_size", 2),
    ("dynamic_max_queue_delay_seconds", 0.25),
    ("num_speculative_tokens", 3),
    ("max_waiting", 9),
    ("max_waiting_tokens", 1000),
    ("slo_admission", True),
    ("enable_prefix_caching", False),
    ("ttft_p95_seconds", 0.125),
    ("itl_p95_seconds", 0.003),
    ("e2e_p95_seconds", 7.5),
    ("background_ttft_p95_seconds", 90.0),
    ("background_itl_p95_seconds", 1.5),
    ("background_e2e_p95_seconds", 3600.0),
    ("draining", True),
]


async def patch(server: Server, **body: Any) -> dict[str, Any]:
    answer = await server.client.patch("/admin/config", json=body)
    assert answer.status_code == 200, answer.text
    config: dict[str, Any] = answer.json()
    return config


async def refused(server: Server, status: int, **body: Any) -> dict[str, Any]:
    answer = await server.client.patch("/admin/config", json=body)
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


async def audit(server: Server) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = (await server.client.get("/admin/audit")).json()
    return entries


async def effective(server: Server) -> dict[str, Any]:
    values: dict[str, Any] = (await server.client.get("/admin/config")).json()["effective"]
    return values


def as_form(page: str) -> dict[str, str]:
    """What the page's form would send if nothing were touched."""
    form = page.partition('<form id="tuning"')[2].partition("</form>")[0]
    fields = dict(re.findall(r'<input type="(?:hidden|number|text)"[^>]* name="([^"]+)"[^>]* value="([^"]*)"', form))
    for name, options in re.findall(r'<select id="[^"]+" name="([^"]+)".*?>(.*?)</select>', form, re.DOTALL):
        chosen = re.search(r'value="([^"]*)" selected', options)
        fields[name] = chosen[1] if chosen else ""
    return fields


async def open_form(server: Server) -> dict[str, str]:
    return as_form((await server.client.get("/admin")).text)


async def send(server: Server, form: dict[str, str], action: str = "apply") -> httpx.Response:
    return await server.client.post("/admin", data={**form, "action": action})


@pytest.mark.parametrize(("key", "value"), VALUES)
async def test_each_control_is_turned_by_json_and_by_the_form_and_goes_back(key: str, value: Any) -> None:
    async with open_server() as server:
        start = await effective(server)
        assert (await patch(server, **{key: value}))["effective"] == start | {key: value}
        assert (await server.stats())["config"][key] == value
        assert (await audit(server))[-1]["changes"] == {key: [start[key], value]}
        assert (await patch(server, restore="previous"))["effective"] == start
        if key == "draining":
            return
        text = {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)
        sent = await send(server, await open_form(server) | {key: text, "reason": "by form"})
        assert (sent.status_code, sent.headers["location"]) == (303, "/admin?held=3")
        assert await effective(server) == start | {key: value}
        assert (await audit(server))[-1]["reason"] == "by form"
        page = (await server.client.get("/admin?held=3")).text
        assert "Generation 3 holds." in page
        assert "Generation 3 holds." not in (await server.client.get("/admin?held=2")).text


async def test_the_bounds_of_the_queue_hold_at_once_and_send_nobody_away() -> None:
    async with open_server(limits={"max_num_seqs": 1}, step_seconds=0.01) as server:
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_SECONDS) as client,
            trio.open_nursery() as nursery,
        ):
            done: list[int] = []

            async def ask(index: int) -> None:
                answer = await client.post(COMPLETIONS, json={"prompt": "a" * 20, "max_tokens": 40})
                assert answer.status_code == 200
                done.append(index)

            for index in range(4):
                nursery.start_soon(ask, index)
            with trio.fail_after(PATIENCE_SECONDS):
                while server.engine.num_waiting < 3:
                    await trio.sleep(0.001)
            preview = (await patch(server, max_waiting=2, dry_run=True))["preview"]
            assert preview["words"]["max_waiting"].startswith("3 waiting already. Nobody is sent away")
            await patch(server, max_waiting=2)
            body = {"prompt": "late", "max_tokens": 1}
            late = await client.post(COMPLETIONS, json=body)
            assert (late.status_code, late.json()["error"]["code"]) == (503, "queue_full")
            assert "the limit is 2" in late.json()["error"]["message"]
            assert server.engine.num_waiting >= 2
            await patch(server, max_waiting=100, max_waiting_tokens=21)
            late = await client.post(COMPLETIONS, json=body)
            assert late.status_code == 503
            assert "prompt tokens wait, the limit is 21" in late.json()["error"]["message"]
            await patch(server, max_waiting_tokens=1000)
            nursery.start_soon(ask, 4)
        assert sorted(done) == [0, 1, 2, 3, 4]
        await server.settle()


async def test_a_drain_lets_those_inside_finish_and_is_taken_back() -> None:
    async with open_server(limits={"max_num_seqs": 2}, step_seconds=0.01) as server:
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_SECONDS) as client,
            trio.open_nursery() as nursery,
        ):
            finished: list[str] = []

            async def ask() -> None:
                answer = await client.post(CHAT, json=chat_body(max_tokens=40))
                finished.append(answer.json()["choices"][0]["finish_reason"])

            for _ in range(3):
                nursery.start_soon(ask)
            with trio.fail_after(PATIENCE_SECONDS):
                while not server.engine.num_waiting:
                    await trio.sleep(0.001)
            page = (await server.client.get("/admin")).text
            assert "2 running and 1 waiting: they finish." in page
            assert (await send(server, {}, "drain")).status_code == 303
            config = (await client.get("/admin/config")).json()
            assert config["pending_drain"]["draining"] == 3
            refusal = await client.post(CHAT, json=chat_body())
            assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "draining")
            assert "shutting down" not in refusal.json()["error"]["message"]
            assert int(refusal.headers["retry-after"]) >= 1
            ready = await client.get("/readyz")
            assert (ready.status_code, ready.json()["reason"].split(":")[0]) == (503, "draining")
            assert (await client.get("/health")).status_code == 503
            assert (await client.get("/healthz")).status_code == 200
        assert finished == ["length"] * 3
        assert "Draining: nothing new is taken, 0 requests inside." in (await server.client.get("/admin")).text
        assert (await send(server, {"reason": "enough"}, "resume")).status_code == 303
        assert (await server.client.get("/readyz")).status_code == 200
        assert (await server.client.post(CHAT, json=chat_body(max_tokens=2))).status_code == 200
        assert [entry["changes"] for entry in await audit(server)] == [
            {"draining": [False, True]},
            {"draining": [True, False]},
        ]
        # It is the operator's doing and not the process's end.
        server.context.telemetry.tick(trio.current_time())
        assert "drain" not in [event.kind for event in server.context.journal.events]


async def test_the_end_of_the_process_cannot_be_taken_back() -> None:
    async with open_server() as server:
        await patch(server, draining=True)
        server.engine.drain()
        assert (await refused(server, 409, draining=False))["code"] == "draining"
        assert (await refused(server, 409, restore="previous"))["code"] == "draining"
        assert (await send(server, {}, "resume")).status_code == 409
        assert len(await audit(server)) == 1


async def test_a_drain_for_a_while_ends_by_itself(autojump_clock: object) -> None:
    async with open_server() as server:
        live = server.context.live
        await live.apply({"draining": True, "ttl_seconds": 60}, who="me")
        assert not server.engine.health().ready
        await trio.sleep(61)
        assert server.engine.health().ready
        assert server.context.journal.audit.entries[-1].who == "ttl"


async def hits(server: Server) -> int:
    number: int = (await server.stats())["prefix_cache"]["hit_tokens"]
    return number


async def test_the_prefix_cache_is_switched_and_flushed() -> None:
    async with open_server(limits={"block_size": 4}) as server:

        async def ask() -> int:
            before = await hits(server)
            body = {"prompt": "the same beginning", "max_tokens": 2}
            assert (await server.client.post(COMPLETIONS, json=body)).status_code == 200
            return await hits(server) - before

        assert [await ask(), await ask()] == [0, 16]
        await patch(server, enable_prefix_caching=False)
        assert await ask() == 0
        await patch(server, enable_prefix_caching=True)
        assert await ask() == 16
        await server.settle()
        cached = (await server.stats())["kv"]["cached"]
        assert cached
        preview = (await patch(server, flush_prefix_cache=True, dry_run=True))["preview"]
        assert preview["changes"] == {"flush_prefix_cache": [cached, 0]}
        assert (await server.stats())["kv"]["cached"] == cached, "a dry run does nothing"
        generation = (await patch(server, flush_prefix_cache=True, reason="a clean start"))["generation"]
        assert (await server.stats())["kv"]["cached"] == 0
        entry = (await audit(server))[-1]
        assert (entry["changes"], entry["reason"]) == ({"flush_prefix_cache": [cached, 0]}, "a clean start")
        assert entry["generation"] == generation
        assert f"Cached blocks {cached}" in (await server.client.get("/admin")).text
        assert [await ask(), await ask()] == [0, 16]
        assert (await send(server, {}, "flush")).status_code == 303
        assert await ask() == 0
        # A flush is nothing that could be taken back: that is the switch before it.
        await patch(server, restore="previous")
        assert (await effective(server))["enable_prefix_caching"] is False


async def test_flushing_and_switching_under_load_changes_no_answer() -> None:
    prompts = [f"{'the same beginning ' * 3}{index}" for index in range(6)]
    async with open_server(limits={"block_size": 4}, step_seconds=0.002) as server:
        answers: dict[str, list[str]] = {prompt: [] for prompt in prompts}

        async def ask(prompt: str) -> None:
            answer = await server.client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 30})
            answers[prompt].append(answer.json()["choices"][0]["text"])

        for prompt in prompts:
            await ask(prompt)
        async with trio.open_nursery() as nursery:
            for prompt in prompts:
                nursery.start_soon(ask, prompt)
            while not server.engine.num_running:
                await trio.sleep(0.001)
            for on in (False, True, False, True):
                await patch(server, enable_prefix_caching=on, flush_prefix_cache=True)
                await trio.sleep(0.01)
        assert all(first == second for first, second in answers.values())
        await server.settle()


async def test_a_preview_names_who_must_end_first_and_does_nothing() -> None:
    async with open_server(step_seconds=0.01) as server, trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(lambda: server.client.post(CHAT, json=chat_body(max_tokens=60)))
        with trio.fail_after(PATIENCE_SECONDS):
            while server.engine.num_running < 4:
                await trio.sleep(0.001)
        body = {"max_num_seqs": 1, "policy": "static", "draining": True, "max_num_batched_tokens": 2}
        config = await patch(server, **body, dry_run=True)
        preview = config["preview"]
        assert preview["drains"] == {"max_num_seqs": 3, "policy": 4, "draining": 4}
        assert preview["words"]["max_num_seqs"].startswith("4 run: 3 above the 1 seat. Nobody is cut off")
        assert preview["words"]["policy"].startswith("4 requests end under the old one first.")
        assert preview["words"]["max_num_batched_tokens"] == "4 run: not everyone gets a token in every step."
        assert sorted(one["seat"] for one in preview["running"]) == [0, 1, 2, 3]
        assert (config["generation"], config["effective"]["max_num_seqs"]) == (0, 4)
        page = await send(server, await open_form(server) | {"max_num_seqs": "1"}, "preview")
        assert page.status_code == 200
        assert "4 run: 3 above the 1 seat." in page.text
        first = preview["running"][0]
        assert f"seat {first['seat'] + 1}: <code>{first['request_id']}</code>" in page.text, "as on every page, from 1"
        assert as_form(page.text)["max_num_seqs"] == "1", "what was typed stays"
        assert await audit(server) == []
        server.engine.abort_all("admin")


async def test_the_last_change_is_taken_back_and_all_go_back_to_the_start() -> None:
    async with open_server() as server:
        start = await effective(server)
        assert (await refused(server, 409, restore="previous"))["code"] == "nothing_to_take_back"
        await patch(server, max_num_seqs=8, reason="peak")
        await patch(server, max_num_batched_tokens=32, max_waiting=7)
        for number in range(MAX_ENTRIES):
            server.context.journal.begin_deed(f"Recording {number}", "me", outcome="done")
        page = (await server.client.get("/admin")).text
        assert "Token budget 32" in page.partition('id="undo"')[2].partition("</div>")[0]
        await send(server, {"if_generation": "2", "reason": "too slow"}, "undo")
        assert await effective(server) == start | {"max_num_seqs": 8}
        entry = (await audit(server))[-1]
        assert (entry["who"], entry["reason"]) == ("127.0.0.1", "too slow")
        await patch(server, draining=True)
        assert (await send(server, {"if_generation": "4"}, "start")).status_code == 303
        assert await effective(server) == start | {"draining": True}, "draining is no value to tune"
        assert (await audit(server))[-1]["reason"] == "back to the values at the start"
        # Taking back what was taken back does it again.
        await patch(server, restore="previous")
        assert (await effective(server))["max_num_seqs"] == 8


async def test_what_has_gone_back_by_itself_is_not_brought_back(autojump_clock: trio.testing.MockClock) -> None:
    async with open_app() as (_, context), trio.open_nursery() as nursery:
        live = context.live
        nursery.start_soon(live.run)
        await live.apply({"max_num_seqs": 3, "ttl_seconds": 5}, who="admin")
        assert live.undo == {"max_num_seqs": 4}
        await trio.sleep(6)
        assert live.undo == {}, "3 was for five seconds"
        await live.apply({"max_waiting": 9}, who="admin")
        await live.apply({"max_num_seqs": 3, "ttl_seconds": 5}, who="admin")
        await trio.sleep(6)
        assert list(live.undo) == ["max_waiting"]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("ttl_seconds", [None, 50])
async def test_what_was_made_on_top_of_a_temporary_change_goes_back_to_what_lasts(
    autojump_clock: trio.testing.MockClock, ttl_seconds: int | None
) -> None:
    async with open_app() as (_, context), trio.open_nursery() as nursery:
        live = context.live
        nursery.start_soon(live.run)
        await live.apply({"max_num_seqs": 8, "max_waiting": 9, "ttl_seconds": 100}, who="admin")
        assert live.undo == {"max_num_seqs": 4, "max_waiting": 256}
        await live.apply({"max_num_seqs": 6, "ttl_seconds": ttl_seconds}, who="admin")
        assert live.undo == {"max_num_seqs": 4}, "8 was for a while"
        await live.apply({"restore": "previous"}, who="admin")
        assert live.view()["reverts"].keys() == {"max_waiting"}
        await live.apply({"max_num_seqs": 7, "ttl_seconds": 100}, who="admin")
        await live.apply({"max_num_seqs": 7}, who="admin")  # for good
        await live.apply({"max_num_seqs": 5}, who="admin")
        assert live.undo == {"max_num_seqs": 7}
        nursery.cancel_scope.cancel()


async def test_of_two_who_change_at_the_same_moment_one_is_told_of_the_other() -> None:
    async with open_server() as server:
        answers: list[httpx.Response] = []

        async def change(**body: Any) -> None:
            answers.append(await server.client.patch("/admin/config", json={**body, "if_generation": 0}))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: change(max_num_seqs=8, reason=HOSTILE))
            nursery.start_soon(lambda: change(max_num_batched_tokens=32, max_num_seqs=2))
        by_status = {answer.status_code: answer.json() for answer in answers}
        assert set(by_status) == {200, 409}
        error = by_status[409]["error"]
        assert (error["code"], error["param"], error["generation"]) == ("changed_meanwhile", "if_generation", 1)
        (told,) = error["changed"]
        (entry,) = await audit(server)
        assert told["changes"] == entry["changes"]
        assert await effective(server) == by_status[200]["effective"], "nothing half done"
        assert (await refused(server, 409, max_num_seqs=5, if_generation=7))["changed"] == []
        assert (await refused(server, 409, max_num_seqs=5, if_generation=0, dry_run=True))["generation"] == 1
        assert (await patch(server, max_num_seqs=5, if_generation=1))["generation"] == 2


async def test_a_form_that_was_overtaken_says_by_what_and_sends_back_nothing_of_the_other() -> None:
    async with open_server() as server:
        form = await open_form(server)
        await patch(server, max_num_seqs=8, admission="reserve", reason=HOSTILE)
        page = await send(server, form | {"max_num_batched_tokens": "32", "max_num_seqs": "99"})
        assert page.status_code == 409, "that it was overtaken is said before what else is wrong"
        assert "generation 1 holds, not 0" in page.text
        assert "&lt;img src=x" in page.text
        assert "<img" not in page.text
        again = as_form(page.text)
        assert (again["max_num_batched_tokens"], again["max_num_seqs"]) == ("32", "99"), "what was typed stays"
        assert (again["admission"], again["was.max_num_seqs"]) == ("reserve", "8")
        assert (await effective(server))["max_num_batched_tokens"] == 64
        sent = await send(server, again | {"max_num_seqs": "8"})
        assert sent.status_code == 303
        values = await effective(server)
        assert (values["max_num_seqs"], values["admission"], values["max_num_batched_tokens"]) == (8, "reserve", 32)
        for action in ("undo", "start", "restore", "preview"):
            stale = await send(server, {"if_generation": "1", "generation": "0"}, action)
            assert stale.status_code == 409, action
        assert len(await audit(server)) == 2


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("max_num_seqs", "17", "from 1 to 16"),
        ("max_num_seqs", "", "from 1 to 16"),
        ("max_num_seqs", HOSTILE, "from 1 to 16"),
        ("max_num_seqs", "9" * 5000, "from 1 to 16"),
        ("max_num_seqs", "٣", "from 1 to 16"),
        ("max_waiting", "0", "from 1 to 1048576"),
        ("dynamic_max_queue_delay_seconds", "nan", "from 0 to 3600"),
        ("policy", "magic", "must be one of continuous"),
        ("enable_prefix_caching", "perhaps", "must be true or false"),
        ("ttl_seconds", "0", "from 1 to"),
        ("reason", "x" * 501, "at most 500 characters"),
    ],
)
async def test_what_cannot_be_is_422_on_the_page_and_what_was_typed_stays(key: str, text: str, words: str) -> None:
    async with open_server() as server:
        form = await open_form(server) | {"max_num_batched_tokens": "77", key: text}
        answer = await send(server, form)
        assert answer.status_code == 422
        assert words in answer.text
        assert "<img" not in answer.text
        assert as_form(answer.text)["max_num_batched_tokens"] == "77"
        if key == "max_num_seqs" and len(text) == 2:
            assert as_form(answer.text)[key] == text
        assert (await server.client.get("/admin/config")).json()["generation"] == 0


async def test_a_form_without_a_change_says_so_and_an_unknown_button_is_refused() -> None:
    async with open_server() as server:
        answer = await send(server, await open_form(server))
        assert answer.status_code == 422
        assert "These values hold already." in answer.text
        assert (await send(server, await open_form(server), "explode")).status_code == 400
        assert (await send(server, {"generation": "77", "if_generation": "0"}, "restore")).status_code == 409
        assert (await send(server, {"if_generation": "x"}, "undo")).status_code == 422
        assert await audit(server) == []


async def test_the_forms_obey_the_operators_gate() -> None:
    settings = make_settings(security={"admin_token": "letmein", "api_keys": ["me=secret"]})
    async with open_server(settings) as server:
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer secret"}, 401),
            ({"Authorization": "Bearer letmein", "Origin": "https://evil.example"}, 403),
            ({"Authorization": "Bearer letmein", "Sec-Fetch-Site": "cross-site"}, 403),
            ({"Authorization": "Bearer letmein", "Origin": server.url}, 303),
        ):
            answer = await server.client.post("/admin", data={"action": "drain"}, headers=headers)
            assert answer.status_code == status, headers
        entries = await server.client.get("/admin/audit", headers={"Authorization": "Bearer letmein"})
        assert [entry["who"] for entry in entries.json()] == ["admin"]


async def test_hostile_reasons_are_text() -> None:
    async with open_server() as server:
        await send(server, await open_form(server) | {"max_num_seqs": "9", "reason": HOSTILE})
        wrong = await send(server, {"reason": HOSTILE, "if_generation": "1", "generation": "55"}, "restore")
        for text in (wrong.text, (await server.client.get("/admin")).text):
            assert "&lt;img src=x onerror=alert(1)&gt;" in text
            assert "<img" not in text
