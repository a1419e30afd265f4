"""`/metrics` and the probes."""

from __future__ import annotations

from typing import Any

import trio
import trio.testing
from prometheus_client.parser import text_string_to_metric_families

from engine.config import SloTargets
from engine.handle import GenerationRequest, TextPrompt
from engine.sequence import SamplingParams
from tests.app.serving import CHAT, Driver, Server, chat_body, make_settings, open_app, open_server

NAMES = {
    "gauge": {"num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc",
              "cache_config_info"},
    "counter": {"num_preemptions", "prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits",
                "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
                "request_success", "admission_rejections", "request_aborts"},
    "histogram": {"time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
                  "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
                  "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens",
                  "request_num_preemptions", "iteration_tokens_total"},
}  # fmt: skip
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def scrape(server: Server) -> tuple[dict[str, str], Samples]:
    """Family names to their types, and all samples."""
    response = await server.client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    families = list(text_string_to_metric_families(response.text))
    samples = {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}
    return {family.name: family.type for family in families}, samples


def labels(**more: str) -> frozenset[tuple[str, str]]:
    return frozenset({"model_name": "fake", **more}.items())


async def test_everything_exists_at_zero_from_the_first_scrape() -> None:
    async with open_server() as server:
        types, samples = await scrape(server)
        for prefix in ("relevo:", "vllm:"):
            for kind, names in NAMES.items():
                assert {types.get(prefix + name) for name in names} == {kind}, (prefix, kind)
            for reason in ("stop", "length", "abort", "error"):
                assert samples[f"{prefix}request_success_total", labels(finished_reason=reason)] == 0
            for cause in ("client", "timeout", "queue_timeout", "slow_client", "shutdown", "admin"):
                assert samples[f"{prefix}request_aborts_total", labels(cause=cause, phase="decode")] == 0
            info = labels(block_size="4", num_gpu_blocks="256")
            assert samples[f"{prefix}cache_config_info", info] == 1
            itl = [
                dict(found)["le"] for name, found in samples if name == f"{prefix}inter_token_latency_seconds_bucket"
            ]
            assert min(map(float, itl)) == 0.001
            assert sorted(map(float, itl))[-2] >= 7200
        assert all("model_name" in dict(found) for name, found in samples if name.startswith("vllm:"))


async def test_numbers_follow_the_requests() -> None:
    async with open_server() as server:
        for _ in range(2):
            await server.client.post(CHAT, json=chat_body("abc", max_tokens=4))
        await server.client.post(CHAT, json=chat_body("x" * 1000))
        _, samples = await scrape(server)
        assert samples["vllm:request_success_total", labels(finished_reason="length")] == 2
        assert samples["vllm:prompt_tokens_total", labels()] == 10
        assert samples["vllm:generation_tokens_total", labels()] == 8
        assert samples["vllm:time_to_first_token_seconds_count", labels()] == 2
        assert samples["vllm:inter_token_latency_seconds_count", labels()] == 6
        assert samples["vllm:request_generation_tokens_sum", labels()] == 8
        assert samples["vllm:admission_rejections_total", labels(reason="context_length_exceeded")] == 1
        assert samples["vllm:num_requests_running", labels()] == 0
        assert samples["relevo:generation_tokens_total", labels()] == 8


async def test_drafts_are_counted() -> None:
    async with open_server(limits={"num_speculative_tokens": 4}, answer=lambda _: list(b"abc" * 20)) as server:
        answer = (await server.client.post(CHAT, json=chat_body("say it again", max_tokens=40))).json()
        assert answer["choices"][0]["message"]["content"] == ("abc" * 20)[:40]
        assert answer["usage"]["completion_tokens"] == 40
        _, samples = await scrape(server)
        steps = samples["vllm:iteration_tokens_total_count", labels()]
        for prefix in ("relevo:", "vllm:"):
            names = ("drafts", "draft_tokens", "accepted_tokens")
            drafts, drafted, accepted = (samples[f"{prefix}spec_decode_num_{name}_total", labels()] for name in names)
            assert 0 < drafts < drafted
            assert 0 < accepted <= drafted
            assert accepted == 40 - steps
        stats = await server.stats()
        assert stats["speculation"] == {"drafts": drafts, "draft_tokens": drafted, "accepted_tokens": accepted}
        told = [draft for step in stats["table"]["steps"] for draft in step["drafts"]]
        assert (len(told), sum(n for _, n, _ in told), sum(n for *_, n in told)) == (drafts, drafted, accepted)
        # Off, and the next answer has none.
        assert (await server.client.patch("/admin/config", json={"num_speculative_tokens": 0})).status_code == 200
        await server.client.post(CHAT, json=chat_body("and again", max_tokens=40))
        assert (await server.stats())["speculation"]["draft_tokens"] == drafted


async def test_promises_and_what_was_kept_are_told() -> None:
    slo = SloTargets(ttft_p95_seconds=3.0, itl_p95_seconds=1e-6)
    async with open_server(limits={"slo": slo}) as server:
        _, samples = await scrape(server)
        assert samples["relevo:ready", frozenset()] == 1
        assert not [name for name, _ in samples if name in ("relevo:slo_attainment", "relevo:latency_p95_seconds")]
        await server.client.post(CHAT, json=chat_body("abc", max_tokens=4))
        _, samples = await scrape(server)
        ttft, itl = (frozenset({"work_class": "interactive", "latency": name}.items()) for name in ("ttft", "itl"))
        assert samples["relevo:slo_target_seconds", ttft] == 3.0
        assert samples["relevo:slo_target_seconds", itl] == 1e-6
        assert (samples["relevo:slo_attainment", ttft], samples["relevo:slo_attainment", itl]) == (1, 0)
        latency = (await server.stats())["latency"]
        assert samples["relevo:latency_p95_seconds", ttft] == latency["ttft"]["p95"] > 0
        assert samples["relevo:latency_p95_seconds", itl] == latency["itl"]["p95"] > 0
        assert len([name for name, _ in samples if name == "relevo:slo_target_seconds"]) == 2
        server.engine.drain()
        assert (await scrape(server))[1]["relevo:ready", frozenset()] == 0


async def test_the_foreign_names_can_be_left_out() -> None:
    async with open_server(make_settings(server={"vllm_metric_names": False})) as server:
        assert "vllm:" not in (await server.client.get("/metrics")).text
        assert "relevo:generation_tokens_total" in (await server.client.get("/metrics")).text


async def test_two_servers_in_one_process_keep_their_numbers_apart() -> None:
    async with open_server() as one, open_server(name="other") as two:
        await one.client.post(CHAT, json=chat_body(max_tokens=3))
        assert (await scrape(one))[1]["relevo:generation_tokens_total", labels()] == 3
        assert 'relevo:generation_tokens_total{model_name="other"} 0.0' in (await two.client.get("/metrics")).text


async def test_alive_is_not_ready() -> None:
    async with open_server() as server:
        get = server.client.get
        assert (await get("/healthz")).json() == {"status": "alive"}
        assert (await get("/readyz")).json() == {"ready": True}
        assert (await get("/health")).status_code == 200
        server.engine.drain()
        assert (await get("/healthz")).status_code == 200
        assert (await get("/health")).status_code == 503
        refused = await get("/readyz")
        assert refused.status_code == 503
        assert "draining" in refused.json()["reason"]


async def get(app: Any, path: str) -> tuple[int, bytes]:
    async with trio.open_nursery() as nursery:
        driver = Driver(app, path, {}, method="GET")
        nursery.start_soon(driver.run)
        return await driver.status(), await driver.body() + await driver.body()


async def test_a_hung_step_is_alive_but_not_ready(autojump_clock: trio.testing.MockClock) -> None:
    async with open_app(step_seconds=60) as (app, context):
        context.engine.submit(GenerationRequest("stuck", TextPrompt("hi"), SamplingParams(max_tokens=1)))
        assert (await get(app, "/readyz"))[0] == 200
        await trio.sleep(20)
        status, body = await get(app, "/readyz")
        assert status == 503
        assert b"stalled" in body
        assert (await get(app, "/healthz"))[0] == 200
        await trio.sleep(60)
        assert (await get(app, "/readyz"))[0] == 200


async def test_what_routers_ask() -> None:
    async with open_server() as server:
        assert set((await server.client.get("/version")).json()) == {"version"}
        assert (await server.client.get("/load")).json() == {"server_load": 0}
        assert (await server.client.get("/get_load")).json() == {"load": 0}


async def test_the_numbers_of_the_process_stand_beside_the_engines() -> None:
    async with open_server() as server:
        stats = await server.stats()
        assert stats["uptime_seconds"] >= 0
        assert stats["loop_lag_seconds"] >= 0
        assert stats["requests"]["running"] == 0


async def test_errors_over_http_are_counted_by_status_and_code() -> None:
    """A client that sends the same mistake for ever is seen, though its requests never come to the engine."""
    async with open_server(make_settings(security={"api_keys": ["me=secret"]})) as server:
        key = {"Authorization": "Bearer secret"}
        for fields, headers in (
            ({"temperature": 9}, key),
            ({"temperature": 9}, key),
            ({"model": "x"}, key),
            ({}, {}),
            ({"max_tokens": 1}, key),
        ):
            await server.client.post(CHAT, json=chat_body() | fields, headers=headers)
        await server.client.get(CHAT)
        text = (await server.client.get("/metrics", headers=key)).text
        families = {family.name: family for family in text_string_to_metric_families(text)}
        found = {(s.labels["status"], s.labels["code"]): s.value for s in families["relevo:http_errors"].samples}
        assert {key: value for key, value in found.items() if key[0] in ("400", "404", "405")} == {
            ("400", "invalid_request_error"): 2, ("404", "model_not_found"): 1, ("405", "method_not_allowed"): 1,
        }  # fmt: skip
        assert sum(value for (status, _), value in found.items() if status == "401") == 1
