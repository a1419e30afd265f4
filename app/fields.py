"""Fields that operators send, as JSON or by a form: read, and refused, in the same way on every route."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from app.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

MAX_TOLD: Final = 8  # of what is wrong with one body
MAX_DIGITS: Final = 19


class WrongFieldsError(ApiError):
    """A body that cannot be.

    Args:
        wrong: by field, what is wrong with it, as the end of a sentence.

    Attributes:
        fields: the same as whole sentences.
    """

    def __init__(self, wrong: Mapping[str, str]) -> None:
        self.fields = {name: f"'{name}' {message}" for name, message in wrong.items()}
        super().__init__(422, " ".join(self.fields.values()), param=next(iter(wrong)), code="invalid_value")

    @classmethod
    def of(
        cls, error: ValidationError, known: Iterable[str], say: Callable[[str, ErrorDetails], str]
    ) -> WrongFieldsError:
        """What a model found.

        Args:
            known: the fields there are.
            say: from a field and what was found to the end of a sentence.
        """
        wrong = {}
        for one in error.errors(include_url=False)[:MAX_TOLD]:
            name = str(one["loc"][0])
            is_unknown = one["type"] == "extra_forbidden"
            wrong[name] = f"is unknown; there are {', '.join(known)}." if is_unknown else say(name, one)
        return cls(wrong)


def whole_or_text(text: str) -> int | str | None:
    """A whole number of a form; what is none is left as it is, to be refused in the same words. Nothing is absent."""
    text = text.strip()
    return int(text) if is_whole(text) else text or None


def is_whole(text: str) -> bool:
    """Whether it is a whole number in digits, and not too many of them."""
    return text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS
