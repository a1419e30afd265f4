"""Recordings of the traffic: what is in them and what never is, their bounds, and disks that fail."""

from __future__ import annotations

import errno
import json
import os
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import trio

from app.endings import Ending
from app.journal.journal import Journal, open_journal
from app.recording import recorder as recorder_module
from app.recording import recording as recording_module
from app.recording.recorder import FOLDER, MAX_RECORDINGS, TrafficRecorder, open_recorder
from app.recording.recording import LAST_SECONDS, Recording
from tests.app.serving import CHAT, COMPLETIONS, Server, chat_body, make_settings, open_server
from tests.app.wire import wait_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from trio.testing import MockClock

URL = "/admin/recordings"
HTML = {"Accept": "text/html"}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
MARKER = "xylophone"


@asynccontextmanager
async def serve(folder: Path, **options: Any) -> AsyncIterator[Server]:
    """A server whose recordings lie under `folder`."""
    async with (
        open_journal(folder) as journal,
        open_recorder(folder, journal) as recorder,
        open_server(journal=journal, recorder=recorder, **options) as server,
    ):
        yield server


async def begin(server: Server, **body: Any) -> str:
    """Start a recording; gives its name."""
    answer = await server.client.post(URL, json=body)
    assert answer.status_code == 201, answer.text
    name: str = answer.json()["recording"]["name"]
    return name


async def view(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = (await server.client.get(URL)).json()
    return found


async def finish(server: Server) -> None:
    """Stop the recording and wait until it lies there whole."""
    await server.client.post(f"{URL}/stop")
    await wait_for(lambda: server.context.recorder.now is None)


async def lines(server: Server, name: str) -> list[dict[str, Any]]:
    answer = await server.client.get(f"{URL}/{name}")
    assert answer.status_code == 200
    assert answer.headers["content-disposition"] == f'attachment; filename="{name}"'
    return [json.loads(line) for line in answer.text.splitlines()]


async def test_each_request_is_a_line_of_lengths_and_times(tmp_path: Path) -> None:
    async with serve(tmp_path, answer=lambda _: b"hello") as server:
        await server.client.post(CHAT, json=chat_body(max_tokens=9))  # before it began
        name = await begin(server)
        await server.client.post(CHAT, json=chat_body(max_tokens=9))
        await server.client.post(CHAT, json=chat_body("other", max_tokens=2, stream=True, service_tier="flex"))
        await server.settle()
        now = (await view(server))["recording"]
        assert (now["requests"], now["open"], now["left_out"], now["ends_as"]) == (2, 0, 0, None)
        await finish(server)
        first, flex = await lines(server, name)
        assert now["bytes"] == len((tmp_path / FOLDER / name).read_bytes())
    assert {name: value for name, value in first.items() if name != "timestamp"} == {
        "input_length": 7, "output_length": 6, "cached_length": 4, "class": "interactive", "end": "stop",
    }  # fmt: skip
    assert (flex["class"], flex["end"], flex["output_length"]) == ("background", "length", 2)
    assert 0 <= first["timestamp"] <= flex["timestamp"] < 5000
    assert oct((tmp_path / FOLDER / name).stat().st_mode & 0o777) == "0o600"
    assert oct((tmp_path / FOLDER).stat().st_mode & 0o777) == "0o700"


async def test_nothing_that_anybody_wrote_is_in_a_recording(tmp_path: Path) -> None:
    settings = make_settings(security={"api_keys": [f"{MARKER}={MARKER}-k"], "admin_token": "t"})
    headers = {"Authorization": f"Bearer {MARKER}-k", "X-Request-Id": MARKER}
    says = {"role": "user", "content": MARKER, "name": MARKER}
    async with serve(tmp_path, settings=settings, answer=lambda _: MARKER.encode()) as server:
        server.client.headers["Authorization"] = "Bearer t"
        name = await begin(server)
        body = {"messages": [says], "user": MARKER, "stop": [MARKER + "!"], "metadata": {MARKER: MARKER}, "n": 2}
        answer = await server.client.post(CHAT, json=body, headers=headers)
        assert MARKER in answer.text
        prompt = {"prompt": MARKER, "cache_salt": MARKER, "timeout": 0.2, "max_tokens": 400}
        await server.client.post(COMPLETIONS, json=prompt, headers=headers)
        await server.settle()
        now = (await view(server))["recording"]
        assert now["requests"] + now["left_out"] == 3
        await finish(server)
    data = (tmp_path / FOLDER / name).read_bytes()
    assert MARKER.encode() not in data
    ids = [part for part in (answer.json()["id"], answer.headers["X-Request-Id"]) if part.encode() in data]
    assert not ids
    known = {"timestamp", "input_length", "output_length", "cached_length", "class", "end"}
    words = {"interactive", "background", "stop", "length", "timeout", "error"}
    for line in map(json.loads, data.splitlines()):
        assert line.keys() == known
        assert {value for value in line.values() if isinstance(value, str)} <= words


async def test_who_was_inside_when_it_was_stopped_is_waited_for_and_who_comes_then_is_not_in_it(tmp_path: Path) -> None:
    async with serve(tmp_path, step_seconds=0.01) as server, trio.open_nursery() as nursery:
        name = await begin(server)
        nursery.start_soon(partial(server.client.post, CHAT, json=chat_body(max_tokens=60, ignore_eos=True)))
        await wait_for(lambda: server.engine.num_running == 1)
        stopped = await server.client.post(f"{URL}/stop")
        assert stopped.json()["recording"]["open"] == 1
        await server.client.post(CHAT, json=chat_body(max_tokens=1))
        await server.settle()
        await wait_for(lambda: server.context.recorder.now is None)
        assert [line["output_length"] for line in await lines(server, name)] == [60]
        assert "ended with 1 request, as 127.0.0.1 stopped it." in (await view(server))["last"]


async def test_who_stops_it_again_does_not_wait_and_is_told_whom_it_lacks(tmp_path: Path) -> None:
    async with serve(tmp_path, step_seconds=0.01) as server, trio.open_nursery() as nursery:
        name = await begin(server)
        await server.client.post(CHAT, json=chat_body(max_tokens=1))
        for _ in range(2):
            nursery.start_soon(partial(server.client.post, CHAT, json=chat_body(max_tokens=400, ignore_eos=True)))
        await wait_for(lambda: server.engine.num_running == 2)
        await server.client.post(f"{URL}/stop")
        page = (await server.client.get(URL, headers=HTML)).text
        assert "End it now" in page
        assert "Whoever is open then is in no line." in page
        await finish(server)
        found = await view(server)
        why = "127.0.0.1 stopped it and 127.0.0.1 did not wait"
        assert found["last"] == (
            f"{name} ended with 1 request, as {why}. Not in it: 2 requests whose end was not waited for."
        )
        assert found["ended"] == {
            "name": name, "who": "127.0.0.1", "ends_as": why, "requests": 1, "left_out": 0, "not_awaited": 2, "lost": 0,
        }  # fmt: skip
        page = (await server.client.get(URL, headers=HTML)).text
        assert "Not in it: 2 requests whose end was not waited for." in page
        assert len(await lines(server, name)) == 1
        nursery.cancel_scope.cancel()


async def test_what_operators_do_with_recordings_is_in_their_history(tmp_path: Path) -> None:
    settings = make_settings(security={"api_keys": ["alice=k"], "admin_token": "t"})
    async with serve(tmp_path, settings=settings) as server:
        server.client.headers["Authorization"] = "Bearer t"
        assert (await server.client.patch("/admin/config", json={"max_num_seqs": 3})).status_code == 200
        name = await begin(server)

        async def deeds() -> list[tuple[Any, ...]]:
            entries = (await server.client.get("/admin/audit")).json()
            assert [entry["generation"] for entry in entries] == [1] * len(entries)
            return [(entry["who"], entry["deed"], entry["outcome"]) for entry in entries[1:]]

        assert await deeds() == [("admin", f"Recording of the traffic, {name}", None)]
        page = (await server.client.get("/admin", headers=HTML)).text
        assert page.count("Revert to this") == 1, "to the start, and not to what holds now"
        assert "admin · goes on" in page
        await finish(server)
        await server.client.delete(f"{URL}/{name}")
        assert await deeds() == [
            ("admin", f"Recording of the traffic, {name}", "ended with 0 requests, as admin stopped it."),
            ("admin", f"Recording {name} deleted", "done"),
        ]
        undone = await server.client.patch("/admin/config", json={"restore": "previous"})
        assert undone.json()["effective"]["max_num_seqs"] == 4, "a deed is no change that could be taken back"


async def test_a_recording_that_is_full_ends_with_those_it_took(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        name = await begin(server, max_requests=2)
        for _ in range(3):
            await server.client.post(CHAT, json=chat_body(max_tokens=2))
        await wait_for(lambda: server.context.recorder.now is None)
        assert len(await lines(server, name)) == 2
        found = await view(server)
    assert "as it is full" in found["last"]
    assert [(one["name"], one["requests"]) for one in found["recordings"]] == [(name, 2)]


def ending(arrival: float = 0.0, **changes: Any) -> Ending:
    return Ending(**{
        "request_id": "", "answer_id": "", "key_name": "", "class_name": "interactive", "reason": "stop",
        "cause": None, "arrival": arrival, "ended": arrival + 1, "num_prompt_tokens": 5, **changes,
    })  # fmt: skip


class FakeHandle:
    """What a recording looks at of a handle."""

    def __init__(self, sequence_id: int, arrival_time: float = 0.0) -> None:
        self.sequence_id, self.arrival_time = sequence_id, arrival_time


def make_recording(path: Path, seconds: float = 60.0, max_requests: int = 100) -> Recording:
    now = trio.current_time()
    return Recording(path, now, 0.0, now + seconds, "me", max_requests)


async def test_a_recording_has_no_more_bytes_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_module, "MAX_BYTES", 1000)
    recording = make_recording(tmp_path / "x")
    for number in range(50):
        recording.opened(FakeHandle(number))  # type: ignore[arg-type]
        recording.ended(number, ending())
    assert 800 < len(recording.take()) == recording.num_bytes <= 1000
    assert (recording.ends_as, recording.is_complete) == ("it is full", True)
    assert recording.num_lost == recording.num_requests + 1, "nothing is written yet, and there was no room for one"


async def test_lines_that_the_disk_does_not_take_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_module, "MAX_UNWRITTEN", 10)
    recording = make_recording(tmp_path / "x")
    for number in range(50):
        recording.opened(FakeHandle(number))  # type: ignore[arg-type]
        recording.ended(number, ending())
    assert recording.num_requests == 10
    assert recording.ends_as == "the disk did not take it in time"


async def test_a_recording_ends_in_time_and_waits_for_ends_no_longer_than_it_may(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    recording = make_recording(tmp_path / "x", seconds=60)
    began = trio.current_time()
    for number, arrival in enumerate((10.0, 59.0, 60.0)):
        recording.opened(FakeHandle(number, began + arrival))  # type: ignore[arg-type]
    assert recording.num_inside == 2, "the third came too late"
    mock_clock.jump(60)
    recording.finish("its time was over")
    assert not recording.is_complete
    recording.ended(1, ending(began + 59, cause="client", reason="abort"))
    recording.ended(2, ending(began + 60))
    mock_clock.jump(LAST_SECONDS)
    assert recording.is_complete
    (line,) = map(json.loads, recording.take().splitlines())
    assert (line["timestamp"], line["end"]) == (59_000, "client")
    recording.opened(FakeHandle(9))  # type: ignore[arg-type]
    assert recording.num_inside == 1


async def test_a_recorder_turns_its_recording_off_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "FLUSH_SECONDS", 0.01)
    async with serve(tmp_path) as server:
        name = await begin(server, ttl_seconds=600)
        await server.client.post(CHAT, json=chat_body(max_tokens=2))
        await server.settle()
        assert server.context.recorder.now is not None
        server.context.recorder.now.until = trio.current_time()
        await wait_for(lambda: server.context.recorder.now is None)
        assert len(await lines(server, name)) == 1
        assert "as its time was over" in (await view(server))["last"]


async def test_a_disk_that_is_full_ends_the_recording_and_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(tmp_path) as server:
        name = await begin(server)
        await server.client.post(CHAT, json=chat_body(max_tokens=2))
        await server.settle()
        await wait_for(lambda: bool((tmp_path / FOLDER / name).stat().st_size))
        whole = (tmp_path / FOLDER / name).read_bytes()
        write = os.write

        def half(file: int, data: Any) -> int:
            if b"input_length" not in bytes(data):
                return write(file, data)
            write(file, bytes(data)[:20])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "write", half)
        assert (await server.client.post(CHAT, json=chat_body(max_tokens=2))).status_code == 200
        await wait_for(lambda: server.context.recorder.now is None)
        assert (await server.client.post(CHAT, json=chat_body(max_tokens=2))).status_code == 200
        monkeypatch.undo()
        page = (await server.client.get(URL, headers=HTML)).text
        told = [event.text for event in server.context.journal.events if event.kind == "recording"]
    assert "the disk does not take it: no space left on device. Not in it: 1 request that could not be written." in page
    assert "the disk does not take it: no space left on device" in told[-1]
    assert (tmp_path / FOLDER / name).read_bytes() == whole, "half of a line is not left there"


async def test_a_file_that_somebody_deletes_ends_its_recording_and_is_not_made_again(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        name = await begin(server)
        (tmp_path / FOLDER / name).unlink()
        await server.client.post(CHAT, json=chat_body(max_tokens=2))
        await wait_for(lambda: server.context.recorder.now is None)
        found = await view(server)
    assert "no such file" in found["last"]
    assert found["recordings"] == []


async def test_where_nothing_can_be_written_nothing_is_recorded_and_that_is_said(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("no folder")
    async with serve(tmp_path) as server:
        answer = await server.client.post(URL, json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "state_unwritable")
        form = await server.client.post(URL, data={"ttl_seconds": "600"}, headers=HTML)
        assert form.status_code == 503
        assert "The disk does not take or give it" in form.text
    async with open_server() as server:
        answer = await server.client.post(URL, json={})
        assert "Nothing can be recorded: no folder was opened for it" in answer.json()["error"]["message"]
        page = await server.client.get(URL, headers=HTML)
        assert "Nothing can be recorded here" in page.text
        assert (await view(server))["recordings"] == []


async def test_a_disk_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "DISK_SECONDS", 0.05)
    goes_on = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def hang(*_: object) -> Any:
        trio.from_thread.run(goes_on.wait, trio_token=token)

    async with serve(tmp_path) as server:
        monkeypatch.setattr(recorder_module, "make_file", hang)
        answer = await server.client.post(URL, json={})
        assert (answer.status_code, "has not answered for" in answer.text) == (503, True)
        assert (await server.client.post(CHAT, json=chat_body(max_tokens=2))).status_code == 200
        goes_on.set()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"ttl_seconds": 0}, "ttl_seconds"),
        ({"ttl_seconds": "600"}, "ttl_seconds"),
        ({"ttl_seconds": 1e9}, "ttl_seconds"),
        ({"max_requests": 1e6}, "max_requests"),
        ({"max_requests": True}, "max_requests"),
        ({"path": "/etc/x"}, "path"),
    ],
)
async def test_what_cannot_be_recorded_is_refused_by_name(tmp_path: Path, body: dict[str, Any], param: str) -> None:
    async with serve(tmp_path) as server:
        answer = await server.client.post(URL, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, param)
        assert (await view(server))["recording"] is None


async def test_one_at_a_time_so_many_are_kept_and_each_can_be_deleted(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        assert (await server.client.post(f"{URL}/stop")).json()["error"]["code"] == "not_recording"
        name = await begin(server)
        assert (await server.client.post(URL, json={})).json()["error"]["code"] == "is_recording"
        assert (await server.client.delete(f"{URL}/{name}")).json()["error"]["code"] == "is_recording"
        await finish(server)
        for _ in range(MAX_RECORDINGS - 1):
            await begin(server)
            await finish(server)
        assert len((await view(server))["recordings"]) == MAX_RECORDINGS
        full = await server.client.post(URL, json={})
        assert (full.status_code, full.json()["error"]["code"]) == (409, "too_many_recordings")
        left = (await server.client.delete(f"{URL}/{name}")).json()["recordings"]
        assert len(left) == MAX_RECORDINGS - 1
        assert not (tmp_path / FOLDER / name).exists()


@pytest.mark.parametrize("name", ["traffic-20260101T000000Z.jsonl", "history.db", "..%2Fhistory.db", "%00", 'a"b'])
async def test_nothing_but_recordings_is_given_or_deleted(tmp_path: Path, name: str) -> None:
    async with serve(tmp_path) as server:
        for method in ("GET", "DELETE"):
            answer = await server.client.request(method, f"{URL}/{name}")
            assert answer.status_code == 404, answer.text
        assert (tmp_path / "history.db").exists()


async def test_a_recording_outlives_its_server_and_ends_with_it(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        name = await begin(server)
        await server.client.post(CHAT, json=chat_body(max_tokens=2))
        await server.settle()
    async with serve(tmp_path) as server:
        found = await view(server)
        assert found["recording"] is None
        assert [one["name"] for one in found["recordings"]] == [name]
        assert len(await lines(server, name)) == 1
        told = [event.text for event in server.context.journal.events if event.kind == "recording"]
    assert "as the server ended" in told[-1]


async def test_the_page_says_whether_it_records_and_its_forms_need_no_script(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        client = server.client
        assert "Nothing is recorded now" in (await client.get(URL, headers=HTML)).text
        assert "now recording" not in (await client.get("/admin")).text
        answer = await client.post(URL, data={"ttl_seconds": "21600"}, headers=HTML)
        assert (answer.status_code, answer.headers["location"]) == (303, URL)
        page = (await client.get(URL, headers=HTML)).text
        assert "Recording now" in page
        assert "being written" in page
        for other in ("/admin", "/admin/keys"):
            assert "now recording" in (await client.get(other, headers=HTML)).text
        answer = await client.post(f"{URL}/stop", headers=FORM)
        assert (answer.status_code, answer.headers["location"]) == (303, URL)
        await wait_for(lambda: server.context.recorder.now is None)
        answer = await client.post(f"{URL}/stop", headers={**FORM, **HTML})
        assert (answer.status_code, "No recording is being written" in answer.text) == (409, True)
        (kept,) = (await view(server))["recordings"]
        answer = await client.post(f"{URL}/{kept['name']}/delete", headers=FORM)
        assert answer.status_code == 303
        answer = await client.post(f"{URL}/{kept['name']}/delete", headers={**FORM, **HTML})
        assert (answer.status_code, "There is no recording" in answer.text) == (404, True)


async def test_only_the_operator_may_record_and_no_page_of_another_site(tmp_path: Path) -> None:
    settings = make_settings(security={"api_keys": ["alice=k"], "admin_token": "t"})
    async with serve(tmp_path, settings=settings) as server:
        key = {"Authorization": "Bearer k"}
        for method, path in (("GET", URL), ("POST", URL), ("POST", f"{URL}/stop"), ("GET", f"{URL}/x")):
            assert (await server.client.request(method, path, headers=key)).status_code == 401
        foreign = {"Authorization": "Bearer t", "Origin": "https://evil.example"}
        assert (await server.client.post(URL, json={}, headers=foreign)).status_code == 403
        assert server.context.recorder.now is None


async def test_a_recorder_without_a_recording_costs_a_look(tmp_path: Path) -> None:
    recorder = TrafficRecorder(tmp_path, Journal())
    recorder.opened(FakeHandle(1))  # type: ignore[arg-type]
    recorder.ended(1, ending())
    await recorder.close()
    assert not os.listdir(tmp_path)


async def test_a_long_recording_comes_whole(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        name = await begin(server)
        await finish(server)
        text = "".join(f"{number}\n" for number in range(100_000))
        (tmp_path / FOLDER / name).write_text(text)
        assert (await server.client.get(f"{URL}/{name}")).text == text
        (kept,) = (await view(server))["recordings"]
    assert (kept["requests"], kept["bytes"]) == (100_000, len(text))


async def test_a_client_reads_a_recording_while_it_is_written(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        name = await begin(server)
        async with httpx.AsyncClient(base_url=server.url) as other:
            assert (await other.get(f"{URL}/{name}")).text == ""
        await server.client.post(CHAT, json=chat_body(max_tokens=2))
        await server.settle()
        await wait_for(lambda: bool((tmp_path / FOLDER / name).stat().st_size))
        assert len(await lines(server, name)) == 1
