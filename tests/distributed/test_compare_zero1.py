"""Are checkpoints of DeepSpeed's plain engine with ZeRO-1 and 2 read as DeepSpeed itself reads them, and harm found?"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_distributed
from safetensors.torch import save_file
from torch import Tensor, nn

from megasdc.checkpoint.views import View
from megasdc.common.errors import CheckpointError
from megasdc.lab.checkpoints.checkpoints import CheckpointMismatch, compare_checkpoints
from megasdc.lab.checkpoints.views.open import open_view

pytestmark = pytest.mark.distributed

WHOLE = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
VARIANTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "fp32": ("DeepSpeedZeroOptimizer", 2, {}),
    "one_group": ("DeepSpeedZeroOptimizer", 1, {}),
    "whole": ("BF16_Optimizer", 2, WHOLE),
    "summed": ("DeepSpeedZeroOptimizer", 1, {"bf16": {"enabled": True}}),
    "zero2": ("DeepSpeedZeroOptimizer", 1, {"zero_optimization": {"stage": 2}}),
    "zero3": ("DeepSpeedZeroOptimizer_Stage3", 1, {"zero_optimization": {"stage": 3}}),
}
"""DeepSpeed's optimizer, groups of parameters, and settings."""
READ = [name for name in VARIANTS if name != "zero3"]
STEP = "global_step3"


class Net(nn.Module):
    """Sizes that no number of ranks divides; a tied, a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.inner = nn.Linear(7, 5)
        self.norm = nn.LayerNorm(5)
        self.back = nn.Linear(5, 7)
        self.output = nn.Linear(7, 11, bias=False)
        self.output.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.arange(5.0), requires_grad=False)
        self.register_buffer("offset", torch.linspace(0, 1, 5))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.inner(self.embedding(tokens)))
        return self.output(self.back(hidden * self.scale.to(hidden.dtype) + self.offset.to(hidden.dtype)))


def _engine(variant: str, micro_batch: int) -> Any:
    import deepspeed

    torch.manual_seed(1)
    net = Net()
    trained = [one for one in net.parameters() if one.requires_grad]
    groups = [[one for one in trained if one.ndim > 1], [one for one in trained if one.ndim == 1]]
    groups = groups if VARIANTS[variant][1] == 2 else [trained]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
        **VARIANTS[variant][2],
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    assert type(engine.optimizer).__name__ == VARIANTS[variant][0]
    torch.manual_seed(5 + torch.distributed.get_rank())
    for _ in range(3):
        tokens = torch.randint(0, 11, (micro_batch, 4))
        loss = nn.functional.cross_entropy(engine(tokens).float().view(-1, 11), tokens.view(-1))
        engine.backward(loss)
        engine.step()
    return engine


def _train(folder: str) -> dict[str, dict[tuple[str, str], Tensor]]:
    """Train and save each variant; what DeepSpeed says of its parameters while they are in memory."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    told: dict[str, dict[tuple[str, str], Tensor]] = {}
    for variant in VARIANTS:
        engine = _engine(variant, 2)
        client = {"note": "three", "generator": torch.get_rng_state()}
        engine.save_checkpoint(f"{folder}/{variant}", client_state=client)
        if variant == "zero3":
            continue
        found: dict[tuple[str, str], Tensor] = {}
        if VARIANTS[variant][1] == 2 and variant != "whole":
            engine.optimizer._hp_optimizer_states_linked = False  # 0.19.8 links states of the first group alone
            engine.optimizer._lazy_init_hp_params_optimizer_state()
        for name, one in engine.module.named_parameters():
            found[name, "weight"] = one.detach().clone()
            if one.requires_grad:
                found[name, "master"] = safe_get_full_fp32_param(one)
                for slot in ("exp_avg", "exp_avg_sq"):
                    found[name, slot] = safe_get_full_optimizer_state(one, slot)
        told[variant] = {key: tensor.clone() for key, tensor in found.items()}
    return told


def _save_alone(folder: str, told: dict[str, dict[tuple[str, str], Tensor]]) -> None:
    """The state that two ranks had, saved by one rank."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    for variant in ("one_group", "whole", "summed"):
        engine = _engine(variant, 4)
        for name, one in engine.module.named_parameters():
            one.data.copy_(told[variant][name, "weight"])
            if one.requires_grad:
                safe_set_full_fp32_param(one, told[variant][name, "master"])
                for slot in ("exp_avg", "exp_avg_sq"):
                    safe_set_full_optimizer_state(one, told[variant][name, slot], slot)
        engine.save_checkpoint(f"{folder}/{variant}_alone", client_state={"note": "three"})


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[tuple[str, str], Tensor]]]:
    """The folder of all checkpoints, and what DeepSpeed said of each."""
    folder = tmp_path_factory.mktemp("zero")
    found = run_distributed(_train, 2, str(folder))[0]
    run_distributed(_save_alone, 1, str(folder), found)
    return folder, found


@pytest.fixture(scope="module")
def made(told: tuple[Path, Any]) -> Path:
    """The folder of all checkpoints."""
    return told[0]


@pytest.mark.parametrize("variant", READ)
def test_tensors_are_those_of_deepspeed(told: tuple[Path, Any], variant: str) -> None:
    """Weights, master weights and moments are bit for bit what the engine held, of every parameter."""
    view = open_view(told[0] / variant / STEP)
    found = told[1][variant]
    assert len(found) == 7 * 4 + 1
    for (name, slot), wanted in found.items():
        got = view.entries[name, slot].copies[0].read()  # type: ignore[index]
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted), (name, slot)
    assert set(view.entries) - set(found) == {("output.weight", "weight"), ("offset", "weight")}
    assert view.scalars["rank 00001/group 0/step"].value == "3.0"
    assert view.scalars["client/note"].value == "'three'"


@pytest.mark.parametrize("variant", ["fp32", "one_group", "summed", "zero2"])
def test_master_weights_are_those_of_zero_to_fp32(made: Path, variant: str) -> None:
    """Equal to the tool that DeepSpeed puts into every checkpoint, which cannot read those of ``BF16_Optimizer``."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    wanted = get_fp32_state_dict_from_zero_checkpoint(str(made / variant))
    view = open_view(made / variant / STEP)
    names = {name for name, slot in view.entries if slot == "master"}
    assert len(names) == 7
    for name in names:
        assert torch.equal(view.entries[name, "master"].copies[0].read(), wanted[name]), name


@pytest.mark.parametrize("variant", ["one_group", "whole", "summed"])
def test_equal_state_of_another_number_of_ranks_is_equal(made: Path, variant: str) -> None:
    """What two ranks and one rank saved of one state is compared in all slots and counters, and equal."""
    views = [open_view(made / one / STEP) for one in (variant, f"{variant}_alone")]
    assert [view.layout for view in views] == ["TP1 x PP1 x DP2", "TP1 x PP1 x DP1"]
    report = compare_checkpoints(views)
    assert report.findings == report.problems == []
    assert report.num_compared >= 10 + 7 * 3 + 6


def test_a_gathered_file_is_equal(made: Path, tmp_path: Path) -> None:
    """What DeepSpeed gathers into one file of safetensors has the same names and bits."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    gathered = get_fp32_state_dict_from_zero_checkpoint(str(made / "fp32"))
    save_file({name: tensor.clone() for name, tensor in gathered.items()}, tmp_path / "model.safetensors")
    report = compare_checkpoints([open_view(made / "fp32" / STEP), open_view(tmp_path / "model.safetensors")])
    assert {one.fqn for one in report.findings} <= {"scale"}  # frozen: not in what is gathered
    assert report.num_compared >= 9


def _copy(made: Path, variant: str, folder: Path) -> Path:
    return Path(shutil.copytree(made / variant / STEP, folder / STEP))


def _harmed(made: Path, variant: str, folder: Path, name: str, *keys: Any, at: int, mask: int) -> Path:
    """A copy in which bits of one element of a tensor in a file are flipped."""
    copy = _copy(made, variant, folder)
    state = torch.load(copy / name, weights_only=False)
    tensor = state
    for key in keys:
        tensor = tensor[key]
    bits = tensor.detach().view(-1).view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
    bits[at] ^= mask
    torch.save(state, copy / name)
    return copy


def _one(good: View, harmed: Path) -> CheckpointMismatch:
    (found,) = compare_checkpoints([good, open_view(harmed)]).findings
    return found


SHARD = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
OPTIMIZER = ("optimizer_state_dict", "base_optimizer_state", "state", 0)


def test_a_flip_is_found_in_its_rank(made: Path, tmp_path: Path) -> None:
    """Tensor, index and owner, where a parameter lies in the files of two ranks; both optimizers of DeepSpeed."""
    for variant, prefix, slot, keys in (
        ("one_group", "", "exp_avg", (*OPTIMIZER, "exp_avg")),
        ("whole", "bf16_", "exp_avg_sq", (*OPTIMIZER, "exp_avg_sq")),
        ("summed", "bf16_", "master", ("optimizer_state_dict", "single_partition_of_fp32_groups", 0)),
    ):
        maps = torch.load(made / variant / STEP / f"{prefix}{SHARD}", weights_only=False)["optimizer_state_dict"]
        name, place = next((k, v) for k, v in maps["param_slice_mappings"][0].items() if k == "back.weight")
        harmed = _harmed(made, variant, tmp_path / variant, f"{prefix}{SHARD}", *keys, at=place.start + 3, mask=1 << 20)
        found = _one(open_view(made / variant / STEP), harmed)
        assert (found.fqn, found.slot, found.pattern, found.detail) == (name, slot, "bit", "bit 20")
        (piece,) = found.pieces
        assert (piece.piece.owner.rank, piece.piece.file.name) == (1, f"{prefix}{SHARD}")
        place_in_tensor = (35 - place.numel) + 3
        assert piece.first == [place_in_tensor // 5, place_in_tensor % 5]


def test_a_flip_in_a_weight_is_found(made: Path, tmp_path: Path) -> None:
    """In the file of the model, of the rank that writes it; the tied name is found too, since it is the same."""
    name = "mp_rank_00_model_states.pt"
    good = open_view(made / "whole" / STEP)
    found = _one(good, _harmed(made, "whole", tmp_path, name, "module", "inner.weight", at=9, mask=1 << 3))
    assert (found.fqn, found.slot, found.detail) == ("inner.weight", "weight", "bit 3")
    assert found.measure is not None
    assert (found.measure.first, found.pieces[0].piece.owner.rank) == ([1, 2], 0)
    tied = _harmed(made, "whole", tmp_path / "tied", name, "module", "embedding.weight", at=0, mask=1)
    report = compare_checkpoints([good, open_view(tied)])
    assert {one.fqn for one in report.findings} == {"embedding.weight", "output.weight"}


def test_files_of_other_ranks_are_told(made: Path, tmp_path: Path) -> None:
    """Exchanged files of two ranks are said to hold each other's shards."""
    copy = _copy(made, "one_group", tmp_path)
    one, other = (copy / SHARD.replace("rank_1", f"rank_{rank}", 1) for rank in range(2))
    one.rename(copy / "spare")
    other.rename(one)
    (copy / "spare").rename(other)
    found = compare_checkpoints([open_view(made / "one_group" / STEP), open_view(copy)]).findings
    assert {one.pattern for one in found} <= {"swapped", "shape"}
    assert any("holds the shard of dp rank 1" in one.detail for one in found)
    assert {piece.piece.owner.rank for one in found for piece in one.pieces} == {0, 1}


def test_counters_and_what_the_run_added_are_compared(made: Path, tmp_path: Path) -> None:
    """A step count of one rank and a generator in ``client_state`` that differ are named with their file."""
    copy = _copy(made, "one_group", tmp_path)
    state = torch.load(copy / SHARD, weights_only=False)
    state["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"] += 1
    torch.save(state, copy / SHARD)
    state = torch.load(copy / "mp_rank_00_model_states.pt", weights_only=False)
    state["generator"][7] ^= 1
    torch.save(state, copy / "mp_rank_00_model_states.pt")
    found = compare_checkpoints([open_view(made / "one_group" / STEP), open_view(copy)]).findings
    assert {one.fqn: one.pieces[0].piece.file.name for one in found} == {
        "rank 00001/group 0/step": SHARD,
        "client/generator": "mp_rank_00_model_states.pt",
    }
    assert {one.pattern for one in found} == {"scalar"}


def test_a_rank_that_is_not_there_is_missing(made: Path, tmp_path: Path) -> None:
    """A file of a rank that was not copied is a difference in all that it held, with its name and rank."""
    copy = _copy(made, "one_group", tmp_path)
    (copy / SHARD).unlink()
    found = compare_checkpoints([open_view(made / "one_group" / STEP), open_view(copy)]).findings
    assert {one.pattern for one in found} == {"missing"}
    assert {one.slot for one in found} == {"master", "exp_avg", "exp_avg_sq", "scalar"}
    assert {(piece.piece.file.name, piece.piece.owner.rank) for one in found for piece in one.pieces} == {(SHARD, 1)}


class _Executes:
    def __reduce__(self) -> Any:
        return (os.mkdir, (self.target,))

    def __init__(self, target: str) -> None:
        self.target = target


@pytest.mark.parametrize("name", [SHARD, "mp_rank_00_model_states.pt"])
def test_no_code_runs(made: Path, tmp_path: Path, name: str) -> None:
    """A pickle that would act is refused by name: that of a rank is not compared, that of the model not opened."""
    copy = _copy(made, "one_group", tmp_path)
    torch.save({"optimizer_state_dict": _Executes(str(tmp_path / "acted"))}, copy / name)
    views = [open_view(made / "one_group" / STEP)]
    if name == SHARD:
        problems = compare_checkpoints([*views, open_view(copy)]).problems
    else:
        with pytest.raises(CheckpointError) as refused:
            open_view(copy)
        problems = [str(refused.value)]
    assert len(problems) == 1
    assert name in problems[0]
    assert "would run code when loaded" in problems[0]
    assert not (tmp_path / "acted").exists()


def test_what_is_not_known_is_refused(made: Path, tmp_path: Path) -> None:
    """The folder above, ZeRO-3, model-parallel ranks, a pipeline, no optimizer, another order: each says why."""
    with pytest.raises(CheckpointError, match="latest names"):
        open_view(made / "fp32")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        open_view(made / "zero3" / STEP)
    model = "mp_rank_00_model_states.pt"
    for number, (key, value, why) in enumerate(
        (("mp_world_size", 2, "2 model-parallel ranks"), ("module", None, r"no manifest\.json"))
    ):
        copy = _copy(made, "fp32", tmp_path / str(number))
        torch.save(torch.load(copy / model, weights_only=False) | {key: value}, copy / model)
        with pytest.raises(CheckpointError, match=why):
            open_view(copy)
    copy = _copy(made, "one_group", tmp_path / "moved")
    state = torch.load(copy / SHARD, weights_only=False)
    next(iter(state["optimizer_state_dict"]["param_slice_mappings"][0].values())).start += 2
    torch.save(state, copy / SHARD)
    with pytest.raises(CheckpointError, match="parameters elsewhere than ZeRO-1 lays them"):
        open_view(copy)
    for file in copy.glob("*optim_states.pt"):
        file.unlink()
    with pytest.raises(CheckpointError, match="saved without ZeRO"):
        open_view(copy)
