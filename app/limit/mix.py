"""The file that mixes classes of work: TOML, a table `[[class]]` for each, read by the rules of config.toml.

[[class]]
name = "assistant"
share = 3
workload = "azure-conversation"     # or prompt_tokens and output_tokens: a number, or [shortest, longest]
factor = 8
ttft_p95_seconds = 1.0

[[class]]
name = "summaries"
share = 1
prompt_tokens = [400, 1200]
output_tokens = 60
e2e_p95_seconds = 30
background = true                   # asked for with service_tier flex
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import BeforeValidator

from app.config import parse_toml, read_section
from app.config_schema import Section, setting
from app.limit.lengths import Fitted, Ranges
from app.limit.load import WorkClass
from engine.config import SloTargets
from engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

WORKLOADS: Final = ("azure-conversation", "azure-code", "mooncake")
MAX_NAME_LENGTH: Final = 60
MAX_TOKENS: Final = 1 << 20
TABLE: Final = "class"


def _check_name(value: Any) -> Any:
    if not isinstance(value, str) or not value.strip() or not value.isprintable() or len(value) > MAX_NAME_LENGTH:
        raise ValueError(f"a text of at most {MAX_NAME_LENGTH} characters that can be shown, not empty")
    return value.strip()


def _check_workload(value: Any) -> Any:
    if value is not None and value not in WORKLOADS:
        raise ValueError(", ".join(WORKLOADS))
    return value


def _check_tokens(value: Any) -> Any:
    """A number of tokens, or the shortest and the longest, as both."""
    pair = value if isinstance(value, list) else [value, value]
    if len(pair) != 2 or any(type(one) is not int or not 1 <= one <= MAX_TOKENS for one in pair):
        raise ValueError(TOKENS)
    if pair[0] > pair[1]:
        raise ValueError(f"the shortest first: [{pair[1]}, {pair[0]}]")
    return tuple(pair)


TOKENS: Final = f"a whole number of tokens from 1 to {MAX_TOKENS}, or two: [shortest, longest]"
Name = Annotated[str, BeforeValidator(_check_name)]
WorkloadName = Annotated[str | None, BeforeValidator(_check_workload)]
# Its default is a list like those of the settings that are one; empty is absent.
Tokens = Annotated[tuple[int, ...], BeforeValidator(_check_tokens)]


def _seconds(of: str) -> Any:
    return setting(None, "seconds", f"95 % of {of}", absent="none", gt=0, le=86400)


class ClassTable(Section):
    """One `[[class]]`."""

    name: Name = setting(..., "", "what its figures are called", takes="a text that can be shown, not empty")
    share: float = setting(..., "", "of all requests, in proportion to the others'", gt=0, le=10_000)
    workload: WorkloadName = setting(None, "", "whose lengths it has", takes=", ".join(WORKLOADS))
    prompt_tokens: Tokens = setting((), "tokens", "of its prompts", takes=TOKENS)
    output_tokens: Tokens = setting((), "tokens", "of its answers", takes=TOKENS)
    factor: float = setting(1.0, "", "its lengths are divided by it", gt=0, le=10_000)
    ttft_p95_seconds: float | None = _seconds("first tokens")
    itl_p95_seconds: float | None = _seconds("gaps between tokens")
    e2e_p95_seconds: float | None = _seconds("whole answers")
    background: bool = setting(False, "", "asked for with service_tier flex")

    def work_class(self, default: SloTargets) -> WorkClass:
        """It as a class of work; where it says nothing of targets it has the default's."""
        own = SloTargets(self.ttft_p95_seconds, self.itl_p95_seconds, self.e2e_p95_seconds)
        says = self.model_fields_set & {"ttft_p95_seconds", "itl_p95_seconds", "e2e_p95_seconds"}
        lengths: Fitted | Ranges
        if self.workload is None:
            (low, high), (shortest, longest) = self.prompt_tokens, self.output_tokens
            lengths = Ranges((low, high), (shortest, longest))
        else:
            lengths = Fitted(self.workload)
        return WorkClass(self.name, self.share, lengths, own if says else default, self.factor, self.background)


def read_mix(path: Path, default: SloTargets) -> tuple[WorkClass, ...]:
    """The classes of a file.

    Raises:
        ConfigError: the file cannot be read, or says something that cannot be.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The mix {path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}.") from None
    return parse_mix(text, str(path), default)


def parse_mix(text: str, source: str, default: SloTargets) -> tuple[WorkClass, ...]:
    """The classes of a text.

    Args:
        source: what messages call it.

    Raises:
        ConfigError: it says something that cannot be.
    """
    document = parse_toml(text, source)
    others = [name for name in document if name != TABLE]
    if others:
        raise ConfigError(
            f"{source}: {others[0]!r} is unknown; a mix has tables [[{TABLE}]] alone, one for each class."
        )
    tables = document.get(TABLE)
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{source} has no [[{TABLE}]], in two brackets; write one for each class of work.")
    classes = [_read_class(number, table, source) for number, table in enumerate(tables, 1)]
    for name, times in Counter([one.name for one in classes]).items():
        if times > 1:
            raise ConfigError(f"{source}: {times} classes are called {name!r}; give each a name of its own.")
    return tuple([one.work_class(default) for one in classes])


def _read_class(number: int, table: Mapping[str, Any], source: str) -> ClassTable:
    """One class; messages call it by its name, where it has one that can be shown."""
    try:
        where = f'{TABLE} "{_check_name(table.get("name"))}"'
    except ValueError:
        where = f"{TABLE} number {number}"
    found = read_section(ClassTable, where, table, source)
    has = [bool(found.workload), bool(found.prompt_tokens), bool(found.output_tokens)]
    if has not in ([True, False, False], [False, True, True]):
        raise ConfigError(f"{source}: [{where}] needs either workload, or prompt_tokens and output_tokens.")
    return found
