"""Writes the README's table of parameters anew, from the schemas: `python -m tests.readme`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from app.api.parameters import TAKEN, compatibility

if TYPE_CHECKING:
    from app.api.parameters import Compatibility

BEGIN = "| Parameter | Chat | Completions | |\n|---|---|---|---|\n"


def parameter_row(row: Compatibility) -> str:
    """A parameter's line of the table."""
    mixed = TAKEN in (row.chat, row.completions)
    at_rest = f"where it is refused, it {row.at_rest}" if mixed and row.at_rest else row.at_rest
    text = "; ".join(filter(None, (row.how, at_rest))).replace("|", "\\|")
    return f"| `{row.name}` | {row.chat} | {row.completions} | {text} |"


def parameter_rows() -> list[str]:
    """All of them."""
    return [parameter_row(row) for row in compatibility()]


def main() -> None:
    """Replace the table."""
    path = Path(__file__).resolve().parent.parent / "README.md"
    before, begin, after = path.read_text(encoding="utf-8").partition(BEGIN)
    if not begin:
        raise SystemExit("README.md has no table of parameters")
    rest = after[after.index("\n\n") :]
    path.write_text(before + begin + "\n".join(parameter_rows()) + rest, encoding="utf-8")


if __name__ == "__main__":
    main()
