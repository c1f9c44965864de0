"""Results of the checks of a preflight, their verdict, and how it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megasdc.common.errors import MegasdcError


class CheckStatus(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    NOT_DONE = "not done"


STYLES = {
    CheckStatus.OK: "green",
    CheckStatus.WARNING: "yellow",
    CheckStatus.FAILED: "bold red",
    CheckStatus.NOT_DONE: "magenta",
}


@dataclass(frozen=True)
class PreflightFinding:
    """What a check found.

    Args:
        text: figures of a check that was done; else why it was not, or what is wrong and what to do.
        exit_code: of a check that failed, as documented; 0 of all others.
        figures: plain values by name.
    """

    status: CheckStatus
    text: str
    exit_code: int = 0
    figures: dict[str, Any] = field(default_factory=dict)


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


@dataclass(frozen=True)
class CheckResult:
    """A check, what it found, and the seconds that it took."""

    name: str
    finding: PreflightFinding
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {"name": self.name, **asdict(self.finding), "seconds": round(self.seconds, 2)}


@dataclass(frozen=True)
class PreflightResult:
    """All checks, in order.

    Args:
        kept: folders that stay; empty: what was written is removed.
    """

    checks: Sequence[CheckResult]
    kept: Sequence[str] = ()

    @property
    def exit_code(self) -> int:
        """That of the first check that failed; 0: none did."""
        return next((one.finding.exit_code for one in self.checks if one.finding.status is CheckStatus.FAILED), 0)

    @property
    def verdict(self) -> str:
        """One sentence."""
        by_status = {
            status: [one.name for one in self.checks if one.finding.status is status] for status in CheckStatus
        }
        if wrong := by_status[CheckStatus.FAILED]:
            return f"not ready: {', '.join(wrong)} failed, exit code {self.exit_code}"
        parts = []
        if warned := by_status[CheckStatus.WARNING]:
            parts.append(f"with a warning of {', '.join(warned)}")
        if undone := by_status[CheckStatus.NOT_DONE]:
            parts.append(f"without {', '.join(undone)}")
        return ", ".join(["ready", *parts])

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "exit_code": self.exit_code,
            "verdict": self.verdict,
            "checks": [one.as_dict() for one in self.checks],
            "kept": list(self.kept),
        }


def render_preflight(result: PreflightResult, console: Console) -> None:
    """Print the table of all checks, where files are, and the verdict."""
    table = Table(title="preflight")
    for name in ("check", "status", "s", "found"):
        table.add_column(name, justify="right" if name == "s" else "left", overflow="fold")
    for one in result.checks:
        status = Text(one.finding.status.value, style=STYLES[one.finding.status])
        table.add_row(one.name, status, f"{one.seconds:,.1f}", Text(one.finding.text))
    console.print(table)
    for folder in result.kept:
        console.print(Text(f"kept: {folder}"))
    console.print(Text(result.verdict))
