"""Outcome of a stress test: verdicts on hosts, links between them, and whether a drill was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megasdc.common.errors import CorruptionError, LaunchError
from megasdc.ops.stress.drill import DrillRequest
from megasdc.ops.stress.host_verdict import HEALTHY, INCONCLUSIVE, NOT_TESTED, UNHEALTHY, HostVerdict, judge_stress
from megasdc.ops.stress.pair_links import LinksReport, report_links
from megasdc.ops.stress.state import HostState
from megasdc.output.outcome import Outcome, code_of, count_statuses, counted
from megasdc.output.page import Cell, Page, PageSection, Table

EXIT_CODES = {
    UNHEALTHY: CorruptionError.exit_code,
    INCONCLUSIVE: CorruptionError.exit_code,
    NOT_TESTED: LaunchError.exit_code,
}
"""Exit code by verdict; with several verdicts, the first in this order."""
STATUSES = (HEALTHY, UNHEALTHY, INCONCLUSIVE, NOT_TESTED)


def stress_outcome(
    states: Sequence[HostState],
    drill: DrillRequest | None = None,
    drilled: list[dict[str, Any]] | None = None,
    interrupted: bool = False,
) -> Outcome[HostVerdict]:
    """Judge all hosts, in the order of the hostfile; where all are healthy, 78 for a slow link or none measured.

    ``drill``: injected faults, None: none; ``drilled``: their effects, from ``summarize_drills``, None: not known;
    ``interrupted``: by Ctrl-C.
    """
    verdicts, links = judge_stress(states), report_links(states)
    statuses = [verdict.status for verdict in verdicts]
    code = code_of(statuses, EXIT_CODES) or (0 if links is None or links.is_fit else LaunchError.exit_code)
    contents = {
        "interrupted": interrupted,
        "counts": count_statuses(statuses, STATUSES),
        "drill": None if drill is None else _drill_report(drill, verdicts, drilled),
        "hosts": [asdict(verdict) for verdict in verdicts],
        "links": None if links is None else links.as_dict(),
    }
    return Outcome(code, contents, _page(verdicts, links, contents, fit=not code), verdicts)


def _drill_report(
    drill: DrillRequest, verdicts: Sequence[HostVerdict], drilled: list[dict[str, Any]] | None
) -> dict[str, Any]:
    """Whether the drill was found, and if not, why."""
    status = next(verdict.status for verdict in verdicts if verdict.host == drill.host)
    faults = []
    for fault, did in zip(drill.faults, drilled, strict=True) if drilled is not None else ():
        name = f"{fault['kind']} in {fault['phase']} of {fault['submodule']}"
        unfired = None if did["changed"] else _why(fault, did["expected"], did["unfired"])
        faults.append({"fault": name, **did, "unfired": unfired})
    return {"profile": drill.profile, "host": drill.host, "found": status == UNHEALTHY, "faults": faults}


def _why(fault: dict[str, Any], expected: float, unfired: str | None) -> str:
    """Why a fault changed nothing in this test."""
    first = fault["steps"][0]
    if expected:
        return f"{unfired or 'it never fired'}; {expected:.3g} were to be expected: its rate is low for so short a test"
    if first is not None and first > 1:
        return f"it is silent until step {first:,}, and this test ended before that"
    return unfired or "no result fitted"


def _page(verdicts: Sequence[HostVerdict], links: LinksReport | None, contents: dict[str, Any], *, fit: bool) -> Page:
    tests = list(dict.fromkeys(test for verdict in verdicts for test in verdict.rates))
    rows = [
        (
            verdict.host,
            Cell(verdict.status, look="good" if verdict.status == HEALTHY else "bad"),
            verdict.rounds,
            *(_rate(verdict.rates.get(test)) for test in tests),
        )
        for verdict in verdicts
    ]
    told = [f"{hosts}: {rests_on}" for hosts, rests_on in _by_evidence(verdicts).items()]
    for verdict in verdicts:
        told += [f"{verdict.host}: {reason.status}: {reason.test}: {reason.text}" for reason in verdict.reasons]
        told += [f"{verdict.host}: {note}" for note in verdict.notes]
    told += [] if links is None else links.lines()
    if (drill := contents["drill"]) is not None:
        told.append(f"drill: {drill['profile']} on {drill['host']} was {'' if drill['found'] else 'not '}found")
        for fault in drill["faults"]:
            did = f"changed {fault['changed']:,} results, {fault['expected']:.3g} were to be expected"
            told.append(f"  {fault['fault']}: {fault['unfired'] or did}")
    table = Table("hosts", ("host", "verdict", "rounds", *(f"wrong in {test}" for test in tests)), rows)
    summary = counted("host", contents["counts"]) + (", interrupted" if contents["interrupted"] else "")
    section = PageSection("stress test", items=told, tables=[table])
    return Page("Stress test", summary, "same" if fit else "different", sections=[section])


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
