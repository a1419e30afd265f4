"""The pages as a client sees them: status, headers, and what stands in them without any JavaScript."""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest
import trio

from app.assets import static_dir, templates_dir
from app.audit import AuditEntry, AuditLog
from app.http import create_app
from app.preview import Situation
from app.render.tuning import admin_variables, list_history
from engine.config import Limits
from tests.app.serving import CHAT, chat_body, make_settings, open_server
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from tests.app.serving import Server

HTML = {"Accept": "text/html"}


async def fetch(server: Server, path: str) -> str:
    answer = await server.client.get(path, headers=HTML)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    return answer.text


async def test_pages_are_whole_without_javascript() -> None:
    async with open_server() as server:
        chat = await fetch(server, "/")
        assert "Chat needs JavaScript" in chat
        assert "ready" in chat
        assert re.search(r'<form id="composer"[^>]* hidden>', chat)
        ops = await fetch(server, "/ops")
        for words in (
            "Output",
            "First token p95",
            "Waiting",
            "KV memory",
            "The table",
            "Nothing runs and nobody waits",
        ):
            assert words in ops
        admin = await fetch(server, "/admin")
        assert re.search(r'id="max_num_seqs"[^>]* max="16" step="1" value="4"', admin)
        assert re.search(r'<option value="continuous" selected>', admin)
        assert "at the start" in admin


@pytest.mark.parametrize("path", ["/", "/ops", "/admin", "/ops/stats.json", "/static/relevo.css"])
async def test_every_answer_has_the_security_headers(path: str) -> None:
    async with open_server() as server:
        headers = (await server.client.get(path)).headers
        policy = headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"


async def test_static_files_are_kept_for_ever_under_their_content() -> None:
    async with open_server() as server:
        page = await fetch(server, "/ops")
        addresses = re.findall(r'(?:src|href)="(/static/[^"]+)"', page)
        assert len(addresses) >= 5
        for address in addresses:
            answer = await server.client.get(address)
            assert answer.status_code == 200
            assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
            digest = hashlib.sha256(answer.content).hexdigest()
            assert address.endswith(f"?v={digest[:12]}")
        assert (await server.client.get("/static/relevo.css")).headers["cache-control"] == "no-cache"
        assert (await server.client.get("/static/../pyproject.toml")).status_code == 404
        assert (await server.client.get("/static/%2e%2e/pyproject.toml")).status_code == 404


async def test_the_json_twin_is_the_snapshot() -> None:
    async with open_server() as server:
        answer = await server.client.get("/ops/stats.json")
        assert answer.headers["cache-control"] == "no-store"
        stats = answer.json()
        assert stats["config"] == asdict(server.engine.limits)
        assert set(server.engine.snapshot()) <= set(stats)
        assert "loop_lag_seconds" in stats


async def test_a_running_request_is_on_the_dashboard_and_hostile_ids_are_text() -> None:
    async with open_server(step_seconds=0.02) as server, trio.open_nursery() as nursery:
        body = chat_body("<img src=x onerror=alert(1)>", max_tokens=200)
        nursery.start_soon(lambda: server.client.post("/v1/chat/completions", json=body))
        with trio.fail_after(PATIENCE_SECONDS):
            while not server.engine.snapshot()["requests"]["running"]:
                await trio.sleep(0.01)
        server.context.telemetry.tick(trio.current_time())
        page = await fetch(server, "/ops")
        assert "1 running · 0 waiting" in page
        assert re.search(r"chatcmpl-[0-9a-f]+ · seat 1 · prefill", page)
        assert "<img" not in page
        nursery.cancel_scope.cancel()


async def test_the_docs_page_has_the_state_of_this_moment() -> None:
    async with open_server(step_seconds=0.02) as server, trio.open_nursery() as nursery:
        assert re.search(r'id="state".*ready.* 0 requests running', await fetch(server, "/docs"), re.DOTALL)
        nursery.start_soon(lambda: server.client.post("/v1/chat/completions", json=chat_body(max_tokens=200)))
        with trio.fail_after(PATIENCE_SECONDS):
            while not server.engine.num_running:
                await trio.sleep(0.01)
        server.context.telemetry.tick(trio.current_time())
        assert "1 request running" in await fetch(server, "/docs")
        nursery.cancel_scope.cancel()


async def test_the_stream_sends_named_parts_and_says_goodbye() -> None:
    async with open_server() as server, trio.open_nursery() as nursery:
        nursery.start_soon(server.context.telemetry.run)
        text = ""
        with trio.fail_after(PATIENCE_SECONDS):
            async with server.client.stream("GET", "/ops/events") as answer:
                assert answer.headers["content-type"].startswith("text/event-stream")
                assert answer.headers["cache-control"] == "no-cache, no-transform"
                assert answer.headers["x-accel-buffering"] == "no"
                async for piece in answer.aiter_text():
                    text += piece
                    if text.count("event: state") == 2:
                        server.context.telemetry.close()
        assert text.startswith("retry: ")
        assert text.endswith("event: bye\ndata: The server is shutting down.\n\n")
        assert server.context.telemetry.num_watchers == 0
        nursery.cancel_scope.cancel()


async def test_a_watcher_that_leaves_is_forgotten() -> None:
    async with open_server() as server, trio.open_nursery() as nursery:
        nursery.start_soon(server.context.telemetry.run)
        with trio.fail_after(PATIENCE_SECONDS):
            async with await trio.open_tcp_stream("127.0.0.1", server.port) as stream:
                await stream.send_all(b"GET /ops/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
                while b"event: state" not in await stream.receive_some():
                    pass
                assert server.context.telemetry.num_watchers == 1
            while server.context.telemetry.num_watchers:
                await trio.sleep(0.02)
        nursery.cancel_scope.cancel()


async def test_the_tuning_page_shows_the_history() -> None:
    async with open_server() as server:
        for seats, reason in ((8, "<b>more</b>"), (2, "steadier")):
            body = {"max_num_seqs": seats, "reason": reason}
            assert (await server.client.patch("/admin/config", json=body)).status_code == 200
        page = await fetch(server, "/admin")
        assert "&lt;b&gt;more&lt;/b&gt;" in page
        assert "<b>more</b>" not in page
        assert re.findall(r'id="revert-(\d)"', page) == ["1", "0"]
        for generation, seats in (("1", 8), ("0", 4)):
            answer = await server.client.post("/admin", data={"action": "restore", "generation": generation})
            assert answer.status_code == 303
            config = (await server.client.get("/admin/config")).json()
            assert config["effective"]["max_num_seqs"] == seats


async def test_the_tuning_page_shows_words_where_0_stands_for_them() -> None:
    async with open_server() as server:
        body: dict[str, Any] = {"long_prefill_token_threshold": 16, "dynamic_preferred_size": 2, "ttl_seconds": 600}
        assert (await server.client.patch("/admin/config", json=body)).status_code == 200
        page = await fetch(server, "/admin")
        assert "Chunk limit goes back by itself to none on" in page
        assert re.search(r'Dynamic batch size auto <span aria-label="to">→</span> <b>2</b>', page)
        body = {"long_prefill_token_threshold": "none", "dynamic_preferred_size": "auto"}
        assert (await server.client.patch("/admin/config", json=body)).status_code == 200
        page = await fetch(server, "/admin")
        assert re.search(r'data-value="long_prefill_token_threshold" data-raw="0">none<', page)
        assert re.search(r'data-value="dynamic_preferred_size" data-raw="0">auto<', page)
        assert re.search(r'data-value="dynamic_max_queue_delay_seconds"[^>]*>0.1<', page)


def test_the_values_of_each_generation_are_worked_out_backwards() -> None:
    log = AuditLog()
    time = "2026-01-31T12:00:00.000Z"
    log.add(AuditEntry(1, time, "admin", {"a": (1, 2)}))
    log.add(AuditEntry(2, time, "admin", {"b": (5, 6)}))
    log.add(AuditEntry(3, time, "ttl", {"a": (2, 3), "b": (6, 5)}))
    rows = list_history({"a": 3, "b": 5}, 3, log.entries)
    assert [(row["generation"], row["values"]) for row in rows] == [
        (3, {"a": 3, "b": 5}),
        (2, {"a": 2, "b": 6}),
        (1, {"a": 2, "b": 5}),
        (0, {"a": 1, "b": 5}),
    ]
    assert [row["current"] for row in rows] == [True, False, False, False]


async def test_the_tuning_page_tells_of_every_end_and_of_none_that_was_called_off() -> None:
    async with open_server() as server:

        async def patch(**body: object) -> None:
            assert (await server.client.patch("/admin/config", json=body)).status_code == 200

        await patch(max_num_seqs=8, ttl_seconds=600)
        await patch(max_num_batched_tokens=32)  # another key, for good: the first still ends
        page = await fetch(server, "/admin")
        assert "Seats goes back by itself to 4 on" in page
        await patch(max_num_seqs=8)  # the same value, for good
        page = await fetch(server, "/admin")
        assert "goes back by itself" not in page
        assert "the same until changed again" in page
        assert len(re.findall(r'id="revert-1"', page)) == 1
        assert page.count(">now<") == 1


def test_a_pending_drain_and_an_end_are_told() -> None:
    config: dict[str, Any] = {
        "generation": 1,
        "effective": {"max_num_seqs": 4},
        "start": {"max_num_seqs": 16},
        "choices": {},
        "ranges": {"max_num_seqs": [1, 16]},
        "pending_drain": {"max_num_seqs": 12, "policy": 3},
        "reverts": {"max_num_seqs": {"to": 16, "at": "2026-01-31T13:00:00.000Z"}},
    }
    now = Situation(16, 3, 3, 40, 0, 0.02, None, None, ())
    shown = admin_variables(config, Limits(4, 64), now)
    assert (shown["above"], shown["switching"], shown["draining"]) == (12, 3, False)
    assert (shown["fields"][0]["now"], shown["fields"][0]["start"]) == ("16 of 4 taken, 3 waiting.", 16)
    assert shown["reverts"] == [{"title": "Seats", "to": 16, "at": "31 Jan 13:00:00 UTC"}]


async def test_pages_ask_for_a_login_where_there_is_a_token() -> None:
    security = {"admin_token": "letmein", "api_keys": ["me=key"]}
    async with open_server(make_settings(security=security)) as server:
        for path in ("/", "/ops", "/admin", "/ops/events"):
            answer = await server.client.get(path, headers=HTML)
            assert answer.status_code == 303
            assert answer.headers["location"].startswith("/login?next=")
        form = await fetch(server, "/login?next=/ops")
        assert 'name="next" value="/ops"' in form
        assert 'name="token"' in form
        refused = await server.client.post("/login", data={"token": "<i>x", "next": "/ops"})
        assert refused.status_code == 401
        assert "aria-invalid" in refused.text


async def test_a_slash_behind_a_page_leads_to_it_and_behind_nothing_else() -> None:
    async with open_server() as server:
        await server.client.post(CHAT, json=chat_body(max_tokens=1))
        rules = [rule for rule in create_app(server.context).url_map.iter_rules() if "GET" in (rule.methods or ())]
        for rule in rules:
            path = rule.rule.replace("<number>", "1").replace("<path:name>", "fake").rstrip("/")
            if "<" in path or path.endswith("/events"):
                continue
            answer = await server.client.get(path, headers=HTML)
            slashed = await server.client.get(f"{path}/?window=1&x=%0d%0a", headers=HTML)
            # A page that wants to know of what is one as well; every refusal is told to people as a page.
            is_page = answer.status_code == 200 or (answer.status_code == 400 and not path.endswith(".json"))
            if is_page and "<!doctype html>" in answer.text and path:
                assert slashed.status_code == 308, path
                assert slashed.headers["location"] == f"{path}?window=1&x=%0d%0a"
                assert (await server.client.head(f"{path}/")).status_code == 308
            else:
                assert slashed.status_code == (404 if path else 200), path
        # Two slashes at the beginning are one to every route; in an address to go to they would name another host.
        assert (await server.client.get(f"{server.url}//ops/")).headers["location"] == "/ops"
        for path in ("/ops//", "/ops/requests/1/abort/", "/v1/chat/completions/", "/admin/keys/1/", "/x/"):
            assert (await server.client.get(server.url + path)).status_code == 404, path
        assert (await server.client.post("/login/", data={})).status_code == 404


async def test_an_unknown_address_is_a_page_for_people() -> None:
    async with open_server() as server:
        answer = await server.client.get("/nowhere<b>", headers=HTML)
        assert answer.status_code == 404
        assert "To the dashboard" in answer.text
        assert "<b>" not in answer.text


def test_vendored_scripts_are_what_their_list_says() -> None:
    folder = static_dir() / "vendor"
    listed = dict(re.findall(r"`([\w.-]+\.(?:js|css))` \|.*`([0-9a-f]{64})`", (folder / "README.md").read_text()))
    assert set(listed) == {path.name for path in folder.iterdir() if path.suffix in (".js", ".css")}
    for name, digest in listed.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    assert "Zero-Clause BSD" in (folder / "LICENSE.htmx.txt").read_text()


def test_templates_need_no_inline_script_or_style() -> None:
    for path in templates_dir().glob("*.html"):
        text = path.read_text()
        assert not re.search(r"\son\w+=|javascript:|<script(?![^>]*\ssrc=)", text), path.name
        # A comparison is a file that people keep and pass on: it carries its own style.
        assert path.name in ("compare.html", "limit_report.html") or not re.search(r"<style|\sstyle=", text), path.name
    for path in static_dir().rglob("*.js"):
        if path.parent.name == "vendor":
            continue
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(|outerHTML", path.read_text()), path
