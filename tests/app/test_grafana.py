"""`static/grafana`: what its dashboard and its alerts ask for is there on `/metrics`, by name, label and value."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import yaml

from app.assets import static_dir
from engine.config import SloTargets
from tests.app.serving import CHAT, chat_body, open_server
from tests.app.test_metrics import scrape

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = static_dir() / "grafana"
# What Prometheus adds to each series of a target.
TARGET_LABELS = {"job", "instance"}
FUNCTIONS = {
    "absent_over_time", "avg_over_time", "histogram_quantile", "increase", "max", "min", "rate", "sum",
}  # fmt: skip
WORDS = {"and", "or", "unless", "ignoring", "group_left", "group_right", "bool", "offset"}
GROUPING = {"by", "on", "without"}
TOKEN = re.compile(
    r"""\s*(?:(?P<name>[a-zA-Z_:][\w:]*) | (?P<number>\d+(?:\.\d+)?) | (?P<text>"[^"\\]*")
    | (?P<range>\[(?:\d+[smhd]|\$__rate_interval)\]) | (?P<sign>==|!=|>=|<=|=~|!~|[-+*/<>=(){},]))""",
    re.VERBOSE,
)


class Selector(NamedTuple):
    """A metric, and what its labels are asked to be: (label, operator, value)."""

    metric: str
    matchers: list[tuple[str, str, str]]


def tokens_of(expression: str) -> list[tuple[str, str]]:
    """Kinds and texts; raises where something is no token, or a bracket is not closed."""
    found, at, open_brackets = [], 0, []
    while at < len(expression.rstrip()):
        match = TOKEN.match(expression, at)
        assert match is not None, f"{expression!r} cannot be read from {expression[at:]!r} on"
        kind, text = str(match.lastgroup), match[str(match.lastgroup)]
        if text in ("(", "{"):
            open_brackets.append({"(": ")", "{": "}"}[text])
        elif text in (")", "}"):
            assert open_brackets, expression
            assert open_brackets.pop() == text, expression
        found.append((kind, text))
        at = match.end()
    assert not open_brackets, expression
    return found


def read(expression: str) -> tuple[list[Selector], set[str]]:
    """The selectors of a PromQL expression and the labels it groups or matches by."""
    tokens = [*tokens_of(expression), ("end", ""), ("end", "")]
    selectors, grouped, at = [], set(), 0
    while tokens[at][0] != "end":
        (kind, text), following = tokens[at], tokens[at + 1][1]
        at += 1
        if kind != "name" or text in WORDS:
            continue
        if text in GROUPING:
            end = tokens.index(("sign", ")"), at)
            grouped |= {name for kind, name in tokens[at:end] if kind == "name"}
            at = end + 1
        elif following == "(" or tokens[at][1] in GROUPING:
            assert text in FUNCTIONS, f"{text} in {expression!r}"
        else:
            end = tokens.index(("sign", "}"), at) if following == "{" else at
            inner = [token for token in tokens[at + 1 : end] if token != ("sign", ",")]
            triples = zip(inner[::3], inner[1::3], inner[2::3], strict=True)
            selectors.append(Selector(text, [(n, sign, value.strip('"')) for (_, n), (_, sign), (_, value) in triples]))
            at = end + 1 if following == "{" else at
    return selectors, grouped


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "relevo.json").read_text(encoding="utf-8"))
    return found


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    """Where each expression stands, and the expression."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for rule in alerts():
        yield rule["alert"], rule["expr"]


async def metrics() -> dict[str, dict[str, set[str]]]:
    """What a server that has answered says: metric to label to its values."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    slo = SloTargets(ttft_p95_seconds=2.0, itl_p95_seconds=0.25, e2e_p95_seconds=60.0)
    async with open_server(limits={"slo": slo}) as server:
        assert (await server.client.post(CHAT, json=chat_body("abc", max_tokens=4))).status_code == 200
        _, samples = await scrape(server)
    for name, labels in samples:
        for label, value in labels:
            found[name][label].add(value)
        found[name].setdefault("", set())
    return found


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("sum(rate(a[5m])", "sum"),
        ("rate(a[5 m])", "cannot be read"),
        ("rates(a[5m])", "rates"),
        ("a{b=}", "argument 3"),
        ("a ¤ b", "cannot be read"),
    ],
)
def test_what_is_no_promql_is_not_read(expression: str, fault: str) -> None:
    with pytest.raises((AssertionError, ValueError), match=fault):
        read(expression)


def test_promql_is_read() -> None:
    assert read('sum by (le) (rate(a:b_bucket{x=~"y|z", u="v"}[5m])) > on (job) 2 * c') == (
        [Selector("a:b_bucket", [("x", "=~", "y|z"), ("u", "=", "v")]), Selector("c", [])],
        {"le", "job"},
    )


async def test_all_that_is_asked_for_is_there() -> None:
    there = await metrics()
    asked = list(expressions())
    assert len(asked) > 50
    for where, expression in asked:
        selectors, grouped = read(expression)
        assert selectors, where
        for metric, matchers in selectors:
            assert metric in there, f"{where}: /metrics has no {metric}"
            known = there[metric].keys() | TARGET_LABELS
            for label, sign, value in matchers:
                assert label in known, f"{where}: {metric} has no label {label}"
                if label not in TARGET_LABELS:
                    wanted = value.split("|") if sign in ("=~", "!~") else [value]
                    assert set(wanted) <= there[metric][label], f"{where}: no {metric} with {label} {sign} {value}"
        for label in grouped - TARGET_LABELS:
            assert any(label in there[metric] for metric, _ in selectors), f"{where}: nothing has {label}"


async def test_legends_and_words_name_labels_that_are_there() -> None:
    there = await metrics()
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            selectors, grouped = read(target["expr"])
            kept = grouped or {label for metric, _ in selectors for label in there[metric]} | TARGET_LABELS
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept, panel["title"]
    for rule in alerts():
        selectors, _ = read(rule["expr"])
        kept = {label for metric, _ in selectors for label in there[metric]} | TARGET_LABELS
        words = "".join(rule["annotations"].values())
        assert set(re.findall(r"\$labels\.(\w+)", words)) <= kept, rule["alert"]


def test_the_alerts_are_whole() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(names) == len(set(names)) >= 10
    for rule in alerts():
        assert rule.keys() - {"for"} == {"alert", "expr", "labels", "annotations"}, rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))


def test_panels_neither_overlap_nor_share_a_number() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
        for target in panel.get("targets", []):
            assert "$instance" in target["expr"], panel["title"]
            assert target["datasource"] == panel["datasource"]
