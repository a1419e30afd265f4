"""A result on disk is whole, or what was there before."""

from __future__ import annotations

import errno
import os
import resource
import stat
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

from app.files import write_whole
from app.limit.telling import tell
from tests.app.limit_lines import result_of

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def full() -> Iterator[None]:
    """For as long a file takes four bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_it_takes_the_place_of_what_was_there_and_has_its_mode(tmp_path: Path) -> None:
    path, link = tmp_path / "x.json", tmp_path / "link.json"
    write_whole(path, "one")
    path.chmod(0o600)
    link.symlink_to(path)
    write_whole(link, "two")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode), link.is_symlink()) == ("two", 0o600, True)
    assert {*tmp_path.iterdir()} == {path, link}


def test_a_disk_that_fills_leaves_what_was_there_and_names_the_file(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("whole")
    for path in (old, new):
        with full(), pytest.raises(OSError, match="File too large") as raised:
            write_whole(path, "other")
        assert raised.value.filename == str(path)
    assert old.read_text() == "whole"
    assert [*tmp_path.iterdir()] == [old]


@pytest.mark.parametrize(
    ("number", "is_full"),
    [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, True), (errno.EBUSY, False), (errno.EPERM, False)],
)
def test_what_nothing_can_take_the_place_of_is_written_itself(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_full: bool
) -> None:
    """As a file alone that is mounted into a container."""
    path = tmp_path / "x.json"
    path.write_text("old")

    def refuse(_part: Path, _whole: Path) -> Path:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match=r"x\.json") if is_full else nullcontext():
        write_whole(path, "new")
    assert path.read_text() == ("old" if is_full else "new")
    assert [*tmp_path.iterdir()] == [path]


def test_a_name_as_long_as_can_be_and_a_file_that_lies_in_the_way(tmp_path: Path) -> None:
    path, other = tmp_path / ("x" * 255), tmp_path / "x.json"
    write_whole(path, "text")
    assert path.read_text() == "text"
    in_the_way = tmp_path / f".{other.name}.{os.getpid()}.part"
    in_the_way.symlink_to(path)
    write_whole(other, "other")
    assert (other.read_text(), path.read_text(), in_the_way.is_symlink()) == ("other", "text", True)


@pytest.mark.skipif(os.getuid() == 0, reason="nobody forbids root to write")
def test_where_nothing_else_may_be_written_the_file_itself_is(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.touch()
    tmp_path.chmod(0o500)
    try:
        write_whole(path, "text")
    finally:
        tmp_path.chmod(0o700)
    assert path.read_text() == "text"


def test_what_is_no_plain_file_is_written_as_it_stands(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    try:
        write_whole(Path(f"/dev/fd/{writing}"), "text")
        assert os.read(reading, 10) == b"text"
    finally:
        os.close(reading)
        os.close(writing)


def test_what_is_open_for_writing_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """As `/dev/stdout` where a shell has it go to a file."""
    path = tmp_path / "out"
    with path.open("wb", buffering=0) as out, path.open("rb"):
        out.write(b"table ")
        write_whole(Path(f"/dev/fd/{out.fileno()}"), "result")
        out.write(b" end")
        write_whole(path, ".")
        assert os.path.samestat(path.stat(), os.fstat(out.fileno()))
    assert path.read_text() == "table result end."
    with path.open("rb") as reading:
        write_whole(path, "new")
        assert reading.read() == b"table result end."
    assert path.read_text() == "new"


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no such disk")
def test_a_disk_in_memory_is_a_disk() -> None:
    with TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "x.json"
        path.write_text("whole")
        with full(), pytest.raises(OSError, match="File too large"):
            write_whole(path, "other")
        assert path.read_text() == "whole"


def test_the_figures_are_shown_and_the_page_written_though_the_disk_does_not_take_the_json(tmp_path: Path) -> None:
    lines: list[str] = []
    with pytest.raises(OSError, match=r"limit\.json"):
        tell(
            result_of(), json_path=tmp_path / "nowhere" / "limit.json", html_path=tmp_path / "x.html", echo=lines.append
        )
    assert any("The limit is" in line for line in lines)
    assert "The limit is" in (tmp_path / "x.html").read_text()
