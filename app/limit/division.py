"""By what lengths are divided where nobody has said it: so that runs of enough requests fit into the time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from app.compare.load import FACTORS

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.limit.load import Source

# Answers that are shorter on average than this have hardly a gap.
LEAST_ANSWER_TOKENS: Final = 4.0


def choose_division(source: Source, wanted: int, enough: int, fitting: Callable[[float], int]) -> float:
    """The least factor with which the wanted requests fit, or with longer ones at least enough of them.

    Where answers would have hardly a gap with it, the largest with which they have some is taken, if enough fit.

    Args:
        source: knows the context.
        fitting: how many requests a run may have whose lengths are divided by a factor, with which it rises.
    """
    least = source.least_factor()
    most = max(least, source.mean_answer(1.0) / LEAST_ANSWER_TOKENS)
    factors = sorted({least, *(one for one in FACTORS if one > least)})
    with_gaps = [one for one in factors if one <= most]
    for some, number in ((with_gaps, wanted), (with_gaps[-1:], enough), (factors, enough)):
        found = next((one for one in some if fitting(one) >= number), None)
        if found is not None:
            return found
    return factors[-1]


def division_words(source: Source, factor: float, seconds: int) -> str:
    """That lengths were divided, where they need not have been.

    Args:
        seconds: that a search without it would take.
    """
    mean, least = source.mean_answer(factor), source.least_factor()
    short = f" Their answers have {mean:.1f} tokens on average, hardly a gap." if mean < LEAST_ANSWER_TOKENS else ""
    return (
        f"Lengths were divided by {factor:g} for runs to fit into the time: the limit is of such requests.{short} For "
        f"lengths that only the context bounds: --factor {least:g} --duration {seconds}."
    )
