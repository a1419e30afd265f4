"""A real engine over a tiny random model with a vocabulary of bytes and a few merges."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from engine.config import EngineConfig
from engine.engine import open_engine
from engine.handle import GenerationRequest, TokensPrompt
from engine.loaded import LoadedModel
from engine.sequence import SamplingParams
from engine.tokenizer import Tokenizer
from tests.fake_checkpoint import make_checkpoint, make_runner
from tests.fakes import InlineStepper, read_deltas
from tests.tiny_models import make_backend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from engine.batch import TokenLogprobs
    from engine.engine import Engine
    from engine.grammar.spec import GrammarSpec
    from engine.handle import Handle
    from engine.sequence import FinishReason
    from engine.stepper import Runner

SCHEMAS = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "schemas.jsonl").read_text(encoding="utf-8").splitlines()
]
EOS = 2
CONTEXT = 1024
# A random model hardly ever ends anything: what closes strings, lists and objects is made likelier.
CLOSES = {'"': 4.0, "]": 5.0, "}": 5.0, ",": -1.0, "\\": -6.0}


@dataclass(frozen=True)
class Answer:
    """What came of a request."""

    text: str
    token_ids: tuple[int, ...]
    reason: FinishReason | None
    error: str | None
    logprobs: tuple[TokenLogprobs, ...] = field(default=(), compare=False)


@cache
def make_tokenizer() -> Tokenizer:
    return Tokenizer(make_backend(), byte_level=True, stop_token_ids=[EOS], eos_token_id=EOS)


@cache
def bias() -> tuple[tuple[int, float], ...]:
    tokenizer = make_tokenizer()
    closing = [(tokenizer.encode(text, parse_control=False)[0], value) for text, value in CLOSES.items()]
    return (*closing, (EOS, 4.0))


@asynccontextmanager
async def open_tiny_engine(
    *, num_blocks: int = 2048, overlaps: bool = False, runner: Runner | None = None, **changes: Any
) -> AsyncIterator[Engine]:
    """`changes` are fields of the configuration.

    Where the runner says that it overlaps, what a step draws is read one step late, although it is there at once.
    """
    if runner is None:
        runner = make_runner(make_checkpoint(context_length=CONTEXT), num_blocks=num_blocks, max_num_batched_tokens=256)
        runner.overlaps = overlaps
    options: dict[str, Any] = {
        "model": "tiny",
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "capacity_num_seqs": 16,
        "capacity_num_batched_tokens": 256,
        "block_size": 4,
    }
    config = EngineConfig(**{**options, **changes})

    def load(_: EngineConfig) -> LoadedModel:
        return LoadedModel(
            name="tiny",
            dtype="float32",
            weights_kind="random",
            max_model_len=CONTEXT,
            num_blocks=num_blocks,
            runner=runner,
            tokenizer=make_tokenizer(),
            chat_template=None,
        )

    @asynccontextmanager
    async def open_inline() -> AsyncIterator[InlineStepper]:
        yield InlineStepper(0.0)

    async with open_engine(config, load=load, stepper=open_inline) as engine:
        yield engine


def ask(spec: GrammarSpec | None, seed: int, *, max_tokens: int = 600, **params: Any) -> GenerationRequest:
    """A prompt of its own for each seed. Grammars of these tests are known to be harmless."""
    sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=max_tokens, logit_bias=bias(), **params)
    grammar = None if spec is None else replace(spec, plain=True)
    return GenerationRequest(f"r{seed}", TokensPrompt((5, 6, 7 + seed % 200)), sampling, grammar=grammar)


async def answer(engine: Engine, request: GenerationRequest) -> Answer:
    return await read_answer(engine.submit(request))


async def read_answer(handle: Handle) -> Answer:
    await handle.accepted()
    text, token_ids, logprobs, last = "", [], [], None
    async for last in read_deltas(handle):
        text += last.text
        token_ids += last.token_ids
        logprobs += last.logprobs
    assert last is not None
    return Answer(text, tuple(token_ids), last.finish_reason, last.error, tuple(logprobs))


async def answer_all(engine: Engine, requests: list[GenerationRequest]) -> list[Answer]:
    """All at once, in their order."""
    answers: dict[int, Answer] = {}
    handles = [engine.submit(request) for request in requests]

    async def run(index: int) -> None:
        answers[index] = await read_answer(handles[index])

    async with trio.open_nursery() as nursery:
        for index in range(len(requests)):
            nursery.start_soon(run, index)
    return [answers[index] for index in range(len(requests))]
