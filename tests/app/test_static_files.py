"""Files for browsers: from memory, for as long as they are what they were, and with no file open for who is slow."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import h2.events
import pytest

from app import assets, static_files
from app.open_files import count_open_files
from tests.app.serving import Server, open_server
from tests.app.wire import Http2Client, connect

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import httpx

LARGE = "/static/vendor/markdown-it-15.0.3.min.js"
CSS = "/static/relevo.css"


async def fetch(server: Server, path: str, headers: Mapping[str, str] = {}) -> httpx.Response:
    return await server.client.get(path, headers=dict(headers))


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="counts open files")
async def test_who_does_not_read_a_file_holds_none_open() -> None:
    async with open_server() as server, await connect(server.port) as stream:
        client = Http2Client(stream, window=0)
        await client.flush()
        before = count_open_files()
        fields = {":method": "GET", ":path": LARGE, ":scheme": "http", ":authority": "localhost"}
        for number in range(20):
            client.connection.send_headers(2 * number + 1, list(fields.items()), end_stream=True)
            await client.flush()
            await client.read_event(h2.events.ResponseReceived, 2 * number + 1)
        assert client.status == 200
        assert count_open_files() <= before + 1  # the connection itself


async def test_who_has_a_file_is_not_sent_it_again() -> None:
    async with open_server() as server:
        whole = await fetch(server, CSS)
        assert whole.headers["content-type"] == "text/css; charset=utf-8"
        assert whole.headers["cache-control"] == "no-cache"
        etag, since = whole.headers["etag"], whole.headers["last-modified"]
        for headers in ({"If-None-Match": etag}, {"If-None-Match": f'"other", W/{etag}'}, {"If-Modified-Since": since}):
            answer = await fetch(server, CSS, headers)
            assert (answer.status_code, answer.content) == (304, b"")
            assert answer.headers["etag"] == etag
            assert "content-length" not in answer.headers
        assert (await fetch(server, CSS, {"If-None-Match": '"other"'})).content == whole.content
        head = await server.client.head(CSS)
        assert (head.status_code, head.headers["content-length"]) == (200, str(len(whole.content)))
        assert (await server.client.post(CSS)).status_code == 405


async def test_a_part_of_a_file_may_be_asked_for() -> None:
    async with open_server() as server:
        whole = await fetch(server, LARGE)
        size = len(whole.content)
        for asked, begin, end in (("0-9", 0, 10), ("100-", 100, size), ("-5", size - 5, size), (f"5-{size}", 5, size)):
            part = await fetch(server, LARGE, {"Range": f"bytes={asked}"})
            assert (part.status_code, part.content) == (206, whole.content[begin:end])
            assert part.headers["content-range"] == f"bytes {begin}-{end - 1}/{size}"
        assert (await fetch(server, LARGE, {"Range": f"bytes={size}-"})).status_code == 416
        changed = {"Range": "bytes=0-9", "If-Range": '"other"'}
        assert (await fetch(server, LARGE, changed)).content == whole.content


async def test_only_the_content_that_was_asked_for_is_kept_for_ever(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file that changes is another one at once; what is not there is kept by nobody."""
    for module in (assets, static_files):
        monkeypatch.setattr(module, "static_dir", lambda: tmp_path)
    name = tmp_path / "some.js"
    name.write_text("old")
    async with open_server() as server:
        old = assets.asset("some.js")
        assert (await fetch(server, old)).headers["cache-control"].endswith("immutable")
        name.write_text("new")
        os.utime(name, (1, 1))
        new = assets.asset("some.js")
        assert new != old
        for address, is_kept in ((old, False), (new, True), ("/static/some.js", False)):
            answer = await fetch(server, address)
            assert answer.text == "new"
            assert answer.headers["cache-control"].endswith("immutable") is is_kept
        missing = await fetch(server, "/static/other.js?v=0")
        assert (missing.status_code, missing.headers["cache-control"]) == (404, "no-store")
