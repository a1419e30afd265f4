"""The live settings: changed as a whole or not at all, written down, reverted in time."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import trio
import trio.testing

from app.errors import ApiError
from app.journal.journal import Journal, open_journal
from app.journal.store import StoreError
from app.live_change import OutOfRangeError
from app.live_config import LiveConfig
from engine.handle import GenerationRequest, TextPrompt
from engine.sequence import SamplingParams
from tests.app.serving import CHAT, COMPLETIONS, chat_body, events, open_server
from tests.fakes import open_fake_engine
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from app.audit import AuditLog

CAPACITY = {"max_num_seqs": 16, "max_num_batched_tokens": 256}
AT_START = {
    "policy": "continuous",
    "admission": "on_demand",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "long_prefill_token_threshold": 0,
    "dynamic_preferred_size": 0,
    "dynamic_max_queue_delay_seconds": 0.1,
    "num_speculative_tokens": 0,
    "max_waiting": 256,
    "max_waiting_tokens": 262_144,
    "slo_admission": False,
    "enable_prefix_caching": True,
    "ttft_p95_seconds": 2.0,
    "itl_p95_seconds": 0.25,
    "e2e_p95_seconds": 0.0,
    "background_ttft_p95_seconds": 0.0,
    "background_itl_p95_seconds": 0.0,
    "background_e2e_p95_seconds": 0.0,
    "draining": False,
}


async def test_the_answer_and_the_history() -> None:
    async with open_server() as server:
        at_start = (await server.client.get("/admin/config")).json()
        assert at_start == {
            "generation": 0,
            "effective": AT_START,
            "start": AT_START,
            "capacity": CAPACITY,
            "choices": {
                "policy": ["continuous", "static", "dynamic"],
                "admission": ["on_demand", "reserve", "predicted"],
                "slo_admission": [True, False],
                "enable_prefix_caching": [True, False],
                "draining": [True, False],
            },
            "ranges": {
                "max_num_seqs": [1, 16],
                "max_num_batched_tokens": [1, 256],
                "long_prefill_token_threshold": [0, 256],
                "dynamic_preferred_size": [0, 16],
                "dynamic_max_queue_delay_seconds": [0, 3600.0],
                "num_speculative_tokens": [0, 16],
                "max_waiting": [1, 1 << 20],
                "max_waiting_tokens": [1, 1 << 30],
                "ttft_p95_seconds": [0, 3600.0],
                "itl_p95_seconds": [0, 3600.0],
                "e2e_p95_seconds": [0, 86_400.0],
                "background_ttft_p95_seconds": [0, 86_400.0],
                "background_itl_p95_seconds": [0, 86_400.0],
                "background_e2e_p95_seconds": [0, 86_400.0],
            },
            "pending_drain": {},
            "reverts": {},
            "unwritten_changes": 0,
            "history_problem": "no folder was opened for it",
        }
        assert (await server.client.get("/admin/audit")).json() == []
        body = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "reason": "more guests"}
        changed = await server.client.patch("/admin/config", json=body)
        assert changed.status_code == 200
        assert changed.json()["generation"] == 1
        assert changed.json()["effective"] == AT_START | {"max_num_seqs": 8, "max_num_batched_tokens": 128}
        assert (await server.client.get("/admin/config")).json() == changed.json()
        assert (await server.stats())["config"]["generation"] == 1
        entry = (await server.client.get("/admin/audit")).json()[-1]
        assert entry["changes"] == {"max_num_seqs": [4, 8], "max_num_batched_tokens": [64, 128]}
        assert entry["reason"] == "more guests"
        assert entry["who"] == "127.0.0.1"
        assert entry["generation"] == 1
        assert entry["time"].endswith("Z")
        assert entry["expires"] is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": 17}, "max_num_seqs"),
        ({"max_num_seqs": -1}, "max_num_seqs"),
        ({"max_num_seqs": True}, "max_num_seqs"),
        ({"max_num_seqs": "8"}, "max_num_seqs"),
        ({"max_num_seqs": 8.0}, "max_num_seqs"),
        ({"max_num_seqs": [8]}, "max_num_seqs"),
        ({"max_num_seqs": 10**30}, "max_num_seqs"),
        ({"max_num_batched_tokens": 257}, "max_num_batched_tokens"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"max_num_seqs": 8, "capacity_num_seqs": 99}, "capacity_num_seqs"),
        ({"max_num_seqs": 8, "max_num_seq": 9}, "max_num_seq"),
        ({"max_num_seqs": 8, "ttl_seconds": 0}, "ttl_seconds"),
        ({"max_num_seqs": 8, "ttl_seconds": 1e12}, "ttl_seconds"),
        ({"max_num_seqs": 8, "ttl_seconds": "long"}, "ttl_seconds"),
        ({"max_num_seqs": 8, "ttl_seconds": True}, "ttl_seconds"),
        ({"ttl_seconds": 60}, "ttl_seconds"),
        ({"max_num_seqs": None, "flush_prefix_cache": True, "ttl_seconds": 60}, "ttl_seconds"),
        ({"policy": "magic"}, "policy"),
        ({"policy": "static_dropped"}, "policy"),
        ({"policy": ["static"]}, "policy"),
        ({"max_num_seqs": 8, "admission": 1}, "admission"),
        ({"dynamic_preferred_size": 5}, "dynamic_preferred_size"),
        ({"dynamic_preferred_size": -1}, "dynamic_preferred_size"),
        ({"max_num_seqs": 2, "dynamic_preferred_size": 3}, "dynamic_preferred_size"),
        ({"dynamic_max_queue_delay_seconds": -0.1}, "dynamic_max_queue_delay_seconds"),
        ({"dynamic_max_queue_delay_seconds": "soon"}, "dynamic_max_queue_delay_seconds"),
        ({"dynamic_max_queue_delay_seconds": True}, "dynamic_max_queue_delay_seconds"),
        ({"num_speculative_tokens": 17}, "num_speculative_tokens"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"num_speculative_tokens": "none"}, "num_speculative_tokens"),
        ({"ttft_p95_seconds": 3601}, "ttft_p95_seconds"),
        ({"background_itl_p95_seconds": -0.1}, "background_itl_p95_seconds"),
        ({"max_num_seqs": "auto"}, "max_num_seqs"),
        ({"dynamic_preferred_size": "none"}, "dynamic_preferred_size"),
        ({"long_prefill_token_threshold": "auto"}, "long_prefill_token_threshold"),
        ({"long_prefill_token_threshold": 257}, "long_prefill_token_threshold"),
        ({"max_waiting": 0}, "max_waiting"),
        ({"max_waiting": (1 << 20) + 1}, "max_waiting"),
        ({"max_waiting_tokens": 0}, "max_waiting_tokens"),
        ({"max_waiting_tokens": 1.5}, "max_waiting_tokens"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching"),
        ({"enable_prefix_caching": "off"}, "enable_prefix_caching"),
        ({"draining": "yes"}, "draining"),
        ({"flush_prefix_cache": 1}, "flush_prefix_cache"),
        ({"restore": "yesterday"}, "restore"),
        ({"restore": ["start"]}, "restore"),
        ({"restore": "start", "max_num_seqs": 8}, "restore"),
        ({"max_num_seqs": 8, "if_generation": "0"}, "if_generation"),
        ({"max_num_seqs": 8, "if_generation": -1}, "if_generation"),
        ({"max_num_seqs": 8, "if_generation": True}, "if_generation"),
        ({"max_num_seqs": 8, "dry_run": 1}, "dry_run"),
        ({"max_num_seqs": 17, "dry_run": True}, "max_num_seqs"),
        ({"max_num_seqs": 8, "reason": 5}, "reason"),
        ({"max_num_seqs": 8, "reason": "x" * 501}, "reason"),
    ],
)
async def test_nonsense_is_422_and_changes_nothing(body: dict[str, Any], param: str) -> None:
    async with open_server() as server:
        response = await server.client.patch("/admin/config", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (422, param)
        if param in CAPACITY:
            assert error["range"] == [1, CAPACITY[param]]
            assert str(CAPACITY[param]) in error["message"]
        now = (await server.client.get("/admin/config")).json()
        assert (now["generation"], now["effective"]["max_num_seqs"]) == (0, 4)
        assert (await server.client.get("/admin/audit")).json() == []


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_num_seq", "did you mean max_num_seqs?"),
        ("ttl_second", "did you mean ttl_seconds?"),
        ("zzz", "there are policy, admission, "),
        ("x" * 100_000, "there are policy, admission, "),
    ],
)
async def test_a_setting_that_is_none_is_told_what_may_have_been_meant(name: str, hint: str) -> None:
    async with open_server() as server:
        response = await server.client.patch("/admin/config", json={name: 9})
        assert f"is no live setting; {hint}" in response.json()["error"]["message"]


async def test_a_refusal_names_the_word_for_0() -> None:
    async with open_server() as server:
        response = await server.client.patch("/admin/config", json={"long_prefill_token_threshold": 257})
        message = response.json()["error"]["message"]
        assert message == (
            "'long_prefill_token_threshold' must be a whole number from 0 to 256, or \"none\", which is 0."
        )


async def test_what_is_no_json_object_is_400() -> None:
    async with open_server() as server:
        for content in (b"", b"[]", b"{"):
            headers = {"content-type": "application/json"}
            assert (await server.client.patch("/admin/config", content=content, headers=headers)).status_code == 400


async def test_lowering_the_seats_under_16_streams_cuts_nobody() -> None:
    async with open_server(limits={"max_num_seqs": 16}, step_seconds=0.004, num_blocks=2000) as server:
        finished: list[int] = []
        above: list[int] = []
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_SECONDS) as client,
            trio.open_nursery() as nursery,
        ):

            async def stream(index: int) -> None:
                body = chat_body(f"guest {index}", max_tokens=30 + 2 * index, stream=True)
                text = (await client.post(CHAT, json=body)).text
                *_, last, done = events(text)
                assert done == "[DONE]"
                assert last["choices"][0]["finish_reason"] == "length"
                finished.append(index)

            for index in range(16):
                nursery.start_soon(stream, index)
            while server.engine.snapshot()["requests"]["running"] < 16:
                await trio.sleep(0.001)
            lowered = (await server.client.patch("/admin/config", json={"max_num_seqs": 4})).json()
            assert lowered["effective"]["max_num_seqs"] == 4
            assert lowered["pending_drain"]["max_num_seqs"] > 0
            for index in range(16, 20):
                nursery.start_soon(stream, index)
            while (running := server.engine.snapshot()["requests"]["running"]) > 4:
                above.append(running)
                await trio.sleep(0.001)
            assert above == sorted(above, reverse=True)  # whoever leaves is not replaced
            assert len(finished) < 16
            while len(finished) < 16:
                assert server.engine.snapshot()["requests"]["running"] <= 4
                await trio.sleep(0.001)
            raised = (await server.client.patch("/admin/config", json={"max_num_seqs": 16})).json()
            assert raised["pending_drain"] == {}
        assert sorted(finished) == list(range(20))
        await server.settle()


async def test_a_batch_shrinks_with_its_seats_so_that_every_state_can_be_gone_back_to() -> None:
    async with open_live() as (live, audit):
        await live.apply({"max_num_seqs": 8, "dynamic_preferred_size": 8}, who="me")
        await live.apply({"max_num_seqs": 4}, who="me")
        assert audit.entries[-1].changes == {"max_num_seqs": (8, 4), "dynamic_preferred_size": (8, 4)}
        lowered = live.view()["effective"]
        await live.apply({"max_num_seqs": 6}, who="me")
        await live.apply(lowered, who="me")
        assert live.view()["effective"] == lowered


async def test_a_batch_that_comes_back_fits_the_seats_there_are_then(autojump_clock: trio.testing.MockClock) -> None:
    async with open_live() as (live, _):
        await live.apply({"max_num_seqs": 8, "dynamic_preferred_size": 8}, who="me")
        await live.apply({"dynamic_preferred_size": 2, "ttl_seconds": 60}, who="me")
        await live.apply({"max_num_seqs": 4}, who="me")
        await trio.sleep(61)
        effective = live.view()["effective"]
        assert (effective["max_num_seqs"], effective["dynamic_preferred_size"]) == (4, 4)


async def test_a_policy_is_switched_after_those_who_run() -> None:
    async with open_server(limits={"max_num_seqs": 1}, step_seconds=0.02) as server, trio.open_nursery() as nursery:

        async def complete(prompt: str, max_tokens: int) -> None:
            answer = await server.client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": max_tokens})
            assert answer.json()["usage"]["completion_tokens"] == max_tokens

        nursery.start_soon(complete, "first", 30)
        while not server.engine.num_running:
            await trio.sleep(0.001)
        nursery.start_soon(complete, "second", 2)
        answer = await server.client.patch("/admin/config", json={"policy": "static", "admission": "reserve"})
        assert answer.json()["effective"] == AT_START | {"max_num_seqs": 1, "policy": "static", "admission": "reserve"}
        assert answer.json()["pending_drain"] == {"policy": 1}
        while not server.engine.num_waiting:
            await trio.sleep(0.001)
        assert (await server.stats())["requests"]["waiting_by_reason"] == {"switching": 1}
        await server.settle()
        assert (await server.client.get("/admin/config")).json()["pending_drain"] == {}
        assert (await server.stats())["config"]["policy"] == "static"


async def test_the_hand_over_is_told_over_http() -> None:
    """Two seats, requests of 2, 4 and 2 steps: the third sits down on the first one's seat in step 3."""
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 64}
    async with open_server(limits=limits, step_seconds=0.25) as server:
        async with trio.open_nursery() as nursery:
            for index, max_tokens in enumerate((2, 4, 2)):
                body = {"prompt": "abc"[index], "max_tokens": max_tokens}
                nursery.start_soon(lambda body=body: server.client.post(COMPLETIONS, json=body))
                while server.engine.num_open <= index:
                    await trio.sleep(0.001)
        stats = await server.stats()
    steps = stats["table"]["steps"]
    assert stats["table"]["seats"] == 2
    first, second, third = dict.fromkeys(row[1] for step in steps for row in step["rows"])
    # The first step may have begun with one of them; from where both sit on, everything is known.
    begin = next(index for index, step in enumerate(steps) if len(step["rows"]) == 2)
    seated = [{row[1]: row[0] for row in step["rows"]} for step in steps]
    assert all(len(seats) == len(set(seats.values())) <= 2 for seats in seated)
    assert [sum(name in seats for seats in seated) for name in (first, second, third)] == [2, 4, 2]
    seat = seated[begin][first]
    last = max(index for index, seats in enumerate(seated) if first in seats)
    assert seated[last + 1][third] == seat
    assert third not in seated[last]
    assert second in seated[last + 1]
    assert stats["requests"]["finished_by_reason"]["length"] == 3


async def test_raising_to_the_capacity_fills_every_seat_and_one_more_is_422() -> None:
    async with open_server(limits={"max_num_seqs": 2}, step_seconds=0.01, num_blocks=2000) as server:
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_SECONDS) as client,
            trio.open_nursery() as nursery,
        ):
            for _ in range(20):
                nursery.start_soon(lambda: client.post(CHAT, json=chat_body(max_tokens=400)))
            with trio.fail_after(PATIENCE_SECONDS):
                while (requests := (await server.stats())["requests"])["waiting"] < 18:
                    assert requests["running"] <= 2
                    await trio.sleep(0.001)
            capacity = (await server.client.get("/admin/config")).json()["capacity"]["max_num_seqs"]
            refused = await server.client.patch("/admin/config", json={"max_num_seqs": capacity + 1})
            assert (refused.status_code, refused.json()["error"]["range"]) == (422, [1, capacity])
            raised = await server.client.patch("/admin/config", json={"max_num_seqs": capacity})
            assert raised.json()["effective"]["max_num_seqs"] == capacity == 16
            with trio.fail_after(PATIENCE_SECONDS):
                while (running := (await server.stats())["requests"]["running"]) < capacity:
                    await trio.sleep(0.001)
            assert running == capacity
            server.engine.abort_all("admin")
        await server.settle()


@asynccontextmanager
async def open_live() -> AsyncIterator[tuple[LiveConfig, AuditLog]]:
    journal = Journal()
    async with open_fake_engine() as engine, trio.open_nursery() as nursery:
        live = LiveConfig(engine, journal)
        nursery.start_soon(live.run)
        yield live, journal.audit
        nursery.cancel_scope.cancel()


def seats(live: LiveConfig) -> int:
    return int(live.view()["effective"]["max_num_seqs"])


async def test_a_change_for_a_while_goes_back_by_itself(autojump_clock: trio.testing.MockClock) -> None:
    async with open_live() as (live, audit):
        await live.apply({"max_num_seqs": 8, "ttl_seconds": 600, "reason": "peak"}, who="me")
        assert audit.entries[-1].expires is not None
        await trio.sleep(599)
        assert seats(live) == 8
        await trio.sleep(2)
        assert seats(live) == 4
        assert audit.entries[-1].who == "ttl"
        assert audit.entries[-1].changes == {"max_num_seqs": (8, 4)}
        assert live.view()["generation"] == 2


async def test_a_lasting_change_ends_the_waiting_revert(autojump_clock: trio.testing.MockClock) -> None:
    async with open_live() as (live, audit):
        await live.apply({"max_num_seqs": 8, "max_num_batched_tokens": 128, "ttl_seconds": 100}, who="me")
        await live.apply({"max_num_seqs": 6}, who="me")
        await trio.sleep(200)
        assert live.view()["effective"] == AT_START | {"max_num_seqs": 6}
        assert len(audit.entries) == 3


async def test_what_will_go_back_is_told_until_it_has_or_was_called_off(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_live() as (live, audit):
        await live.apply({"max_num_seqs": 8, "ttl_seconds": 600}, who="me")
        await live.apply({"max_num_batched_tokens": 32}, who="me")  # another key, for good
        assert live.view()["reverts"] == {"max_num_seqs": {"to": 4, "at": audit.entries[0].expires}}
        await live.apply({"max_num_seqs": 8, "ttl_seconds": 1200}, who="me")  # for longer
        assert live.view()["reverts"]["max_num_seqs"]["at"] > str(audit.entries[0].expires)
        assert (audit.entries[-1].changes, audit.entries[-1].generation) == ({}, 2)
        await trio.sleep(700)
        assert seats(live) == 8
        await live.apply({"max_num_seqs": 8, "reason": "stay"}, who="me")  # for good
        assert live.view()["reverts"] == {}
        assert (audit.entries[-1].expires, audit.entries[-1].reason) == (None, "stay")
        await trio.sleep(9000)
        assert seats(live) == 8
        assert len(audit.entries) == 4
        await live.apply({"max_num_seqs": 2, "ttl_seconds": 60}, who="me")
        await trio.sleep(61)
        assert (live.view()["reverts"], seats(live)) == ({}, 8)


async def test_a_change_that_comes_late_is_told_late_and_written_down(autojump_clock: trio.testing.MockClock) -> None:
    """A step hangs for a minute: nothing is shown before it holds, and what comes after all has its entry."""
    journal = Journal()
    audit = journal.audit
    async with open_fake_engine(step_seconds=60) as engine, trio.open_nursery() as nursery:
        live = LiveConfig(engine, journal)
        nursery.start_soon(live.run)
        engine.submit(GenerationRequest("hung", TextPrompt("hello"), SamplingParams(max_tokens=2)))
        await trio.sleep(1)
        with pytest.raises(ApiError, match="does not answer"):
            await live.apply({"max_num_seqs": 8, "ttl_seconds": 100, "reason": "peak"}, who="me")
        view = live.view()
        assert (view["effective"]["max_num_seqs"], view["generation"], view["reverts"]) == (4, 0, {})
        assert audit.entries == ()
        await trio.sleep(60)
        assert (seats(live), live.view()["generation"]) == (8, 1)
        assert [(entry.who, entry.changes, entry.reason) for entry in audit.entries] == [
            ("me", {"max_num_seqs": (4, 8)}, "peak")
        ]
        await trio.sleep(200)
        assert seats(live) == 4
        nursery.cancel_scope.cancel()


async def test_a_client_that_leaves_does_not_part_a_change_from_its_entry(
    autojump_clock: trio.testing.MockClock,
) -> None:
    journal = Journal()
    audit = journal.audit
    async with open_fake_engine(step_seconds=5) as engine, trio.open_nursery() as nursery:
        live = LiveConfig(engine, journal)
        nursery.start_soon(live.run)
        engine.submit(GenerationRequest("slow", TextPrompt("hello"), SamplingParams(max_tokens=2)))
        await trio.sleep(1)
        with trio.move_on_after(1):
            await live.apply({"max_num_seqs": 8}, who="me")
        await trio.sleep(5)
        assert seats(live) == 8
        assert len(audit.entries) == 1
        nursery.cancel_scope.cancel()


async def test_a_change_that_the_disk_does_not_take_holds_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StoreError("database or disk is full")

    def told(view: dict[str, Any]) -> tuple[int, int, str | None]:
        return view["effective"]["max_num_seqs"], view["unwritten_changes"], view["history_problem"]

    async with open_journal(tmp_path) as journal, open_fake_engine() as engine, trio.open_nursery() as nursery:
        live = LiveConfig(engine, journal)
        nursery.start_soon(live.run)
        nursery.start_soon(journal.run)
        assert told(await live.apply({"max_num_seqs": 8}, who="me")) == (8, 0, None)
        with monkeypatch.context() as patch:
            patch.setattr("app.journal.store.Store.write", fail)
            assert told(await live.apply({"max_num_seqs": 6}, who="me")) == (6, 1, "database or disk is full")
            assert told(await live.apply({"max_num_seqs": 5}, who="me")) == (5, 2, "database or disk is full")
        assert await journal.flush()
        assert told(live.view()) == (5, 0, None)
        nursery.cancel_scope.cancel()


async def test_a_second_temporary_change_goes_back_to_what_lasts(autojump_clock: trio.testing.MockClock) -> None:
    async with open_live() as (live, _):
        await live.apply({"max_num_seqs": 8, "ttl_seconds": 100}, who="me")
        await live.apply({"max_num_seqs": 2, "ttl_seconds": 300}, who="me")
        await trio.sleep(200)
        assert seats(live) == 2
        await trio.sleep(200)
        assert seats(live) == 4


async def test_null_is_absent_and_no_change_is_no_entry() -> None:
    async with open_live() as (live, audit):
        view = await live.apply({"max_num_seqs": None, "reason": None, "ttl_seconds": None}, who="me")
        assert view["generation"] == 0
        await live.apply({"max_num_seqs": 4}, who="me")
        assert audit.entries == ()
        with pytest.raises(OutOfRangeError):
            await live.apply({"block_size": 8}, who="me")


async def test_changes_at_the_same_moment_follow_each_other() -> None:
    async with open_live() as (live, audit):
        async with trio.open_nursery() as nursery:
            for value in (5, 6, 7):

                async def change(value: int = value) -> None:
                    await live.apply({"max_num_seqs": value}, who="me")

                nursery.start_soon(change)
        steps = [entry.changes["max_num_seqs"] for entry in audit.entries]
        assert [new for _, new in steps[:-1]] == [old for old, _ in steps[1:]]
        assert steps[0][0] == 4
