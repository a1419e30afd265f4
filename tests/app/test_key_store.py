"""API keys on the disk: what is kept of them, and disks that cannot."""

from __future__ import annotations

import hashlib
import logging
import re
import resource
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from app import key_service
from app.admin_keys import NOT_WRITTEN
from app.config import load_settings, state_dir
from app.config_schema import KeyLimits
from app.key_store import FILE_NAME, SCHEMA_VERSION, StateError, has_keys, open_store
from app.keys import SECRET_PREFIX, Digests, Keyring, cookie_for, make_secret
from engine.errors import ConfigError
from tests.app.keyed import HTML, asks, id_of, listed, make, serve
from tests.app.serving import make_settings
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable


def test_a_key_is_256_random_bits_and_only_digests_are_kept() -> None:
    secrets = {make_secret() for _ in range(100)}
    assert len(secrets) == 100
    assert all(re.fullmatch(rf"{SECRET_PREFIX}[\w-]{{43}}", secret) for secret in secrets)
    secret = secrets.pop()
    digests = Digests.of(secret)
    assert digests.key == hashlib.sha256(secret.encode()).digest()
    # Neither does the cookie stand there, nor can it be made of what stands there.
    assert digests.cookie == hashlib.sha256(cookie_for(secret).encode()).digest()
    assert cookie_for(secret) not in {digests.key.hex(), digests.cookie.hex(), cookie_for(digests.key.hex())}


def contents(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir())


async def test_nothing_of_the_key_is_on_the_disk(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        secret = await make(server, "alice")
        await server.client.post("/login", data={"token": secret})
        assert await asks(server, secret) == 200
    data = contents(tmp_path)
    assert b"alice" in data
    for text in (secret, secret.removeprefix(SECRET_PREFIX), cookie_for(secret)):
        assert text.encode() not in data
    assert oct((tmp_path / FILE_NAME).stat().st_mode & 0o777) == "0o600"
    with sqlite3.connect(tmp_path / FILE_NAME) as database:
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert database.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
    database.close()


async def test_keys_outlive_the_process_with_their_limits_and_their_last_use(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    async with serve(folder) as server:
        secret = await make(server, "alice", max_concurrent=3)
        gone = await make(server, "gone")
        await server.client.delete(f"/admin/keys/{await id_of(server, 'gone')}")
        assert await asks(server, secret) == 200
    async with serve(folder) as server:
        assert await asks(server) == 401
        assert await asks(server, gone) == 401
        entry = next(entry for entry in (await listed(server))["keys"] if entry["name"] == "alice")
        assert (entry["limits"]["max_concurrent"], entry["limits"]["tokens_per_minute"]) == (3, None)
        assert entry["last_used"] >= entry["created"]
        assert await asks(server, secret) == 200
    assert has_keys(folder)
    assert not has_keys(tmp_path / "empty")


async def test_another_server_on_the_same_folder_learns_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_service, "SYNC_SECONDS", 0.05)
    async with serve(tmp_path) as one, serve(tmp_path) as two:
        secret = await make(one, "alice")
        taken = await two.client.post("/admin/keys", json={"name": "alice"})
        assert (taken.status_code, taken.json()["error"]["code"]) == (409, "name_taken")
        with trio.fail_after(PATIENCE_SECONDS):
            while await asks(two, secret) != 200 or await asks(two) != 401:
                await trio.sleep(0.02)
        await two.client.delete(f"/admin/keys/{await id_of(two, 'alice')}")
        assert await asks(two, secret) == 401
        with trio.fail_after(PATIENCE_SECONDS):
            while await asks(one, secret) != 401:
                await trio.sleep(0.02)
        assert one.context.keys.problem is None


async def test_without_a_place_to_write_the_server_runs_and_the_page_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    async with serve(tmp_path / "file" / "state", api_keys=["me=k1"]) as server:
        assert await asks(server, "k1") == 200
        page = (await server.client.get("/admin/keys", headers=HTML)).text
        assert "Keys cannot be made here" in page
        assert "not a directory" in page
        refused = await server.client.post("/admin/keys", json={"name": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "state_unwritable")
        assert "not a directory" in (await listed(server))["problem"]
        refused = await server.client.post("/admin/keys", data={"name": "x"}, headers=HTML)
        assert refused.status_code == 503
        assert (await server.client.delete("/admin/keys")).status_code == 503


@pytest.mark.parametrize("room", [0, 512, 4096, 8192])
async def test_on_a_full_disk_the_server_runs_and_the_page_says_why(tmp_path: Path, room: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        async with serve(tmp_path) as server:
            assert await asks(server) == 200
            assert "cannot be written" in (await listed(server))["problem"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    async with serve(tmp_path) as server:
        assert await asks(server, await make(server, "alice")) == 200, "what was begun on the full disk is in no way"


async def test_keys_that_can_be_read_and_not_written_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve(tmp_path) as server:
        secret = await make(server, "alice")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(Path, "touch", refuse)
    async with serve(tmp_path) as server:
        assert (await asks(server), await asks(server, secret)) == (401, 200)
        assert "read-only file system" in (await listed(server))["problem"]
        refused = await server.client.delete("/admin/keys/1")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "state_unwritable")
        assert "refused until this server ends" in refused.json()["error"]["message"]
        assert await asks(server, secret) == 401
    (tmp_path / f"{FILE_NAME}-wal").write_bytes(b"changes that nobody took over")
    with pytest.raises(ConfigError, match="cannot be read"):
        open_store(tmp_path)


@pytest.mark.parametrize(
    "content", [b"this is no database, although it is long enough to be one" * 100, b"SQLite format 3\0x"]
)
def test_keys_that_cannot_be_read_let_nobody_in(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(ConfigError, match=r"relevo\.db cannot be read .*move it away, or set \[server\] state_dir"):
        open_store(tmp_path)
    assert (tmp_path / FILE_NAME).read_bytes() == content


def test_a_database_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    store = open_store(tmp_path).store
    assert store is not None
    store.close()
    database = sqlite3.connect(tmp_path / FILE_NAME)
    database.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    database.close()
    with pytest.raises(ConfigError, match="a newer version"):
        open_store(tmp_path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("DROP TABLE keys", "no such table: keys"),
        ("UPDATE keys SET max_concurrent = 'many'", "the limits of key 1 are damaged"),
        ("UPDATE keys SET key_digest = 'text'", "key 1 is damaged"),
        ("UPDATE keys SET created = 'yesterday'", "key 1 is damaged"),
        ("UPDATE keys SET name = CAST(x'ff' AS TEXT)", "Could not decode"),
    ],
)
def test_a_start_with_damaged_keys_is_one_line_of_wrong_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, str, str]], damage: str, words: str
) -> None:
    store = open_store(tmp_path).store
    assert store is not None
    store.add("alice", Digests.of("k1"), KeyLimits(max_concurrent=2), 1.0)
    store.close()
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database, database:
        database.execute(damage)
    monkeypatch.setattr("app.cli.pull.fetch", Path)
    exposed = ("--host", "0.0.0.0", "--admin-token", "t")
    for more in ((), exposed):
        code, _, err = run("serve", "--port", 0, "--state-dir", tmp_path, *more)
        (line,) = [line for line in err.splitlines() if not line.startswith("Loading ")]
        assert (code, line.startswith("relevo: The API keys in ")) == (2, True), err
        assert f"({words}" in line
        assert "set [server] state_dir" in line


@pytest.mark.parametrize("written_by", ["asking again", "another change", "the next look", "the end"])
async def test_a_disk_that_fails_later_is_told_and_a_revoked_key_is_refused_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written_by: str
) -> None:
    if written_by == "the next look":
        monkeypatch.setattr(key_service, "SYNC_SECONDS", 0.02)
    async with serve(tmp_path) as server:
        secret = await make(server, "alice")
        keys = server.context.keys

        def fail(*_: object) -> None:
            raise StateError("disk I/O error")

        with monkeypatch.context() as patch:
            for name in ("add", "revoke", "mark_used"):
                patch.setattr(f"app.key_store.KeyStore.{name}", fail)
            refused = await server.client.post("/admin/keys", json={"name": "bob"})
            assert (refused.status_code, "disk I/O error" in refused.text) == (503, True)
            assert keys.keyring.get("bob") is None
            assert await asks(server, secret) == 200
            refused = await server.client.delete("/admin/keys/1")
            assert refused.status_code == 503
            assert "refused from now on, but that is not written down yet" in refused.text
            assert await asks(server, secret) == 401
            assert (await listed(server))["unwritten"] == [1]
            page = (await server.client.get("/admin/keys", headers=HTML)).text
            assert "That alice is revoked holds, but is not written down yet" in page
            entry = (await server.client.get("/admin/audit")).json()[-1]
            assert (entry["deed"], entry["outcome"]) == ("API key 'alice' revoked", NOT_WRITTEN)
        if written_by == "asking again":
            assert (await server.client.delete("/admin/keys/1")).json()["unwritten"] == []
        elif written_by == "another change":
            await make(server, "alice")  # whose name is free, here and on the disk
            assert keys.unwritten == []
        elif written_by == "the next look":
            with trio.fail_after(PATIENCE_SECONDS):
                while keys.unwritten:
                    await trio.sleep(0.01)
    async with serve(tmp_path) as server:
        assert await asks(server, secret) == 401
        assert (await listed(server))["unwritten"] == []


async def test_a_revocation_that_never_came_to_the_disk_is_told_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise StateError("database or disk is full")

    async with serve(tmp_path) as server:
        await make(server, "alice")
        monkeypatch.setattr("app.key_store.KeyStore.revoke", fail)
        assert (await server.client.delete("/admin/keys/1")).status_code == 503
    assert caplog.records[-1].getMessage() == "API keys that were revoked are valid again from the next start on: [1]"


async def test_a_disk_that_stays_full_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(key_service, "SYNC_SECONDS", 0.01)
    problems = iter(["disk is full"] * 3 + ["disk I/O error"] * 2)
    all_told = trio.Event()

    def version(_: object) -> int:
        problem = next(problems, None)
        if problem is not None:
            raise StateError(problem)
        trio.from_thread.run_sync(all_told.set)
        return 0

    with caplog.at_level(logging.WARNING, "relevo.keys"):
        async with serve(tmp_path):
            monkeypatch.setattr("app.key_store.KeyStore.version", version)
            await all_told.wait()
            await trio.sleep(0.05)
    told = [re.sub(r".*: ", "", record.getMessage()) for record in caplog.records]
    assert told == ["disk is full", "disk I/O error", "the API keys on disk are kept up to date again"]


def test_the_folder_follows_xdg() -> None:
    home = {"HOME": "x"}
    auto = load_settings()
    assert state_dir(auto, {**home, "XDG_STATE_HOME": "/var/state"}) == Path("/var/state/relevo")
    for ignored in ({}, {"XDG_STATE_HOME": ""}, {"XDG_STATE_HOME": "relative"}):
        assert state_dir(auto, ignored) == Path.home() / ".local" / "state" / "relevo"
    assert state_dir(load_settings(flags={"server.state_dir": "~/x"}), {}) == Path.home() / "x"


def test_a_keyring_shows_no_digests() -> None:
    ring = Keyring(make_settings(security={"api_keys": ["me=hunter2"]}))
    assert "hunter2" not in repr(list(ring))
    assert "digest" not in repr(list(ring)).lower()
