"""What an attempt has written is its evidence, and nothing else is, whatever the date is on rank 0's host."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from megasdc.common.addresses import Address
from megasdc.common.origin import LAUNCH_ID_VARIABLE, Launch, Origin
from megasdc.events import EventLog
from megasdc.metrics.writer import MetricsWriter
from megasdc.ops.health import agent
from megasdc.ops.health import agent as background
from megasdc.ops.health.agent import Agent, AgentOptions
from megasdc.ops.health.incident import INCIDENT_FOLDER
from megasdc.ops.health.phases import Phase
from megasdc.ops.health.record import HeartbeatWriter, WatchedIdentity
from megasdc.ops.launch.request import LaunchRequest
from megasdc.ops.supervise import attempt_process
from megasdc.ops.supervise.allocation import Allocation
from megasdc.ops.supervise.attempt_process import FrontResult
from megasdc.ops.supervise.attempt_progress import trained_in
from megasdc.ops.supervise.diagnosis import RewindTarget, diagnose
from megasdc.ops.supervise.goodput import goodput_of
from megasdc.ops.supervise.history import Attempt, JournalHistory
from megasdc.ops.supervise.journal import FOLDER, Journal
from megasdc.ops.supervise.launch_backend import LaunchBackend
from megasdc.ops.supervise.policy import Action, FailedAttempt, RestartLimits, decide
from megasdc.sdc.finding import DONE
from megasdc.sdc.incident import Environment, FlaggedRank, Incident, IncidentEvidence, RankPlace
from megasdc.sdc.incident_page import write_incident

NOW = 1.8e9
FIRST, SECOND = "20270115-first", "20270115-second"
OFFSETS = [sign * seconds for seconds in (2.0, 20.0, 300.0, 7200.0, 259200.0) for sign in (1, -1)]


class Here(Allocation):
    """Hosts that can be reached."""

    def unreachable(self, attempt: Attempt) -> tuple[str, ...]:
        """None."""
        return ()


@contextmanager
def on_rank_0(run: Path, attempt: int, launch: str, at: float) -> Iterator[EventLog]:
    """The events of rank 0 in a start of a launch, while the date there is ``at``."""
    with pytest.MonkeyPatch.context() as patch, closing(_log(run, attempt, launch)) as log:
        patch.setattr(time, "time", lambda: at)
        yield log


def _log(run: Path, attempt: int, launch: str) -> EventLog:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LAUNCH_ID_VARIABLE, launch)
        return EventLog(run, 0, Origin("r", attempt, None))


def finding(run: Path, step: int, rank: int, launch: str | None, attempt: int, at: float, policy: str = "halt") -> None:
    """An incident that names a rank."""
    place = RankPlace(rank, f"n{rank}", "cpu", rank, 0, 0)
    first = Address(step, 0, "forward", "x", "output")
    wrong = FlaggedRank(**vars(place), verdict="persistent", first=first, expected=None, got=None, repeats=1,
                        wrong_repeats=1, rate_bound=None)  # fmt: skip
    found = datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
    incident = Incident(
        *(found, str(run), step, 0, "audit", "persistent", "relative to the majority", policy, DONE[policy]),
        *((wrong,), (), (place,), IncidentEvidence(1, {}), Environment({}, {}, "fp32")),
        launch=launch,
        attempt=attempt,
    )
    write_incident(incident)


def hang(run: Path, launch: str | None, rank: int, at: float) -> None:
    """An incident of a standstill that names a rank."""
    folder = run / "health" / INCIDENT_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    content = {"kind": "hang/behind", "run": f"r.{rank}.x", "launch": launch, "time": at, "message": "nothing moved"}
    content |= {"ranks": [rank], "hosts": [f"n{rank}"], "waits": {}, "states": [], "stacks": []}
    (folder / f"hang_{rank}.json").write_text(json.dumps(content))


@pytest.fixture
def second(tmp_path: Path) -> Attempt:
    """The second of two attempts, planned a minute after the first."""
    return Attempt(2, {"n0": 1, "n1": 1, "n2": 1}, SECOND, NOW)


def engine(folder: Path, attempt: Attempt, code: int) -> LaunchBackend:
    """Of a run of 30 steps, whose attempt has ended with a code."""
    (folder / "run" / FOLDER).mkdir(parents=True, exist_ok=True)
    result = FrontResult(code, None, None, [f"ended with {code}"])
    attempt_process.attempt_file(folder / "run" / FOLDER, attempt.number, attempt.launch_id, "json").write_text(
        json.dumps(asdict(result))
    )
    return LaunchBackend(folder / "run", 30, [], 1, LaunchRequest(Path("c.json")), Here("hosts", {}), {})


@pytest.mark.parametrize("offset_s", OFFSETS)
def test_stale_evidence_accuses_nobody(tmp_path: Path, second: Attempt, offset_s: float) -> None:
    """Of the first attempt, whose date was ahead or behind: corruption, standstill, replica left out, going back."""
    run, at = tmp_path / "run", NOW - 60 + offset_s
    with on_rank_0(run, 1, FIRST, at) as log:
        log.emit("isolation", "begun", step=4, wrong=[1], launch_ranks=[0, 2])
        log.emit("resume", "not_loaded", step=3)
        log.emit("skip", "optimizer_step", step=9, stream_end=40)
        log.emit("start", "phases", step=1, phases={}, step_s=1.0)
        with closing(MetricsWriter(run, attempt=1)) as writer:
            writer.write(9, {"train/loss": 1.0})
    finding(run, 9, 1, FIRST, 1, at)
    hang(run, FIRST, 1, at)
    for code, kind in ((73, "corrupt"), (75, "stuck"), (74, "non_finite")):
        ended = engine(tmp_path, second, code)
        found = ended.evidence(second, {})
        assert (found.corruption, found.hang, found.left_out, found.back, found.trained) == (None, None, [], None, None)
        assert found.host_of_rank == ("n0", "n1", "n2") and not found.by_time
        assert (diagnose(found).kind, diagnose(found).hosts) == (kind, ())
        assert list(ended.left_out(second)) == []


@pytest.mark.parametrize("offset_s", OFFSETS)
def test_own_evidence_is_found(tmp_path: Path, second: Attempt, offset_s: float) -> None:
    """Of the attempt itself, on whose rank 0 the date is ahead or behind; of two findings that of the later step."""
    run = tmp_path / "run"
    with on_rank_0(run, 2, SECOND, NOW + 10 + offset_s) as log:
        log.emit("resume", "checkpoint", step=4)
        log.emit("start", "phases", step=5, phases={}, step_s=1.0)
        log.emit("isolation", "begun", step=6, wrong=[1], launch_ranks=[0, 2])
        log.emit("skip", "optimizer_step", step=9, stream_end=40)
        with closing(MetricsWriter(run, attempt=2)) as writer:
            writer.write(9, {"train/loss": 1.0})
    finding(run, 7, 1, SECOND, 2, NOW + 30 + offset_s)
    finding(run, 9, 0, SECOND, 2, NOW + 20 + offset_s)  # the date went back meanwhile
    hang(run, SECOND, 1, NOW + 20 + offset_s)
    found = engine(tmp_path, second, 73).evidence(second, {})
    assert found.corruption is not None and found.corruption.step == 9
    assert found.hang is not None and found.left_out == ["n1"] and found.host_of_rank == ("n0", "n2")
    assert found.back == RewindTarget(0, (0, 40))
    assert found.trained is not None and (found.trained.resumed, found.trained.last) == (4, 9)
    assert diagnose(found).hosts == ("n1", "n0")


@pytest.mark.parametrize("ends", [[], [(8, 1)]], ids=["at its limit", "by a finding"])
def test_a_finding_that_left_a_replica_out_names_no_other_host(
    tmp_path: Path, second: Attempt, ends: list[tuple[int, int]]
) -> None:
    """Its ranks are numbered as before: rank 1 was n1 there, and is the healthy n2 in the start without n1."""
    run = tmp_path / "run"
    with on_rank_0(run, 2, SECOND, NOW + 10) as log:
        log.emit("start", "phases", step=5, phases={}, step_s=1.0)
    finding(run, 6, 1, SECOND, 2, NOW + 20, "isolate")
    with on_rank_0(run, 3, SECOND, NOW + 25) as log:
        log.emit("isolation", "begun", step=6, wrong=[1], launch_ranks=[0, 2])
    for step, rank in ends:
        finding(run, step, rank, SECOND, 3, NOW + 30)
    found = engine(tmp_path, second, 73).evidence(second, {})
    assert found.left_out == ["n1"] and (found.corruption is None) == (not ends)
    assert (diagnose(found).kind, diagnose(found).hosts) == ("corrupt_again", ("n1", "n2") if ends else ("n1",))


@pytest.mark.parametrize("policy", ["repair", "warn"])
def test_a_finding_after_which_the_attempt_went_on_is_not_what_ended_it(
    tmp_path: Path, second: Attempt, policy: str
) -> None:
    """It was repaired or accepted; then the attempt ends with wrong results of which there is no incident."""
    finding(tmp_path / "run", 3, 1, SECOND, 2, NOW + 20, policy)
    found = engine(tmp_path, second, 73).evidence(second, {})
    assert found.corruption is None and (diagnose(found).kind, diagnose(found).hosts) == ("corrupt", ())


def watched(run: Path, records: Path, attempt: Attempt, step: int, start: str) -> None:
    """What the agent of the first host writes of a rank that was in a step when its process ended."""
    records.mkdir()
    of_rank = WatchedIdentity(f"{start}.{secrets.token_hex(16)}", 0, 0, 2, 0, 0, 0, "n0", 0, os.getpid(), 0.0)
    with closing(HeartbeatWriter(records, of_rank)) as record:
        record.enter(Phase.FORWARD, step, 0)
    options = AgentOptions(records, run, 0, (0,), attempt.hosts, 60.0, 60.0, 10.0, (), attempt.launch_id)
    Agent(options, None).run()


@pytest.mark.parametrize(("steps", "stops"), [((62, 76, 89), False), ((62, 62, 62), True)])
def test_the_last_step_of_an_attempt_is_what_its_agents_saw(
    tmp_path: Path, second: Attempt, monkeypatch: pytest.MonkeyPatch, steps: tuple[int, ...], stops: bool
) -> None:
    """No metrics since the resume at step 50: errors in steps apart are not alike, those in the same one are."""
    for module in (agent, background):
        monkeypatch.setattr(module, "POLL_S", 0.01)
    run, failures = tmp_path / "run", list[FailedAttempt]()
    for number, (step, hosts) in enumerate(zip(steps, (("n0", "n1"), ("n0", "n2"), ("n1", "n2")), strict=True), 1):
        attempt = replace(second, number=number, launch_id=f"launch-{number}", slots=dict.fromkeys(hosts, 1))
        with on_rank_0(run, number, attempt.launch_id, NOW + 10) as log:
            log.emit("resume", "checkpoint", step=50)
            log.emit("start", "phases", step=51, phases={}, step_s=1.0)
        ended = engine(tmp_path, attempt, 1)
        assert ended.evidence(attempt, {}).last == 51, "the agent of the launch before is another one's"
        watched(run, tmp_path / f"records-{number}", attempt, step, f"f00d.{number}")
        result = FrontResult(1, 0, "n2" if number == 3 else hosts[0], ["boom"])
        attempt_process.attempt_file(run / FOLDER, number, attempt.launch_id, "json").write_text(
            json.dumps(asdict(result))
        )
        found = ended.evidence(attempt, {})
        assert found.last == step - 1 and found.trained is not None
        failures.append(
            FailedAttempt(NOW + 4000 * number, hosts, 1, diagnose(found), found.last, found.trained.resumed)
        )
    assert (decide(failures, 5, RestartLimits()).action is Action.STOP) == stops


def test_an_attempt_that_did_no_step_has_none_though_its_agents_saw_the_save_before(
    tmp_path: Path, second: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on from step 50 and ended in the next one; lines of an earlier version, without a launch, tell none."""
    for module in (agent, background):
        monkeypatch.setattr(module, "POLL_S", 0.01)
    run = tmp_path / "run"
    with on_rank_0(run, 2, SECOND, NOW + 10) as log:
        log.emit("resume", "checkpoint", step=50)
    ended = engine(tmp_path, second, 1)
    watched(run, tmp_path / "records", second, 51, "f00d.2")
    assert ended.evidence(second, {}).last == 0
    with on_rank_0(run, 2, SECOND, NOW + 10) as log:
        log.emit("start", "phases", step=51, phases={}, step_s=1.0)
    path = run / "health" / "node_00000.jsonl"
    path.write_text(path.read_text().replace(f'"launch": "{SECOND}", ', "").replace('"step": 51', '"step": 80'))
    assert ended.evidence(second, {}).last == 51


@pytest.mark.parametrize("offset_s", OFFSETS)
def test_an_unfinished_run_that_was_told_to_end_is_not_finished(
    tmp_path: Path, second: Attempt, offset_s: float
) -> None:
    """Ranks that saved on a signal that is not the supervisor's: the run goes on; the next attempt has none."""
    run = tmp_path / "run"
    with on_rank_0(run, 2, SECOND, NOW + 10 + offset_s) as log:
        log.emit("stop", "requested", step=9, reason="signal SIGTERM")
    found = engine(tmp_path, second, 0).evidence(second, {})
    assert found.interrupted.startswith("its ranks got a signal") and diagnose(found).kind == "preempted"
    third = replace(second, number=3, launch_id="third", planned_at=NOW + 60)
    assert engine(tmp_path, third, 0).evidence(third, {}).interrupted == ""


def test_evidence_of_an_earlier_version_is_matched_by_its_date_which_is_told(tmp_path: Path, second: Attempt) -> None:
    """It does not name its launch."""
    run = tmp_path / "run"
    finding(run, 9, 1, None, 0, NOW + 5)
    found = engine(tmp_path, second, 73).evidence(second, {})
    assert found.corruption is not None and found.by_time
    old = replace(second, planned_at=NOW + 60)
    assert engine(tmp_path, old, 73).evidence(old, {}).corruption is None


def test_the_last_step_is_where_it_was_though_rank_0_has_come_to_another_host(tmp_path: Path) -> None:
    """The first rank 0 was left out within a launch: the next one's host has been up for days longer."""
    rows = [(1, 10.0, 4, 100.0, "one"), (2, 20.0, 8, 500_000.0, "other")]
    (tmp_path / "events").mkdir()
    with (
        open(tmp_path / "events" / "rank_00000.jsonl", "w") as events,
        open(tmp_path / "metrics.jsonl", "w") as metrics,
    ):
        for attempt, at, step, up, boot in rows:
            common = {"attempt": attempt, "time": NOW + at, "monotonic": up}
            said = {**common, "launch": "one", "boot": boot, "rank": 0, "host": boot, "step": step, "micro_batch": None}
            events.write(json.dumps({**said, "kind": "start", "name": "phases", "fields": {"phases": {}}}) + "\n")
            metrics.write(
                json.dumps({**common, "step": step, "time": NOW + at + 3.0, "monotonic": up + 3.0, "train/loss": 1})
                + "\n"
            )
    found = trained_in(tmp_path, Launch("one", NOW, 95.0, "front"))
    assert found is not None and found.last == 8
    assert found.last_at == pytest.approx(NOW + 23.0) and found.began_at == pytest.approx(NOW + 10.0)


@pytest.mark.parametrize("offset_s", OFFSETS)
def test_where_the_time_went_does_not_depend_on_dates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset_s: float
) -> None:
    """The supervisor's date jumps in mid-run and that of rank 0's host is off: each second is where it was."""
    now, off = 100.0, {"supervisor": 0.0, "rank": offset_s}

    def passes(seconds: float, where: str = "supervisor") -> None:
        nonlocal now
        now += seconds
        monkeypatch.setattr(time, "monotonic", lambda: now)
        monkeypatch.setattr(time, "time", lambda: NOW + now + off[where])

    run = tmp_path / "run"
    with Journal(run / FOLDER, print) as journal:
        for number, launch in ((1, FIRST), (2, SECOND)):
            passes(0.0)
            journal.write("planned", attempt=number, slots={"n0": 1}, launch_id=launch)
            plan = JournalHistory.of(journal.entries).attempt
            assert plan is not None
            with closing(_log(run, number, launch)) as log, closing(MetricsWriter(run, attempt=number)) as writer:
                passes(10.0, "rank")
                log.emit("start", "phases", step=1, phases={}, step_s=2.0)
                passes(20.0, "rank")
                writer.write(20, {"train/loss": 1.0})
            off["supervisor"], off["rank"] = -offset_s, 3 * offset_s
            passes(5.0)
            trained = asdict(trained_in(run, plan.launch))  # type: ignore[arg-type]
            said = {"kind": "done", "hosts": [], "step": 20, "text": "", "incident": None}
            journal.write("ended", exit_code=0, diagnosis=said, trained=trained)
            passes(3.0)
            journal.write("decided", action="finish", text="", replaced=[], pause_s=0.0)
        history = JournalHistory.of(journal.entries)
        assert history.now - history.decided_at == pytest.approx(0.0) and history.now - history.attempt_at == 38.0
        assert [one.time - history.failures[0].time for one in history.failures] == [0.0, 38.0]
    passes(7.0)
    found = goodput_of(run, time.time())
    assert found is not None and found.wall_s == pytest.approx(2 * 38.0 + 7.0)
    parts = {name: seconds for name, seconds in found.parts.items() if seconds}
    wanted = {"productive": 22.0, "recomputed": 22.0, "starting": 2 * 8.0, "ending": 2 * 5.0, "deciding": 2 * 3.0 + 7.0}
    assert parts == pytest.approx(wanted)
