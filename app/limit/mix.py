"""The file that mixes classes of work: TOML, a table `[[class]]` for each.

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

import tomllib
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from app.limit.lengths import Fitted, Ranges
from app.limit.load import WorkClass
from engine.config import SloTargets
from engine.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any, Self


def _as_range(value: Any) -> Any:
    return [value, value] if isinstance(value, int) else value


Range = Annotated[tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]], BeforeValidator(_as_range)]
Seconds = Annotated[float, Field(gt=0)]


class ClassTable(BaseModel):
    """One `[[class]]`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    share: float = Field(gt=0)
    workload: Literal["azure-conversation", "azure-code", "mooncake"] | None = None
    prompt_tokens: Range | None = None
    output_tokens: Range | None = None
    factor: float = Field(1.0, gt=0)
    ttft_p95_seconds: Seconds | None = None
    itl_p95_seconds: Seconds | None = None
    e2e_p95_seconds: Seconds | None = None
    background: bool = False

    @model_validator(mode="after")
    def _has_one_kind_of_lengths(self) -> Self:
        ranges = (self.prompt_tokens, self.output_tokens)
        if (self.workload is None) != all(ranges) or any(ranges) != all(ranges):
            raise ValueError("give either workload, or prompt_tokens and output_tokens")
        for low, high in filter(None, ranges):
            if low > high:
                raise ValueError(f"[{low}, {high}] is no range: the shortest comes first")
        return self

    def work_class(self, default: SloTargets) -> WorkClass:
        """It as a class of work; without any target it has the default's."""
        own = SloTargets(self.ttft_p95_seconds, self.itl_p95_seconds, self.e2e_p95_seconds)
        has_own = own != SloTargets(None, None, None)
        if self.workload is None:
            assert self.prompt_tokens is not None
            assert self.output_tokens is not None
            lengths: Fitted | Ranges = Ranges(self.prompt_tokens, self.output_tokens)
        else:
            lengths = Fitted(self.workload)
        return WorkClass(self.name, self.share, lengths, own if has_own else default, self.factor, self.background)


class MixFile(BaseModel):
    """The whole file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    classes: list[ClassTable] = Field(alias="class", min_length=1)


def read_mix(path: Path, default: SloTargets) -> tuple[WorkClass, ...]:
    """The classes of a file.

    Raises:
        ConfigError: the file cannot be read, or says something that cannot be.
    """
    try:
        tables = MixFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"The mix {path} cannot be read: {error.strerror or error}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}.") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: {place}: {first['msg'].removeprefix('Value error, ')}.") from None
    return tuple([table.work_class(default) for table in tables.classes])
