"""Where settings come from: flag, then environment variable, then file, then default.

Nothing else in `app` reads the environment.
"""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from pydantic import SecretStr, ValidationError

from app.config_schema import KeyLimits, Section, Settings, is_loopback
from app.config_types import ApiKey
from engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pydantic.fields import FieldInfo

__all__ = [
    "ApiKey",
    "Key",
    "KeyLimits",
    "Settings",
    "environment",
    "is_loopback",
    "keys",
    "let_threads_sleep",
    "load_settings",
    "named_keys",
    "parse_toml",
    "read_section",
    "state_dir",
]

AnySection = TypeVar("AnySection", bound=Section)

_PREFIX = "RELEVO_"
# Above sections with a name of the user's own: a flag or variable would have to carry that name, so a file has to.
_LIMITS = "security.limits"
# A Kubernetes service called "relevo" puts these into every pod; they are no settings.
_KUBERNETES = re.compile(r"RELEVO_(SERVICE_(HOST|PORT)|PORT$|PORT_\d+_)")


@dataclass(frozen=True, slots=True)
class Key:
    """One setting as a user meets it."""

    section: str
    name: str
    field: FieldInfo

    @property
    def dotted(self) -> str:
        """The name under which flags hand it in."""
        return f"{self.section}.{self.name}"

    @property
    def flag(self) -> str:
        """Its command line flag."""
        if self.dotted == "model.name":
            return "--model"
        _, _, below = self.section.partition(".")
        return "--" + "-".join([below, self.name] if below else [self.name]).replace("_", "-")

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return f"{_PREFIX}{self.section}_{self.name}".replace(".", "_").upper()

    @property
    def unit(self) -> str:
        """What its number counts, or nothing."""
        return str(self._extra["unit"])

    @property
    def reason(self) -> str:
        """What it is for, in one line."""
        return self.field.description or ""

    @property
    def absent(self) -> str | None:
        """The word that stands for no value; `None` where there always is one."""
        word = self._extra["absent"]
        return None if word is None else str(word)

    @property
    def is_list(self) -> bool:
        """Whether the flag may be repeated."""
        return isinstance(self.field.default, tuple)

    @property
    def is_secret(self) -> bool:
        """Whether its value must never be shown."""
        return self.name == "api_keys" or SecretStr in get_args(self.field.annotation)

    @property
    def default(self) -> Any:
        """Its default as it is written in config.toml."""
        value = self.field.default
        return self.absent if value is None else list(value) if isinstance(value, tuple) else value

    @property
    def default_text(self) -> str:
        """Its default in words."""
        value = self.default
        return "none" if value in ("", []) else str(value).lower() if isinstance(value, bool) else f"{value}"

    @property
    def range(self) -> str:
        """What it may be, in words."""
        if self._extra.get("takes"):
            return str(self._extra["takes"])
        if self.is_list:
            return f"a list of {self._extra['entries']}"
        limits = {type(rule).__name__.lower(): rule for rule in self.field.metadata}
        low, above, high = (getattr(limits.get(name), name, None) for name in ("ge", "gt", "le"))
        floor = f"more than {_plain(above)}" if above is not None else _plain(low) if low is not None else ""
        words = f"{floor} to {_plain(high)}" if high is not None else f"at least {floor}" if floor else ""
        choices = [str(choice) for choice in get_args(self.field.annotation) if isinstance(choice, str)]
        words = words or ", ".join(choices) or ("true or false" if self.field.annotation is bool else "text, not empty")
        return f"{words}, or {self.absent}" if self.absent and not choices else words

    @property
    def _extra(self) -> dict[str, Any]:
        extra = self.field.json_schema_extra
        return extra if isinstance(extra, dict) else {}


def _plain(number: float) -> str:
    return f"{number:g}" if isinstance(number, float) else f"{number}"


def keys() -> Iterator[Key]:
    """All settings, in the order of config.toml."""
    for section, model in _sections().items():
        for name, field in model.model_fields.items():
            yield Key(section, name, field)


def named_keys(name: str = "NAME") -> Iterator[Key]:
    """The settings of the sections that exist once for each name. They have no flags and no variables."""
    for key, field in KeyLimits.model_fields.items():
        yield Key(f"{_LIMITS}.{name}", key, field)


def _sections() -> dict[str, type[Section]]:
    fields = {name.replace("_", "."): field.default for name, field in Settings.model_fields.items()}
    return {name: type(default) for name, default in fields.items() if isinstance(default, Section)}


def let_threads_sleep() -> None:
    """Let torch's threads sleep, not spin, while they wait for each other. To be called before torch is imported.

    OpenMP's threads spin by default, and the one that spins keeps the core that the other one needs as soon as anything
    else runs on the machine. Measured on two cores, a decode step of eight sequences: alone 123 ms spinning, 128 ms
    sleeping; beside one more such process 3,200 ms spinning, 411 ms sleeping.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def environment() -> Mapping[str, str]:
    """The process's environment."""
    return os.environ


def state_dir(settings: Settings, environ: Mapping[str, str]) -> Path:
    """The folder for what outlives the process: `[server] state_dir`, or by XDG's rules under `~/.local/state`."""
    if settings.server.state_dir is not None:
        return Path(settings.server.state_dir).expanduser()
    # A relative path is invalid there, and to be ignored.
    base = Path(environ.get("XDG_STATE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".local" / "state") / "relevo"


def load_settings(
    *, path: Path | None = None, environ: Mapping[str, str] | None = None, flags: Mapping[str, Any] | None = None
) -> Settings:
    """Merge all sources and check the result.

    Args:
        path: a TOML file, or `None` for none.
        environ: variables; those that begin with `RELEVO_` are settings.
        flags: values by dotted key (`scheduler.max_num_seqs`); `None` means not given.

    Raises:
        ConfigError: a key is unknown, or a value is out of range.
    """
    table = {key.dotted: key for key in keys()}
    merged: dict[str, tuple[Any, str]] = {}
    limits: dict[str, KeyLimits] = {}
    if path is not None:
        document = _read_file(path)
        limits = _take_limits(document, path)
        merged |= _from_file(document, path, table)
    merged |= _from_environment(environ or {}, table)
    for dotted, value in (flags or {}).items():
        if value is not None:
            merged[dotted] = (value, table[dotted].flag)
    sections = {}
    for section, model in _sections().items():
        values = {
            key.name: _value(key, *merged[dotted])
            for dotted, key in table.items()
            if key.section == section and dotted in merged
        }
        try:
            sections[section.replace(".", "_")] = model.model_validate(values)
        except ValidationError as error:
            raise _explain(error, section, table, merged) from None
    settings = Settings.model_validate({**sections, "security_limits": limits})
    _check_capacity(settings)
    _check_preferred_size(settings)
    return settings


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"There is no configuration file {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from None
    return parse_toml(text, str(path))


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """A document.

    Args:
        source: what messages call it.

    Raises:
        ConfigError: it is none.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not TOML: {error}.") from None
    except RecursionError:
        raise ConfigError(f"{source} is nested too deeply.") from None
    except ValueError:  # Python makes no number of more than 4300 digits
        raise ConfigError(f"{source} has a number of more digits than can be read; shorten it.") from None


def _take_limits(document: dict[str, Any], path: Path) -> dict[str, KeyLimits]:
    """Take `[security.limits.NAME]` out of a document and check it; whether there are such names is seen later."""
    security = document.get("security")
    if not isinstance(security, dict) or "limits" not in security:
        return {}
    named = security.pop("limits")
    if not isinstance(named, dict) or not all(isinstance(values, dict) for values in named.values()):
        raise ConfigError(f"{path}: limits belong to the name of an API key, in a section [{_LIMITS}.NAME].")
    return {name: read_section(KeyLimits, f"{_LIMITS}.{name}", values, str(path)) for name, values in named.items()}


def read_section(model: type[AnySection], section: str, values: Mapping[str, Any], source: str) -> AnySection:
    """Check a table of a file by the rules that hold for all settings.

    Args:
        section: what messages call it.
        source: and the file.

    Raises:
        ConfigError: a key is unknown or missing, or a value is out of range.
    """
    table = {f"{section}.{name}": Key(section, name, field) for name, field in model.model_fields.items()}
    merged = _settings_of(section, values, source, table)
    for key in table.values():
        if key.field.is_required() and key.dotted not in merged:
            raise ConfigError(f"{source}: [{section}] needs {key.name}; it takes {key.range}.")
    checked = {table[dotted].name: _value(table[dotted], *given) for dotted, given in merged.items()}
    try:
        return model.model_validate(checked)
    except ValidationError as error:
        raise _explain(error, section, table, merged) from None


def _from_file(document: Mapping[str, Any], path: Path, table: Mapping[str, Key]) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {}
    for section, values in _tables(document, table):
        if section not in _sections():
            known = [f"[{name}]" for name in _sections()]
            raise ConfigError(f"{path}: [{section}] is not a known section{_hint(f'[{section}]', known)}")
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: {section} must be a section, written as [{section}].")
        found |= _settings_of(section, values, str(path), table)
    return found


def _settings_of(
    section: str, values: Mapping[str, Any], source: str, table: Mapping[str, Key]
) -> dict[str, tuple[Any, str]]:
    """The values of one section, all of them known, with where they are from."""
    for name in values:
        if f"{section}.{name}" not in table:
            raise ConfigError(f"{source}: [{section}] has no setting {name}{_hint_key(section, name, table)}")
    return {f"{section}.{name}": (value, source) for name, value in values.items()}


def _tables(document: Mapping[str, Any], table: Mapping[str, Key]) -> Iterator[tuple[str, Any]]:
    """The sections of a document; one within another, such as `[slo.background]`, comes by itself."""
    for section, values in document.items():
        within: dict[str, Any] = {}
        if section in _sections() and isinstance(values, dict):
            dotted = {name: f"{section}.{name}" for name, value in values.items() if isinstance(value, dict)}
            within = {name: path for name, path in dotted.items() if path not in table}
        yield section, {name: value for name, value in values.items() if name not in within} if within else values
        yield from ((path, values[name]) for name, path in within.items())


def _from_environment(environ: Mapping[str, str], table: Mapping[str, Key]) -> dict[str, tuple[Any, str]]:
    variables = {key.variable: dotted for dotted, key in table.items()}
    found: dict[str, tuple[Any, str]] = {}
    for variable, value in environ.items():
        if not variable.startswith(_PREFIX) or _KUBERNETES.match(variable):
            continue
        if variable not in variables:
            raise ConfigError(f"The variable {variable} is no setting{_hint(variable, variables)}")
        found[variables[variable]] = (value, variable)
    return found


def _value(key: Key, value: Any, source: str) -> Any:
    """Refuse what a lax type check would let through, and turn the word for "none" into `None`."""
    if isinstance(value, str) and key.absent is not None and value.strip().lower() == key.absent:
        return None
    is_bool = isinstance(value, bool) and key.field.annotation is not bool
    if is_bool or (isinstance(value, (dict, list)) and not key.is_list):
        raise _refusal(key, value, source)
    return value


def _explain(
    error: ValidationError, section: str, table: Mapping[str, Key], merged: Mapping[str, tuple[Any, str]]
) -> ConfigError:
    problem = error.errors(include_url=False, include_context=False)[0]
    key = table[f"{section}.{problem['loc'][0]}"]
    detail = problem["msg"].removeprefix("Value error, ") if problem["type"] == "value_error" else None
    return _refusal(key, *merged[key.dotted], detail=detail)


def _refusal(key: Key, value: Any, source: str, *, detail: str | None = None) -> ConfigError:
    try:
        shown = "" if key.is_secret else f" = {value!r}"
    except ValueError:  # in hexadecimal a number may have more digits than Python writes
        shown = ""
    return ConfigError(
        f"[{key.section}] {key.name}{shown} (from {source}) is not valid; it takes {detail or key.range}."
    )


def _check_preferred_size(settings: Settings) -> None:
    preferred, seats = settings.scheduler.dynamic_preferred_size, settings.scheduler.max_num_seqs
    if preferred is not None and preferred > seats:
        raise ConfigError(
            f"[scheduler] dynamic_preferred_size = {preferred} is above max_num_seqs = {seats}; "
            "a batch cannot be larger than its seats: lower the one or raise the other."
        )


def _check_capacity(settings: Settings) -> None:
    scheduler = settings.scheduler
    for name in ("num_seqs", "num_batched_tokens"):
        start, capacity = getattr(scheduler, f"max_{name}"), getattr(scheduler, f"capacity_{name}")
        if capacity is not None and capacity < start:
            raise ConfigError(
                f"[scheduler] capacity_{name} = {capacity} is below max_{name} = {start}; "
                "raise the one or lower the other."
            )


def _hint_key(section: str, name: str, table: Mapping[str, Key]) -> str:
    same = [key.name for key in table.values() if key.section == section]
    if get_close_matches(name, same, 1):
        return _hint(name, same)
    elsewhere = {key.name: f"[{key.section}] {key.name}" for key in reversed(list(table.values()))}
    nearest = get_close_matches(name, elsewhere, 1)
    return f"; did you mean {elsewhere[nearest[0]]}?" if nearest else f"; it has {', '.join(same)}."


def _hint(name: str, known: Iterable[str]) -> str:
    nearest = get_close_matches(name, list(known), 1, cutoff=0.0)
    return f"; did you mean {nearest[0]}?" if nearest else "."
