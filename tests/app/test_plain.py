"""Names that others gave are shown as they are, and obeyed by nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from app.cli import main
from app.cli.progress import Progress
from app.limit.report import page_of
from app.limit.telling import tell
from app.render.plain import plain, plain_of
from tests.app.limit_lines import result_of

if TYPE_CHECKING:
    import pytest

HOSTILE = "\x1b[31mred\x1b]0;title\x07 right\u202eleft\nline"
SHOWN = "\\x1b[31mred\\x1b]0;title\\x07 right\\u202eleft\\nline"


@given(st.text())
def test_whatever_it_is_it_is_one_line_that_nothing_obeys(text: str) -> None:
    shown = plain(text)
    assert shown.replace("\N{NO-BREAK SPACE}", " ").isprintable()
    assert plain(shown) == shown
    if text.isprintable():
        assert shown == text


def test_all_texts_of_an_object_are_shown_so_and_figures_stay() -> None:
    assert plain(HOSTILE) == SHOWN
    assert plain("1\N{NO-BREAK SPACE}ms") == "1\N{NO-BREAK SPACE}ms"
    told = {HOSTILE: [HOSTILE, 1.5, None, True, {"name": (HOSTILE,)}]}
    assert plain_of(told) == {SHOWN: [SHOWN, 1.5, None, True, {"name": [SHOWN]}]}


def hostile(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: hostile(one, name) for name, one in value.items()}
    if isinstance(value, list):
        return [hostile(one, key) for one in value]
    return HOSTILE if isinstance(value, str) and key != "broken_promise" else value


def test_a_result_with_hostile_names_is_shown_in_lines_and_as_a_page() -> None:
    result = hostile(result_of())
    result["classes"] = [{**one, "name": f"{HOSTILE} {number}"} for one in result["classes"] for number in (1, 2)]
    for run in result["curve"]:
        run["classes"] = [{**run}, {**run}]
    result["policies"], result["policy"], result["ratio"] = {HOSTILE: hostile(result_of())}, HOSTILE, {}
    lines: list[str] = []
    assert tell(result, result, echo=lines.append) == 0
    assert sum(SHOWN in line for line in lines) > 10
    assert all(line.replace("\N{NO-BREAK SPACE}", " ").isprintable() for line in lines)
    html = page_of(result, result)
    assert html.count("right\\u202eleft") > 10
    assert not {"\u202e", "\x1b", "\x07"} & {*html}
    json.dumps(result)


def test_an_error_and_the_progress_say_no_more_than_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["limit", "--from", "no\x1b[2J\u202ewhere"]) == 2
    err = capsys.readouterr().err
    assert "no\\x1b[2J\\u202ewhere cannot be read" in err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Progress("Measuring") as progress:
        progress(1, 1, "policy \x1b[31mred")
    assert "policy \\x1b[31mred" in capsys.readouterr().err
