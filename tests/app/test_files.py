"""A result on disk is whole, or what was there before."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from app.files import write_whole
from app.limit.telling import tell
from tests.app.limit_lines import result_of


def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the disk takes half of what is written."""
    whole = Path.write_text

    def half(path: Path, text: str, encoding: str | None = None) -> int:
        whole(path, text[: len(text) // 2], encoding)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)


def test_it_takes_the_place_of_what_was_there_and_has_its_mode(tmp_path: Path) -> None:
    path, link = tmp_path / "x.json", tmp_path / "link.json"
    write_whole(path, "one")
    path.chmod(0o600)
    link.symlink_to(path)
    write_whole(link, "two")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode), link.is_symlink()) == ("two", 0o600, True)
    assert {*tmp_path.iterdir()} == {path, link}


def test_a_disk_that_fills_leaves_what_was_there_and_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("whole")
    full(monkeypatch)
    for path in (old, new):
        with pytest.raises(OSError, match="No space left") as raised:
            write_whole(path, "other")
        assert raised.value.filename == str(path)
    assert old.read_text() == "whole"
    assert [*tmp_path.iterdir()] == [old]


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


def test_the_figures_are_shown_and_the_page_written_though_the_disk_does_not_take_the_json(tmp_path: Path) -> None:
    lines: list[str] = []
    with pytest.raises(OSError, match=r"limit\.json"):
        tell(
            result_of(), json_path=tmp_path / "nowhere" / "limit.json", html_path=tmp_path / "x.html", echo=lines.append
        )
    assert any("The limit is" in line for line in lines)
    assert "The limit is" in (tmp_path / "x.html").read_text()
