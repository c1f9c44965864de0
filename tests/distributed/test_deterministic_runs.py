"""Does deterministic mode reach the ranks without changing a bit, and are runs that differ found out?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import StartedCommand, run_distributed
from whole_runs import MODELS, metrics_of, prepare_text, state_of, train_run, write_config

from megasdc import pretrain
from megasdc.common.errors import ConfigError, DataError
from megasdc.config.load import load_config
from megasdc.ops.determinism_check.check import check_determinism, compare_two_runs
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.trace import read_trace, trace_path

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

ON = "megasdc.determinism.enabled=true"
FILL = "megasdc.determinism.fill_uninitialized_memory=true"


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


def _rank(config: str, overrides: list[str]) -> tuple[int, str | None, dict[str, Any]]:
    """Train, then look at the switches of this rank, and at Megatron-core's in every embedding that was used."""
    import torch

    from megasdc.model.gpt import _local_embedding

    embeddings, embedding = [], _local_embedding()
    forward = embedding.forward

    def spy(self: Any, *arguments: Any) -> Any:
        embeddings.append(self.deterministic_mode)
        return forward(self, *arguments)

    embedding.forward = spy
    code, error = pretrain.pretrain(config, overrides)
    raised = None
    try:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    except RuntimeError as problem:
        raised = str(problem)
    seen = {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "raised": raised is not None and "deterministic implementation" in raised,
        "embeddings": sorted(set(embeddings)),
        "environ": [os.environ.get(name) for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO")],
    }
    return code, None if error is None else str(error), seen


CASES: dict[str, dict[str, Any]] = {
    "1x1x2": {"model__hidden_dropout": 0.1},
    "2x1x1_llama_bf16": {
        "model": dict(MODELS["llama"]),
        "parallel__tensor": 2,
        "parallel__sequence_parallel": True,
        "deepspeed__bf16": {"enabled": True},
    },
    "1x2x1_recompute": {"parallel__pipeline": 2, "deepspeed__pipeline": {"activation_checkpoint_interval": 1}},
}


@pytest.mark.parametrize("name", CASES)
def test_on_and_off_are_bit_identical(tmp_path: Path, data: Path, name: str) -> None:
    """On a CPU the mode changes no bit of a run, nor does NaN in all fresh memory; the ranks really are in the mode."""
    ends = []
    for label, overrides in {"off": [], "on": [ON], "fill": [ON, FILL]}.items():
        config = write_config(tmp_path / f"{label}.json", data, tmp_path / label, **CASES[name])
        for rank, (code, error, seen) in enumerate(run_distributed(_rank, 2, str(config), overrides, init=False)):
            assert (code, error) == (0, None)
            on = label != "off"
            assert (seen["deterministic"], seen["raised"]) == (on, on)
            assert seen["embeddings"] == [on] or rank == 1  # a last stage has none
            assert seen["environ"] == ([":4096:8", "Ring", "Simple"] if on else [None] * 3)
            assert seen["fill"] is (label != "on")  # PyTorch's own value is true
        ends.append((state_of(tmp_path / label / "checkpoints" / "step_00000006"), metrics_of(tmp_path / label)))
    assert ends[0] == ends[1] == ends[2]
    assert len(ends[0][0]) > 20 and len(ends[0][1]) >= 6


def test_a_contrary_environment_is_refused(tmp_path: Path, data: Path) -> None:
    """A variable with which runs differ ends every rank as a wrong configuration, named."""
    config = write_config(tmp_path / "c.json", data, tmp_path / "run")
    for code, message in train_run(config, 2, ON, env={"NCCL_ALGO": "Tree"}):
        assert code == 70 and "environment variable NCCL_ALGO: got 'Tree'" in message


def _command(config: Path, *arguments: str, fresh: bool = False, **environ: str) -> tuple[int, dict[str, Any]]:
    """Exit code and report; of a program of its own where the interpreter's start matters."""
    words = ["check-determinism", "--config", str(config), "--json", *arguments]
    if fresh:
        command = [sys.executable, "-m", "megasdc", *words]
        done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
    else:
        done = StartedCommand("megasdc", words, environ, forked_ranks=True).wait(200)
    assert done.returncode in (0, 1, 3), done.stderr
    return done.returncode, json.loads(done.stdout)


def test_runs_that_agree(tmp_path: Path, data: Path) -> None:
    """A clean configuration is found clean and equal, on its own data, with as few ranks as fit, leaving no trace."""
    monitor = {"enabled": True, "output_path": str(tmp_path / "csv")}
    config = write_config(
        tmp_path / "c.json", data, tmp_path / "run", parallel__tensor=2, deepspeed__csv_monitor=monitor
    )
    before = sorted(data.rglob("*"))
    code, report = _command(config, "--set", ON, "--steps", "2")
    assert (code, report["causes"], report["difference"]) == (0, [], None)
    assert report["layout"]["world_size"] == 2 and "prepared data" in report["data"]
    assert report["observations"] > 2 * 2 * 300  # ranks, steps, results of a step
    assert [path.name for path in tmp_path.iterdir()] == ["c.json"] and sorted(data.rglob("*")) == before


SITECUSTOMIZE = """
import os

if os.environ.get("RANK") == "1":
    import torch

    original = torch.optim.AdamW.step

    def step(self, *arguments, **options):
        result = original(self, *arguments, **options)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if state["step"] == {step}:
                    state["exp_avg_sq"][0] += 1e-6 * (1 + int.from_bytes(os.urandom(4)))
        return result

    torch.optim.AdamW.step = step
"""


def test_a_module_that_perturbs_one_rank_is_found(tmp_path: Path) -> None:
    """Random noise in one optimizer state of one rank at step 2 is named as that: step, phase, name and rank."""
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE.format(step=2))
    config = write_config(tmp_path / "c.json", tmp_path / "no_data", tmp_path / "run")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    code, report = _command(config, "--ranks", "2", fresh=True, PYTHONPATH=path)
    assert code == 1
    assert [cause["place"] for cause in report["causes"]] == ["module sitecustomize"]
    assert "random tokens" in report["data"]
    found = report["difference"]
    assert found["address"].startswith("step 2, update of ")
    assert found["address"].endswith(".exp_avg_sq), rank 1 (dp 1, pp 0, tp 0)")
    assert found["first"] != found["second"] and 1 < found["different"] < found["observations"]


def test_a_contrary_environment_is_refused_before_a_rank_starts(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check says itself what every rank would say."""
    monkeypatch.setenv("NCCL_PROTO", "LL128")
    config = load_config(write_config(tmp_path / "c.json", data, tmp_path / "run"), [ON])
    with pytest.raises(ConfigError, match=r"^1 problem:\n  - environment variable NCCL_PROTO: got 'LL128'"):
        check_determinism(config)
    assert check_determinism(config, lint_only=True).exit_code == 0  # NCCL has no part in a run on a CPU


@pytest.mark.usefixtures("forked_ranks")
def test_a_failed_rank_gives_its_own_exit_code(tmp_path: Path, data: Path) -> None:
    """Damaged data end the check as damaged data, not as runs that differ."""
    copy = tmp_path / "data"
    copy.mkdir()
    for file in data.iterdir():
        if file.is_file():
            (copy / file.name).write_bytes(file.read_bytes()[: 100 if file.suffix == ".bin" else None])
    config = load_config(write_config(tmp_path / "c.json", copy, tmp_path / "run"))
    with pytest.raises(DataError, match=r"\.bin"):
        check_determinism(config, ranks=1, steps=1)


def _steps_of_a_hidden_model(config: str, folder: str, seed: int) -> None:
    """Two steps on random tokens of a model whose submodules cannot be observed."""
    from megasdc.model import submodules
    from megasdc.ops.determinism_check.rank import run_steps
    from megasdc.parallel.run_ranks import ReportChannel

    def refuse(_stage: Any) -> Any:
        raise ConfigError("megasdc.model.backend is transformer_engine: results cannot be observed")

    submodules.list_submodules = refuse
    loaded = load_config(Path(config), [f"megasdc.training.seed={seed}"])
    run_steps(loaded, 2, False, Path(folder), ReportChannel(None))


def test_what_cannot_be_observed_is_compared_by_its_states(tmp_path: Path) -> None:
    """Without results of submodules, losses, norms, states and parameters tell equal runs from unequal ones."""
    config = write_config(tmp_path / "c.json", tmp_path / "none", tmp_path / "run", deepspeed__bf16={"enabled": True})
    traces = []
    for name, seed in (("one", 1), ("two", 1), ("other", 2)):
        run_distributed(_steps_of_a_hidden_model, 2, str(config), str(tmp_path / name), seed, init=False)
        traces.append({rank: read_trace(trace_path(tmp_path / name, rank, 1))[1] for rank in (0, 1)})
    layout = ParallelDims(1, 1, 2)
    assert compare_two_runs(traces[0], traces[1], layout) is None
    found = compare_two_runs(traces[0], traces[2], layout)
    assert found is not None and found.address.startswith("step 1, reduced_grad of step (loss), rank 0")
    slots = {(address.phase, address.slot.split(".")[-1]) for address in traces[0][0].addresses}
    assert slots == {
        *(("reduced_grad", name) for name in ("loss", "grad_norm")),
        *(("update", name) for name in ("master", "exp_avg", "exp_avg_sq")),
        ("parameter", "value"),
    }
