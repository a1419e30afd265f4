"""A whole engine without torch: the real actors and rules over a runner whose answers can be told beforehand.

The fake runner keeps persistent rows and a paged memory as the real one does, and reads every earlier token back
through the block table. A block that was given to two sequences, or a row that was not told of a change, gives
another answer than `expected_output`.
"""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import trio

from engine.batch import ScheduledBatch, StepOutput, TokenLogprobs
from engine.config import EngineConfig
from engine.engine import Engine, open_engine
from engine.errors import ConstraintError, InvalidRequestError
from engine.loaded import LoadedModel

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
    from contextlib import AbstractAsyncContextManager

    from engine.constraint import ConstraintState
    from engine.handle import Handle
    from engine.outbox import Delta
    from engine.sequence import SamplingParams
    from engine.stepper import Stepper

EOS = 256
CONTROL = {EOS: "<|end|>", 257: "<|user|>", 258: "<|assistant|>"}
VOCAB_SIZE = 259
LETTERS = b"abcdefghijklmnopqrstuvwxyz  "
MAX_BATCHES = 1000


class FakeTokenizer:
    """A byte is a token; 256 ends an answer, 257 and 258 open turns."""

    vocab_size = VOCAB_SIZE
    stop_token_ids = frozenset({EOS})
    bos_token_id: int | None = None
    eos_token_id = EOS
    adds_bos = False

    def encode(self, text: str, *, parse_control: bool, add_special: bool = True) -> list[int]:
        if parse_control:
            for token_id, spelling in CONTROL.items():
                before, found, after = text.partition(spelling)
                if found:
                    return [
                        *self.encode(before, parse_control=True),
                        token_id,
                        *self.encode(after, parse_control=True),
                    ]
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        ids = list(ids)
        if ids and not 0 <= min(ids) <= max(ids) < VOCAB_SIZE:
            raise InvalidRequestError("an id is not in the vocabulary", param="tokens")
        return b"".join([self.token_bytes(i) for i in ids]).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return CONTROL[token_id].encode() if token_id in CONTROL else bytes([token_id])

    def is_control(self, token_id: int) -> bool:
        return token_id in CONTROL

    def control_id(self, spelling: str) -> int | None:
        return next((token_id for token_id, known in CONTROL.items() if known == spelling), None)


class FakeChatTemplate:
    """Each turn is its role's control token and its content.

    Args:
        variables: what it looks at beside the messages. Tools make a turn of their own, at the beginning.
        opening: what it begins an answer with, unless `enable_thinking` is false.
    """

    def __init__(self, variables: Iterable[str] = (), opening: str = "") -> None:
        self.source = opening
        self.variables = frozenset(variables)
        self._opening = opening

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        turns = "".join(
            f"<|{'assistant' if m['role'] == 'assistant' else 'user'}|>{m['content']}"
            for m in self._with_tools(messages, kwargs)
        )
        return turns + (f"<|assistant|>{self._begin(kwargs)}" if add_generation_prompt else "")

    def encode(
        self, messages: list[dict[str, Any]], tokenizer: Any, *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        token_ids: list[int] = []
        for message in self._with_tools(messages, kwargs):
            token_ids.append(258 if message["role"] == "assistant" else 257)
            token_ids.extend(tokenizer.encode(message["content"], parse_control=False))
        return [*token_ids, 258, *self._begin(kwargs).encode()] if add_generation_prompt else token_ids

    def _with_tools(self, messages: list[dict[str, Any]], kwargs: dict[str, Any]) -> list[dict[str, Any]]:
        tools = kwargs.get("tools")
        return [*([{"role": "system", "content": json.dumps(tools)}] if tools else []), *messages]

    def _begin(self, kwargs: dict[str, Any]) -> str:
        return self._opening if kwargs.get("enable_thinking", True) else ""


def next_token(token_ids: list[int]) -> int:
    """The fake model: a letter that depends on every token before it. It never ends an answer by itself."""
    state = 17
    for token_id in token_ids:
        state = (state * 1_000_003 + token_id + 1) % 2_147_483_647
    return LETTERS[state % len(LETTERS)]


def expected_output(prompt: Iterable[int], num_tokens: int) -> list[int]:
    """What the fake model answers, computed without any engine."""
    token_ids = list(prompt)
    start = len(token_ids)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[start:]


def fake_logprobs(known: list[int], token_id: int, num_top: int) -> TokenLogprobs:
    """What the fake model tells of a token drawn after `known`: it is always the likeliest."""
    logprob = -(1 + sum(known) % 7) / 8
    others = [letter for letter in dict.fromkeys(LETTERS) if letter != token_id]
    top = [(token_id, logprob), *[(other, logprob - rank - 1) for rank, other in enumerate(others)]]
    return TokenLogprobs(token_id, logprob, tuple(top[:num_top]))


@dataclass(frozen=True)
class OneOf:
    """A constraint: the answer is one of these byte strings, and ends then."""

    options: tuple[bytes, ...]
    forces: bool = True

    def begin(self, token_ids: tuple[int, ...]) -> OneOfState:
        state = OneOfState(self.options, self.forces)
        for token_id in token_ids:
            state.consume(token_id)
        return state


class OneOfState:
    """What may still come of each option."""

    def __init__(self, options: tuple[bytes, ...], forces: bool) -> None:
        self.left = [[*option, EOS] for option in options]
        self.forces = forces

    def allowed(self) -> bytes:
        bits = sum(1 << token_id for token_id in {left[0] for left in self.left})
        return bits.to_bytes(-(-VOCAB_SIZE // 8), "little")

    def consume(self, token_id: int) -> None:
        self.left = [left[1:] for left in self.left if left and left[0] == token_id]
        if not self.left:
            raise ConstraintError(f"token {token_id} continues no option")

    def force(self) -> tuple[int, ...]:
        forced: list[int] = []
        while self.forces and self.left[0] and all(left[:1] == self.left[0][:1] for left in self.left):
            forced.append(self.left[0][0])
            self.consume(forced[-1])
        return tuple(forced)


@dataclass
class _Row:
    sequence_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    block_ids: list[int] = field(default_factory=list)
    state: ConstraintState | None = None

    def allowed(self) -> list[int] | None:
        """Tokens that may come; `None` is any."""
        if self.params.constraint is None:
            return None
        if self.state is None:
            self.state = self.params.constraint.begin(tuple(self.token_ids[self.num_prompt_tokens :]))
        bits = int.from_bytes(self.state.allowed(), "little")
        return [token_id for token_id in range(VOCAB_SIZE) if bits >> token_id & 1]

    def take(self, token_id: int) -> tuple[int, ...]:
        """A token was drawn; gives those that follow it."""
        forced: tuple[int, ...] = ()
        if self.state is not None:
            self.state.consume(token_id)
            forced = () if self.params.num_logprobs is not None else self.state.force()
        self.token_ids.extend((token_id, *forced))
        return forced


class FakeRunner:
    """Executes batches over a paged memory of token ids.

    Args:
        num_blocks: blocks of the memory.
        block_size: tokens of a block.
        end_after: length at which an answer ends by itself, from its prompt; `None` never.
        answer: what is answered to a prompt instead of the model's own letters; `None` is the model's own.
        before_step: called with each batch first; may raise, to make the step fail.

    Attributes:
        batches: the first `MAX_BATCHES` that were executed.
    """

    overlaps = False

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        end_after: Callable[[list[int]], int | None] | None = None,
        answer: Callable[[list[int]], Sequence[int] | None] | None = None,
        before_step: Callable[[ScheduledBatch], None] | None = None,
    ) -> None:
        self.batches: list[ScheduledBatch] = []
        self._memory = [[-1] * block_size for _ in range(num_blocks)]
        self._block_size = block_size
        self._rows: dict[int, _Row] = {}
        self._end_after = end_after
        self._answer = answer
        self._before_step = before_step

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        if self._before_step is not None:
            self._before_step(batch)
        if len(self.batches) < MAX_BATCHES:
            self.batches.append(batch)
        for seated in batch.seated:
            self._rows[seated.seat] = _Row(
                seated.sequence_id, list(seated.token_ids), seated.num_prompt_tokens, seated.params
            )
        for seat, block_ids in batch.new_blocks:
            self._rows[seat].block_ids.extend(block_ids)
        columns = zip(batch.seats, batch.sequence_ids, batch.starts, batch.counts, batch.samples, strict=True)
        token_ids = [-1] * len(batch)
        logprobs, forced, failures, accepted = {}, {}, {}, {}
        for index, column in enumerate(columns):
            known, row = self._compute(*column), self._rows[batch.seats[index]]
            if known is None:
                continue
            try:
                token_id = self._draw(row, known)
                following = row.take(token_id)
            except ConstraintError as error:
                failures[index] = error.cause
                continue
            token_ids[index] = token_id
            if following:
                forced[index] = following
            if row.params.num_logprobs is not None:
                logprobs[index] = fake_logprobs(known, token_id, row.params.num_logprobs)
            if index in batch.drafts and (behind := self._draw_behind(row, known, batch.drafts[index])):
                accepted[index] = behind
        return StepOutput(batch.step, tuple(token_ids), failures, logprobs=logprobs, forced=forced, accepted=accepted)

    def launch(self, batch: ScheduledBatch) -> Any:
        return self.execute(batch)

    def collect(self, ticket: Any) -> StepOutput:
        output: StepOutput = ticket
        return output

    def reset(self) -> None:
        self._memory = [[-1] * self._block_size for _ in self._memory]
        self._rows.clear()

    def _compute(self, seat: int, sequence_id: int, start: int, count: int, samples: bool) -> list[int] | None:
        """Write the row's tokens into the memory; read all of it back where a token is to be drawn."""
        row = self._rows[seat]
        if row.sequence_id != sequence_id or len(row.token_ids) < start + count:
            raise AssertionError(f"seat {seat} holds {row}, the batch speaks of {sequence_id} at {start}+{count}")
        for position in range(start, start + count):
            self._place(row, position)[position % self._block_size] = row.token_ids[position]
        if not samples:
            return None
        return [self._place(row, position)[position % self._block_size] for position in range(start + count)]

    def _place(self, row: _Row, position: int) -> list[int]:
        """The block that holds a position."""
        return self._memory[row.block_ids[position // self._block_size]]

    def _draw_behind(self, row: _Row, known: list[int], draft: tuple[int, ...]) -> tuple[int, ...]:
        """Write drafts into the memory, right or not; what is drawn behind those that were right."""
        if not row.params.is_plain:
            raise AssertionError(f"{row} has drafts")
        start, drawn = len(known), [row.token_ids[-1]]
        for position, token_id in enumerate(draft, start):
            self._place(row, position)[position % self._block_size] = token_id
        for position in range(start, start + len(draft)):
            known.append(self._place(row, position)[position % self._block_size])
            if known[-1] != drawn[-1]:
                break
            drawn.append(self._draw(row, known))
            row.take(drawn[-1])
        return tuple(drawn[1:])

    def _draw(self, row: _Row, known: list[int]) -> int:
        """The next token; under a constraint the model's own where it may come, else one that may."""
        prompt = row.token_ids[: row.num_prompt_tokens]
        answer = self._answer(prompt) if self._answer is not None else None
        length = len(answer) if answer is not None else self._end_after(prompt) if self._end_after is not None else None
        count = len(known) - len(prompt)
        ends = length is not None and count == length and EOS in row.params.stop_token_ids
        token_id = EOS if ends else next_token(known) if answer is None or count >= len(answer) else answer[count]
        allowed = row.allowed()
        if allowed == []:
            raise ConstraintError("no token may follow", own_fault=True)
        return token_id if allowed is None or token_id in allowed else allowed[token_id % len(allowed)]


class Poison:
    """A `before_step` that fails each step with a sequence in it that holds `text`.

    Attributes:
        sizes: rows of the steps that failed.
    """

    def __init__(self, text: bytes = b"poison", error: Exception | None = None) -> None:
        self.sizes: list[int] = []
        self._text = text
        self._error = error or ArithmeticError("division by the devil")
        self._bad: set[int] = set()

    def __call__(self, batch: ScheduledBatch) -> None:
        for seated in batch.seated:
            if self._text in bytes([token_id % 256 for token_id in seated.token_ids]):
                self._bad.add(seated.sequence_id)
        if self._bad & {*batch.sequence_ids}:
            self.sizes.append(len(batch))
            raise self._error


class InlineStepper:
    """Runs a call on the event loop after `seconds` of (virtual) time."""

    def __init__(self, seconds: float | Callable[[], float]) -> None:
        self.seconds = seconds

    async def run(self, function: Callable[[], Any]) -> Any:
        with trio.CancelScope(shield=True):
            await trio.sleep(self.seconds() if callable(self.seconds) else self.seconds)
        return function()


def fake_config(**changes: Any) -> EngineConfig:
    """Small limits; `num_blocks` is given to `open_fake_engine`."""
    defaults: dict[str, Any] = {
        "model": "fake",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "capacity_num_seqs": 16,
        "capacity_num_batched_tokens": 256,
        "block_size": 4,
        "num_speculative_tokens": 0,
    }
    return EngineConfig(**{**defaults, **changes})


@asynccontextmanager
async def open_fake_engine(
    config: EngineConfig | None = None,
    *,
    num_blocks: int = 256,
    max_model_len: int = 512,
    step_seconds: float | Callable[[], float] = 0.01,
    runner: FakeRunner | None = None,
    chat_template: bool | FakeChatTemplate = True,
    name: str = "fake",
    end_after: Callable[[list[int]], int | None] | None = None,
    answer: Callable[[list[int]], Sequence[int] | None] | None = None,
    is_batch_invariant: bool = True,
    stepper: Callable[[], AbstractAsyncContextManager[Stepper]] | None = None,
) -> AsyncIterator[Engine]:
    """A real engine over the fake model; each step takes `step_seconds` of the loop's time, or what `stepper` says."""
    config = config or fake_config()
    runner = runner or FakeRunner(num_blocks, config.block_size, end_after=end_after, answer=answer)

    def load(_: EngineConfig) -> LoadedModel:
        return LoadedModel(
            name=config.served_model_name or name,
            dtype="float32",
            weights_kind="fake",
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            runner=runner,
            tokenizer=FakeTokenizer(),
            chat_template=FakeChatTemplate() if chat_template is True else chat_template or None,
            is_batch_invariant=is_batch_invariant,
        )

    @asynccontextmanager
    async def open_inline() -> AsyncIterator[InlineStepper]:
        yield InlineStepper(step_seconds)

    async with open_engine(config, load=load, stepper=stepper or open_inline) as engine:
        yield engine


async def read_deltas(handle: Handle) -> AsyncGenerator[Delta, None]:
    """All pieces of an answer, to be read once."""
    delta = await handle.take()
    yield delta
    while delta.finish_reason is None:
        delta = await handle.take()
        yield delta
