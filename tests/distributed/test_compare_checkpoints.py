"""Do checkpoints of equal content compare equal over layouts and formats, and is every damage found where it is?"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_harm import KINDS, Harm
from harness import run_distributed
from typer.testing import CliRunner
from whole_runs import MODELS, prepare_text, pretrain_rank, train_run, write_config

from megasdc.checkpoint.manifest import read_manifest, write_manifest
from megasdc.checkpoint.verify import CHECKED
from megasdc.checkpoint.views import View
from megasdc.cli import app as cli
from megasdc.cli.compare import checkpoints_script as app
from megasdc.common.errors import CheckpointError
from megasdc.interchange.convert import convert_to_universal
from megasdc.interchange.export_hf import export_hf
from megasdc.lab.checkpoints.checkpoints import Options, Report, compare_checkpoints
from megasdc.lab.checkpoints.drift import measure_drift
from megasdc.lab.checkpoints.views.contents import verify_contents
from megasdc.lab.checkpoints.views.open import open_view

pytestmark = pytest.mark.distributed

LAYER = "layer_02-model_00-model_states.pt"
STEP = "checkpoints/step_00000003"
LLAMA = {**MODELS["llama"], "num_query_groups": 2}


def _save_at_once(config: str) -> tuple[int, str | None]:
    """Start a run, save without training, and end."""
    from megasdc.train import main

    def save(run: Any) -> None:
        nothing: Any = SimpleNamespace(skipped="nothing was trained")
        next(hook for hook in run.hooks if type(hook).__name__ == "Saver").after_step(run, nothing)
        run.end.reason = "nothing is trained"

    main.train = save
    return pretrain_rank(config, [])


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs at two layouts, their universal and exported forms, and one of them moved to one rank without a step."""
    folder = tmp_path_factory.mktemp("compared")
    data = prepare_text(folder)
    common: dict[str, Any] = {"training": {"steps": 3, "eval_interval": 0}, "checkpoint__interval": 1}
    fp32 = write_config(folder / "fp32.json", data, folder / "fp32", parallel__tensor=2, parallel__pipeline=2, **common)
    assert train_run(fp32, 4) == [(0, None)] * 4
    bf16 = write_config(
        folder / "bf16.json",
        data,
        folder / "bf16",
        model=LLAMA,
        parallel__tensor=2,
        parallel__pipeline=2,
        deepspeed__bf16={"enabled": True},
        **common,
    )
    assert train_run(bf16, 8) == [(0, None)] * 8
    summed = write_config(
        folder / "summed.json",
        data,
        folder / "summed",
        deepspeed__bf16={"enabled": True},
        deepspeed__data_types={"grad_accum_dtype": "bf16"},
        **common,
    )
    assert train_run(summed, 2) == [(0, None)] * 2
    convert_to_universal(folder / "summed" / STEP, folder / "summed_universal")
    for name in ("fp32", "bf16"):
        convert_to_universal(folder / name / STEP, folder / f"{name}_universal")
        export_hf(folder / name / STEP, folder / f"{name}_hf")
    moved = write_config(
        folder / "moved.json",
        data,
        folder / "moved",
        checkpoint__universal=str(folder / "fp32_universal"),
        # A schedule that follows from the number of steps would be another one, and so the rate of the next step.
        deepspeed__scheduler=json.loads((folder / "fp32" / "resolved.json").read_text())["scheduler"],
        **{**common, "training": {"steps": 4, "eval_interval": 0}},
    )
    assert run_distributed(_save_at_once, 1, str(moved), init=False) == [(0, None)]
    return folder


@pytest.fixture(scope="session")
def good(made: Path) -> View:
    """The view of the unharmed 2x2x2 checkpoint."""
    return open_view(made / "bf16" / STEP)


PAIRS = [
    (f"fp32/{STEP}", f"fp32/{STEP}", 28 * 4),
    (f"fp32/{STEP}", "fp32_universal", 28 * 3),
    (f"fp32/{STEP}", "fp32_hf", 28),
    (f"fp32/{STEP}", f"moved/{STEP}", 28 * 4),
    (f"moved/{STEP}", "fp32_universal", 28 * 3),
    (f"moved/{STEP}", "fp32_hf", 28),
    (f"bf16/{STEP}", f"bf16/{STEP}", 15 * 4),
    (f"bf16/{STEP}", "bf16_universal", 15 * 3),
    (f"bf16/{STEP}", "bf16_hf", 15),
    (f"summed/{STEP}", "summed_universal", 28 * 3),
    ("fp32_universal", "fp32_hf", 28),
    ("bf16_universal", "bf16_hf", 15),
]


@pytest.mark.parametrize(("one", "other", "least"), PAIRS, ids=lambda value: str(value).split("/")[0])
def test_equal_content_is_equal(made: Path, one: str, other: str, least: int) -> None:
    """Over layouts, formats and DeepSpeed's optimizers, every tensor that both have is compared, and equal."""
    report = compare_checkpoints([open_view(made / one), open_view(made / other)])
    assert report.findings == []
    assert report.problems == []
    assert report.num_compared >= least


@pytest.mark.parametrize(
    "name", [f"{run}/{STEP}" for run in ("fp32", "bf16", "summed", "moved")] + ["fp32_universal", "bf16_universal"]
)
def test_what_runs_save_is_right(made: Path, name: str) -> None:
    """Over layouts, types and DeepSpeed's optimizers a real checkpoint passes every check of what it holds."""
    report = verify_contents(made / name)
    assert (report.problems, report.contents) == ([], CHECKED)


@pytest.mark.parametrize("name", [f"bf16/{STEP}", "bf16_universal", "bf16_hf", f"bf16/{STEP}/{LAYER}"])
def test_every_format_is_inspected(made: Path, name: str) -> None:
    """Types, sizes and format of all, from the command; the parameters are those that the model has."""
    answer = CliRunner().invoke(cli, ["inspect-checkpoint", str(made / name), "--json"])
    assert answer.exit_code == 0
    (found,) = json.loads(answer.stdout)
    assert found["unread"] == []
    for slot in found["slots"].values():
        assert set(slot["by_dtype"]) <= {"bfloat16", "float32"}
        assert slot["size_bytes"] >= 2 * slot["num_parameters"] > 0


def test_drift_follows_runs_over_layouts(made: Path) -> None:
    """A run that was moved to another layout without a step is equal where both keep a checkpoint; the rest is told."""
    report = measure_drift([made / "fp32/checkpoints", made / "moved/checkpoints"])
    assert [(one.step, one.equal) for one in report.steps] == [(3, True)]
    assert report.lacking == {str(made / "moved/checkpoints"): [1, 2]}
    steps = measure_drift([made / "bf16/checkpoints", made / "bf16/checkpoints"])
    assert steps.runs == [str(made / "bf16/checkpoints")]
    assert steps.same


def test_a_universal_checkpoint_is_compared_with_a_model(made: Path, tmp_path: Path) -> None:
    """Master weights are rounded as the run did: a flip that survives rounding is found in its file, and told how."""
    copy = Path(shutil.copytree(made / "bf16_universal", tmp_path / "universal"))
    file = copy / "zero/3.layer.mlp.linear_fc1.weight/fp32.pt"
    state = torch.load(file, weights_only=False)
    state["param"].view(torch.int32)[2, 9] ^= 1 << 24
    torch.save(state, file)
    report = compare_checkpoints([open_view(copy), open_view(made / "bf16_hf")])
    (found,) = report.findings
    assert (found.fqn, found.slot, found.pattern, found.detail) == (
        "3.layer.mlp.linear_fc1.weight",
        "weight",
        "bit",
        "bit 8",
    )
    assert found.measure is not None
    assert found.measure.first == [2, 9]
    assert f"weights of {copy} are its master weights, rounded as its run did" in report.notes
    assert {view.slots[0] for view in report.views} == {"weight"}


def test_another_step_is_drift(made: Path, good: View) -> None:
    """Two steps of one run differ in nearly all elements of all moments: drift, and nothing says who is wrong."""
    report = compare_checkpoints([good, open_view(made / "bf16/checkpoints/step_00000002")])
    moments = [one for one in report.findings if one.slot.startswith("exp_avg")]
    assert {one.pattern for one in moments} == {"drift"}
    assert {one.slot for one in moments} == {"exp_avg", "exp_avg_sq"}
    assert {one.basis for one in report.findings} == {""}


def _check(report: Report, expected: Any, harmed: Path) -> None:
    """Compare what was found with what had been done."""
    assert report.findings, expected
    assert report.problems == []
    assert {one.checkpoint for one in report.findings} == {str(harmed)}
    assert {one.pattern for one in report.findings} <= expected.patterns
    pieces = [piece for one in report.findings for piece in one.pieces]
    assert {piece.piece.file.name for piece in pieces} == expected.files
    assert {piece.piece.owner.rank for piece in pieces} == expected.ranks
    assert all(piece.piece.owner.host for piece in pieces)
    assert any(expected.detail in one.detail for one in report.findings)
    if expected.tensor is None:
        return
    (only,) = report.findings
    assert (only.fqn, only.slot) == expected.tensor
    if expected.first is not None:
        assert only.measure is not None
        assert (only.measure.first, only.measure.last) == (expected.first, expected.last)
        assert only.measure.num_different == expected.count


def _campaign(made: Path, good: View, folder: Path, kind: str, seeds: range) -> None:
    for seed in seeds:
        harm = Harm(made / "bf16" / STEP, made / "bf16/checkpoints/step_00000002", seed)
        place = folder / str(seed)
        harmed, expected = harm.apply(kind, place)
        views = [open_view(harmed), good] if seed % 2 else [good, open_view(harmed)]
        report = compare_checkpoints(views)
        try:
            _check(report, expected, harmed)
        except AssertionError as error:
            raise AssertionError(f"{kind}, seed {seed}: {expected}") from error
        shutil.rmtree(place)


@pytest.mark.parametrize("kind", KINDS)
def test_a_damage_is_found_where_it_is(made: Path, good: View, tmp_path: Path, kind: str) -> None:
    """The right checkpoint of two in either order, tensor, first and last index, owner, pattern; nothing else."""
    _campaign(made, good, tmp_path, kind, range(4))


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_many_damages_are_found_where_they_are(made: Path, good: View, tmp_path: Path, kind: str) -> None:
    """The same of twenty damages of each kind."""
    _campaign(made, good, tmp_path, kind, range(100, 120))


def test_there_are_enough_damages() -> None:
    """At least 60 in the default campaign, 300 in the full one."""
    assert len(KINDS) * 4 >= 60
    assert len(KINDS) * 20 >= 300


def _tampered(made: Path, tmp_path: Path, name: str) -> Path:
    """A copy of a checkpoint whose manifest says nothing of its files' bytes being changed: one bit is."""
    copy = Path(shutil.copytree(made / "bf16" / STEP, tmp_path / name / "step_00000003"))
    file = copy / "layer_02-model_01-model_states.pt"
    state = torch.load(file, weights_only=False)
    state["layer.mlp.linear_fc2.weight"].view(torch.int16)[3, 5] ^= 1 << 9
    torch.save(state, file)
    return copy


def test_the_odd_one_of_three_is_named(made: Path, tmp_path: Path) -> None:
    """The first of three is the harmed one: the majority is expected to be right, bit and index are named."""
    harmed = _tampered(made, tmp_path, "harmed")
    copy = Path(shutil.copytree(made / "bf16" / STEP, tmp_path / "copy" / "step_00000003"))
    report = compare_checkpoints([open_view(harmed), open_view(copy), open_view(made / "bf16_hf")])
    (found,) = report.findings
    assert (found.checkpoint, found.basis) == (str(harmed), "what most checkpoints hold")
    assert (found.fqn, found.pattern, found.detail) == ("2.layer.mlp.linear_fc2.weight", "bit", "bit 9")
    assert found.measure is not None
    assert found.measure.first == [3, 64 + 5]


def test_copies_in_one_checkpoint_are_compared(made: Path, good: View, tmp_path: Path) -> None:
    """A norm that differs between tensor ranks of one checkpoint is found in it, in the copy that is wrong."""
    copy = Path(shutil.copytree(made / "bf16" / STEP, tmp_path / "step_00000003"))
    file = copy / "layer_03-model_01-model_states.pt"
    state = torch.load(file, weights_only=False)
    state["layer.input_layernorm.weight"][7] = 3.0
    torch.save(state, file)
    (found,) = compare_checkpoints([open_view(copy), open_view(made / "bf16_hf")]).findings
    assert (found.fqn, found.slot, found.against) == ("3.layer.input_layernorm.weight", "weight", str(copy))
    assert [piece.piece.file.name for piece in found.pieces] == [file.name]


def test_tolerances(made: Path, tmp_path: Path) -> None:
    """A difference within --ulp or --rtol counts as the same and is counted; one beyond does not."""
    one, other = tmp_path / "one.pt", tmp_path / "other.pt"
    torch.save({"a": torch.tensor([1.0, 2.0])}, one)
    torch.save({"a": torch.tensor([1.0, 2.0 + 2**-21])}, other)
    views = [open_view(one), open_view(other)]
    assert len(compare_checkpoints(views, Options(ulp=1)).findings) == 1
    assert compare_checkpoints(views, Options(ulp=2)).num_tolerated == 1
    assert compare_checkpoints(views, Options(ulp=2)).findings == []
    assert compare_checkpoints(views, Options(rtol=1e-6)).findings == []
    assert len(compare_checkpoints(views, Options(rtol=1e-7)).findings) == 1


def _run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_exit_codes_and_json(made: Path, tmp_path: Path) -> None:
    """0 the same, 1 different, 2 not compared; --json says what and where; --only and --ignore narrow it."""
    good, harmed = made / "bf16" / STEP, _tampered(made, tmp_path, "harmed")
    assert _run(good, good).exit_code == 0
    different = _run(good, harmed, "--json")
    assert different.exit_code == 1
    found = json.loads(different.stdout)
    assert not found["same"]
    (finding,) = found["findings"]
    assert (finding["checkpoint"], finding["measure"]["first"]) == (str(harmed), [3, 69])
    assert finding["pieces"][0]["rank"] == 1
    assert finding["pieces"][0]["unchanged_since_saved"] is False
    shown = _run(good, harmed)
    assert "2.layer.mlp.linear_fc2.weight" in shown.stdout
    assert "changed since it was saved" in shown.stdout
    assert _run(good, harmed, "--ignore", "*.linear_fc2.*").exit_code == 0
    assert _run(good, harmed, "--only", "*/exp_avg").exit_code == 0
    assert _run(good, harmed, "--only", "*/weight").exit_code == 1
    assert _run(good, harmed, "--weights-only", "--ulp", 10**6).exit_code == 0
    names_of_others = made / "bf16_hf" / "model.safetensors"
    for wrong in ([good], [good, tmp_path / "nothing"], [good, tmp_path], [good, names_of_others]):
        assert _run(*wrong).exit_code == 2, wrong


class _Executes:
    def __reduce__(self) -> Any:
        return (os.mkdir, (self.target,))

    def __init__(self, target: str) -> None:
        self.target = target


def test_no_code_of_a_pickle_runs(made: Path, good: View, tmp_path: Path) -> None:
    """A pickle that would act is refused with its file's name and exit code 2; the others' tensors are compared."""
    copy = Path(shutil.copytree(made / "bf16" / STEP, tmp_path / "step_00000003"))
    file = copy / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": _Executes(str(tmp_path / "acted"))}, file)
    result = _run(copy, made / "bf16" / STEP)
    assert result.exit_code == 2
    assert "would run code when loaded" in result.output
    assert not (tmp_path / "acted").exists()
    report = compare_checkpoints([open_view(copy), good])
    assert report.findings == []
    assert len(report.problems) == 1
    assert report.num_compared > 60
    universal = Path(shutil.copytree(made / "bf16_universal", tmp_path / "universal"))
    file = universal / "zero/3.layer.mlp.linear_fc1.weight/exp_avg.pt"
    torch.save({"param": _Executes(str(tmp_path / "acted"))}, file)
    (problem,) = compare_checkpoints([open_view(universal), good]).problems
    assert str(file) in problem
    assert "would run code when loaded" in problem
    plain = tmp_path / "plain.pt"
    plain.write_bytes(pickle.dumps(_Executes(str(tmp_path / "acted"))))
    with pytest.raises(CheckpointError, match=r"plain\.pt"):
        open_view(plain)
    assert not (tmp_path / "acted").exists()


@pytest.mark.parametrize(
    "name",
    [
        "layer_02-model_00-model_states.pt",
        "bf16_zero_pp_rank_0_mp_rank_03_optim_states.pt",
        "mp_rank_01_model_states.pt",
        "rank_00003_state.pt",
        "manifest.json",
        "megasdc.json",
    ],
)
def test_a_truncated_file_is_named(made: Path, tmp_path: Path, name: str) -> None:
    """Exit code 2 and the file's name, whichever file it is."""
    copy = Path(shutil.copytree(made / "bf16" / STEP, tmp_path / "step_00000003"))
    content = (copy / name).read_bytes()
    (copy / name).write_bytes(content[: len(content) // 2])
    result = _run(made / "bf16" / STEP, copy)
    assert result.exit_code == 2
    assert name in result.output


def test_a_folder_of_one_node_is_refused(made: Path, tmp_path: Path) -> None:
    """With storage on every node, a folder that lacks another node's files is no difference: it says what to copy."""
    copy = Path(shutil.copytree(made / "bf16" / STEP, tmp_path / "step_00000003"))
    manifest = read_manifest(copy)
    mine = [record for record in manifest.files if record.rank < 4]
    nodes = {"a": [0, 1, 2, 3], "b": [4, 5, 6, 7]}
    write_manifest(
        copy, manifest.model_copy(update={"storage": "node_local", "node": "a", "nodes": nodes, "files": mine})
    )
    with pytest.raises(CheckpointError, match=r"lacks the files of node b .*copy the \.pt files"):
        open_view(copy)


def _edited(made: Path, folder: Path, names: list[str], edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of the 2x2x2 checkpoint with files of layers edited."""
    copy = Path(shutil.copytree(made / "bf16" / STEP, folder / "step_00000003"))
    for name in names:
        state = torch.load(copy / name, weights_only=False)
        edit(state)
        torch.save(state, copy / name)
    return copy


def test_copies_of_one_checkpoint_have_one_vote(made: Path, tmp_path: Path) -> None:
    """Two equal wrong copies in one checkpoint do not outvote the one of another: nothing tells who is right."""

    def edit(state: dict[str, torch.Tensor]) -> None:
        state["layer.input_layernorm.weight"][7] = 3.0

    names = [f"layer_03-model_0{tp_rank}-model_states.pt" for tp_rank in range(2)]
    report = compare_checkpoints([open_view(_edited(made, tmp_path, names, edit)), open_view(made / "bf16_hf")])
    assert {one.basis for one in report.findings} == {""}
    assert {one.fqn for one in report.findings} == {"3.layer.input_layernorm.weight"}


def test_a_file_of_another_state_is_one_thing(made: Path, good: View, tmp_path: Path) -> None:
    """Where most tensors of a file hold another state, one of which a single bit differs is no bit flip."""

    def edit(state: dict[str, torch.Tensor]) -> None:
        for name, tensor in state.items():
            if isinstance(tensor, torch.Tensor) and "norm" not in name:
                tensor.add_(1)
        state["layer.input_layernorm.weight"].view(torch.int16)[4] ^= 1

    harmed = _edited(made, tmp_path, ["layer_03-model_01-model_states.pt"], edit)
    report = compare_checkpoints([good, open_view(harmed)])
    assert len(report.findings) == 5
    assert {one.pattern for one in report.findings} == {"shard"}


def test_another_shape_of_as_many_elements(made: Path, good: View, tmp_path: Path) -> None:
    """A matrix that is saved as [64, 32] instead of [32, 64] is of another shape, in its file."""

    def edit(state: dict[str, torch.Tensor]) -> None:
        name = "layer.mlp.linear_fc2.weight"
        state[name] = state[name].reshape(64, 32)

    harmed = _edited(made, tmp_path, ["layer_03-model_01-model_states.pt"], edit)
    (found,) = compare_checkpoints([good, open_view(harmed)]).findings
    assert (found.pattern, found.fqn) == ("shape", "3.layer.mlp.linear_fc2.weight")
    assert [piece.piece.owner.rank for piece in found.pieces] == [5]


def test_what_one_has_not_is_missing(made: Path, good: View, tmp_path: Path) -> None:
    """A tensor that only one file has, and a layer's file that has none: missing, in the one that lacks it."""
    one, other = tmp_path / "one.pt", tmp_path / "other.pt"
    torch.save({"a": torch.ones(3), "b": torch.ones(3)}, one)
    torch.save({"a": torch.ones(3)}, other)
    (found,) = compare_checkpoints([open_view(one), open_view(other)]).findings
    assert (found.fqn, found.pattern, found.checkpoint) == ("b", "missing", str(other))
    harmed = _edited(made, tmp_path, [], lambda state: None)
    (harmed / "layer_01-model_01-model_states.pt").unlink()
    (found,) = compare_checkpoints([good, open_view(harmed)]).findings
    assert (found.pattern, found.checkpoint) == ("missing", str(harmed))
    assert found.pieces[0].piece.owner.rank == 1
