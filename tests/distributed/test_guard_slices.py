"""Does a guard find wrong sums of gradients, states and updates of an optimizer, and leave healthy ones as they are?"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_distributed
from torch import nn

import megasdc
from megasdc.common.errors import ConfigError
from megasdc.events import read_events
from megasdc.optim.zero1 import is_bf16_optimizer, master_partitions
from megasdc.sdc.incident import load_incidents
from tools.trainings.engines import deepspeed_config, llama_engine, pipeline_engine, train

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

WHOLE = 1_000_000
BF16 = {"data_types": {"grad_accum_dtype": "fp32"}}
LAYOUTS: dict[str, tuple[int, str, dict[str, Any], int]] = {
    "zero1": (1, "fp32", {}, 1),
    "zero2": (2, "fp32", {"gradient_accumulation_steps": 3}, 1),
    "zero2_bf16": (2, "bf16", {"zero_optimization": {"stage": 2, "overlap_comm": True}}, 1),
    "bf16": (1, "bf16", BF16, 1),
    "pipeline": (1, "fp32", {}, 2),
}
"""ZeRO stage, precision, more of DeepSpeed's keys, and pipeline stages."""


def _engine(layout: str) -> Any:
    zero, precision, more, stages = LAYOUTS[layout]
    config = deepspeed_config(zero, precision, more)
    return llama_engine(config) if stages == 1 else pipeline_engine(config, stages)


def _settings(folder: str, size: int = WHOLE, **sdc: Any) -> dict[str, Any]:
    always_on = {"enabled": True, "parameters": False, "slice_elements": size}
    return {
        "logging": {"run_dir": folder},
        "audit": {"enabled": False},
        "sdc": {"always_on": always_on, "budget": 1.0, **sdc},
    }


def _digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(name.encode() + value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _trained(folder: str, layout: str, steps: int, size: int | None, fault: str = "", rank: int = 1) -> tuple[int, str]:
    """Body of a rank: train, without a guard where there is no size; exit code, and digest of the parameters."""
    engine = _engine(layout)
    if fault and dist.get_rank() == rank:
        FAULTS[fault](engine)
    guard = None if size is None else megasdc.attach(engine, _settings(folder, size))
    try:
        train(engine, steps, engine.data_parallel_group.rank())
        code = 0
    except SystemExit as error:
        code = int(str(error.code))
    if guard is not None:
        guard.close()
        own = {"reduce_independent_p_g_buckets_and_remove_grads", "buffered_allreduce_fallback"}
        assert not own & (vars(engine).keys() | vars(engine.optimizer).keys())
    return code, _digest(engine.module)


AT = 3
"""Step of a fault."""


def _in_step(engine: Any) -> bool:
    return bool(engine.global_steps + 1 == AT)


def _in_sum(engine: Any) -> None:
    """The sum over replicas is a tenth too large on this rank."""
    bf16 = is_bf16_optimizer(engine.optimizer)
    owner, name = (engine, "allreduce_bucket") if bf16 else (engine.optimizer, "average_tensor")
    add = getattr(owner, name)

    def wrong(tensor: Any, *args: Any, **options: Any) -> Any:
        found = add(tensor, *args, **options)
        if _in_step(engine):
            (found if bf16 else tensor).mul_(1.1)
        return found

    setattr(owner, name, wrong)


def _in_moment(engine: Any) -> None:
    """A moment changes between two steps."""
    step, inner = engine.step, engine.optimizer.optimizer

    def changed(*args: Any, **options: Any) -> Any:
        if _in_step(engine) and engine.is_gradient_accumulation_boundary():
            inner.state[master_partitions(engine.optimizer)[0]]["exp_avg"][5] += 1e-3
        return step(*args, **options)

    engine.step = changed


def _in_update(engine: Any) -> None:
    """A master gets another update."""
    inner = engine.optimizer.optimizer

    def changed(*_: Any) -> None:
        if _in_step(engine):
            master_partitions(engine.optimizer)[0].data[7] += 1e-4

    inner.register_step_post_hook(changed)


def _in_clipping(engine: Any) -> None:
    """An element of the gradient changes while it is clipped."""
    inner = engine.optimizer.optimizer

    def changed(*_: Any) -> None:
        if _in_step(engine):
            master_partitions(engine.optimizer)[0].grad[7] += 1e-2

    inner.register_step_pre_hook(changed)


FAULTS: dict[str, Callable[[Any], None]] = {
    "reduction": _in_sum,
    "state": _in_moment,
    "update": _in_update,
    "clipping": _in_clipping,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_healthy_training_is_the_one_without_a_guard(tmp_path: Path, layout: str) -> None:
    """Same bits and nothing found, with slices so small that all elements need several steps."""
    ranks, found = 2 * LAYOUTS[layout][3], []
    for name, size in (("plain", None), ("guarded", 700)):
        found.append(run_distributed(_trained, ranks, str(tmp_path / name), layout, 6, size))
    assert found[0] == found[1] and {code for code, _ in found[1]} == {0}
    assert not (tmp_path / "guarded" / "reports").exists()
    (told,) = read_events(tmp_path / "guarded", kind="start", name="slices")
    assert told.fields["period"] > 1 and not list(read_events(tmp_path / "guarded", kind="sdc"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_element_is_found_in_its_step(tmp_path: Path, layout: str, fault: str) -> None:
    """What was wrong once in a shard names its rank and is put right; a wrong sum ends the training."""
    if fault == "state" and layout == "pipeline":
        pytest.skip("a pipeline's engine has no step of its own")
    ranks = 2 * LAYOUTS[layout][3]
    found = run_distributed(_trained, ranks, str(tmp_path / "wrong"), layout, 4, WHOLE, fault)
    ((_, incident),) = load_incidents(tmp_path / "wrong" / "reports", [])
    tier = {"clipping": "update"}.get(fault, fault)
    assert (incident.step, incident.tier) == (AT, tier)
    if fault == "reduction":
        assert {code for code, _ in found} == {73}
        assert (incident.verdict, incident.done) == ("inconclusive", "halted")
        assert 1 in [one.rank for one in incident.suspects]
    else:
        assert (incident.verdict, incident.done) == ("not_reproduced", "repaired")
        assert [one.rank for one in incident.flagged] == [1]
        assert found == run_distributed(_trained, ranks, str(tmp_path / "right"), layout, 4, WHOLE)


def _nan(folder: str) -> tuple[int, bool, list[str]]:
    """Body of a rank: a reduced gradient is NaN on rank 1; exit code, whether parameters changed by it, and the log."""
    engine, told = _engine("zero1"), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megasdc").addHandler(handler)
    megasdc.attach(engine, _settings(folder))
    train(engine, AT - 1, dist.get_rank())
    before, step = _digest(engine.module), engine.step

    def spoiled(*args: Any, **options: Any) -> Any:
        if dist.get_rank() == 1 and engine.is_gradient_accumulation_boundary():
            engine.optimizer.averaged_gradients[0][0].view(-1)[3] = torch.nan
        return step(*args, **options)

    engine.step = spoiled
    with pytest.raises(SystemExit) as caught:
        train(engine, 1, dist.get_rank())
    return int(str(caught.value.code)), _digest(engine.module) != before, told


def test_nan_of_a_sum_ends_a_training_whose_step_was_skipped(tmp_path: Path) -> None:
    """The replicas' gradients were finite, so that the sum is wrong; nobody says that the step was taken."""
    found = run_distributed(_nan, 2, str(tmp_path))
    assert [(code, changed) for code, changed, _ in found] == [(73, False)] * 2
    ((_, incident),) = load_incidents(tmp_path / "reports", [])
    assert (incident.tier, incident.done) == ("reduction", "halted")
    assert incident.script is not None and incident.script.fate == "skipped"
    first, *_, last = found[0][2]
    assert first.startswith(f"step {AT}: not reproduced: NaN or Inf in the reduced gradients of rank 1; ")
    ends = "the optimizer has skipped the step, which has changed no parameter: go on from a checkpoint before it"
    assert last.endswith(f"; {ends}")


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_found_in_many_clean_steps(tmp_path: Path, layout: str) -> None:
    """Whatever slice is due, with and without clipping."""
    ranks = 3 * LAYOUTS[layout][3]
    found = run_distributed(_trained, ranks, str(tmp_path), layout, 200, 2000, timeout_s=600.0)
    assert {code for code, _ in found} == {0} and not (tmp_path / "reports").exists()


def _refused(folder: str, more: dict[str, Any], zero: int, torch_adam: bool) -> str:
    """Body of a rank: attach where slices cannot be checked; the error."""
    config = deepspeed_config(zero, "fp32", more)
    config["optimizer"]["params"]["torch_adam"] = torch_adam
    if not torch_adam:
        config["optimizer"] = {"type": "SGD", "params": {"lr": 1e-3}}
        config["zero_allow_untested_optimizer"] = True
    with pytest.raises(ConfigError) as caught:
        megasdc.attach(llama_engine(config), _settings(folder))
    return str(caught.value)


@pytest.mark.parametrize(
    ("more", "zero", "torch_adam", "named"),
    [
        ({}, 0, True, "with ZeRO 0, where no rank owns a shard"),
        ({}, 1, False, "with the optimizer torch.optim.sgd.SGD"),
        ({"zero_optimization": {"stage": 2, "round_robin_gradients": True}}, 2, True, "round_robin_gradients"),
    ],
    ids=["zero0", "sgd", "round_robin"],
)
def test_what_cannot_be_checked_is_refused(
    tmp_path: Path, more: dict[str, Any], zero: int, torch_adam: bool, named: str
) -> None:
    """By name, with what can."""
    for error in run_distributed(_refused, 2, str(tmp_path), more, zero, torch_adam):
        assert "sdc.always_on.slice_elements: got 1000000" in error and named in error


def _resumed(folder: str) -> int:
    """Body of a rank: go back to an earlier checkpoint, then train on; exit code."""
    engine = _engine("zero1")
    guard = megasdc.attach(engine, _settings(folder))
    train(engine, 2, dist.get_rank())
    engine.save_checkpoint(f"{folder}/saved")
    train(engine, 2, dist.get_rank())
    engine.load_checkpoint(f"{folder}/saved")
    train(engine, 2, dist.get_rank())
    guard.close()
    return int(engine.global_steps)


def test_state_that_was_loaded_is_not_called_wrong(tmp_path: Path) -> None:
    """It is not what the last step left, and is checked from its first step on."""
    assert run_distributed(_resumed, 2, str(tmp_path)) == [4, 4]
    assert not (tmp_path / "reports").exists()


def test_the_table_says_what_is_covered(tmp_path: Path) -> None:
    """Sums, updates and settings where slices are checked, and by name what a guard cannot look at."""
    run_distributed(_trained, 2, str(tmp_path), "zero1", 1, 2000)
    (told,) = read_events(tmp_path, kind="start", name="coverage")
    rows = {line.split("  ")[0]: line for line in told.fields["table"]}
    assert "a slice added again" in rows["reduced_grad"] and "a slice updated again" in rows["update"]
    assert "a slice clipped again" in rows["clipping"] and "replicas" in rows["settings"]
    never = next(line for line in told.fields["table"] if line.startswith("Never compared"))
    assert all(name in never for name in ("place", "tokens", "forward", "norm", "copy"))
