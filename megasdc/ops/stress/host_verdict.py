"""Verdict on each host from the states of all hosts, with reasons and evidence.

A host is unhealthy (Pei et al. 2025: its results differ from those of healthy hardware) where its results differ from
golden values, its own, the fp64 product by more than rounding, or those of most hosts of an equal key, or where it
explains wrong collectives. Where several hosts may be the cause and none can be named, all of them are inconclusive.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megasdc.ops.stress.arrange import Pair, name_culprits
from megasdc.ops.stress.state import ALONE, COLLECTIVES, GEMM, LINKS, TRAINING, Count, HostState
from megasdc.sdc.verdict import rate_bound

HEALTHY, UNHEALTHY, INCONCLUSIVE, NOT_TESTED = "healthy", "unhealthy", "inconclusive", "not tested"
MEANS = {
    "golden": "differs from the golden values of its device",
    "first": "differs from what it computed itself before",
    "reference": "is farther from the fp64 product than rounding explains",
}
_DIFFERS = {
    "own devices": (UNHEALTHY, "between its own devices"),
    "majority": (UNHEALTHY, "from those of most hosts of an equal key"),
    "other hosts": (INCONCLUSIVE, "from those of other hosts of an equal key, and no majority decides"),
}
"""Verdict and text by evidence, the strongest first."""

Voter = tuple[str, str]
"""Host and slot."""


@dataclass(frozen=True)
class HostReason:
    """Evidence against a host from one test, and the verdict that follows from it.

    ``evidence``: golden, first, reference, alone, pairs, own devices, majority, other hosts, or no answer.
    """

    status: str
    test: str
    evidence: str
    text: str


@dataclass(frozen=True)
class HostVerdict:
    """Verdict on one host, one of the module's, with the first wrong results and the reasons, the strongest first.

    ``rests_on``: evidence of the verdict, by test; ``rates`` by test: ``compared``, ``wrong``, and ``at_most``, the
    upper bound of the rate of a host without a wrong result (95 % confidence).
    """

    host: str
    status: str
    rounds: int
    rests_on: dict[str, str]
    reasons: list[HostReason]
    rates: dict[str, dict[str, Any]]
    findings: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def judge_stress(states: Sequence[HostState]) -> list[HostVerdict]:
    """The verdicts on all hosts, from their states."""
    reasons: defaultdict[str, list[HostReason]] = defaultdict(list)
    for state in states:
        reasons[state.host] += _own_evidence(state)
    unhealthy = {host for host, given in reasons.items() if _worst(given) == UNHEALTHY}
    _add(reasons, _from_pairs(states, unhealthy))
    unhealthy = {host for host, given in reasons.items() if _worst(given) == UNHEALTHY}
    for test in (GEMM, TRAINING):
        for values in _votes(states, test, unhealthy):
            _add(reasons, _from_vote(test, values))
    for state in states:
        reasons[state.host] += _untested(state)
    return [_verdict(state, reasons[state.host], states) for state in states]


def _own_evidence(state: HostState) -> list[HostReason]:
    """Evidence against a host that needs no other host."""
    given = []
    for test in (GEMM, TRAINING):
        count = state.tests.get(test)
        if count is not None and count.wrong:
            given.append(_wrong_results(test, count, [one for one in state.findings if one["test"] == test]))
    alone = state.meetings.get(ALONE)
    if alone is not None and alone.wrong:
        text = f"{alone.wrong:,} of {alone.compared:,} collectives among its own processes are wrong"
        given.append(HostReason(UNHEALTHY, COLLECTIVES, "alone", text + _first(state)))
    return given


def _wrong_results(test: str, count: Count, findings: Sequence[dict[str, Any]]) -> HostReason:
    """Wrong results of a test, with one finding for each kind of evidence, preferably one that names bits."""
    texts, evidence = [], []
    for kind, means in MEANS.items():
        found = sorted((one for one in findings if one["against"] == kind), key=lambda one: not one.get("bits"))
        if found:
            evidence.append(kind)
            texts.append(f"{finding_text(found[0])}: {means}")
    head = f"{count.wrong:,} of {count.compared:,} results wrong"
    return HostReason(UNHEALTHY, test, evidence[0], "; ".join([head, *texts]))


def _first(state: HostState) -> str:
    found = [finding for finding in state.findings if finding["test"] == COLLECTIVES]
    return f"; first: {finding_text(found[0])}" if found else ""


def finding_text(finding: Mapping[str, Any]) -> str:
    """One wrong result in words: what, when, how many elements, which bits."""
    text = f"{finding['what']} in round {finding['round']}"
    if finding.get("elements") is not None:
        text += f", {finding['elements']:,} of {finding['of']:,} elements"
    if finding.get("bits"):
        common = sorted(finding["bits"].items(), key=lambda item: (-item[1], int(item[0])))
        text += ", bits " + ", ".join(f"{bit} ({times:,}x)" for bit, times in common[:4])
        text += f" and {len(common) - 4} others" if len(common) > 4 else ""
    if finding.get("results") is not None:
        text += f", {finding['results']:,} results from there on"
    if finding.get("loss_step") is not None:
        text += f", losses from step {finding['loss_step']} on"
    return text


def _from_pairs(states: Sequence[HostState], unhealthy: Iterable[str]) -> dict[str, HostReason]:
    """Evidence from collectives between hosts; those with hosts already known as unhealthy are explained by them."""
    known = set(unhealthy)
    lost = {state.host for state in states if state.lost is not None}
    wrong: dict[Pair, None] = {}
    for state in states:
        for partner, count in state.meetings.items():
            if partner != ALONE and count.wrong and not known & {state.host, partner}:
                wrong[frozenset((state.host, partner))] = None
    named, suspects = name_culprits(list(wrong))
    given = {}
    for host in named:
        partners = sorted(next(iter(pair - {host})) for pair in wrong if host in pair)
        text = f"collectives are wrong with {', '.join(partners)}, and no fewer hosts explain what went wrong"
        given[host] = HostReason(UNHEALTHY, COLLECTIVES, "pairs", text)
    for host in suspects - lost:
        partners = sorted(next(iter(pair - {host})) for pair in wrong if host in pair)
        text = f"collectives are wrong with {', '.join(partners)}; either side may be the cause"
        given[host] = HostReason(INCONCLUSIVE, COLLECTIVES, "pairs", text)
    return given


def _votes(states: Sequence[HostState], test: str, unhealthy: set[str]) -> list[dict[Voter, dict[str, Any]]]:
    """First values by case, grouped by equal key; without unhealthy hosts, and without those with golden values."""
    groups: defaultdict[str, dict[Voter, dict[str, Any]]] = defaultdict(dict)
    for state in states:
        # An unhealthy host explains its own difference, and golden values have already decided.
        if state.host in unhealthy or test in state.golden:
            continue
        if test == GEMM:
            for slot, products in state.products.items():
                groups[str(sorted(state.key.items()))][state.host, slot] = products
        else:
            for slot, run in state.runs.items():
                groups[str(sorted(run["key"].items()))][state.host, slot] = run_values(run)
    return list(groups.values())


def run_values(run: Mapping[str, Any]) -> dict[str, Any]:
    """Results of a training run by name, in the order of execution."""
    names = (f"step {a[0]}, {a[2]} of {a[3]} ({a[4]}), micro-batch {a[1]}" for a in run["trace"]["addresses"])
    values: dict[str, Any] = dict(zip(names, run["trace"]["checksums"], strict=True))
    return values | {f"loss of step {step}": loss for step, loss in enumerate(run["losses"], 1)}


def _from_vote(test: str, values: Mapping[Voter, Mapping[str, Any]]) -> dict[str, HostReason]:
    """Hosts that differ from the majority of hosts of an equal key; without a majority, all, as inconclusive."""
    # A host has one vote, since a fault may affect all of its devices; a host whose devices differ is unhealthy.
    cases: dict[str, defaultdict[str, list[str]]] = {name: defaultdict(list) for name in _DIFFERS}
    for case in dict.fromkeys(case for own in values.values() for case in own):
        of_host: defaultdict[str, set[Any]] = defaultdict(set)
        for (host, _), own in values.items():
            of_host[host] |= {own[case]} if case in own else set()
        votes = {host: next(iter(given)) for host, given in of_host.items() if len(given) == 1}
        most, count = Counter(votes.values()).most_common(1)[0] if votes else (None, 0)
        for host, given in of_host.items():
            if len(given) > 1:
                cases["own devices"][host].append(case)
            elif host in votes and count < len(votes) and 2 * count <= len(votes):
                cases["other hosts"][host].append(case)
            elif host in votes and votes[host] != most:
                cases["majority"][host].append(case)
    reasons: dict[str, HostReason] = {}
    for evidence, (status, text) in _DIFFERS.items():
        for host, found in cases[evidence].items():
            told = f"{len(found):,} results differ {text}; first: {found[0]}"
            reasons.setdefault(host, HostReason(status, test, evidence, told))
    return reasons


def _untested(state: HostState) -> list[HostReason]:
    if state.lost is not None:
        text = f"{state.lost['how']} after {state.rounds:,} whole rounds: {state.lost['detail']}"
        return [HostReason(NOT_TESTED, "all", "no answer", text)]
    asked = [test for test in state.plan["only"] if test != LINKS]  # of pairs; no verdict on a host rests on them
    missing = [test for test in asked if not state.tests.get(test) or not state.tests[test].compared]
    if not missing or (_has_nobody_to_meet(state) and missing == [COLLECTIVES] != asked):
        return []
    return [HostReason(NOT_TESTED, test, "no answer", f"nothing was compared in {test}") for test in missing]


def _has_nobody_to_meet(state: HostState) -> bool:
    """Whether it is the only host and has one process, so that there are no collectives."""
    return len(state.plan["hosts"]) == 1 and state.rounds > 0 and not state.meetings


def _add(reasons: Mapping[str, list[HostReason]], given: Mapping[str, HostReason]) -> None:
    for host, reason in given.items():
        reasons[host].append(reason)


def _worst(given: Sequence[HostReason]) -> str:
    statuses = {reason.status for reason in given}
    return next((status for status in (UNHEALTHY, INCONCLUSIVE, NOT_TESTED) if status in statuses), HEALTHY)


def _verdict(state: HostState, given: list[HostReason], states: Sequence[HostState]) -> HostVerdict:
    order = [UNHEALTHY, INCONCLUSIVE, NOT_TESTED]
    rates = {}
    for test, count in state.tests.items():
        at_most = None if count.wrong or not count.compared else rate_bound(count.compared)
        rates[test] = {"compared": count.compared, "wrong": count.wrong, "at_most": at_most}
    notes = [*state.notes]
    if COLLECTIVES in state.plan["only"] and _has_nobody_to_meet(state):
        notes.append("no collectives: one device, and no other host; name two hosts to test them")
    if state.dropped:
        notes.append(f"{state.dropped:,} more findings were not stored")
    return HostVerdict(
        host=state.host,
        status=_worst(given),
        rounds=state.rounds,
        rests_on={test: _rests_on(state, test, states) for test in state.tests},
        reasons=sorted(given, key=lambda reason: order.index(reason.status)),
        rates=rates,
        findings=state.findings,
        notes=notes,
    )


def _rests_on(state: HostState, test: str, states: Sequence[HostState]) -> str:
    """The evidence of a test in words."""
    if test == COLLECTIVES:
        partners = [name for name in state.meetings if name != ALONE]
        alone = ["its own processes"] if ALONE in state.meetings else []
        met = alone + ([f"{len(partners)} host{'s' if len(partners) > 1 else ''}"] if partners else [])
        return f"sums known beforehand, with {' and '.join(met)}" if met else "nothing: it had no partner"
    if test in state.golden:
        return "golden values"
    own = ["repetition", *([f"fp64 within rounding ({state.checked:,})"] if test == GEMM else [])]
    peers = sum(_comparable(state, other, test) for other in states)
    return ", ".join([*own, *([f"{peers} host{'s' if peers > 1 else ''} of an equal key"] if peers else [])])


def _comparable(state: HostState, other: HostState, test: str) -> bool:
    if other.host == state.host or test in other.golden:
        return False
    if test == GEMM:
        return bool(other.products) and other.key == state.key
    keys = [run["key"] for run in other.runs.values()]
    return any(run["key"] in keys for run in state.runs.values())
