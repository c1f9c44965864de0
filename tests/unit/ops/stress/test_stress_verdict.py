"""Which verdict does a host get, from what it and others showed, and with which exit code?"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from megasdc.ops.stress.drill import DrillRequest
from megasdc.ops.stress.host_verdict import HEALTHY, INCONCLUSIVE, NOT_TESTED, UNHEALTHY, HostVerdict, judge_stress
from megasdc.ops.stress.result import stress_outcome
from megasdc.ops.stress.state import ALONE, Count, HostState

PLAN = {"hosts": [], "only": ["collectives", "gemm", "training"], "drill": None}
RUN = {
    "losses": ["0x1p+0"],
    "trace": {"addresses": [[1, 0, "forward", "a", "output"]], "checksums": [5]},
    "key": {"device": "x"},
}


def state(host: str, **changes: Any) -> HostState:
    """A host of which nothing is wrong."""
    known = HostState(host, PLAN, 3, {"device": "x"}, slots=1)
    known.tests = {name: Count(100, 0) for name in PLAN["only"]}
    known.meetings = {ALONE: Count(50, 0)}
    known.products = {"0": {"case": 1, "other": 2}}
    known.runs = {"0": RUN}
    for name, value in changes.items():
        setattr(known, name, value)
    return known


def statuses(states: list[HostState]) -> list[str]:
    return [verdict.status for verdict in judge_stress(states)]


def verdict_of(states: list[HostState], host: str) -> HostVerdict:
    return next(verdict for verdict in judge_stress(states) if verdict.host == host)


def wrong(test: str, against: str | None = None, **more: Any) -> dict[str, Any]:
    known = {} if against is None else {"against": against}
    return {"test": test, "round": 2, "slot": 0, "what": "case", **known, **more}


def test_hosts_without_a_difference_are_healthy() -> None:
    """Each says what it rests on, and the rate of errors that so many results still leave open: (1 - p)^100 = 0.05."""
    verdicts = judge_stress([state(host) for host in "abc"])
    assert [verdict.status for verdict in verdicts] == [HEALTHY] * 3
    assert verdicts[0].reasons == []
    assert (1 - verdicts[0].rates["gemm"]["at_most"]) ** 100 == pytest.approx(0.05)
    assert verdicts[0].rests_on == {
        "collectives": "sums known beforehand, with its own processes",
        "gemm": "repetition, fp64 within rounding (0), 2 hosts of an equal key",
        "training": "repetition, 2 hosts of an equal key",
    }


@pytest.mark.parametrize("against", ["golden", "first", "reference"])
def test_own_wrong_results_make_a_host_unhealthy(against: str) -> None:
    """With what was wrong: elements, bits, how often; the other host is not touched."""
    finding = wrong("gemm", against, elements=3, of=64, bits={"7": 2, "12": 5})
    bad = state("b", tests={**state("b").tests, "gemm": Count(100, 4)}, findings=[finding])
    verdict = verdict_of([state("a"), bad], "b")
    assert (verdict.status, verdict.reasons[0].evidence) == (UNHEALTHY, against)
    assert "4 of 100 results wrong; case in round 2, 3 of 64 elements, bits 12 (5x), 7 (2x)" in verdict.reasons[0].text
    assert verdict.rates["gemm"]["at_most"] is None
    assert verdict_of([state("a"), bad], "a").status == HEALTHY


def test_a_wrong_group_of_its_own_names_a_host_also_of_two() -> None:
    """What is wrong among a host's own processes explains its wrong pair, so that the partner is healthy."""
    findings = [wrong("collectives"), {**wrong("collectives"), "round": 5}]
    bad = state("b", meetings={ALONE: Count(50, 2), "a": Count(50, 9)}, findings=findings)
    good = state("a", meetings={ALONE: Count(50, 0), "b": Count(50, 9)})
    assert statuses([good, bad]) == [HEALTHY, UNHEALTHY]
    reason = verdict_of([good, bad], "b").reasons[0]
    assert reason.evidence == "alone" and reason.text.endswith("; first: case in round 2")


@pytest.mark.parametrize("number", range(3, 9))
def test_wrong_pairs_name_their_common_host(number: int) -> None:
    """Of 3 to 8 hosts each that is wrong with all others is unhealthy by the pairs, and nobody else."""
    names = [f"h{place}" for place in range(number)]
    for culprit in names:
        meetings: dict[str, dict[str, Count]] = {name: {} for name in names}
        for a, b in combinations(names, 2):
            for one, other in ((a, b), (b, a)):
                meetings[one][other] = Count(50, 5 if culprit in (a, b) else 0)
        given = statuses([state(name, meetings=meetings[name]) for name in names])
        assert given == [UNHEALTHY if name == culprit else HEALTHY for name in names]


def test_one_wrong_pair_accuses_nobody() -> None:
    """Both sides are inconclusive."""
    pair = [state("a", meetings={"b": Count(50, 1)}), state("b", meetings={"a": Count(50, 0)})]
    assert statuses([*pair, state("c")]) == [INCONCLUSIVE, INCONCLUSIVE, HEALTHY]


@pytest.mark.parametrize("test", ["gemm", "training"])
def test_most_hosts_of_an_equal_key_decide(test: str) -> None:
    """Three or more: who differs from most is unhealthy; two: both inconclusive; of another key: not compared."""
    other = {"products": {"0": {"case": 1, "other": 9}}}
    if test == "training":
        other = {"runs": {"0": {**RUN, "losses": ["0x1p+1"]}}}
    odd = state("b", **other)
    assert statuses([state("a"), odd, state("c")]) == [HEALTHY, UNHEALTHY, HEALTHY]
    verdict = verdict_of([state("a"), odd, state("c")], "b")
    assert (verdict.reasons[0].evidence, verdict.reasons[0].test) == ("majority", test)
    assert verdict.reasons[0].text.endswith("first: other" if test == "gemm" else "first: loss of step 1")
    assert statuses([state("a"), odd]) == [INCONCLUSIVE, INCONCLUSIVE]
    apart = state("b", **other, key={"device": "y"})
    apart.runs["0"] = {**apart.runs["0"], "key": {"device": "y"}}
    assert statuses([state("a"), apart]) == [HEALTHY, HEALTHY]


def test_a_tie_decides_nothing() -> None:
    """Two against two: all four inconclusive."""
    odd = {"products": {"0": {"case": 7}}}
    assert statuses([state("a"), state("b"), state("c", **odd), state("d", **odd)]) == [INCONCLUSIVE] * 4


def test_golden_values_override_the_others() -> None:
    """Where golden values were there, a host is not voted about."""
    odd = state("b", golden=["gemm"], products={"0": {"case": 7}})
    assert statuses([state("a"), odd, state("c")]) == [HEALTHY] * 3
    assert verdict_of([odd], "b").rests_on["gemm"] == "golden values"


def test_an_unhealthy_host_accuses_no_other() -> None:
    """What fails by itself has no vote: two hosts that differ are not inconclusive when one is known to be wrong."""
    bad = state("b", products={"0": {"case": 7, "other": 2}}, findings=[wrong("gemm", "first")])
    bad.tests["gemm"] = Count(100, 1)
    assert statuses([state("a"), bad]) == [HEALTHY, UNHEALTHY]


def test_two_devices_of_one_host_that_differ() -> None:
    """One of them is wrong, and so is the host, whichever it is."""
    split = state("a", products={"0": {"case": 1}, "1": {"case": 2}})
    assert statuses([split]) == [UNHEALTHY]
    assert statuses([split, state("b")]) == [UNHEALTHY, HEALTHY]


def test_a_host_has_one_vote() -> None:
    """Two devices of one host do not outvote one of another; three hosts decide, however many devices each has."""
    many = state("a", products={"0": {"case": 7}, "1": {"case": 7}, "2": {"case": 7}})
    assert statuses([many, state("b")]) == [INCONCLUSIVE, INCONCLUSIVE]
    assert statuses([many, state("b"), state("c")]) == [UNHEALTHY, HEALTHY, HEALTHY]


def test_lost_hosts_are_not_tested() -> None:
    """A host that was lost is named with the reason, and the rest is judged; what it showed before still counts."""
    lost = {"how": "hung", "detail": "gave no answer in 5 s"}
    gone = state("b", lost=lost, meetings={"a": Count(1, 1)})
    verdict = verdict_of([state("a"), gone], "b")
    assert statuses([state("a"), state("b", lost=lost)]) == [HEALTHY, NOT_TESTED]
    assert verdict.reasons[-1].text == "hung after 3 whole rounds: gave no answer in 5 s"
    bad = state("b", lost=lost, findings=[wrong("training", "first")])
    bad.tests["training"] = Count(10, 1)
    assert statuses([state("a"), bad]) == [HEALTHY, UNHEALTHY]
    assert statuses([HostState("c", PLAN)]) == [NOT_TESTED]


def test_one_device_without_another_host_has_no_collectives() -> None:
    """It says so, and the rest decides; asked for nothing else, or beside a host that gave none, it is not tested."""
    plan = {**PLAN, "hosts": ["a"]}
    counts = {name: Count(100, 0) for name in ("gemm", "training")}
    (alone,) = judge_stress([state("a", plan=plan, meetings={}, tests=counts)])
    assert (alone.status, alone.reasons) == (HEALTHY, [])
    assert alone.notes == ["no collectives: one device, and no other host; name two hosts to test them"]
    assert statuses([state("a", plan=plan, meetings={}, tests={"gemm": Count(100, 0)})]) == [NOT_TESTED]
    assert statuses([state("a", plan={**plan, "only": ["collectives"]}, meetings={}, tests={})]) == [NOT_TESTED]
    pair = {**PLAN, "hosts": ["a", "b"]}
    assert statuses([state("a", plan=pair, meetings={}, tests=counts)]) == [NOT_TESTED]


def test_exit_codes() -> None:
    """0 if all are healthy; 73 if one is unhealthy or inconclusive, whatever else; 78 if one could not be tested."""
    bad = state("b", tests={**state("b").tests, "gemm": Count(9, 1)}, findings=[wrong("gemm", "first")])
    gone = HostState("c", PLAN, lost={"how": "unreachable", "detail": "x"})

    def code(*states: HostState) -> int:
        return stress_outcome(states).exit_code

    assert [code(state("a")), code(state("a"), gone), code(bad, gone), code(state("a"), bad)] == [0, 78, 73, 73]
    tie = state("b", products={"0": {"case": 7}})
    assert code(state("a"), tie) == 73


def test_a_drill_that_was_not_found_says_why() -> None:
    """Silent until a step that was not reached; too low a rate; no result that fits."""
    faults = [
        {"kind": "bit_flip", "phase": "forward", "submodule": "*", "steps": [450, None]},
        {"kind": "bit_flip", "phase": "forward", "submodule": "*", "steps": [1, None]},
        {"kind": "bit_flip", "phase": "forward", "submodule": "*", "steps": [1, None]},
    ]
    reasons = {"none came": 0.0, "never said so": 0.2, "too narrow": 0.0}
    did = [{"expected": expected, "changed": 0, "unfired": why} for why, expected in reasons.items()]
    states = [state("a")]
    report = stress_outcome(states, DrillRequest("p", "a", faults), did).contents["drill"]
    assert not report["found"]
    assert [fault["unfired"] for fault in report["faults"]] == [
        "it is silent until step 450, and this test ended before that",
        "never said so; 0.2 were to be expected: its rate is low for so short a test",
        "too narrow",
    ]
