"""Every answer and chunk is what OpenAI's own types say, and a streamed answer is the whole one in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from tests.app.serving import CHAT, COMPLETIONS, chat_body, open_server
from tests.app.strict import ask_both, check_whole, parse, text_of
from tests.fakes import EOS, expected_output

ROUTES = {CHAT: chat_body("hi"), COMPLETIONS: {"model": "fake", "prompt": "hi"}}
LOGPROBS: dict[str, dict[str, Any]] = {CHAT: {"logprobs": True, "top_logprobs": 2}, COMPLETIONS: {"logprobs": 2}}
# Characters of one to four bytes, and a flag of two of those: every token is a byte.
PROSE = "née 漢字 🇪🇺 e\u0301 שלום, zażółć 👩\u200d🚀 end"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("prose", ["", PROSE], ids=["letters", "prose"])
async def test_streamed_and_whole_agree_for_every_length(path: str, prose: str) -> None:
    """The model's own letters, and text of many scripts cut anywhere; with and without stops and log-probabilities."""
    limits = {"enable_prefix_caching": False, "max_num_seqs": 16}
    async with open_server(answer=(lambda _: list(prose.encode())) if prose else None, limits=limits) as server:
        full = text_of((await server.client.post(path, json=ROUTES[path] | {"max_tokens": 40})).json()["choices"][0])

        async def check(max_tokens: int, stop: list[str], logprobs: dict[str, Any]) -> None:
            whole, _ = await ask_both(server, path, ROUTES[path] | {"max_tokens": max_tokens, "stop": stop, **logprobs})
            text = text_of(whole["choices"][0])
            if whole["choices"][0]["finish_reason"] == "stop":
                assert text == full[: min(full.find(entry) for entry in stop if entry in full)]
            else:
                assert whole["usage"]["completion_tokens"] == max_tokens
                assert full.startswith(text.rstrip("\ufffd"))
                assert not any(entry in text for entry in stop)

        for first in range(1, 41, 4):
            async with trio.open_nursery() as nursery:
                for max_tokens in range(first, first + 4):
                    nursery.start_soon(check, max_tokens, [], {} if prose else LOGPROBS[path])
                    nursery.start_soon(check, max_tokens, [full[20:23], "no"], LOGPROBS[path] if prose else {})


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_log_probabilities_spell_the_text(path: str) -> None:
    """Exact bytes, also of characters that are cut into tokens, and nothing of the token that ends the answer."""
    async with open_server(answer=lambda _: list(PROSE.encode())) as server:
        whole, _ = await ask_both(server, path, ROUTES[path] | LOGPROBS[path] | {"max_tokens": 200})
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "stop"
    assert text_of(choice) == PROSE
    if path == CHAT:
        content = choice["logprobs"]["content"]
        assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == PROSE
        assert all(len(entry["top_logprobs"]) == 2 for entry in content)
        assert content[0]["token"] == "n"
        assert content[1] == content[1] | {"token": "bytes:\\xc3", "bytes": [0xC3]}
    else:
        logprobs = choice["logprobs"]
        assert "".join(token for token in logprobs["tokens"] if not token.startswith("bytes:")) == "".join(
            character for character in PROSE if character.isascii()
        )
        assert logprobs["text_offset"] == [
            index for index, character in enumerate(PROSE) for _ in character.encode()
        ]  # every byte of a character begins where the character does
        tops = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
        assert all(top[token] == logprob for token, logprob, top in tops)


async def test_log_probabilities_without_others_beside_them() -> None:
    async with open_server() as server:
        chat = (await ask_both(server, CHAT, ROUTES[CHAT] | {"logprobs": True, "max_tokens": 3}))[0]
        assert [entry["top_logprobs"] for entry in chat["choices"][0]["logprobs"]["content"]] == [[], [], []]
        completion = (await ask_both(server, COMPLETIONS, ROUTES[COMPLETIONS] | {"logprobs": 0, "max_tokens": 3}))[0]
        assert all(len(top) == 1 for top in completion["choices"][0]["logprobs"]["top_logprobs"])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_control_tokens_are_shown_on_request(path: str) -> None:
    answer = [*b"ab", 257, *b"c"]
    async with open_server(answer=lambda _: answer) as server:
        hidden, _ = await ask_both(server, path, ROUTES[path] | {"max_tokens": 9})
        shown, _ = await ask_both(server, path, ROUTES[path] | {"max_tokens": 9, "skip_special_tokens": False})
        assert text_of(hidden["choices"][0]) == "abc"
        assert text_of(shown["choices"][0]) == "ab<|user|>c"
        assert hidden["usage"] == shown["usage"]


async def test_tokens_that_end_an_answer() -> None:
    letters = expected_output(b"hi", 12)
    async with open_server() as server:
        body = ROUTES[COMPLETIONS] | {"max_tokens": 12, "stop_token_ids": [letters[7]]}
        whole, _ = await ask_both(server, COMPLETIONS, body)
        first = letters.index(letters[7])
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert text_of(whole["choices"][0]) == bytes(letters[:first]).decode()
        late, _ = await ask_both(server, COMPLETIONS, body | {"min_tokens": 11})
        assert late["usage"]["completion_tokens"] >= 11


async def test_errors_models_and_tokens_are_what_the_document_says() -> None:
    from openai.types import Model

    from app.api import answers

    async with open_server() as server:
        models = await server.client.get("/v1/models")
        parse(answers.ModelList, models.text)
        one = await server.client.get("/v1/models/fake")
        parse(answers.Model, one.text)
        parse(Model, one.text)
        tokens = await server.client.post("/tokenize", json={"prompt": "hi", "return_token_strs": True})
        parse(answers.Tokens, tokens.text)
        back = await server.client.post("/detokenize", json={"tokens": [104, EOS]})
        parse(answers.Detokenized, back.text)
        for path, body in ((CHAT, {}), (CHAT, chat_body("x" * 9999)), ("/v1/nothing", {}), (CHAT, {"model": "gpt-9"})):
            refused = await server.client.post(path, json=body)
            assert refused.status_code in (400, 404)
            parse(answers.Error, refused.text)


async def test_a_tier_that_is_asked_for_is_told() -> None:
    async with open_server() as server:
        for tier, told in (("auto", "default"), ("flex", "flex")):
            body = chat_body(max_tokens=2, service_tier=tier)
            answer = check_whole(CHAT, (await server.client.post(CHAT, json=body)).text)
            assert answer["service_tier"] == told


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_times_and_cached_tokens_are_told_in_an_extension(path: str) -> None:
    prompt = "a prompt that is longer than a block"
    body = chat_body(prompt) if path == CHAT else {"prompt": prompt}
    async with open_server() as server:
        answer = check_whole(path, (await server.client.post(path, json=body | {"max_tokens": 4})).text)
        again = check_whole(path, (await server.client.post(path, json=body | {"max_tokens": 4})).text)
    assert answer["relevo"]["cached_tokens"] == 0
    assert again["relevo"]["cached_tokens"] == again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert answer["relevo"]["preemptions"] == 0
    assert answer["relevo"]["decode_seconds"] > 0.003  # three steps after the first token
    assert answer["relevo"]["prefill_seconds"] > 0
    assert answer["relevo"]["queue_seconds"] >= 0
