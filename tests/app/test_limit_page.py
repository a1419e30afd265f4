"""`/ops/limit` over real sockets: a process that is stood in for tells of a search, beside users or without them."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import trio

from app import services
from app.journal.journal import open_journal
from app.limit_page import child, service
from app.limit_page.kept import KeptSearches
from app.limit_page.service import LimitSearches
from app.limit_page.wish import MAX_MIX
from app.recording.recorder import open_recorder
from tests.app.limit_lines import RUNS, progress_line, result_of, run_at, run_line, whole_script, wish, write_script
from tests.app.serving import CHAT, chat_body, make_settings, open_server
from tests.fixtures_browser import server as server_process
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from tests.app.serving import Server

HTML = {"Accept": "text/html"}
HOSTILE = "<img src=x onerror=alert(1)>"
ADMIN = {"Authorization": "Bearer letmein"}

LOST = result_of([run_at(4.0, 9.0)])


@asynccontextmanager
async def serve(folder: Path, lines: Sequence[dict[str, Any]], **options: Any) -> AsyncIterator[Server]:
    """A server whose searches do what the lines say, and are kept in a folder."""
    command = write_script(folder / "script.jsonl", lines)
    kept = options.pop("kept", KeptSearches(folder / "limits"))
    async with open_server(make_searches=partial(LimitSearches, kept=kept, command=command), **options) as server:
        yield server


async def start(server: Server, **fields: Any) -> str:
    answer = await server.client.post("/ops/limit", json=wish(**fields))
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


async def search(server: Server, **headers: str) -> dict[str, Any]:
    answer = await server.client.get("/ops/limit.json", headers=headers)
    told: dict[str, Any] = answer.json()["search"]
    return told


async def until(server: Server, condition: str, **headers: str) -> dict[str, Any]:
    """Wait until that is so of the search, which is `it`."""
    with trio.fail_after(PATIENCE_SECONDS):
        while not eval(condition, {"it": (told := await search(server, **headers))}):
            await trio.sleep(0.01)
    return told


def plain(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page)).replace("\N{NO-BREAK SPACE}", " ")


async def test_a_search_is_seen_growing_and_what_came_of_it_outlives_the_server(tmp_path: Path) -> None:
    script = whole_script(think_time=20.0)
    script.insert(7, {"wait": str(tmp_path / "go")})
    async with serve(tmp_path, script) as server:
        page = plain((await server.client.get("/ops/limit", headers=HTML)).text)
        assert "No search has run since the server was started." in page
        search_id = await start(server, think_time=20.0, note=HOSTILE)
        told = await until(server, "len(it['curve']) == 2")
        assert (told["end"], told["stopping"], told["trying"]["rate"]) == (None, False, 5.2)
        finding = (await server.stats())["diagnosis"][0]
        assert (finding["level"], finding["what"]) == ("warn", "A search for the limit runs")
        raw = (await server.client.get("/ops/limit", headers=HTML)).text
        page = plain(raw)
        assert "A search runs" in page
        assert "5.20 requests/s: 37 of 400 requests answered" in page
        assert "about 7 min left" in page
        assert raw.count('<svg class="spot ') == 2 * 3
        assert "<img" not in raw
        (tmp_path / "go").touch()
        told = await until(server, "it['end']")
        assert (told["end"], told["result"]["limit"]["requests_per_second"]) == ("found", 5.8)
        assert told["curve"] == [line["say"] for line in script_runs()]
        assert told["planned_seconds"] == 480
        page = plain((await server.client.get("/ops/limit", headers=HTML)).text)
        for words in (
            "Operating limit 5.80 requests/s between 5.80 and 6.09",
            "Bound by sequences beyond it first tokens come too late",
            "Bound by sequences. Nearly all seats (max_num_seqs) were taken, and whoever came waited for one.",
            "Users at once 131",
            "One user alone 200 ms to the first token",
            "8.00 0 no: first tokens come too late 9.00 s 100 ms 10.0 s 400 0",
            "unknown: sent 200 ms late",
            "A p99 wants 1,000 finished requests",
        ):
            assert words in page, words
        events = [event["text"] for event in (await server.stats())["events"] if event["kind"] == "limit"]
        assert events[1] == "A search for the limit begins, by 127.0.0.1: azure-conversation"
        assert events[0] == "The search for the limit ended: 5.80 requests/s (5.80 to 6.09), bound by sequences"
    async with serve(tmp_path, script) as server:
        with trio.fail_after(PATIENCE_SECONDS):
            while not (answer := (await server.client.get("/ops/limit.json")).json())["kept"]:
                await trio.sleep(0.01)
        assert answer["search"] is None
        assert answer["kept"][0]["id"] == search_id
        assert (await server.client.get(f"/ops/limit/{search_id}.json")).json() == told
        raw = (await server.client.get(f"/ops/limit/{search_id}", headers=HTML)).text
        assert "Operating limit 5.80 requests/s" in plain(raw)
        assert "“&lt;img src=x onerror=alert(1)&gt;”" in raw
        assert "<img" not in raw
        report = await server.client.get(f"/ops/limit/{search_id}/report")
        assert report.headers["content-disposition"] == f'attachment; filename="relevo-limit-{search_id}.html"'
        assert "5.80 requests/s" in plain(report.text)
        assert "<script" not in report.text
        assert (await server.client.delete(f"/ops/limit/{search_id}")).json()["deleted"]
        assert (await server.client.get(f"/ops/limit/{search_id}.json")).status_code == 404
        assert (await server.client.get("/ops/limit.json")).json()["kept"] == []


def script_runs() -> list[dict[str, Any]]:
    """The lines of the runs at rates, as the search keeps them."""
    lines = [run_line(run) for run in RUNS]
    for line in lines:
        del line["say"]["event"], line["say"]["kind"]
    return lines


async def test_two_searches_are_compared(tmp_path: Path) -> None:
    async with serve(tmp_path, whole_script()) as server:
        first = await start(server)
        await until(server, "it['end']")
        write_script(tmp_path / "script.jsonl", whole_script([run_at(3.0, 0.5), run_at(4.1, 4.0)]))
        second = await start(server)
        await until(server, "it['end']")
        answer = await server.client.get("/ops/limit/compare", params={"id": [second, first]}, headers=HTML)
        page = plain(answer.text)
        assert ("Then" if first < second else "Now") + ": 5.80 requests/s" in page
        assert 'class="spot older"' in answer.text
        assert "Forget this search" not in page
        one = await server.client.get("/ops/limit/compare", params={"id": [first]})
        assert (one.status_code, one.json()["error"]["param"]) == (400, "id")
        for wrong in ("nothing", "20261130T090000Z-ffffffff", "..%2f..%2fetc%2fpasswd"):
            assert (await server.client.get(f"/ops/limit/{wrong}.json")).status_code == 404


async def test_while_users_are_served_it_is_refused_with_their_number(tmp_path: Path) -> None:
    async with serve(tmp_path, whole_script(), limits={"max_num_seqs": 1}) as server, trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(partial(server.client.post, CHAT, json=chat_body(max_tokens=400, ignore_eos=True)))
        with trio.fail_after(PATIENCE_SECONDS):
            while server.engine.num_running + server.engine.num_waiting < 2:
                await trio.sleep(0.001)
        answer = await server.client.post("/ops/limit", json=wish())
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (409, "users_are_served", "beside_users")
        assert "1 request running, 1 waiting" in error["message"]
        form = {"workload": "azure-code", "ttft_p95_seconds": "1.5", "note": HOSTILE}
        page = await server.client.post("/ops/limit", data=form, headers=HTML)
        assert page.status_code == 409
        assert "1 request running, 1 waiting" in page.text
        assert '<option value="azure-code" selected>' in page.text
        assert 'value="1.5"' in page.text
        assert "<img" not in page.text
        assert server.context.searches.search is None
        nursery.cancel_scope.cancel()


async def test_a_user_who_comes_ends_it_and_what_was_measured_is_kept(tmp_path: Path) -> None:
    script = [*whole_script()[:5], {"wait": str(tmp_path / "never")}]
    keyed = make_settings(security={"api_keys": ["alice=key", "bob=key2"], "admin_token": "letmein"})
    async with serve(tmp_path, script, settings=keyed) as server:
        assert (await server.client.post("/ops/limit", json=wish(), headers=ADMIN)).status_code == 202
        await until(server, "it['curve']", **ADMIN)
        lent = server.context.keys.keyring.lent
        assert lent is not None
        answer = await server.client.post(CHAT, json=chat_body(max_tokens=3), headers={"Authorization": "Bearer key"})
        assert answer.status_code == 200
        told = await until(server, "it['end']", **ADMIN)
        assert (told["end"], told["requests_of_users"], len(told["curve"])) == ("users", 1, 1)
        assert "a request of the key 'alice' came in" in told["why"]
        assert server.context.keys.keyring.lent is None
        kept = (await server.client.get("/ops/limit.json", headers=ADMIN)).json()["kept"]
        assert [(one["end"], one["runs"]) for one in kept] == [("users", 1)]
        assert (await server.client.get(f"/ops/limit/{told['id']}/report", headers=ADMIN)).status_code == 404
        page = plain((await server.client.get("/ops/limit", headers=HTML | ADMIN)).text)
        assert "It ended: users came." in page
        assert "What it had measured by then is below" in page
        assert "Begin it again when they have gone, or let it run beside users, as background work" in page
        (entry,) = (await server.client.get("/admin/audit", headers=ADMIN)).json()
        assert (entry["who"], entry["deed"], entry["changes"]) == (
            "admin",
            "Search for the limit: azure-conversation",
            {},
        )
        assert entry["outcome"].startswith("It ended: users came: After ")
        again = await server.client.get("/ops/limit", params={"again": told["id"]}, headers=HTML | ADMIN)
        assert 'name="ttft_p95_seconds" value="2"' in again.text
        assert 'name="duration" value="480"' in again.text


@pytest.mark.parametrize("measured", [2, 3])
async def test_what_was_measured_before_the_first_rate_is_kept_too_and_before_its_end_is_told(
    tmp_path: Path, measured: int
) -> None:
    script = [*whole_script()[:measured], progress_line(4.0, 1), {"wait": str(tmp_path / "never")}]
    kept = SlowlyKept(tmp_path / "limits")
    async with serve(tmp_path, script, kept=kept) as server:
        search_id = await start(server)
        await until(server, "it['trying']['ended'] == 1")
        await server.client.post("/ops/limit/stop")
        await kept.wait_until_begun()
        assert (await search(server))["end"] is None, "it is not on disk yet"
        refused = await server.client.post("/ops/limit", json=wish())
        assert refused.json()["error"]["code"] == "is_searching"
        kept.goes_on.set()
        await until(server, "it['end'] == 'stopped'")
        assert [one["id"] for one in (await server.client.get("/ops/limit.json")).json()["kept"]] == [search_id]
        (entry,) = (await server.client.get("/admin/audit")).json()
        assert entry["outcome"] == "It was stopped: By 127.0.0.1"


class SlowlyKept(KeptSearches):
    """A disk that takes a search, or lets go of it, only when it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.begun, self.goes_on = False, threading.Event()

    def keep(self, told: dict[str, Any]) -> None:
        self._wait()
        super().keep(told)

    def delete(self, search_id: str) -> None:
        self._wait()
        super().delete(search_id)

    def _wait(self) -> None:
        self.begun = True
        assert self.goes_on.wait(PATIENCE_SECONDS)

    async def wait_until_begun(self) -> None:
        with trio.fail_after(PATIENCE_SECONDS):
            while not self.begun:
                await trio.sleep(0.001)


async def test_one_that_begins_while_the_last_is_being_forgotten_goes_on(tmp_path: Path) -> None:
    kept = SlowlyKept(tmp_path / "limits")
    kept.goes_on.set()
    script = [*whole_script(), {"wait": str(tmp_path / "go")}]
    async with serve(tmp_path, script, kept=kept) as server, trio.open_nursery() as nursery:
        (tmp_path / "go").touch()
        first = await start(server)
        await until(server, "it['end']")
        (tmp_path / "go").unlink()
        kept.goes_on.clear()
        kept.begun = False
        nursery.start_soon(server.client.delete, f"/ops/limit/{first}")
        await kept.wait_until_begun()
        second = await start(server)
        kept.goes_on.set()
        with trio.fail_after(PATIENCE_SECONDS):
            while (await server.client.get("/ops/limit.json")).json()["kept"]:
                await trio.sleep(0.001)
        assert (await search(server))["id"] == second
        (tmp_path / "go").touch()
        assert (await until(server, "it['end']"))["id"] == second


async def test_a_result_that_is_there_when_the_server_ends_is_kept(tmp_path: Path) -> None:
    kept = SlowlyKept(tmp_path / "limits")
    async with open_server() as server, trio.open_nursery() as nursery:
        searches = make_searches(server, tmp_path, whole_script(), kept)
        nursery.start_soon(searches.run)
        began = searches.start(searches_wish(), server.url, "me")
        await kept.wait_until_begun()
        nursery.cancel_scope.cancel()
        kept.goes_on.set()
    assert searches.search is not None
    assert searches.search.end == "found"
    assert kept.read(began.search_id)["result"]["limit"]["requests_per_second"] == 5.8


def make_searches(server: Server, folder: Path, lines: Sequence[dict[str, Any]], kept: KeptSearches) -> LimitSearches:
    """Searches beside those of the server, which the test runs."""
    context, command = server.context, write_script(folder / "script.jsonl", lines)
    return LimitSearches(server.engine, context.keys.keyring, context.journal, kept, command)


class BrokenKept(KeptSearches):
    """A disk of which nobody has foreseen how it fails."""

    def keep(self, told: dict[str, Any]) -> None:
        raise RuntimeError(f"{told['id']} is too much")


NO_FIGURES = {"say": {"event": "result", "result": {**LOST, "limit": {"requests_per_second": 5.8}}}}


@pytest.mark.parametrize(
    ("script", "kind", "outcome"),
    [
        (whole_script(), BrokenKept, "5.80 requests/s (5.80 to 6.09), bound by sequences"),
        ([NO_FIGURES], KeptSearches, "found"),
    ],
)
async def test_after_one_whose_end_went_wrong_another_can_begin(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: list[dict[str, Any]],
    kind: type[KeptSearches],
    outcome: str,
) -> None:
    monkeypatch.setattr(services, "RESTART_SECONDS", 0.0)
    beside = services.Services()
    async with open_server() as server, trio.open_nursery() as nursery:
        searches = make_searches(server, tmp_path, script, kind(tmp_path / "limits"))
        nursery.start_soon(beside.run, "search", searches.run)
        for number in (1, 2):
            searches.start(searches_wish(), server.url, "me")
            with trio.fail_after(PATIENCE_SECONDS):
                while searches.running is not None:
                    await searches.changed.wait()
            assert searches.search is not None
            assert searches.search.end == "found"
            assert [entry.outcome for entry in server.context.journal.audit.entries] == [outcome] * number
        nursery.cancel_scope.cancel()
    assert beside.num_faults["search"] == 2


async def test_a_search_of_which_nothing_is_kept_can_be_forgotten_and_that_is_in_the_history(tmp_path: Path) -> None:
    async with serve(tmp_path, [{"exit": 1, "error": "relevo: no luck"}]) as server:
        search_id = await start(server)
        await until(server, "it['end']")
        assert not (tmp_path / "limits").exists()
        assert (await server.client.delete(f"/ops/limit/{search_id}")).json()["deleted"]
        assert (await server.client.get("/ops/limit.json")).json()["search"] is None
        assert (await server.client.delete(f"/ops/limit/{search_id}")).status_code == 404
        entries = (await server.client.get("/admin/audit")).json()
        assert [(entry["deed"], entry["outcome"]) for entry in entries] == [
            ("Search for the limit: azure-conversation", "It failed: no luck"),
            (f"Search for the limit {search_id} forgotten", "done"),
        ]


async def test_where_it_is_not_known_what_bound_a_limit_the_page_says_why(tmp_path: Path) -> None:
    result = result_of()
    result["limit"]["bound_by"] = "unknown: the server shows no metrics"
    async with serve(tmp_path, [{"say": {"event": "result", "result": result}}]) as server:
        await start(server)
        await until(server, "it['end']")
        page = plain((await server.client.get("/ops/limit", headers=HTML)).text)
        assert "What bound it is not known: the server shows no metrics. The server did not tell how full" in page
        limit = "5.80 requests/s (5.80 to 6.09) ; what bound it is unknown (the server shows no metrics)"
        assert limit in page, "among the earlier searches"
        (entry,) = (await server.client.get("/admin/audit")).json()
        assert entry["outcome"] == limit.replace(" ;", ";")


async def test_what_is_asked_again_is_what_was_asked_but_for_a_recording_that_is_gone(tmp_path: Path) -> None:
    mix = '[[class]]\nname = "a"\nshare = 1\nprompt_tokens = 5\noutput_tokens = 5\n'
    asked = {"workload": "mix", "mix": mix, "factor": 2.5, "itl_p95_seconds": None, "note": "as before", "tune": True}
    asked |= {"arrivals": "gamma", "gap_cv": 13}
    async with serve(tmp_path, [{"exit": 1, "error": ""}]) as server:
        first = await start(server, **asked)
        told = await until(server, "it['end']")
        page = (await server.client.get("/ops/limit", params={"again": first}, headers=HTML)).text
        for part in (
            '<option value="mix" selected>', 'name="factor" value="2.5"', 'name="note" value="as before"',
            'name="itl_p95_seconds" value=""', 'name="tune" checked', "name = &#34;a&#34;",
            '<option value="gamma" selected>', 'name="gap_cv" value="13"', "mix, gamma arrivals of CV 13, lengths",
        ):  # fmt: skip
            assert part in page, part
        assert 'name="beside_users" checked' not in page
        kept = {**told, "id": "20261130T090000Z-00000000", "asked": {**told["asked"], "workload": "recording:gone"}}
        KeptSearches(tmp_path / "limits").keep(kept)
        page = (await server.client.get("/ops/limit", params={"again": kept["id"]}, headers=HTML)).text
        assert re.search(r'id="workload-error" role="alert">recording:gone is not there any more', page)
        assert (await server.client.get("/ops/limit", params={"again": "x"}, headers=HTML)).status_code == 404


async def test_names_that_turn_words_around_are_shown_as_they_are_written(tmp_path: Path) -> None:
    result = result_of() | {"remarks": ["of \u202eevil\u2066\x1b[31m"]}
    async with serve(tmp_path, [{"say": {"event": "result", "result": result}}]) as server:
        search_id = await start(server)
        assert (await until(server, "it['end']"))["result"]["remarks"] == result["remarks"]
        for path in ("/ops/limit", f"/ops/limit/{search_id}"):
            page = (await server.client.get(path, headers=HTML)).text
            assert r"of \u202eevil\u2066\x1b[31m" in page
            assert "\u202e" not in page


async def test_beside_users_it_is_background_work_and_says_so(tmp_path: Path) -> None:
    script = [{"chat": 5}, {"wait": str(tmp_path / "go")}, *whole_script([replace(run, others=3) for run in RUNS])]
    async with (
        open_journal(tmp_path) as journal,
        open_recorder(tmp_path, journal) as recorder,
        serve(tmp_path, script, recorder=recorder) as server,
    ):
        recording = await recorder.start(600, 100, "me")
        await start(server, beside_users=True)
        await until(server, "it['what'] == 'chat 200'")
        ended = (await server.client.get("/ops/requests.json")).json()["finished"]
        assert [(one["class"], one["key"][:13]) for one in ended] == [("background", "limit-search-")]
        assert (await server.client.post(CHAT, json=chat_body(max_tokens=3))).status_code == 200
        assert recording.num_requests + recording.num_inside == 1  # the user's alone is traffic
        (tmp_path / "go").touch()
        told = await until(server, "it['end']")
        assert (told["end"], told["requests_of_users"]) == ("found", 1)
        assert told["remarks"] == ["1 request of users came in while it ran: the figure is of what they left."]
        given = f"The server gave {3 * len(RUNS)} answers to others"
        assert any(given in remark for remark in told["result"]["remarks"])
        page = plain((await server.client.get("/ops/limit", headers=HTML)).text)
        assert told["remarks"][0] in page
        assert given not in page, "it is told once"


@pytest.mark.parametrize("closed", [False, True])
async def test_its_own_requests_do_not_end_it_and_its_key_opens_what_it_needs_alone(
    tmp_path: Path, closed: bool
) -> None:
    needed = ("/metrics", "/admin/config", "/admin/audit", "/v1/models")
    asks = [{"get": path} for path in (*needed, "/ops/stats.json", "/admin/keys")]
    script = [{"chat": 5}, *asks, {"wait": str(tmp_path / "go")}, {"exit": 1, "error": "relevo: no luck"}]
    security = {"api_keys": ["alice=key"], "admin_token": "letmein"} if closed else {}
    seen: list[str] = []
    async with serve(tmp_path, script, settings=make_settings(security=security)) as server:
        searches = server.context.searches
        searches.start(searches_wish(), server.url, "me")
        with trio.fail_after(PATIENCE_SECONDS):
            while not seen or not seen[-1].startswith("/admin/keys"):
                await searches.changed.wait()
                assert searches.search is not None
                seen.append(searches.search.what)
        lent = server.context.keys.keyring.lent
        assert lent is not None
        refused = 401 if closed else 200  # an open server asks nobody on this machine for a key
        assert {*seen} >= {"chat 200", *(f"{path} 200" for path in needed)}
        assert f"/admin/keys {refused}" in seen
        assert f"/ops/stats.json {refused}" in seen
        listed = (await server.client.get("/admin/keys", headers=ADMIN)).json()
        assert [key["name"] for key in listed["keys"]] == (["alice"] if closed else [])
        assert listed["key_needed"] is closed
        (tmp_path / "go").touch()
        with trio.fail_after(PATIENCE_SECONDS):
            while searches.running is not None:
                await searches.changed.wait()
        assert searches.search is not None
        assert (searches.search.end, searches.search.why, searches.search.users) == ("failed", "no luck", 0)


def searches_wish() -> Any:
    from app.limit_page.wish import Wish

    return Wish.model_validate({**wish(), "duration": 480.0})


async def test_secrets_and_the_mix_come_through_pipes_and_settings_stay_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELEVO_SECURITY_ADMIN_TOKEN", "letmein")
    mix = '[[class]]\nname = "ä"\nshare = 1\nprompt_tokens = 5\noutput_tokens = 5\n'
    script = [{"words": True}, {"wait": str(tmp_path / "go")}, {"file": "--mix="}, {"wait": str(tmp_path / "never")}]
    async with serve(tmp_path, script) as server:
        await start(server, workload="mix", mix=mix, factor=2.5, itl_p95_seconds=None, arrivals="gamma", gap_cv=13.0)
        words, variables = json.loads((await until(server, "it['what'].startswith('[[')"))["what"])
        assert {name[:22] for name in variables} == {"RELEVO_SLO_BACKGROUND_"}
        assert words[:2] == ["--url", server.url]
        flags = dict(pairwise(words))
        assert (flags["--ttft-p95"], flags["--itl-p95"], flags["--e2e-p95"]) == ("2.0", "none", "none")
        assert (flags["--duration"], flags["--factor"], flags["--progress-json"]) == ("480", "2.5", "-")
        assert (flags["--arrivals"], flags["--gap-cv"]) == ("gamma", "13.0")
        assert "--workload" not in words
        assert [re.sub(r"\d+", "N", word) for word in words[-2:]] == ["--api-key=@/dev/fd/N", "--mix=/dev/fd/N"]
        (tmp_path / "go").touch()
        assert (await until(server, "it['what'].startswith('[[class]]')"))["what"] == mix


async def test_it_can_be_stopped_and_nothing_is_left(tmp_path: Path) -> None:
    script = [{"pid": str(tmp_path / "pid")}, *whole_script()[:5], {"wait": str(tmp_path / "never")}]
    async with serve(tmp_path, script) as server:
        await start(server)
        await until(server, "it['curve']")
        again = await server.client.post("/ops/limit", json=wish())
        assert (again.status_code, again.json()["error"]["code"]) == (409, "is_searching")
        assert (await server.client.post("/ops/limit/stop")).status_code == 200
        told = await until(server, "it['end']")
        assert (told["end"], told["why"]) == ("stopped", "By 127.0.0.1.")
        gone(tmp_path)
        assert (await server.client.post("/ops/limit/stop")).status_code == 409
        assert (await server.client.post("/ops/limit/stop", headers=HTML)).status_code == 303


def gone(folder: Path) -> None:
    """The process that wrote its number there is no more."""
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "pid").read_text()), 0)


async def test_a_process_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "GRACE_SECONDS", 0.2)
    script = [{"deaf": True}, {"pid": str(tmp_path / "pid")}, progress_line(4.0, 1), {"wait": str(tmp_path / "never")}]
    async with serve(tmp_path, script) as server:
        await start(server)
        await until(server, "it['what'] == 'it goes on'")
        await server.client.post("/ops/limit/stop")
        assert (await until(server, "it['end']"))["end"] == "stopped"
        gone(tmp_path)


async def test_one_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LATE_SHARE", -1)
    monkeypatch.setattr(service, "LATE_SECONDS", 1.0)
    script = [{"pid": str(tmp_path / "pid")}, {"wait": str(tmp_path / "never")}]
    async with serve(tmp_path, script) as server:
        await start(server)
        assert (await until(server, "it['end']"))["end"] == "late"
        if (tmp_path / "pid").exists():  # it had come so far
            gone(tmp_path)


async def test_it_ends_with_the_server(tmp_path: Path) -> None:
    script = [{"pid": str(tmp_path / "pid")}, progress_line(4.0, 1), {"wait": str(tmp_path / "never")}]
    async with serve(tmp_path, script) as server:
        await start(server)
        await until(server, "it['what'] == 'it goes on'")
        searches = server.context.searches
    gone(tmp_path)
    assert searches.search is not None
    assert searches.search.end == "shutdown"


@pytest.mark.slow
def test_a_server_that_is_asked_to_end_ends_the_search_first(tmp_path: Path) -> None:
    lines = [{"pid": str(tmp_path / "pid")}, *whole_script()[:5], {"wait": str(tmp_path / "never")}]
    command = write_script(tmp_path / "script.jsonl", lines)
    state = {"server": {"state_dir": str(tmp_path)}}
    with server_process(limit_command=command, settings=state) as (url, process):
        assert httpx.post(f"{url}/ops/limit", json=wish(), timeout=PATIENCE_SECONDS).status_code == 202
        while not httpx.get(f"{url}/ops/limit.json", timeout=PATIENCE_SECONDS).json()["search"]["curve"]:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0
    gone(tmp_path)
    (kept,) = (tmp_path / "limits").glob("*.json")
    told = json.loads(kept.read_text())
    assert (told["end"], told["why"], len(told["curve"])) == ("shutdown", "It was asked to end.", 1)


@pytest.mark.parametrize(
    ("lines", "end", "why"),
    [
        ([{"exit": 1, "error": f"relevo: {HOSTILE} says no"}], "failed", f"{HOSTILE} says no"),
        ([{"exit": 2, "error": ""}], "failed", "The process that looks ended with 2."),
        ([{"raw": "what?"}, {"raw": "[1]"}, {"raw": '{"event": "run"}'}, {"exit": 1, "error": "x"}], "failed", "x"),
        ([{"say": {"event": "news", "of": "later versions"}}, *whole_script()], "found", ""),
        ([{"say": {"event": "result", "result": LOST}}], "none", LOST["why"]),
    ],
)
async def test_what_a_process_says_at_its_end_is_told(
    tmp_path: Path, lines: list[dict[str, Any]], end: str, why: str
) -> None:
    async with serve(tmp_path, lines) as server:
        await start(server)
        told = await until(server, "it['end']")
        assert (told["end"], told["why"]) == (end, why)
        page = (await server.client.get("/ops/limit", headers=HTML)).text
        assert "<img" not in page
        assert (await server.client.get("/ops/history", headers=HTML)).text.count("<img") == 0


async def test_a_line_without_end_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "MAX_LINE_BYTES", 1000)
    async with serve(tmp_path, [{"raw": "x" * 5000}, {"wait": str(tmp_path / "never")}]) as server:
        await start(server)
        told = await until(server, "it['end']")
        assert (told["end"], "has told a line" in told["why"]) == ("failed", True)


async def test_a_program_that_cannot_be_started_is_told(tmp_path: Path) -> None:
    make = partial(LimitSearches, command=(str(tmp_path / "nothing"),))
    async with open_server(make_searches=make) as server:
        await start(server)
        told = await until(server, "it['end']")
        assert (told["end"], "cannot be started" in told["why"]) == ("failed", True)


async def test_a_change_of_the_settings_while_it_runs_is_remarked(tmp_path: Path) -> None:
    script = [progress_line(4.0, 1), {"wait": str(tmp_path / "go")}, *whole_script()]
    async with serve(tmp_path, script) as server:
        await start(server)
        await until(server, "it['what'] == 'it goes on'")
        assert (await server.client.patch("/admin/config", json={"max_num_seqs": 3})).status_code == 200
        (tmp_path / "go").touch()
        assert "settings were changed" in (await until(server, "it['end']"))["remarks"][0]


def tuned(believed: bool) -> dict[str, Any]:
    """What `relevo limit --tune` writes, of made-up figures."""
    limits = [{"requests_per_second": rate, "low": rate - 0.1, "high": rate + 0.1} for rate in (5.8, 7.1)]
    present = {"settings": {"max_num_seqs": 4}, "limit": limits[0]}
    found = {"settings": {"max_num_seqs": 6}, "limit": limits[1]}
    candidate = {
        "control": "max_num_seqs", "value": 6, "settings": {"max_num_seqs": 6}, "against": {"max_num_seqs": 4},
        "rate": 6.0, "seed": 0, "requests": 400, "ended_early": False, "excess": 0.7, "their_excess": 1.2,
        "margin": {"ratio": 0.6, "low": 0.5, "high": 0.7}, "verdict": "better", "limit": limits[1], "why": None,
    }  # fmt: skip
    best = found if believed else present
    changes = {"max_num_seqs": [4, 6], "port": [1, 2]} if believed else {}
    why = "in 2 of 2 fresh seeds" if believed else f"with fresh seeds it was not {HOSTILE}"
    return {
        "controls": [], "candidates": [candidate], "present": present, "found": found,
        "best": {**best, "changes": changes}, "trade_off": None, "complete": True, "applied": False,
        "evidence": {"believed": believed, "why": why, "gain": 1.22, "complete": True, "pairs": []},
    }  # fmt: skip


async def test_settings_that_tuning_found_are_applied_like_any_change(tmp_path: Path) -> None:
    result = result_of() | {"tune": tuned(believed=True)}
    script = [
        *whole_script()[:-1],
        {**run_line(run_at(6.0, 0.3), "tried")},
        {"say": {"event": "result", "result": result}},
    ]
    async with serve(tmp_path, script) as server:
        search_id = await start(server, tune=True, duration=None)
        told = await until(server, "it['end']")
        assert (len(told["curve"]), len(told["tried"])) == (len(RUNS), 1)
        raw = (await server.client.get("/ops/limit", headers=HTML)).text
        assert "Better for these targets: max_num_seqs 4 to 6" in plain(raw)
        assert "Apply: Seats 4 → 6" in plain(raw)
        done = await server.client.post(f"/ops/limit/{search_id}/apply", headers=HTML)
        assert (done.status_code, done.headers["location"]) == (303, "/admin?held=1")
        looked, entry = (await server.client.get("/admin/audit")).json()
        assert looked["deed"] == "Search for the limit: azure-conversation, better settings too"
        assert entry["changes"] == {"max_num_seqs": [4, 6]}  # and nothing that is no live setting
        assert entry["reason"].startswith("found by the search for the limit of ")
        for path in ("/ops/limit", f"/ops/limit/{search_id}"):
            page = (await server.client.get(path, headers=HTML)).text
            assert "These settings hold now." in page
            assert "/apply" not in page
        undone = await server.client.patch("/admin/config", json={"restore": "previous"})
        assert undone.json()["effective"]["max_num_seqs"] == 4


async def test_where_tuning_found_nothing_better_it_says_so(tmp_path: Path) -> None:
    result = result_of() | {"tune": tuned(believed=False)}
    async with serve(tmp_path, [{"say": {"event": "result", "result": result}}]) as server:
        search_id = await start(server)
        await until(server, "it['end']")
        raw = (await server.client.get(f"/ops/limit/{search_id}", headers=HTML)).text
        assert "The settings you have are as good as any that were tried" in raw
        assert f"/{search_id}/apply" not in raw
        assert "<img" not in raw
        refused = await server.client.post(f"/ops/limit/{search_id}/apply")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "nothing_to_apply")


@pytest.mark.parametrize(("unfinished", "num_told"), [(None, 1), ("the search was stopped", 0)])
async def test_that_there_was_no_time_to_try_everything_is_told_once(
    tmp_path: Path, unfinished: str | None, num_told: int
) -> None:
    result = result_of() | {"tune": tuned(believed=False) | {"complete": False, "unfinished": unfinished}}
    async with serve(tmp_path, [{"say": {"event": "result", "result": result}}]) as server:
        await start(server)
        await until(server, "it['end']")
        page = plain((await server.client.get("/ops/limit", headers=HTML)).text)
        told = "The time was over before everything was tried; give a larger “Seconds to take”."
        assert page.count("The time was over") == page.count(told) == num_told
        assert "One control at a time" in page


async def test_a_search_that_was_cut_short_says_why_beside_its_limit(tmp_path: Path) -> None:
    died = "The server died, or cannot be reached any more (no)"
    result = result_of() | {"unfinished": died}
    async with serve(tmp_path, [{"say": {"event": "result", "result": result}}]) as server:
        await start(server)
        told = await until(server, "it['end']")
        assert (told["end"], told["why"]) == ("cut", f"{died}.")
        page = plain((await server.client.get("/ops/limit", headers=HTML)).text)
        assert f"It was cut short. {died}." in page
        assert "Operating limit" in page
        entry = (await server.client.get("/admin/audit")).json()[-1]
        assert entry["outcome"].startswith("it was cut short; until then ")


async def test_what_tuning_needs_is_handed_on(tmp_path: Path) -> None:
    async with serve(tmp_path, [{"words": True}, {"wait": str(tmp_path / "never")}]) as server:
        await start(server, tune=True, duration=None, beside_users=True)
        words, _ = json.loads((await until(server, "it['what'].startswith('[[')"))["what"])
        assert {"--tune", "--while-serving"} <= {*words}
        assert words[words.index("--duration") + 1] == "1800"
        assert words[-1].startswith("--admin-token=@/dev/fd/")


async def test_what_cannot_be_drawn_costs_one_part_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = {"say": {"event": "run", "kind": "rate", "rate": "quick"}}
    async with serve(tmp_path, [broken, progress_line(4.0, 37), {"wait": str(tmp_path / "never")}]) as server:
        await start(server)
        await until(server, "it['trying']['ended'] == 37")
        page = await server.client.get("/ops/limit", headers=HTML)
        assert page.status_code == 200
        assert "4.00 requests/s: 37 of 400 requests answered" in plain(page.text)
        assert page.text.count("This could not be drawn") == 2  # the curves and the runs
        assert "could not be drawn: runs" in caplog.text


async def test_a_disk_that_takes_nothing_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "limits").write_text("no folder")
    async with serve(tmp_path, whole_script()) as server:
        await start(server)
        await until(server, "it['end']")
        assert "not kept" in (await server.client.get("/ops/limit.json")).json()["problem"]
        assert "not kept" in (await server.client.get("/ops/limit", headers=HTML)).text


def test_the_oldest_are_let_go_and_damaged_ones_are_left_out(tmp_path: Path) -> None:
    kept = KeptSearches(tmp_path / "limits")
    assert kept.briefs() == []
    told = {
        "result": None, "asked": {"workload": "mix", "note": "", "beside_users": False}, "began": "then",
        "end": "stopped", "model": "m", "curve": [],
    }  # fmt: skip
    for number in range(103):
        kept.keep({"id": f"20261130T{number:06}Z-00000000", **told})
    names = [brief["id"] for brief in kept.briefs()]
    assert (len(names), names[0], names[-1]) == (100, "20261130T000102Z-00000000", "20261130T000003Z-00000000")
    for text in ("{", "[]", '{"id": "20261130T000102Z-00000000"}', "[" * 100_000):
        (tmp_path / "limits" / f"{names[0]}.json").write_text(text)
        assert len(kept.briefs()) == 99
    assert sorted(path.suffix for path in (tmp_path / "limits").iterdir()) == [".json"] * 100


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"workload": "azure-cod"}, "workload"), ({"workload": "recording:nothing"}, "workload"),
        ({"workload": 3}, "workload"), ({"ttft_p95_seconds": 0}, "ttft_p95_seconds"),
        ({"itl_p95_seconds": "soon"}, "itl_p95_seconds"), ({"e2e_p95_seconds": True}, "e2e_p95_seconds"),
        ({"ttft_p95_seconds": None, "itl_p95_seconds": None}, "ttft_p95_seconds"), ({"duration": 5}, "duration"),
        ({"duration": 1e9}, "duration"), ({"repeats": 2.5}, "repeats"), ({"factor": -1}, "factor"),
        ({"note": "x" * 201}, "note"), ({"note": "two\nlines"}, "note"), ({"seats": 3}, "seats"),
        ({"mix": "[[class]]"}, "mix"), ({"workload": "mix"}, "mix"), ({"workload": "mix", "mix": "class = "}, "mix"),
        ({"workload": "mix", "mix": '[[class]]\nname = "a"\nshare = 0'}, "mix"),
        ({"workload": "mix", "mix": f"a = {'9' * 5000}"}, "mix"),
        ({"workload": "mix", "mix": f'[[class]]\nname = "a"\nshare = 0x{"f" * 5000}'}, "mix"),
        ({"beside_users": "yes"}, "beside_users"), ({"arrivals": "own"}, "arrivals"), ({"arrivals": 1}, "arrivals"),
        ({"gap_cv": 3.0}, "gap_cv"), ({"gap_cv": 3.0, "arrivals": "poisson"}, "gap_cv"),
        ({"gap_cv": 0.0, "arrivals": "gamma"}, "gap_cv"), ({"arrivals": "gamma"}, "gap_cv"),
        ({"tune": True, "duration": 280}, "duration"),
    ],
)  # fmt: skip
async def test_what_cannot_be_looked_for_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    async with serve(tmp_path, []) as server:
        answer = await server.client.post("/ops/limit", json=wish(**fields))
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (422, param)
        assert not re.search("should|valid integer|equal to", error["message"])
        assert server.context.searches.search is None


async def test_a_form_says_what_is_wrong_beside_the_field(tmp_path: Path) -> None:
    async with serve(tmp_path, whole_script()) as server:
        form = {"workload": "mix", "mix": "<b>", "ttft_p95_seconds": "2", "duration": "480", "beside_users": "on"}
        page = await server.client.post("/ops/limit", data=form)
        assert page.status_code == 422
        assert 'name="mix" rows="8" maxlength="10000" spellcheck="false"' in page.text
        assert "&lt;b&gt;</textarea>" in page.text
        assert re.search(r'id="mix-error" role="alert">Cannot be used', page.text)
        assert 'name="beside_users" checked' in page.text
        form = {"workload": "azure-code", "ttft_p95_seconds": "soon", "factor": "-1", "duration": "200", "tune": "on"}
        page = await server.client.post("/ops/limit", data=form)
        said = dict(re.findall(r'id="(\w+)-error" role="alert">(.+?)</p>', page.text))
        above = "Must be a number above 0, at most a million"
        assert said == {"ttft_p95_seconds": f"{above}, in seconds; or nothing.", "factor": f"{above}."}
        assert re.findall(r'name="(\w+)"[^>]* autofocus', page.text) == ["ttft_p95_seconds"]
        page = await server.client.post("/ops/limit", data=form | {"ttft_p95_seconds": "2", "factor": ""})
        assert re.findall(r'name="(\w+)"[^>]* autofocus', page.text) == ["duration"]
        assert "Is too short to look for better settings too, which takes 1,800; give 300 or more." in page.text
        done = await server.client.post(
            "/ops/limit", data={"workload": "azure-code", "ttft_p95_seconds": "2", "mix": "x", "arrivals": "constant"}
        )
        assert (done.status_code, done.headers["location"]) == (303, "/ops/limit")
        told = await until(server, "it['end']")
        asked = told["asked"]
        assert (asked["workload"], asked["ttft_p95_seconds"], asked["itl_p95_seconds"]) == ("azure-code", 2, None)
        assert (asked["duration"], asked["beside_users"], asked["mix"]) == (None, False, None)
        assert (asked["arrivals"], asked["gap_cv"]) == ("constant", None)


async def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    async with serve(tmp_path, []) as server:
        wrong = {"workload": "azure-code", "ttft_p95_seconds": "soon", "duration": "5", "note": "kept"}
        page = await server.client.post("/ops/limit", data=wrong)
        assert page.status_code == 422
        said = [re.search(f'id="{name}-error" role="alert">([^<]*)<', page.text) for name in ("duration", "note")]
        assert [match[1] for match in said if match] == [
            "Must be a number of seconds from 30 to 7,200.",
            "",
        ]
        assert page.text.count('aria-invalid="true"') == 2
        assert 'value="kept"' in page.text
        answer = await server.client.post(
            "/ops/limit", json=wish(ttft_p95_seconds="soon", **dict.fromkeys("abcdefghijkl", 1))
        )
        error = answer.json()["error"]
        assert error["param"] == "ttft_p95_seconds"
        assert error["message"].count("is unknown") == 7


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"workload": "mix"}, "is missing"), ({"mix": "[[class]]"}, "is for the workload 'mix' alone")],
)
async def test_a_mix_is_for_the_workload_of_that_name(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    async with serve(tmp_path, []) as server:
        error = (await server.client.post("/ops/limit", json=wish(**fields))).json()["error"]
        assert error["message"].startswith(f"'mix' {said}")


async def test_the_longest_mix_that_may_be_fits_into_a_form_and_none_is_no_target(tmp_path: Path) -> None:
    mix = '[[class]]\r\nname = "a"\r\nshare = 1\r\nprompt_tokens = 5\r\noutput_tokens = 5\r\ne2e_p95_seconds = 9\r\n#'
    mix += "ä" * (MAX_MIX - len(mix.replace("\r\n", "\n")))
    async with serve(tmp_path, [{"exit": 1, "error": ""}]) as server:
        done = await server.client.post("/ops/limit", data={"workload": "mix", "mix": mix, "ttft_p95_seconds": "none"})
        assert done.status_code == 303, plain(done.text)
        asked = (await until(server, "it['end']"))["asked"]
        assert (asked["mix"], asked["ttft_p95_seconds"]) == (mix.replace("\r\n", "\n"), None)


async def test_only_who_may_tune_may_search(tmp_path: Path) -> None:
    security = {"admin_token": "letmein", "api_keys": ["me=key"]}
    async with serve(tmp_path, [], settings=make_settings(security=security)) as server:
        for method, path in (("GET", "/ops/limit.json"), ("POST", "/ops/limit"), ("POST", "/ops/limit/stop")):
            for headers in ({}, {"Authorization": "Bearer key"}):
                answer = await server.client.request(method, path, headers=headers, json=wish())
                assert answer.status_code == 401, path
        foreign = {**ADMIN, "Origin": "https://evil.example"}
        for path in ("/ops/limit", "/ops/limit/stop", "/ops/limit/20261130T090000Z-00000000/delete"):
            assert (await server.client.post(path, headers=foreign, json=wish())).status_code == 403
        assert server.context.searches.search is None


async def test_a_server_that_drains_is_not_measured(tmp_path: Path) -> None:
    async with serve(tmp_path, []) as server:
        await server.client.patch("/admin/config", json={"draining": True})
        answer = await server.client.post("/ops/limit", json=wish())
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")


async def test_the_stream_brings_what_has_changed_and_says_good_bye(tmp_path: Path) -> None:
    script = [{"wait": str(tmp_path / "go")}, *whole_script()]
    async with serve(tmp_path, script) as server:
        seen: list[str] = []
        with trio.fail_after(PATIENCE_SECONDS):
            async with server.client.stream("GET", "/ops/limit/events?busy=0") as stream:
                async for line in stream.aiter_lines():
                    if line.startswith("event: "):
                        seen.append(line.removeprefix("event: "))
                    if seen[-1:] == ["clock"] and server.context.searches.search is None:
                        assert "ask" not in seen  # somebody may be typing in it
                        await start(server)
                    if seen[-1:] == ["ask"]:
                        (tmp_path / "go").touch()  # not before it was seen to run
                    if seen.count("ask") == 2 and not server.context.lifecycle.stopped.is_set():
                        server.context.lifecycle.stopped.set()
        assert seen[-1] == "bye"
        assert seen.count("ask") == 2  # when it began and when it ended
        assert seen.count("curve") >= 2
