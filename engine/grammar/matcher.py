"""llguidance behind the sampler's seam: a vocabulary, compiled grammars, and how far each answer has come.

Source of the algorithm: llguidance (Microsoft, MIT), an Earley parser over a lexer of derivatives of regular
expressions, which walks the vocabulary as a trie to find the tokens that may come next.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

import llguidance

from engine.errors import ConstraintError
from engine.panics import PanicError, without_panic

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.loaded import TokenizerLike

P = ParamSpec("P")
T = TypeVar("T")

# Of the processor's time one answer may spend in its grammar: so much for each token, and so much ahead of that. What
# takes longer would hold up everybody, once in each step.
SECONDS_PER_TOKEN: Final = 0.002
SECONDS_AHEAD: Final = 0.1
# What is forced beyond this waits for the next step.
MAX_FORCED: Final = 1024
# So many answers in a row that were too slow, and their grammar is taken no more.
MAX_SLOW: Final = 3
# How the library names keywords of a schema that it knows and does not follow.
NOT_ENFORCED: Final = re.compile(r"Unimplemented keys: \[([^\]]*)\]")
# What it echoes of a request; the end of that is of no more use than its beginning.
LONG_QUOTE: Final = re.compile(r'(\binvalid regex "(?:[^"\\]|\\.){40})(?:[^"\\]|\\.){20,}"')
# How it says that a token may not come; what else goes wrong with one lies in the grammar.
FORBIDDEN: Final = "doesn't satisfy the grammar"
SLOW_ANSWER: Final = "The grammar of this answer took too long to follow; simplify it, or try again."
TOO_SLOW: Final = "The grammar of this request takes too long to follow; simplify it."


def parser_limits() -> llguidance.LLParserLimits:
    """What one grammar may take, in the library's own units: bounds of memory, and of the time of a single step."""
    return llguidance.LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=10_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


class Vocabulary:
    """A tokenizer as llguidance wants one. Making it takes about 0.3 s for 49,152 tokens and holds Python's lock.

    Control tokens are kept apart from text, so no text of a grammar can produce one.

    Args:
        tokenizer: of the model.
    """

    is_tokenizer_wrapper = True
    bos_token_id: int | None = None

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer
        self.stop_token_ids = tuple(sorted(tokenizer.stop_token_ids))
        self.eos_token_id = self.stop_token_ids[0] if self.stop_token_ids else None
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        control = [token_id for token_id in range(tokenizer.vocab_size) if tokenizer.is_control(token_id)]
        self.special_token_ids = sorted({*control, *self.stop_token_ids})
        # Some vocabularies put a space before a text that stands alone; what is forced stands behind other text.
        self._anchor = "" if self._encode("a", "") is not None else "\n"
        self.compiled = llguidance.LLTokenizer(self)  # type: ignore[arg-type]

    def __call__(self, text: str) -> list[int]:
        """The tokens that the model's own tokenizer makes of a text in the middle of others."""
        token_ids = self._encode(text, self._anchor)
        return self.compiled.greedy_tokenize(text) if token_ids is None else token_ids

    def _encode(self, text: str, anchor: str) -> list[int] | None:
        """Tokens whose bytes are those of the text; `None` where the tokenizer adds some or leaves some out."""
        token_ids = self._tokenizer.encode(anchor + text, parse_control=False, add_special=False)
        data, wanted = b"".join([self.tokens[token_id] for token_id in token_ids]), text.encode()
        while token_ids and len(data) > len(wanted):
            data = data[len(self.tokens[token_ids[0]]) :]
            token_ids = token_ids[1:]
        return token_ids if data == wanted else None


class CompiledGrammar:
    """A grammar that is ready to be followed, by any number of answers.

    Args:
        matcher: at the beginning of the grammar; it is copied, never moved.
        plain: nothing in it can be slow, so an answer that was tells of the machine.
    """

    def __init__(self, matcher: llguidance.LLMatcher, stop_token_ids: tuple[int, ...], *, plain: bool = False) -> None:
        self.stop_token_ids = stop_token_ids
        self._matcher = matcher
        self._plain = plain
        self._num_slow = 0

    @property
    def is_too_slow(self) -> bool:
        """Whether it is taken no more. One slow answer ends alone: it may have been a slow moment of the machine."""
        return self._num_slow >= MAX_SLOW

    def note_end(self, *, slow: bool) -> None:
        """An answer was given up for its slowness, or reached its end, which forgives those before it."""
        self._num_slow = self._num_slow + 1 if slow and not self._plain else 0

    def begin(self, token_ids: tuple[int, ...]) -> GrammarState:
        """The state behind these tokens of an answer.

        Raises:
            ConstraintError: the grammar does not allow them, or was found to be too slow.
        """
        if self.is_too_slow:
            raise ConstraintError(TOO_SLOW)
        state = GrammarState(self, guarded(self._matcher.deep_copy), SECONDS_AHEAD + SECONDS_PER_TOKEN * len(token_ids))
        state.consume_all(token_ids)
        return state


class GrammarState:
    """How far one answer has come in its grammar."""

    def __init__(self, grammar: CompiledGrammar, matcher: llguidance.LLMatcher, seconds: float) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._has_ended = False
        self._is_given_up = False
        self._seconds_left = seconds

    def allowed(self) -> bytes:
        """Which tokens may come next, one bit a token, the first in the lowest bit; stop tokens where it may end.

        Raises:
            ConstraintError: nothing can come, or finding out took too long.
        """
        mask = bytearray(self._timed(self._matcher.compute_bitmask))
        self._check()
        first, *others = self._grammar.stop_token_ids
        may_end = mask[first >> 3] >> (first & 7) & 1
        for token_id in others:
            place, bit = token_id >> 3, 1 << (token_id & 7)
            mask[place] = mask[place] | bit if may_end else mask[place] & ~bit
        return bytes(mask)

    def consume(self, token_id: int) -> None:
        """This token was drawn.

        Raises:
            ConstraintError: the grammar does not allow it.
        """
        self._seconds_left = min(self._seconds_left + SECONDS_PER_TOKEN, SECONDS_AHEAD)
        self.consume_all((token_id,))

    def force(self) -> tuple[int, ...]:
        """The tokens that must follow now, spelled as the tokenizer spells them; they are consumed with this call.

        Where the grammar is complete and cannot go on, that is the token that ends the answer.

        Raises:
            ConstraintError: the grammar cannot be followed.
        """
        if self._has_ended:
            return ()
        forced = tuple(self._timed(self._matcher.compute_ff_tokens)[:MAX_FORCED])
        self.consume_all(forced)
        if self._matcher.is_stopped():
            self._check()
            forced += (self._grammar.stop_token_ids[0],)
            self._end()
        return forced

    def consume_all(self, token_ids: tuple[int, ...]) -> None:
        """These tokens stand in the answer. A stop token ends it, whatever follows."""
        ends = [index for index, token_id in enumerate(token_ids) if token_id in self._grammar.stop_token_ids]
        text = token_ids[: ends[0]] if ends else token_ids
        if text and not self._timed(self._matcher.consume_tokens, list(text)):
            if FORBIDDEN not in self._matcher.get_error():
                self._check()
            raise ConstraintError(f"The grammar does not allow what was generated: {first_line(self._matcher)}")
        if ends and not self._has_ended:
            self._end()

    def _end(self) -> None:
        self._has_ended = True
        self._grammar.note_end(slow=False)

    def _check(self) -> None:
        if self._matcher.is_error():
            message = f"The grammar cannot be followed any further: {first_line(self._matcher)}"
            raise ConstraintError(message, own_fault=True)

    def _timed(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the library; its time is that of the processor, so that a busy machine is nobody's fault."""
        begin = time.thread_time()
        result = guarded(call, *args, **kwargs)
        self._seconds_left -= time.thread_time() - begin
        if self._seconds_left < 0:
            if not self._is_given_up:
                self._is_given_up = True
                self._grammar.note_end(slow=True)
            raise ConstraintError(SLOW_ANSWER)
        return result


def guarded(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call the library.

    Raises:
        ConstraintError: it panicked.
    """
    try:
        return without_panic(call, *args, **kwargs)
    except PanicError as error:
        raise ConstraintError("The grammar could not be followed.") from error


def first_line(matcher: llguidance.LLMatcher) -> str:
    """What is wrong, without the parser's own state."""
    return shorten(matcher.get_error())


def shorten(error: str) -> str:
    """The lines of an error of the library that say something, without the parser's state and with an end."""
    if error.startswith("NoExtension"):
        return "nothing satisfies it"
    if error.startswith("oneOf constraints"):
        return "more than one branch of a 'oneOf' may hold at once; use 'anyOf'"
    if "Too many items" in error:
        return "too much follows from it; see that it comes to an end, or simplify it"
    error = LONG_QUOTE.sub(r'\1…"', error)
    error = NOT_ENFORCED.sub(r"what \1 says cannot be enforced here; leave that out", error)
    lines = [line.strip() for line in error.replace("<non-verbose/>", "").splitlines() if line.strip()]
    causes = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return " ".join([*lines[:1], *causes])[:300]
