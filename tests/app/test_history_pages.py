"""The history over HTTP: what survives a restart, the page without a script, its JSON and its CSV."""

from __future__ import annotations

import csv
import io
import re
from contextlib import asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest
import trio

from app.journal.journal import open_journal
from app.journal.rows import COLUMNS
from app.journal.series import NAMES
from tests.app.serving import CHAT, chat_body, make_settings, open_server
from tests.app.test_journal import row
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.app.serving import Server

HTML = {"Accept": "text/html"}
HOSTILE = "<img src=x onerror=alert(1)>"
T0 = 1_700_000_040


@asynccontextmanager
async def serve(folder: Path, **limits: Any) -> AsyncIterator[Server]:
    """A server that keeps its history in `folder`, as one that is started does."""
    async with open_journal(folder) as journal:
        limits |= {"first_generation": journal.audit.generation}
        async with open_server(journal=journal, limits=limits) as server:
            yield server


async def audit(server: Server) -> list[dict[str, Any]]:
    answer = await server.client.get("/admin/audit")
    entries: list[dict[str, Any]] = answer.json()
    return entries


async def patch(server: Server, **body: Any) -> dict[str, Any]:
    answer = await server.client.patch("/admin/config", json=body)
    assert answer.status_code == 200, answer.text
    config: dict[str, Any] = answer.json()
    return config


async def test_changes_survive_a_restart_and_generations_go_on(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        assert await audit(server) == []
        await patch(server, max_num_seqs=8, reason=HOSTILE)
        assert (await patch(server, max_num_batched_tokens=32, ttl_seconds=600))["generation"] == 2
        before = await audit(server)
        assert [entry["reverted"] for entry in before] == [None, None]
    async with serve(tmp_path) as server:
        with trio.fail_after(PATIENCE_SECONDS):
            while len(after := await audit(server)) < 3:
                await trio.sleep(0.01)
        # The start goes back to the configuration, and with it what was changed for a while.
        assert (before[0].pop("effect")["state"], after[0].pop("effect")["state"]) == ("early", "unknown")
        assert after[0] == before[0]
        assert after[1]["reverted"] == after[2]["time"]
        assert after[2]["who"] == "start"
        assert after[2]["changes"] == {"max_num_seqs": [8, 4], "max_num_batched_tokens": [32, 64]}
        config = (await server.client.get("/admin/config")).json()
        assert (config["generation"], after[2]["generation"]) == (3, 3)
        assert (await patch(server, max_num_seqs=5))["generation"] == 4
        page = (await server.client.get("/admin", headers=HTML)).text
        assert "&lt;img src=x onerror=alert(1)&gt;" in page
        assert "<img" not in page
        assert re.findall(r'id="revert-(\d)"', page) == ["3", "2", "1", "0"]
        await server.client.post("/admin", data={"action": "restore", "generation": "1"})
        effective = (await server.client.get("/admin/config")).json()["effective"]
        assert (effective["max_num_seqs"], effective["max_num_batched_tokens"]) == (8, 64)
    async with serve(tmp_path, max_num_seqs=5) as server:  # the configuration was changed to what holds
        with trio.fail_after(PATIENCE_SECONDS):
            while len(after := await audit(server)) < 6:
                await trio.sleep(0.01)
        assert [entry["generation"] for entry in after] == [1, 2, 3, 4, 5, 6]


async def test_a_change_that_ended_by_itself_says_when(autojump_clock: object) -> None:
    async with open_server() as server:
        live, log = server.context.live, server.context.journal.audit
        await live.apply({"max_num_seqs": 8, "ttl_seconds": 60}, who="me")
        await live.apply({"max_num_seqs": 8, "ttl_seconds": 600}, who="me")  # for longer: the first plan is over
        await trio.sleep(601)
        assert [entry.who for entry in log.entries] == ["me", "me", "ttl"]
        assert [entry.reverted for entry in log.entries] == [log.entries[1].time, log.entries[2].time, None]
        assert [event.kind for event in server.context.journal.events] == ["config", "revert"]


async def test_events_and_the_state_of_the_history_are_in_the_stats_and_on_the_dashboard(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        await patch(server, max_num_seqs=8, reason=HOSTILE)
        stats = await server.stats()
        assert [event["kind"] for event in stats["events"]] == ["config", "start"]
        assert stats["events"][0]["text"] == f"Seats 4 → 8, by 127.0.0.1: {HOSTILE}"
        assert stats["history"]["problem"] is None
        server.context.telemetry.tick(trio.current_time())
        for path in ("/ops", "/ops/history"):
            page = (await server.client.get(path, headers=HTML)).text
            assert "Seats 4 → 8, by 127.0.0.1: &lt;img" in page
            assert "<img" not in page
        ops = (await server.client.get("/ops", headers=HTML)).text
        assert ops.count('<g class="event config">') == ops.count('<figure class="card'), "a mark on each chart"
        assert f"{stats['events'][0]['running']} running" in ops


async def test_what_is_not_kept_is_said_on_the_pages_and_counted() -> None:
    async with open_server() as server:
        journal = server.context.journal
        journal._problem, journal.num_failures = "the disk is <full>", 3
        for path in ("/ops", "/ops/history", "/admin"):
            assert "the disk is &lt;full&gt;" in (await server.client.get(path, headers=HTML)).text, path
        metrics = (await server.client.get("/metrics")).text
        assert "relevo:history_write_failures_total 3.0" in metrics
        assert "relevo:history_dropped_rows_total 0.0" in metrics


async def test_a_served_request_is_in_the_history(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        assert (await server.client.post(CHAT, json=chat_body(max_tokens=7))).status_code == 200
        await server.settle()
        server.context.telemetry.tick(trio.current_time())
        answer = (await server.client.get("/ops/history.json?range=60")).json()
        series = answer["series"]
        assert set(series) == {"time", *NAMES.values()}
        assert series["output_tokens_per_second"] == [7.0]
        assert series["requests_per_second"] == [1.0]
        assert series["ttft_p95_seconds"][0] > 0
        assert answer["targets"]["ttft_p95_seconds"] == 2.0
        assert (answer["step_seconds"], answer["to"] - answer["from"]) == (1, 60)
        assert [event["kind"] for event in answer["events"]] == ["start"]
    async with serve(tmp_path) as server:
        answer = (await server.client.get("/ops/history.json?range=60")).json()
        assert answer["series"]["output_tokens_per_second"] == [7.0]
        assert [event["kind"] for event in answer["events"]] == ["start", "stop", "start"]


async def fill(server: Server, *seconds: int) -> None:
    for second in seconds:
        server.context.journal.put_row(row(T0 + second, output_tokens=6, waiting=3.0, waiting_max=5.0, ttft_p95=0.25))
    await server.context.journal.flush()


async def test_the_csv_is_whole_and_leaves_out_when_the_server_was_down(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        await fill(server, *range(3000), *range(90_000, 90_010))
        answer = await server.client.get(f"/ops/history.csv?from={T0}&to={T0 + 100_000}")
        assert answer.headers["content-type"] == "text/csv; charset=utf-8"
        assert answer.headers["content-disposition"].startswith('attachment; filename="relevo-20231114T2214')
        found = list(csv.DictReader(io.StringIO(answer.text)))
        assert list(found[0]) == ["time", *NAMES.values()]
        assert len(found) == 3010
        assert sum(float(line["output_tokens_per_second"]) for line in found) == 6 * 3010
        assert found[0]["time"] == "2023-11-14T22:14:00.000Z"
        assert (found[0]["ttft_p95_seconds"], found[0]["ttft_p50_seconds"]) == ("0.25", "")
        few = await server.client.get(f"/ops/history.csv?from={T0}&to={T0 + 3599}&points=60")
        lines = list(csv.DictReader(io.StringIO(few.text)))
        assert [(line["waiting"], line["waiting_max"]) for line in lines] == [("3.0", "5.0")] * 50
        none = await server.client.get("/ops/history.csv?from=100&to=10000")
        assert none.text.count("\n") == 1


async def test_times_may_be_iso_and_gaps_are_null(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        await fill(server, *range(5), *range(50, 55))
        asked = {"from": "2023-11-14T22:14:00Z", "to": "2023-11-14T23:15:00+01:00", "points": "1000"}
        series = (await server.client.get("/ops/history.json", params=asked)).json()["series"]
        assert series["waiting"] == [3.0] * 5 + [None] + [3.0] * 5
        assert series["time"][5] == T0 + 5


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("from=yesterday", "from"), ("to=nan", "to"), ("to=-5", "to"), ("to=1e99", "to"), ("to=inf", "to"),
        ("from=2000&to=1000", "to"), ("from=0&to=1700000000", "to"), ("range=5", "range"), ("range=x", "range"),
        ("points=1", "points"), ("points=99999999", "points"), ("points=", "points"),
        ("to=9999-12-31T23:59:59-23:00", "to"), (f"range={'9' * 5000}", "range"),
    ],
)  # fmt: skip
async def test_nonsense_is_refused_by_name(query: str, param: str) -> None:
    async with open_server() as server:
        answer = await server.client.get(f"/ops/history.json?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        if param != "points":
            page = await server.client.get(f"/ops/history?{query}", headers=HTML)
            assert (page.status_code, page.headers["content-type"]) == (400, "text/html; charset=utf-8")


async def test_the_page_is_whole_without_javascript(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        await fill(server, *range(300), *range(3000, 3300))
        page = (await server.client.get(f"/ops/history?from={T0}&to={T0 + 3599}", headers=HTML)).text
        text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page)).replace("\N{NO-BREAK SPACE}", " ")
        assert "14 Nov 22:14:00 UTC to 14 Nov 23:13:59 UTC" in text
        assert "Output tokens/s 6.0 6.0" in text
        assert "Waiting 3 5" in text
        assert "First token, p95 — 250 ms" in text, "percentiles are not averaged"
        assert "nothing was measured" in text
        assert text.count("250 ms") == 5, "one in the summary and one for each five minutes"
        for seconds in (900, 3600, 21600, 86400, 604800, 2678400):
            assert f'href="/ops/history?range={seconds}"' in page
        assert f'href="/ops/history.csv?from={T0}&amp;to={T0 + 3599}"' in page
        empty = (await server.client.get("/ops/history?from=100&to=10000", headers=HTML)).text
        assert "Nothing was measured in this time." in empty


async def test_only_who_may_see_the_dashboard_may_see_the_history() -> None:
    security = {"admin_token": "letmein", "api_keys": ["me=key"]}
    async with open_server(make_settings(security=security)) as server:
        for path in ("/ops/history.json", "/ops/history.csv"):
            for given, status in ((None, 401), ("key", 401), ("letmein", 200)):
                headers = {} if given is None else {"Authorization": f"Bearer {given}"}
                assert (await server.client.get(path, headers=headers)).status_code == status
        assert (await server.client.get("/ops/history", headers=HTML)).status_code == 303


def test_every_column_has_a_name_for_programs() -> None:
    assert {*NAMES} == {*COLUMNS} - {"time", "seconds"}
    assert datetime.fromisoformat("2023-11-14T22:14:00Z").timestamp() == T0
