"""Does a run move to another layout with every bit of its weights and moments, converted or in place?"""

from __future__ import annotations

import json
import os
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_distributed
from small_disk import small_disk
from tiny import LLAMA_STYLE, full_tensors
from typer.testing import CliRunner
from whole_runs import events_of, metrics_of, prepare_text, pretrain_rank, train_run, write_config

from megasdc.checkpoint import load
from megasdc.checkpoint.manifest import (
    FileRecord,
    describe_file,
    read_manifest,
    read_universal_manifest,
    write_manifest,
    write_marker,
    write_universal_manifest,
)
from megasdc.checkpoint.verify import read_source, verify_checkpoint
from megasdc.cli import app
from megasdc.common.errors import CheckpointError, StorageError
from megasdc.data.manifest import DataManifest
from megasdc.interchange.convert import convert_to_universal
from megasdc.lab.checkpoints.views.inspect import inspect_checkpoint

pytestmark = pytest.mark.distributed

GPT: dict[str, Any] = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "max_positions": 64}
LLAMA: dict[str, Any] = {**GPT, **LLAMA_STYLE, "num_query_groups": 2}
SMALL: dict[str, Any] = {**LLAMA, "num_layers": 2, "hidden_size": 32}
BF16 = {"deepspeed__bf16": {"enabled": True}}
INFO = "universal_checkpoint_info"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share; 500 tokens, padded to 512."""
    return prepare_text(tmp_path_factory.mktemp("text"))


def _whole_state(engine: Any) -> dict[str, Any]:
    """Weights, master weights and moments of the whole model, joined without any of megasdc's or DeepSpeed's tools."""
    inner = engine.optimizer.optimizer
    values: dict[str, dict[str, torch.Tensor]] = {"fp32": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for name, parameter in engine.module.named_parameters():
        mapping = parameter._hp_mapping
        for key, tensors in values.items():
            full = torch.zeros(parameter.numel())
            if mapping is not None:
                here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
                flat = inner.param_groups[mapping.param_group_index]["params"][0]
                source = (flat if key == "fp32" else inner.state[flat][key]).detach().flatten()
                full[here.start : here.start + here.numel] = source[there.start : there.start + there.numel]
            dist.all_reduce(full, group=engine.mpu.get_data_parallel_group())
            tensors[name] = full.view_as(parameter)
    state: dict[str, Any] = {key: full_tensors(engine, tensors) for key, tensors in values.items()}
    state["weights"] = full_tensors(engine)
    flats = [group["params"][0] for group in inner.param_groups]
    state["steps"] = [float(inner.state[flat]["step"]) for flat in flats]
    state["rates"] = [(group["lr"], group["weight_decay"]) for group in inner.param_groups]
    state["global_steps"] = engine.global_steps
    return state


def _pretrain_and_look(config: str, overrides: list[str], out: str, at: int) -> tuple[int, str | None]:
    """Train, and write the whole state: at the start if that is past step 0, and after step ``at``."""
    from megasdc.engine.hooks import Hook
    from megasdc.train import main

    train = main.train

    class Look(Hook):
        def after_step(self, run: Any, result: Any) -> None:
            if run.step == at:
                self.write(run, "at")

        def write(self, run: Any, when: str) -> None:
            state = _whole_state(run.engine)
            if run.dims.rank == 0:
                torch.save(state, f"{out}.{when}")

    def looked_at(run: Any) -> None:
        look = Look()
        if run.step > 0:
            look.write(run, "start")
        run.hooks.insert(0, look)
        train(run)

    main.train = looked_at
    return pretrain_rank(config, overrides)


class _Leg:
    """One part of a run at one layout: its folder, its losses and its state when looked at."""

    def __init__(
        self,
        folder: Path,
        data: Path,
        model: dict[str, Any],
        layout: tuple[int, int, int],
        begin: Path | None = None,
        **changes: Any,
    ) -> None:
        tensor, pipeline, replicas = layout
        self.run_dir = folder
        if begin is not None:
            shutil.copytree(begin, folder / "checkpoints" / begin.name)
            changes["checkpoint__other_layout"] = "convert"
        config = write_config(
            folder.with_suffix(".json"),
            data,
            folder,
            model=dict(model),
            parallel__tensor=tensor,
            parallel__pipeline=pipeline,
            training__steps=11,
            training__eval_interval=0,
            checkpoint__interval=3,
            **changes,
        )
        self.at = 6 if begin is not None or "checkpoint__universal" in changes else 3
        arguments = (str(config), [], str(folder.with_suffix(".state")), self.at)
        world = tensor * pipeline * replicas
        self.results = run_distributed(_pretrain_and_look, world, *arguments, init=False)
        assert self.results == [(0, None)] * world, self.results

    def checkpoint(self) -> Path:
        """The checkpoint of the step that was looked at."""
        return self.run_dir / "checkpoints" / f"step_{self.at:08d}"

    def state(self, when: str) -> dict[str, Any]:
        """The whole state, ``start`` or ``at``."""
        loaded: dict[str, Any] = torch.load(f"{self.run_dir.with_suffix('.state')}.{when}", weights_only=False)
        return loaded

    def losses(self, first: int) -> list[float]:
        """Losses of five steps."""
        by_step = {row["step"]: row["train/loss"] for row in metrics_of(self.run_dir) if "train/loss" in row}
        return [by_step[step] for step in range(first, first + 5)]


def _differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """What of two whole states differs in any bit."""
    found = [key for key in ("steps", "rates", "global_steps") if a[key] != b[key]]
    for kind in ("weights", "fp32", "exp_avg", "exp_avg_sq"):
        assert a[kind].keys() == b[kind].keys()
        found += [f"{kind} {name}" for name in a[kind] if not torch.equal(a[kind][name], b[kind][name])]
    return found


def _move(folder: Path, data: Path, model: dict[str, Any], layouts: list[tuple[int, int, int]], **changes: Any) -> None:
    """Train at the first layout, move to each next one in both ways, and compare state and losses at every move.

    The ways: through a universal checkpoint, which DeepSpeed makes; and in place, where each rank reads what it owns.
    """
    tolerance = 1e-2 if "deepspeed__bf16" in changes else 1e-5
    before = _Leg(folder / "leg_0", data, model, layouts[0], **changes)
    for index, layout in enumerate(layouts[1:], 1):
        report = convert_to_universal(before.checkpoint(), workers=2)
        moved = {**changes, "checkpoint__universal": report.path}
        after = _Leg(folder / f"leg_{index}", data, model, layout, **moved)
        assert any(tensor.abs().max() > 0 for tensor in after.state("start")["exp_avg_sq"].values())
        assert _differing(before.state("at"), after.state("start")) == []
        assert after.losses(before.at + 1) == pytest.approx(before.losses(before.at + 1), rel=tolerance)
        (event,) = events_of(after.run_dir, "resume", "universal")
        assert (event["step"], event["without"]) == (before.at, [])
        in_place = _Leg(folder / f"in_place_{index}", data, model, layout, before.checkpoint(), **changes)
        assert _differing(before.state("at"), in_place.state("start")) == []
        assert in_place.losses(before.at + 1) == pytest.approx(before.losses(before.at + 1), rel=tolerance)
        assert len(events_of(in_place.run_dir, "resume", "other_layout")) == 1
        before = after


def test_gpt_moves_there_and_back(tmp_path: Path, data: Path) -> None:
    """Tied embedding, biases, 2x2x1 to 1x1x2 and back: every bit of weights, moments, counters; losses within 1e-5."""
    _move(tmp_path, data, GPT, [(2, 2, 1), (1, 1, 2), (2, 2, 1)])


def test_llama_moves_in_bf16(tmp_path: Path, data: Path) -> None:
    """SwiGLU, GQA, bf16 with fp32 masters, 1x2x2 to 2x1x2: every bit; losses within 1e-2."""
    _move(tmp_path, data, LLAMA, [(1, 2, 2), (2, 1, 2)], **BF16)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "layouts", "changes"),
    [
        (LLAMA, [(2, 2, 1), (1, 1, 2), (2, 2, 1)], {}),
        (GPT, [(1, 2, 2), (2, 1, 2)], {}),
        (LLAMA, [(1, 2, 2), (2, 1, 2)], {}),
        (GPT, [(2, 2, 1), (1, 1, 2), (2, 2, 1)], BF16),
        (GPT, [(2, 2, 2), (1, 1, 1)], {**BF16, "deepspeed__data_types": {"grad_accum_dtype": "bf16"}}),
        ({**LLAMA, "bias": True, "megatron": {"qk_layernorm": True}}, [(2, 1, 1), (1, 2, 1), (2, 1, 1)], {}),
    ],
    ids=["llama_there_and_back", "gpt", "llama", "gpt_bf16", "gpt_bf16_accumulated", "biases_and_qk_layernorm"],
)
def test_other_moves(
    tmp_path: Path, data: Path, model: dict[str, Any], layouts: list[tuple[int, int, int]], changes: dict[str, Any]
) -> None:
    """Further models, layouts and precisions: every bit, and the losses."""
    _move(tmp_path, data, model, layouts, **changes)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, data: Path) -> _Leg:
    """A small Llama-style run at 2x1x1."""
    return _Leg(tmp_path_factory.mktemp("source") / "run", data, SMALL, (2, 1, 1))


@pytest.fixture(scope="module")
def universal(source: _Leg) -> Path:
    """Its checkpoint of step 3, converted by the command."""
    result = CliRunner().invoke(app, ["convert-checkpoint", str(source.checkpoint()), "--to", "universal", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["step"], report["source_layout"]) == (3, "TP2 x PP1 x DP1")
    return Path(report["path"])


def _start(folder: Path, data: Path, universal: Path, *overrides: str, **changes: Any) -> tuple[int, str | None]:
    """Start a run on one rank from a universal checkpoint, for two steps; its exit code and message."""
    options = {"model": dict(SMALL), "training__steps": 5, "training__eval_interval": 0}
    options |= {"checkpoint__universal": str(universal), **changes}
    config = write_config(folder.with_suffix(".json"), data, folder, **options)
    code: tuple[int, str | None] = train_run(config, 1, *overrides)[0]
    return code


def _edited(source: Path, target: Path, edit: Any) -> Path:
    """A copy of a checkpoint with an edited information about divisions, and a manifest that says so."""
    shutil.copytree(source, target)
    manifest = read_manifest(target)
    records: list[FileRecord] = []
    for record in manifest.files:
        if record.name.startswith("mp_rank_"):
            state = torch.load(target / record.name, weights_only=False)
            edit(state)
            torch.save(state, target / record.name)
            record = describe_file(target, record.name, rank=record.rank, node=record.node)  # noqa: PLW2901
        records.append(record)
    write_manifest(target, manifest.model_copy(update={"files": records}))
    return target


def test_a_wrong_list_is_noticed(tmp_path: Path, data: Path, source: _Leg) -> None:
    """Without the gated pattern the bit comparison fails at fc1 alone; without the row pattern the run is refused."""

    def without(name: str) -> Path:
        target = tmp_path / name / source.checkpoint().name
        return _edited(source.checkpoint(), target, lambda state: state[INFO].update({name: []}))

    ungated = convert_to_universal(without("parameter_with_2_sub_params_cat_dim_0"), workers=1)
    moved = _Leg(tmp_path / "ungated", data, SMALL, (1, 1, 1), checkpoint__universal=ungated.path)
    wrong = _differing(source.state("at"), moved.state("start"))
    assert wrong
    assert all("mlp.linear_fc1.weight" in name for name in wrong)
    unrowed = convert_to_universal(without("parameter_with_row_parallelism_patterns"), workers=1)
    code, message = _start(tmp_path / "unrowed", data, Path(unrowed.path))
    assert code == 72
    assert "linear_proj.weight" in str(message) or "linear_fc2.weight" in str(message)
    assert "nothing was changed" in str(message)


def test_what_cannot_be_converted_is_refused(tmp_path: Path, source: _Leg, universal: Path) -> None:
    """A missing shard, no information, an existing output, an unused pattern: 72, a reason, nothing left behind."""
    lacking = tmp_path / "lacking" / source.checkpoint().name
    shutil.copytree(source.checkpoint(), lacking)
    shard = sorted(lacking.glob("zero_pp_rank_*"))[0]
    shard.unlink()
    old = _edited(source.checkpoint(), tmp_path / "old" / lacking.name, lambda state: state.pop(INFO))
    strange = ["nothing_has_this_name$"]
    unused = _edited(
        source.checkpoint(),
        tmp_path / "unused" / lacking.name,
        lambda state: state[INFO].update({"parameter_with_row_parallelism_patterns": strange}),
    )
    reasons = {lacking: f"{shard.name} is missing", old: f"without {INFO}", unused: "Unused patterns"}
    reasons |= {source.checkpoint(): "exists", universal: "already", tmp_path: "manifest.json is missing"}
    for folder, reason in reasons.items():
        with pytest.raises(CheckpointError, match=reason):
            convert_to_universal(folder, workers=1)
    assert sorted(path.name for path in tmp_path.glob("*/*")) == [lacking.name] * 3
    with pytest.raises(CheckpointError, match="is or holds the checkpoint"):
        convert_to_universal(source.checkpoint(), source.run_dir, force=True)
    with pytest.raises(CheckpointError, match="does not replace"):
        convert_to_universal(source.checkpoint(), tmp_path, force=True)


def test_a_disk_that_runs_full_is_to_blame(tmp_path: Path, source: _Leg) -> None:
    """Whatever DeepSpeed says of a write that failed: StorageError with the path, and nothing is left behind."""
    size = sum(file.stat().st_size for file in source.checkpoint().iterdir())
    with small_disk(tmp_path / "disk", size // 2) as disk:
        with pytest.raises(StorageError, match=f"{disk}/out cannot be written: .*No space left on device"):
            convert_to_universal(source.checkpoint(), disk / "out", workers=1)
        assert list(disk.iterdir()) == []


def test_the_newest_whole_checkpoint_is_taken(tmp_path: Path, source: _Leg) -> None:
    """A folder of several means its newest whole one; damaged newer ones are named; saves do not touch the result."""
    folder = tmp_path / "checkpoints"
    for step in (3, 6):
        shutil.copytree(source.run_dir / "checkpoints" / f"step_{step:08d}", folder / f"step_{step:08d}")
    (folder / "step_00000006" / "megasdc.json").unlink()
    first = convert_to_universal(folder, workers=1)
    assert (first.step, list(first.skipped)) == (3, ["step_00000006"])
    again = convert_to_universal(folder, force=True, workers=1)
    assert again.path == first.path
    assert sorted(path.name for path in folder.iterdir()) == [
        "step_00000003",
        "step_00000006",
        "universal_step_00000003",
    ]


def test_what_cannot_be_started_from_is_refused(tmp_path: Path, data: Path, universal: Path) -> None:
    """A truncated file, another model, other data, no universal folder: exit code 72 with place and remedy."""
    damaged = tmp_path / "damaged"
    shutil.copytree(universal, damaged)
    victim = damaged / "zero" / "2.layer.mlp.linear_fc1.weight" / "exp_avg.pt"
    assert verify_checkpoint(damaged).ok
    assert inspect_checkpoint(damaged)["step"] == 3
    victim.write_bytes(victim.read_bytes()[:-100])
    assert not verify_checkpoint(damaged).ok
    code, message = _start(tmp_path / "truncated", data, damaged)
    assert code == 72
    assert "2.layer.mlp.linear_fc1.weight/exp_avg.pt is truncated" in str(message)
    code, message = _start(tmp_path / "larger", data, universal, model={**SMALL, "hidden_size": 64})
    assert code == 72
    assert "megasdc.model.hidden_size: saved with 32, now 64" in str(message)
    code, message = _start(tmp_path / "heads", data, universal, model={**SMALL, "num_attention_heads": 2})
    assert code == 72
    assert "megasdc.model.num_attention_heads: saved with 4, now 2" in str(message)
    code, message = _start(tmp_path / "other_data", data, universal, data__seed=7)
    assert code == 72
    assert "universal_without" in str(message)
    code, message = _start(tmp_path / "none", data, tmp_path)
    assert code == 72
    assert f"give {damaged}, which lies in it" in str(message)


def test_a_harmful_pickle_is_not_opened(tmp_path: Path, data: Path, universal: Path) -> None:
    """A file that would run code is refused, also where the manifest was made to fit it."""
    target, touched = tmp_path / "harmful", tmp_path / "touched"
    shutil.copytree(universal, target)
    name = "zero/2.layer.mlp.linear_fc1.weight/step.pt"
    torch.save(_Harmful(touched), target / name)
    manifest = read_universal_manifest(target)
    files = [
        record if record.name != name else describe_file(target, name, rank=0, node="x") for record in manifest.files
    ]
    write_universal_manifest(target, manifest.model_copy(update={"files": files}))
    code, message = _start(tmp_path / "run", data, target)
    assert code == 72
    assert "would run code" in str(message)
    assert not touched.exists()


class _Harmful:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch '{self.target}'",))


def _pretrain_with_failing_load(config: str) -> tuple[int, str | None]:
    """Train, but on rank 1 the load fails in its middle."""
    if int(os.environ["RANK"]) == 1:
        fill, calls = load._fill, count()

        def failing(*args: Any) -> None:
            if next(calls) == 2:
                raise OSError("a read failed on this rank alone")
            fill(*args)

        load._fill = failing
    return pretrain_rank(config, [])


def test_all_ranks_hear_of_a_load_that_failed_on_one(tmp_path: Path, data: Path, universal: Path) -> None:
    """No rank waits in a collective for the one that failed: all end with 72 long before the timeout."""
    options: dict[str, Any] = {"model": dict(SMALL), "checkpoint__universal": str(universal)}
    config = write_config(tmp_path / "a.json", data, tmp_path / "a", **options)
    results = run_distributed(_pretrain_with_failing_load, 2, str(config), init=False, timeout_s=40)
    assert [code for code, _ in results] == [72, 72]
    assert all("rank 1" in text and "engine must not be used" in text for _, text in results)


def test_a_replica_may_own_no_element(tmp_path: Path, data: Path) -> None:
    """18 elements without decay over 4 replicas leave the last none, on which DeepSpeed's own load fails: every bit."""
    model = {**SMALL, "num_layers": 1, "hidden_size": 6, "num_attention_heads": 1, "num_query_groups": 1}
    before = _Leg(tmp_path / "source", data, model, (1, 1, 1))
    report = convert_to_universal(before.checkpoint(), workers=1)
    after = _Leg(tmp_path / "after", data, model, (1, 1, 4), checkpoint__universal=report.path)
    assert _differing(before.state("at"), after.state("start")) == []
    assert after.losses(4) == pytest.approx(before.losses(4), rel=1e-5)


@pytest.mark.parametrize("bf16_first", [True, False])
def test_precision_may_change(tmp_path: Path, data: Path, bf16_first: bool) -> None:
    """Between fp32 and bf16 masters and moments keep every bit, and the weights are the masters rounded."""
    first, second = (BF16, {}) if bf16_first else ({}, BF16)
    before = _Leg(tmp_path / "before", data, SMALL, (1, 1, 2), **first)
    moved = convert_to_universal(before.checkpoint(), workers=1).path
    after = _Leg(tmp_path / "after", data, SMALL, (2, 1, 1), checkpoint__universal=moved, **second)
    found = after.state("start")
    assert {line.split()[0] for line in _differing(before.state("at"), found)} == {"weights"}
    for name, master in found["fp32"].items():
        assert torch.equal(found["weights"][name], master if bf16_first else master.bfloat16().float()), name
    assert after.losses(4) == pytest.approx(before.losses(4), rel=1e-2)


def test_a_start_without_the_data_position(tmp_path: Path, data: Path, universal: Path) -> None:
    """Named in universal_without, the data begin anew and the rest goes on; then the run resumes from its own files."""
    changes = {"data__seed": 7, "checkpoint__universal_without": ["loader"], "deepspeed__bf16": {"enabled": True}}
    assert _start(tmp_path / "run", data, universal, "megasdc.training.stop_step=4", **changes) == (0, None)
    (event,) = events_of(tmp_path / "run", "resume", "universal")
    assert (event["step"], event["without"]) == (3, ["loader"])
    saved = json.loads((tmp_path / "run/checkpoints/step_00000004/megasdc.json").read_text())
    assert saved["loader"]["consumed"] == {"0": 4}
    assert saved["samples"] == 16
    assert _start(tmp_path / "run", data, tmp_path / "gone", **changes) == (0, None)
    assert [event["step"] for event in events_of(tmp_path / "run", "resume", "checkpoint")] == [4]
    assert [row["step"] for row in metrics_of(tmp_path / "run") if "train/loss" in row] == [4, 5]


def test_data_of_another_tokenizer_are_refused(tmp_path: Path, data: Path, universal: Path) -> None:
    """Ids that mean something else end the start with 72 and both checksums, also where the data begin anew."""
    other = Path(shutil.copytree(data, tmp_path / "other"))
    manifest = DataManifest.load(other)
    tokenizer = manifest.tokenizer.model_copy(update={"checksum": "0" * 16})
    manifest.model_copy(update={"tokenizer": tokenizer}).save(other)
    code, message = _start(tmp_path / "run", other, universal, checkpoint__universal_without=["loader"])
    assert code == 72
    assert "was prepared with 0000000000000000; give data of the same tokenizer" in str(message)


def test_a_start_with_no_steps_left_says_so(tmp_path: Path, data: Path, universal: Path) -> None:
    """A run of as many steps as are done already ends well with an event that says that nothing was done or saved."""
    assert _start(tmp_path / "run", data, universal, training__steps=3) == (0, None)
    (event,) = events_of(tmp_path / "run", "resume", "no_steps_left")
    assert (event["step"], event["steps"]) == (3, 3)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert _start(tmp_path / "more", data, universal, training__steps=4) == (0, None)
    assert events_of(tmp_path / "more", "resume", "no_steps_left") == []


def test_initial_weights_are_not_asked_for(tmp_path: Path, data: Path, source: _Leg, universal: Path) -> None:
    """A universal start sets every weight: a folder of initial weights that is named too need not be there."""
    model = {**SMALL, "initial_weights": str(tmp_path / "gone")}
    moved = _Leg(tmp_path / "run", data, model, (1, 1, 1), checkpoint__universal=str(universal))
    assert _differing(source.state("at"), moved.state("start")) == []


def test_a_start_without_the_states_of_hooks(tmp_path: Path, data: Path, universal: Path) -> None:
    """States that the hooks cannot take up stop a start; with hooks in universal_without it goes on at the step."""
    edited = Path(shutil.copytree(universal, tmp_path / "edited"))
    manifest = read_universal_manifest(edited)
    content = json.loads((edited / "megasdc.json").read_text(encoding="utf-8"))
    assert any(content["hooks"].values())
    content["hooks"] = {name: {"of": "another version"} for name in content["hooks"]}
    (edited / "megasdc.json").write_text(json.dumps(content), encoding="utf-8")
    record = describe_file(edited, "megasdc.json", rank=0, node="x")
    files = [record if old.name == record.name else old for old in manifest.files]
    write_universal_manifest(edited, manifest.model_copy(update={"files": files}))
    assert _start(tmp_path / "with", data, edited)[0] != 0
    assert _start(tmp_path / "without", data, edited, checkpoint__universal_without=["hooks"]) == (0, None)
    (event,) = events_of(tmp_path / "without", "resume", "universal")
    assert (event["step"], event["without"]) == (3, ["hooks"])
    saved = json.loads((tmp_path / "without/checkpoints/step_00000005/megasdc.json").read_text(encoding="utf-8"))
    assert saved["loader"]["consumed"] == {"0": 20}


def test_a_smaller_global_batch_goes_on(tmp_path: Path, data: Path, universal: Path) -> None:
    """With 2 samples a step instead of 4 the data go on at the next sample, past what 2 a step would ever take; what
    is other than in the universal checkpoint is told.
    """
    smaller = ("train_batch_size=2", "megasdc.training.steps=8", "megasdc.checkpoint.resume=must")
    assert _start(tmp_path / "run", data, universal, *smaller, "megasdc.training.stop_step=6") == (0, None)
    told = {event["path"]: (event["old"], event["new"]) for event in events_of(tmp_path / "run", "resume", "changed")}
    assert told["train_batch_size"] == (4, 2) and told["megasdc.parallel.tensor"] == (2, 1)
    assert _start(tmp_path / "run", data, tmp_path / "gone", *smaller) == (0, None)
    saved = json.loads((tmp_path / "run/checkpoints/step_00000008/megasdc.json").read_text())
    assert saved["loader"]["consumed"] == {"0": 3 * 4 + 5 * 2}


def _tensors_of(value: Any) -> Any:
    """A loaded value with its tensors as lists, which can be compared."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _tensors_of(item) for key, item in value.items()}
    return [_tensors_of(item) for item in value] if isinstance(value, list | tuple) else value


def test_parts_of_nodes_are_put_together(tmp_path: Path, source: _Leg, universal: Path) -> None:
    """A node's own files alone are refused with what to copy from where; with the other's they convert to the same."""
    folder = tmp_path / source.checkpoint().name
    shutil.copytree(source.checkpoint(), folder)
    whole = read_manifest(folder)
    for rank, node in ((1, "b"), (0, "a")):
        files = [record for record in whole.files if record.rank == rank]
        part = {"storage": "node_local", "nodes": {"a": [0], "b": [1]}, "node": node, "files": files}
        write_manifest(folder, whole.model_copy(update=part))
        if node == "b":
            (folder / "manifest.json").rename(folder / "manifest.b.json")
    write_marker(folder, whole)
    found, problems = read_source(folder)
    assert problems == []
    assert found is not None
    assert found.records.keys() == {record.name for record in whole.files}
    report = convert_to_universal(folder, workers=1)
    made, shared = (read_universal_manifest(path) for path in (Path(report.path), universal))
    assert (made.parameters, made.step) == (shared.parameters, 3)
    for name in (record.name for record in shared.files if record.name.count("/") == 2):
        one, other = (torch.load(path / name, weights_only=True) for path in (Path(report.path), universal))
        assert _tensors_of(one) == _tensors_of(other), name
    (folder / "manifest.b.json").unlink()
    for record in whole.files:
        if record.rank == 1:
            (folder / record.name).unlink()
    with pytest.raises(CheckpointError, match=r"files of node b .*manifest\.b\.json"):
        convert_to_universal(folder)
