"""The settings that are tuned, and in which steps each can be turned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from app.limit.runs import Run

Value = int | str
Values = dict[str, Value]

SEATS: Final = "max_num_seqs"
BUDGET: Final = "max_num_batched_tokens"
CHUNK: Final = "long_prefill_token_threshold"
POLICY: Final = "policy"
ADMISSION: Final = "admission"
DRAFTS: Final = "num_speculative_tokens"
# What is tuned where nothing is named, in the order in which it is tried.
USUAL: Final = (SEATS, BUDGET, CHUNK, POLICY, ADMISSION)
# Prompts here are words without sense, and what drafts gain is a matter of the texts: only where they are asked for.
TUNABLE: Final = (*USUAL, DRAFTS)
# A part of a prompt smaller than this is mostly the cost of the step.
LEAST_CHUNK: Final = 16


@dataclass(frozen=True, slots=True)
class Control:
    """One setting.

    Attributes:
        span: the lowest and the highest value; `None` where it is one of `choices`.
        budget: tokens of a step, where they are not tuned too.
    """

    name: str
    span: tuple[int, int] | None = None
    choices: tuple[str, ...] = ()
    budget: int = 0

    def ways(self, values: Values, step: float) -> list[list[Value]]:
        """In which ways it can be turned: each the values that come one after the other, the nearest first.

        Args:
            values: of all controls, from which it starts.
            step: the ratio of neighbours.
        """
        now = values[self.name]
        if self.span is None:
            return [[choice] for choice in self.choices if choice != now]
        least, most = self.span
        start = int(now)
        if self.name == CHUNK:
            # 0 leaves a prompt the whole budget; as much as that or more means the same.
            top = int(values.get(BUDGET, self.budget))
            up = _ladder(start, top, step) if start else []
            down = _ladder(min(start or top, top), min(LEAST_CHUNK, top), 1 / step)
            found = [[value if value < top else 0 for value in up], [value for value in down if value < top]]
        else:
            found = [_ladder(start, most, step), _ladder(start, least, 1 / step)]
        return [[*way] for way in found if way]

    def idle(self, runs: Sequence[Run]) -> str | None:
        """Why it makes no difference to turn it, by the runs of the present settings; `None` where it may make one."""
        if self.name == ADMISSION and all(run.preemptions == 0 for run in runs):
            return "nobody was preempted, so there is nothing that another admission could spare"
        if self.name == CHUNK:
            longest = max([seen.prompt_tokens for run in runs for seen in run.seen], default=0)
            if longest <= LEAST_CHUNK:
                return f"no prompt is longer than {LEAST_CHUNK} tokens"
        return None


def controls_of(view: Mapping[str, Any], names: Sequence[str]) -> list[Control]:
    """The named controls, with what the server says that they can be.

    Args:
        view: what `GET /admin/config` answers.

    Raises:
        ConfigError: the server has no such control.
    """
    found = []
    for name in names:
        if name in view["ranges"]:
            least, most = view["ranges"][name]
            found.append(Control(name, (int(least), int(most)), budget=int(view["effective"][BUDGET])))
        elif name in view["choices"]:
            found.append(Control(name, None, tuple([str(choice) for choice in view["choices"][name]])))
        else:
            raise ConfigError(f"This server has no control {name}; leave it out of --tune.")
    return found


def parse_names(word: str) -> tuple[str, ...]:
    """The controls of `--tune`, in the order in which they are tried.

    Raises:
        ConfigError: one of them is none.
    """
    names = [name.strip().replace("-", "_") for name in word.split(",") if name.strip()]
    for name in names:
        if name not in TUNABLE:
            raise ConfigError(f"--tune {name} is no control; there are {', '.join(TUNABLE)}.")
    return tuple([name for name in TUNABLE if name in names]) or USUAL


def changes_of(values: Values, before: Values) -> dict[str, list[Value]]:
    """What differs: name to the old and the new value."""
    return {name: [before[name], value] for name, value in values.items() if before[name] != value}


def _ladder(start: int, end: int, step: float) -> list[int]:
    """Whole numbers behind `start` up to `end`, each about `step` times the last; none if `end` lies the other way."""
    found: list[int] = []
    value = start
    while (end - value) * (step - 1) > 0:
        turned = round(value * step)
        value = min(end, max(value + 1, turned)) if step > 1 else max(end, min(value - 1, turned))
        found.append(value)
    return found
