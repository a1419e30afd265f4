"""Traces of requests, as OpenTelemetry's own exporters get them."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest
import trio

from app.endings import Ending
from app.tracing import Tracing, make_tracing, open_tracing
from engine.errors import ConfigError
from tests.app.serving import CHAT, COMPLETIONS, chat_body, make_settings, open_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.sdk.trace import ReadableSpan

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="the extra otel is not installed")

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@contextmanager
def collecting() -> Iterator[tuple[Tracing, Any]]:
    """Tracing whose spans stay in memory, sampled as is the default: always, unless the caller says it is not."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield Tracing(provider), exporter
    provider.shutdown()


def by_name(spans: tuple[ReadableSpan, ...]) -> dict[str, ReadableSpan]:
    assert len({span.name for span in spans}) == len(spans)
    return {span.name: span for span in spans}


async def test_a_request_is_a_trace_of_what_it_went_through() -> None:
    settings = make_settings(security={"api_keys": ["alice=k"]})
    with collecting() as (tracing, exporter):
        async with open_server(settings, tracing=tracing, step_seconds=0.01) as server:
            headers = {"Authorization": "Bearer k", "traceparent": f"00-{TRACE}-{SPAN}-01", "X-Request-Id": "mine"}
            answer = await server.client.post(CHAT, json=chat_body(max_tokens=5), headers=headers)
            await server.settle()
        spans = by_name(exporter.get_finished_spans())
    assert set(spans) == {"llm_request", "queue", "prefill", "decode"}
    root = spans["llm_request"]
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, SPAN)
    parts = [spans[name] for name in ("queue", "prefill", "decode")]
    assert all(part.parent.span_id == root.context.span_id for part in parts)
    edges = [root.start_time, *[edge for part in parts for edge in (part.start_time, part.end_time)], root.end_time]
    assert edges == sorted(edges)
    assert (edges[0], edges[2], edges[4], edges[6]) == (edges[1], edges[3], edges[5], edges[7]), "without a gap"
    assert edges[6] - edges[5] >= 3 * 0.01e9, "on the clock of the world"
    told = dict(root.attributes)
    assert told == {
        "gen_ai.request.model": "fake", "gen_ai.response.id": answer.json()["id"],
        "gen_ai.response.finish_reasons": ("length",), "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 5, "relevo.cached_tokens": 0, "relevo.preemptions": 0,
        "relevo.class": "interactive", "relevo.key": "alice", "relevo.request_id": "mine",
    }  # fmt: skip


async def test_a_seat_that_was_lost_is_a_span() -> None:
    with collecting() as (tracing, exporter):
        async with open_server(tracing=tracing, num_blocks=8) as server:
            body = {"prompt": ["a" * 8, "b" * 8], "max_tokens": 16}
            assert (await server.client.post(COMPLETIONS, json=body)).status_code == 200
            await server.settle()
        spans = exporter.get_finished_spans()
    lost = [span for span in spans if span.name == "preempted"]
    assert lost, "two that need six blocks each do not fit into eight"
    for span in lost:
        (root,) = [other for other in spans if other.context.span_id == span.parent.span_id]
        assert root.start_time < span.start_time < span.end_time < root.end_time
        assert root.attributes["relevo.preemptions"] >= 1


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("", 4),
        (f"00-{TRACE}-{SPAN}-00", 0),  # whoever asked does not sample it
        ("00-0-0-01", 4),
        (f"ff-{TRACE}-{SPAN}-01", 4),
        ("\u00e9", 4),
    ],
)
async def test_what_is_no_traceparent_begins_a_trace_and_what_is_not_sampled_none(given: str, names: int) -> None:
    with collecting() as (tracing, exporter):
        async with open_server(tracing=tracing) as server:
            await server.client.post(CHAT, json=chat_body(max_tokens=5), headers={"traceparent": given.encode()})
            await server.settle()
        spans = exporter.get_finished_spans()
    assert len(spans) == names
    assert all(f"{span.context.trace_id:032x}" != TRACE for span in spans)


async def test_who_left_has_a_trace_and_who_was_refused_has_none() -> None:
    with collecting() as (tracing, exporter):
        async with open_server(tracing=tracing, step_seconds=0.01) as server:
            assert (await server.client.post(CHAT, json=chat_body("x" * 600))).status_code == 400
            with trio.move_on_after(0.1):
                await server.client.post(CHAT, json=chat_body(max_tokens=400))
            await server.settle()
        spans = by_name(exporter.get_finished_spans())
    root = spans["llm_request"]
    assert root.attributes["relevo.abort_cause"] == "client"
    assert root.attributes["gen_ai.response.finish_reasons"] == ("abort",)


class Collector(BaseHTTPRequestHandler):
    """Takes what an exporter sends."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.path, self.headers["x-team"], body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing."""


async def test_the_standard_variables_say_where_traces_go(monkeypatch: pytest.MonkeyPatch) -> None:
    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        collector.received = []  # type: ignore[attr-defined]
        Thread(target=collector.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=blue")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "our-llm")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=attic")
        async with open_tracing(wanted=True) as tracing:
            assert tracing is not None
            tracing.add(Ending("r", "a", "", "interactive", "stop", None, 1.0, 2.0, 3), "fake", None)
        ((path, team, body),) = collector.received  # type: ignore[attr-defined]
        collector.shutdown()
    assert (path, team) == ("/v1/traces", "blue")
    for word in (b"our-llm", b"attic", b"llm_request", b"queue"):
        assert word in body


async def test_without_the_extra_it_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'relevo\[otel\]'"):
        make_tracing()
    async with open_tracing(wanted=False) as tracing:
        assert tracing is None
