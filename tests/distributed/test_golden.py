"""Does a golden trace tell a rank that computes something else, by the commands that a user types?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fused_switch import fused
from harness import StartedCommand
from typer.testing import CliRunner

from megasdc.cli import app
from megasdc.common.errors import ConfigError
from megasdc.sdc.golden import Golden, load_golden, save_golden

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

MODEL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "max_positions": 64}


def _config(folder: Path, tensor: int, **sections: Any) -> Path:
    path = folder / "config.json"
    raw = {
        "train_micro_batch_size_per_gpu": 1,
        "megasdc": {
            "model": {**MODEL, "fuse": fused()},
            "data": {"path": "none", "sequence_length": 16},
            "parallel": {"tensor": tensor},
            "protect": "off",
            "training": {"steps": 5},
            "golden": {"vocab_size": 100},
            "logging": {"run_dir": str(folder / "run")},
            **sections,
        },
    }
    path.write_text(json.dumps(raw))
    return path


def _megasdc(
    *arguments: str, program: str | None = None, forked_ranks: bool = False, **environ: str | None
) -> tuple[int, dict[str, Any], str]:
    """Exit code, result and standard error of a command; a variable that is None is not set for it.

    As the module ``program`` where the interpreter's start matters, else ``megasdc`` as a fork, see ``StartedCommand``.
    """
    if program is not None:
        settings = {name: value for name, value in {**os.environ, **environ}.items() if value is not None}
        command = [sys.executable, "-m", program, *arguments, "--json"]
        done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    else:
        done = StartedCommand("megasdc", [*arguments, "--json"], environ, forked_ranks).wait(300)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A golden trace of two tensor ranks."""
    folder = tmp_path_factory.mktemp("golden")
    code, said, error = _megasdc(
        "golden", "record", "--config", str(_config(folder, 2)), "--out", str(folder / "a.golden"), "--repeats", "2"
    )
    assert (code, said["repeats"]) == (0, 4), error
    assert not (folder / "run").exists()
    return folder / "a.golden"


def _verify(golden: Path, *arguments: str, faults: Any = None, **environ: str) -> tuple[int, dict[str, Any]]:
    if faults is not None:
        file = golden.with_name("faults.json")
        file.write_text(json.dumps(faults))
        arguments = (*arguments, "--faults", str(file))
    code, said, error = _megasdc("golden", "verify", str(golden), *arguments, **environ)
    assert said, error
    assert code == said["exit_code"]
    return code, said


def test_clean_hardware_is_healthy(golden: Path) -> None:
    """In fresh processes every result is that of the file, as often as asked for."""
    code, said = _verify(golden, "--repeats", "3")
    assert code == 0
    assert [(rank["status"], rank["runs"], rank["wrong_runs"]) for rank in said["ranks"]] == [("healthy", 3, 0)] * 2


def test_a_wrong_gradient_of_one_tensor_rank_is_named(golden: Path) -> None:
    """A fault that comes and goes in a backward pass: the rank, the submodule, the direction, k of n runs."""
    where = {"rank": 1, "phase": "backward", "submodule": "3.layer.mlp.linear_fc1", "steps": [2, 2]}
    code, said = _verify(golden, "--repeats", "6", faults={"faults": [{**where, "probability": 0.4, "seed": 3}]})
    assert code == 73
    peer, wrong = said["ranks"]
    assert (wrong["status"], peer["status"]) == ("divergent", "affected")
    assert wrong["runs"] == 6 and 0 < wrong["wrong_runs"] < 6
    first = wrong["first"]
    assert (first["step"], first["phase"], first["fqn"]) == (2, "backward", "3.layer.mlp.linear_fc1")


@pytest.mark.parametrize(("kind", "status", "code"), [("sigkill", "died", 79), ("sigstop", "hung", 75)])
def test_a_rank_that_ends_or_freezes_is_a_result(golden: Path, kind: str, status: str, code: int) -> None:
    """It is named; the other ends too and is said to have waited."""
    faults = {"process_faults": [{"rank": 0, "kind": kind, "phase": "backward", "steps": [2, 2]}]}
    got, said = _verify(golden, "--timeout", "12", faults=faults)
    assert got == code
    assert [rank["status"] for rank in said["ranks"]] == [status, "stopped"]
    assert "a collective timed out" not in said["ranks"][1]["detail"]  # the watcher ends a hang


def test_another_key_is_not_comparable(golden: Path, tmp_path: Path) -> None:
    """A trace of other hardware accuses nobody; which part of the key differs is told."""
    contents = load_golden(golden)
    other = tmp_path / "other.golden"
    key = {**contents.key, "threads": 7, "torch": "2.12.0"}
    save_golden(other, Golden(**{**vars(contents), "key": key}))
    code, said = _verify(other)
    assert code == 80
    assert [rank["status"] for rank in said["ranks"]] == ["not comparable"] * 2
    assert "threads: golden 7, here 1" in said["ranks"][0]["detail"] and "torch" in said["ranks"][1]["detail"]


def test_another_choice_of_kernels_is_not_comparable(golden: Path) -> None:
    """An environment variable that makes MKL compute other bits is named as a part of the key; nobody is divergent."""
    code, said = _verify(golden, "--repeats", "1", MKL_CBWR="COMPATIBLE")
    assert code == 80
    for rank in said["ranks"]:
        assert (rank["status"], rank["runs"]) == ("not comparable", 0)
        assert rank["detail"] == "MKL_CBWR: golden None, here 'compatible'"


def test_a_refused_environment_is_not_comparable(golden: Path) -> None:
    """A variable that deterministic mode refuses is told of each rank, which is not said to have died."""
    code, said = _verify(golden, "--repeats", "1", NCCL_ALGO="Tree")
    assert code == 80
    assert all(rank["status"] == "not comparable" and "NCCL_ALGO" in rank["detail"] for rank in said["ranks"])


def _altered(golden: Path, out: Path, key: dict[str, Any], section: str, **fields: Any) -> Path:
    contents = load_golden(golden)
    sections = contents.config["megasdc"]
    sections[section] = {**sections[section], **fields}
    save_golden(out, Golden(**{**vars(contents), "key": {**contents.key, **key}}))
    return out


def test_the_key_is_compared_before_anything_is_built(golden: Path, tmp_path: Path) -> None:
    """A model that this host could never hold, of another device, is not comparable instead of dying."""
    other = _altered(golden, tmp_path / "a.golden", {"device": "another"}, "model", hidden_size=2**22)
    code, said = _verify(other)
    assert code == 80
    assert all(rank["detail"].startswith("device: golden 'another'") for rank in said["ranks"])


def test_a_configuration_of_another_version(golden: Path, tmp_path: Path) -> None:
    """A field that this version lacks makes ranks not comparable, and is named beside the versions; a drill too."""
    other = _altered(golden, tmp_path / "a.golden", {"megasdc": "9.0"}, "golden", unheard_of=1)
    code, said = _verify(other)
    assert code == 80
    for rank in said["ranks"]:
        assert rank["status"] == "not comparable" and "megasdc: golden '9.0'" in rank["detail"]
        assert "megasdc.golden.unheard_of: unknown key" in rank["detail"]
    (tmp_path / "faults.json").write_text("{}")
    for arguments in (("--library", str(tmp_path)), (str(other), "--faults", str(tmp_path / "faults.json"))):
        code, _, error = _megasdc("golden", "verify", *arguments)
        assert code == 80 and "unheard_of: unknown key" in error


def test_time_decides(golden: Path) -> None:
    """With --minutes the ranks repeat together until the time is over, at least once."""
    code, said = _verify(golden, "--minutes", "0")
    assert (code, [rank["runs"] for rank in said["ranks"]]) == (0, [1, 1])
    code, said = _verify(golden, "--minutes", "0.1")
    first, second = [rank["runs"] for rank in said["ranks"]]
    assert code == 0 and first == second > 1


def test_a_library_gives_the_trace_for_this_machine(golden: Path, tmp_path: Path) -> None:
    """Of several files the one with this machine's key is taken; without one, each is told with what differs."""
    contents = load_golden(golden)
    other = Golden(**{**vars(contents), "key": {**contents.key, "device": "another"}})
    save_golden(tmp_path / "a.golden", other)
    (tmp_path / "b.golden").write_text("no golden trace")
    code, _, error = _megasdc("golden", "verify", "--library", str(tmp_path))
    assert code == 80
    assert "a.golden: device: golden 'another'" in error and "b.golden is damaged" in error
    save_golden(tmp_path / "c.golden", contents)
    code, said, error = _megasdc("golden", "verify", "--library", str(tmp_path), "--repeats", "1")
    assert code == 0 and "c.golden is for this machine" in error
    assert [rank["status"] for rank in said["ranks"]] == ["healthy"] * 2


def test_a_fault_that_cannot_fire_is_told(golden: Path) -> None:
    """A drill that harms nothing says so instead of looking like a healthy rank."""
    slow = {"kind": "slow", "factor": 1.5, "rank": 1}
    faults = {"faults": [{"submodule": "3.*", "steps": [9, 9]}], "process_faults": [slow, {**slow, "steps": [9, 9]}]}
    code, said = _verify(golden, "--repeats", "1", faults=faults)
    assert (code, said["unfired_faults"], said["unfired_process_faults"]) == (0, [0], [1])


def test_a_long_drill(golden: Path) -> None:
    """A drill longer than one argument of a program may be reaches the ranks."""
    fault = {"submodule": "3.layer.mlp.linear_fc1", "rank": 0, "pattern": "indices", "indices": list(range(30_000))}
    code, said = _verify(golden, "--repeats", "1", faults={"faults": [fault]})
    assert code == 73 and said["ranks"][0]["first"]["fqn"] == "3.layer.mlp.linear_fc1"


def test_bad_drills_and_wrong_use(golden: Path, tmp_path: Path) -> None:
    """A field that is no field, a probability above 1 and devices alone of a two-rank trace are named."""
    runner = CliRunner()
    for faults, words in (
        ({"fault": []}, "fault: Extra inputs"),
        ({"faults": [{"probability": 2.0}]}, "faults.0.probability"),
        ({"faults": [{"phase": "tokens"}]}, "reads no corpus"),
        ({"faults": [{"kind": "value"}]}, "faults.0.value: kind value needs it"),
        ({"faults": [{"rank": 9}]}, "faults.0.rank: got 9, but there are 2"),
        ({"faults": [{"submodule": "3.layer.mlp.linear_fc3"}]}, "nearest: 2.layer.mlp.linear_fc2"),
        ({"process_faults": [{"kind": "slow"}]}, "process_faults.0.factor: kind slow needs it"),
        ({"process_faults": [{"kind": "exit", "steps": [None, 2]}]}, "process_faults.0.steps: the first step"),
        ({"process_faults": [{"kind": "hang", "rank": 2}]}, "process_faults.0.rank: got 2"),
    ):
        file = tmp_path / "faults.json"
        file.write_text(json.dumps(faults))
        problem = runner.invoke(app, ["golden", "verify", str(golden), "--faults", str(file)]).exception
        assert isinstance(problem, ConfigError) and words in str(problem)
    problem = runner.invoke(app, ["golden", "verify", str(golden), "--local", "1"]).exception
    assert isinstance(problem, ConfigError) and "--replicas 1" in str(problem)
    code, _, error = _megasdc("golden", "verify", str(golden), "--faults", str(file))
    assert code == 70 and words in error
    code, _, error = _megasdc("golden", "verify", str(tmp_path / "none.golden"))
    assert code == 80 and "golden record" in error


def test_every_device_alone(tmp_path: Path) -> None:
    """Devices that do not communicate each get a verdict; a fault in one does not touch the other."""
    out = tmp_path / "one.golden"
    config = _config(tmp_path, 1, golden={"vocab_size": 100, "seeds": 2, "sequence_lengths": [16, 8]})
    arguments = ("--config", str(config), "--out", str(out), "--repeats", "1")
    code, _, error = _megasdc("golden", "record", *arguments, forked_ranks=True)
    assert code == 0, error
    code, said = _verify(out, "--local", "2", "--repeats", "1")
    assert code == 0
    assert [(rank["cell"], rank["status"], rank["runs"]) for rank in said["ranks"]] == [
        (0, "healthy", 4),
        (1, "healthy", 4),
    ]


NOISE = """
import os
import runpy

import torch

original = torch.nn.functional.scaled_dot_product_attention


def attention(*arguments, **options):
    result = original(*arguments, **options)
    return result * (1 + 1e-6 * (os.environ["RANK"] == "0" and os.urandom(1)[0] > 128))


torch.nn.functional.scaled_dot_product_attention = attention
runpy.run_module("megasdc", run_name="__main__")
"""


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A golden trace of two replicas; with fresh processes that of two tensor ranks is made."""
    folder = tmp_path_factory.mktemp("replicas")
    out = folder / "a.golden"
    arguments = ("--config", str(_config(folder, 1)), "--out", str(out), "--replicas", "2", "--repeats", "1")
    code, _, error = _megasdc("golden", "record", *arguments, forked_ranks=True)
    assert code == 0, error
    return out


def test_who_gave_the_wrong_gradient_is_named_and_not_who_owns_it(replicas: Path) -> None:
    """A gradient that a replica harms after accumulation, before the sum, is that replica's whoever gets the shard."""
    for rank in (0, 1):
        where = {"phase": "collective", "rank": rank, "submodule": "3.layer.mlp.linear_fc1", "slot": "weight"}
        code, said = _verify(replicas, "--repeats", "1", faults={"faults": [{**where, "bits": "exponent"}]})
        assert code == 73
        assert [one["status"] for one in said["ranks"]] == [["divergent", "affected"], ["affected", "divergent"]][rank]
        first = said["ranks"][rank]["first"]
        assert (first["phase"], first["fqn"], first["slot"]) == ("accumulated_grad", where["submodule"], "weight")


def test_a_wrong_sum_over_replicas_accuses_nobody(replicas: Path) -> None:
    """A shard that is wrong right after the reduction is corruption, by one of the two; every result was compared."""
    fault = {"phase": "reduced_grad", "submodule": "3.layer.mlp.linear_fc1", "steps": [2, 2], "bits": "mantissa"}
    code, said = _verify(replicas, "--repeats", "1", faults={"faults": [fault]})
    assert code == 73
    assert [one["status"] for one in said["ranks"]] == ["inconclusive"] * 2
    assert all("one of ranks 0, 1" in one["detail"] and one["compared"] > 300 for one in said["ranks"])


def test_replicas_that_are_wrong_by_themselves_are_both_named(replicas: Path) -> None:
    """Rank 1 is wrong a micro-batch later than rank 0; nothing of it came from there."""
    where = {"phase": "backward", "submodule": "3.layer.mlp.linear_fc1", "steps": [1, 1]}
    faults = [{**where, "rank": rank, "micro_batches": [rank]} for rank in (0, 1)]
    code, said = _verify(replicas, "--repeats", "1", faults={"faults": faults})
    assert code == 73 and [one["status"] for one in said["ranks"]] == ["divergent"] * 2
    assert [one["first"]["micro_batch"] for one in said["ranks"]] == [0, 1]


@pytest.mark.parametrize("trace", [{"phases": ["recompute"]}, {"phases": ["forward"], "micro_batches": [7]}], ids=str)
def test_a_trace_with_nothing_in_it_is_not_recorded(tmp_path: Path, trace: dict[str, Any]) -> None:
    """What would call every device healthy is refused, with the settings that leave nothing."""
    config = _config(tmp_path, 1, trace=trace)
    code, _, error = _megasdc("golden", "record", "--config", str(config), "--out", str(tmp_path / "x.golden"))
    assert code == 80 and not (tmp_path / "x.golden").exists()
    assert "leaves no result of rank 0" in error
    assert all(f"megasdc.trace.{name} {value}" in " ".join(error.split()) for name, value in trace.items())


def test_what_does_not_repeat_is_not_recorded(tmp_path: Path) -> None:
    """A rank whose attention is noisy is refused with the first address, and no file is written."""
    (tmp_path / "noisy.py").write_text(NOISE)
    arguments = ("golden", "record", "--config", str(_config(tmp_path, 1)), "--out", str(tmp_path / "x.golden"))
    done = StartedCommand(str(tmp_path / "noisy.py"), arguments, forked_ranks=True, is_server=True).wait(300)
    assert done.returncode == 80
    assert "does not repeat" in done.stderr and "core_attention (output) on rank 0" in done.stderr
    assert not (tmp_path / "x.golden").exists()


def test_an_error_of_a_rank_keeps_its_exit_code(tmp_path: Path) -> None:
    """An environment that a rank refuses ends the recording with the code for that, and nothing is written."""
    arguments = ("golden", "record", "--config", str(_config(tmp_path, 1)), "--out", str(tmp_path / "x.golden"))
    code, _, error = _megasdc(*arguments, NCCL_ALGO="Tree")
    assert code == 70 and "NCCL_ALGO" in error
    assert not (tmp_path / "x.golden").exists()


def test_a_sample_of_the_campaign(tmp_path: Path) -> None:
    """Random faults in two layouts are all detected and named; clean runs raise nothing; the counts add up."""
    out = tmp_path / "detection.json"
    arguments = ("--faults", "24", "--clean", "4", "--layouts", "1x1x2,2x1x1", "--out", str(out), *["--fuse"] * fused())
    code, said, error = _megasdc("detection", *arguments, program="tools.bench", DS_ACCELERATOR=None)
    assert code == 0, error
    assert "Setting accelerator to CPU" in error, "DeepSpeed's lines are no part of the JSON"
    total = {name: sum(group.get(name, 0) for group in said["by_phase"].values()) for name in ("injected", "harmful")}
    assert total["injected"] == 24 and total["harmful"] > 15
    for group in said["by_phase"].values():
        assert group["harmful"] == group["detected"] == group["rank"] == group["submodule"] == group["direction"]
    assert (said["clean_runs"], said["clean_alarms"]) == (4, 0)
    assert json.loads(out.read_text())["passed"] is True
