"""From records and the launcher's exit code to the true exit code and the story."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from megasdc.common.host import MemoryKill
from megasdc.common.origin import HostClock
from megasdc.ops.health.incident import STANDSTILL
from megasdc.ops.launch.launch_verdict import ABORTED, after_suspension, describe_code, judge_launch
from megasdc.ops.launch.records import DoneRecord, EndedRecord, HostRecord, LaunchRecords, StartedRecord, parse_records

HOSTS = ["a", "a", "b", "b"]
CLOCKS = {"a": HostClock("a", 5000.0, 0.0, 0.001, 0.0), "b": HostClock("b", -70.0, 0.0, 0.002, 0.0)}
"""Monotonic clocks of the hosts against that of the front, as the front may have measured them; boots by host."""


Moved = dict[str, float]
"""By how many seconds the date of a host is ahead."""


def records_of(
    codes: dict[int, int], times: dict[int, float] | None = None, moved: Moved | None = None
) -> LaunchRecords:
    """All ranks started; those of ``codes`` are done, each at its time of ``times``, by the date of its host."""
    records = LaunchRecords({rank: StartedRecord(rank, HOSTS[rank], 1, 0.0) for rank in range(4)})
    for rank, code in codes.items():
        at, host = (times or {}).get(rank, 1.0), HOSTS[rank]
        when = at + (moved or {}).get(host, 0.0)
        there = at + CLOCKS[host].monotonic_s
        record = DoneRecord(rank, host, code, None, f"reason {rank}", when, f"reason {rank}", False, host, there, DONE)
        records.done[rank] = record
    return records


DONE = "all steps done"
SUCCESS = dict.fromkeys(range(4), 0)


@pytest.mark.parametrize(
    ("codes", "launcher_code", "expected", "line"),
    [
        (SUCCESS, 0, 0, "all 4 ranks are done"),
        (SUCCESS, 1, 0, "all 4 ranks are done"),
        ({0: 0, 1: 0, 2: 0}, 0, 78, "rank 3 on b: no done record (killed or host lost; launcher said exit code 0)"),
        (
            {0: 79, 1: 79, 2: 79},
            255,
            78,
            "rank 3 on b: no done record (killed or host lost; launcher said exit code 255",
        ),
        ({0: 79, 1: 79, 2: 79, 3: 79}, 79, 79, "of 4 ranks on several hosts was first is not known"),
        ({0: 79, 2: 71}, 79, 71, "rank 2 on b failed first with exit code 71 (DataError): reason 2"),
        ({0: 79}, 77, 77, "launcher said exit code 77 (StorageError)"),
        ({}, -15, 78, "launcher said exit code -15 (a process was ended by SIGTERM)"),
    ],
)
def test_exit_code_and_first_line(codes: dict[int, int], launcher_code: int, expected: int, line: str) -> None:
    """0 only if every rank says so; consequences never hide the cause."""
    verdict = judge_launch(HOSTS, records_of(codes), launcher_code)
    assert verdict.exit_code == expected
    assert line in verdict.lines[0]


def test_who_ended_first_on_its_host_is_named_before_those_that_were_ended_then() -> None:
    """Of ranks without a record; the earliest of several hosts by the front's clock, else nobody is blamed."""
    records = records_of({})
    records.ended.update({1: EndedRecord(1, "a", -6, 5.0, "a", 5005.0), 3: EndedRecord(3, "b", -9, 9.0, "b", -66.0)})
    unknown = judge_launch(HOSTS, records, 250)
    assert (unknown.failed_rank, unknown.failed_host) == (None, None)
    assert unknown.lines[0].endswith("; which of 2 ranks on several hosts was first is not known")
    verdict = judge_launch(HOSTS, records, 250, clocks=CLOCKS)
    assert (verdict.failed_rank, verdict.failed_host, verdict.ended_by) == (3, "b", 9)
    assert verdict.lines[0].startswith("rank 3 on b: no done record (killed by SIGKILL; launcher said exit code 250")
    assert verdict.lines[1].startswith("rank 1 on a: no done record (killed by SIGABRT; ")
    assert verdict.lines[2].startswith("rank 0 on a: no done record (killed or host lost; ")


@pytest.mark.parametrize(("code", "number"), [(139, 11), (245, 11), (137, 9), (255, None), (78, None), (-11, None)])
def test_a_signal_is_known_by_the_launchers_code_where_it_leaves_no_record_of_its_ranks(
    code: int, number: int | None
) -> None:
    """As of a step of SLURM; not where several ranks may have been ended by it, or it was the launcher itself."""
    assert judge_launch(HOSTS, records_of({0: 79, 1: 79, 2: 79}), code).ended_by == number
    assert judge_launch(HOSTS, records_of({0: 79, 1: 79}), code).ended_by is None


GIB = 1 << 30


@pytest.mark.parametrize(
    ("others", "elsewhere", "whose", "said"),
    [
        (1.0, 7.5, "run", "the run needs more than that"),
        (2.5, 7.5, "host", "other programs have taken it meanwhile"),
        (1.0, 12.0, "host", "other hosts had 6.00 GiB left for each rank: this one had 3.50 GiB"),
        (1.0, None, "run", "the run needs more than that"),
    ],
)
def test_a_rank_out_of_memory_is_told_with_numbers_and_whose_that_is(
    others: float, elsewhere: float | None, whose: str, said: str
) -> None:
    """Its host is the cause only where others took the memory there since the start, or other hosts have more."""
    records = records_of({0: 79, 1: 79, 2: 79})
    left = None if elsewhere is None else int(elsewhere * GIB)
    for rank in (0, 1):
        records.started[rank] = replace(records.started[rank], memory_bytes=left)
    kill = MemoryKill(8 * GIB, int(others * GIB), GIB, 6 * GIB)
    records.ended[3] = EndedRecord(3, "b", -9, 5.0, "b", -70.0, asdict(kill))
    verdict = judge_launch(HOSTS, records, 247)
    assert (verdict.failed_rank, verdict.failed_host, verdict.ended_by, verdict.memory) == (3, "b", 9, whose)
    assert "rank 3 on b: no done record" in verdict.lines[0] and said in verdict.lines[0]
    numbers = "out of memory: 8.00 GiB for programs, of which it had 6.00 GiB; other programs use "
    assert f"{numbers}{others:.2f} GiB there" in verdict.lines[0]
    records.ended[3] = replace(records.ended[3], memory=None)
    assert (
        judge_launch(HOSTS, records, 247).memory is None and "memory" not in judge_launch(HOSTS, records, 247).lines[0]
    )
    records.ended[1] = EndedRecord(1, "a", -9, 5.0)
    records.ended[3] = EndedRecord(3, "b", -9, 5.0, memory=asdict(kill))
    del records.done[1]
    assert judge_launch(HOSTS, records, 247).memory is None, "of the other nobody knows"
    records.ended[1] = EndedRecord(1, "a", -9, 5.0, memory=asdict(kill))
    assert (unknown := judge_launch(HOSTS, records, 247)).memory == (whose if whose == "run" else None)
    assert unknown.failed_host is None


@pytest.mark.parametrize(("others", "whose"), [(1.0, "run"), (2.5, "host")])
def test_a_rank_whose_worker_the_kernel_has_ended_for_memory_is_told_so(others: float, whose: str) -> None:
    """It has failed by an error of its own, which says nothing of its host."""
    records = records_of({0: 79, 1: 79, 2: 1, 3: 79})
    kill = MemoryKill(8 * GIB, int(others * GIB), GIB, 2 * GIB)
    records.ended[2] = EndedRecord(2, "b", 1, 5.0, memory=asdict(kill))
    verdict = judge_launch(HOSTS, records, 1)
    assert (verdict.exit_code, verdict.failed_rank, verdict.failed_host, verdict.memory) == (1, 2, "b", whose)
    assert "the kernel had no memory for a worker of it: 8.00 GiB for programs" in verdict.lines[0]
    records.ended[2] = replace(records.ended[2], memory=None)
    assert judge_launch(HOSTS, records, 1).memory is None and "memory" not in judge_launch(HOSTS, records, 1).lines[0]


def test_hosts_with_other_numbers_of_ranks_are_compared_by_what_each_rank_has() -> None:
    """Half the ranks on half the memory are as well off; numbers that are not known say nothing of a host."""
    hosts = ["a"] * 8 + ["b"] * 4
    started = {
        rank: StartedRecord(rank, host, 1, 0.0, memory_bytes=(500 if host == "a" else 250) * GIB)
        for rank, host in enumerate(hosts)
    }
    kill = MemoryKill(256 * GIB, 4 * GIB, 4 * GIB, 63 * GIB)
    for known in (kill, replace(kill, shared=90 * GIB), MemoryKill(None, None, None, 63 * GIB)):
        ended = {9: EndedRecord(9, "b", -9, 5.0, memory=asdict(known))}
        verdict = judge_launch(hosts, LaunchRecords(started=started, ended=ended), 247)
        assert verdict.memory == "run" and ("files in /dev/shm took 90.00 GiB" in verdict.lines[0]) == bool(
            known.shared
        )


@pytest.mark.parametrize(
    ("memory", "more"),
    [
        ('"x"', ""), ("[]", ""), ('{"total": 5}', ""), ('{"total": "a", "others": 1, "before": 2}', ""),
        ('{"total": 5, "others": 1, "before": 2, "new": 1}', ""), ("null", ', "exit_code": "-9"'),
    ],
)  # fmt: skip
def test_an_odd_record_of_an_end_is_told_and_not_used(memory: str, more: str) -> None:
    """As any other that is no record."""
    text = f'{{"rank": 1, "host": "b", "exit_code": -9, "time": 5.0, "memory": {memory}{more}}}'
    records = parse_records({"ended_00001.json": text})
    assert not records.ended and records.unreadable[0].startswith("ended_00001.json is not a record: ")
    assert records.unreadable[0] in judge_launch(["a", "b"], records, 247).lines
    started = '{"rank": 1, "host": "b", "pid": 1, "time": 5.0, "memory_bytes": "1"}'
    assert parse_records({"started_00001.json": started}).unreadable


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("message", 5), ("message", ["a"]), ("error_class", 5), ("end", 7), ("first_line", 5), ("rank", -3),
        ("rank", 1 << 70), ("exit_code", 1 << 70), ("time", float("nan")), ("monotonic", float("inf")),
    ],
)  # fmt: skip
def test_an_odd_record_of_a_rank_is_told_and_not_used(name: str, value: object) -> None:
    """The front ended in a traceback, and none of the others was judged."""
    done = {"rank": 1, "host": "b", "exit_code": 1, "error_class": None, "message": "", "time": 5.0, "first_line": ""}
    records = parse_records({"rank_00001.json": json.dumps({**done, name: value})})
    assert not records.done and records.unreadable[0].startswith(f"rank_00001.json is not a record: {name} is ")
    assert records.unreadable[0] in judge_launch(["a", "b"], records, 1).lines
    huge = '{"rank": 1, "host": "b", "exit_code": -9, "time": 5.0, "memory": {"total": 1%s, "others": 1, "before": 2}}'
    assert not parse_records({"ended_00001.json": huge % ("0" * 400)}).ended


def test_timeouts_after_a_suspension_blame_nobody() -> None:
    """The suspension is told first; other ends, and those of launches that always ran, are what they were."""
    records = records_of(dict.fromkeys(range(4), 75), {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0})
    verdict = judge_launch(HOSTS, records, 75, clocks=CLOCKS)
    assert (verdict.exit_code, verdict.failed_host) == (75, "a") and after_suspension(verdict, records, 0.0) == verdict
    found = after_suspension(verdict, records, 4000.0)
    assert (found.exit_code, found.failed_rank, found.failed_host) == (75, None, None)
    assert found.lines[0].startswith("this launch stood still for 4000 s") and found.lines[1:] == verdict.lines
    for code in (0, 71, 73):
        others = records_of({**SUCCESS, 1: 75, 2: code} if code else SUCCESS)
        other = judge_launch(HOSTS, others, code)
        assert after_suspension(other, others, 4000.0) == other
    for rank, done in records.done.items():
        records.done[rank] = replace(done, message=f"{STANDSTILL} 9 s: rank 1 on a")
    agreed = judge_launch(HOSTS, records, 75)
    assert after_suspension(agreed, records, 25.0) == agreed, "the front alone was stopped"
    for text in ("[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 10000ms", "Connection reset by peer"):
        for rank, done in records_of(dict.fromkeys(range(4), 1)).done.items():
            records.done[rank] = replace(done, error_class="RuntimeError", message=text)
        assert after_suspension(judge_launch(HOSTS, records, 1, clocks=CLOCKS), records, 25.0).failed_host is None


def interrupt(records: LaunchRecords, *ranks: int) -> LaunchRecords:
    """These ranks ended by SIGINT."""
    for rank in ranks:
        records.done[rank] = DoneRecord(rank, HOSTS[rank], 130, "KeyboardInterrupt", "", 0.5, "")
    return records


def test_interrupted_ranks_are_no_cause() -> None:
    """They were stopped on request, or by the front because another had failed or was lost."""
    for codes in ({}, {2: 79, 3: 79}):
        ranks = [rank for rank in range(4) if rank not in codes]
        verdict = judge_launch(HOSTS, interrupt(records_of(codes), *ranks), 1, stopped_by=2)
        assert (verdict.exit_code, verdict.failed_rank) == (130, None)
        assert "stopped by SIGINT; interrupted before it could save: rank" in verdict.lines[0]
    assert judge_launch(HOSTS, interrupt(records_of({0: 79, 3: 71}), 1, 2), 1).failed_rank == 3
    lost = judge_launch(HOSTS, interrupt(records_of({0: 79}), 1, 2), 1)
    assert (lost.exit_code, lost.failed_rank) == (78, 3)


def test_first_is_first_in_time_without_consequences() -> None:
    """A PeerError that came earlier is still a consequence."""
    verdict = judge_launch(HOSTS, records_of({0: 72, 1: 71, 2: 79}, {0: 5.0, 1: 4.0, 2: 1.0}), 79)
    assert (verdict.exit_code, verdict.failed_rank, verdict.failed_host) == (71, 1, "a")
    assert "after it failed: ranks 0 on a, 2 on b" in verdict.lines
    assert "without a done record: rank 3 on b" in verdict.lines


def test_rank_that_never_started_is_told_apart() -> None:
    """No start record means the fault lies before the training script."""
    verdict = judge_launch(HOSTS, LaunchRecords(), 1, unreachable={"b": "b: cannot be reached"})
    assert "never started" in verdict.lines[0]
    assert "b: cannot be reached" in verdict.lines


def test_stop_on_request_is_success_when_all_ranks_are_done() -> None:
    """After a signal 0 means that every rank has saved; a rank without a record or a failure still shows."""
    verdict = judge_launch(HOSTS, records_of(SUCCESS), 1, stopped_by=15)
    assert (verdict.exit_code, verdict.lines) == (
        0,
        ["stopped by SIGTERM, all 4 ranks saved and are done"],
    )
    assert judge_launch(HOSTS, records_of({0: 0, 1: 0, 2: 0}), 1, stopped_by=10).exit_code == 138
    assert judge_launch(HOSTS, records_of({**SUCCESS, 2: 79}), 1, stopped_by=15).exit_code == 79
    assert judge_launch(HOSTS, records_of({0: 72}), 1, stopped_by=15).exit_code == 72


@pytest.mark.parametrize(
    ("error_class", "message"),
    [("DistBackendError", "NCCL error"), ("RuntimeError", "[gloo/transport/tcp/pair.cc] Connection closed by peer")],
)
def test_survivor_of_a_killed_rank_is_not_the_cause(error_class: str, message: str) -> None:
    """A broken collective with exit code 1 is a consequence of the rank that left no record."""
    records = records_of({0: 1})
    records.done[0] = DoneRecord(0, "a", 1, error_class, message, 1.0, message)
    records.done.update(records_of({1: 79, 2: 79}).done)
    verdict = judge_launch(HOSTS, records, 1)
    assert (verdict.exit_code, verdict.failed_rank, verdict.failed_host) == (78, 3, "b")
    records.done.update(records_of({3: 71}).done)
    assert judge_launch(HOSTS, records, 1).failed_rank == 3


def test_a_host_whose_launcher_failed_is_told_beside_its_ranks() -> None:
    """The only word there is of ranks that had not begun."""
    records = records_of({0: 0, 1: 0})
    records.failed_hosts["b"] = HostRecord("b", 137, 1.0)
    verdict = judge_launch(HOSTS, records, 137)
    assert (verdict.exit_code, verdict.failed_rank, verdict.failed_host) == (78, 2, "b")
    assert "the launcher of host b ended with exit code 137 (a process was ended by SIGKILL)" in verdict.lines


@pytest.mark.parametrize("launcher_code", [-6, 134, 250])
def test_an_aborted_rank_is_told_what_ends_ranks_so(launcher_code: int) -> None:
    """PyTorch's watchdog over NCCL, after a timeout or an error of CUDA: the two are not told apart here."""
    verdict = judge_launch(HOSTS, records_of({0: 79, 1: 79, 2: 79}), launcher_code)
    assert (verdict.exit_code, verdict.failed_rank) == (78, 3)
    assert "ended by SIGABRT" in verdict.lines[0] and ABORTED in verdict.lines
    assert ABORTED not in judge_launch(HOSTS, records_of({0: 79}), 247).lines
    lost = records_of({0: 79})
    lost.failed_hosts["b"] = HostRecord("b", 134, 1.0)
    assert ABORTED in judge_launch(HOSTS, lost, 255).lines


def test_codes_in_words() -> None:
    """DeepSpeed returns 256 - signal, a shell 128 + signal."""
    assert "SIGKILL" in describe_code(247)
    assert "SIGKILL" in describe_code(137)
    assert "SIGSEGV" in describe_code(245)
    assert "host lost" in describe_code(255)
    assert describe_code(3) == "exit code 3"


def test_ranks_that_their_launcher_left_are_no_success_unless_a_stop_was_asked_for() -> None:
    """They save and end with 0, and steps are missing."""
    seen = judge_launch(HOSTS, records_of(SUCCESS), 0, outlived=True)
    assert seen.exit_code == 78
    assert "the launcher was killed, or ended before its ranks (exit code 0)" in seen.lines[0]
    assert judge_launch(HOSTS, records_of(SUCCESS), -9).exit_code == 78
    records = records_of(SUCCESS)
    records.done[2] = replace(records.done[2], launcher_gone=True)
    told = judge_launch(HOSTS, records, 0)
    assert (told.exit_code, told.failed_host) == (78, "b")
    assert "the launcher of rank 2 on b was killed" in told.lines[0]
    assert judge_launch(HOSTS, records, 1, stopped_by=15, outlived=True).exit_code == 0


OFFSETS = [sign * seconds for seconds in (2.0, 300.0, 7200.0, 259200.0) for sign in (1, -1)]


@pytest.mark.parametrize("offset_s", OFFSETS)
@pytest.mark.parametrize("host", ["a", "b"])
def test_the_date_of_a_host_changes_no_verdict(offset_s: float, host: str) -> None:
    """Two ranks fail within a second, the first of them on b: it alone is blamed, or nobody is, as clocks are known."""
    records = records_of({0: 1, 3: 71}, {0: 2.0, 3: 1.0}, {host: offset_s})
    verdict = judge_launch(HOSTS, records, 71, clocks=CLOCKS)
    assert (verdict.exit_code, verdict.failed_rank, verdict.failed_host) == (71, 3, "b")
    assert verdict.lines[0].startswith("rank 3 on b failed first with exit code 71 (DataError)")
    unknown = judge_launch(HOSTS, records, 71)
    assert (unknown.exit_code, unknown.failed_rank, unknown.failed_host) == (71, None, None), (
        "what says most is its code"
    )
    assert unknown.lines[0].endswith("; which of 2 ranks on several hosts was first is not known")
    alone = records_of({0: 1, 1: 71}, {0: 2.0, 1: 1.0}, {host: offset_s})
    assert judge_launch(HOSTS, alone, 71).failed_rank == 1, "on one host its monotonic clock tells"


def test_what_was_measured_too_coarsely_or_of_another_boot_tells_no_order() -> None:
    """Ends a second apart, clocks measured to two seconds, hours before, or before the host was booted anew."""
    records = records_of({0: 1, 3: 71}, {0: 2.0, 3: 1.0})
    for changed in ({"uncertainty_s": 2.0}, {"at": 86400.0}, {"boot_id": "another"}):
        clock = replace(CLOCKS["b"], **changed)
        assert judge_launch(HOSTS, records, 71, clocks={"a": CLOCKS["a"], clock.boot_id: clock}).failed_host is None


def test_a_host_is_known_by_its_boot_whatever_it_is_called() -> None:
    """Ranks write their host's own name, where the hostfile has an address; clocks are of the boot."""
    records = records_of({0: 1, 3: 71}, {0: 2.0, 3: 1.0})
    records.done.update({rank: replace(one, host=f"{one.host}.cluster") for rank, one in records.done.items()})
    assert judge_launch(HOSTS, records, 71, clocks=CLOCKS).failed_rank == 3


@pytest.mark.parametrize("offset_s", OFFSETS)
def test_a_finding_that_ranks_agree_on_is_the_cause_whoever_ended_first(offset_s: float) -> None:
    """Corruption before a standstill before NaN; a collective's timeout is no agreed finding."""
    times = {0: 1.0, 1: 2.0, 2: 2.0, 3: 3.0}
    for code in (73, 74, 75):
        records = records_of({0: 1, 1: code, 2: code, 3: 79}, times, {"b": offset_s})
        for rank in (1, 2):
            records.done[rank] = replace(records.done[rank], message=f"{STANDSTILL} 15 s: rank 0")
        verdict = judge_launch(HOSTS, records, 1, clocks=CLOCKS)
        assert (verdict.exit_code, verdict.failed_rank, verdict.failed_host) == (code, None, None)
        assert verdict.lines[0].startswith(f"ranks 1 on a, 2 on b ended with exit code {code} (")
        assert verdict.lines[1] == "with it failed: ranks 0 on a, 3 on b"
        assert verdict.console_lines == verdict.lines, "rank 0 has not printed it"
    verdict = judge_launch(HOSTS, records_of(dict.fromkeys(range(4), 73)), 1)
    assert verdict.lines[0].startswith("all 4 ranks ended with exit code 73 (CorruptionError): ")
    assert verdict.console_lines == ["all 4 ranks ended with exit code 73 (CorruptionError), as rank 0 has said"]
    assert judge_launch(HOSTS, records_of({0: 1, 2: 75}, {0: 1.0, 2: 5.0}), 1, clocks=CLOCKS).failed_rank == 0
    assert judge_launch(HOSTS, records_of({0: 73, 1: 75, 2: 74}), 1).exit_code == 73


def test_a_rank_that_waited_for_another_is_explained_by_it() -> None:
    """Its own time limit ended it; which was first is not known, and needs not be."""
    verdict = judge_launch(HOSTS, records_of({0: 75, 3: 71}), 75)
    assert (verdict.exit_code, verdict.failed_rank, verdict.failed_host) == (71, 3, "b")
    assert judge_launch(HOSTS, records_of({0: 75, 3: 75}), 75).failed_host is None


def test_records_of_earlier_versions_have_an_order_on_one_host_alone() -> None:
    """They have dates alone, which are not compared between hosts."""
    records = records_of({0: 1, 1: 71}, {0: 2.0, 1: 1.0})
    old = {rank: replace(one, boot_id=None, monotonic=None) for rank, one in records.done.items()}
    records.done.update(old)
    assert judge_launch(HOSTS, records, 71, clocks=CLOCKS).failed_rank == 1
    records.done[3] = replace(old[1], rank=3, host="b", time=0.5)
    assert judge_launch(HOSTS, records, 71, clocks=CLOCKS).failed_rank is None


def test_kills_on_several_hosts_are_known_as_such_though_nobody_is_named() -> None:
    """One signal ended all that ended first: no start of the software's own failed; of two signals none is told."""
    records = records_of({})
    for rank, host, code in ((0, "a", -9), (2, "b", -9)):
        records.ended[rank] = EndedRecord(rank, host, code, 5.0)
    found = judge_launch(HOSTS, records, 1)
    assert (found.failed_rank, found.failed_host, found.ended_by) == (None, None, 9)
    records.ended[2] = EndedRecord(2, "b", -11, 5.0)
    assert judge_launch(HOSTS, records, 1).ended_by is None
    records.ended[2] = EndedRecord(2, "b", 1, 5.0)
    assert judge_launch(HOSTS, records, 1).ended_by is None


@pytest.mark.parametrize("stopped_by", [None, 15])
def test_a_rank_that_ended_with_0_before_its_last_step_is_not_done(stopped_by: int | None) -> None:
    """Whoever wrote the code or ended it: what a training came to must stand in the record."""
    records = records_of(SUCCESS)
    records.done[2] = replace(records.done[2], end=None)
    verdict = judge_launch(HOSTS, records, 0, stopped_by=stopped_by)
    assert (verdict.exit_code, verdict.failed_rank, verdict.failed_host) == (78, 2, "b")
    assert "rank 2 on b ended with exit code 0, and not at the last step" in verdict.lines[0]


def test_where_a_launch_stopped_stands_behind_its_ranks() -> None:
    """They are done, and the run may not be."""
    records = records_of(SUCCESS)
    stopped = "stopped at step 3 of 9: time limit"
    records.done.update({rank: replace(done, end=stopped) for rank, done in records.done.items()})
    assert judge_launch(HOSTS, records, 0).lines == ["all 4 ranks are done", f"it {stopped}"]


@pytest.mark.parametrize(("stopped_by", "line"), [(None, "the one rank is done"), (15, "the one rank saved and is")])
def test_one_rank_is_told_as_one(stopped_by: int | None, line: str) -> None:
    """A run of a single rank has no ranks."""
    records = records_of(SUCCESS)
    records = replace(records, started={0: records.started[0]}, done={0: records.done[0]})
    assert line in judge_launch(HOSTS[:1], records, 0, stopped_by=stopped_by).lines[0]
