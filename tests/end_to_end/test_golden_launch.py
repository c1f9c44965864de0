"""Is a fleet verified through the real launcher over SSH, and is the wrong host named?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megasdc.config.load import parse_config
from megasdc.ops.cluster import Cluster, unavailable_reason
from megasdc.ops.golden.record import record_golden_trace

REASON = unavailable_reason()
pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.cluster,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(300),
]

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "golden_verify.py"
HOSTS = ["node1", "node2"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two hosts."""
    env = {
        "PATH": os.environ["PATH"],
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions")),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(SCRIPT.parents[1]),  # the tree of this test, whatever is installed
    }
    with Cluster(tmp_path_factory.mktemp("cluster"), 2, env=env) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A golden trace of one rank."""
    folder = tmp_path_factory.mktemp("golden")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "megasdc": {
            "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "max_positions": 64},
            "data": {"path": "none", "sequence_length": 16},
            "protect": "off",
            "training": {"steps": 5},
            "golden": {"vocab_size": 100},
            "logging": {"run_dir": str(folder / "run")},
        },
    }
    record_golden_trace(parse_config(config), folder / "a.golden", repeats=1)
    return folder / "a.golden"


def _start(
    cluster: Cluster, golden: Path, faults: Any, slots: int, python: str = sys.executable
) -> tuple[Path, subprocess.Popen[Any]]:
    out = golden.with_name("result.json")
    out.unlink(missing_ok=True)
    options = ["--repeats", "2", "--out", str(out)]
    if faults is not None:
        golden.with_name("faults.json").write_text(json.dumps(faults))
        options += ["--faults", str(golden.with_name("faults.json"))]
    hostfile = str(cluster.hostfile(HOSTS, slots))
    argv = [python, "-m", "deepspeed.launcher.runner", "--hostfile", hostfile, str(SCRIPT), str(golden)]
    return out, cluster.popen("node1", [*argv, *options], cwd=str(golden.parent))


def _verify(
    cluster: Cluster, golden: Path, programs: Path, faults: Any = None, slots: int = 1
) -> tuple[int, dict[str, Any]]:
    """Verify by forks; with fresh processes ``test_a_host_that_falls_silent`` does."""
    out, process = _start(cluster, golden, faults, slots, str(programs / "python"))
    process.communicate(timeout=250)
    return process.returncode, json.loads(out.read_text())


def test_two_hosts_are_healthy(cluster: Cluster, golden: Path, programs: Path) -> None:
    """Every rank on every host computes what was recorded elsewhere; exit code 0."""
    code, said = _verify(cluster, golden, programs)
    assert code == 0
    assert [(rank["host"], rank["status"], rank["runs"]) for rank in said["ranks"]] == [
        ("node1", "healthy", 2),
        ("node2", "healthy", 2),
    ]


@pytest.mark.full  # ``test_golden_node.py`` kills a rank beside another in the same way, without SSH
def test_a_dead_process_holds_up_no_other_cell(cluster: Cluster, golden: Path, programs: Path) -> None:
    """A rank killed on one host is a result, told by its host; the other cell is verified to its end."""
    fault = {"host": "node2", "kind": "sigkill", "phase": "forward", "steps": [2, 2]}
    code, said = _verify(cluster, golden, programs, faults={"process_faults": [fault]})
    assert code == 79
    first, second = said["ranks"]
    assert (first["status"], first["runs"], second["status"]) == ("healthy", 2, "died")
    assert "SIGKILL" in second["detail"] and second["host"] == "node2"


def test_the_wrong_host_is_named(cluster: Cluster, golden: Path, programs: Path) -> None:
    """A fault on one of two hosts with two ranks each: 73, that host's ranks divergent, the others healthy.

    The launcher ends a host's ranks when one ends with a code: the result is there before that, of all ranks.
    """
    fault = {"host": "node2", "submodule": "2.layer.mlp.linear_fc2", "phase": "weight_grad", "steps": [1, 1]}
    code, said = _verify(cluster, golden, programs, faults={"faults": [fault]}, slots=2)
    assert code == 73
    assert [rank["status"] for rank in said["ranks"]] == ["healthy", "healthy", "divergent", "divergent"]
    for wrong in said["ranks"][2:]:
        assert wrong["wrong_runs"] == 2
        assert (wrong["first"]["phase"], wrong["first"]["fqn"]) == ("weight_grad", "2.layer.mlp.linear_fc2")


def test_a_host_that_falls_silent(cluster: Cluster, golden: Path) -> None:
    """A host without power gives no answer; rank 0, which has waited for it, still writes the result of all."""
    fault = {"host": "node2", "kind": "hang", "phase": "forward", "steps": [2, 2]}
    out, process = _start(cluster, golden, {"process_faults": [fault]}, slots=1)
    command = ["pgrep", "-f", "megasdc.ops.golden.rank"]
    while not cluster.run("node2", command).stdout.split():  # its watcher has told rank 0 that it lives
        assert process.poll() is None
        time.sleep(0.2)
    cluster.power_off("node2")
    process.communicate(timeout=250)
    assert process.returncode == 255  # pdsh takes the highest code, and that is ssh's for a lost host
    said = json.loads(out.read_text())
    assert said["exit_code"] == 79
    assert [rank["status"] for rank in said["ranks"]] == ["healthy", "no answer"]
    assert "was silent" in said["ranks"][1]["detail"]
