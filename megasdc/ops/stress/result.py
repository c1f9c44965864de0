"""Result of a stress test: a table, reasons, JSON, an exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megasdc.common.errors import CorruptionError, LaunchError
from megasdc.ops.stress.drill import DrillRequest
from megasdc.ops.stress.host_verdict import HEALTHY, INCONCLUSIVE, NOT_TESTED, UNHEALTHY, HostVerdict
from megasdc.ops.stress.pair_links import LinksReport
from megasdc.ops.stress.state import HostState

EXIT_CODES = {
    UNHEALTHY: CorruptionError.exit_code,
    INCONCLUSIVE: CorruptionError.exit_code,
    NOT_TESTED: LaunchError.exit_code,
}
"""Exit code by verdict; with several verdicts, the first in this order."""
_STYLES = {HEALTHY: "green", UNHEALTHY: "bold red", INCONCLUSIVE: "bold yellow", NOT_TESTED: "magenta"}


@dataclass(frozen=True)
class StressResult:
    """Verdicts and states of all hosts, in the order of the hostfile.

    ``drill``: injected faults, None: none; ``drilled``: their effects, from ``summarize``, None: not known;
    ``interrupted``: by Ctrl-C; ``links``: between hosts, None: not asked for, or one host.
    """

    verdicts: Sequence[HostVerdict]
    drill: DrillRequest | None
    drilled: list[dict[str, Any]] | None
    interrupted: bool
    states: Sequence[HostState]
    links: LinksReport | None = None

    @property
    def exit_code(self) -> int:
        """See ``EXIT_CODES``; where all hosts are healthy, 78 for a slow link or none measured, else 0."""
        given = {verdict.status for verdict in self.verdicts}
        return next((code for status, code in EXIT_CODES.items() if status in given), self._code_of_links)

    @property
    def _code_of_links(self) -> int:
        return 0 if self.links is None or self.links.is_fit else LaunchError.exit_code

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "exit_code": self.exit_code,
            "interrupted": self.interrupted,
            "counts": {status: sum(v.status == status for v in self.verdicts) for status in _STYLES},
            "drill": self.drill_report(),
            "hosts": [verdict.as_dict() for verdict in self.verdicts],
            "links": None if self.links is None else self.links.as_dict(),
        }

    def drill_report(self) -> dict[str, Any] | None:
        """Whether the drill was found, and if not, why; None without one."""
        if self.drill is None:
            return None
        status = next(verdict.status for verdict in self.verdicts if verdict.host == self.drill.host)
        report: dict[str, Any] = {
            "profile": self.drill.profile,
            "host": self.drill.host,
            "found": status == UNHEALTHY,
            "faults": [],
        }
        if self.drilled is None:
            return report
        for fault, did in zip(self.drill.faults, self.drilled, strict=True):
            name = f"{fault['kind']} in {fault['phase']} of {fault['submodule']}"
            unfired = None if did["changed"] else _why(fault, did["expected"], did["unfired"])
            report["faults"].append({"fault": name, **did, "unfired": unfired})
        return report


def _why(fault: dict[str, Any], expected: float, unfired: str | None) -> str:
    """Why a fault changed nothing in this test."""
    first = fault["steps"][0]
    if expected:
        return f"{unfired or 'it never fired'}; {expected:.3g} were to be expected: its rate is low for so short a test"
    if first is not None and first > 1:
        return f"it is silent until step {first:,}, and this test ended before that"
    return unfired or "no result fitted"


def render_stress(result: StressResult, console: Console) -> None:
    """Prints the table, every reason, and a summary line."""
    table = Table(title="stress test")
    tests = list(dict.fromkeys(test for verdict in result.verdicts for test in verdict.rates))
    for name in ("host", "verdict", "rounds", *(f"wrong in {test}" for test in tests)):
        table.add_column(name)
    for verdict in result.verdicts:
        table.add_row(
            verdict.host,
            Text(verdict.status, style=_STYLES[verdict.status]),
            f"{verdict.rounds:,}",
            *(_rate(verdict.rates.get(test)) for test in tests),
        )
    console.print(table)
    for hosts, rests_on in _by_evidence(result.verdicts).items():
        console.print(Text(f"{hosts}: {rests_on}"))
    for verdict in result.verdicts:
        for reason in verdict.reasons:
            console.print(Text(f"{verdict.host}: {reason.status}: {reason.test}: {reason.text}"))
        for note in verdict.notes:
            console.print(Text(f"{verdict.host}: {note}"))
    for line in [] if result.links is None else result.links.lines():
        console.print(Text(line))
    _render_drill(result.drill_report(), console)
    counts = ", ".join(f"{sum(v.status == status for v in result.verdicts)} {status}" for status in _STYLES)
    hosts = "1 host" if len(result.verdicts) == 1 else f"{len(result.verdicts)} hosts"
    console.print(f"{hosts}: {counts}{', interrupted' if result.interrupted else ''}")


def _by_evidence(verdicts: Sequence[HostVerdict]) -> dict[str, str]:
    """Evidence of the verdicts, by the hosts that share it."""
    hosts: dict[str, list[str]] = {}
    for verdict in verdicts:
        text = "; ".join(f"{test} by {said}" for test, said in verdict.rests_on.items())
        hosts.setdefault(text, []).append(verdict.host)
    return {", ".join(names): text for text, names in hosts.items() if text}


def _rate(rate: dict[str, Any] | None) -> str:
    if rate is None or not rate["compared"]:
        return "-"
    if rate["at_most"] is None:
        return f"{rate['wrong']:,} of {rate['compared']:,} ({rate['wrong'] / rate['compared']:.2g})"
    return f"0 of {rate['compared']:,} (at most {rate['at_most']:.2g})"


def _render_drill(report: dict[str, Any] | None, console: Console) -> None:
    if report is None:
        return
    found = "was found" if report["found"] else "was not found"
    console.print(Text(f"drill: {report['profile']} on {report['host']} {found}"))
    for fault in report["faults"]:
        did = f"changed {fault['changed']:,} results, {fault['expected']:.3g} were to be expected"
        console.print(Text(f"  {fault['fault']}: {fault['unfired'] or did}"))
