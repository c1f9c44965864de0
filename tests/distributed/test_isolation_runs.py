"""Replicas that are wrong are left out: the others go on in the same processes, with the bits of a run without them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run_distributed
from whole_runs import MODELS, events_of, metrics_of, prepare_text, state_of, train_run, verdicts_of, write_config

from megasdc.checkpoint.host_memory import memory_folder
from megasdc.checkpoint.weights import load_weights, open_weights
from megasdc.common.origin import read_identity
from megasdc.config.sections import ParallelSection
from megasdc.metrics.writer import read_metrics
from megasdc.model.pipeline import build_pipeline
from megasdc.model.sharding import Split, parameter_splits, shard_of
from megasdc.parallel import groups
from megasdc.sdc.incident import load_incidents

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]
STEPS, FOUND, BATCH = 9, 5, 12
CONVERT = "megasdc.checkpoint.other_layout=convert"
ISOLATE = {"persistent": "isolate", "intermittent": "isolate"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(autouse=True)
def without_memory(tmp_path: Path) -> Iterator[None]:
    """Remove what failed runs of a test have left in shared memory."""
    yield
    for identity in tmp_path.glob("*/run.json"):
        shutil.rmtree(memory_folder(_id(identity.parent)), ignore_errors=True)


def _id(run: Path) -> str:
    identity = read_identity(run)
    assert identity is not None
    return str(identity.run)


def _config(folder: Path, data: Path, name: str, layout: tuple[int, int, int], **changes: Any) -> Path:
    """A run of 12 samples a step whose steps are all checked: every product, every element of the optimizer."""
    tensor, pipeline, _ = layout
    checks = {"enabled": True, "coverage": "all", "slice_elements": 1_000_000, "rows": True}
    sdc = changes.pop("sdc", {})
    return write_config(
        *(folder / f"{name}.json", data, folder / name),
        deepspeed__train_batch_size=BATCH,
        deepspeed__gradient_clipping=1.0,
        deepspeed__pipeline={"activation_checkpoint_interval": 1},
        parallel={"tensor": tensor, "pipeline": pipeline, "timeout_s": 60.0},
        training__steps=changes.pop("steps", STEPS),
        determinism={"enabled": True},
        sdc={"always_on": checks, "policy": ISOLATE, **sdc},
        **{
            "checkpoint": {
                "keep_last": 0,
                "memory": {"interval": 1, "partners": True},
                "other_layout": "convert",
                "require_verified": "never",
            },
            **changes,
        },
    )


def _wrong_forward(replica: int, first: int = FOUND, **place: Any) -> dict[str, Any]:
    where = {"phase": "forward", "submodule": "*.linear_fc1", "replica": replica, "steps": [first, None]}
    return {"kind": "scale", "factor": 4.0, "seed": 3, **where, **place}


@pytest.mark.parametrize(
    ("layout", "replica", "changes"),
    [
        ((1, 1, 3), 0, {}),
        ((1, 2, 3), 1, {"model": MODELS["llama"]}),
        pytest.param((2, 1, 3), 2, {"deepspeed__bf16": {"enabled": True}}, marks=pytest.mark.full),
        pytest.param((1, 1, 3), 2, {"model__hidden_dropout": 0.1}, marks=pytest.mark.full),
    ],
    ids=["first", "pipeline", "tensor_bf16", "dropout"],
)
def test_the_others_go_on_with_the_bits_of_a_run_without_it(
    tmp_path: Path, data: Path, layout: tuple[int, int, int], replica: int, changes: dict[str, Any]
) -> None:
    """Wrong from step 5 on: no bit differs from three replicas up to a step and then two, whose checks are silent."""
    tensor, pipeline, replicas = layout
    ranks = tensor * pipeline * replicas
    faults = [_wrong_forward(replica)]
    config = _config(tmp_path, data, "run", layout, faults=faults, **changes)
    assert train_run(config, ranks) == [(0, None)] * ranks
    (begun,) = events_of(tmp_path / "run", "isolation", "begun")
    left_out = [rank for rank in range(ranks) if rank // tensor % replicas == replica]
    assert (begun["step"], begun["left_out"], begun["replicas"]) == (FOUND, left_out, 2)
    ((_, incident),) = load_incidents(tmp_path / "run" / "reports", [])
    assert (incident.step, incident.done, {one.dp_rank for one in incident.flagged}) == (FOUND, "isolated", {replica})
    (resumed,) = (one["step"] for one in events_of(tmp_path / "run", "resume", "memory"))
    assert 0 < resumed < FOUND, "what writers have made whole by then; the step before, where they have time"
    without = _config(tmp_path, data, "without", layout, **changes)
    assert train_run(without, ranks, f"megasdc.training.stop_step={resumed}") == [(0, None)] * ranks
    assert train_run(without, ranks - ranks // replicas, "megasdc.sdc.policy={}") == [(0, None)] * (ranks - ranks // 3)
    last = f"checkpoints/step_{STEPS:08d}"
    assert state_of(tmp_path / "run" / last) == state_of(tmp_path / "without" / last)
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "without")
    assert {step for step, *_ in verdicts_of(tmp_path / "run")} == {FOUND}
    ends = [row["data/stream_end"] for row in read_metrics(tmp_path / "run") if "data/stream_end" in row]
    assert ends == [BATCH * (step + 1) for step in range(STEPS)], "no sample is lost, none is used twice"


def test_a_run_ends_after_so_many_steps_without_a_replica(tmp_path: Path, data: Path) -> None:
    """It saves its last step, and ends with the corruption code and what to do; ranks that are left out end well."""
    sdc = {"isolation": {"max_steps": 2}}
    config = _config(tmp_path, data, "run", (1, 1, 3), faults=[_wrong_forward(1)], sdc=sdc)
    codes = train_run(config, 3)
    assert [code for code, _ in codes] == [73, 0, 73]
    assert f"step {FOUND + 1} is saved" in str(codes[0][1]) and "replace their hosts" in str(codes[0][1])
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")] == [f"step_{FOUND + 1:08d}"]


NOTES = """
import json
from pathlib import Path

import torch
import torch.distributed as dist

from megasdc.data.loader import MicroBatchLoader
from megasdc.optim.hooks import GradientHook

read, taken, batches = MicroBatchLoader.read, [], []


def noting(loader, positions):
    taken.extend(positions)
    batches.append(read(loader, positions))
    return batches[-1]


MicroBatchLoader.read = noting


class Notes(GradientHook):
    def __init__(self, folder, step):
        self.folder, self.step = Path(folder), step

    def apply(self, part):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if taken:
            place = self.folder / f"{part.step}_{rank}.json"
            place.write_text(json.dumps({"ranks": ranks, "positions": taken}))
            if part.step == self.step:
                torch.save(batches, self.folder / f"{rank}.batches")
            taken.clear()
            batches.clear()
        if part.step == self.step:
            found = (ranks, part.offset, part.gradient.clone())
            torch.save(found, self.folder / f"{rank}_{part.name}_{part.offset}.gradient")
"""
"""A hook that keeps which samples a rank has taken in each step, and the batches and gradients of one of them."""


def _with_notes(folder: Path, step: int) -> list[dict[str, Any]]:
    """The hook, as it is configured; what it keeps is in ``folder / "notes"``."""
    (folder / "notes").mkdir()
    (folder / "notes.py").write_text(NOTES)
    settings = {"folder": str(folder / "notes"), "step": step}
    return [
        {
            "hook": "file",
            "path": str(folder / "notes.py"),
            "name": "Notes",
            "settings": settings,
            "parameters": ["*"],
        }
    ]


def _write_gradients(weights: str, notes: str, ranks: int) -> None:
    """Body of one rank: the gradient of the mean loss of all noted batches, in float64 without an engine."""
    dims = groups.init_model_parallel(1, 1, 60)
    source = open_weights(weights)
    module, _ = build_pipeline(
        source.model, ParallelSection(), dims, vocab_size=source.vocab_size, seed=1, dtype=torch.float32
    )
    load_weights(source, module.named_parameters(), source.model, vocab_size=source.vocab_size)
    module.double()
    tokens = 0
    for rank in range(ranks):
        path = Path(notes) / f"{rank}.batches"
        for inputs, (labels, mask) in torch.load(path) if path.exists() else ():
            logits = module(inputs)[:, 0, : source.vocab_size]
            F.cross_entropy(logits, labels[0], reduction="sum").backward()
            assert mask.all()
            tokens += labels.numel()
    assert tokens == BATCH * 32
    gradients = {name: parameter.grad / tokens for name, parameter in module.named_parameters()}
    splits = {name: split.name for name, split in parameter_splits(source.model).items()}
    torch.save((gradients, splits), Path(notes) / "expected.pt")


@pytest.mark.full
@pytest.mark.parametrize("layout", [(1, 1, 3), (2, 1, 3), (1, 2, 3)], ids=["dp", "tensor", "pipeline"])
def test_the_gradient_of_the_step_is_that_of_all_its_samples(
    tmp_path: Path, data: Path, layout: tuple[int, int, int]
) -> None:
    """Of the step in which a replica was left out, whole, within 1e-6 relative of float64 without an engine."""
    tensor, pipeline, replicas = layout
    config = _config(
        *(tmp_path, data, "run", layout),
        model=MODELS["llama"],
        optimizer_hooks=_with_notes(tmp_path, FOUND),
        faults=[_wrong_forward(1)],
        checkpoint__interval=1,
    )
    ranks = tensor * pipeline * replicas
    assert train_run(config, ranks) == [(0, None)] * ranks
    notes, left = tmp_path / "notes", tensor * pipeline * (replicas - 1)
    before = tmp_path / "run" / "checkpoints" / f"step_{FOUND - 1:08d}"
    # Ranks of one replica take the same samples; those of the first stage and tensor rank are enough.
    for rank in range(left):
        if rank % tensor or rank >= left // pipeline:
            (notes / f"{rank}.batches").unlink(missing_ok=True)
    run_distributed(_write_gradients, 1, str(before), str(notes), left)
    expected, splits = torch.load(notes / "expected.pt")
    error, norm, elements = 0.0, 0.0, {name: 0 for name in expected}
    for path in notes.glob("*.gradient"):
        rank, name = path.stem.split("_", 1)
        name = name.rsplit("_", 1)[0]
        of_ranks, offset, gradient = torch.load(path)
        assert of_ranks == left, "of the step as it was committed, which the wrong rank took no part in"
        shard = shard_of(expected[name], Split[splits[name]], tensor, int(rank) % tensor).flatten()
        wanted = shard[offset : offset + len(gradient)]
        error += float((gradient.double() - wanted).square().sum())
        norm += float(wanted.square().sum())
        elements[name] += len(gradient)
    assert all(count >= expected[name].numel() for name, count in elements.items())
    assert norm > 0 and (error / norm) ** 0.5 <= 1e-6, (error / norm) ** 0.5


@pytest.mark.full
def test_no_sample_is_lost_over_many_changes_of_the_number_of_replicas(tmp_path: Path, data: Path) -> None:
    """Left out, restarted with fewer and with more, in several orders: each of 200 steps has its samples, once each."""
    launches = [
        (4, 60, [_wrong_forward(1, 20), _wrong_forward(3, 40)]),
        (3, 90, []),
        (5, 120, [_wrong_forward(0, 105)]),
        (3, 170, [_wrong_forward(2, 140)]),
        (2, 180, []),
        (4, 200, [_wrong_forward(2, 190)]),
    ]
    steps = launches[-1][1]
    changes = {"steps": steps, "deepspeed__optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    config = _config(tmp_path, data, "run", (1, 1, 4), optimizer_hooks=_with_notes(tmp_path, 0), **changes)
    for replicas, last, faults in launches:
        settings = [f"megasdc.faults={json.dumps(faults)}", f"megasdc.training.stop_step={last}"]
        policy = [] if faults else ["megasdc.sdc.policy={}"]
        assert train_run(config, replicas, *settings, *policy) == [(0, None)] * replicas
    begun = [(one["step"], one["replicas"]) for one in events_of(tmp_path / "run", "isolation", "begun")]
    assert begun == [(20, 3), (40, 2), (105, 4), (140, 2), (190, 3)]
    for step in range(1, steps + 1):
        files = sorted((tmp_path / "notes").glob(f"{step}_*.json"), key=lambda path: path.stat().st_mtime)
        last_ranks = json.loads(files[-1].read_text())["ranks"]
        noted = [json.loads((tmp_path / "notes" / f"{step}_{rank}.json").read_text()) for rank in range(last_ranks)]
        assert {one["ranks"] for one in noted} == {last_ranks}
        positions = [position for one in noted for position in one["positions"]]
        assert sorted(positions) == list(range(BATCH * (step - 1), BATCH * step))
    alone = _config(tmp_path, data, "alone", (1, 1, 1), sdc={"policy": {}, "always_on": {"enabled": False}}, **changes)
    settings = ["megasdc.checkpoint={}", "megasdc.determinism.enabled=true"]
    assert train_run(alone, 1, *settings) == [(0, None)]
    rows = [[row for row in metrics_of(tmp_path / name) if "train/loss" in row] for name in ("run", "alone")]
    assert [row["step"] for row in rows[0]] == [row["step"] for row in rows[1]] == list(range(1, steps + 1))
    apart = [abs(one["train/loss"] / other["train/loss"] - 1) for one, other in zip(*rows, strict=True)]
    assert max(apart) < 1e-3, "rounding alone"
