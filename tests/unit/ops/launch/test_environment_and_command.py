"""Nothing is lost or misread between the front's command line and the rank's."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megasdc.common.errors import LaunchError
from megasdc.ops.launch.command import RANK_MODULE, backend_problems, parse_launcher_args, runner_command
from megasdc.ops.launch.environment import (
    env_file_names,
    env_file_problems,
    env_files,
    exported_variable_problems,
    forwarded_environment,
    private_environment,
)
from megasdc.ops.launch.hosts import Placement
from megasdc.ops.launch.node import rank_variable
from megasdc.ops.launch.on_host import private as on_host
from megasdc.ops.launch.rank import RankCommand, main, rank_environment
from megasdc.ops.launch.request import LaunchRequest
from megasdc.parallel.local_ranks import default_extensions_dir
from megasdc.parallel.rendezvous import PRIVATE_VARIABLE
from megasdc.tensors import bound

NASTY = "a=b;touch x $(touch y) `touch z` \"q' \\ \n*"
COMMAND = RankCommand("/w d", ["/s.py"], ["--set", NASTY], {"A": NASTY}, ["/venv/bin"], {"MASTER_PORT": "1"})


def test_command_survives_encoding_as_one_plain_word() -> None:
    """No shell can find anything to interpret in it."""
    assert re.fullmatch(r"[\w=-]+", COMMAND.encode())
    assert RankCommand.decode(COMMAND.encode()) == COMMAND


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({"RANK": "1", "OMPI_COMM_WORLD_RANK": "9"}, "1"),
        ({"OMPI_COMM_WORLD_RANK": "2", "SLURM_PROCID": "0"}, "2"),
        ({"SLURM_PROCID": "3"}, "3"),
    ],
)
def test_rank_comes_from_the_backend(environ: dict[str, str], rank: str) -> None:
    """DeepSpeed's own variable wins, then OpenMPI's, then SLURM's."""
    found = rank_environment(COMMAND, {**environ, "PATH": "/bin", "MASTER_PORT": "5"})
    assert found["RANK"] == rank
    assert (found["A"], found["PATH"], found["MASTER_PORT"]) == (NASTY, "/venv/bin:/bin", "5")
    assert rank_environment(COMMAND, {})["MASTER_PORT"] == "1"


def test_missing_working_folder_is_an_error() -> None:
    """Ranks must not start somewhere else."""
    with pytest.raises(LaunchError, match="/w d"):
        main(["--local_rank=0", "id", COMMAND.encode()])


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("", "empty line"),
        ("# comment", "comment"),
        ("no equals sign", "need NAME=VALUE"),
        ("2A=b", "need NAME=VALUE"),
        ("A=$(touch x)", "would interpret"),
        ('A="b"', "would interpret"),
        ("A=b c;d", None),
        ("MLFLOW_TRACKING_PASSWORD=hidden", "MLFLOW_TRACKING_PASSWORD holds a secret"),
        ("URL=http://me:hidden@h", "URL holds a secret"),
    ],
)
def test_deepspeed_env_lines(tmp_path: Path, line: str, problem: str | None) -> None:
    """A bad line is named by its number."""
    path = tmp_path / ".deepspeed_env"
    path.write_text(f"GOOD=1\n{line}\nLAST=2\n")
    found = env_file_problems(path)
    assert [text.startswith(f"{path}:2: ") for text in found] == ([True] if problem else [])
    assert problem is None or problem in found[0]
    assert not any("hidden" in text for text in found)


@pytest.mark.parametrize(("start", "problem"), [(b"\xef\xbb\xbf", "byte order mark"), (b"\xff", "is not UTF-8 text")])
def test_an_encoding_of_deepspeed_env_that_is_misread_is_named(tmp_path: Path, start: bytes, problem: str) -> None:
    """The file is named, and its names are read nevertheless: all problems are told at once."""
    path = tmp_path / ".deepspeed_env"
    path.write_bytes(start + b"GOOD=1\nLAST=2\n")
    (found,) = env_file_problems(path)
    assert found.startswith(f"{path}: ") and problem in found
    assert "LAST" in env_file_names([path])


def test_a_user_without_a_home_folder_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither HOME nor an entry in passwd, as in containers: what lies in the working folder is found."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    (tmp_path / ".deepspeed_env").write_text("A=1\n")
    assert env_files({}, tmp_path) == [tmp_path / ".deepspeed_env"]
    assert bound._cache_folder() == Path(sys.prefix)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert bound._cache_folder() == tmp_path / ".cache"


def test_deepspeed_env_files_are_those_of_deepspeed(tmp_path: Path) -> None:
    """Home folder, then working folder, by the name in DS_ENV_FILE."""
    home, cwd = tmp_path / "home", tmp_path / "cwd"
    for folder in (home, cwd):
        folder.mkdir()
        (folder / "mine").write_text("NCCL_DEBUG=INFO\n")
    environ = {"HOME": str(home), "DS_ENV_FILE": "mine"}
    assert env_files(environ, cwd) == [home / "mine", cwd / "mine"]
    assert env_files({"HOME": str(home)}, cwd) == []
    assert env_file_names([home / "mine"]) == {"NCCL_DEBUG"}


def test_wandb_is_forwarded_without_its_secret() -> None:
    """Command lines and launch.json are readable by others."""
    environ = {"WANDB_PROJECT": "p", "WANDB_API_KEY": "secret", "WANDB_BASE_URL": "https://me:secret@w", "HOME": "/"}
    environ |= {
        "MLFLOW_TRACKING_PASSWORD": "x",
        "PYTHONPATH": "/a",
        "TORCH_MIRROR": "http://u:p@h",
        "GITHUB_TOKEN": "x",
    }
    found = forwarded_environment(environ, set())
    assert found == {"WANDB_PROJECT": "p", "TORCH_EXTENSIONS_DIR": default_extensions_dir()}
    private = private_environment(environ)
    assert set(private) == {"WANDB_API_KEY", "WANDB_BASE_URL", "MLFLOW_TRACKING_PASSWORD", "TORCH_MIRROR"}
    assert all(private[name] == environ[name] for name in private)


def test_secrets_lie_in_a_folder_of_the_host_until_they_are_taken(tmp_path: Path) -> None:
    """Its user alone can read it; variables are taken once; links, and folders that are there already, are not used."""
    name, text = f"{tmp_path.name}-{os.getpid()}", json.dumps({"HF_TOKEN": "a\nb'\"$(x)"})
    files, folder = {"environment": text, "secret": "s"}, on_host.path_of(name)
    path = folder / "environment"
    try:
        assert on_host.answer({"name": name, "files": files}) == str(folder)
        assert [stat.S_IMODE(one.stat().st_mode) for one in (folder, path)] == [0o700, 0o600]
        with pytest.raises(SystemExit, match="list each machine once"):
            on_host.answer({"name": name, "files": files})
        folder.chmod(0o750)
        assert on_host.pop_environment(name) == {}
        folder.chmod(0o700)
        assert on_host.pop_environment(name) == json.loads(text)
        assert on_host.pop_environment(name) == {} and not path.exists() and (folder / "secret").read_text() == "s"
        (tmp_path / "other").write_text(text)
        path.symlink_to(tmp_path / "other")
        assert on_host.pop_environment(name) == {}
    finally:
        on_host.answer({"name": name, "files": None})
    assert not folder.exists() and (tmp_path / "other").read_text() == text
    folder.symlink_to(tmp_path)
    on_host.answer({"name": name, "files": None})
    folder.unlink()
    assert (tmp_path / "other").read_text() == text


def test_a_host_finds_the_folder_by_the_ranks_command() -> None:
    """Its launcher is given that of the ranks; a command without one has no such folder."""
    command = replace(COMMAND, environment={PRIVATE_VARIABLE: "abc"})
    argv = ["node.py", "--world_info=x", "-m", RANK_MODULE, "id", command.encode()]
    found = [rank_variable(one, PRIVATE_VARIABLE) for one in (argv, [*argv[:-1], COMMAND.encode()], argv[:3])]
    assert found == ["abc", None, None]


def test_what_changes_bits_is_forwarded() -> None:
    """A variable that chooses other kernels here is the same on every host."""
    environ = {"NVTE_FLASH_ATTN": "0", "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2"}
    environ |= {"NCCL_PROTO": "LL", "CUBLAS_WORKSPACE_CONFIG": ":16:8", "DNNL_MAX_CPU_ISA": "AVX2"}
    assert environ.items() <= forwarded_environment(environ, set()).items()


def test_forwarded_environment() -> None:
    """What ranks need goes along, secrets do not, and .deepspeed_env wins."""
    environ = {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "2", "HF_TOKEN": "x", "HOME": "/"}
    found = forwarded_environment(environ, {"NCCL_DEBUG"})
    expected = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "2", "TORCH_EXTENSIONS_DIR": default_extensions_dir()}
    assert found == expected
    assert default_extensions_dir().startswith(sys.prefix)
    assert exported_variable_problems({"PYTHONPATH": "/a:/b c", "PYTHONX": "$(x)", "OTHER": "$(x)"}) != []
    assert exported_variable_problems({"PYTHONPATH": "/a:/b c", "OTHER": "$(x)"}) == []
    (text,) = exported_variable_problems({"PYTHON$(touch x)": "1", "OTHER$(x)": "1"})
    assert "'PYTHON$(touch x)'" in text and "is no identifier" in text


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--enable_each_rank_log", "a;touch x"], "a remote shell would interpret"),
        (["--venv_script=$(x)"], "a remote shell would interpret"),
        (["--hostfile=h"], "give --hostfile to megasdc launch itself"),
        (["--no_ssh"], "use launch/no_ssh.sh"),
        (["--master_port", "many"], "--master_port"),
    ],
)
def test_launcher_options_that_cannot_be_right(arguments: list[str], problem: str) -> None:
    """They are refused before anything starts."""
    with pytest.raises(LaunchError) as caught:
        parse_launcher_args(arguments)
    assert problem in str(caught.value)


def test_launcher_options_that_the_front_needs_too() -> None:
    """Ports and address are read; the value of --launcher_args may hold spaces."""
    options = parse_launcher_args(["--ssh_port", "2222", "--master_port=5", "--launcher_args", "-x a b", "--quiet"])
    assert (options.ssh_port, options.master_port, options.master_addr) == (2222, 5, "")
    assert options.others == ("--launcher_args", "-x a b", "--quiet")
    assert parse_launcher_args(["--master_port", "5"]).others == ()


def command_for(slots: dict[str, list[int]], hostfile: Path | None, backend: str = "pdsh") -> list[str]:
    placement = Placement(slots, remote=hostfile is not None)
    request = LaunchRequest(Path("run.json"), hostfile, backend=backend, launcher_args=("--quiet",))
    return runner_command(placement, COMMAND, "id", request, master_addr=None)


def test_command_is_explicit() -> None:
    """One host still goes through SSH; a local run names its ranks and can find no hostfile by accident."""
    assert "--force_multi" in command_for({"a": [0]}, Path("h"))
    assert "--force_multi" not in command_for({"a": [0], "b": [0]}, Path("h"))
    local = command_for({"localhost": [0, 1]}, None)
    assert local[local.index("--num_gpus") + 1] == "2"
    assert not Path(local[local.index("--hostfile") + 1]).exists()
    assert "localhost:2,3" in command_for({"localhost": [2, 3]}, None)
    slurm = command_for({"a": [0], "b": [0]}, Path("h"), "slurm")
    assert "--module" not in slurm and "--no_ssh_check" in slurm and "--no_ssh_check" not in local


def test_backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown backend, a missing program and a filter that a backend cannot express are told."""
    assert "DeepSpeed has pdsh, openmpi" in backend_problems("ssh", filtered=False)[0]
    for name in ("srun", "mpirun"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert backend_problems("slurm", filtered=True) == backend_problems("openmpi", filtered=False) == []
    assert "takes neither --include" in backend_problems("openmpi", filtered=True)[0]
    (tmp_path / "srun").unlink()
    assert "srun is not on PATH" in backend_problems("slurm", filtered=False)[0]
