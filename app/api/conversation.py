"""A chat's body as a prompt: messages, tools and thinking, and who reads the answer for calls and thoughts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.api.messages import parse_messages
from app.api.parts import ChainedReader
from app.api.reasoning import PAIRS, ThinkingReader, parse_template_options, thinking_before
from app.api.tool_calls import MARKS, CallReader, HeldReader
from app.api.tools import id_maker, parse_tooling, tell_tools
from engine.grammar.spec import Thinking
from engine.grammar.tool_call import tool_call_spec
from engine.handle import ChatPrompt

if TYPE_CHECKING:
    from app.api.bodies import ChatBody
    from app.api.parts import Reader
    from app.api.tools import Tooling
    from engine.engine import Engine
    from engine.grammar.spec import GrammarSpec
    from engine.loaded import ChatTemplateLike, TokenizerLike


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat asks the model, and how its answer is read.

    Attributes:
        shown_token_ids: control tokens that mark thinking or calls: whoever reads the answer must see them.
        grammar: of calls that were demanded.
        thinking: what may come before an answer that a grammar binds.
    """

    prompt: ChatPrompt
    template: ChatTemplateLike
    tooling: Tooling
    shown_token_ids: frozenset[int]
    grammar: GrammarSpec | None
    thinking: Thinking | None

    def make_reader(self) -> Reader:
        """One that tells a choice's thinking, text and calls apart."""
        begun = self.thinking is not None and not self.thinking.opening
        thinking = ThinkingReader(self.thinking.closing if self.thinking is not None and begun else None)
        tooling = self.tooling
        if tooling.mode == "none":
            return thinking
        make_id = id_maker(self.template)
        if tooling.is_forced:
            return ChainedReader(thinking, HeldReader(make_id=make_id))
        names = frozenset(tool.name for tool in tooling.tools)
        calls = CallReader(names, make_id=make_id, parallel=tooling.parallel is not False)
        return ChainedReader(thinking, calls)


def read_conversation(engine: Engine, template: ChatTemplateLike, body: ChatBody) -> Conversation:
    """Check everything of a chat's body that makes up its prompt.

    Raises:
        RelevoError: it cannot be served as it stands.
    """
    messages = parse_messages(body.messages, engine.model.context_length)
    tooling = parse_tooling(body.tools, body.tool_choice, body.parallel_tool_calls)
    options = parse_template_options(body.chat_template_kwargs, body.reasoning_effort, template)
    told, tools = tell_tools(messages, tooling, template)
    before = thinking_before(template, options)
    return Conversation(
        ChatPrompt(told, options={**tools, **options}),
        template,
        tooling,
        _shown(engine.tokenizer, tooling),
        _grammar(tooling),
        None if before is None else Thinking(*before),
    )


def _grammar(tooling: Tooling) -> GrammarSpec | None:
    """Of the calls that are demanded. Several are a list, which small models find hard to end: only on request."""
    if not tooling.is_forced:
        return None
    several = tooling.mode == "required" and tooling.parallel is True
    return tool_call_spec(tooling.definitions, parallel=several, indices=[tool.index for tool in tooling.tools])


def _shown(tokenizer: TokenizerLike, tooling: Tooling) -> frozenset[int]:
    marks: Any = [*PAIRS, *PAIRS.values(), *(MARKS if tooling.mode == "auto" else ())]
    found = [tokenizer.control_id(mark) for mark in marks]
    return frozenset(token_id for token_id in found if token_id is not None)
