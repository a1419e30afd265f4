"""Texts of so many tokens that share nothing with those of another run, so that no cache of prompts flatters it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from engine.workload import Workload

# Short and frequent, so that with the space before it each is one token in nearly every vocabulary.
TEXT: Final = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they "
    "which one you were all her she there would their we him been has when who will no more if out so up said "
    "what its about than into them can only other time new some could these two may first then do any like my "
    "now over such our man me even most made after also did many off before must well back through years much "
    "where your way down should because long each just state those people too mr how little good world make "
    "very year still see work life here get both between being under never day same another know while last "
    "might great old"
)


def make_text(num_words: int, name: str) -> str:
    """Words without sense, always the same for a name; the first few already tell one name from another."""
    return " ".join(random.Random(f"text {name}").choices(TEXT.split(), k=num_words))  # noqa: S311


@dataclass(frozen=True, slots=True)
class Spelling:
    """How many tokens a server makes of these words, as its `usage` told of two prompts.

    Attributes:
        tokens_per_word: each further word.
        extra_tokens: what comes on top of every prompt, such as a chat's template.
    """

    tokens_per_word: float
    extra_tokens: float

    def num_words(self, num_tokens: int) -> int:
        """Words that make about so many tokens, one at least."""
        return max(1, round((num_tokens - self.extra_tokens) / self.tokens_per_word))

    def prompt(self, workload: Workload, index: int, salt: str) -> str:
        """The prompt of one item, of about as many tokens as it has; blocks of equal names are equal texts."""
        item, size = workload.items[index], workload.prefix_block_tokens
        num_words = self.num_words(item.num_prompt_tokens)
        if not item.prefix_ids or not size:
            return make_text(num_words, f"{salt} {index}")
        block = max(1, round(size / self.tokens_per_word))
        words: list[str] = []
        for name in item.prefix_ids[: -(-num_words // block)]:
            words += make_text(block, f"{salt} block {name}").split()
        if len(words) < num_words:
            words += make_text(num_words - len(words), f"{salt} {index}").split()
        return " ".join(words[:num_words])
