"""Quantile tables of three published traces: prompt lengths, answer lengths and gaps between arrivals.

Measured on, and to be cited as:

- Azure LLM inference traces 2023, conversation and code (CC BY 4.0): Patel et al., "Splitwise: Efficient Generative LLM
  Inference Using Phase Splitting", ISCA 2024.
- Mooncake's conversation trace (Apache-2.0): Qin et al., "Mooncake: A KVCache-centric Disaggregated Architecture for
  LLM Serving", FAST 2025.

The traces themselves are not part of the project. Prompt and answer lengths are drawn independently: their rank
correlations are 0.07, -0.02 and 0.07.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

# Probabilities of the columns of the length tables below; dense where the tails bend.
LENGTH_SHARES = (
    0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7,
    0.75, 0.8, 0.85, 0.875, 0.9, 0.925, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.995, 0.9975, 0.999, 0.9995, 1.0,
)  # fmt: skip
GAP_SHARES = (
    0.0, 0.05, 0.1, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.97, 0.98, 0.99,
    0.995, 0.9975, 0.9985, 0.999, 0.9995, 0.9999, 1.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution given by its quantiles, with straight lines between them (or between their logarithms).

    Args:
        shares: probabilities, from 0 to 1.
        values: the quantiles there, never falling.
        logarithmic: interpolate the logarithms; all values are above 0 then.
    """

    shares: tuple[float, ...]
    values: tuple[float, ...]
    logarithmic: bool = False

    def at(self, share: float) -> float:
        """The quantile at a probability below 1."""
        right = bisect_right(self.shares, share)
        low, high = self.shares[right - 1], self.shares[right]
        weight = (share - low) / (high - low)
        below, above = self.values[right - 1], self.values[right]
        return below * (above / below) ** weight if self.logarithmic else below + weight * (above - below)

    @property
    def mean(self) -> float:
        """The mean of what `at` gives for evenly spread probabilities."""
        total = 0.0
        for index in range(len(self.shares) - 1):
            below, above = self.values[index], self.values[index + 1]
            share = self.shares[index + 1] - self.shares[index]
            even = below == above or not self.logarithmic
            total += share * ((below + above) / 2 if even else (above - below) / math.log(above / below))
        return total


@dataclass(frozen=True, slots=True)
class Fit:
    """What is known of one trace.

    Attributes:
        title: its name, for tables.
        prompts: lengths of the prompts, in tokens.
        answers: lengths of the answers, in tokens.
        requests_per_second: its mean rate.
        gap_cv: coefficient of variation of its gaps: they are drawn from a Gamma distribution.
        gaps: the gaps' own distribution where no Gamma comes near it; only its shape is used.
        prefix_block_tokens: tokens of the blocks in which prompts repeat the beginnings of earlier ones; 0: they don't.
    """

    title: str
    prompts: Quantiles
    answers: Quantiles
    requests_per_second: float
    gap_cv: float
    gaps: Quantiles | None = None
    prefix_block_tokens: int = 0


def _lengths(*values: float) -> Quantiles:
    return Quantiles(LENGTH_SHARES, values)


FITS = {
    "azure-conversation": Fit(
        title="Azure conversation, fitted",
        prompts=_lengths(
            2, 17, 29, 91, 161, 181, 200, 207, 372, 387, 396, 403, 414, 703, 984, 1020, 1045, 1071, 1097, 1130, 1189,
            1315, 1876, 2309, 2734, 4075, 4083, 4086, 4090, 4098, 4110, 4142, 4831, 5404, 6179, 6570, 14050,
        ),
        answers=_lengths(
            7, 14, 16, 24, 32, 41, 48, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384, 395, 400, 411, 416,
            424, 430, 451, 468, 509, 540, 571, 601, 643, 719, 954, 1000, 1000,
        ),
        requests_per_second=5.53,
        gap_cv=1.09,
    ),
    "azure-code": Fit(
        title="Azure code, fitted",
        prompts=_lengths(
            3, 12, 17, 35, 50, 75, 102, 147, 232, 386, 578, 770, 939, 1075, 1261, 1469, 1690, 1909, 2164, 2433, 2744,
            3192, 3920, 4434, 5188, 6097, 7303, 7430, 7435, 7436, 7436, 7436, 7436, 7436, 7437, 7437, 7437,
        ),
        answers=_lengths(
            6, 6, 6, 6, 6, 6, 6, 7, 7, 8, 9, 9, 10, 11, 12, 13, 14, 16, 18, 20, 24, 29, 39, 46, 55, 69, 90, 105, 128,
            171, 201, 251, 359, 599, 825, 885, 1899,
        ),
        requests_per_second=2.57,
        gap_cv=13.2,
        # A Gamma of this variation puts ten times too many arrivals into its busiest seconds.
        gaps=Quantiles(
            GAP_SHARES,
            (
                5.96e-06, 8.8e-05, 0.000209, 0.00118, 0.00208, 0.00329, 0.00534, 0.0151, 0.0382, 0.0638, 0.095, 0.1,
                0.104, 0.16, 0.199, 0.273, 0.401, 0.597, 0.799, 2.21, 9.98, 38.4, 50.4, 79.2, 132.0, 179.0, 217.0,
            ),
            logarithmic=True,
        ),
    ),
    "mooncake": Fit(
        title="Mooncake conversation, fitted",
        prompts=_lengths(
            891, 893, 894, 896, 897, 901, 913, 964, 1261, 1662, 2306, 3263, 4251, 4993, 5870, 6909, 8187, 9570, 11238,
            13196, 15367, 17869, 21464, 24393, 27367, 31519, 39550, 44613, 52215, 66449, 73850, 85400, 100810, 117789,
            121301, 122891, 126195,
        ),
        answers=_lengths(
            1, 1, 3, 3, 5, 10, 17, 24, 46, 100, 156, 213, 256, 291, 322, 350, 375, 399, 423, 447, 472, 504, 543, 566,
            597, 639, 698, 738, 800, 892, 967, 1119, 1568, 1998, 2000, 2000, 2000,
        ),
        requests_per_second=3.4,
        # Its clock ticks every 3 s, so its gaps say nothing; counts over 10 s and 60 s vary as with this one.
        gap_cv=1.5,
        prefix_block_tokens=512,
    ),
}  # fmt: skip
