"""Whose request it is, and which class of work: from key and body to what the engine is asked."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import trio

from app.api.anthropic import plan_messages
from app.api.deadlines import deadlines_of
from app.api.planning import CHAT_URL, COMPLETION_URL, plan_chat, plan_completion
from app.api.responses import plan_response
from app.callers import NOBODY, Caller, Callers
from app.config import load_settings
from app.offline import PLANS
from engine.errors import ConfigError, InvalidRequestError
from tests.app.serving import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    ROUTES,
    body_for,
    chat_body,
    events,
    make_settings,
    open_server,
)
from tests.fakes import open_fake_engine

if TYPE_CHECKING:
    from app.api.planning import Planner

PLANNERS: dict[str, Planner] = {
    CHAT: plan_chat,
    COMPLETIONS: plan_completion,
    RESPONSES: plan_response,
    MESSAGES: plan_messages,
}
KEYS = ["alice=k1", "batch=k2"]


def callers(**flags: Any) -> Callers:
    return Callers(load_settings(flags={f"security.{name}": value for name, value in flags.items()}))


def test_a_key_is_known_by_its_name_and_may_be_background_as_a_whole() -> None:
    known = callers(api_keys=KEYS, background_keys="batch")
    assert (known.of("alice").key_name, known.of("alice").background) == ("alice", False)
    assert (known.of("batch").key_name, known.of("batch").background) == ("batch", True)
    assert known.of("alice").key_identity != known.of("batch").key_identity


def test_without_keys_everybody_is_the_same() -> None:
    assert callers().of("127.0.0.1").key_name == callers().of("::1").key_name == NOBODY.key_name == ""


@pytest.mark.parametrize("keys", [KEYS, []])
def test_a_background_key_that_does_not_exist_is_refused_by_name(keys: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"security\.background_keys names the API key 'bob'.*security\.api_keys"):
        callers(api_keys=keys, background_keys=["bob"])


@pytest.mark.parametrize("value", [["batch", "alice"], "batch, alice", ["batch,alice"]])
def test_names_come_as_a_list_or_between_commas(value: object) -> None:
    settings = load_settings(flags={"security.api_keys": KEYS, "security.background_keys": value})
    assert settings.security.background_keys == ("batch", "alice")


def test_background_keys_may_stand_in_the_environment() -> None:
    environ = {"RELEVO_SECURITY_API_KEYS": "a=1,b=2", "RELEVO_SECURITY_BACKGROUND_KEYS": "a,b"}
    assert load_settings(environ=environ).security.background_keys == ("a", "b")


@pytest.mark.parametrize("value", [5, [5]])
def test_a_list_of_something_else_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"\[security\] background_keys .*takes a list of names"):
        load_settings(flags={"security.background_keys": value})


@pytest.mark.parametrize(
    ("caller", "fields", "background", "tier"),
    [
        (NOBODY, {}, False, None),
        (NOBODY, {"service_tier": None, "priority": None}, False, None),
        (NOBODY, {"service_tier": "auto"}, False, "default"),
        (NOBODY, {"service_tier": "default"}, False, "default"),
        (NOBODY, {"service_tier": "flex"}, True, "flex"),
        (Caller(key_name="batch", background=True, key_identity="7 batch"), {}, True, None),
        (Caller(key_name="batch", background=True), {"service_tier": "default"}, True, "flex"),
    ],
)
@pytest.mark.parametrize("url", [CHAT_URL, COMPLETION_URL])
async def test_the_engine_is_told_whose_it_is_and_which_class(
    caller: Caller, fields: dict[str, Any], background: bool, tier: str | None, url: str
) -> None:
    async with open_fake_engine() as engine:
        body = chat_body(priority=-3) if url == CHAT_URL else {"prompt": "hello", "priority": -3}
        planned = PLANS[url](engine, body | fields, caller)
        handle = engine.submit(planned.requests[0])
        await handle.accepted()
    asked = planned.requests[0]
    assert (asked.key_name, asked.background) == (caller.key_name, background)
    assert handle.sequence is not None
    assert handle.sequence.key_identity == (caller.key_identity or caller.key_name)
    assert asked.priority == (0 if "priority" in fields else -3)
    assert planned.envelope.service_tier == tier


SERVED = {"timeout": 5, "queue_timeout": 2.5, "priority": -3, "service_tier": "flex", "cache_salt": "mine"}
NOT_SERVED = {"timeout": 0, "queue_timeout": "soon", "priority": 0.5, "service_tier": "priority", "cache_salt": ""}


@pytest.mark.parametrize("path", ROUTES)
async def test_a_request_says_on_every_route_how_it_is_to_be_served(path: str) -> None:
    body = body_for(path, max_tokens=3)
    async with open_fake_engine() as engine:
        plan = PLANNERS[path](engine, body | SERVED, NOBODY)
        at_rest = PLANNERS[path](engine, body | dict.fromkeys(SERVED), NOBODY)
        for name, value in NOT_SERVED.items():
            with pytest.raises(InvalidRequestError) as caught:
                PLANNERS[path](engine, body | {name: value}, NOBODY)
            assert caught.value.param == name
    (request,) = plan.requests
    assert (request.priority, request.background) == (-3, True)
    assert request.cache_root == NOBODY.cache_root("mine")
    deadlines = deadlines_of(plan.body, make_settings().server, 0.0)
    assert (deadlines.end, deadlines.seat) == (5, 2.5)
    (request,) = at_rest.requests
    assert (request.priority, request.background) == (0, False)
    assert request.cache_root == NOBODY.cache_root(None)
    assert deadlines_of(at_rest.body, make_settings().server, 0.0).seat == math.inf


# What a chat can ask for and the other conversations have no word for, each with something that it asks.
ASKED_OF_A_CHAT: dict[str, Any] = {
    "seed": 1, "min_p": 0.1, "logit_bias": {"5": 1}, "n": 2, "stop_token_ids": [5], "min_tokens": 1, "ignore_eos": True,
    "frequency_penalty": 1.0, "presence_penalty": 1.0, "repetition_penalty": 1.1, "guided_regex": "a", "logprobs": True,
    "guided_json": {}, "guided_choice": ["a"], "structured_outputs": {"regex": "a"}, "bad_words": ["a"], "store": True,
    "skip_special_tokens": False, "chat_template": "x", "chat_template_kwargs": {"thinking": True}, "best_of": 2,
}  # fmt: skip
AT_REST = {"seed": None, "min_p": 0, "logit_bias": {}, "n": 1, "ignore_eos": False, "stop_token_ids": [], "user": "me"}


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_no_conversation_drops_what_it_cannot_do(path: str) -> None:
    body = body_for(path, max_tokens=3)
    async with open_fake_engine() as engine:
        for name, value in ASKED_OF_A_CHAT.items():
            with pytest.raises(InvalidRequestError, match="is not supported here") as caught:
                PLANNERS[path](engine, body | {name: value}, NOBODY)
            assert caught.value.param == name
        PLANNERS[path](engine, body | AT_REST | {"nobody_knows_this": 1}, NOBODY)


@pytest.mark.parametrize(
    ("path", "name", "own"),
    [
        (RESPONSES, "max_tokens", "max_output_tokens"),
        (RESPONSES, "messages", "input"),
        (RESPONSES, "response_format", "text"),
        (MESSAGES, "stop", "stop_sequences"),
    ],
)
async def test_what_is_called_otherwise_elsewhere_is_told(path: str, name: str, own: str) -> None:
    async with open_fake_engine() as engine:
        with pytest.raises(InvalidRequestError, match=f"On this route it is '{own}'") as caught:
            PLANNERS[path](engine, body_for(path, max_tokens=3) | {name: "x"}, NOBODY)
    assert caught.value.param == name


@pytest.mark.parametrize("tier", ["auto", "standard_only"])
async def test_anthropics_own_tiers_are_ordinary_work(tier: str) -> None:
    body = body_for(MESSAGES, max_tokens=3, service_tier=tier)
    async with open_fake_engine() as engine:
        assert not plan_messages(engine, body, NOBODY).requests[0].background
        assert plan_messages(engine, body, Caller(background=True)).requests[0].background


async def test_the_tier_is_told_to_whoever_asked_for_one() -> None:
    async with open_server(make_settings(security={"api_keys": KEYS, "background_keys": ["batch"]})) as server:

        async def post(key: str, path: str = CHAT, **fields: Any) -> Any:
            headers = {"Authorization": f"Bearer {key}"}
            return await server.client.post(path, json=body_for(path, max_tokens=2, **fields), headers=headers)

        for path in (CHAT, COMPLETIONS, RESPONSES):
            assert "service_tier" not in (await post("k1", path)).json()
            assert (await post("k1", path, service_tier="flex")).json()["service_tier"] == "flex"
            assert (await post("k1", path, service_tier="auto")).json()["service_tier"] == "default"
            assert (await post("k2", path, service_tier="auto")).json()["service_tier"] == "flex"
        streamed = events((await post("k1", service_tier="flex", stream=True)).text)
        assert {chunk["service_tier"] for chunk in streamed if chunk != "[DONE]"} == {"flex"}
        refused = (await post("k1", service_tier="priority")).json()["error"]
        assert refused["param"] == "service_tier"
        assert refused["message"] == "'service_tier' must be 'auto', 'default' or 'flex'."


async def test_a_key_its_class_and_its_latencies_are_seen_by_the_operator() -> None:
    settings = make_settings(security={"api_keys": KEYS, "background_keys": ["batch"]})
    async with open_server(settings, step_seconds=0.01) as server, trio.open_nursery() as nursery:

        async def post(key: str, max_tokens: int) -> None:
            body = chat_body(max_tokens=max_tokens, priority=5)
            await server.client.post(CHAT, json=body, headers={"Authorization": f"Bearer {key}"})

        nursery.start_soon(post, "k1", 400)
        await post("k2", 2)
        stats = await server.stats()
        assert stats["requests"]["by_class"] == {
            "interactive": {"running": 1, "waiting": 0},
            "background": {"running": 0, "waiting": 0},
        }
        by_key = stats["requests"]["by_key"]["alice"]
        assert (by_key["running"], by_key["waiting"]) == (1, 0)
        active = stats["active"][0]
        assert (active["key"], active["class"], active["priority"]) == ("alice", "interactive", 5)
        assert stats["background"]["latency"]["e2e"]["count"] == 1
        assert stats["latency"]["e2e"]["count"] == 0
        assert stats["background"]["slo"]["targets"]["ttft_p95_seconds"] is None
        metrics = (await server.client.get("/metrics")).text
        assert 'relevo:request_success_total{finished_reason="length",model_name="fake"} 1.0' in metrics
        nursery.cancel_scope.cancel()
