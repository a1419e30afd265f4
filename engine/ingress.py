"""The actor at the door: tokenizes, compiles grammars, refuses what can never fit, and passes the rest on."""

from __future__ import annotations

import dataclasses
import logging
from functools import partial
from typing import TYPE_CHECKING

import trio

from engine.errors import (
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    RelevoError,
    RequestError,
    UnavailableError,
)
from engine.handle import ChatPrompt, TextPrompt, TokensPrompt
from engine.loaded import check_in_vocabulary, require_chat_template
from engine.messages import Add, End, Opened
from engine.sequence import MAX_LOGPROBS, FinishReason, Sequence
from engine.text_guard import strings_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.constraint import Constraint
    from engine.grammar.compiler import GrammarCompiler
    from engine.handle import Handle
    from engine.loaded import ChatTemplateLike, TokenizerLike
    from engine.messages import Command, Result

log = logging.getLogger("relevo.engine")

# Longer texts are tokenized on a worker thread, so that the event loop goes on beating.
LONG_TEXT = 8192
# What the template does with a turn beside its text.
TURN_LENGTH = 64


class Ingress:
    """Turns handles into sequences, in the order of their arrival.

    Args:
        tokenizer: of the model.
        chat_template: of the model, if it has one.
        usable_capacity: the longest prompt that fits, in tokens.
        grammars: compiles what answers must look like.
        shares_prompts: whether several answers to one prompt share its blocks.
        check_tokens: raises `UnavailableError` when a handle's prompt of these tokens cannot wait now.
        on_refused: told about a handle that goes no further.
    """

    def __init__(
        self,
        tokenizer: TokenizerLike,
        chat_template: ChatTemplateLike | None,
        usable_capacity: int,
        *,
        grammars: GrammarCompiler,
        shares_prompts: Callable[[], bool],
        arrivals: trio.MemoryReceiveChannel[Handle],
        commands: trio.MemorySendChannel[Command],
        results: trio.MemorySendChannel[Result],
        check_tokens: Callable[[Handle, tuple[int, ...], float], None],
        on_refused: Callable[[Handle, RelevoError | None], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._usable_capacity = usable_capacity
        self._grammars = grammars
        self._shares_prompts = shares_prompts
        self._longest_token = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
        self._arrivals = arrivals
        self._commands = commands
        self._results = results
        self._check_tokens = check_tokens
        self._on_refused = on_refused

    async def run(self) -> None:
        """Take in one handle after the other, for ever. What takes long (a long text, a new grammar) is done aside."""
        async with trio.open_nursery() as nursery:
            async for handle in self._arrivals:
                try:
                    takes_long = self._takes_long(handle)
                except Exception:
                    self._give_up(handle)
                    continue
                if takes_long:
                    nursery.start_soon(self._take_in, handle)
                else:
                    await self._take_in(handle)

    def check_text(self, num_characters: int, param: str) -> None:
        """Refuse a text that would not fit even if every token were the longest there is, without tokenizing it.

        Raises:
            ContextLengthError: it is that long.
        """
        least = -(-num_characters // self._longest_token)
        if least > self._usable_capacity:
            raise ContextLengthError(least, self._usable_capacity, param=param, at_least=True)

    def _takes_long(self, handle: Handle) -> bool:
        """Whether it is taken in aside, so that others need not wait for it."""
        request = handle.request
        follows = handle.after is not None and not handle.after.is_decided
        compiles = request.grammar is not None and not self._grammars.knows(request.grammar)
        return follows or compiles or _length(request.prompt) > LONG_TEXT

    async def _take_in(self, handle: Handle) -> None:
        token_ids: tuple[int, ...] = ()
        constraint: Constraint | None = None
        try:
            with trio.CancelScope() as scope:
                # Whoever leaves keeps no place in the queue until its grammar has been tried.
                handle.watch(scope.cancel)
                if handle.after is not None:
                    await handle.after.accepted()  # what is wrong with one answer is wrong with all to its prompt
                if handle.abort_cause is None:
                    token_ids = await self._tokenize(handle)
                    self._check(handle, token_ids)
                    constraint = await self._constraint(handle)
                    if constraint is not None:  # others came in while it was compiled; from here on nothing is awaited
                        self._check_tokens(handle, token_ids, trio.current_time())
        except (RequestError, UnavailableError) as error:
            self._refuse(handle, error)
            return
        except Exception:
            self._give_up(handle)
            return
        if handle.abort_cause is None:
            handle.num_prompt_tokens = len(token_ids)
            await self._pass_on(handle, token_ids, constraint)
        else:
            self._on_refused(handle, None)

    def _give_up(self, handle: Handle) -> None:
        """Called while an error is handled: whatever a request brings, it must end that request alone."""
        log.exception("request %s could not be taken in", handle.request_id)
        self._refuse(handle, EngineError("The request could not be taken in."))

    def _refuse(self, handle: Handle, error: RelevoError) -> None:
        handle.refuse(error)
        self._on_refused(handle, error)

    async def _pass_on(self, handle: Handle, token_ids: tuple[int, ...], constraint: Constraint | None) -> None:
        """From here on a request ends in one way only: the scheduler ends it and the streaming actor closes it."""
        await self._results.send(Opened(handle))
        sequence = self._sequence(handle, token_ids, constraint)
        self._commands.send_nowait(Add(sequence))
        end = partial(self._commands.send_nowait, End(handle.sequence_id, FinishReason.ABORT))
        if handle.abort_cause is not None:  # its caller left while it was being passed on
            end()
        handle.accept(sequence, on_abort=end)

    def _sequence(self, handle: Handle, token_ids: tuple[int, ...], constraint: Constraint | None) -> Sequence:
        request = handle.request
        params = request.params
        if constraint is not None:
            params = dataclasses.replace(params, constraint=constraint)
        if not request.ignore_eos:
            own = self._tokenizer.stop_token_ids
            params = dataclasses.replace(params, stop_token_ids=params.stop_token_ids | own, end_token_ids=own)
        return Sequence(
            handle.sequence_id,
            handle.request_id,
            token_ids,
            params,
            handle.arrival_time,
            cache_root=request.cache_root,
            key_name=request.key_name,
            key_identity=request.key_identity,
            background=request.background,
            priority=request.priority,
            leader=self._leader(handle),
        )

    async def _constraint(self, handle: Handle) -> Constraint | None:
        """What the request's grammar was compiled to."""
        spec, request = handle.request.grammar, handle.request
        if spec is None:
            return None
        if request.ignore_eos:
            message = "'ignore_eos' does not go with an answer of a given form: the form says where the answer ends."
            raise InvalidRequestError(message, param="ignore_eos")
        return await self._grammars.compile(spec)

    def _leader(self, handle: Handle) -> Sequence | None:
        """Whose blocks it can share."""
        after = handle.after
        if not self._shares_prompts() or after is None or after.request.cache_root != handle.request.cache_root:
            return None
        return after.sequence

    def _check(self, handle: Handle, token_ids: tuple[int, ...]) -> None:
        param = handle.request.prompt.param
        if not token_ids:
            raise InvalidRequestError("The prompt is empty: give at least one token.", param=param)
        if len(token_ids) > self._usable_capacity:
            raise ContextLengthError(len(token_ids), self._usable_capacity, param=param)
        params = handle.request.params
        check_in_vocabulary(self._tokenizer, [token_id for token_id, _ in params.logit_bias], "logit_bias")
        if params.num_logprobs is not None and not 0 <= params.num_logprobs <= MAX_LOGPROBS:
            message = f"Log-probabilities of {params.num_logprobs} tokens are asked for; it can be 0 to {MAX_LOGPROBS}."
            raise InvalidRequestError(message, param="logprobs")
        self._check_tokens(handle, token_ids, trio.current_time())

    async def _tokenize(self, handle: Handle) -> tuple[int, ...]:
        prompt, after = handle.request.prompt, handle.after
        if after is not None and after.sequence is not None and after.request.prompt is prompt:
            return after.sequence.prompt_token_ids
        match prompt:
            case TokensPrompt(token_ids):
                if len(token_ids) > self._usable_capacity:
                    raise ContextLengthError(len(token_ids), self._usable_capacity, param=prompt.param)
                check_in_vocabulary(self._tokenizer, token_ids, prompt.param)
                return token_ids
            case TextPrompt(text):
                encode = partial(self._tokenizer.encode, text, parse_control=True)
            case ChatPrompt(messages, options=options):
                template = require_chat_template(self._chat_template)
                encode = partial(template.encode, list(messages), self._tokenizer, **options)
        self.check_text(_least_length(prompt), prompt.param)
        if _length(prompt) > LONG_TEXT:
            return tuple(await trio.to_thread.run_sync(encode))
        return tuple(encode())


def _length(prompt: TextPrompt | TokensPrompt | ChatPrompt) -> int:
    """Characters that are worked on."""
    if isinstance(prompt, ChatPrompt):
        texts = sum(map(len, strings_in([prompt.messages, prompt.options])))
        return texts + TURN_LENGTH * len(prompt.messages)
    return _least_length(prompt)


def _least_length(prompt: TextPrompt | TokensPrompt | ChatPrompt) -> int:
    """Characters that are tokenized in any case; a chat template may leave out what is no content."""
    match prompt:
        case TextPrompt(text):
            return len(text)
        case ChatPrompt(messages):
            return sum(len(message.get("content") or "") for message in messages)
        case TokensPrompt():
            return 0
