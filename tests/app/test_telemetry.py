"""The live view: drawn once for everybody, only while somebody watches, and never more than the newest for anyone."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

import pytest
import trio

from app.render.view import PARTS
from app.sse import text_event
from app.telemetry import HEARTBEAT_SECONDS, Telemetry
from engine.handle import GenerationRequest, TextPrompt
from tests.fake_snapshot import FakeEngine, watched
from tests.fakes import open_fake_engine

if TYPE_CHECKING:
    from trio.testing import MockClock

HOSTILE = "<img src=x onerror=alert(1)>"


def names_of(chunk: bytes) -> list[str]:
    return re.findall(r"^event: (\w+)$", chunk.decode(), re.MULTILINE)


async def test_nothing_is_drawn_while_nobody_watches(autojump_clock: MockClock) -> None:
    telemetry = Telemetry(FakeEngine())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(telemetry.run)
        await trio.sleep(60.5)
        assert telemetry.num_renders == 0
        assert len(telemetry.histories[300].points) == 61
        nursery.cancel_scope.cancel()


async def test_fifty_watchers_cost_one_rendering_a_tick(autojump_clock: MockClock) -> None:
    engine = FakeEngine()
    telemetry = Telemetry(engine)
    got: list[list[str]] = [[] for _ in range(50)]

    async def watch(seen: list[str]) -> None:
        async for chunk in telemetry.stream():
            seen += names_of(chunk)

    async def live() -> None:
        await trio.sleep(0.5)  # between two looks: in which order tasks of one moment run is left to chance
        while True:
            engine.advance()
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(live)
        nursery.start_soon(telemetry.run)
        for seen in got:
            nursery.start_soon(watch, seen)
        await trio.sleep(10.5)
        assert telemetry.num_watchers == 50
        telemetry.close()
        await trio.sleep(0.1)
        assert telemetry.num_watchers == 0
        nursery.cancel_scope.cancel()
    assert 10 <= telemetry.num_renders <= 12
    for seen in got:
        assert seen[: len(PARTS)] == list(PARTS)
        assert seen[-1] == "bye"
        assert 8 <= seen.count("tiles") <= 12, "small lines may stand still for a second"


async def test_watchers_of_the_same_get_the_same_bytes_once_made() -> None:
    engine = FakeEngine()
    telemetry = watched(engine, 3)
    streams = [telemetry.stream() for _ in range(3)]
    for stream in streams:
        await anext(stream)
    first, second, late = [await anext(stream) for stream in streams]
    assert first is second is late
    engine.advance()
    telemetry.tick(engine.now)
    first, second = [await anext(stream) for stream in streams[:2]]
    assert first is second
    engine.advance()
    telemetry.tick(engine.now)
    first, second, late = [await anext(stream) for stream in streams]
    assert first is second
    assert set(names_of(late)) >= set(names_of(first))
    for stream in streams:
        await stream.aclose()


async def test_the_first_chunk_tells_when_to_come_back() -> None:
    stream = watched(FakeEngine(), 3).stream()
    delay = int(re.fullmatch(rb"retry: (\d+)\n\n", await anext(stream))[1])  # type: ignore[index]
    assert 1500 <= delay <= 5000
    assert names_of(await anext(stream)) == list(PARTS)
    await stream.aclose()


async def test_a_slow_watcher_gets_the_newest_frame_only() -> None:
    engine = FakeEngine()
    telemetry = watched(engine, 3)
    stream = telemetry.stream()
    await anext(stream)
    await anext(stream)
    for _ in range(20):
        engine.advance()
        telemetry.tick(engine.now)
    chunk = (await anext(stream)).decode()
    assert chunk.count("event: tiles") == 1
    assert f"up to step {engine.step:,}" in chunk
    await stream.aclose()
    assert telemetry.num_watchers == 0


async def test_parts_that_did_not_change_are_not_sent_again() -> None:
    engine = FakeEngine("idle")
    telemetry = watched(engine, 3)
    stream = telemetry.stream()
    await anext(stream)
    await anext(stream)
    engine.now += 61
    telemetry.tick(engine.now)
    sent = names_of(await anext(stream))
    assert "state" in sent
    assert not {"requests", "memory", "latency", "counts", "table"} & set(sent)
    await stream.aclose()


async def test_a_silent_stream_shows_that_it_lives(autojump_clock: MockClock) -> None:
    telemetry = watched(FakeEngine(), 3)
    stream = telemetry.stream()
    await anext(stream)
    await anext(stream)
    began = trio.current_time()
    assert await anext(stream) == b": still here\n\n"
    assert trio.current_time() - began <= HEARTBEAT_SECONDS <= 15
    await stream.aclose()


async def test_a_fault_costs_a_frame_and_not_the_server(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine()
    telemetry = Telemetry(engine)
    good = engine.snapshot
    answers = iter([good, dict, good])
    engine.snapshot = lambda: next(answers)()  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR), trio.move_on_after(2.5):
        await telemetry.run()
    assert len(telemetry.histories[300].points) == 2
    assert "live view" in caplog.text


async def test_every_state_says_itself() -> None:
    assert "draining" in watched(FakeEngine("draining"), 30).draw_part("state")
    idle = watched(FakeEngine("idle"), 30).latest.parts
    assert "Nothing runs" in idle["requests"]
    assert "No step yet" in idle["table"]
    assert "nobody waits" in idle["tiles"]
    assert 'class="tile bad"' not in idle["tiles"]
    overloaded = watched(FakeEngine("overloaded", seats=2), 60).latest.parts
    assert "no free seat" in overloaded["requests"]
    assert 'class="tile bad"' in overloaded["tiles"]


async def test_keys_have_a_column_where_there_are_keys_and_background_work_says_so() -> None:
    plain = watched(FakeEngine("overloaded", seats=2), 60).latest.parts["requests"]
    assert "background" not in plain
    assert 'class="whose"' not in plain
    named = watched(FakeEngine("overloaded", seats=2, keys=(HOSTILE, "batch")), 60).latest.parts["requests"]
    assert named.count(">batch</td>") == named.count("· background</span>") > 0
    assert "<img" not in named
    assert "&lt;img src=x onerror=alert(1)&gt;</td>" in named


async def test_the_made_up_engine_has_the_shape_of_the_real_one() -> None:
    def shape(value: object) -> object:
        return {name: shape(part) for name, part in value.items()} if isinstance(value, dict) else None

    made_up = watched(FakeEngine("busy", seats=2, keys=("alice",)), 60).engine.snapshot()
    async with open_fake_engine(step_seconds=0.02) as engine:
        handle = engine.submit(GenerationRequest("r", TextPrompt("hello"), key_name="alice"))
        await handle.take()
        real = engine.snapshot()
    for name in ("background", "slo", "latency", "preemptions_by_reason", "rows", "speculation", "ended"):
        assert shape(made_up[name]) == shape(real[name]), name
    assert shape(made_up["active"][0]) == shape(real["active"][0])
    for name in ("by_class", "by_key"):
        assert shape(made_up["requests"][name]) == shape(real["requests"][name]), name


async def test_numbers_on_the_page_are_those_of_the_snapshot() -> None:
    engine = FakeEngine("busy")
    telemetry = watched(engine, 200)
    parts, snapshot = telemetry.latest.parts, engine.snapshot()
    text = {name: re.sub(r"<[^>]*>", " ", html).replace("\N{NO-BREAK SPACE}", " ") for name, html in parts.items()}
    kv = snapshot["kv"]
    assert re.search(rf"used\s+{kv['used']}\s+cached\s+{kv['cached']}\s+free\s+{kv['free']}", text["memory"])
    assert f"{snapshot['requests']['running']} running · {snapshot['requests']['waiting']} waiting" in text["requests"]
    assert f"{snapshot['latency']['ttft']['count']}" in text["latency"]
    assert f"goodput {snapshot['slo']['goodput_requests_per_second']:.1f} requests/s" in text["latency"]
    assert re.search(rf"steps\s+{snapshot['step']['count']:,}", text["counts"])
    assert f"{snapshot['tokens_per_second']['output']:.0f}" in text["tiles"]


@pytest.mark.parametrize(
    "name", [HOSTILE, '"><script>alert(1)</script>', "a'b&c", "{{ 7*7 }}", "\N{RIGHT-TO-LEFT OVERRIDE}x"]
)
async def test_hostile_names_stay_text(name: str) -> None:
    engine = FakeEngine(names=(name,), model_name=name)
    for html in watched(engine, 60).latest.parts.values():
        assert "<img" not in html
        assert "<script" not in html
        assert "49" not in re.findall(r"{{.*?}}|<b>49</b>", html)


async def test_no_part_needs_inline_style_or_script() -> None:
    for html in watched(FakeEngine("busy"), 60).latest.parts.values():
        assert not re.search(r"<style|<script|\sstyle=|\son\w+=|javascript:", html)


def test_an_event_has_one_data_line_a_line() -> None:
    assert text_event("a", "x\ny") == b"event: a\ndata: x\ndata: y\n\n"
    assert text_event("a", "") == b"event: a\ndata:\n\n"


async def test_many_seats_and_blocks_are_not_much_to_send() -> None:
    """The page grows with what is drawn and not with what is served; `tests.bench.ops_tick` measures the time."""
    engine = FakeEngine("overloaded", seats=256, budget=1024, total_blocks=100_000)
    parts = watched(engine, 60).latest.parts
    assert "one square is 209 blocks, rounded" in parts["memory"]
    assert max(len(html) for html in parts.values()) < 100_000
    assert sum(len(html) for html in parts.values()) < 250_000


def test_the_parts_have_templates() -> None:
    from app.assets import templates_dir

    assert all((templates_dir() / f"_{name}.html").is_file() for name in PARTS)
