"""Several choices and several prompts in one request: their order, their ends, their usage, and how they fail."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from app.api.planning import plan_completion
from app.callers import NOBODY
from tests.app.serving import CHAT, COMPLETIONS, Driver, chat_body, events, open_app, open_server
from tests.app.strict import ask_both, text_of
from tests.fakes import FakeRunner, expected_output, open_fake_engine
from tests.patience import PATIENCE_SECONDS


def answer_to(prompt: bytes, num_tokens: int) -> str:
    return bytes(expected_output(prompt, num_tokens)).decode()


async def test_choices_come_by_prompt_and_each_has_an_end_of_its_own() -> None:
    async with open_server() as server:
        body = {"prompt": ["hi", "hello", [120]], "n": 2, "max_tokens": 5}
        refused = await server.client.post(COMPLETIONS, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt[2]")
        body["prompt"] = ["hi", "hello", "x"]
        whole, streamed = await ask_both(server, COMPLETIONS, body)
        wanted = [answer_to(prompt, 5) for prompt in (b"hi", b"hello", b"x") for _ in range(2)]
        assert [text_of(choice) for choice in whole["choices"]] == wanted
        assert [choice["index"] for choice in whole["choices"]] == list(range(6))
        assert {choice.reason for choice in streamed.choices.values()} == {"length"}
        # A prompt counts once, however many choices it has.
        assert whole["usage"]["prompt_tokens"] == 2 + 5 + 1
        assert whole["usage"]["completion_tokens"] == 6 * 5
        await server.settle()


async def test_prompts_as_lists_of_ids() -> None:
    async with open_server() as server:
        body = {"prompt": [[104, 105], [120]], "max_tokens": 3}
        whole, _ = await ask_both(server, COMPLETIONS, body)
        assert [text_of(choice) for choice in whole["choices"]] == [answer_to(b"hi", 3), answer_to(b"x", 3)]


async def test_choices_of_a_chat() -> None:
    async with open_server() as server:
        whole, streamed = await ask_both(server, CHAT, chat_body("hi", n=3, max_tokens=4))
        assert len(whole["choices"]) == len(streamed.choices) == 3
        assert whole["usage"]["prompt_tokens"] == 4
        assert whole["usage"]["completion_tokens"] == 12


async def test_the_prompt_is_computed_once() -> None:
    async with open_server() as server:
        prompt = "a prompt of several blocks, read once"
        body = {"prompt": prompt, "n": 4, "max_tokens": 2}
        answer = (await server.client.post(COMPLETIONS, json=body)).json()
        assert (await server.stats())["step"]["tokens"] < 2 * len(prompt)
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_chunks_of_choices_alternate() -> None:
    """A stream does not tell one choice to its end and then the next."""
    async with open_server() as server:
        response = await server.client.post(
            COMPLETIONS, json={"prompt": ["hi", "ho"], "max_tokens": 30, "stream": True}
        )
        indices = [chunk["choices"][0]["index"] for chunk in events(response.text)[:-1]]
        assert indices.count(0) > 3
        assert indices.index(1) < len(indices) - 1 - indices[::-1].index(0)


async def test_each_choice_has_noise_of_its_own_and_a_prompt_the_same_as_alone() -> None:
    async with open_fake_engine() as engine:
        planned = plan_completion(engine, {"prompt": ["a", "b"], "n": 2, "seed": 7}, NOBODY)
        drawn = [(request.params.seed, request.params.choice_index) for request in planned.requests]
        assert drawn == [(7, 0), (7, 1), (7, 0), (7, 1)]
        alone = plan_completion(engine, {"prompt": "b", "n": 2, "seed": 7}, NOBODY)
        assert [request.params for request in alone.requests] == [request.params for request in planned.requests[2:]]
        fresh = plan_completion(engine, {"prompt": ["a", "a"]}, NOBODY)
        assert fresh.requests[0].params.seed != fresh.requests[1].params.seed
        assert len({request.request_id for request in planned.requests}) == 4


@pytest.mark.parametrize("prompt", ["hi 漢字", [*"hi 漢字".encode()]])
async def test_echo_puts_the_prompt_first(prompt: object) -> None:
    async with open_server() as server:
        body = {"prompt": prompt, "max_tokens": 4, "echo": True, "n": 2}
        whole, _ = await ask_both(server, COMPLETIONS, body)
        wanted = "hi 漢字" + answer_to("hi 漢字".encode(), 4)
        assert [text_of(choice) for choice in whole["choices"]] == [wanted] * 2
        assert whole["usage"]["completion_tokens"] == 8


async def test_a_stop_string_in_an_echo_ends_nothing() -> None:
    async with open_server() as server:
        body = {"prompt": "one. two.", "max_tokens": 4, "echo": True, "stop": ["."]}
        whole, _ = await ask_both(server, COMPLETIONS, body)
        assert text_of(whole["choices"][0]) == "one. two." + answer_to(b"one. two.", 4)


async def test_an_echo_of_more_ids_than_fit_is_refused() -> None:
    async with open_server() as server:
        body = {"prompt": [[104] * 300] * 2, "echo": True, "max_tokens": 1}
        response = await server.client.post(COMPLETIONS, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "echo")


async def test_more_choices_than_may_wait_are_refused_for_good() -> None:
    """A 503 would make clients try again for ever."""
    async with open_server(limits={"max_waiting": 4}) as server:
        for body, param in (({"prompt": "x", "n": 5}, "n"), ({"prompt": ["x"] * 5}, "prompt")):
            response = await server.client.post(COMPLETIONS, json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert (await server.client.post(COMPLETIONS, json={"prompt": "x", "n": 4})).status_code == 200


async def test_prompts_that_together_are_more_than_may_wait_are_refused_for_good() -> None:
    limits = {"max_num_seqs": 1, "max_waiting_tokens": 50}
    async with open_server(limits=limits) as server:
        for body, param in (({"prompt": ["x" * 20] * 5}, "prompt"), ({"prompt": "x" * 20, "n": 5}, "n")):
            response = await server.client.post(COMPLETIONS, json=body | {"max_tokens": 200})
            assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
            await server.settle()
        # Where others wait, it may fit later.
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(
                    lambda: server.client.post(COMPLETIONS, json={"prompt": "x" * 20, "max_tokens": 400})
                )
            while server.engine.num_open < 3:
                await trio.sleep(0.001)
            response = await server.client.post(COMPLETIONS, json={"prompt": ["x" * 15] * 2})
            assert response.status_code == 503
            server.engine.abort_all("admin")


async def test_where_not_all_choices_find_room_none_stays() -> None:
    limits = {"max_num_seqs": 1, "max_waiting": 4}
    async with open_server(limits=limits, step_seconds=0.01) as server, trio.open_nursery() as nursery:
        long = chat_body(max_tokens=400)
        nursery.start_soon(lambda: server.client.post(CHAT, json=long))
        while server.engine.snapshot()["requests"]["running"] == 0:
            await trio.sleep(0.001)
        nursery.start_soon(lambda: server.client.post(CHAT, json=long))
        while server.engine.num_open < 2:
            await trio.sleep(0.001)
        response = await server.client.post(COMPLETIONS, json={"prompt": "x", "n": 4})
        assert response.status_code == 503
        with trio.fail_after(PATIENCE_SECONDS):
            while server.engine.num_open > 2:
                await trio.sleep(0.001)
        server.engine.abort_all("admin")


async def test_a_client_that_leaves_ends_all_choices() -> None:
    async with open_app(step_seconds=0.01) as (app, context), trio.open_nursery() as nursery:
        driver = Driver(app, CHAT, chat_body(n=4, max_tokens=400, stream=True))
        nursery.start_soon(driver.run)
        assert await driver.status() == 200
        for _ in range(10):
            await driver.body()
        assert context.engine.num_open == 4
        driver.leave()
        with trio.fail_after(PATIENCE_SECONDS):
            await context.engine.wait_idle()
        nursery.cancel_scope.cancel()


async def test_one_choice_that_fails_fails_the_answer() -> None:
    def before_step(batch: Any) -> None:
        if batch.step >= 3 and 2 in batch.sequence_ids:
            raise RuntimeError("no more")

    for stream in (False, True):
        async with open_server(runner=FakeRunner(256, 4, before_step=before_step)) as server:
            response = await server.client.post(CHAT, json=chat_body(n=2, max_tokens=30, stream=stream))
            if stream:
                assert "[DONE]" not in response.text
                last = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))
                assert last["error"]["code"] == "engine_error"
            else:
                assert response.status_code == 500
            await server.settle()


async def test_what_is_given_up_with_a_failed_answer_is_not_the_clients_doing() -> None:
    """It neither left nor waited too long: one prompt was refused, or one choice failed, and the other with it."""
    async with open_server(max_model_len=64, step_seconds=0.01) as server:
        response = await server.client.post(COMPLETIONS, json={"prompt": ["a", "x" * 200], "max_tokens": 50})
        assert response.json()["error"]["code"] == "context_length_exceeded"
        await server.settle()
        requests = (await server.stats())["requests"]
        assert set(requests["aborted_by_cause_and_phase"]) == {"error"}


async def test_a_deadline_holds_for_all_choices() -> None:
    async with open_server(step_seconds=0.01) as server:
        response = await server.client.post(CHAT, json=chat_body(n=3, max_tokens=400, timeout=0.1))
        assert response.status_code == 408
        await server.settle()
