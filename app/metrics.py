"""`GET /metrics`: the engine's numbers for Prometheus, read at the moment of the scrape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from quart import Blueprint, Response

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
    "recomputed_tokens": "Tokens computed again after a preemption.",
    "padding_tokens": "Tokens that fixed batches computed for nothing.",
    "prompt_tokens": "Prompt tokens computed.",
    "generation_tokens": "Tokens generated.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "spec_decode_num_drafts": "Times that tokens of a request were guessed and checked.",
    "spec_decode_num_draft_tokens": "Tokens that were guessed and checked.",
    "spec_decode_num_accepted_tokens": "Guessed tokens that were right: each saved its request a step.",
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
            gauge = GaugeMetricFamily(prefix + name, _help(name), labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        for name, value in view.counters.items():
            counter = CounterMetricFamily(prefix + name, _help(name), labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter

    def _labelled(self, prefix: str, view: MetricsView) -> Iterable[Metric]:
        for name, (labels, values) in view.labelled_gauges.items():
            gauge = GaugeMetricFamily(prefix + name, _help(name), labels=["model_name", *labels])
            for label_values, value in values.items():
                gauge.add_metric([self._model_name, *label_values], value)
            yield gauge
        for name, (labels, values) in view.labelled_counters.items():
            counter = CounterMetricFamily(prefix + name, _help(name), labels=["model_name", *labels])
            for label_values, value in values.items():
                counter.add_metric([self._model_name, *label_values], value)
            yield counter

    def _histograms(self, prefix: str, view: MetricsView) -> Iterable[Metric]:
        for name, histogram in view.histograms.items():
            family = HistogramMetricFamily(prefix + name, _help(name), labels=["model_name"])
            family.add_metric([self._model_name], buckets=histogram.cumulative(), sum_value=histogram.sum)
            yield family


def _help(name: str) -> str:
    return _HELP.get(name, name.replace("_", " "))


def metrics_blueprint(context: Context) -> Blueprint:
    """The route, with a registry of its own."""
    prefixes = ("relevo:", "vllm:") if context.settings.server.vllm_metric_names else ("relevo:",)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(context.engine.metrics, context.engine.model.name, prefixes))
    ProcessCollector(registry=registry)
    registry.register(_HttpCollector(context))
    metrics = Blueprint("metrics", __name__)

    @metrics.get("/metrics")
    async def show() -> Response:
        return Response(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)

    return metrics


class _HttpCollector(Collector):
    """How late the event loop is, and what was refused over HTTP, also before it came to the engine."""

    def __init__(self, context: Context) -> None:
        self._lag = context.lifecycle.lag
        self._errors = context.errors
        self._journal = context.journal

    def collect(self) -> Iterator[Metric]:
        text = "How much too late a short sleep ended, the worst of the last seconds."
        yield GaugeMetricFamily("relevo:loop_lag_seconds", text, value=self._lag.seconds)
        text = "Answers that are errors, by status and code; errors within a stream are not among them."
        counter = CounterMetricFamily("relevo:http_errors", text, labels=["status", "code"])
        for (status, code), count in self._errors.items():
            counter.add_metric([str(status), code], count)
        yield counter
        text = "Times that the history could not be written or was found damaged."
        yield CounterMetricFamily("relevo:history_write_failures", text, value=self._journal.num_failures)
        text = "Seconds of the history that were lost because they could not be written for too long."
        yield CounterMetricFamily("relevo:history_dropped_rows", text, value=self._journal.num_dropped_rows)
