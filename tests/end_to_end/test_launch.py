"""`megasdc launch` over real SSH between test hosts: the front's exit code and words are true."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from megasdc.ops.cluster import Cluster, unavailable_reason
from megasdc.ops.launch.records import collect

REASON = unavailable_reason()
pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.cluster,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(240),
]

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("launch_worker.py")
HOSTS = ["node1", "node2", "node3"]
SECRETS = {
    "WANDB_API_KEY": "planted-1",
    "MLFLOW_TRACKING_PASSWORD": "planted 2;$(x) '\"",
    "TORCH_URL": "x://u:planted-3@h",
}
MEGATRON_CORE = next(Path(path) for folder in sys.path for path in Path(folder).glob("megatron_core-*.dist-info"))


class Launches:
    """The test hosts, and one configuration to launch on them."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.config = write_small_config(folder)
        self.run_dir = folder / "run dir"

    def command(self, *options: str, names: Sequence[str] = HOSTS[:2], python: str = sys.executable) -> list[str]:
        """Return a launch command for the named hosts."""
        hostfile = self.cluster.hostfile(names)
        chosen = ["--hostfile", str(hostfile), "--config", str(self.config), "--script", str(WORKER)]
        return [python, "-m", "megasdc", "launch", *chosen, *options]

    def start(self, behaviour: str, *options: str, **kwargs: Any) -> subprocess.Popen[str]:
        """Start a launch from node1 and return without waiting."""
        env = {"MEGASDC_TEST_BEHAVIOUR": behaviour, **kwargs.pop("env", {})}
        argv = self.command(*options, **kwargs)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
        return self.cluster.popen("node1", argv, env=env, cwd=str(self.folder), **pipes)

    def run(self, behaviour: str, *options: str, **kwargs: Any) -> tuple[int, str]:
        """Launch from node1, wait, and return the exit code and what the front said."""
        process = self.start(behaviour, *options, **kwargs)
        out, err = process.communicate(timeout=200)
        return process.returncode, err + out

    def wait_for(self, pattern: str, count: int) -> None:
        """Wait until so many files of the run folder match."""
        end = time.monotonic() + 100
        while len(list(self.run_dir.glob(pattern))) < count:
            assert time.monotonic() < end, f"fewer than {count} files {pattern}"
            time.sleep(0.05)

    def done_codes(self) -> dict[int, int]:
        """Return the exit code that each rank of the only launch reported."""
        (launch_dir,) = (self.run_dir / "done").iterdir()
        return {rank: done.exit_code for rank, done in collect(self.run_dir, launch_dir.name).done.items()}


def write_small_config(folder: Path) -> Path:
    """Write the smallest configuration that the front accepts into a folder; its run folder is ``run dir`` there."""
    for name in ("data", "run dir"):
        (folder / name).mkdir(parents=True)
    path = folder / "config with space.json"
    content = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "megasdc": {
            "data": {"path": str(folder / "data")},
            "protect": "off",
            "training": {"steps": 4},
            "logging": {"run_dir": str(folder / "run dir")},
        },
    }
    path.write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three hosts; each sees its own version file of Megatron-core and its own node-local folder."""
    folder = tmp_path_factory.mktemp("cluster")
    env = {
        "PATH": os.environ["PATH"],
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions")),
        "OMP_NUM_THREADS": "1",
    }
    with Cluster(folder, 3, env=env, private=[MEGATRON_CORE, folder / "node_local"]) as hosts:
        for name in HOSTS:
            shutil.copytree(MEGATRON_CORE, hosts.private_dir(name, MEGATRON_CORE), dirs_exist_ok=True)
        yield hosts


@pytest.fixture
def launches(cluster: Cluster, tmp_path: Path) -> Launches:
    """A fresh configuration and run folder on the shared hosts, in a path that a shell would misread."""
    return Launches(cluster, tmp_path / "work ;touch injected")


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.full), 3])
def test_success_needs_and_finds_every_record(launches: Launches, count: int) -> None:
    """Ranks on 2 and 3 hosts meet over gloo; exit code 0 with a done record of each."""
    code, said = launches.run("signed", names=HOSTS[:count])
    assert code == 0, said
    assert launches.done_codes() == dict.fromkeys(range(count), 0)
    assert f"all {count} ranks are done" in said


def test_what_a_login_prints_is_no_address(launches: Launches) -> None:
    """Where only SSH knows the first host's name, ranks meet at an address that the host check reports."""
    cluster = launches.cluster
    changed = [cluster.home(name) / ".bashrc" for name in HOSTS[:2]]
    ssh = cluster.folder / "etc" / "node1" / "ssh" / "ssh_config"
    before = ssh.read_text()
    try:
        ssh.write_text(f"{before}Host first\n HostName node1\n")
        for path in changed:
            path.write_bytes(b"printf 'Last login: 28 ao\xfbt on tty1'\n")
        code, said = launches.run("environment", names=["first", "node2"])
    finally:
        ssh.write_text(before)
        for path in changed:
            path.unlink(missing_ok=True)
    assert code == 0, said
    found = [json.loads((launches.run_dir / f"environment_{rank}.json").read_text()) for rank in range(2)]
    assert [one["environ"]["MASTER_ADDR"] for one in found] == [cluster.addresses["node1"]] * 2


def test_failed_rank_gives_its_code_host_and_reason(launches: Launches) -> None:
    """One rank ends with 71, the other as a consequence with 79: the front ends with 71 and says who and why."""
    code, said = launches.run("fail:1")
    assert code == 71, said
    assert "rank 1 on node2 failed first with exit code 71 (DataError): shard 1 is damaged" in said
    assert "after it failed: rank 0 on node1" in said
    (launch_dir,) = (launches.run_dir / "done").iterdir()
    hosts = collect(launches.run_dir, launch_dir.name).failed_hosts.values()  # by the shells, which see it also
    assert {host.host: host.exit_code for host in hosts} == {"node1": 79, "node2": 71}  # where no rank could say so


def test_lost_node_is_named(launches: Launches) -> None:
    """A host whose power is cut while training: not 0, and its rank and host are named."""
    process = launches.start("sums")
    try:
        launches.wait_for("summing_*", 2)
        launches.cluster.power_off("node2")
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
        launches.cluster.reboot("node2")
    assert process.returncode == 78, err + out
    assert "rank 1 on node2: no done record (killed or host lost; launcher said exit code 255" in err
    assert "as a consequence failed: rank 0 on node1" in err
    assert "node2: cannot be reached over SSH" in err


def test_excluded_host_takes_no_part(launches: Launches) -> None:
    """With one host left the ranks run on that host, not on the one that starts them."""
    code, said = launches.run("environment", "--exclude", "node1")
    assert code == 0, said
    assert "not used: node1" in said
    (launch_dir,) = (launches.run_dir / "done").iterdir()
    assert [done.host for done in collect(launches.run_dir, launch_dir.name).done.values()] == ["node2"]


def test_arguments_and_environment_arrive_unchanged(launches: Launches) -> None:
    """Nothing named on the command line runs on a host, paths may hold spaces, and the user's variables reach ranks."""
    environment = launches.folder / "my venv"
    environment.symlink_to(sys.prefix)
    injected = launches.folder.parent / "injected"
    code, said = launches.run(
        "environment",
        "--set",
        "megasdc.data.path=data",
        "--set",
        "megasdc.model.preset=null",
        "--set",
        f"megasdc.checkpoint.folder=c;touch {injected} $(touch {injected}) 'q\"",
        python=str(environment / "bin" / "python"),
        env={"NCCL_DEBUG_FILE": "/tmp/a b;$HOME", "OMP_NUM_THREADS": "3", "SECRET_TOKEN": "x", **SECRETS},
    )
    assert code == 0, said
    found = json.loads((launches.run_dir / "environment_1.json").read_text())
    assert f"megasdc.checkpoint.folder=c;touch {injected} $(" in found["argv"][-1]
    assert found["cwd"] == str(launches.folder)
    assert found["environ"]["NCCL_DEBUG_FILE"] == "/tmp/a b;$HOME"
    assert found["environ"]["OMP_NUM_THREADS"] == "3"
    assert "SECRET_TOKEN" not in found["environ"]
    assert {name: found["environ"].get(name) for name in SECRETS} == SECRETS, "they come another way than the others"
    kept = [path for path in launches.run_dir.rglob("*") if path.is_file() and not path.name.startswith("environment_")]
    texts = [path.read_text(errors="replace") for path in kept]
    words = [
        base64.urlsafe_b64decode(word).decode() for text in texts for word in re.findall(r"[\w-]{80,}={0,2}", text)
    ]
    assert any("PYTHONPATH" in word or "NCCL_DEBUG_FILE" in word for word in words), "the encoded command is there"
    assert not [text for text in (said, *texts, *words) for secret in SECRETS.values() if secret in text]
    assert re.fullmatch(r"[0-9a-f]{32}", found["environ"]["MEGASDC_PRIVATE_NAME"])
    assert not list(Path("/dev/shm").glob(f"megasdc-launch-{found['environ']['MEGASDC_PRIVATE_NAME']}-*"))
    assert not injected.exists()
    assert not (launches.cluster.home("node2") / "injected").exists()


def test_node_local_records_are_gathered(launches: Launches) -> None:
    """Each host has a run folder of its own; the front still sees every record."""
    local = launches.cluster.private[1] / launches.folder.parent.name
    code, said = launches.run("fail:1", "--set", f"megasdc.logging.run_dir={local}")
    assert code == 71, said
    assert "rank 1 on node2 failed first" in said


@pytest.mark.full
def test_a_failure_that_no_other_rank_notices_is_asked_for(launches: Launches) -> None:
    """Only the failed rank's host has its record: the front asks there, and ends the ranks that would sleep on."""
    local = launches.cluster.private[1] / launches.folder.parent.name
    code, said = launches.run("alone:1", "--set", f"megasdc.logging.run_dir={local}")
    assert code == 71, said
    assert "a part of the launch failed" in said and "others still run; ending them" in said
    assert "rank 1 on node2 failed first with exit code 71 (DataError)" in said


@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_stop_lets_ranks_save(launches: Launches, name: str) -> None:
    """A stop on request reaches the ranks of this launch, which end by themselves; the exit code is 0."""
    process = launches.start("sleep")
    launches.wait_for("asleep_*", 2)
    front = launches.cluster.run("node1", ["pgrep", "-f", "-o", "megasdc launch"]).stdout.strip()
    launches.cluster.run("node1", ["kill", f"-{name}", front])
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert f"stopped by SIG{name}, all 2 ranks saved and are done" in err
    assert launches.done_codes() == {0: 0, 1: 0}


def test_problems_of_all_hosts_are_told_at_once(launches: Launches) -> None:
    """A host that is off, another version and a missing data folder: 78, each with its host, nothing started."""
    metadata = launches.cluster.private_dir("node3", MEGATRON_CORE) / "METADATA"
    original = metadata.read_text()
    metadata.write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.0.1\n")
    launches.cluster.unplug("node2")
    try:
        code, said = launches.run("sum", "--set", "megasdc.data.path=nowhere", names=HOSTS)
    finally:
        launches.cluster.plug_in("node2")
        metadata.write_text(original)
    assert code == 78, said
    assert "node2: cannot be reached over SSH" in said
    assert "megatron-core: node3 has 0.0.1" in said
    assert f"node1: {launches.folder}/nowhere cannot be read there" in said
    assert not (launches.run_dir / "done").exists()


def test_missing_hostfile_starts_nothing(launches: Launches) -> None:
    """DeepSpeed alone would warn and run locally; the front refuses."""
    argv = launches.command()
    argv[argv.index("--hostfile") + 1] = "/nowhere/hostfile"
    done = launches.cluster.run("node1", argv, cwd=str(launches.folder), env={"MEGASDC_TEST_BEHAVIOUR": "sum"})
    assert done.returncode == 78
    assert "hostfile /nowhere/hostfile cannot be read" in done.stderr
    assert not (launches.run_dir / "done").exists()


def test_dry_run_checks_and_starts_nothing(launches: Launches) -> None:
    """The command is shown as JSON, nothing runs, nothing is written, and the last line says so."""
    process = launches.start("sum", "--dry-run", "--json")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "checks passed; nothing was started" in err.splitlines()[-1], err
    assert json.loads(out)["hosts"] == {"node1": [0], "node2": [0]}
    assert list(launches.run_dir.iterdir()) == []
