"""Who reads whose cached prompts."""

from __future__ import annotations

from functools import partial

import pytest
import trio

from app.config import load_settings
from app.sharing import Sharing
from engine.errors import ConfigError
from tests.app.serving import CHAT, Server, chat_body, events, make_settings, open_server

KEYS = ["alice=k1", "bob=k2", "carol=k3"]


def sharing(mode: str, keys: list[str] = KEYS) -> Sharing:
    return Sharing(load_settings(flags={"security.api_keys": keys, "cache.cache_sharing": mode}))


def test_without_keys_everybody_shares() -> None:
    rules = sharing("auto", [])
    assert rules.root("127.0.0.1", None) == rules.root("::1", None)


def test_with_keys_nobody_shares_unless_told() -> None:
    rules = sharing("auto")
    assert len({rules.root(name, None) for name in ("alice", "bob", "carol")}) == 3
    rules = sharing("all")
    assert len({rules.root(name, None) for name in ("alice", "bob", "carol")}) == 1


def test_named_groups_share_and_others_stay_alone() -> None:
    rules = sharing("alice + bob")
    assert rules.root("alice", None) == rules.root("bob", None) != rules.root("carol", None)


def test_a_salt_parts_and_never_joins() -> None:
    rules = sharing("key")
    assert rules.root("alice", "x") != rules.root("alice", None)
    assert rules.root("alice", "x") != rules.root("bob", "x")


@pytest.mark.parametrize("mode", ["alice+dave", "alice+bob, bob+carol", "everybody"])
def test_wrong_groups_are_refused_by_name(mode: str) -> None:
    with pytest.raises(ConfigError, match=r"cache\.cache_sharing names the API key"):
        sharing(mode)


async def cached_tokens(server: Server, key: str, **fields: object) -> int:
    body = chat_body("a question of some length", max_tokens=2, **fields)
    answer = await server.client.post(CHAT, json=body, headers={"Authorization": f"Bearer {key}"})
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


async def test_a_hit_is_told_in_usage_and_never_to_another_key() -> None:
    settings = make_settings(security={"api_keys": ["alice=k1", "bob=k2"]})
    async with open_server(settings) as server:
        assert await cached_tokens(server, "k1") == 0
        assert await cached_tokens(server, "k1") == 24
        assert await cached_tokens(server, "k2") == 0
        assert await cached_tokens(server, "k1", cache_salt="mine") == 0
        assert await cached_tokens(server, "k1", cache_salt="mine") == 24
        stats = await server.stats()
        assert stats["prefix_cache"]["hit_tokens"] == 48
        assert stats["prefix_cache"]["query_tokens"] == 5 * 27
        assert stats["kv"]["cached"] > 0
        metrics = (await server.client.get("/metrics")).text
        assert 'relevo:prefix_cache_hits_total{model_name="fake"} 48.0' in metrics


async def test_a_stream_tells_it_too_and_the_answer_is_the_same() -> None:
    async with open_server() as server:
        body = chat_body("hello, what is the time", max_tokens=9, stream=True, stream_options={"include_usage": True})
        runs = [events((await server.client.post(CHAT, json=body)).text) for _ in range(2)]
        texts = [
            "".join(event["choices"][0]["delta"].get("content", "") for event in run[:-1] if event["choices"])
            for run in runs
        ]
        assert len(texts[0]) == 9
        assert texts[0] == texts[1]
        assert [run[-2]["usage"]["prompt_tokens_details"]["cached_tokens"] for run in runs] == [0, 24]


async def test_blocks_that_several_hold_are_told_apart() -> None:
    async with open_server(step_seconds=0.01) as server:
        text = "the same long beginning of a question"
        await server.client.post(CHAT, json=chat_body(text, max_tokens=1))
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(partial(server.client.post, CHAT, json=chat_body(text, max_tokens=60)))
            while len((kv := server.engine.snapshot()["kv"])["owners"]) < 2:
                await trio.sleep(0.001)
            assert kv["shared"] == len(text) // 4
            assert sum(kv["owners"].values()) + kv["shared"] == kv["used"]
