"""The `openai` package, unchanged: it is what most users bring."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import openai
import pytest
import trio

from engine.handle import GenerationRequest, TextPrompt
from tests.app.serving import open_server
from tests.fakes import expected_output

if TYPE_CHECKING:
    from collections.abc import Callable

MESSAGES: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
ANSWER = bytes(expected_output([257, *b"be brief", 257, *b"hi", 258], 6)).decode()


async def in_thread(url: str, work: Callable[[openai.OpenAI], None]) -> None:
    def run() -> None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            work(client)

    await trio.to_thread.run_sync(run)


async def test_the_synchronous_client() -> None:
    def work(client: openai.OpenAI) -> None:
        assert [model.id for model in client.models.list()] == ["fake"]
        assert client.models.retrieve("fake").id == "fake"
        whole = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=6, temperature=0)
        assert whole.choices[0].message.content == ANSWER
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 6
        completion = client.completions.create(model="fake", prompt="hi", max_tokens=4, stop=["zz"])
        assert completion.choices[0].text == bytes(expected_output(b"hi", 4)).decode()

    async with open_server() as server:
        await in_thread(server.url, work)


async def test_streaming() -> None:
    def work(client: openai.OpenAI) -> None:
        stream = client.chat.completions.create(
            model="fake",
            messages=MESSAGES,
            max_completion_tokens=6,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.total_tokens == 19
        pieces = client.completions.create(model="fake", prompt="hi", max_tokens=4, stream=True)
        assert "".join(c.choices[0].text for c in pieces) == bytes(expected_output(b"hi", 4)).decode()

    async with open_server() as server:
        await in_thread(server.url, work)


async def test_the_streaming_helper() -> None:
    def work(client: openai.OpenAI) -> None:
        with client.chat.completions.stream(model="fake", messages=MESSAGES) as events:
            assert {"chunk", "content.delta", "content.done"} <= {event.type for event in events}
            final = events.get_final_completion()
        assert final.choices[0].message.content == ANSWER
        assert final.choices[0].finish_reason == "stop"

    async with open_server(end_after=lambda prompt: 6) as server:
        await in_thread(server.url, work)


async def test_the_asynchronous_client() -> None:
    async def ask(url: str) -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:

            async def one() -> str:
                stream = await client.chat.completions.create(
                    model="fake", messages=MESSAGES, max_tokens=6, stream=True
                )
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            assert await asyncio.gather(*(one() for _ in range(8))) == [ANSWER] * 8

    async with open_server() as server:
        await trio.to_thread.run_sync(lambda: asyncio.run(ask(server.url)))


async def test_errors_arrive_as_the_clients_own() -> None:
    def work(client: openai.OpenAI) -> None:
        create = client.chat.completions.create
        with pytest.raises(openai.BadRequestError) as too_long:
            create(model="fake", messages=[{"role": "user", "content": "x" * 2000}])
        assert too_long.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError):
            create(model="gpt-9", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError) as unsupported:
            create(model="fake", messages=MESSAGES, modalities=["audio"])
        assert unsupported.value.param == "modalities"
        with pytest.raises(openai.APIError, match="deadline"):
            for _ in create(model="fake", messages=MESSAGES, stream=True, extra_body={"timeout": 0.05}):
                pass

    async with open_server(step_seconds=0.01) as server:
        await in_thread(server.url, work)


async def test_a_client_that_retries_gets_through_once_the_load_falls() -> None:
    limits = {"max_num_seqs": 1, "max_waiting": 1}
    async with open_server(limits=limits, step_seconds=0.002) as server, trio.open_nursery() as nursery:
        for _ in range(8):  # so that the server knows how fast it is, and says a second
            await server.client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1})
        blockers = []
        for name in ("runs", "waits"):
            blockers.append(server.engine.submit(GenerationRequest(name, TextPrompt("hi"))))
            while server.engine.snapshot()["requests"]["running"] == 0:
                await trio.sleep(0.001)
        answers: list[str | None] = []

        def work(client: openai.OpenAI) -> None:
            answer = client.with_options(max_retries=2).chat.completions.create(
                model="fake", messages=MESSAGES, max_tokens=6
            )
            answers.append(answer.choices[0].message.content)

        nursery.start_soon(in_thread, server.url, work)
        while server.engine.snapshot()["requests"]["rejected_by_reason"]["queue_full"] == 0:
            await trio.sleep(0.01)
        for blocker in blockers:
            blocker.abort("admin")
    assert answers == [ANSWER]
