"""`GET /metrics`: the engine's numbers for Prometheus, read at the moment of the scrape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from quart import Blueprint, Response

from app.probes import not_ready
from engine.timeline import DEFAULT_WINDOW

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client import Metric

    from app.http import Context
    from engine.report import MetricsView

_HELP: Final = {
    "num_requests_running": "Requests that have a seat.",
    "num_requests_waiting": "Requests that wait for a seat.",
    "num_requests_waiting_by_reason": "Requests that wait, by what they wait for.",
    "kv_cache_usage_perc": "Share of the KV blocks in use, 0 to 1.",
    "max_num_seqs": "Seats: the live limit of running requests.",
    "max_num_batched_tokens": "The live limit of tokens in a step.",
    "num_preemptions": "Times that a request lost its seat, for want of KV blocks or to one with a better right to it.",
    "num_preemptions_by_reason": "The same, by why it was lost.",
    "failed_steps": "Steps that failed; what they computed was computed again, and few requests ended by it, or none.",
    "integrity_violations": "Times that the engine's state contradicted itself and was made anew.",
    "recomputed_tokens": "Tokens computed again after a preemption.",
    "padding_tokens": "Tokens that fixed batches computed for nothing.",
    "prompt_tokens": "Prompt tokens read for the first time, computed or from the prefix cache.",
    "generation_tokens": "Tokens generated.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "spec_decode_num_drafts": "Times that tokens were drafted for a request and checked.",
    "spec_decode_num_draft_tokens": "Tokens that were drafted and checked.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that were right: each saved its request a step.",
    "request_success": "Accepted requests that ended, by reason.",
    "admission_rejections": "Requests refused at the door, by reason.",
    "request_aborts": "Requests given up, by cause and by how far they had come.",
    "time_to_first_token_seconds": "From arrival to the first token.",
    "inter_token_latency_seconds": "Every gap between two tokens of a request; 0 between those that one step gave it.",
    "request_time_per_output_token_seconds": "Mean gap between a request's tokens.",
    "e2e_request_latency_seconds": "From arrival to the end.",
    "request_queue_time_seconds": "From arrival to the first seat.",
    "request_prefill_time_seconds": "From the first seat to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Tokens generated for a request.",
    "request_num_preemptions": "How often a request lost its seat.",
    "iteration_tokens_total": "Tokens computed in a step.",
}
# Present from the first scrape: a series that begins with its first error has not grown, for Prometheus.
_NO_ERRORS: Final = {(500, "internal_error"): 0, (500, "engine_error"): 0}


class EngineCollector(Collector):
    """Turns `Engine.metrics()` into Prometheus families, under each of the prefixes."""

    def __init__(self, read: Callable[[], MetricsView], model_name: str, prefixes: tuple[str, ...]) -> None:
        self._read = read
        self._model_name = model_name
        self._prefixes = prefixes

    def collect(self) -> Iterator[Metric]:
        """All families; every one exists from the first scrape."""
        view = self._read()
        for prefix in self._prefixes:
            yield from self._numbers(prefix, view)
            yield from self._labelled(prefix, view)
            yield from self._histograms(prefix, view)
            labels = {"model_name": self._model_name, **view.cache_config}
            info = GaugeMetricFamily(f"{prefix}cache_config_info", "How the KV cache is laid out.", labels=[*labels])
            info.add_metric([*labels.values()], 1)
            yield info

    def _numbers(self, prefix: str, view: MetricsView) -> Iterable[Metric]:
        for name, value in view.gauges.items():
            gauge = GaugeMetricFamily(prefix + name, _HELP[name], labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        for name, value in view.counters.items():
            counter = CounterMetricFamily(prefix + name, _HELP[name], labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter

    def _labelled(self, prefix: str, view: MetricsView) -> Iterable[Metric]:
        for name, (labels, values) in view.labelled_gauges.items():
            gauge = GaugeMetricFamily(prefix + name, _HELP[name], labels=["model_name", *labels])
            for label_values, value in values.items():
                gauge.add_metric([self._model_name, *label_values], value)
            yield gauge
        for name, (labels, values) in view.labelled_counters.items():
            counter = CounterMetricFamily(prefix + name, _HELP[name], labels=["model_name", *labels])
            for label_values, value in values.items():
                counter.add_metric([self._model_name, *label_values], value)
            yield counter

    def _histograms(self, prefix: str, view: MetricsView) -> Iterable[Metric]:
        for name, histogram in view.histograms.items():
            family = HistogramMetricFamily(prefix + name, _HELP[name], labels=["model_name"])
            family.add_metric([self._model_name], buckets=histogram.cumulative(), sum_value=histogram.sum)
            yield family


def metrics_blueprint(context: Context) -> Blueprint:
    """The route, with a registry of its own."""
    prefixes = ("relevo:", "vllm:") if context.settings.server.vllm_metric_names else ("relevo:",)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(context.engine.metrics, context.engine.model.name, prefixes))
    ProcessCollector(registry=registry)
    registry.register(_ServerCollector(context))
    metrics = Blueprint("metrics", __name__)

    @metrics.get("/metrics")
    async def show() -> Response:
        return Response(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)

    return metrics


class _ServerCollector(Collector):
    """What the server knows beside the engine: is it ready, were its promises kept, what was refused over HTTP."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lag = context.lifecycle.lag
        self._errors = context.errors
        self._journal = context.journal
        self._services = context.services
        self._room = context.room
        self._unread = context.unread

    def collect(self) -> Iterator[Metric]:
        """All families."""
        text = "1 where new requests are taken, 0 where /readyz says why not."
        yield GaugeMetricFamily("relevo:ready", text, value=float(not_ready(self._context) is None))
        yield from self._promises()
        text = "How much too late a short sleep ended, the worst of the last seconds."
        yield GaugeMetricFamily("relevo:loop_lag_seconds", text, value=self._lag.seconds)
        text = "Answers that are errors, by status and code; errors within a stream are not among them."
        counter = CounterMetricFamily("relevo:http_errors", text, labels=["status", "code"])
        for (status, code), count in {**_NO_ERRORS, **self._errors}.items():
            counter.add_metric([str(status), code], count)
        yield counter
        text = "Times that something which runs beside the server failed and was begun again."
        faults = CounterMetricFamily("relevo:service_failures", text, labels=["service"])
        for name, count in self._services.num_faults.items():
            faults.add_metric([name], count)
        yield faults
        text = "Connections that are open."
        yield GaugeMetricFamily("relevo:open_connections", text, value=self._room.num_open)
        text = "Connections closed for want of files: idle ones for others, and those that found no place."
        closed = CounterMetricFamily("relevo:connections_closed", text, labels=["why"])
        for why, number in self._room.num_closed.items():
            closed.add_metric([why], number)
        yield closed
        text = "Bytes of answers that wait for their clients to read them."
        yield GaugeMetricFamily("relevo:unread_bytes", text, value=self._unread.num_bytes)
        text = "Answers whose clients did not read them while too many bytes waited, and that were given up."
        yield CounterMetricFamily("relevo:unread_answers_given_up", text, value=self._unread.num_given_up)
        text = "Times that the history could not be written or was found damaged."
        yield CounterMetricFamily("relevo:history_write_failures", text, value=self._journal.num_failures)
        text = "Seconds of the history that were lost because they could not be written for too long."
        yield CounterMetricFamily("relevo:history_dropped_rows", text, value=self._journal.num_dropped_rows)

    def _promises(self) -> Iterator[Metric]:
        """Of the last five minutes, exact: histograms know a p95 to a bucket only, and of all work at once."""
        labels = ["work_class", "latency"]
        text = "What 95 % of the latencies were promised to be within."
        targets = GaugeMetricFamily("relevo:slo_target_seconds", text, labels=labels)
        text = "Share of the requests that ended in the last five minutes and kept the target, 0 to 1."
        attainment = GaugeMetricFamily("relevo:slo_attainment", text, labels=labels)
        text = "95 % of the latencies of the last five minutes were within it."
        percentiles = GaugeMetricFamily("relevo:latency_p95_seconds", text, labels=labels)
        met = self._context.engine.experience(DEFAULT_WINDOW)
        for work_class, work in (("interactive", met), ("background", met["background"])):
            for latency, summary in work["latency"].items():
                _add_known(percentiles, work_class, latency, summary["p95"])
            for name, target in work["slo"]["targets"].items():
                latency = name.removesuffix("_p95_seconds")
                _add_known(targets, work_class, latency, target)
                _add_known(attainment, work_class, latency, work["slo"]["attainment"][name])
        yield from (targets, attainment, percentiles)


def _add_known(family: GaugeMetricFamily, work_class: str, latency: str, value: float | None) -> None:
    """What is not known has no sample."""
    if value is not None:
        family.add_metric([work_class, latency], value)
