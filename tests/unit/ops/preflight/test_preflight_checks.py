"""A preflight's verdict, what its checks say of small real inputs, and that it leaves nothing and takes nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megasdc.cli import app
from megasdc.common.errors import LaunchError, StorageError
from megasdc.ops.launch.checks import HostProblem, HostReport
from megasdc.ops.preflight import remove_on_host
from megasdc.ops.preflight.command import CHECKS, Check, run_preflight
from megasdc.ops.preflight.commands import Commands, Done
from megasdc.ops.preflight.inputs import judged
from megasdc.ops.preflight.job import divided, scratch_folder
from megasdc.ops.preflight.request import PreflightRequest
from megasdc.ops.preflight.result import CheckStatus, PreflightFinding, preflight_outcome
from megasdc.ops.preflight.storage import PIECE, measure

OK, WARNING, FAILED, NOT_DONE = CheckStatus.OK, CheckStatus.WARNING, CheckStatus.FAILED, CheckStatus.NOT_DONE
LATER = tuple(CHECKS)[1:]


def outcome_of(*findings: tuple[CheckStatus, int]) -> tuple[int, str]:
    """Exit code and verdict of checks a, b, ... with a status and an exit code each."""
    named = zip("abcdefg", findings, strict=False)
    outcome = preflight_outcome([PreflightFinding(status, "", code, name=name) for name, (status, code) in named])
    assert outcome.contents["verdict"] == outcome.page.verdict
    return outcome.exit_code, outcome.page.verdict


def test_the_first_failure_gives_the_exit_code() -> None:
    """Warnings and checks that were not done give 0, which scripts take for ready."""
    assert outcome_of((OK, 0), (WARNING, 0), (NOT_DONE, 0)) == (0, "ready, with a warning of b, without c")
    broken = outcome_of((OK, 0), (FAILED, 77), (WARNING, 0), (FAILED, 73))
    assert broken == (77, "not ready: b, d failed, exit code 77")


def configured(folder: Path, **sections: Any) -> Path:
    """A configuration of a run in ``folder / run``, whose data were not prepared."""
    (folder / "data").mkdir()
    content = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "megasdc": {
            "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "max_positions": 64},
            "data": {"path": str(folder / "data"), "sequence_length": 32, "tokenizer": {"vocab_size": 512}},
            "protect": "off",
            "training": {"steps": 1000},
            "checkpoint": {"interval": 1, "keep_last": 3},
            "logging": {"run_dir": str(folder / "run")},
            **sections,
        },
    }
    path = folder / "config.json"
    path.write_text(json.dumps(content))
    return path


def made(folder: Path, path: Path, **options: Any) -> dict[str, PreflightFinding]:
    """The checks of a preflight on this host, by name; it leaves what is in the folder as it was."""
    before = {one: one.stat().st_mtime_ns for one in folder.rglob("*") if one.is_file()}
    result = run_preflight(PreflightRequest(path, num_ranks=1, **options))
    assert {one: one.stat().st_mtime_ns for one in folder.rglob("*") if one.is_file()} == before
    assert [one.name for one in result.verdicts] == list(CHECKS)
    return {one.name: one for one in result.verdicts}


def test_a_wrong_configuration_ends_all(tmp_path: Path) -> None:
    """70, all problems, and nothing is written; the layout counts too."""
    for wrong, said in (({"model": {"num_layers": 0}}, "num_layers"), ({"parallel": {"tensor": 2}}, "world size 1")):
        folder = tmp_path / said.split()[0]
        folder.mkdir()
        checks = made(folder, configured(folder, **wrong))
        assert checks["configuration"].exit_code == 70 and said in checks["configuration"].text
        assert {checks[name].status for name in LATER} == {NOT_DONE}
        assert not (folder / "run").exists()


def test_checks_that_need_a_failed_one_are_not_done(tmp_path: Path) -> None:
    """Data that are not there are 71; no run is launched, and what does not need them is checked."""
    checks = made(tmp_path, configured(tmp_path), skip=("storage",))
    assert (checks["data"].status, checks["data"].exit_code) == (FAILED, 71)
    assert checks["hosts"].status is OK and "this host, 1 rank, torch" in checks["hosts"].text
    told = {name: checks[name] for name in ("storage", "steps", "resume", "cost", "golden", "spares")}
    assert {one.status for one in told.values()} == {NOT_DONE}
    assert told["storage"].text == "left out by --skip" and "data failed" in told["steps"].text
    assert "megasdc stress --record" in told["golden"].text and "--stress-all" in told["spares"].text


ONLY_STORAGE = tuple(name for name in LATER if name != "storage")


@pytest.mark.parametrize(("keep_last", "count"), [(3, 4), (0, 1000)])
def test_free_space_is_compared_with_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_last: int, count: int
) -> None:
    """The checkpoints that are kept and the one being written must fit, at 16 bytes a parameter; else it is 77."""
    path = configured(tmp_path, checkpoint={"interval": 1, "keep_last": keep_last})
    vocab, width = 512, 32
    layer = 12 * width * width + 13 * width  # weights and biases of attention and MLP, and two norms
    size = 16 * (vocab * width + 64 * width + 2 * layer + 2 * width)
    monkeypatch.setattr("megasdc.ops.preflight.storage.MOST_BYTES", 1 << 20)
    for free, status in ((count * size, OK), (count * size - 1, FAILED)):
        monkeypatch.setattr("megasdc.ops.preflight.storage.available_bytes", lambda job, free=free: free)
        finding = made(tmp_path, path, skip=ONLY_STORAGE)["storage"]
        assert finding.figures["predicted_checkpoint_bytes"] == size
        assert (finding.status, finding.exit_code) == (status, 0 if status is OK else 77)
        assert finding.figures["write_bytes_per_s"] > 0 and finding.figures["read_bytes_per_s"] > 0


def test_a_disk_that_fails_during_a_check_fails_that_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are made, and the verdict is told: no traceback."""
    gone = tmp_path / "gone"
    monkeypatch.setitem(CHECKS, "storage", Check(lambda job: PreflightFinding(OK, gone.read_text())))
    finding = made(tmp_path, configured(tmp_path), skip=ONLY_STORAGE)["storage"]
    assert finding.status is FAILED and finding.exit_code == StorageError.exit_code
    assert str(gone) in finding.text and "No such file" in finding.text


def test_the_file_of_the_storage_test_is_bounded(tmp_path: Path) -> None:
    """It has the bytes that it may have, also where they are no whole pieces."""
    size, _, _ = measure(tmp_path / "file", PIECE + 5)
    assert size == (tmp_path / "file").stat().st_size == PIECE + 5


@pytest.mark.parametrize(
    ("status", "host", "code"),
    [("unhealthy", "a", 73), ("inconclusive", "a", 73), ("unhealthy", "spare", 73), ("not tested", "a", 78)],
)
def test_a_host_that_is_not_fit_fails(status: str, host: str, code: int) -> None:
    """Wrong results on any host, and a host of the run that gives no answer."""
    finding = judged(stressed({host: status}), ["spare"], "tested", [])
    assert (finding.status, finding.exit_code) == (FAILED, code) and f"{host} is {status}: why" in finding.text


def test_a_spare_without_an_answer_is_a_warning() -> None:
    """The run can begin without it; with others all healthy it is the only thing to say."""
    finding = judged(stressed({"spare": "not tested"}), ["spare"], "tested", [])
    assert (finding.status, finding.exit_code) == (WARNING, 0)
    assert finding.text == "tested; spare is not tested: why"
    assert judged(stressed({}), ["spare"], "tested", []).status is OK


def stressed(statuses: dict[str, str]) -> dict[str, Any]:
    """What ``megasdc stress --json`` prints of hosts a, b and spare, healthy but for some."""
    return {
        "hosts": [
            {"host": host, "status": statuses.get(host, "healthy"), "reasons": [{"text": "why"}]}
            for host in ("a", "b", "spare")
        ]
    }


def test_spares_are_the_hosts_beyond_those_of_the_run(tmp_path: Path) -> None:
    """In the order of the hostfile; too few hosts are refused with both numbers."""
    slots = {"a": 2, "b": 2, "c": 2}
    assert divided(slots, 2, tmp_path) == ({"a": 2, "b": 2}, {"c": 2})
    assert divided(slots, None, tmp_path) == (slots, {})
    with pytest.raises(LaunchError, match=r"num_hosts is 4, and .* has 3 hosts"):
        divided(slots, 4, tmp_path)


def test_folders_are_removed_and_nothing_else(tmp_path: Path) -> None:
    """A second preflight is refused meanwhile, and what another put beside the folder stays."""
    parent = tmp_path / "runs" / "my"
    with scratch_folder(parent, "one", keep=False, say=pytest.fail) as folder:
        (folder / "deep").mkdir()
        with (
            pytest.raises(LaunchError, match="in use by another preflight"),
            scratch_folder(parent, "two", keep=False, say=pytest.fail),
        ):
            pytest.fail("it was given the folder")
        assert (folder / "deep").is_dir()
    assert not (tmp_path / "runs").exists()
    with scratch_folder(parent, "three", keep=False, say=pytest.fail):
        (parent / "metrics.jsonl").touch()
    assert [path.name for path in parent.iterdir()] == ["metrics.jsonl"]
    with scratch_folder(parent, "four", keep=True, say=pytest.fail):
        pass
    with scratch_folder(parent, "five", keep=False, say=pytest.fail):
        pass
    assert [path.name for path in (parent / "preflight").iterdir()] == ["four"]


def test_folders_of_other_hosts_are_removed(tmp_path: Path) -> None:
    """That of the preflight, and the one above if nothing else is in it."""
    one, other = tmp_path / "a" / "preflight" / "x", tmp_path / "b" / "preflight" / "x"
    for folder in (one / "deep", other, other.with_name("kept")):
        folder.mkdir(parents=True)
    assert remove_on_host.answer({"folders": [str(one), str(other), str(tmp_path / "never")]}) == []
    assert not one.parent.exists() and [path.name for path in other.parent.iterdir()] == ["kept"]
    assert one.parents[1].exists()


SLEEPER = """
import sys, time
from pathlib import Path

try:
    Path(sys.argv[1]).touch()
    time.sleep(60)
except KeyboardInterrupt:
    Path(sys.argv[1] + ".ended").touch()
"""


def test_an_interrupted_command_is_ended(tmp_path: Path) -> None:
    """By SIGINT, so that it can end what it has started; also where this process ignores that."""

    def interrupt() -> None:
        if (tmp_path / "began").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Commands(tmp_path).run("name", [str(tmp_path / "began")], ("-c", SLEEPER), interrupt)
    assert (tmp_path / "began.ended").exists()


def test_a_killed_command_has_a_documented_code(tmp_path: Path) -> None:
    """That of a launch without a record, 78, and not a signal's negative number."""
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert Commands(tmp_path).run("name", [], ("-c", program)).exit_code == 78


@pytest.mark.parametrize(
    ("done", "cause"),
    [
        (Done(78, {"lines": ["rank 1 failed", "after it rank 0"]}, "noise"), "rank 1 failed; after it rank 0"),
        (
            Done(70, None, "noise\nmegasdc: error: 2 problems:\n  - a\n  - an error: b\n"),
            "2 problems:\n  - a\n  - an error: b",
        ),
        (Done(1, None, "Traceback\nKeyError: 3\n"), "it ended with exit code 1: KeyError: 3"),
        (Done(78, None, ""), "it ended with exit code 78: nothing was said"),
    ],
)
def test_the_cause_of_a_failed_command_is_told(done: Done, cause: str) -> None:
    """What the launch found, else its error with all lines, else its last line."""
    assert done.cause == cause


def test_the_front_needs_no_torch() -> None:
    """The commands that it starts import it, so that a preflight itself starts at once."""
    code = "import megasdc.ops.preflight.command, sys; assert not {'torch', 'deepspeed'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--skip", "data,host"], "no check 'host' to leave out"),
        (["--skip", "configuration"], "no check 'configuration'"),
        (["--hostfile", "config.json", "--num-ranks", "2"], "the hostfile has the ranks"),
        (["--steps", "1"], "greater than or equal to 2"),
    ],
)
def test_wrong_options_are_2(tmp_path: Path, options: list[str], said: str) -> None:
    """Before anything is read or written."""
    result = CliRunner().invoke(app, ["preflight", "--config", str(configured(tmp_path)), *options])
    assert result.exit_code == 2 and said in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "run").exists()


def test_a_spare_of_another_size_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With it the run would have another layout; what is wrong with the hosts of the run is a failure."""
    facts = {"versions": {"torch": "2", "deepspeed": "0.19"}}
    wrong: list[str] = []
    monkeypatch.setattr(
        "megasdc.ops.preflight.inputs.inspect_hosts",
        lambda placement, transport, needs, trusted=(): HostReport(
            dict.fromkeys(placement.hosts, facts),
            [HostProblem((host,), f"{host} is off") for host in placement.hosts if host in wrong],
        ),
    )
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\nc slots=2\nd slots=1\n")
    path = configured(tmp_path, supervise={"num_hosts": 2})
    skip = tuple(name for name in LATER if name != "hosts")

    def hosts() -> PreflightFinding:
        result = run_preflight(PreflightRequest(path, hostfile=tmp_path / "hosts", skip=skip))
        return next(one for one in result.verdicts if one.name == "hosts")

    assert hosts().status is WARNING and "d has slots=1, hosts of the run 2" in hosts().text
    wrong[:] = ["c"]
    assert hosts().status is WARNING and "c is off" in hosts().text
    wrong[:] = ["b"]
    assert (hosts().status, hosts().exit_code, hosts().text) == (FAILED, 78, "b is off")


def test_a_folder_goes_though_an_agent_that_ends_still_writes_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that come or go while the folder is removed keep nothing of it."""
    remove, problems = shutil.rmtree, [errno.ENOENT, errno.ENOTEMPTY]

    def disturbed(folder: Path) -> None:
        if problems:
            raise OSError(code := problems.pop(), os.strerror(code), str(folder / "file"))
        remove(folder)

    with scratch_folder(tmp_path / "run", "one", keep=False, say=pytest.fail) as folder:
        (folder / "file").touch()
        monkeypatch.setattr(shutil, "rmtree", disturbed)
    assert not folder.exists() and not problems
