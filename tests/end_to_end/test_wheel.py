"""The package as others install it: sdist, wheel, an environment and a folder of its own, nothing of the repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from collections.abc import Iterator
from email import message_from_string
from pathlib import Path

import pytest
from test_launch_train import tiny_config

import megasdc
from megasdc.events import read_events
from megasdc.ops.cluster import unavailable_reason

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(400)]
STEPS = 4
SCRIPT = """
import json, sys
import megasdc

if __name__ == "__main__":
    result = megasdc.train(json.load(open("tiny.json")), num_ranks=2, overrides=["megasdc.logging.run_dir=again"])
    first, last = (f"again/checkpoints/step_{step:08d}" for step in (2, 4))
    assert (result.exit_code, megasdc.compare(last, last.replace("again", "run")).same) == (0, True), result
    report = megasdc.compare(first, last, weights_only=True)
    before, after = megasdc.load_weights(first), megasdc.load_weights(last)
    assert not report.same and before.keys() == after.keys()
    names = {name for name in before if not before[name].equal(after[name])}
    assert names == {finding["fqn"] for finding in report.as_dict()["findings"]}, (names, report.as_dict())
    print("modules:", megasdc.__file__, sys.modules["megasdc.api"].__file__)
"""


def run(*words: object, cwd: Path, code: int = 0) -> str:
    """What a command prints that ends with an exit code; it finds no module of the repository."""
    path = os.pathsep.join((str(Path(str(words[0])).parent), os.environ["PATH"]))
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env = {**kept, "PATH": path}
    done = subprocess.run([*map(str, words)], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, (words, done.stdout[-3000:], done.stderr[-5000:])
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """The sdist, and the wheel that is made of it."""
    folder = tmp_path_factory.mktemp("dist")
    base = folder / "base"
    run(sys.executable, "setup.py", "-q", "egg_info", "--egg-base", _made(base), "sdist", "-d", folder, cwd=ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    build = ("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index")
    run(sys.executable, *build, "-w", folder, sdist, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    yield sdist, wheel
    shutil.rmtree(folder)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def environment(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``bin`` of an environment with the wheel; what it depends on are the packages of the tests' environment."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    install = ("-m", "pip", "--python", folder / "bin" / "python", "install", "-q", "--no-deps", "--no-compile")
    run(sys.executable, *install, "--no-index", built[1], cwd=folder)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    # A line of a .pth file is a folder, whose own .pth files - the repository's among them - are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def test_a_run_from_the_wheel_alone(environment: Path, tmp_path: Path) -> None:
    """Prepare, train with the plain launcher, resume by the Python API, compare: equal bits, and exit codes as said."""
    (tmp_path / "text").mkdir()
    for name in ("argparse", "ast", "inspect"):
        shutil.copy(Path(sysconfig.get_path("stdlib")) / f"{name}.py", tmp_path / "text" / f"{name}.txt")
    config = tiny_config()
    config["megasdc"] |= {"training": {"steps": STEPS}, "checkpoint": {"interval": 2}}
    (tmp_path / "tiny.json").write_text(json.dumps(config))
    python, command = environment / "python", environment / "megasdc"
    run(command, "prepare-data", "--config", "tiny.json", cwd=tmp_path)
    launcher = ("-m", "deepspeed.launcher.runner", "--num_gpus", 2, "--master_port", _port(), "--module")
    run(python, *launcher, "megasdc.entry.pretrain_gpt", "--config", "tiny.json", cwd=tmp_path)
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / f"step_{STEPS:08d}")
    (tmp_path / "api.py").write_text(SCRIPT)
    said = run(python, "api.py", cwd=tmp_path)
    assert said.rpartition("modules:")[2].count(str(environment.parent)) == 2, "of the wheel, not of the repository"
    resumed = [
        event.fields["path"] for event in read_events(tmp_path / "again", name="checkpoint", kind="resume", rank=0)
    ]
    assert resumed == ["again/checkpoints/step_00000002"]
    ends = [f"{name}/checkpoints/step_{STEPS:08d}" for name in ("run", "again")]
    assert json.loads(run(command, "compare", *ends, "--json", cwd=tmp_path))["same"] is True
    run(command, "compare-traces", "run", "again", cwd=tmp_path, code=2)  # neither was traced


def _port() -> int:
    from megasdc.parallel.local_ranks import free_port

    return free_port()


@pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
def test_hosts_of_the_wheel(environment: Path, tmp_path: Path) -> None:
    """Test hosts need nothing of the repository; a login on one finds the programs and modules of the environment."""
    asked = "python -c 'import megasdc; print(megasdc.__file__)'"
    words = (environment / "megasdc", "test-hosts", 2, "--", "ssh", "node2", f"megasdc --version && {asked}")
    said = run(*words, cwd=tmp_path)
    assert f"megasdc {megasdc.__version__}\n" in said and said.count(str(environment.parent)) == 1, said
    assert said.splitlines()[-1].startswith(str(environment.parent))


def test_what_an_installation_has(environment: Path, built: tuple[Path, Path]) -> None:
    """Examples in share/megasdc, the licence by name and as a file, one version; the sdist is the whole repository."""
    prefix = environment.parent
    for name in ("configs/smoke.json", "configs/sweeps/pei_table_1.json", "launch/constraints.txt", "launch/no_ssh.sh"):
        assert (prefix / "share" / "megasdc" / name).read_bytes() == (ROOT / name).read_bytes()
    (about,) = prefix.glob("lib/python*/site-packages/megasdc-*.dist-info")
    metadata = message_from_string((about / "METADATA").read_text())
    assert (metadata["License-Expression"], metadata["Version"]) == ("Apache-2.0", megasdc.__version__)
    assert (about / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert f"version: {megasdc.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    kept = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split("\n")
    with tarfile.open(built[0]) as archive:
        inside = {re.sub(r"^[^/]*/", "", one.name) for one in archive.getmembers()}
    assert {name for name in kept if name and (ROOT / name).is_file()} <= inside
