"""The dashboard's windows: the page, its JSON and Prometheus say the same, over whatever time is chosen."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.render.course import heat_figure, latency_figure, spent_figure
from app.render.glossary import ABOUT, TERMS
from app.render.view import PARTS, WINDOWED
from engine.experience import band_edge
from engine.timeline import WINDOWS
from tests.app.serving import chat_body, open_server
from tests.fake_snapshot import FakeEngine, watched

HTML = {"Accept": "text/html"}


def words(html: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", html).replace("\N{NO-BREAK SPACE}", " ").split())


async def test_the_page_the_json_and_prometheus_agree() -> None:
    async with open_server() as server:
        for _ in range(3):
            assert (await server.client.post("/v1/chat/completions", json=chat_body(max_tokens=5))).status_code == 200
        stats = (await server.client.get("/ops/stats.json?window=15")).json()
        page = words((await server.client.get("/ops?window=15", headers=HTML)).text)
        families = text_string_to_metric_families((await server.client.get("/metrics")).text)
        samples = [sample for family in families for sample in family.samples]

    def metric(name: str, **labels: str) -> float:
        found = [s.value for s in samples if s.name == f"relevo:{name}" and labels.items() <= s.labels.items()]
        assert len(found) == 1, name
        return found[0]

    latency = stats["latency"]
    assert {latency[name]["window_seconds"] for name in latency} == {900.0}
    assert latency["ttft"]["count"] == metric("time_to_first_token_seconds_count") == 3
    assert latency["itl"]["count"] == metric("inter_token_latency_seconds_count") == 12
    assert latency["e2e"]["count"] == stats["ended"]["finished"] == stats["spent"]["requests"] == 3
    assert stats["spent"]["decode_seconds"] == pytest.approx(metric("request_decode_time_seconds_sum") / 3, rel=1e-3)
    assert stats["kv"]["usage"] == metric("kv_cache_usage_perc")
    assert "First token p95" in page
    assert "· 3 of 3 requests" in page
    assert "0 refused · 0 failed" in page
    assert f"{stats['kv']['total']} blocks of {stats['kv']['block_size']} tokens" in page
    assert "3 ended, 0 of them failed" in page
    assert stats["diagnosis"]
    # A slow machine may be told to be one, with another figure a moment later.
    assert all(" ".join(finding["what"].split()[:3]) in page for finding in stats["diagnosis"])


async def test_each_window_has_its_own_numbers_and_what_is_no_window_is_refused() -> None:
    async with open_server() as server:
        for seconds in WINDOWS:
            minutes = seconds // 60
            page = (await server.client.get(f"/ops?window={minutes}", headers=HTML)).text
            assert f'sse-connect="/ops/events?window={minutes}"' in page
            assert f'<a href="/ops?window={minutes}" aria-current="page">' in page
            stats = (await server.client.get(f"/ops/stats.json?window={minutes}")).json()
            assert stats["latency"]["itl"]["window_seconds"] == stats["recent"]["seconds"] == seconds
        usual = (await server.client.get("/ops/stats.json")).json()
        assert usual["latency"]["itl"]["window_seconds"] == 300
        for wrong in ("2", "", "sixty", "-1", "1e9"):
            for path in ("/ops", "/ops/events", "/ops/stats.json"):
                answer = await server.client.get(f"{path}?window={wrong}")
                assert answer.status_code == 400, (path, wrong)
                assert "must be one of 1, 5, 15, 60" in answer.text


async def test_windows_are_drawn_for_those_who_watch_and_share_what_is_the_same() -> None:
    engine = FakeEngine("busy")
    telemetry = watched(engine, 30)
    one, other, same = telemetry.stream(60), telemetry.stream(3600), telemetry.stream(60)
    for stream in (one, other, same):
        await anext(stream)
        await anext(stream)
    before = telemetry.num_renders
    engine.advance()
    telemetry.tick(engine.now)
    assert telemetry.num_renders - before == 2, "one for each window, however many watch it"
    minute, hour = telemetry.frame(60).parts, telemetry.frame(3600).parts
    assert list(minute) == list(hour) == list(PARTS)
    for name in PARTS:
        assert (minute[name] is hour[name]) == (name not in WINDOWED), name
    for stream in (one, other, same):
        await stream.aclose()
    assert telemetry.num_watchers == 0


def paths_of(plot: str) -> list[dict[str, str]]:
    return [element.attrib for element in ET.fromstring(plot).iter("path")]


@pytest.mark.parametrize("mode", ["idle", "overloaded"])
async def test_pictures_stay_in_their_frames(mode: str) -> None:
    telemetry = watched(FakeEngine(mode, seats=3), 60)
    for seconds in WINDOWS:
        scene: Any = telemetry._scene(telemetry._look(), seconds)
        course = scene.course()
        figures = [latency_figure(scene, course, name) for name in ("ttft", "itl", "tpot", "e2e", "queue")]
        for figure in (*figures, heat_figure(scene, course), spent_figure(scene, course)):
            assert figure.about in ABOUT
            for path in paths_of(figure.plot):
                for x in re.findall(r"[ML](-?[\d.]+) ", path["d"]):
                    assert -0.1 <= float(x) <= 600.1, (figure.title, path)


async def test_the_heat_map_has_every_gap_where_it_belongs() -> None:
    engine = FakeEngine("idle")
    telemetry = watched(engine, 5)
    for _ in range(50):
        engine.stats.interactive.windows["itl"].add(engine.now, 0.05)
    engine.stats.interactive.windows["itl"].add(engine.now, 1.2)
    course = engine.course(300)
    ((_, bands),) = course.gaps.items()
    assert sorted(bands.values()) == [1, 50]
    for band, seconds in zip(sorted(bands), (0.05, 1.2), strict=True):
        assert band_edge(band) < seconds <= band_edge(band + 1)
    figure = heat_figure(telemetry._scene(telemetry._look(), 300), course)
    assert {path["class"] for path in paths_of(figure.plot)} >= {"heat heat2", "heat heat8", "target"}
    assert "up to 50 in 4 s" in figure.note.replace("\N{NO-BREAK SPACE}", " ")
    assert "51 gaps" in figure.plot


async def test_where_the_time_went_is_drawn_to_its_height() -> None:
    engine = FakeEngine("busy")
    telemetry = watched(engine, 90)
    scene: Any = telemetry._scene(telemetry._look(), 300)
    course = scene.course()
    figure = spent_figure(scene, course)
    assert [item.css for item in figure.legend] == ["queue", "prefill", "decode", "preempted"]
    drawn = {path["class"]: path["d"].count("M") for path in paths_of(figure.plot)}
    assert drawn["spent-decode"] == len(course.spent)
    assert figure.note == f"mean of {scene.snapshot['spent']['requests']} requests"


async def test_a_window_with_more_samples_than_are_kept_says_so() -> None:
    engine = FakeEngine("idle")
    telemetry = watched(engine, 10)
    engine.stats.interactive.windows["itl"]._max_samples = 100
    for _ in range(1000):
        engine.stats.interactive.windows["itl"].add(engine.now, 0.05)
    telemetry.tick(engine.now)
    parts = telemetry.latest.parts
    assert "1,000 *" in parts["latency"]
    assert "up to 1 % too high" in parts["latency"]
    assert "1,000 samples, to 1 %" in parts["tiles"]


def test_every_term_of_the_glossary_is_explained_and_none_is_left_over() -> None:
    assert set(TERMS.values()) == set(ABOUT)
