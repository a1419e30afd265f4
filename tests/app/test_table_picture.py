"""The table's picture: one rectangle a sitting, hand-overs, what was computed again, several tokens in a cell."""

from __future__ import annotations

import itertools
import json
import random
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.assets import static_dir
from app.render.life import draw_strip, life_variables
from app.render.palette import ALIKE, NUM_COLOURS, Palette
from app.render.table import NUM_STEPS, draw_table
from app.render.table_runs import PHASES, count_tokens, find_drafts, find_mixed, find_names, find_runs

HOSTILE = "<img src=x onerror=alert(1)>\"'&"
# Machado, Oliveira and Fernandes, 2009, at full severity: linear RGB as it is seen without one kind of cones.
VISIONS = {
    "full": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}


def step(number: int, *rows: list[Any], preempted: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    return {"step": number, "rows": list(rows), "preempted": list(preempted), **more}


def draw(steps: list[dict[str, Any]], seats: int = 2, **more: Any) -> Any:
    palette = Palette()
    palette.update([row[1] for s in steps for row in s["rows"]])
    return draw_table({"seats": seats, "budget": 16, "steps": steps, **more}, palette, seats=seats)


def shapes(picture: Any, tag: str, css: str) -> list[dict[str, str]]:
    return [e.attrib for e in ET.fromstring(picture.plot).iter(tag) if e.get("class") == css]


def test_what_is_computed_again_is_hatched_the_other_way() -> None:
    steps = [
        step(1, [0, "a", "prefill", 8]),
        step(2, [0, "a", "decode", 1]),
        step(3, preempted=("a",)),
        step(4, [1, "a", "prefill", 9], recomputed=[[1, 9]]),
        step(5, [1, "a", "decode", 1]),
    ]
    picture = draw(steps)
    (again,) = shapes(picture, "rect", "hatch again")
    (read,) = shapes(picture, "rect", "hatch")
    assert float(again["y"]) > float(read["y"])
    assert "recompute" in picture.phases
    titles = re.findall(r"<title>(.*?)</title>", picture.plot)
    assert "a · seat 2 · recompute 9, decode 1 · steps 4 to 5" in titles
    assert "a was preempted in step 3" in titles
    (path,) = shapes(picture, "path", "tokens-again")
    assert path["d"]
    assert "recompute" not in draw(steps[:2]).phases


def test_a_cell_with_right_drafts_is_cut_into_its_tokens() -> None:
    steps = [step(1, [0, "a", "prefill", 8], drafts=[]), step(2, [0, "a", "decode", 4], drafts=[[0, 3, 2]]),
             step(3, [0, "a", "decode", 3], drafts=[[0, 2, 0]]), step(4, [0, "a", "decode", 1])]  # fmt: skip
    picture = draw(steps)
    assert picture.has_several
    (cuts,) = shapes(picture, "path", "several")
    assert re.findall(r"M(\d+) ", cuts["d"]) == [str(NUM_STEPS - 3)] * 2  # three tokens, two cuts
    cells = json.loads(picture.cells)
    assert cells["drafts"] == [[NUM_STEPS - 3, 0, 3, 2], [NUM_STEPS - 2, 0, 2, 0]]
    assert [run[3:5] for run in cells["runs"]] == [[0, 8], [2, 1]]  # the decode is one run, whatever was drafted
    assert not draw(steps[2:]).has_several


@given(st.integers(1, 6), st.integers(0, 130), st.integers(0, 10_000))
def test_the_runs_are_the_rows_and_the_strip_adds_up(seats: int, num_steps: int, seed: int) -> None:
    rng = random.Random(seed)
    steps = []
    for number in range(num_steps):
        rows: list[list[Any]] = []
        drafts = []
        for seat in rng.sample(range(seats), rng.randint(0, seats)):
            phase = rng.choice(("prefill", "decode", "decode", "idle", "padding"))
            made = rng.randint(1, 3) if phase == "decode" and rng.random() < 0.2 else 0
            tokens = {"prefill": rng.randint(1, 2), "decode": 1 + made, "idle": 0, "padding": 1}[phase]
            rows.append([seat, rng.choice("ab"), phase, tokens])
            drafts += [[seat, made, rng.randint(0, made)]] if made else []
        again = [[row[0], rng.randint(1, row[3])] for row in rows if row[2] == "prefill" and rng.random() < 0.3]
        steps.append(step(number + 1, *rows, drafts=drafts, recomputed=again))
    shown = steps[-NUM_STEPS:]
    offset = NUM_STEPS - len(shown)
    runs, cells = find_runs(shown, offset), find_drafts(shown, offset)
    told = {(c, run.seat): run[1:4] for run in runs for c in range(run.first, run.last + 1)}
    assert sum(run.last - run.first + 1 for run in runs) == len(told)
    was = {}
    for column, s in enumerate(shown, offset):
        made_at, again_at = {seat: made for seat, made, _ in s["drafts"]}, dict(s["recomputed"])
        for seat, name, phase, tokens in s["rows"]:
            was[column, seat] = (name, "recompute" if seat in again_at else phase, tokens - made_at.get(seat, 0))
    assert told == was
    assert find_runs(shown, offset) == find_runs([dict(s) for s in shown], offset) == runs, "whatever was known before"
    assert [*find_names(shown)] == [*dict.fromkeys(row[1] for s in shown for row in s["rows"])]
    sums = count_tokens(runs, cells, find_mixed(shown, offset))
    assert len(sums) == NUM_STEPS
    for column, s in enumerate(shown, offset):
        assert sum(sums[column]) == sum(row[3] for row in s["rows"])
        assert sums[column].again == sum(tokens for _, tokens in s["recomputed"]), "what is new is none of it"
        assert sums[column].decode == sum(row[3] for row in s["rows"] if row[2] == "decode")


@pytest.mark.parametrize(("seats", "high"), [(1, 28), (4, 28), (16, 18), (64, 6.25), (256, 2)])
def test_few_seats_have_high_rows_and_many_thin_ones(seats: int, high: float) -> None:
    picture = draw([step(1, [seats - 1, "a", "decode", 1])], seats)
    assert picture.pitch == high
    labels = [e.text for e in ET.fromstring(picture.labels).iter("text")]
    assert labels[0] == "1"
    assert 1 <= len(labels) <= 36
    (path,) = shapes(picture, "path", "seat")
    assert path["d"].count("M") == seats  # still one row a seat


def test_cells_of_hostile_names_are_json_in_an_attribute() -> None:
    picture = draw([step(1, [0, HOSTILE, "decode", 1])])
    assert json.loads(picture.cells)["names"] == [HOSTILE]
    assert "<img" not in picture.plot
    assert json.loads(picture.cells)["phases"] == list(PHASES)


# ---- colours that people can tell apart


def see(colour: str, vision: str) -> tuple[float, float, float]:
    """CIE Lab of a colour as somebody sees it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    r, g, b = (min(1.0, max(0.0, sum(k * c for k, c in zip(row, linear, strict=True)))) for row in VISIONS[vision])
    xyz = ((0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505, 0.2126 * r + 0.7152 * g + 0.0722 * b,
           (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089)  # fmt: skip
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_colours_that_look_alike_to_somebody_are_listed() -> None:
    css = (static_dir() / "relevo.css").read_text()
    alike = set()
    for theme in css.split("@media (prefers-color-scheme: dark)")[:2]:
        colours = {int(n): c for n, c in re.findall(r"--c(\d+): (#[0-9a-f]{6})", theme)}
        assert len(colours) == NUM_COLOURS
        for a, b in itertools.combinations(sorted(colours), 2):
            for vision in VISIONS:
                pairs = zip(see(colours[a], vision), see(colours[b], vision), strict=True)
                if sum((p - q) ** 2 for p, q in pairs) ** 0.5 < 15:
                    alike.add((a, b))
    assert alike == ALIKE


@pytest.mark.parametrize("seats", [4, 16, 256])
def test_a_newcomer_never_looks_like_its_neighbours(seats: int) -> None:
    rng, palette = random.Random(seats), Palette()
    table, names = dict.fromkeys(range(seats), ""), itertools.count()
    for _ in range(200):
        seat = rng.randrange(seats)
        before = table[seat]
        table[seat] = f"r{next(names)}"
        taken = {there: name for there, name in table.items() if name}
        palette.update(taken.values(), taken.values(), taken)
        mine = palette.css(table[seat])
        for name in (before, table.get(seat - 1), table.get(seat + 1)):
            if not name or (name == before and palette.css(name) == "c-none"):
                continue
            pair = sorted(int(css[1:]) for css in (mine, palette.css(name)))
            assert pair[0] != pair[1]
            assert tuple(pair) not in ALIKE


def test_who_looks_back_sees_the_colours_that_were() -> None:
    palette = Palette()
    palette.update(["a", "b"])
    was = palette.css("a")
    palette.update(["b"])
    back = palette.looking_back(["a", "unseen"])
    assert (palette.css("a"), back.css("a")) == ("c-none", was)
    assert back.css("unseen") == palette.looking_back(["unseen"]).css("unseen") != "c-none"
    assert palette.css("unseen") == "c-none"


# ---- a request's own strip


def life(**changes: Any) -> dict[str, Any]:
    span = {"phase": "queued", "seat": None, "steps": [1, 3], "tokens": 0, "at_seconds": 0.0, "seconds": 1.0}
    spans = [
        span,
        {**span, "phase": "prefill", "seat": 2, "steps": [4, 4], "tokens": 9, "at_seconds": 1.0, "seconds": 0.5},
        {**span, "phase": "decode", "seat": 2, "steps": [5, None], "tokens": 0, "at_seconds": 1.5, "seconds": None},
    ]
    whole = {
        "number": 7,
        "request_id": "chatcmpl-0123456789abcdef",
        "key": None,
        "class": "interactive",
        "finish_reason": None,
        "abort_cause": None,
        "error": None,
        "prompt_tokens": 9,
        "cached_tokens": 0,
        "output_tokens": 3,
        "reason": None,
        "num_preemptions": 0,
        "age_seconds": 4.0,
        "ttft_seconds": 1.5,
        "e2e_seconds": None,
        "state": "running",
        "seat": 2,
        "times": {"queue_seconds": 1.0, "prefill_seconds": 0.5, "decode_seconds": 2.5, "preempted_seconds": 0.0},
        "recomputed_tokens": 0,
        "drafts": {"made": 0, "accepted": 0},
        "spans": spans,
        "spans_left_out": 0,
    }
    return {**whole, **changes}


def test_the_strip_is_as_long_as_the_life() -> None:
    strip = draw_strip(life()["spans"], 4.0)
    (read,) = [e.attrib for e in ET.fromstring(strip).iter("rect") if e.get("class") == "hatch"]
    assert (read["x"], read["width"]) == ("25%", "12.5%")
    answers = [e.attrib for e in ET.fromstring(strip).iter("rect") if e.get("class") == "c8"][1]
    assert (answers["x"], answers["width"]) == ("37.5%", "62.5%")  # what goes on goes on to the end
    assert "reads its prompt 1 times" in strip


def test_a_life_in_words() -> None:
    shown = life_variables(life())
    assert (shown["state"], shown["is_open"], shown["short"]) == ("Running on seat 3", True, "01234567")
    assert [(row["steps"], row["what"]) for row in shown["spans"]] == [
        ("—", "waits for a seat"), ("4", "reads its prompt"), ("5 on", "answers"),
    ]  # fmt: skip
    gone = life_variables(life(finish_reason="abort", abort_cause="admin", e2e_seconds=3.0, request_id=HOSTILE))
    assert (gone["state"], gone["note"], gone["is_open"], gone["id"]) == ("Aborted", "by an operator", False, HOSTILE)
    lost = life_variables(life(num_preemptions=2, recomputed_tokens=1, drafts={"made": 5, "accepted": 3}))
    assert ("computed again", "1 token") in lost["facts"]
    assert ("drafted tokens", "3 of 5 right") in lost["facts"]
