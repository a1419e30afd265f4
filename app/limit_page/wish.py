"""What an operator wants looked for, and the words of `relevo limit` that it amounts to."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from app.fields import WrongFieldsError
from engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from engine.config import SloTargets

# `relevo limit --workload`; the other two are `mix` and a recording's name behind this word.
WORKLOADS: Final = {
    "azure-conversation": "conversations, as fitted to Azure's trace",
    "azure-code": "completion of code, as fitted to Azure's trace",
    "mooncake": "long prompts that begin alike, as fitted to Mooncake's trace",
}
# `relevo limit --arrivals`; where none is named they are Poisson, and of a recording its own.
ARRIVALS: Final = {
    "poisson": "at random (Poisson)",
    "constant": "evenly spaced",
    "gamma": "in bursts (gamma)",
}
BURSTS: Final = "gamma"
MIX: Final = "mix"
RECORDING: Final = "recording:"
TARGETS: Final = ("ttft_p95_seconds", "itl_p95_seconds", "e2e_p95_seconds")
NONE: Final = "none"  # as files and flags call a target that there is not
NUMBERS: Final = (*TARGETS, "gap_cv", "duration", "factor", "repeats", "think_time", "price_per_hour")
SWITCHES: Final = ("beside_users", "tune")
LEAST_SECONDS, MOST_SECONDS = 30, 7200
DEFAULT_SECONDS, TUNE_SECONDS = 480.0, 1800.0
# In less than that a server that answers some requests a second tries nothing beside the settings that it has.
LEAST_TUNE_SECONDS: Final = 300
MAX_NOTE, MAX_MIX = 200, 10_000
# Each letter of a mix may be sent as twelve, and there are other fields beside it.
MAX_FORM_BYTES: Final = 12 * MAX_MIX + (1 << 14)

Positive = Annotated[float, Field(gt=0, le=1e6)]
# What each field takes, for whoever gave it something else.
_ABOVE_NOTHING: Final = "a number above 0, at most a million"
TAKES: Final = {
    "workload": "the name of a workload",
    "mix": f"a text of at most {MAX_MIX:,} characters",
    "arrivals": f"one of {', '.join(ARRIVALS)}",
    "gap_cv": _ABOVE_NOTHING,
    **dict.fromkeys(TARGETS, f'{_ABOVE_NOTHING}, in seconds; or "{NONE}"'),
    "duration": f"a number of seconds from {LEAST_SECONDS} to {MOST_SECONDS:,}",
    "factor": _ABOVE_NOTHING,
    "repeats": "a whole number from 1 to 10",
    "think_time": f"{_ABOVE_NOTHING}, in seconds",
    "price_per_hour": _ABOVE_NOTHING,
    **dict.fromkeys(SWITCHES, "true or false"),
    "note": f"a text of at most {MAX_NOTE} characters",
}


def _known(arrivals: str) -> str:
    if arrivals not in ARRIVALS:
        raise ValueError(arrivals)
    return arrivals


class Wish(BaseModel):
    """Body of `POST /ops/limit`.

    Attributes:
        workload: a key of `WORKLOADS`, `mix`, or `recording:` and its name.
        mix: the TOML of a mix of classes of work.
        arrivals: a key of `ARRIVALS`; `None` is what is usual.
        gap_cv: coefficient of variation of the gaps, of bursts.
        duration: seconds that it may take, aimed at; `None` is what is usual.
        factor: divides lengths; `None` takes what fits context and time.
        beside_users: look also while others are served, as background work.
        tune: try settings, too.
        note: for those who read it later.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    workload: str = Field("azure-conversation", min_length=1, max_length=300)
    mix: str | None = Field(None, max_length=MAX_MIX)
    arrivals: Annotated[str, AfterValidator(_known)] | None = None
    gap_cv: Positive | None = None
    ttft_p95_seconds: Positive | None = None
    itl_p95_seconds: Positive | None = None
    e2e_p95_seconds: Positive | None = None
    duration: float | None = Field(None, ge=LEAST_SECONDS, le=MOST_SECONDS)
    factor: Positive | None = None
    repeats: int = Field(3, ge=1, le=10)
    think_time: Positive | None = None
    price_per_hour: Positive | None = None
    beside_users: bool = False
    tune: bool = False
    note: str = Field("", max_length=MAX_NOTE)

    @property
    def seconds(self) -> float:
        """That it may take."""
        return self.duration or (TUNE_SECONDS if self.tune else DEFAULT_SECONDS)

    @property
    def recording(self) -> str | None:
        """The name of the recording that is replayed."""
        return self.workload.removeprefix(RECORDING) if self.workload.startswith(RECORDING) else None

    def words(self, url: str, trace: Path | None) -> list[str]:
        """The flags of `relevo limit`, but for `--mix`.

        Args:
            trace: the file that stands for `recording`.
        """
        given = {
            "--url": url,
            "--trace": trace,
            "--workload": self.workload if self.workload in WORKLOADS else None,
            "--arrivals": self.arrivals,
            "--gap-cv": self.gap_cv,
            "--duration": f"{self.seconds:g}",
            "--repeats": self.repeats,
            "--factor": self.factor,
            "--think-time": self.think_time,
            "--price-per-hour": self.price_per_hour,
        }
        targets = {f"--{name.removesuffix('_p95_seconds')}-p95": getattr(self, name) or NONE for name in TARGETS}
        flags = [text for flag, value in (given | targets).items() if value is not None for text in (flag, str(value))]
        tune = ["--tune", *(["--while-serving"] if self.beside_users else [])]
        return [*flags, *(tune if self.tune else [])]


def parse_wish(data: Mapping[str, Any], slo: SloTargets) -> Wish:
    """Check the body of a `POST /ops/limit`; of targets that are not named those of the server hold.

    Raises:
        ApiError: 422, naming the field at fault.
    """
    present = {name: value for name, value in data.items() if value is not None or name in TARGETS}
    present |= {name: None for name in TARGETS if present.get(name) == NONE}
    try:
        wish = Wish.model_validate(asdict(slo) | present)
    except ValidationError as error:
        raise WrongFieldsError.of(error, Wish.model_fields, lambda name, _: f"must be {TAKES[name]}.") from None
    if wish.workload not in (*WORKLOADS, MIX) and wish.recording is None:
        known = ", ".join((*WORKLOADS, MIX))
        raise _wrong("workload", f"must be one of {known}, or {RECORDING} and the name of a recording.")
    if not wish.note.isprintable():
        raise _wrong("note", "has characters that cannot be shown.")
    if wish.workload == MIX and not (wish.mix and wish.mix.strip()):
        raise _wrong("mix", f"is missing: the workload '{MIX}' needs the TOML of its classes of work.")
    if wish.workload != MIX and wish.mix is not None:
        raise _wrong("mix", f"is for the workload '{MIX}' alone; choose that, or leave it out.")
    if wish.gap_cv is not None and wish.arrivals != BURSTS:
        raise _wrong("gap_cv", f"is for the arrivals '{BURSTS}' alone; choose those, or leave it out.")
    if wish.gap_cv is None and wish.arrivals == BURSTS:
        raise _wrong("gap_cv", f"is missing: it makes the bursts of the arrivals '{BURSTS}', and 1 would be at random.")
    if wish.tune and wish.seconds < LEAST_TUNE_SECONDS:
        raise _wrong(
            "duration",
            f"is too short to look for better settings too, which takes {TUNE_SECONDS:,.0f}; give "
            f"{LEAST_TUNE_SECONDS} or more.",
        )
    if wish.mix is None and not any(getattr(wish, name) for name in TARGETS):
        raise _wrong("ttft_p95_seconds", "is missing like all targets: without any there is no limit.")
    return wish


def parse_form(form: Mapping[str, str], slo: SloTargets) -> Wish:
    """The same from the page's form, where an empty target is none and the mix counts where it is chosen.

    Raises:
        ApiError: 422, naming the field at fault.
    """
    data: dict[str, Any] = {name: form[name] for name in ("workload", "note") if name in form}
    data["arrivals"] = form.get("arrivals") or None
    if form.get("workload") == MIX:
        data["mix"] = form.get("mix", "").replace("\r\n", "\n")  # forms count a line's end as one letter and send two
    data |= {name: _number(form.get(name, "")) for name in NUMBERS}
    data |= {name: name in form for name in SWITCHES}
    return parse_wish(data, slo)


def check_mix(wish: Wish, slo: SloTargets) -> None:
    """Refuse a mix that cannot be used.

    Raises:
        ApiError: 422, saying what is wrong with it.
    """
    from app.limit.mix import parse_mix
    from app.limit.runs import given

    try:
        classes = parse_mix(wish.mix or "", "the mix", slo)
    except ConfigError as error:
        raise _wrong("mix", f"cannot be used: {error}") from None
    if not any(given(one.targets) for one in classes):
        raise _wrong("mix", "has no target, nor is there one beside it: without any there is no limit.")


def _wrong(param: str, message: str) -> WrongFieldsError:
    return WrongFieldsError({param: message})


def _number(text: str) -> Any:
    """A number of a form; what is none is left as it is, to be refused in the same words."""
    text = text.strip()
    try:
        return (int(text) if text.isascii() and text.isdigit() else float(text)) if text else None
    except ValueError:
        return text
