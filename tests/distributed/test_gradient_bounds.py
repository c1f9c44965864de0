"""Do bounds cut outliers before they do harm, on the shards of every layout, and change nothing where none is?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_distributed
from whole_runs import events_of, metrics_of, prepare_text, state_of, train_run, write_config

from megasdc.interchange.convert import convert_to_universal

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

BF16 = {"deepspeed__bf16": {"enabled": True}}
BF16_SMALL = {**BF16, "deepspeed__data_types": {"grad_accum_dtype": "bf16"}}
OPTIMIZERS = {"fp32": {}, "bf16": BF16, "bf16_accumulated_in_bf16": BF16_SMALL}
OUTLIER = {"phase": "reduced_grad", "submodule": "2.layer.mlp.linear_fc1", "slot": "weight", "rank": 1, "steps": [3, 3]}
OUTLIER |= {"kind": "value"}
ABSOLUTE = {"hook": "absolute", "theta": 1e-3}
SPIKE = {"hook": "spike_aware", "theta": 50.0, "grace_steps": 1}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


def _train(folder: Path, data: Path, name: str, ranks: int, *overrides: str, **changes: Any) -> list[Any]:
    changes = {"training__eval_interval": 0, "training__steps": 4, "checkpoint__interval": 1, **changes}
    config = write_config(folder / f"{name}.json", data, folder / name, **changes)
    return train_run(config, ranks, *overrides)


def _ok(results: list[Any]) -> None:
    assert [code for code, _ in results if code] == [], results


def _state(folder: Path, name: str, step: int = 4) -> dict[str, str]:
    """What decides how a run goes on, without what bounds count and the configuration."""
    state = state_of(folder / name / "checkpoints" / f"step_{step:08d}")
    return {key: value for key, value in state.items() if "/hooks" not in key and "/config" not in key}


def _losses(folder: Path, name: str) -> list[Any]:
    kept = ("step", "train/loss", "train/grad_norm")
    return [{key: row[key] for key in kept} for row in metrics_of(folder / name) if "train/loss" in row]


NEUTRAL = [((1, 1, 2), optimizer) for optimizer in OPTIMIZERS] + [((2, 2, 2), "bf16")]


@pytest.mark.parametrize(("layout", "optimizer"), NEUTRAL, ids=str)
def test_bounds_that_are_infinite_change_no_bit(
    tmp_path: Path, data: Path, layout: tuple[int, int, int], optimizer: str
) -> None:
    """States, losses and norms are those of a run without hooks; what was seen is reported all the same."""
    tensor, pipeline, replicas = layout
    common = {"parallel__tensor": tensor, "parallel__pipeline": pipeline, **OPTIMIZERS[optimizer]}
    hooks = [{**ABSOLUTE, "theta": "inf"}, {**SPIKE, "theta": "inf"}]
    _ok(_train(tmp_path, data, "plain", tensor * pipeline * replicas, **common))
    _ok(_train(tmp_path, data, "neutral", tensor * pipeline * replicas, **common, optimizer_hooks=hooks))
    assert _state(tmp_path, "neutral") == _state(tmp_path, "plain")
    assert _losses(tmp_path, "neutral") == _losses(tmp_path, "plain")
    told = events_of(tmp_path / "neutral", "bounds", "statistics")
    assert [one["step"] for one in told] == [1, 2, 3, 4]
    rows = told[-1]["submodules"]
    assert {row["submodule"] for row in rows} >= {"0.word_embeddings", "3.layer.mlp.linear_fc2", "4.norm"}
    assert all(row["share"] == 0 for row in rows)
    assert max(row["largest_ratio"] for row in rows) > 1
    assert events_of(tmp_path / "neutral", "bounds", "copies_differ") == []


def _updates(folder: Path, name: str) -> torch.Tensor:
    """What the optimizer added to every shard at step 3."""
    return _masters(folder, name, 3) - _masters(folder, name, 2)


def _masters(folder: Path, name: str, step: int) -> torch.Tensor:
    files = sorted((folder / name / "checkpoints" / f"step_{step:08d}").glob("*optim_states.pt"))
    states = [torch.load(file, map_location="cpu", weights_only=False)["optimizer_state_dict"] for file in files]
    flats = [flat for state in states for flat in state["single_partition_of_fp32_groups"]]
    return torch.cat([flat.detach().double().flatten() for flat in flats])


def _change(folder: Path, name: str) -> float:
    """Relative change of the updates against the run without an outlier, all elements but the one hit."""
    clean, harmed = _updates(folder, "clean"), _updates(folder, name)
    difference = (harmed - clean).abs()
    difference[difference.nan_to_num(nan=torch.inf).argmax()] = 0
    return float(difference.norm() / clean.norm())


@pytest.mark.parametrize("optimizer", [pytest.param("fp32", marks=pytest.mark.full), "bf16"])
def test_an_outlier_moves_nothing_but_its_own_element(tmp_path: Path, data: Path, optimizer: str) -> None:
    """With a bound before the norm the other updates of the step stay; without one they are destroyed."""
    common = {**OPTIMIZERS[optimizer], "checkpoint__interval": 1, "training__steps": 3}
    bound = {"optimizer_hooks": [{**ABSOLUTE, "non_finite": "bound"}]}
    _ok(_train(tmp_path, data, "clean", 2, **common, **bound))
    for value, policy in ((1e12, "bound"), ("inf", "bound"), ("inf", "zero"), ("nan", "zero"), ("nan", "bound")):
        name = f"bounded_{value}_{policy}"
        hooks = [{**ABSOLUTE, "non_finite": policy}]
        faults = [{**OUTLIER, "value": value}]
        _ok(_train(tmp_path, data, name, 2, **common, optimizer_hooks=hooks, faults=faults))
        assert _change(tmp_path, name) <= 1e-6
    rows = {row["submodule"]: row for row in events_of(tmp_path / name, "bounds", "statistics")[2]["submodules"]}
    assert {fqn: row["nan"] for fqn, row in rows.items() if row["nan"]} == {"2.layer.mlp.linear_fc1": 1}
    _ok(_train(tmp_path, data, "unbounded", 2, **common, faults=[{**OUTLIER, "value": 1e12}]))
    assert _change(tmp_path, "unbounded") > 0.1


@pytest.mark.parametrize("optimizer", [pytest.param("fp32", marks=pytest.mark.full), "bf16"])
def test_all_ranks_skip_a_step_together(tmp_path: Path, data: Path, optimizer: str) -> None:
    """NaN in the shard of one rank of one stage: no rank takes the step, and its place is told."""
    layout = {"parallel__tensor": 2, "parallel__pipeline": 2}
    fault = {**OUTLIER, "submodule": "3.layer.mlp.linear_fc2", "rank": 6, "value": "nan"}
    hooks = [ABSOLUTE]
    _ok(_train(tmp_path, data, "a", 8, **layout, **OPTIMIZERS[optimizer], faults=[fault], optimizer_hooks=hooks))
    (skip,) = {(one["step"], one["place"]) for one in events_of(tmp_path / "a", "skip", "optimizer_step")}
    assert skip[0] == 3
    assert skip[1] == "the gradient of 3.layer.mlp.linear_fc2.weight has 1 NaN and 0 Inf in the shard of rank 6"
    assert _state(tmp_path, "a", 2).keys() == _state(tmp_path, "a", 3).keys()
    assert torch.equal(_masters(tmp_path, "a", 2), _masters(tmp_path, "a", 3))
    assert not torch.equal(_masters(tmp_path, "a", 3), _masters(tmp_path, "a", 4))


@pytest.mark.parametrize("optimizer", ["fp32", "bf16"])
def test_all_ranks_halt_together(tmp_path: Path, data: Path, optimizer: str) -> None:
    """With policy halt every rank ends with the code for what is not finite, and nothing of the step is kept."""
    hooks = [{**ABSOLUTE, "non_finite": "halt"}]
    fault = {**OUTLIER, "value": "inf"}
    results = _train(tmp_path, data, "a", 2, **OPTIMIZERS[optimizer], faults=[fault], optimizer_hooks=hooks)
    assert {code for code, _ in results} == {74}, results
    assert all("linear_fc1.weight has 0 NaN and 1 Inf in the shard of rank 1" in text for _, text in results)
    steps = sorted(int(path.name[5:]) for path in (tmp_path / "a" / "checkpoints").glob("step_*"))
    assert steps == [1, 2]


def test_a_local_outlier_is_cut_before_it_is_averaged(tmp_path: Path, data: Path) -> None:
    """One replica's 1e12 is bounded on that replica; with policy zero a NaN of its own leaves the average finite."""
    hooks = [{**ABSOLUTE, "where": "local", "non_finite": "zero"}]
    fault = {**OUTLIER, "phase": "collective"}
    _ok(_train(tmp_path, data, "clean", 2, training__steps=3, optimizer_hooks=hooks))
    for value in (1e12, "nan"):
        name = f"harmed_{value}"
        faults = [{**fault, "value": value}]
        _ok(_train(tmp_path, data, name, 2, training__steps=3, optimizer_hooks=hooks, faults=faults))
        assert _change(tmp_path, name) <= 1e-6
    assert events_of(tmp_path / name, "skip", "optimizer_step") == []


def _pretrain_with_their_step(config: str) -> None:
    """Train with DeepSpeed's own step."""
    from whole_runs import pretrain_rank

    from megasdc.engine import engine

    class Nothing:
        def __init__(self, *_: Any) -> None:
            pass

    engine.StepControl = Nothing  # type: ignore[assignment, misc]
    assert pretrain_rank(config, []) == (0, None)


@pytest.mark.parametrize("layout", [(1, 1, 2), (2, 2, 2)], ids=str)
def test_our_step_of_the_bf16_optimizer_is_theirs(tmp_path: Path, data: Path, layout: tuple[int, int, int]) -> None:
    """On healthy ranks states, losses and norms are those of DeepSpeed's own step, bit for bit."""
    tensor, pipeline, replicas = layout
    options = {**BF16, "parallel__tensor": tensor, "parallel__pipeline": pipeline}
    _ok(_train(tmp_path, data, "ours", tensor * pipeline * replicas, **options))
    theirs = {**options, "training__eval_interval": 0, "training__steps": 4, "checkpoint__interval": 1}
    config = write_config(tmp_path / "theirs.json", data, tmp_path / "theirs", **theirs)
    run_distributed(_pretrain_with_their_step, tensor * pipeline * replicas, str(config), init=False)
    assert _state(tmp_path, "ours") == _state(tmp_path, "theirs")
    assert _losses(tmp_path, "ours") == _losses(tmp_path, "theirs")


def test_a_wrong_whole_copy_of_a_gradient_parts_nobody(tmp_path: Path, data: Path) -> None:
    """NaN in one rank's copy of what another rank owns: without hooks too all ranks skip, and nobody waits."""
    fault = {**OUTLIER, "value": "nan", "rank": 1}
    for number, submodule in enumerate(("0.word_embeddings", "4.norm")):
        name = f"run_{number}"
        _ok(_train(tmp_path, data, name, 2, **BF16, faults=[{**fault, "submodule": submodule}]))
    fired = {}
    for number in (0, 1):
        skipped = [one["step"] for one in events_of(tmp_path / f"run_{number}", "skip", "optimizer_step")]
        fired[number] = len(events_of(tmp_path / f"run_{number}", "fault", "injected"))
        assert skipped == [3, 3] * bool(fired[number]), "one event a rank, where the rank owns a part of it"
    assert sum(fired.values()) >= 1


@pytest.mark.parametrize("optimizer", ["fp32", "bf16"])
def test_a_pattern_of_one_stage_is_heard_on_all(tmp_path: Path, data: Path, optimizer: str) -> None:
    """Where only the first stage has what is bounded, all stages clip by the same norm."""
    hooks = [{**ABSOLUTE, "parameters": ["2.*"]}]
    _ok(_train(tmp_path, data, "a", 2, **OPTIMIZERS[optimizer], parallel__pipeline=2, optimizer_hooks=hooks))
    rows = events_of(tmp_path / "a", "bounds", "statistics")[-1]["submodules"]
    assert {row["submodule"].split(".")[0] for row in rows if row["share"]} == {"2"}


def test_a_local_gradient_that_is_not_finite_has_its_address(tmp_path: Path, data: Path) -> None:
    """The replica that accumulated it is named, not the owner of the shard; two steps have their own addresses."""
    first = {**OUTLIER, "phase": "collective", "value": "nan", "steps": [2, 2]}
    second = {**first, "submodule": "3.layer.mlp.linear_fc2", "rank": 0, "value": "inf", "steps": [4, 4]}
    local = {**ABSOLUTE, "where": "local"}
    options = {"optimizer_hooks": [local, {**ABSOLUTE, "non_finite": "zero"}], "faults": [first, second]}
    _ok(_train(tmp_path, data, "a", 2, **options))
    told = {(one["step"], one["place"]) for one in events_of(tmp_path / "a", "skip", "optimizer_step")}
    assert told == {
        (2, "the gradient of 2.layer.mlp.linear_fc1.weight has 1 NaN and 0 Inf as rank 1 accumulated it"),
        (4, "the gradient of 3.layer.mlp.linear_fc2.weight has 0 NaN and 1 Inf as rank 0 accumulated it"),
    }


def test_a_hook_that_fails_on_one_rank_ends_all(tmp_path: Path, data: Path) -> None:
    """Every rank ends with the code for a wrong configuration and the place of the failure; nobody waits."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from __future__ import annotations\n"
        "import os\n"
        "from dataclasses import dataclass\n"
        "from megasdc.optim.hooks import GradientHook\n"
        "@dataclass\n"
        "class Fail(GradientHook):\n"
        "    step: int = 2\n"
        "    def apply(self, part):\n"
        "        if os.environ['RANK'] == '1' and part.step == self.step:\n"
        "            raise ValueError('no luck')\n"
    )
    hook = {"hook": "file", "path": str(file), "name": "Fail"}
    results = _train(tmp_path, data, "a", 2, optimizer_hooks=[hook])
    assert {code for code, _ in results} == {70}, results
    assert all("failed at rank 1, step 2" in text and "no luck" in text for _, text in results)


RESET = {"hook": "momentum_reset", "interval": 3, "warmup_steps": 2, "restart_bias_correction": True}


@pytest.mark.parametrize("optimizer", ["fp32", "bf16"])
def test_a_run_with_hooks_goes_on_bit_for_bit(tmp_path: Path, data: Path, optimizer: str) -> None:
    """Stopped in the warm-up after a reset and resumed, it ends as without a stop, its counts included.

    The clip acts in every step, by which spikes are bounded from the second step after the reset on.
    """
    spike = {**SPIKE, "theta": 2.0, "grace_steps": 1}
    options = {**OPTIMIZERS[optimizer], "optimizer_hooks": [spike, ABSOLUTE, RESET], "training__steps": 6}
    options |= {"logging__interval": 3, "deepspeed__gradient_clipping": 0.05}
    _ok(_train(tmp_path, data, "whole", 2, **options))
    _ok(_train(tmp_path, data, "parts", 2, "megasdc.training.stop_step=4", **options))
    _ok(_train(tmp_path, data, "parts", 2, **options))
    assert _state(tmp_path, "parts", 6) == _state(tmp_path, "whole", 6)
    whole, parts = (events_of(tmp_path / name, "bounds", "statistics") for name in ("whole", "parts"))
    assert [one["step"] for one in whole] == [3, 6]
    assert [one["step"] for one in parts] == [3, 4, 6], "what a stopped run has counted is told, and told again"
    parts = [parts[0], parts[2]]
    assert [one["step"] for one in events_of(tmp_path / "whole", "bounds", "reset")] == [4]
    sums = {}
    for name, told in (("whole", whole), ("parts", parts)):
        sums[name] = told[1]["submodules"]
    assert sums["whole"] == sums["parts"]


def test_a_hook_from_a_file(tmp_path: Path, data: Path) -> None:
    """A class of the user's own changes gradients, keeps a state over a resume, and is refused where it is not one."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from megasdc.optim.hooks import GradientHook\n"
        "class Halve(GradientHook):\n"
        "    def __init__(self, factor):\n"
        "        self.factor, self.calls = factor, 0\n"
        "    def apply(self, part):\n"
        "        part.gradient.mul_(self.factor)\n"
        "        self.calls = part.step\n"
        "    def state_dict(self):\n"
        "        return {'calls': self.calls}\n"
        "    def load_state_dict(self, state):\n"
        "        assert state['calls'] == 2, state\n"
    )
    hook = {"hook": "file", "path": str(file), "name": "Halve", "settings": {"factor": 0.5}}
    plain = {"training__steps": 3, "deepspeed__gradient_clipping": 0.0}
    _ok(_train(tmp_path, data, "plain", 2, **plain))
    _ok(_train(tmp_path, data, "halved", 2, "megasdc.training.stop_step=2", **plain, optimizer_hooks=[hook]))
    _ok(_train(tmp_path, data, "halved", 2, **plain, optimizer_hooks=[hook]))
    first, halved = _losses(tmp_path, "plain"), _losses(tmp_path, "halved")
    assert halved[0]["train/grad_norm"] == pytest.approx(first[0]["train/grad_norm"] / 2, rel=1e-6)
    results = _train(tmp_path, data, "wrong", 2, **plain, optimizer_hooks=[{**hook, "name": "Absent"}])
    assert {code for code, _ in results} == {70}
    assert "has no subclass of megasdc.optim.hooks.GradientHook named 'Absent'" in str(results[0][1])


def test_a_warning_where_too_much_is_bounded(tmp_path: Path, data: Path) -> None:
    """A share above `warn_share` is told by submodule; patterns choose what is bounded."""
    hooks = [{**ABSOLUTE, "theta": 1e-6, "parameters": ["*.mlp.*"], "warn_share": 0.5}]
    _ok(_train(tmp_path, data, "a", 1, training__steps=2, optimizer_hooks=hooks))
    warned = events_of(tmp_path / "a", "bounds", "warning")
    assert {one["submodule"] for one in warned} == {
        f"{layer}.layer.mlp.linear_fc{number}" for layer in (2, 3) for number in (1, 2)
    }
    rows = events_of(tmp_path / "a", "bounds", "statistics")[0]["submodules"]
    assert {row["submodule"] for row in rows if row["share"]} == {one["submodule"] for one in warned}


def test_gradients_of_copies_that_differ_are_told(tmp_path: Path, data: Path) -> None:
    """A wrong gradient of a norm on tensor rank 1, which the norm does not count, is bounded there and told."""
    fault = {**OUTLIER, "submodule": "2.layer.input_layernorm", "value": 1e12}
    bound = {**ABSOLUTE, "theta": 0.5}
    _ok(_train(tmp_path, data, "a", 2, parallel__tensor=2, optimizer_hooks=[bound], faults=[fault]))
    told = events_of(tmp_path / "a", "bounds", "copies_differ")
    assert [one["step"] for one in told] == [3, 4], "the copies have drifted apart"
    assert told[0]["norms"][1] > told[0]["norms"][0]
    assert all(row["train/grad_norm"] < 100 for row in _losses(tmp_path, "a"))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_copies_of_equal_norm_that_differ_are_told(tmp_path: Path, data: Path, optimizer: str) -> None:
    """Two elements of a norm's gradient that changed places on tensor rank 1 are found; before that no bit differs."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import os\n"
        "from megasdc.optim.hooks import GradientHook\n"
        "class Swap(GradientHook):\n"
        "    def apply(self, part):\n"
        "        if os.environ['RANK'] == '1' and part.step == 3:\n"
        "            part.gradient[:2] = part.gradient[:2].flip(0)\n"
    )
    swap = {"hook": "file", "path": str(file), "name": "Swap", "parameters": ["2.layer.input_layernorm.weight"]}
    neutral = {**ABSOLUTE, "theta": "inf"}
    options = {**OPTIMIZERS[optimizer], "parallel__tensor": 2, "training__steps": 3}
    _ok(_train(tmp_path, data, "a", 2, **options, optimizer_hooks=[swap, neutral]))
    (told,) = events_of(tmp_path / "a", "bounds", "copies_differ")
    assert told["step"] == 3 and told["norms"][0] == pytest.approx(told["norms"][1], rel=1e-12)


def test_bounds_move_to_another_layout(tmp_path: Path, data: Path) -> None:
    """From TP2 through the universal form to DP2: counts since the last report go on, and the reset comes in time."""
    hooks = [{**SPIKE, "warn_share": 1e-9}, {**RESET, "interval": 4}]
    common = {"optimizer_hooks": hooks, "training__steps": 5, "logging__interval": 5}
    _ok(_train(tmp_path, data, "before", 2, "megasdc.training.stop_step=4", **common, parallel__tensor=2))
    report = convert_to_universal(tmp_path / "before" / "checkpoints" / "step_00000003", workers=1)
    start = {"checkpoint__universal": str(report.path)}
    _ok(_train(tmp_path, data, "after", 2, **common, **start))
    (after,) = events_of(tmp_path / "after", "bounds", "statistics")
    assert after["step"] == 5
    assert [one["step"] for one in events_of(tmp_path / "after", "bounds", "reset")] == [5]
    rows = {row["submodule"]: row for row in after["submodules"]}
    assert rows["3.layer.mlp.linear_fc1"]["elements"] == 5 * 4 * 32 * (32 + 1), "five steps, weight and bias"
    assert all(row["share"] > 0 for fqn, row in rows.items() if "mlp.linear" in fqn)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_bound_after_the_norm(tmp_path: Path, data: Path, optimizer: str) -> None:
    """The norm is that of a run without bounds; what the optimizer takes is not larger than the threshold."""
    theta, clip = 1e-4, 0.5
    options = {**OPTIMIZERS[optimizer], "training__steps": 1, "deepspeed__gradient_clipping": clip}
    hook = {**ABSOLUTE, "theta": theta, "where": "after_norm"}
    _ok(_train(tmp_path, data, "plain", 2, **options))
    _ok(_train(tmp_path, data, "bounded", 2, **options, optimizer_hooks=[hook]))
    assert _losses(tmp_path, "bounded") == _losses(tmp_path, "plain")
    first_moments = {name: _first_moments(tmp_path, name) for name in ("plain", "bounded")}
    limit = (1 - 0.9) * theta * (1 + 1e-6)
    assert float(first_moments["plain"].abs().max()) > limit
    assert float(first_moments["bounded"].abs().max()) <= limit
    within = first_moments["plain"].abs() < (1 - 0.9) * theta * 0.999
    assert torch.equal(first_moments["plain"][within], first_moments["bounded"][within])
    (told,) = events_of(tmp_path / "bounded", "bounds", "statistics")[-1:]
    assert told["where"] == "after_norm" and any(row["share"] > 0 for row in told["submodules"])


def _first_moments(folder: Path, name: str) -> torch.Tensor:
    files = sorted((folder / name / "checkpoints" / "step_00000001").glob("*optim_states.pt"))
    states = [torch.load(file, map_location="cpu", weights_only=False)["optimizer_state_dict"] for file in files]
    moments = [one["exp_avg"] for state in states for one in state["base_optimizer_state"]["state"].values()]
    return torch.cat([moment.flatten() for moment in moments])
