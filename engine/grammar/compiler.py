"""Compiles grammars off the event loop and remembers them."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import llguidance
import trio

from engine.errors import ConstraintError, InvalidRequestError
from engine.grammar.matcher import TOO_SLOW, CompiledGrammar, Vocabulary, first_line, guarded, parser_limits, shorten
from engine.grammar.spec import literal
from engine.grammar.trial import try_it

if TYPE_CHECKING:
    from engine.grammar.spec import GrammarSpec, Thinking
    from engine.loaded import TokenizerLike

# A compiled grammar takes some kilobytes; one that was made to be large, some megabytes.
MAX_REMEMBERED: Final = 64
# Where llguidance found an error: line and column.
PLACE: Final = re.compile(r"at (?P<line>\d{1,9})\(\d+\): (?:failed to compile JSON schema: )?")
# So many are tried at once; those that wait for their turn hold up no plain ones.
MAX_TRIED: Final = 2
DIGITS: Final = {"d": "[0-9]", "D": "[^0-9]"}


class GrammarCompiler:
    """Every grammar is compiled once, by its exact text; what was refused is refused again from memory.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._vocabulary = Vocabulary(tokenizer)
        self._tokenizer = tokenizer
        self._turns = trio.CapacityLimiter(MAX_TRIED)
        self._known: OrderedDict[GrammarSpec, CompiledGrammar | str] = OrderedDict()
        self._underway: dict[GrammarSpec, trio.Event] = {}

    def knows(self, spec: GrammarSpec) -> bool:
        """Whether `compile` answers from memory."""
        return _key(spec) in self._known

    def _find(self, spec: GrammarSpec) -> CompiledGrammar | None:
        key = _key(spec)
        found = self._known.get(key)
        if found is None:
            return None
        self._known.move_to_end(key)
        if isinstance(found, str):
            raise _refusal(spec, found)
        if found.is_too_slow:
            raise InvalidRequestError(TOO_SLOW, param=spec.param)
        return found

    async def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """A grammar, ready to be followed. Several requests with the same one wait for the same compilation.

        Raises:
            InvalidRequestError: it says nothing, contradicts itself, is not supported, or is too large.
            UnavailableError: it has to be tried first, and that cannot be done now.
        """
        if not self._vocabulary.stop_token_ids:
            raise _refusal(spec, "this model names no token that ends an answer")
        key = _key(spec)
        while key in self._underway:
            await self._underway[key].wait()
        found = self._find(spec)
        if found is not None:
            return found
        self._underway[key] = trio.Event()
        try:
            result = await self._compile(spec)
        finally:
            self._underway.pop(key).set()
        self._known[key] = result
        if len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)
        if isinstance(result, str):
            raise _refusal(spec, result)
        return result

    async def _compile(self, spec: GrammarSpec) -> CompiledGrammar | str:
        """The grammar, or what is wrong with it."""
        try:
            source = await trio.to_thread.run_sync(self._source, spec)
        except (ConstraintError, RecursionError) as error:
            return shorten(str(error))
        if not spec.plain:
            async with self._turns:
                fault, source = await try_it(source)
            if fault:
                return fault
        return await trio.to_thread.run_sync(self._build, source, spec.plain)

    def _source(self, spec: GrammarSpec) -> str:
        """The list of grammars that llguidance takes, but that one may be GBNF; the first is the one to begin with."""
        match spec.kind:
            case "schema":
                body: dict[str, Any] = {"json_schema": json.loads(spec.text)}
            case "regex":
                regex = _plain_digits(_unanchored(spec.text))
                body = json.loads(guarded(llguidance.LLMatcher.grammar_from_regex, regex))["grammars"][0]
            case "lark":
                body = {"lark_grammar": spec.text}
        if spec.thinking is None:
            return json.dumps({"grammars": [body]})
        return json.dumps({"grammars": [{"lark_grammar": self._after(spec.thinking)}, {**body, "name": "answer"}]})

    def _after(self, thinking: Thinking) -> str:
        """The grammar `@answer` behind a thought. A mark is a control token in some vocabularies, text in others."""
        opening, closing = map(self._tokenizer.control_id, (thinking.opening, thinking.closing))
        first = literal(thinking.opening) if opening is None else f"<[{opening}]>"
        before = f"({first} thought SPACE?)?" if thinking.opening else "thought SPACE?"
        if closing is None:
            thought = f"thought[suffix={literal(thinking.closing)}]: /(?s:.*)/"
        else:
            thought = f"thought: TEXT <[{closing}]>\nTEXT: /(?s:.*)/"
        return f"start: {before} @answer\nSPACE: /\\n{{1,2}}/\n{thought}"

    def _build(self, source: str, plain: bool) -> CompiledGrammar | str:
        """Compile, and compute the first mask here, where it holds up nobody."""
        try:
            matcher = guarded(
                llguidance.LLMatcher, self._vocabulary.compiled, source, log_level=0, limits=parser_limits()
            )
            grammar = CompiledGrammar(matcher, self._vocabulary.stop_token_ids, plain=plain)
            if not matcher.is_error():
                grammar.begin(()).allowed()
        except ConstraintError as error:
            return str(error)
        return first_line(matcher) if matcher.is_error() else grammar


def _key(spec: GrammarSpec) -> GrammarSpec:
    """The grammar without the name of the field it came in."""
    return replace(spec, param="", places=())


def _refusal(spec: GrammarSpec, why: str) -> InvalidRequestError:
    """Says which field it is; a place only in a text that the caller knows."""
    param, place = spec.param, PLACE.match(why)
    if place and (spec.places or spec.kind != "lark" or "::=" in spec.text):
        why = why[place.end() :]
        param = dict(enumerate(spec.places, 1)).get(int(place["line"]), param)
    return InvalidRequestError(f"'{param}' cannot be used: {why.rstrip('.')}.", param=param)


def _plain_digits(regex: str) -> str:
    r"""With `\d` for the ten digits, as a `pattern` of JSON Schema has it; Unicode has hundreds, which nobody means."""
    return re.sub(r"\\(.)", lambda escape: DIGITS.get(escape[1], escape[0]), regex, flags=re.DOTALL)


def _unanchored(regex: str) -> str:
    """Without the anchors around it, which llguidance does not know: the whole answer has to match anyway."""
    regex = regex.removeprefix("^")
    num_escapes = len(regex[:-1]) - len(regex[:-1].rstrip("\\"))
    return regex[:-1] if regex.endswith("$") and num_escapes % 2 == 0 else regex
