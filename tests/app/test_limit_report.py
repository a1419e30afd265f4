"""The HTML report of `relevo limit`: what stands in it, that it needs nothing else, and that names stay text."""

from __future__ import annotations

import copy
import json
import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

from app.limit.bounds import BOUNDS, GENERATOR, NOT_FILLED, NOT_REACHED, UNKNOWN
from app.limit.report import page_of
from app.limit.scrapes import Observed, bound_by
from app.limit.words import limit_lines, per_second
from tests.app.test_limit_command import SIMULATE

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = "<img src=x onerror=alert(1)>\"'&amp;</style></title>"


class Reader(HTMLParser):
    """What a browser would fetch or run, and the text that it would show."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self._in_style = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._in_style = tag == "style"
        for name, value in attrs:
            if name.startswith("on") or name in ("src", "srcset", "action", "style"):
                self.outside.append(f"{tag} {name}={value}")
            if name in ("href", "xlink:href") and not (value or "").startswith(("#", "data:")):
                self.outside.append(f"{tag} {name}={value}")

    def handle_endtag(self, _tag: str) -> None:
        self._in_style = False

    def handle_data(self, data: str) -> None:
        if not self._in_style:
            self.text.append(data)

    @property
    def words(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.text))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `--json` wrote of a simulation."""
    from app.cli import main

    path = tmp_path_factory.mktemp("limit") / "limit.json"
    asked = [*SIMULATE, "--requests", "100", "--factor", "20", "--repeats", "2", "--json", str(path)]
    assert main([*asked, "--think-time", "10", "--price-per-hour", "2"]) == 0
    return path


@pytest.fixture
def result(measured: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(measured.read_text())
    return found


def hostile(value: Any, key: str = "") -> Any:
    """The same with a hostile text in place of each that a server could have told."""
    if isinstance(value, dict):
        return {name: hostile(one, name) for name, one in value.items()}
    if isinstance(value, list):
        return [hostile(one, key) for one in value]
    known = ("broken_promise", "control")
    return HOSTILE if isinstance(value, str) and key not in known else value


def test_the_report_says_the_limit_first_and_shows_every_run(result: dict[str, Any]) -> None:
    limit = result["limit"]
    limit["cost_per_million_output_tokens"] = 1.23
    page = Reader(page_of(result))
    assert limit_lines(result)[0] in page.words
    assert f"Users at once {limit['users']:.0f}" in page.words
    assert f"A million output tokens {limit['cost_per_million_output_tokens']:.2f}" in page.words
    assert page.tags.count("svg") > 10
    for run in result["curve"]:
        assert per_second(run["rate"]) in page.words
    assert page.words.count("100 ") >= len(result["curve"]), "each run says on how many answers it rests"
    assert "20 for a p50, 300 for a p95, 1,000 for a p99" in page.words
    for remark in result["remarks"]:
        assert " ".join(remark.split()) in page.words
    assert "95 % of first tokens" in page.words


@pytest.mark.parametrize("told", [*BOUNDS, "unknown: the server shows no metrics"])
def test_the_report_says_what_bound_the_limit_and_what_helps(result: dict[str, Any], told: str) -> None:
    result["limit"]["bound_by"] = told
    assert BOUNDS.get(told, UNKNOWN) in Reader(page_of(result)).words


def test_every_bound_that_can_be_told_is_explained() -> None:
    seen = [
        Observed(running=3.0, preemptions=1), Observed(running=4.0, max_num_seqs=4),
        Observed(running=1.0, max_num_seqs=4, step_tokens=60.0, token_budget=64), Observed(running=3.0, waiting=2.0),
        Observed(running=1.0, max_num_seqs=4),
    ]  # fmt: skip
    assert {*map(bound_by, seen), GENERATOR, NOT_FILLED, NOT_REACHED} == BOUNDS.keys()


def test_the_report_fetches_and_runs_nothing(result: dict[str, Any]) -> None:
    html = page_of(result, result)
    page = Reader(html)
    assert not page.outside
    assert not {"script", "iframe", "object", "embed", "form"} & set(page.tags)
    assert "@import" not in html
    assert not re.search(r"url\((?!#)", html)


def test_a_hostile_name_stays_text(result: dict[str, Any]) -> None:
    html = page_of(hostile(result), hostile(result))
    page = Reader(html)
    assert not page.outside
    assert "img" not in page.tags
    assert HOSTILE not in html
    assert page.words.count("<img src=x onerror=alert(1)>") > 3


def test_another_result_is_drawn_beside_it(result: dict[str, Any]) -> None:
    then = copy.deepcopy(result)
    for run in then["curve"]:
        run["rate"] /= 2
    then["limit"] |= {name: then["limit"][name] / 2 for name in ("requests_per_second", "low", "high")}
    page = Reader(page_of(result, then))
    assert "That is 2.00 times." in page.words
    alone, beside = page_of(result).count('class="spot'), page_of(result, then).count('class="spot')
    assert beside == 2 * alone


def test_where_there_is_no_limit_the_report_says_why(result: dict[str, Any]) -> None:
    result |= {"limit": None, "why": "The targets hold at no rate that was tried.", "curve": []}
    page = Reader(page_of(result))
    assert "No limit: The targets hold at no rate that was tried." in page.words
    assert "Every run" not in page.words


def test_classes_of_work_have_charts_and_promises_of_their_own(result: dict[str, Any]) -> None:
    (one,) = result["classes"]
    quiet = {"ttft_p95_seconds": None, "itl_p95_seconds": None, "e2e_p95_seconds": 30.0}
    result["classes"] = [{**one, "name": "chats"}, {**one, **quiet, "name": "batches"}]
    for run in result["curve"]:
        latencies = {name: value for name, value in run.items() if re.match(r"(ttft|itl|e2e)_", name)}
        run["classes"] = [latencies, latencies]
    page = Reader(page_of(result))
    assert "95 % of first tokens, chats" in page.words
    assert "95 % of whole answers, batches" in page.words
    assert "95 % of first tokens, batches" not in page.words
    assert "End to end, batches" in page.words
    assert "By class of work, p95" in page.words


def test_the_command_writes_a_report_and_makes_one_of_what_it_wrote_before(
    run: Any, measured: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    code, out, err = run("limit", "--from", measured, "--html", page)
    assert (code, err) == (0, "")
    result = json.loads(measured.read_text())
    assert limit_lines(result)[0] in out
    assert page.read_text() == page_of(result)
    code, again, _ = run("limit", "--from", measured, "--against", measured, "--html", page)
    assert code == 0
    assert again.startswith(out.rstrip())
    assert "That is the same" in again
    assert "Then and now" in page.read_text()
    asked = [*SIMULATE, "--requests", "50", "--factor", "20", "--repeats", "1"]
    assert run(*asked, "--html", tmp_path / "new.html")[0] == 0
    assert "The limit is " in (tmp_path / "new.html").read_text()


@pytest.mark.parametrize(
    ("content", "flags", "expected"),
    [
        ("{}", (), "is no result of `relevo limit --json`"),
        (None, ("--url", "http://x"), "leave --url out"),
        (None, ("--simulate",), "leave --simulate out"),
        (None, ("--json", "x.json"), "leave --json out"),
        (None, ("--policies", "static,continuous"), "leave --policies out"),
        (None, ("--html", "nowhere/x.html"), "cannot be written"),
        (None, ("--against", "nowhere.json"), "nowhere.json cannot be read"),
    ],
)
def test_what_cannot_be_shown_again_is_one_line_and_code_2(
    run: Any, measured: Path, tmp_path: Path, content: str | None, flags: tuple[str, ...], expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "limit.json"
    path.write_text(measured.read_text() if content is None else content)
    code, out, err = run("limit", "--from", path, *flags)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert expected in err


@pytest.mark.parametrize("missing", ["rate", "holds", "ttft_p95_seconds", "dispatch_lag_p99_seconds"])
def test_half_a_result_is_said_to_be_none(run: Any, result: dict[str, Any], tmp_path: Path, missing: str) -> None:
    del result["curve"][0][missing]
    path = tmp_path / "limit.json"
    path.write_text(json.dumps(result))
    code, out, err = run("limit", "--from", path, "--html", tmp_path / "page.html")
    assert (code, out) == (2, "")
    assert "no whole result" in err
    assert not (tmp_path / "page.html").exists()


def test_a_result_of_an_older_version_can_be_shown(result: dict[str, Any]) -> None:
    for run in result["curve"]:
        for name in ("ttft", "itl", "e2e"):
            run.pop(f"{name}_samples", None)
    for name in ("settings", "machine"):
        result.pop(name, None)
    assert limit_lines(result)[0] in Reader(page_of(result)).words
