"""Traces of requests by OpenTelemetry, an extra: `pip install 'relevo[otel]'` and `[server] tracing = true`.

A request is one trace of spans `queue`, `prefill`, `decode` and, for each time that it lost its seat, `preempted`,
made from what is known when it has ended. Where it goes, how much of it and under what name say OpenTelemetry's own
variables (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_TRACES_SAMPLER`, `OTEL_SERVICE_NAME`, …). Nothing of prompts and answers
is in it.
"""

from __future__ import annotations

import logging
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import trio

from app.version import package_version
from engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.util.types import AttributeValue

    from app.endings import Ending

log = logging.getLogger("relevo.tracing")

CLOSE_SECONDS: Final = 5.0


class Tracing:
    """Makes the spans; `provider` batches and exports them on threads of its own."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import propagate, trace

        self.provider = provider
        self._tracer = provider.get_tracer("relevo", package_version())
        self._extract = propagate.extract
        self._inside = trace.set_span_in_context
        self._server = trace.SpanKind.SERVER
        self._failed = trace.Status(trace.StatusCode.ERROR)

    def parent_of(self, headers: Iterable[tuple[str, str]]) -> Context:
        """The trace that a request says it belongs to (`traceparent`), or none."""
        return self._extract({name.lower(): value for name, value in headers})

    def add(self, ending: Ending, model: str, parent: Context | None) -> None:
        """A request has ended."""
        offset = time.time() - trio.current_time()  # trio's clock begins anywhere

        def at(seconds: float) -> int:
            return int((seconds + offset) * 1e9)

        root = self._tracer.start_span(
            "llm_request", parent, self._server, _attributes(ending, model), start_time=at(ending.arrival)
        )
        if root.is_recording():
            if ending.reason == "error":
                root.set_status(self._failed)
            inside = self._inside(root)
            for name, begin, end in _phases(ending):
                self._tracer.start_span(name, inside, start_time=at(begin)).end(at(end))
        root.end(at(ending.ended))


def _phases(ending: Ending) -> Iterator[tuple[str, float, float]]:
    """Name, begin and end of each part of a request's life that it came to."""
    seated, first, ended = ending.seated, ending.first_token, ending.ended
    yield "queue", ending.arrival, ended if seated is None else seated
    if seated is not None:
        yield "prefill", seated, ended if first is None else first
    if first is not None:
        yield "decode", first, ended
    for begin, end in ending.preempted:
        yield "preempted", begin, end


def _attributes(ending: Ending, model: str) -> dict[str, AttributeValue]:
    """By OpenTelemetry's conventions for generative AI, and what they have no word for."""
    told: dict[str, Any] = {
        "gen_ai.request.model": model,
        "gen_ai.response.id": ending.answer_id,
        "gen_ai.response.finish_reasons": (ending.reason,),
        "gen_ai.usage.input_tokens": ending.num_prompt_tokens,
        "gen_ai.usage.output_tokens": ending.num_output_tokens,
        "relevo.cached_tokens": ending.num_cached_tokens,
        "relevo.preemptions": ending.num_preemptions,
        "relevo.class": ending.class_name,
        "relevo.key": ending.key_name or None,
        "relevo.request_id": ending.request_id or None,
        "relevo.abort_cause": ending.cause,
    }
    return {name: value for name, value in told.items() if value is not None}


def make_tracing() -> Tracing:
    """Spans go where OpenTelemetry's variables say, in batches.

    Raises:
        ConfigError: the extra is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        message = f"[server] tracing needs OpenTelemetry ({error}): pip install 'relevo[otel]', or set it to false."
        raise ConfigError(message) from None
    own = Resource({"service.name": "relevo", "service.version": package_version()})
    resource = Resource.create().merge(own).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider)


@asynccontextmanager
async def open_tracing(*, wanted: bool) -> AsyncIterator[Tracing | None]:
    """Tracing where it is wanted; the last spans are exported at the end, by a collector that answers.

    Raises:
        ConfigError: the extra is not installed.
    """
    if not wanted:
        yield None
        return
    tracing = make_tracing()
    try:
        yield tracing
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(CLOSE_SECONDS) as scope:
            await trio.to_thread.run_sync(tracing.provider.shutdown, abandon_on_cancel=True)
        if scope.cancelled_caught:
            log.warning("the last traces could not be exported: the collector does not answer")
