"""The pictures and words: what they say is what the snapshot says, and hostile names stay names."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.history import History, make_point
from app.render import numbers
from app.render.blocks import Owner, draw_bar, draw_blocks
from app.render.charts import Chart, Line, draw_chart, sparkline
from app.render.course import axis_seconds
from app.render.palette import NUM_COLOURS, Palette
from app.render.svg import band_paths, line_path, nice_ceiling
from app.render.table import NUM_STEPS, draw_table
from app.render.tiles import make_tiles
from engine.config import SloTargets
from engine.experience import all_experience
from engine.stats import RequestTimes, Stats
from tests.fake_snapshot import FakeEngine, watched

HOSTILE = "<img src=x onerror=alert(1)>\"'&"


def step(number: int, *rows: list[Any], preempted: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    return {"step": number, "rows": list(rows), "preempted": list(preempted), **more}


def palette_for(*names: str) -> Palette:
    palette = Palette()
    palette.update(names)
    return palette


def rectangles(svg: str, css: str) -> list[dict[str, str]]:
    return [e.attrib for e in ET.fromstring(svg).iter("rect") if e.get("class") == css]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "—"), (0.0004, "0.4 ms"), (0.061, "61 ms"), (0.9994, "999 ms"), (0.9999, "1.00 s"), (12.34, "12.3 s"),
     (1234.0, "1,234 s")],
)  # fmt: skip
def test_seconds(value: float | None, shown: str) -> None:
    assert str(numbers.seconds(value)).replace("\N{NO-BREAK SPACE}", " ") == shown


@pytest.mark.parametrize(
    ("share", "shown"), [(None, "—"), (0, "0 %"), (0.0004, "<0.1 %"), (0.5, "50 %"), (0.9999, "99.9 %"), (1, "100 %")]
)
def test_percent_never_rounds_to_the_ends(share: float | None, shown: str) -> None:
    assert str(numbers.percent(share)).replace("\N{NO-BREAK SPACE}", " ") == shown


def test_duration_and_rate() -> None:
    assert numbers.duration(11_520).replace("\N{NO-BREAK SPACE}", " ") == "3 h 12 min"
    assert numbers.duration(9.9).replace("\N{NO-BREAK SPACE}", " ") == "9 s"
    assert numbers.duration(86_400).replace("\N{NO-BREAK SPACE}", " ") == "1 d"
    assert numbers.rate(47.23).text == "47.2"
    assert numbers.rate(1518.4).text == "1,518"
    assert numbers.plural(1, "seat") == "1 seat"


def test_a_request_keeps_its_colour_and_neighbours_differ() -> None:
    palette = palette_for("a", "b")
    first = palette.css("a")
    palette.update(["c", "b", "a"], seated=["a", "b"])
    assert palette.css("a") == first
    assert len({palette.css(name) for name in "abc"}) == 3
    palette.update(["c"])
    assert palette.css("a") == "c-none"
    assert len(palette) == 1


@given(st.lists(st.lists(st.integers(0, 30), max_size=NUM_COLOURS, unique=True), max_size=30))
def test_up_to_twelve_requests_in_sight_have_twelve_colours(ticks: list[list[int]]) -> None:
    palette = Palette()
    for seated in ticks:
        names = [str(number) for number in seated]
        before = {name: palette.css(name) for name in names}
        palette.update(names, names)
        assert all(before[name] in ("c-none", palette.css(name)) for name in names)
        assert len({palette.css(name) for name in names}) == len(names)


def test_the_hand_over_is_seen_at_the_table() -> None:
    """Two seats, requests of 2, 4 and 2 steps: the third sits down in step 3 on the first one's seat."""
    steps = [
        step(1, [0, "a", "prefill", 8], [1, "b", "prefill", 8]),
        step(2, [0, "a", "decode", 1], [1, "b", "decode", 1]),
        step(3, [0, "c", "prefill", 8], [1, "b", "decode", 1]),
        step(4, [0, "c", "decode", 1], [1, "b", "decode", 1]),
    ]
    palette = palette_for("a", "b", "c")
    picture = draw_table({"seats": 2, "budget": 16, "steps": steps}, palette, seats=2)
    titles = re.findall(r"<title>(.*?)</title>", picture.plot)
    assert titles == [
        "a · seat 1 · prefill 8, decode 1 · steps 1 to 2",
        "c · seat 1 · prefill 8, decode 1 · steps 3 to 4",
        "b · seat 2 · prefill 8, decode 3 · steps 1 to 4",
    ]
    (c_sits,) = rectangles(picture.plot, palette.css("c"))
    (a_sits,) = rectangles(picture.plot, palette.css("a"))
    assert c_sits["y"] == a_sits["y"]
    assert float(c_sits["x"][:-1]) > float(a_sits["x"][:-1])
    assert len(rectangles(picture.plot, "hatch")) == 3
    # Only where somebody else takes over is there an edge.
    (edges,) = [e for e in ET.fromstring(picture.plot).iter("path") if e.get("class") == "edges"]
    assert edges.attrib["d"].count("M") == 3
    assert (picture.first_step, picture.last_step) == (1, 4)


def test_the_labels_of_an_axis_have_room() -> None:
    """Six pixels and a half for a character and three below the line: wider and lower than fonts of this size are."""
    for highest, longest in ((0.5, "500 ms"), (0.0025, "1.5 ms"), (45.0, "50 s")):
        line = Line("p50", "thin", [highest, highest / 2])
        axis = ET.fromstring(draw_chart(Chart("First token", [0, 1], [line], axis_seconds, span="last 5 min")))[0]
        labels = list(axis.iter("text"))
        assert len(labels) == 3
        assert max(len(label.text or "") for label in labels) >= len(longest)
        for label in labels:
            assert float(label.attrib["x"]) <= float(axis.attrib["width"])
            assert float(label.attrib["x"]) - 6.5 * len(label.text or "") >= 0
            assert 11 <= float(label.attrib["y"]) <= float(axis.attrib["height"]) - 3


def test_a_preemption_is_marked_on_the_seat_that_was_lost() -> None:
    steps = [step(7, [0, "a", "decode", 1], [1, "b", "decode", 1]), step(8, [0, "a", "decode", 1], preempted=("b",))]
    plot = draw_table({"seats": 2, "budget": 4, "steps": steps}, palette_for("a", "b"), seats=2).plot
    crosses = [element for element in ET.fromstring(plot).iter("text") if element.get("class") == "cross"]
    assert [cross.findtext("title") for cross in crosses] == ["b was preempted in step 8"]
    assert float(crosses[0].attrib["y"]) > 18


def test_a_step_that_is_kept_short_has_a_limit_of_its_own_and_no_mark() -> None:
    steps = [step(n, [0, "a", "decode", 1], budget=64 - n, generation=6) for n in range(1, 5)]
    plot = draw_table({"seats": 1, "budget": 64, "steps": steps}, palette_for("a"), seats=1).plot
    assert "Generation" not in plot
    limit = re.search(r'class="limit" d="([^"]+)"', plot)
    assert limit is not None
    assert limit[1].count("L") == 3


def test_a_changed_budget_is_marked_and_the_limit_follows_it() -> None:
    steps = [step(n, [0, "a", "decode", 1], budget=64 if n < 3 else 16, generation=6 + n // 3) for n in range(1, 5)]
    plot = draw_table({"seats": 1, "budget": 16, "steps": steps}, palette_for("a"), seats=1).plot
    marks = [element for element in ET.fromstring(plot).iter("line") if element.get("class") == "mark"]
    assert len(marks) == 1
    assert "<title>Generation 7</title>" in plot
    (limit,) = [e for e in ET.fromstring(plot).iter("path") if e.get("class") == "limit"]
    assert len(set(re.findall(r" ([\d.]+)H", limit.attrib["d"]))) == 2


def test_who_sits_beyond_a_lowered_limit_is_still_drawn() -> None:
    steps = [step(1, [3, "a", "decode", 1])]
    assert draw_table({"seats": 4, "budget": 4, "steps": steps}, palette_for("a"), seats=2).seats == 4


@pytest.mark.parametrize("seats", [1, 4, 16, 64, 256])
def test_the_table_stays_in_its_frame(seats: int) -> None:
    steps = [step(n, *[[s, f"r{(s + n) % seats}", "decode", 1] for s in range(seats)]) for n in range(NUM_STEPS + 9)]
    names = [f"r{number}" for number in range(seats)]
    picture = draw_table({"seats": seats, "budget": seats, "steps": steps}, palette_for(*names), seats=seats)
    root = ET.fromstring(picture.plot)
    assert int(root.attrib["height"]) <= 600
    for element in root.iter("rect"):
        if element.get("x", "").endswith("%"):
            width = element.attrib["width"]
            shown = float(width[:-1]) if width.endswith("%") else 0
            assert float(element.attrib["x"][:-1]) + shown <= 100.1
    assert picture.last_step - picture.first_step == NUM_STEPS - 1


def test_an_empty_table_is_a_table() -> None:
    picture = draw_table({"seats": 4, "budget": 8, "steps": []}, Palette(), seats=4)
    assert picture.last_step == 0
    assert "no step yet" in picture.plot


@given(st.integers(0, 3000), st.data())
def test_the_squares_add_up_to_the_total(total: int, data: st.DataObject) -> None:
    used = data.draw(st.integers(0, total))
    cached = data.draw(st.integers(0, total - used))
    mine = data.draw(st.integers(0, used))
    kv = {"total": total, "used": used, "cached": cached, "free": total - used - cached}
    picture = draw_blocks(kv, [Owner("c0", "a", mine)])
    area = {
        css: sum(int(r["width"]) // 10 for r in rectangles(picture.grid, css))
        for css in ("c0", "used", "cached", "free")
    }
    assert sum(area.values()) == -(-total // picture.blocks_per_cell)
    if picture.blocks_per_cell == 1:
        assert area == {"c0": mine, "used": used - mine, "cached": cached, "free": total - used - cached}
    assert f"{used} are used" in draw_bar(kv)


def test_a_line_has_gaps_where_nothing_was_measured() -> None:
    assert line_path([(0, 1), (1, 2), (2, None), (3, 4)]) == "M0.0 1.0L1.0 2.0M3.0 4.0"
    assert band_paths([0, 1, 2], [1, 1, None], [2, 2, 2]) == "M0.0 2.0L1.0 2.0L1.0 1.0L0.0 1.0Z"
    assert "L" not in sparkline([None, None, 3.0])


@given(st.floats(1e-6, 1e9))
def test_an_axis_ends_above_the_data_and_not_far(value: float) -> None:
    assert value <= nice_ceiling(value) * 1.000001 <= value * 2.000001


def test_a_chart_says_what_it_shows() -> None:
    line = Line("output", "strong", [1.0, 3.0])
    chart = Chart("Output", [0.0, 1.0], [line], lambda v: f"{v:g}", span="last 5 min", target=2.0)
    drawn = draw_chart(chart)
    assert 'aria-label="Output, last 5 min. Now: output 3."' in drawn
    assert 'class="target"' in drawn


def test_a_window_keeps_its_points() -> None:
    engine, history = FakeEngine("busy"), History(300)
    snapshot = engine.snapshot()
    for second in range(700):
        snapshot["requests"]["waiting"] = 9 if second == 433 else 1
        snapshot["preemptions_by_reason"]["kv_memory"] = second // 100
        snapshot["requests"]["rejected_by_reason"] = {"draining": second // 300, "invalid": second}
        snapshot["rows"] = {"computed": second * 10, "useful": second * 10 if second < 500 else 5000}
        history.add(make_point(float(second), snapshot))
    assert [history.points[0].time, history.points[-1].time] == [399, 699]
    merged = history.merged()
    assert 149 <= len(merged) <= 151
    assert max(point.waiting for point in merged) == 9, "a short peak is not averaged away"
    positions = [history.position(point.time) for point in merged]
    assert positions == sorted(positions)
    assert (positions[0] >= 0, positions[-1]) == (True, 1)
    recent = history.recent()
    assert (recent["preemptions"], recent["preemptions_by_reason"]["kv_memory"]) == (3, 3)
    assert (recent["refused"], recent["refused_by_reason"]["draining"]) == (1, 1)
    assert recent["rows"] == {"computed": 3000, "useful": 1010}
    assert len(History(60).merged()) == 0
    assert (History(60).recent()["refused"], History(60).recent()["rows"]["computed"]) == (0, 0)


@pytest.mark.parametrize("trouble", ["rate_limited", "error"])
async def test_only_who_came_at_a_bad_time_is_trouble(trouble: str) -> None:
    """A prompt that is too long is its sender's affair."""
    engine = FakeEngine("idle")
    telemetry = watched(engine, 1)
    told = [("invalid", ""), ("context_length_exceeded", ""), (trouble, "bad")]
    for second, (reason, level) in enumerate(told):
        engine.rejected[reason] += 1
        engine.now = second + 1.0
        telemetry.tick(engine.now)
        snapshot = telemetry.complete(engine.snapshot())
        (tile,) = [tile for tile in make_tiles(snapshot, telemetry.histories[300], {}) if tile.label == "Requests"]
        assert (tile.level, "1 refused" in tile.note) == (level, level == "bad"), reason
        assert [finding["level"] for finding in snapshot["diagnosis"]] == ["warn" if level else "good"]


@pytest.mark.parametrize(
    ("targets", "misses", "value", "level"),
    [
        (SloTargets(1.0, None, 10.0), {"ttft": 4, "e2e": 4}, "92", ""),
        (SloTargets(1.0, None, 10.0), {"ttft": 6}, "94", "bad"),
        (SloTargets(None, None, None), {}, "\N{EM DASH}", ""),
    ],
)
def test_each_target_may_be_missed_by_its_own_twentieth(
    targets: SloTargets, misses: dict[str, int], value: str, level: str
) -> None:
    stats = Stats(targets)
    for number in range(100):
        first = 2.0 if number < misses.get("ttft", 0) else 0.5
        last = 20.0 if number >= 100 - misses.get("e2e", 0) else 3.0
        stats.interactive.record_end(RequestTimes(0.0, first_token=first, last_token=last), last, failed=False)
    engine = FakeEngine("idle")
    snapshot = engine.snapshot() | all_experience(stats, 20.0, 300) | {"recent": History(300).recent()}
    (tile,) = [tile for tile in make_tiles(snapshot, History(300), {}) if tile.label == "Within targets"]
    assert (tile.value, tile.level) == (value, level)


def test_a_hostile_name_is_text_in_every_picture() -> None:
    steps = [step(1, [0, HOSTILE, "decode", 1]), step(2, preempted=(HOSTILE,))]
    plot = draw_table({"seats": 1, "budget": 4, "steps": steps}, palette_for(HOSTILE), seats=1).plot
    kv = {"total": 4, "used": 2, "cached": 0, "free": 2}
    for drawn in (plot, draw_blocks(kv, [Owner("c0", HOSTILE, 2)]).grid):
        assert "<img" not in drawn
        assert any(HOSTILE in (title.text or "") for title in ET.fromstring(drawn).iter("title"))
