"""What the checks of a preflight have found, and what that comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from megasdc.common.errors import MegasdcError
from megasdc.output.outcome import Outcome
from megasdc.output.page import Cell, Page, PageSection, Table, number_cell


class CheckStatus(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    NOT_DONE = "not done"


_LOOKS = {CheckStatus.OK: "good", CheckStatus.FAILED: "bad"}


@dataclass(frozen=True)
class PreflightFinding:
    """What a check found.

    Args:
        text: figures of a check that was done; else why it was not, or what is wrong and what to do.
        exit_code: of a check that failed, as documented; 0 of all others.
        figures: plain values by name.
        name: of the check.
        seconds: that it took.
    """

    status: CheckStatus
    text: str
    exit_code: int = 0
    figures: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    seconds: float = 0.0


def failed(error: MegasdcError) -> PreflightFinding:
    """The finding of a check that an error ended."""
    return PreflightFinding(CheckStatus.FAILED, str(error), error.exit_code)


def not_done(text: str) -> PreflightFinding:
    """The finding of a check that was not done, with the reason and how to get it."""
    return PreflightFinding(CheckStatus.NOT_DONE, text)


def with_warnings(text: str, warnings: Sequence[str], figures: dict[str, Any] | None = None) -> PreflightFinding:
    """The finding of a check that was done: a warning where there are some.

    Args:
        text: figures, for people.
        figures: the same as plain values.
    """
    status = CheckStatus.WARNING if warnings else CheckStatus.OK
    return PreflightFinding(status, "; ".join([text, *warnings]), figures=figures or {})


def preflight_outcome(checks: Sequence[PreflightFinding], kept: Sequence[str] = ()) -> Outcome[PreflightFinding]:
    """What all checks, in order, come to: the exit code is that of the first which failed.

    Args:
        kept: folders that stay; empty: what was written is removed.
    """
    by_status = {status: [one.name for one in checks if one.status is status] for status in CheckStatus}
    code = next((one.exit_code for one in checks if one.status is CheckStatus.FAILED), 0)
    if wrong := by_status[CheckStatus.FAILED]:
        verdict = f"not ready: {', '.join(wrong)} failed, exit code {code}"
    else:
        parts = {"with a warning of": by_status[CheckStatus.WARNING], "without": by_status[CheckStatus.NOT_DONE]}
        verdict = ", ".join(["ready", *(f"{how} {', '.join(names)}" for how, names in parts.items() if names)])
    found = [{**asdict(one), "seconds": round(one.seconds, 2)} for one in checks]
    rows = [
        (one.name, Cell(one.status, look=_LOOKS.get(one.status, "")), number_cell(one.seconds, ",.1f"), one.text)
        for one in checks
    ]
    section = PageSection(
        tables=[Table("checks", ("check", "status", "s", "found"), rows)], items=[f"kept: {folder}" for folder in kept]
    )
    page = Page("Preflight", verdict, "different" if wrong else "same", sections=[section])
    return Outcome(code, {"verdict": verdict, "checks": found, "kept": list(kept)}, page, checks)
