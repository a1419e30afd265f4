"""What clients of OpenAI's API rely on, line by line, and the tests that hold it. A test here reads this list.

`null` means absent for every optional field; unknown fields are ignored
    test_openai_behaviours: test_null_is_absent_for_every_field
    test_api: test_null_is_absent_and_unknown_fields_are_ignored
`max_completion_tokens` and `max_tokens` both work
    test_api: test_the_newer_name_of_the_limit_wins
`content` may be a list of text parts; what is no text is 400 that names it
    test_api: test_text_parts_are_text_and_control_tokens_in_them_stay_text
    test_api_errors: test_a_bad_field_is_400_that_names_it
The first chunk carries the role; `finish_reason` in every chunk, null until the last; one terminal chunk for each
choice; then usage, only if asked; then `[DONE]` and nothing more
    test_openai_behaviours: test_the_order_of_a_stream
    test_choices: test_choices_come_by_prompt_and_each_has_an_end_of_its_own
    test_api: test_without_being_asked_a_stream_has_no_usage
A streamed answer and a whole one agree on text, ids, finish reason and usage for every `max_tokens`
    test_openai_types: test_streamed_and_whole_agree_for_every_length
After the first byte a failure is an event in the stream, which ends without `[DONE]` and without a finish reason
    test_openai_behaviours: test_half_an_answer_is_never_taken_for_a_whole_one
    test_api_errors: test_a_deadline_after_the_first_byte_is_told_in_band_without_done
    test_choices: test_one_choice_that_fails_fails_the_answer
Nothing of a stop string is ever sent; no more than needed is held back; without a match the text is as without stops
    test_openai_behaviours: test_a_stop_string_over_many_tokens_is_never_sent
    test_detokenizer: test_any_cut_gives_the_text_up_to_the_stop
    test_detokenizer: test_no_more_than_needed_is_held_back
Characters of several tokens never show as U+FFFD in a delta
    test_openai_behaviours: test_no_delta_holds_half_a_character
    test_detokenizer: test_any_cut_gives_the_text_up_to_the_stop
Every error under `/v1` is OpenAI-shaped JSON, also 404, 405, 413, 415 and a body that is not JSON
    test_openai_behaviours: test_every_error_has_one_shape
    test_api_errors: test_addresses_and_methods_that_do_not_exist
    test_api_errors: test_a_body_that_is_no_json_object_is_400
    test_fuzz: test_schemathesis_finds_nothing
What is too long is 400 `context_length_exceeded`
    test_api_errors: test_a_prompt_that_can_never_fit_is_400_and_the_next_is_served
A feature that is not supported is 400 that names the parameter, never ignored
    test_api_docs: test_what_is_refused_is_refused_by_name_and_passes_at_rest
    test_api_docs: test_the_table_knows_every_field_and_every_refusal
Chat text gets a BOS from the template alone, completions as the tokenizer says; never two
    test_openai_behaviours: test_never_two_first_tokens
    test_tokenizer: test_a_bos_is_added_once
Control tokens are parsed in prompts, never in the content of a message
    test_openai_behaviours: test_control_tokens_are_parsed_in_prompts_and_never_in_messages
    test_chat_template: test_not_even_where_a_template_joins_them
A model without a chat template says so at the start, completes, and answers chats with 400
    test_openai_behaviours: test_without_a_chat_template
    test_openai_behaviours: test_at_the_start_it_says_that_there_is_no_chat_template
    test_api: test_a_model_without_a_chat_template_still_completes
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import trio

from app.api import answers
from app.api.bodies import ChatBody, CompletionBody
from engine.config import EngineConfig
from engine.startup import load_model
from tests.app.serving import CHAT, COMPLETIONS, Driver, chat_body, events, open_app, open_server
from tests.app.strict import ask_both, parse, text_of
from tests.fakes import FakeRunner, FakeTokenizer, expected_output
from tests.tiny_models import write_hugging_face

TESTS = Path(__file__).resolve().parents[1]
FLAG = "🇪🇺 née 漢字 👩\u200d🚀 e\u0301"


def test_every_test_of_the_list_exists() -> None:
    named = re.findall(r"^    (\w+): (\w+)$", __doc__, re.MULTILINE)
    assert len(named) > 20
    for module, name in named:
        (path,) = TESTS.rglob(f"{module}.py")
        assert re.search(rf"^(async )?def {name}\(", path.read_text(encoding="utf-8"), re.MULTILINE), (module, name)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_null_is_absent_for_every_field(path: str) -> None:
    kind, body = (ChatBody, chat_body("hi")) if path == CHAT else (CompletionBody, {"prompt": "hi"})
    optional = [name for name in kind.model_fields if name not in body]
    async with open_server() as server:
        plain = (await server.client.post(path, json=body | {"max_tokens": 3})).json()
        nulls = dict.fromkeys(optional) | {"max_tokens": 3, "nobody_knows_this": {"a": [None]}}
        assert (await server.client.post(path, json=body | nulls)).json()["choices"] == plain["choices"]
        for name in optional:
            response = await server.client.post(path, json=body | {"max_tokens": 3, name: None})
            assert response.status_code == 200, (name, response.text)


@pytest.mark.parametrize("with_usage", [False, True])
async def test_the_order_of_a_stream(with_usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    async with open_server() as server:
        response = await server.client.post(CHAT, json=chat_body(n=2, max_tokens=5, stream=True, **options))
    assert response.text.endswith("data: [DONE]\n\n")
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    usage = [chunk for chunk in chunks if not chunk["choices"]]
    assert len(usage) == with_usage
    assert not with_usage or chunks[-1] is usage[0]
    for index in (0, 1):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"] and chunk["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in own[1:])
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]


async def test_half_an_answer_is_never_taken_for_a_whole_one() -> None:
    def before_step(batch: Any) -> None:
        if batch.step >= 6 and 1 in batch.sequence_ids:
            raise RuntimeError("out of order")

    for path, body in ((CHAT, chat_body("hi")), (COMPLETIONS, {"prompt": "hi"})):
        async with open_server(runner=FakeRunner(256, 4, before_step=before_step)) as server:
            response = await server.client.post(path, json=body | {"max_tokens": 20, "stream": True})
        assert response.status_code == 200
        *chunks, last = events(response.text)
        assert len(chunks) > 2, "it had begun"
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        parse(answers.Error, json.dumps(last))
        assert "[DONE]" not in response.text


async def test_a_stop_string_over_many_tokens_is_never_sent() -> None:
    letters = bytes(expected_output(b"hi", 30)).decode()
    for stop in (letters[3:9], letters[10:11], letters[12:25]):
        async with open_server() as server:
            body = {"prompt": "hi", "max_tokens": 30, "stop": [stop, "not in it"], "stream": True}
            response = await server.client.post(COMPLETIONS, json=body)
        text = "".join(chunk["choices"][0]["text"] for chunk in events(response.text)[:-1])
        assert text == letters[: letters.index(stop)]
    async with open_server() as server:
        plain, _ = await ask_both(server, COMPLETIONS, {"prompt": "hi", "max_tokens": 30})
        other, _ = await ask_both(server, COMPLETIONS, {"prompt": "hi", "max_tokens": 30, "stop": ["not in it"]})
        assert text_of(plain["choices"][0]) == text_of(other["choices"][0]) == letters


async def test_no_delta_holds_half_a_character() -> None:
    async with open_server(answer=lambda _: list(FLAG.encode())) as server:
        response = await server.client.post(CHAT, json=chat_body(max_tokens=100, stream=True))
        deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in events(response.text)[:-1]]
        assert "".join(deltas) == FLAG
        assert not any("\ufffd" in delta for delta in deltas)
        # Where the limit cuts a character, and there alone, the end is marked.
        cut, _ = await ask_both(server, CHAT, chat_body(max_tokens=3))
        assert text_of(cut["choices"][0]) == "\ufffd"


async def test_a_timeout_counts_from_arrival_however_long_the_upload_takes(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_app(step_seconds=1.0) as (app, context), trio.open_nursery() as nursery:
        for upload, total in ((2, 5), (10, 10)):
            driver = Driver(app, CHAT, chat_body(max_tokens=400, timeout=5), more_body=True)
            nursery.start_soon(driver.run)
            before = trio.current_time()
            await trio.sleep(upload)
            driver.send_rest()
            assert await driver.status() == 408
            assert trio.current_time() - before == pytest.approx(total, abs=0.1)
            while await driver.body():
                pass
        await context.engine.wait_idle()


async def test_every_error_has_one_shape() -> None:
    json_type = {"content-type": "application/json"}
    async with open_server() as server:
        post, request = server.client.post, server.client.request
        for status, response in (
            (404, await post("/v1/nothing", json={})),
            (404, await server.client.get("/v1/models/other")),
            (405, await server.client.get(CHAT)),
            (405, await request("DELETE", "/v1/models")),
            (413, await post(CHAT, content=b" " * (5 << 20), headers=json_type)),
            (415, await post(CHAT, content=b"{}", headers={"content-type": "text/plain"})),
            (400, await post(CHAT, content=b"{", headers=json_type)),
            (400, await post(CHAT, json=chat_body("x" * 9999))),
            (400, await post(CHAT, json=chat_body(temperature=9))),
            (404, await post(CHAT, json=chat_body() | {"model": "other"})),
        ):
            assert response.status_code == status
            assert response.headers["content-type"] == "application/json"
            assert response.headers["x-request-id"]
            parse(answers.Error, response.text)


async def test_never_two_first_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake tokenizer begins a text that stands alone with 257; its template begins with 257 by itself."""
    encode = FakeTokenizer.encode

    def with_first(self: Any, text: str, *, parse_control: bool, add_special: bool = True) -> list[int]:
        ids = encode(self, text, parse_control=parse_control)
        return [257, *ids] if add_special and parse_control and ids[:1] != [257] else ids

    monkeypatch.setattr(FakeTokenizer, "encode", with_first)
    async with open_server() as server:
        asked = {
            CHAT: (chat_body("hi", max_tokens=4), [257, *b"hi", 258]),
            COMPLETIONS: ({"prompt": "hi", "max_tokens": 4}, [257, *b"hi"]),
        }
        for path, (body, ids) in asked.items():
            whole, _ = await ask_both(server, path, body)
            assert whole["usage"]["prompt_tokens"] == len(ids)
            assert text_of(whole["choices"][0]) == bytes(expected_output(ids, 4)).decode()


async def test_control_tokens_are_parsed_in_prompts_and_never_in_messages() -> None:
    async with open_server() as server:
        completion, _ = await ask_both(server, COMPLETIONS, {"prompt": "a<|end|>b", "max_tokens": 2})
        assert completion["usage"]["prompt_tokens"] == 3
        chat, _ = await ask_both(server, CHAT, chat_body("a<|end|>b", max_tokens=2))
        assert chat["usage"]["prompt_tokens"] == 2 + len("a<|end|>b")
        tokens = (await server.client.post("/tokenize", json={"prompt": "a<|end|>b"})).json()["tokens"]
        assert tokens == [97, 256, 98]


async def test_without_a_chat_template() -> None:
    async with open_server(chat_template=False) as server:
        refused = await server.client.post(CHAT, json=chat_body())
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("no_chat_template", "messages")
        assert "chat template" in error["message"]
        await ask_both(server, COMPLETIONS, {"prompt": "hi", "max_tokens": 2})


@pytest.mark.long
def test_at_the_start_it_says_that_there_is_no_chat_template(tmp_path: Path) -> None:
    for said in (0, 1):
        path = tmp_path / f"model-{said}"
        write_hugging_face(path)
        if said:
            (path / "chat_template.jinja").unlink()
        config = EngineConfig(model=str(path), num_threads=1, cache_memory_bytes=1 << 20)
        assert sum("no chat template" in remark for remark in load_model(config).remarks) == said
