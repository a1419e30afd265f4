"""Request fields that other servers know and this one does not: accepted at rest, refused when they ask for something.

Silently ignoring such a field would give an answer that is not what was asked for.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from app.api.bodies import ChatBody
from engine.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from app.api.schemas import Body

# Field to the values that ask for nothing. `null` is at rest for every field and is not listed.
_SHARED: Final[dict[str, tuple[Any, ...]]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
CHAT: Final[dict[str, tuple[Any, ...]]] = _SHARED | {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
COMPLETION: Final[dict[str, tuple[Any, ...]]] = _SHARED | {
    "add_special_tokens": (True,),
    "prompt_embeds": (),
    "suffix": ("",),
}

# What would change a prompt's tokens; a whole chat may be sent to be counted, and its other fields do not matter.
TOKENIZE_CHAT: Final[dict[str, tuple[Any, ...]]] = {
    name: CHAT[name]
    for name in (
        "add_special_tokens", "chat_template", "continue_final_message", "documents", "functions",
        "truncate_prompt_tokens",
    )
}  # fmt: skip
TOKENIZE_TEXT: Final[dict[str, tuple[Any, ...]]] = {"truncate_prompt_tokens": ()}


# Taken from whoever sends them, and nothing is done with them.
_WITHOUT_EFFECT: Final = ("user", "metadata")


def chat_fields_at_rest(body: type[Body], own: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    """What a body that becomes a chat cannot say of a chat, and fields of its `own`: each with its values at rest."""
    taken = {name: _at_rest(field.default, name) for name, field in ChatBody.model_fields.items()}
    passing = {*body.model_fields, *_WITHOUT_EFFECT}
    return {name: rest for name, rest in ({**CHAT, **taken, "store": (False,), **own}).items() if name not in passing}


def _at_rest(default: object, name: str) -> tuple[Any, ...]:
    if default == ():
        return ({},) if name == "logit_bias" else ([],)
    return () if default is None else (default,)


def _same(value: object, rest: object) -> bool:
    # 1 == True in Python, but `"n": true` and `"logprobs": 0` are not the values at rest.
    return isinstance(value, bool) == isinstance(rest, bool) and value == rest


def refuse_unsupported(
    body: Mapping[str, Any], at_rest: Mapping[str, tuple[Any, ...]], called: Mapping[str, str] | None = None
) -> None:
    """Raise `InvalidRequestError` for the first field of `body` that asks for an unsupported feature.

    Args:
        called: fields of other routes, and the field that says the same on this one.
    """
    for name, value in body.items():
        if value is None or name not in at_rest or any(_same(value, rest) for rest in at_rest[name]):
            continue
        accepted = " or ".join(json.dumps(rest) for rest in at_rest[name])
        hint = f"Leave it out or set it to {accepted}." if accepted else "Leave it out."
        if called and name in called:
            hint = f"On this route it is {called[name]!r}."
        raise InvalidRequestError(f"{name!r} is not supported here. {hint}", param=name, code="unsupported_parameter")
