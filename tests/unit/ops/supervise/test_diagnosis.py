"""What went wrong, from each kind of evidence; hosts are those of the hostfile, where the evidence names them."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from megasdc.common.addresses import FORWARD, Address
from megasdc.common.errors import ConfigError, TraceError
from megasdc.ops.health.incident_file import HangIncident
from megasdc.ops.supervise.diagnosis import OF_HOSTS, AttemptEvidence, HostCheckResult, UnfitHost, diagnose
from megasdc.sdc.incident import DisputedRank, Environment, FlaggedRank, Incident
from megasdc.sdc.incident import IncidentEvidence as SdcEvidence

ENDED = AttemptEvidence(79, 1, "b", ("rank 1 on b: no done record",), ("a", "a", "b", "b"), reached=7, steps=50)


def hang(kind: str, *ranks: int, hosts: tuple[str, ...] = ()) -> HangIncident:
    """A standstill."""
    return HangIncident(Path("hang.json"), f"hang/{kind}", "run", 0.0, "nothing moved", ranks, hosts, {}, (), ())


@pytest.mark.parametrize(
    ("changes", "kind", "hosts"),
    [
        ({"exit_code": 0, "reached": 50}, "done", ()),
        *(({"exit_code": code, "asked": "by SIGTERM"}, "stopped", ()) for code in (0, 143)),
        ({"exit_code": 0}, "launch", ()),
        ({"exit_code": 130}, "rank_lost", ("b",)),
        *(({"exit_code": code, "grows": True}, "grown", ()) for code in (0, 143, None)),
        ({"exit_code": 1, "grows": True}, "rank_failed", ("b",)),
        ({"exit_code": 0, "left_out": ("a",), "asked": "by SIGTERM"}, "stopped", ()),
        ({"exit_code": 0, "left_out": ("a",)}, "corrupt_again", ("a",)),
        ({"exit_code": 0, "reached": 50, "left_out": ("a",)}, "done", ()),
        ({"exit_code": 0, "grows": True, "left_out": ("a",)}, "corrupt_again", ("a",)),
        ({"exit_code": 73, "left_out": ("a",)}, "corrupt_again", ("a",)),
        ({"exit_code": 78, "left_out": ("a",), "unreachable": ("b",)}, "corrupt_again", ("a", "b")),
        ({"exit_code": 78, "left_out": ("a",)}, "corrupt_again", ("a",)),
        ({"exit_code": 0, "interrupted": "the job ends"}, "preempted", ()),
        ({"exit_code": 0, "reached": 50, "interrupted": "the job ends"}, "done", ()),
        ({"exit_code": None, "interrupted": "the job ends"}, "preempted", ()),
        ({"exit_code": 78, "interrupted": "the job ends"}, "preempted", ()),
        ({"exit_code": 78, "interrupted": "the job ends", "unreachable": ("b",)}, "host_lost", ("b",)),
        ({"exit_code": 77, "interrupted": "the job ends"}, "storage", ()),
        ({"exit_code": 2}, "input", ()),
        ({"exit_code": 70}, "input", ()),
        ({"exit_code": 70, "lines": ("this rank could not get the memory it asked for",)}, "memory", ()),
        ({"exit_code": 71}, "input", ()),
        ({"exit_code": 72}, "checkpoint", ()),
        ({"exit_code": 74}, "non_finite", ()),
        ({"exit_code": 75}, "stuck", ()),
        ({"exit_code": 77}, "storage", ()),
        ({"exit_code": 1}, "rank_failed", ("b",)),
        ({"exit_code": 1, "failed_host": None}, "rank_failed", ()),
        ({}, "rank_lost", ("b",)),
        ({"exit_code": 78}, "rank_lost", ("b",)),
        ({"exit_code": 78, "ended_by": signal.SIGKILL}, "rank_lost", ("b",)),
        ({"exit_code": 78, "ended_by": signal.SIGKILL, "memory": "host"}, "memory_of_host", ("b",)),
        ({"exit_code": 78, "ended_by": signal.SIGKILL, "memory": "run"}, "memory", ()),
        ({"exit_code": 78, "memory": "run", "failed_host": None, "failed_rank": None}, "memory", ()),
        *(({"exit_code": 78, "ended_by": by}, "rank_crashed", ("b",)) for by in (signal.SIGSEGV, signal.SIGABRT)),
        ({"exit_code": 78, "failed_rank": None, "failed_host": None}, "launch", ()),
        ({"exit_code": 78, "failed_rank": None, "failed_host": None, "ended_by": signal.SIGKILL}, "ranks_lost", ()),
        ({"exit_code": 78, "failed_rank": None, "failed_host": None, "ended_by": signal.SIGSEGV}, "launch", ()),
        ({"exit_code": 99}, "rank_lost", ("b",)),
        ({"exit_code": None}, "launch", ()),
        ({"exit_code": 78, "unreachable": ("b",)}, "host_lost", ("b",)),
        ({"exit_code": 70, "unreachable": ("b",)}, "input", ()),
        ({"exit_code": 75, "hang": hang("behind", 0)}, "hang", ("a",)),
        ({"exit_code": 75, "hang": hang("mismatch", 0, 1)}, "hang", ("a",)),
        ({"exit_code": 75, "hang": hang("unknown")}, "stuck", ()),
        ({"exit_code": 75, "hang": hang("link", hosts=("a", "b"))}, "link", ("a", "b")),
        ({"exit_code": 75, "hang": hang("link", hosts=("10.0.0.1",))}, "stuck", ()),
        ({"exit_code": 79, "hang": hang("gone", 2)}, "rank_lost", ("b",)),
    ],
)
def test_each_evidence_has_its_diagnosis(changes: dict[str, object], kind: str, hosts: tuple[str, ...]) -> None:
    """By what is certain first: a host that cannot be reached, what was named, the exit code."""
    found = diagnose(replace(ENDED, **changes))  # type: ignore[arg-type]
    assert (found.kind, found.hosts, found.step) == (kind, hosts, changes.get("reached", 7))
    assert found.text


def test_corruption_names_the_hosts_of_its_ranks() -> None:
    """A verdict that does not settle who is wrong names all; where another code ended the run it is not the cause."""
    place, first = (2, "host-2", "H200", 0, 0, 0), Address(7, 0, FORWARD, "1.layer", "output")
    flagged = FlaggedRank(*place, "persistent", first, None, None, 5, 5, None)
    one = Incident(
        *("2026-03-01T02:03:04+00:00", "runs/my", 7, 0, "audit", "persistent", "replay", "halt", "halted"),
        *((flagged,), (), (), SdcEvidence(4, {}), Environment({}, {}, "bf16")),
    )
    for verdict, kind in (
        ("persistent", "corrupt_again"),
        ("intermittent", "corrupt_again"),
        ("not_reproduced", "corrupt_once"),
        ("inconclusive", "corrupt_one_of"),
    ):
        found = diagnose(replace(ENDED, exit_code=73, corruption=replace(one, verdict=verdict)))
        assert (found.kind, found.hosts) == (kind, ("b",))
    disputed = tuple(DisputedRank(rank, *place[1:], first, None) for rank in (0, 2))
    found = diagnose(replace(ENDED, exit_code=73, corruption=replace(one, flagged=(), disputed=disputed)))
    assert found.hosts == ("a", "b")
    assert diagnose(replace(ENDED, exit_code=72, corruption=one)).kind == "checkpoint"


def test_wrong_results_without_a_report_are_no_failure_of_the_launch() -> None:
    """As where the last save of a run leads nowhere: nobody is named, whoever failed first, and nobody replaced."""
    text = "step_00000050 is the last checkpoint, and megasdc.json: replicas have consumed 8 samples of the stream"
    found = diagnose(replace(ENDED, exit_code=73, lines=[text]))
    assert (found.kind, found.hosts, found.text) == ("corrupt", (), text)
    assert diagnose(replace(ENDED, exit_code=73, failed_rank=None, failed_host=None)).kind == "corrupt"


@pytest.mark.parametrize("code", OF_HOSTS)
def test_what_one_host_lacks_and_others_have_is_its_own(code: int) -> None:
    """Whatever the exit code: hosts of the attempt are named, others and spares are what they are compared with."""
    lacks = tuple(UnfitHost(host, 71, f"{host}: no data") for host in ("b", "spare"))
    found = diagnose(replace(ENDED, exit_code=code, checked=HostCheckResult(lacks, ("a",))))
    assert (found.kind, found.hosts, found.text) == ("unfit", ("b",), "b: no data")
    alone = replace(ENDED, exit_code=code, host_of_rank=("b",))
    assert diagnose(replace(alone, checked=HostCheckResult(lacks[:1], ("spare",)))).kind == "unfit", "the spare has it"
    for same in (HostCheckResult(lacks, ()), HostCheckResult((), ("a", "b"))):
        assert diagnose(replace(ENDED, exit_code=code, checked=same)).kind not in ("unfit", "no_room")
    assert diagnose(replace(ENDED, exit_code=79, checked=HostCheckResult(lacks, ("a",)))).kind == "rank_lost"
    given_up = replace(ENDED, exit_code=code, checked=HostCheckResult(given_up=True))
    assert "before it was known whether one host alone has it" in diagnose(given_up).text
    assert diagnose(replace(given_up, interrupted="the job is about to end")).kind == "preempted", "the next one looks"


@pytest.mark.parametrize("code", OF_HOSTS)
def test_an_error_of_one_host_that_no_check_finds_now_was_its_own_where_a_check_would_find_it(code: int) -> None:
    """Not memory of one stage alone, or one rank's trace: no check looks at it, and the next host has it too."""
    mended = replace(ENDED, exit_code=code, checked=HostCheckResult((), ("a", "b")), failed_alike=("b",))
    found = diagnose(mended)
    if code in (ConfigError.exit_code, TraceError.exit_code):
        assert (found.kind, found.hosts) == ("input", ())
        return
    assert (found.kind, found.hosts) == ("mended", ("b",)), "others had it not, nobody has it now"
    assert found.text.endswith("; the check of all hosts finds nothing now")
    for known in ({"failed_alike": ("a", "b")}, {"failed_alike": ()}, {"checked": HostCheckResult((), ("b",))}):
        assert diagnose(replace(mended, **known)).kind != "mended"  # type: ignore[arg-type]


def test_a_list_of_problems_is_told_with_them() -> None:
    """As the front has said them, in one line; other lines that follow the first are left out."""
    lines = tuple(str(ConfigError(["a: got 1; set 2", "b: missing"], "run.json")).splitlines())
    found = diagnose(replace(ENDED, exit_code=70, lines=(*lines, "last")))
    assert found.text == "2 problems in run.json: a: got 1; set 2; b: missing"
    assert diagnose(replace(ENDED, lines=("it ended:", "so"))).text == "it ended:"


def test_what_all_hosts_have_is_the_inputs_though_one_lacks_something_else() -> None:
    """The error that has ended it is looked at first."""
    wrong = tuple(UnfitHost(host, 70, "the configuration is wrong") for host in ("a", "b"))
    more = UnfitHost("b", 77, "b: read-only")
    assert diagnose(replace(ENDED, exit_code=70, checked=HostCheckResult((*wrong, more), ()))).kind == "input"
    assert diagnose(replace(ENDED, exit_code=77, checked=HostCheckResult((*wrong, more), ()))).hosts == ("b",)


def test_a_host_whose_memory_has_no_room_for_snapshots_is_told_from_others() -> None:
    """Without them the run could go on there; not where the host lacks more."""
    full = UnfitHost("b", 70, "b: no room", snapshots=True)
    assert diagnose(replace(ENDED, exit_code=70, checked=HostCheckResult((full,), ("a",)))).kind == "no_room"
    both = HostCheckResult((full, UnfitHost("b", 77, "b: read-only")), ("a",))
    assert diagnose(replace(ENDED, exit_code=70, checked=both)).kind == "unfit"
    other = diagnose(
        replace(ENDED, exit_code=77, checked=HostCheckResult((full, UnfitHost("a", 77, "a: read-only")), ("c",)))
    )
    assert (other.kind, other.hosts, other.text) == ("unfit", ("a",), "a: read-only"), "b is named where it is needed"
    everywhere = HostCheckResult((full, replace(full, host="a")), ())
    assert diagnose(replace(ENDED, exit_code=70, checked=everywhere, reached=1)).kind == "input"
    later = diagnose(replace(ENDED, exit_code=70, checked=everywhere, reached=20))
    assert (later.kind, later.hosts) == ("no_room", ("b", "a")), "at a restart the run goes on without"
