"""Does a resumed run go on as if it had never stopped, and only from a checkpoint that is its own?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_model import Run
from harness import run_distributed

from megasdc.checkpoint import load as load_module
from megasdc.checkpoint.files import list_steps
from megasdc.checkpoint.load import load_checkpoint
from megasdc.checkpoint.manifest import read_manifest
from megasdc.checkpoint.ranks import CheckpointGroup
from megasdc.checkpoint.resume import find_checkpoint
from megasdc.common.errors import CheckpointError
from megasdc.events import EventLog, read_events

pytestmark = pytest.mark.distributed


def _uninterrupted(folder: str, layout: dict[str, Any]) -> tuple[list[float], str]:
    run = Run(**layout)
    run.train(2)
    run.save(folder)
    return run.train(3), run.digest()


def _resumed(folder: str, layout: dict[str, Any]) -> tuple[list[float], str]:
    run = Run(**layout, seed=99)  # other initial weights: the result must come from the checkpoint
    loaded = run.resume(folder)
    assert loaded is not None
    assert loaded.step == 2
    assert loaded.shared_state == {"positions": [4]}
    assert folder not in Path("/proc/self/maps").read_text(), "no tensor is that of a file"
    return run.train(3), run.digest()


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, {"dtype": "fp32"}),
        (2, {"pipeline": 2, "dtype": "bf16"}),
        pytest.param(2, {"dtype": "bf16"}, marks=pytest.mark.full),
        pytest.param(2, {"tensor": 2, "dtype": "fp32"}, marks=pytest.mark.full),
        pytest.param(8, {"tensor": 2, "pipeline": 2, "dtype": "fp32"}, marks=pytest.mark.full),
        pytest.param(8, {"tensor": 2, "pipeline": 2, "dtype": "bf16"}, marks=pytest.mark.full),
    ],
)
def test_resume_is_bit_identical(tmp_path: Path, ranks: int, layout: dict[str, Any]) -> None:
    """Weights, optimizer, LR, counters, RNG and losses after a resume equal those of a run that never stopped."""
    folder = str(tmp_path / "run [a*]?")
    expected = run_distributed(_uninterrupted, ranks, folder, layout)
    assert run_distributed(_resumed, ranks, folder, layout) == expected


def _loads(folder: str, layout: dict[str, Any], steps: int) -> tuple[Any, Any]:
    run = Run(**layout)
    run.train(steps)
    run.save(folder)
    run.train(1)
    ours, theirs = Run(**layout, seed=5), Run(**layout, seed=6)
    loaded = ours.resume(folder)
    assert loaded is not None
    found, _ = theirs.engine.load_checkpoint(folder, tag=f"step_{steps:08d}")
    assert found is not None
    theirs.consumed = ours.consumed
    run.resume(folder)  # into states that are there
    assert run.digest() == ours.digest()
    digests = ours.digest(), theirs.digest()
    generators = [torch.get_rng_state()]
    losses = []
    for one in (ours, theirs):
        torch.set_rng_state(generators[0])
        losses.append(one.train(2))
    return (digests[0], _settings(ours), losses[0]), (digests[1], _settings(theirs), losses[1])


def _settings(run: Run) -> list[str]:
    """All that an engine keeps of its steps, but tensors."""
    optimizer = run.engine.optimizer
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    schedule, samples = run.engine.lr_scheduler.state_dict(), run.engine.global_samples
    scaler = sorted(vars(getattr(optimizer, "loss_scaler", object)).items()) if run.dtype is torch.float32 else []
    return [repr(one) for one in (groups, schedule, samples, optimizer.clip_grad, scaler)]


@pytest.mark.parametrize(
    ("ranks", "layout", "steps"),
    [
        (2, {"dtype": "fp32"}, 2),
        (2, {"dtype": "bf16"}, 2),
        (2, {"dtype": "bf16"}, 0),
        (2, {"dtype": "fp32", "zero": {"round_robin_gradients": True}}, 2),
        (2, {"dtype": "fp32", "zero": {"parameter_alignment": True}, "width": 7}, 2),
        pytest.param(4, {"pipeline": 2, "dtype": "bf16"}, 2, marks=pytest.mark.full),
        pytest.param(4, {"tensor": 2, "dtype": "fp32"}, 0, marks=pytest.mark.full),
    ],
)
def test_what_is_loaded_is_what_deepspeed_loads(tmp_path: Path, ranks: int, layout: dict[str, Any], steps: int) -> None:
    """DeepSpeed's own load is the oracle: every bit, setting and counter, however ZeRO-1 lays parameters; also before
    the first step, when there are no moments.
    """
    for ours, theirs in run_distributed(_loads, ranks, str(tmp_path / "run"), layout, steps):
        assert ours == theirs


def _refusals(folder: str) -> dict[str, str]:
    run = Run()
    run.train(1)
    run.save(folder)
    found = {}
    others = {
        "layout": {"pipeline": 2},
        "width": {"width": 16},
        "layers": {"layers": 5},
        "precision": {"dtype": "bf16"},
    }
    for name, change in others.items():
        other = Run(**change, seed=7)
        before = other.digest()
        try:
            other.resume(folder)
        except CheckpointError as error:
            found[name] = str(error)
        assert other.digest() == before, f"{name}: the engine was changed"
    for resume in ("never", "must"):
        try:
            run.resume(folder if resume == "never" else folder + "_empty", resume=resume)
        except CheckpointError as error:
            found[resume] = str(error)
    assert run.resume(folder + "_empty") is None
    chosen = find_checkpoint(folder, run.dims, CheckpointGroup())
    assert chosen is not None
    if torch.distributed.get_rank() == 1:
        _fail_once(load_module, "_fill")
    for case in ("one rank fails", "file gone"):
        try:
            load_checkpoint(run.engine, chosen, run.dims, CheckpointGroup())
        except CheckpointError as error:
            found[case] = str(error)
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 1:
            (chosen.path / "rank_00001_state.pt").unlink(missing_ok=True)
        torch.distributed.barrier()
    return found


def _fail_once(place: Any, name: str) -> None:
    original = getattr(place, name)

    def fail(*args: Any, **kwargs: Any) -> None:
        setattr(place, name, original)
        raise OSError("a read failed on this rank alone")

    setattr(place, name, fail)


def test_a_checkpoint_of_another_run_is_refused_before_anything_changes(tmp_path: Path) -> None:
    """Other layout, width, depth or precision: CheckpointError with both values on all ranks, engine untouched."""
    first, second = run_distributed(_refusals, 2, str(tmp_path / "run"))
    assert first == second
    assert "TP1 x PP1 x DP2" in first["layout"]
    assert "TP1 x PP2 x DP1" in first["layout"]
    assert "saved 0.linear.weight is [8, 8], this run's is [16, 16]" in first["width"]
    assert "num_layers 4, this run has 5" in first["layers"]
    assert "DeepSpeedZeroOptimizer" in first["precision"]
    assert "BF16_Optimizer" in first["precision"]
    assert "never" in first["never"]
    assert "must" in first["must"]
    assert "engine must not be used" in first["one rank fails"]
    assert "rank 1" in first["one rank fails"]
    assert "rank_00001_state.pt" in first["file gone"]
    assert "nothing was changed" in first["file gone"]


def _save_often(folder: str, run_dir: str) -> list[list[int]]:
    run = Run()
    events = EventLog(run_dir, torch.distributed.get_rank())
    deleted = []
    for _ in range(5):
        run.train(1)
        deleted.append(run.save(folder, keep_last=2, keep_every=2, events=events).deleted)
    again = run.save(folder, keep_last=1, events=events)  # the same step once more replaces it
    assert again.size_bytes > 0
    deleted.append(again.deleted)
    return deleted


def test_retention_keeps_the_newest_and_every_kth(tmp_path: Path) -> None:
    """keep_last and keep_every decide what stays; each deletion is an event; `latest` names the newest."""
    deleted = run_distributed(_save_often, 2, str(tmp_path / "run"), str(tmp_path))[0]
    assert deleted == [[], [], [1], [], [3], [2, 4]]
    assert list_steps(tmp_path / "run") == [5]
    assert (tmp_path / "run" / "latest").read_text().strip() == "step_00000005"
    assert not list((tmp_path / "run").glob(".tmp*"))
    assert [event.step for event in read_events(tmp_path, kind="delete")] == [1, 3, 2, 4]
    assert len(list(read_events(tmp_path, kind="save", name="checkpoint"))) == 6


NODE_OF_RANK = ("a", "b", "a", "b")
"""With TP1 x PP2 x DP2 each node holds one replica, so node b needs weights that DeepSpeed writes on node a only."""


def _node_local(root: str) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    node = NODE_OF_RANK[rank]
    folder = Path(root) / node
    options: dict[str, Any] = {"storage": "node_local", "node": node}
    run = Run(pipeline=2)
    events = EventLog(root, rank)
    run.train(1)
    run.save(folder, **options)
    expected = run.digest()
    run.train(1)
    run.save(folder, **options)
    found: dict[str, Any] = {"files": sorted(path.name for path in (folder / "step_00000001").iterdir())}
    found["described"] = [record.name for record in read_manifest(folder / "step_00000001").files]
    torch.distributed.barrier()
    marker = folder / "step_00000002" / "complete"
    if rank == 1:
        marker.unlink()
    torch.distributed.barrier()
    other = Run(pipeline=2, seed=5)
    loaded = other.resume(folder, events=events, **options)
    assert loaded is not None
    found["without marker"] = (loaded.step, other.digest() == expected)
    torch.distributed.barrier()
    if rank == 3:
        (folder / "step_00000002").rename(folder / "elsewhere")
    torch.distributed.barrier()
    loaded = other.resume(folder, events=events, **options)
    assert loaded is not None
    found["missed"] = loaded.step
    return found


def test_node_local_resumes_from_what_every_node_has(tmp_path: Path) -> None:
    """Each node holds all that its ranks load; a node without the last save, or without its marker, sets all back."""
    answers = run_distributed(_node_local, 4, str(tmp_path))
    for rank, answer in enumerate(answers):
        assert answer["without marker"] == (1, True)
        assert answer["missed"] == 1
        names = set(answer["files"])
        assert answer["described"] == sorted(names - {"manifest.json", "complete"}), "in order of name"
        assert {"manifest.json", "complete", "megasdc.json", f"rank_{rank:05d}_state.pt"} <= names
        assert {"mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"} <= names
        assert {f"layer_{layer:02d}-model_00-model_states.pt" for layer in range(4)} <= names
        assert len([name for name in names if name.endswith("_optim_states.pt")]) == 2
    reasons = [event.fields["reasons"] for event in read_events(tmp_path, kind="skip", name="checkpoint")]
    assert "b: the marker is missing" in reasons[0][0]
    assert "b: " in reasons[1][0]
    assert "manifest.json is missing" in reasons[1][0]


def _stage_on_each_node(folder: str) -> bool:
    own = Path(folder) / f"node{torch.distributed.get_rank()}"
    options = {"storage": "node_local", "node": own.name}
    run = Run(pipeline=2)
    run.train(1)
    run.save(own, **options)
    run.train(1)
    other = Run(pipeline=2, seed=5)
    loaded = other.resume(own, **options)
    assert loaded is not None
    other.train(1)
    return other.digest() == run.digest() and len(list((own / "step_00000001").glob("mp_rank_*"))) == 1


def test_node_local_resumes_where_a_replica_spans_nodes(tmp_path: Path) -> None:
    """A node has the files of its own stage alone, and DeepSpeed needs no others."""
    assert run_distributed(_stage_on_each_node, 2, str(tmp_path)) == [True, True]
