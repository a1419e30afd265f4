"""The dashboard, its JSON and the metrics say the same of one moment. Time stands still while they are read."""

from __future__ import annotations

import html
import re
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families
from trio.testing import wait_all_tasks_blocked

from app.render import numbers, words
from engine.config import SloTargets
from tests.app.serving import CHAT, chat_body, open_server
from tests.fakes import FakeRunner, Poison

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

    from tests.app.serving import Server

STEP_SECONDS = 0.05
NUM_BLOCKS, BLOCK_SIZE = 40, 4


def ends(prompt: list[int]) -> int | None:
    """Short questions get short answers; the others write as long as they may."""
    return 6 if len(prompt) < 10 else None


@pytest.fixture
async def server(mock_clock: MockClock) -> AsyncIterator[Server]:
    """Full, with a queue and a seat lost for memory, after requests of both classes that ended in every way."""
    targets = {"slo": SloTargets(0.5, 0.06, 2.0), "slo_background": SloTargets(None, None, 9.0)}
    limits = {"max_num_seqs": 3, "max_waiting": 2, **targets}
    runner = FakeRunner(NUM_BLOCKS, BLOCK_SIZE, end_after=ends, before_step=Poison())

    mock_clock.rate = 20.0
    async with (
        open_server(limits=limits, runner=runner, num_blocks=NUM_BLOCKS, step_seconds=STEP_SECONDS) as served,
        trio.open_nursery() as nursery,
    ):
        statuses: list[int] = []

        async def ask(text: str, **fields: Any) -> None:
            statuses.append((await served.client.post(CHAT, json=chat_body(text, **fields))).status_code)

        served.client.timeout = httpx.Timeout(None)
        for text, fields in (
            ("hi", {}), ("hello", {"service_tier": "flex"}), ("what is this?", {"max_tokens": 9}), ("poison", {}),
            ("one that has no time", {"timeout": 0.3}), ("x" * 900, {}), ("hi", {}), ("hi", {"service_tier": "flex"}),
        ):  # fmt: skip
            await ask(text, **fields)
        assert sorted(statuses) == [200, 200, 200, 200, 200, 400, 408, 500]
        for number in range(7):
            nursery.start_soon(partial(ask, f"a long story, number {number}", max_tokens=100))
        while not served.engine.snapshot()["preemptions"]:
            await trio.sleep(STEP_SECONDS)
        mock_clock.rate = 0.0
        await wait_all_tasks_blocked(0.05)
        served.context.telemetry.tick(trio.current_time())
        yield served
        nursery.cancel_scope.cancel()
        mock_clock.rate = 1000.0  # the step that stands still comes to its end


def shown(page: str, pattern: str) -> list[tuple[str, ...]]:
    """What stands at places of the page, as text."""
    return [tuple(html.unescape(re.sub("<[^>]*>", "", cell)) for cell in row) for row in re.findall(pattern, page)]


def as_dict(pairs: list[tuple[str, ...]]) -> dict[str, str]:
    return {name: value for name, value in pairs}


async def test_the_page_shows_what_the_json_says(server: Server, mock_clock: MockClock) -> None:
    stats = await server.stats()
    page = (await server.client.get("/ops", headers={"Accept": "text/html"})).text
    requests, kv, config = stats["requests"], stats["kv"], stats["config"]
    assert (requests["waiting"], stats["preemptions"]) >= (2, 1)
    assert {"timed_out", "failed"} <= {name for name, amount in stats["ended"].items() if amount}

    pairs = as_dict(shown(page, r"<dt>(.*?)</dt><dd>(.*?)</dd>"))
    tokens, made = stats["step"]["tokens"], stats["prefix_cache"]
    counts = {
        "steps": stats["step"]["count"],
        **{words.FINISHED[name]: amount for name, amount in requests["finished_by_reason"].items()},
        **{words.REJECTED[name]: amount for name, amount in requests["rejected_by_reason"].items() if amount},
        **{words.PREEMPTED[name]: amount for name, amount in stats["preemptions_by_reason"].items()},
        "tokens of padding": stats["padding"]["tokens"],
        "evictions": made["evictions"],
    }
    assert {words.REJECTED["queue_full"], words.REJECTED["context_length_exceeded"]} <= counts.keys()
    shares = {
        "seats taken": requests["running"] / config["max_num_seqs"],
        "useful rows": stats["useful_row_share"],
        "computed again": stats["recomputed_tokens"] / tokens,
        "cache hit rate": made["hit_tokens"] / made["query_tokens"],
    }
    expected = {name: numbers.count(amount) for name, amount in counts.items()}
    expected |= {name: str(numbers.percent(share)) for name, share in shares.items()}
    expected |= {"step p50": str(numbers.seconds(stats["step"]["seconds_p50"]))}
    assert {name: pairs[name] for name in expected} == expected
    legend = as_dict(shown(page, r'<li><i class="swatch (used|cached|free)"></i>.*?<b>(.*?)</b>'))
    assert legend == {name: numbers.count(kv[name]) for name in ("used", "cached", "free")}

    tiles = {label: rest for label, *rest in shown(page, TILE)}
    rates, slo, ended = stats["tokens_per_second"], stats["slo"], stats["ended"]
    both = [ended, stats["background"]["ended"]]
    assert tiles["Output"][0] == str(numbers.rate(rates["output"]))
    assert str(numbers.rate(rates["prompt"])) in tiles["Output"][2]
    assert tiles["Waiting"][0] == numbers.count(requests["waiting"])
    assert tiles["Running"][:2] == [numbers.count(requests["running"]), f"of {config['max_num_seqs']} seats"]
    assert tiles["KV memory"][0] == numbers.percent(kv["usage"]).text
    assert tiles["Requests"][0] == str(numbers.rate(sum(each["requests_per_second"] for each in both)))
    refused = stats["recent"]["refused"]
    assert tiles["Requests"][2] == f"{refused} refused · {sum(each['failed'] for each in both)} failed"
    share = numbers.percent(ended["good"] / (ended["finished"] + ended["failed"]))
    assert tiles["Within targets"][0] == share.text
    assert f"goodput {numbers.rate(slo['goodput_requests_per_second'])}/s" in tiles["Within targets"][2]
    for label, name in (("First token p95", "ttft"), ("Between tokens p95", "itl")):
        figure = numbers.seconds(stats["latency"][name]["p95"])
        assert tiles[label][:2] == [figure.text, figure.unit]

    rows = shown(page, ROW)
    for work in (stats, stats["background"]):
        for name, title in words.LATENCIES.items():
            met = work["latency"][name]
            told = [str(numbers.seconds(met[p] if met["count"] else None)) for p in ("p50", "p95", "p99")]
            target = work["slo"]["targets"].get(f"{name}_p95_seconds")
            within = work["slo"]["attainment"].get(f"{name}_p95_seconds")
            promised = [
                str(numbers.seconds(target)) if target else "",
                "" if within is None else str(numbers.percent(within)),
            ]
            assert (title, *told, *promised, numbers.count(met["count"])) in rows


TILE = (
    r'(?s)<div class="tile[^>]*>\s*<h2>(.*?)</h2>\s*<p class="figure"><b>(.*?)</b>(?: <span>(.*?)</span>)?</p>'
    r'.*?<p class="note">(.*?)</p>'
)
ROW = (
    r'<tr><th scope="row"[^>]*>(.*?)</th>\s*<td[^>]*>(.*?)</td><td[^>]*>(.*?)</td><td[^>]*>(.*?)</td>\s*'
    r"<td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>"
)


async def test_the_metrics_count_what_the_json_says(server: Server, mock_clock: MockClock) -> None:
    stats, text = await server.stats(), (await server.client.get("/metrics")).text
    told: defaultdict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(value for name, value in sorted(sample.labels.items()) if name not in ("model_name", "le"))
            told[sample.name][labels] = sample.value
    requests, config, cache = stats["requests"], stats["config"], stats["prefix_cache"]
    drafts, background = stats["speculation"], stats["background"]
    single = {
        "num_requests_running": requests["running"],
        "num_requests_waiting": requests["waiting"],
        "max_num_seqs": config["max_num_seqs"],
        "max_num_batched_tokens": config["max_num_batched_tokens"],
        "num_preemptions_total": stats["preemptions"],
        "failed_steps_total": stats["faults"]["failed_steps"],
        "integrity_violations_total": stats["faults"]["integrity_violations"],
        "recomputed_tokens_total": stats["recomputed_tokens"],
        "padding_tokens_total": stats["padding"]["tokens"],
        "prompt_tokens_total": stats["tokens"]["prompt"],
        "generation_tokens_total": stats["tokens"]["output"],
        "prefix_cache_queries_total": cache["query_tokens"],
        "prefix_cache_hits_total": cache["hit_tokens"],
        "spec_decode_num_drafts_total": drafts["drafts"],
        "spec_decode_num_draft_tokens_total": drafts["draft_tokens"],
        "spec_decode_num_accepted_tokens_total": drafts["accepted_tokens"],
        "iteration_tokens_total_count": stats["step"]["count"],
        "iteration_tokens_total_sum": stats["step"]["tokens"],
        "request_prompt_tokens_count": sum(requests["finished_by_reason"].values()),
        **{
            f"{metric}_count": stats["latency"][name]["count"] + background["latency"][name]["count"]
            for name, metric in HISTOGRAMS.items()
        },
    }
    by_label = {
        "num_requests_waiting_by_reason": requests["waiting_by_reason"],
        "num_preemptions_by_reason_total": stats["preemptions_by_reason"],
        "request_success_total": requests["finished_by_reason"],
        "admission_rejections_total": requests["rejected_by_reason"],
    }
    aborted = requests["aborted_by_cause_and_phase"]
    assert aborted
    for prefix in ("relevo:", "vllm:"):
        assert {name: told[prefix + name] for name in single} == {name: {(): value} for name, value in single.items()}
        assert told[f"{prefix}kv_cache_usage_perc"][()] == pytest.approx(stats["kv"]["usage"], abs=1e-4)
        for name, amounts in by_label.items():
            assert {labels[0]: amount for labels, amount in told[prefix + name].items() if amount} == {
                label: amount for label, amount in amounts.items() if amount
            }, name
        assert {labels: amount for labels, amount in told[f"{prefix}request_aborts_total"].items() if amount} == {
            (cause, phase): amount for cause, phases in aborted.items() for phase, amount in phases.items()
        }
    for name, work in (("interactive", stats), ("background", background)):
        for latency, met in work["latency"].items():
            assert told["relevo:latency_p95_seconds"].get((latency, name)) == met["p95"]
        for key, target in work["slo"]["targets"].items():
            labels = (key.removesuffix("_p95_seconds"), name)
            assert told["relevo:slo_target_seconds"].get(labels) == target
            assert told["relevo:slo_attainment"].get(labels) == work["slo"]["attainment"][key]
    assert len(told["relevo:slo_target_seconds"]) == 4


HISTOGRAMS = {
    "ttft": "time_to_first_token_seconds", "itl": "inter_token_latency_seconds", "e2e": "e2e_request_latency_seconds",
    "tpot": "request_time_per_output_token_seconds", "queue": "request_queue_time_seconds",
}  # fmt: skip
