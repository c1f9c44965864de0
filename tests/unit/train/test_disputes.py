"""Is what is known of corruption kept for the next start, whatever else fails, and what is later verified?"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hand_made import write_checkpoint

from megasdc.checkpoint.verify import find_corruption, list_verified
from megasdc.common.addresses import FORWARD, PARAMETER, Address
from megasdc.common.errors import CorruptionError
from megasdc.config.load import parse_config
from megasdc.engine.hooks import Run, RunProgress
from megasdc.events import EventLog, read_events
from megasdc.parallel.collectives import Agreed
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.finding import Finding
from megasdc.sdc.golden import GoldenAnswer, compare_run, judge_replicas
from megasdc.sdc.incident import incident_from_json
from megasdc.sdc.referee.referee import Referee
from megasdc.sdc.trace import Trace
from megasdc.sdc.verdict import GOLDEN, NOT_REPRODUCED, PERSISTENT, RankVerdict
from megasdc.train.detection.finding_policy import FindingPolicy, Incidents
from megasdc.train.detection.findings import AUDITED, FIELDS, PARAMETERS, Evidence

STEP = 7
DIFFER: Agreed = {one.name: ((0, 0),) if one.name == PARAMETERS else () for one in FIELDS}


class Parameters:
    """A reader of one parameter whose value was wrong until it was gathered again."""

    own = Trace([Address(STEP, None, PARAMETER, "1.layer.mlp.linear_fc1", "weight")], [1])

    def start(self) -> None:
        """Nothing runs in the background."""

    def pop_checksums(self) -> Trace:
        return Trace(self.own.addresses, [2])

    def copies(self, trace: Trace) -> Trace:
        return Trace()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def started(folder: Path, **policy: str) -> tuple[FindingPolicy, Any]:
    """What settles findings, with its run, between steps 6 and 7; only the engine is not a real one."""
    raw = {
        "data": {"path": "prepared/x"},
        "protect": "off",
        "training": {"steps": 100},
        "logging": {"run_dir": str(folder)},
    }
    raw |= {
        "audit": {"enabled": True},
        "determinism": {"enabled": True},
    }  # a policy is refused where nothing is checked
    config = parse_config({"megasdc": {**raw, "sdc": {"policy": policy}}})
    dims = ParallelDims(1, 1, 1, 0)
    optimizer = SimpleNamespace(update_lp_params=lambda: None)
    engine: Any = SimpleNamespace(device=torch.device("cpu"), dims=dims, step_number=STEP, optimizer=optimizer)
    run = Run(folder, dims, engine, None, iter(()), EventLog(folder, 0), None, RunProgress(100))  # type: ignore[arg-type]
    referee = Referee({}.get, dims.rank, None)
    disputes = FindingPolicy(config.megasdc.sdc, run, {}, Parameters(), Incidents(config, run), referee)  # type: ignore[arg-type]
    disputes.on_start(run)
    return disputes, run


def test_what_cannot_be_compared_is_told_at_the_start(
    group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas of other hardware leave audits some positions, or none, which the table of what is covered is to say."""
    disputes, run = started(tmp_path)
    assert disputes.on_start(run) == {}
    disputes._dims = run.dims = ParallelDims(2, 1, 2)
    for differing, left in (({1}, "at 1 of 2 positions"), ({0, 1}, "-")):
        keys = [{"gpu": "a" if rank < 2 or rank - 2 not in differing else "b"} for rank in range(4)]
        monkeypatch.setattr("megasdc.sdc.host.gather_objects", lambda own, group, keys=keys: keys)
        assert disputes.on_start(run) == {"audit": left}


def settle(disputes: FindingPolicy, run: Run) -> Any:
    """Settle that rank 0 holds a wrong parameter that is about to be saved."""
    return disputes.settle_kept(run.engine, Evidence(parameters=Parameters.own), DIFFER, repaired=False)


def audited(
    disputes: FindingPolicy, run: Run, step: int, *, recorded: bool = True, doubt: str | None = None
) -> list[int]:
    """Tell that an audit of a step has agreed, and how it ended; the steps that are verified then."""
    disputes.after_audit(run, step, doubt, extra=False, recorded=recorded)
    return list_verified(run.folder / "checkpoints")


def reports(folder: Path) -> list[Path]:
    """Reports for programs."""
    return sorted((folder / "reports").glob("*.json"))


@pytest.mark.parametrize(
    "line",
    [b"\n", b"\xff\xfe\n", b"[1]\n", b'{"time": 1}\n', b"[" * 100_000 + b"\n", b"event\n" * 50],
    ids=["empty", "bytes", "list", "part", "deep", "many"],
)
def test_what_cannot_be_read_is_told_in_the_report(group: None, tmp_path: Path, line: bytes) -> None:
    """Broken lines of events keep nobody from halting, from the mark, nor from the report; it says which they are."""
    disputes, run = started(tmp_path, not_reproduced="halt")
    run.events.emit("sdc", "finding", step=3)
    (tmp_path / "events" / "rank_00001.jsonl").write_bytes(line)
    with pytest.raises(CorruptionError, match="rank 0"):
        settle(disputes, run)
    (report,) = reports(tmp_path)
    incident = incident_from_json(report.read_text())
    assert [one.step for one in incident.earlier][:1] == [3]
    assert "rank_00001.jsonl:1 is not an event" in incident.not_read[0] and len(incident.not_read) <= 6
    assert report.with_suffix(".html").name in str(find_corruption(tmp_path / "checkpoints"))


def test_a_run_that_halts_names_a_save_that_is_there(group: None, tmp_path: Path) -> None:
    """The newest verified one; else what the next start does without. What an audit verified may be deleted by then."""
    disputes, run = started(tmp_path, not_reproduced="halt")
    saves = tmp_path / "checkpoints"

    def way() -> str:
        with pytest.raises(CorruptionError) as error:
            settle(disputes, run)
        return str(error.value)

    assert "Nothing is saved that is verified: the next start begins at step 1" in way()
    for step in (2, 4):
        write_checkpoint(saves, step, not_finite=[], nodes={socket.gethostname(): [0]})
    assert "No save is verified: the next start ends with exit code 72" in way()
    assert audited(disputes, run, 5) == [2, 4]
    assert f"goes back to the newest verified save, of step 4, in {saves / 'step_00000004'}. " in way()
    shutil.rmtree(saves / "step_00000004")
    assert "of step 2, in " in way()


def test_checkpoints_that_cannot_be_listed_are_told(
    group: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The report does not say that there is none."""
    disputes, run = started(tmp_path, not_reproduced="halt")
    (tmp_path / "checkpoints").symlink_to(tmp_path / ("x" * 300))  # a name that no file can have
    with pytest.raises(CorruptionError):
        settle(disputes, run)
    incident = incident_from_json(reports(tmp_path)[0].read_text())
    assert "checkpoints cannot be listed" in incident.not_read[0]
    assert "look for some first" in incident.what_to_do[-1].text
    assert "corruption.json cannot be written" in caplog.text, "nor can the mark"


def test_the_mark_needs_no_report(group: None, tmp_path: Path) -> None:
    """Where neither events nor reports can be written, the run still halts with its own error and leaves the mark."""
    disputes, run = started(tmp_path, not_reproduced="halt")
    run.events._file = open("/dev/full", "a")  # noqa: SIM115
    (tmp_path / "reports").write_text("a file where the folder should be")
    with pytest.raises(CorruptionError, match="could not be written"):
        settle(disputes, run)
    assert f"step {STEP}" in str(find_corruption(tmp_path / "checkpoints"))
    with pytest.raises(OSError, match="No space"):
        run.events._file.close()


def test_a_finding_that_nobody_settled_counts(group: None, tmp_path: Path) -> None:
    """A failure while a finding is settled leaves the mark, unless the policy goes on where nothing is proved."""
    for policy in ("halt", "warn"):
        folder = tmp_path / policy
        disputes, run = started(folder, inconclusive=policy)
        run.engine.optimizer.update_lp_params = lambda: os.stat("/nonexistent")
        with pytest.raises(FileNotFoundError):
            settle(disputes, run)
        assert (find_corruption(folder / "checkpoints") is not None) == (policy == "halt")


def test_what_holds_a_wrong_step_is_never_verified(group: None, tmp_path: Path) -> None:
    """What warn let pass at step 6 keeps all checkpoints from there on candidates, after a resume too."""
    for step in (4, 6, 8):
        write_checkpoint(tmp_path / "checkpoints", step, not_finite=[], nodes={socket.gethostname(): [0]})
    disputes, run = started(tmp_path, not_reproduced="warn")
    assert settle(disputes, run) is False
    assert audited(disputes, run, 9) == [4]
    resumed, run = started(tmp_path)
    resumed.load_state_dict(disputes.state_dict())
    assert audited(resumed, run, 10) == [4]
    ends = [event.fields["verified_up_to"] for event in read_events(tmp_path, kind="audit", name="agreed")]
    assert ends == [5, 5]
    assert [event.step for event in read_events(tmp_path, name="not_verified_from")] == [6]


def test_what_was_repaired_is_verified(group: None, tmp_path: Path) -> None:
    """Nothing wrong was committed: the next audit verifies as always."""
    write_checkpoint(tmp_path / "checkpoints", 6, not_finite=[], nodes={socket.gethostname(): [0]})
    disputes, run = started(tmp_path, not_reproduced="repair")
    assert settle(disputes, run) is True
    assert audited(disputes, run, STEP) == [6]


def verdicts(folder: Path) -> list[tuple[str, str]]:
    """Verdict and action of each ruling."""
    return [(one.fields["verdict"], one.fields["action"]) for one in read_events(folder, name="verdict")]


def test_a_device_found_before_is_intermittent(
    group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Right when gathered again, but found before on this host and device, whatever its rank was; nothing of others."""
    disputes, run = started(tmp_path / "a", intermittent="warn")
    settle(disputes, run)
    settle(disputes, run)
    assert verdicts(tmp_path / "a") == [("not_reproduced", "repair"), ("intermittent", "warn")]
    for name in ("same", "host", "device", "before"):
        if name == "device":
            monkeypatch.setenv("LOCAL_RANK", "1")
        with monkeypatch.context() as patch:
            if name == "host":
                patch.setattr("socket.gethostname", lambda: "another")
            resumed, run = started(tmp_path / name, intermittent="warn")
        resumed.load_state_dict({"earlier": [0]} if name == "before" else disputes.state_dict())
        settle(resumed, run)
        assert [one for one, _ in verdicts(tmp_path / name)] == ["intermittent" if name == "same" else "not_reproduced"]
    assert [one.fields for one in read_events(tmp_path / "before", name="earlier_not_known")] == [{"ranks": [0]}]
    assert "ranks [0] were found wrong before" in caplog.text


def golden_answer(*computed: int) -> GoldenAnswer:
    """What follows from runs of one rank of a golden workload with one result, which is to be 1."""
    dims, address = ParallelDims(1, 1, 1, 0), Address(1, 0, FORWARD, "1.layer.mlp.linear_fc1", "output")
    runs = [compare_run(Trace([address], [1]), Trace([address], [value]), dims) for value in computed]
    return GoldenAnswer([runs], 1, [judge_replicas([one.finding], dims) for one in runs], 0.0)


def test_the_golden_trace_is_asked_with_what_was_found_before(group: None, tmp_path: Path) -> None:
    """A rank that is right when it computes again, on a device that was wrong once, is intermittent."""
    disputes, _ = started(tmp_path, intermittent="warn", not_reproduced="warn")
    disputes._golden = SimpleNamespace(run=lambda step, repeats: golden_answer(2, 1, 1))  # type: ignore[assignment]
    disputes.check_golden(STEP)
    disputes.check_golden(STEP)
    assert [one for one, _ in verdicts(tmp_path)] == ["not_reproduced", "intermittent"]


class Asked(Exception):
    """With what was asked."""


def test_an_audit_is_settled_with_what_was_found_before(
    group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Votes that differ are ruled with the ranks whose devices are known."""

    def ask(ballot: Any, repeats: Any, golden: Any, earlier: Any, *_: Any) -> None:
        raise Asked(earlier)

    disputes, run = started(tmp_path, intermittent="warn")
    monkeypatch.setattr("megasdc.sdc.audits.settle", ask)
    monkeypatch.setattr(disputes, "_comparable", None)  # as if this rank had another replica
    seen = Trace([Address(STEP, 0, FORWARD, "1.layer.mlp.linear_fc1", "output")], [1])
    evidence = Evidence(audited=seen)
    agreed = {**DIFFER, PARAMETERS: (), AUDITED: ((0, 0),)}
    for known in (set(), {0}):
        with pytest.raises(Asked) as asked:
            disputes.settle(run.engine, evidence, agreed, lambda *_: (seen, None), repaired=False)
        assert asked.value.args == (known,)
        settle(disputes, run)


def test_findings_are_events(group: None, tmp_path: Path) -> None:
    """What was found and ruled can be read from the log."""
    disputes, run = started(tmp_path)
    settle(disputes, run)
    assert [event.name for event in read_events(tmp_path, kind="sdc")] == ["finding", "verdict"]


@pytest.mark.parametrize("verdict", [PERSISTENT, NOT_REPRODUCED])
def test_what_the_golden_workload_finds_is_acted_upon(group: None, tmp_path: Path, verdict: str) -> None:
    """A rank that is wrong again halts the run; one that is not is reported, and what follows is not verified."""
    disputes, _ = started(tmp_path, persistent="halt", not_reproduced="warn")
    ruling = RankVerdict(0, verdict, GOLDEN, Parameters.own.addresses[0], 1, 2)
    answer = SimpleNamespace(finding=lambda step, earlier: Finding("golden", None, (ruling,), 3), seconds=2.5)
    golden = SimpleNamespace(run=lambda step, repeats: answer)
    disputes._golden = golden  # type: ignore[assignment]
    if verdict == PERSISTENT:
        with pytest.raises(CorruptionError, match="the golden check found"):
            disputes.check_golden(STEP)
    else:
        assert disputes.check_golden(STEP) == 2.5
    assert (find_corruption(tmp_path / "checkpoints") is not None) == (verdict == PERSISTENT)
    assert len(reports(tmp_path)) == 1


def test_an_audit_that_compared_nothing_verifies_nothing(
    group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a position's replicas cannot be compared, no checkpoint is verified and no agreement is reported."""
    disputes, run = started(tmp_path)
    monkeypatch.setattr(disputes, "_comparable", set())
    audited(disputes, run, 9)
    run.events.close()
    written = "".join(path.read_text() for path in (tmp_path / "events").glob("*.jsonl"))
    assert "agreed" not in written
    monkeypatch.undo()


def test_an_audit_that_agrees_on_nan_verifies_nothing(group: None, tmp_path: Path) -> None:
    """A step that was skipped, or is not finite, is no evidence; the next one that is finite verifies."""
    write_checkpoint(tmp_path / "checkpoints", 6, not_finite=[], nodes={socket.gethostname(): [0]})
    disputes, run = started(tmp_path)
    assert audited(disputes, run, STEP, doubt="NaN") == []
    assert [one.fields["reason"] for one in read_events(tmp_path, kind="audit", name="not_finite")] == ["NaN"]
    assert audited(disputes, run, STEP + 1) == [6]
