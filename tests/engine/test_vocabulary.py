"""A tokenizer and an embedding of different sizes: what one has and the other lacks harms nobody."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from gguf import TokenType

from engine.config import EngineConfig
from engine.engine import open_engine
from engine.errors import InvalidRequestError, ModelFileError
from engine.handle import ChatPrompt, GenerationRequest, TextPrompt, TokensPrompt
from engine.loading.checkpoint import open_checkpoint
from engine.loading.vocabulary import check_vocabulary, vocabulary_remarks
from engine.sequence import SamplingParams
from engine.tokenizer import Tokenizer
from tests.engine.tiny_engine import answer
from tests.fake_checkpoint import FakeCheckpoint
from tests.fakes import InlineStepper, read_deltas
from tests.tiny_models import TEMPLATE, TOKENS, make_backend, make_config, make_tensors, write_gguf

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from engine.engine import Engine
    from engine.handle import Handle

SIZE = len(TOKENS)
LOST = {"[PAD]": TokenType.CONTROL, "<more>": TokenType.USER_DEFINED}


def write(path: Path, *, num_rows: int = SIZE, more_tokens: dict[str, TokenType] | None = None, **keys: Any) -> Path:
    """A tiny model with as many rows and as many tokens as are wanted; `keys` go into the metadata."""
    config = make_config(vocab_size=num_rows)
    metadata = {f"tokenizer.{key}": value for key, value in keys.items()}
    file = path / "tiny.gguf"
    return write_gguf(file, config, make_tensors(config), more_tokens=more_tokens or {}, metadata=metadata)


@asynccontextmanager
async def open_at(path: Path) -> AsyncIterator[Engine]:
    @asynccontextmanager
    async def open_inline() -> AsyncIterator[InlineStepper]:
        yield InlineStepper(0.0)

    config = EngineConfig(
        model=str(path), dtype="float32", num_threads=1, max_num_seqs=4, capacity_num_seqs=4, block_size=4
    )
    async with open_engine(config, stepper=open_inline) as engine:
        yield engine


def request(prompt: TextPrompt | TokensPrompt | ChatPrompt, max_tokens: int = 3, **params: Any) -> GenerationRequest:
    return GenerationRequest(
        "r", prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, **params), ignore_eos=True
    )


async def refusal(handle: Handle) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        await handle.accepted()
    return str(caught.value)


async def test_a_token_that_the_model_lacks_is_refused_and_ends_nobody_elses_answer(tmp_path: Path) -> None:
    neighbour = request(TextPrompt("hello world"), max_tokens=60)
    async with open_at(write(tmp_path, more_tokens=LOST)) as engine:
        alone = await answer(engine, neighbour)
        beside = engine.submit(neighbour)
        await beside.accepted()
        for prompt in (TextPrompt("hello [PAD]"), TextPrompt("<more>")):
            assert f"the model knows tokens 0 to {SIZE - 1} only" in await refusal(engine.submit(request(prompt)))
        for param, value in (("prompt", TokensPrompt((5, SIZE))), ("logit_bias", ((SIZE, 1.0),))):
            asked = request(**{"prompt": TextPrompt("a"), param: value})
            message = f"'{param}' has token id {SIZE}, which is not in the vocabulary of 0 to {SIZE - 1}."
            assert await refusal(engine.submit(asked)) == message
        said = ChatPrompt(({"role": "user", "content": "[PAD] and <more> are words"},))
        assert (await answer(engine, request(said))).error is None
        assert [delta.text async for delta in read_deltas(beside)]
        assert beside.outbox.last is not None
        assert (await answer(engine, neighbour)) == alone
        assert any("265 '[PAD]', 266 '<more>'" in remark for remark in engine.model.remarks)


async def test_padding_of_the_embedding_is_never_drawn(tmp_path: Path) -> None:
    """Random weights draw from all over the vocabulary; three rows of four stand for nothing here."""
    path = write(tmp_path, num_rows=4 * SIZE, more_tokens={"[PAD265]": TokenType.UNUSED})
    async with open_at(path) as engine:
        for seed in range(4):
            params = SamplingParams(temperature=3.0, seed=seed, max_tokens=100, num_logprobs=20)
            handle = engine.submit(GenerationRequest("r", TextPrompt("hello"), params, ignore_eos=True))
            told = [entry async for delta in read_deltas(handle) for entry in delta.logprobs]
            assert told
            assert all(token_id < SIZE for entry in told for token_id, _ in ((entry.token_id, 0.0), *entry.top))


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"ggml.bos_token_id": SIZE, "ggml.add_bos_token": True}, "around every text"),
        ({"chat_template": "[PAD]" + TEMPLATE}, "in every conversation"),
    ],
)
def test_a_model_that_lacks_what_it_cannot_do_without_is_refused(
    tmp_path: Path, keys: dict[str, Any], what: str
) -> None:
    path = write(tmp_path, more_tokens=LOST, **keys)
    with pytest.raises(ModelFileError, match=rf"265 rows and none for token 265 \('\[PAD\]'\), .*{what}"):
        open_checkpoint(path)


def test_a_model_whose_only_end_is_lost_is_refused(tmp_path: Path) -> None:
    """With another token that ends answers it can be used."""
    backend = make_backend()
    backend.add_special_tokens(["<end>"])
    config = make_config()
    for ends, is_refused in (([SIZE], True), ([SIZE, 2], False)):
        tokenizer = Tokenizer(backend, byte_level=True, stop_token_ids=ends, eos_token_id=SIZE, num_rows=SIZE)
        checkpoint = FakeCheckpoint(config, {}, tokenizer=tokenizer)
        if is_refused:
            with pytest.raises(ModelFileError, match=r"token 265 \('<end>'\), which ends its answers"):
                check_vocabulary(checkpoint, tmp_path)
        else:
            check_vocabulary(checkpoint, tmp_path)


def test_of_many_lost_tokens_a_few_are_named() -> None:
    backend = make_backend()
    backend.add_special_tokens([f"<{number}>" for number in range(20)])
    tokenizer = Tokenizer(backend, byte_level=True, stop_token_ids=[2], num_rows=SIZE)
    (remark,) = vocabulary_remarks(tokenizer)
    assert "265 '<0>', 266 '<1>'" in remark
    assert remark.endswith("272 '<7>' and 12 more")
    assert vocabulary_remarks(Tokenizer(make_backend(), byte_level=True, stop_token_ids=[2])) == []
