"""Does a guard name what is wrong in trainings that are not megasdc's own, and leave healthy ones as they are?"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_distributed
from torch import nn

import megasdc
from megasdc.attached import audit
from megasdc.common.errors import ConfigError, StorageError
from megasdc.common.origin import read_identity
from megasdc.events import read_events
from megasdc.ops.run_folder.summary import summarize_run
from megasdc.sdc.incident import load_incidents
from megasdc.sdc.trace import read_folder
from tools.trainings.engines import (
    PERSISTENT,
    TRANSIENT,
    Planted,
    deepspeed_config,
    llama_engine,
    llama_trainer,
    pipeline_engine,
    train,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
STEPS = 4


def _settings(folder: Path | str, **sections: Any) -> dict[str, Any]:
    return {"logging": {"run_dir": str(folder)}, "audit": {"interval": 2}, **sections}


def _engine(zero: int = 1, precision: str = "fp32", planted: Planted | None = None, **fields: Any) -> Any:
    here = planted if planted is not None and planted.rank == dist.get_rank() else None
    return llama_engine(deepspeed_config(zero, precision), here, **fields)


def _digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(name.encode() + value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


# --- what it finds ----------------------------------------------------------------------------------------------------


def _guarded(folder: str, zero: int, planted: Planted, stages: int = 1) -> tuple[int, int]:
    """Body of a rank: train with a guard; the exit code, and how many audits were made."""
    here = planted if planted.rank == dist.get_rank() else None
    config = deepspeed_config(zero, "fp32")
    engine = llama_engine(config, here) if stages == 1 else pipeline_engine(config, stages, here)
    guard = megasdc.attach(engine, _settings(folder))
    try:
        train(engine, STEPS, guard.dims.dp_rank)
        code = 0
    except SystemExit as error:
        code = int(str(error.code))
    guard.close()
    return code, guard.audits


@pytest.mark.parametrize(
    ("zero", "stages", "planted"),
    [
        (1, 1, Planted(1, "model.layers.1.mlp.up_proj", "forward", PERSISTENT)),
        (2, 1, Planted(2, "model.layers.0.self_attn.v_proj", "weight_grad", PERSISTENT)),
        (1, 2, Planted(4, "6", "backward", PERSISTENT)),
    ],
    ids=["zero1", "zero2", "pipeline"],
)
def test_a_wrong_rank_is_named_and_ends_the_training(tmp_path: Path, zero: int, stages: int, planted: Planted) -> None:
    """With rank, submodule and direction, by exit code 73 on all ranks and a report; the step is not taken."""
    found = run_distributed(_guarded, 3 * stages, str(tmp_path), zero, planted, stages)
    assert found == [(73, 1)] * 3 * stages
    ((page, incident),) = load_incidents(tmp_path / "reports", [])
    (flagged,) = incident.flagged
    assert (flagged.rank, flagged.first.fqn, flagged.first.phase) == (planted.rank, planted.submodule, planted.phase)
    assert (incident.step, incident.verdict, incident.done) == (1, "persistent", "halted")
    starts = {(one.run, one.attempt) for one in read_events(tmp_path)}
    assert starts == {(read_identity(tmp_path).run, 1)} and incident.attempt == 1, (
        "by which reports know the last start"
    )
    text = page.read_text()
    assert "deepspeed --hostfile HOSTFILE" in text and "megasdc stress" in text and "pretrain_gpt" not in text


def _guarded_on_unlike_hardware(folder: str) -> tuple[int, int]:
    """Body of a rank: as ``_guarded``, with rank 1 on a processor that computes otherwise than rank 0's."""
    key = audit.machine_key
    audit.machine_key = lambda: {**key(), "device": f"processor {dist.get_rank()}"}
    try:
        return _guarded(folder, 1, Planted(1, "model.layers.1.mlp.up_proj", "forward", PERSISTENT))
    finally:
        audit.machine_key = key


def test_replicas_on_unlike_hardware_accuse_nobody(tmp_path: Path) -> None:
    """Their results differ with nobody being wrong: nothing is compared or verified, and the run says so."""
    codes = run_distributed(_guarded_on_unlike_hardware, 2, str(tmp_path))
    assert codes == [(0, 3)] * 2
    (unlike,) = read_events(tmp_path, kind="sdc", name="not_comparable")
    assert (unlike.fields["positions"], unlike.fields["differing"]) == (1, ["device"])
    assert len(list(read_events(tmp_path, kind="sdc", name="audit_void"))) == 3
    assert not (tmp_path / "reports").exists() and not list(read_events(tmp_path, kind="audit", name="agreed"))


def test_wrong_parameters_are_of_their_rank(tmp_path: Path) -> None:
    """Not of what it computes with them; of two replicas nobody is named."""
    for ranks, named in ((3, [1]), (2, [])):
        folder = tmp_path / str(ranks)
        assert run_distributed(_with_wrong_weight, ranks, str(folder)) == [73] * ranks
        ((_, incident),) = load_incidents(folder / "reports", [])
        assert (incident.tier, [one.rank for one in incident.flagged]) == ("parameters", named)
        first = incident.suspects[0].first
        assert (first.fqn, first.slot, first.phase) == ("model.layers.0.mlp.up_proj", "weight", "parameter")


def _with_wrong_weight(folder: str, **settings: Any) -> int:
    """Body of a rank: train, and change a weight of rank 1 after the second step; the exit code."""
    engine = _engine(0)
    guard = megasdc.attach(engine, _settings(folder, **{"audit": {"interval": 3}, **settings}))
    train(engine, 2, guard.dims.dp_rank)
    if guard.dims.rank == 1:
        engine.module.model.layers[0].mlp.up_proj.weight.data[3, 5] += 1e-3
    with pytest.raises(SystemExit) as caught:
        train(engine, 1, guard.dims.dp_rank)
    guard.close()
    return int(str(caught.value.code))


def test_parameters_are_compared_in_each_step(tmp_path: Path) -> None:
    """A weight that is wrong between two audits ends the next step, and its rank is named; right ones end nothing."""
    always_on, seldom = {"always_on": {"enabled": True}}, {"interval": 100}
    wrong = run_distributed(_with_wrong_weight, 3, str(tmp_path / "wrong"), audit=seldom, sdc=always_on)
    assert wrong == [73] * 3
    ((_, incident),) = load_incidents(tmp_path / "wrong" / "reports", [])
    assert (incident.tier, incident.step, [one.rank for one in incident.flagged]) == ("parameters", 3, [1])
    (ended,) = read_events(tmp_path / "wrong", kind="end", name="failed")
    assert ended.fields["message"].startswith("the check of step 3 found silent data corruption: rank 1")
    for zero in (0, 1, 2):
        codes = run_distributed(_clean, 2, str(tmp_path / str(zero)), zero, 4, audit=seldom, sdc=always_on)
        assert codes == [1] * 2, "one audit, and no end"
        assert not (tmp_path / str(zero) / "reports").exists()


def test_one_replica_is_told_that_nothing_is_compared(tmp_path: Path) -> None:
    """Neither by audits nor in each step; both say so."""
    assert run_distributed(_clean, 1, str(tmp_path), 1, 1, sdc={"always_on": {"enabled": True}}) == [0]
    reasons = [one.fields["reason"] for one in read_events(tmp_path, kind="guard", name="not_audited")]
    assert len(reasons) == 2 and "audit.permuted" in reasons[0] and "sdc.always_on.parameters" in reasons[1]


@pytest.mark.full
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_no_parameter_differs_in_many_clean_steps(tmp_path: Path, zero: int) -> None:
    """The check of each step finds nothing where nothing is wrong."""
    settings = {"audit": {"interval": 100}, "sdc": {"always_on": {"enabled": True}}}
    audits = run_distributed(_clean, 3, str(tmp_path), zero, 200, **settings, timeout_s=600.0)
    assert audits == [3] * 3, "before steps 1, 100 and 200"
    assert not (tmp_path / "reports").exists()


def _clean(folder: str, zero: int, steps: int, **settings: Any) -> int:
    """Body of a rank: train; the number of audits."""
    engine = _engine(zero)
    guard = megasdc.attach(engine, _settings(folder, **settings))
    train(engine, steps, guard.dims.dp_rank)
    guard.close()
    return guard.audits


def test_what_was_wrong_once_ends_nothing(tmp_path: Path) -> None:
    """It is reported; the audits after it agree."""
    planted = Planted(0, "lm_head", "forward", TRANSIENT)
    assert run_distributed(_guarded, 3, str(tmp_path), 1, planted) == [(0, 3)] * 3
    ((_, incident),) = load_incidents(tmp_path / "reports", [])
    assert (incident.verdict, incident.done) == ("not_reproduced", "committed")
    assert [one.step for one in read_events(tmp_path, kind="audit", name="agreed")] == [2, 4]


def _with_checkpoints(folder: str) -> int:
    """Body of a rank: audits before steps 1, 3 and 6, saves after steps 1, 3 and 4, a wrong weight before step 6."""
    engine = _engine(1)
    alerts = {"alert_command": ["dd", f"of={folder}/alert"]}
    guard = megasdc.attach(engine, _settings(folder, audit={"interval": 3}, health=alerts))
    own = engine.save_checkpoint
    for steps, tag in ((1, None), (2, "third"), (1, None)):
        train(engine, steps, guard.dims.dp_rank)
        own(f"{folder}/saved", tag)
    train(engine, 1, guard.dims.dp_rank)
    if guard.dims.rank == 0:
        engine.module.lm_head.weight.data[0, 0] += 1.0
    with pytest.raises(SystemExit) as caught:
        train(engine, 1, guard.dims.dp_rank)
    guard.close()
    assert "save_checkpoint" not in vars(engine)
    return int(str(caught.value.code))


def test_checkpoints_before_an_agreement_are_marked(tmp_path: Path) -> None:
    """And no other; the report, which the alert gets, says from which to go on."""
    assert run_distributed(_with_checkpoints, 3, str(tmp_path)) == [73] * 3
    marked = {path.parent.name for path in (tmp_path / "saved").glob("*/megasdc_verified.json")}
    assert marked == {"global_step1"}
    ((page, incident),) = load_incidents(tmp_path / "reports", [])
    assert (incident.step, [one.rank for one in incident.flagged]) == (6, [0])
    saved = tmp_path / "saved"
    found = incident.verified_checkpoint, incident.newest_candidate
    assert found == (str(saved / "global_step1"), str(saved / "global_step4"))
    assert f"Go on from {saved / 'global_step1'}" in page.read_text()
    assert (tmp_path / "alert").read_text() == page.with_suffix(".json").read_text()
    assert [one.step for one in read_events(tmp_path, kind="verify", name="checkpoint")] == [1]
    assert summarize_run(tmp_path).checkpoints == [
        str(saved / tag) for tag in ("global_step1", "third", "global_step4")
    ]


def _resumed(folder: str) -> list[Any]:
    """Body of a rank: guards of engines that go on from checkpoints, and back; what is marked after each."""
    saved, found = Path(folder) / "saved", list[Any]()

    def note(guard: Any) -> None:
        dist.barrier()
        marked = sorted(path.parent.name for path in saved.glob("*/megasdc_verified.json"))
        found.append((marked, *(one and one.name for one in (guard._saves.verified, guard._saves.candidate))))
        dist.barrier()

    first = _engine(1)
    with contextlib.closing(megasdc.attach(first, _settings(folder))):
        train(first, 2, dist.get_rank())
        first.save_checkpoint(str(saved))  # no audit follows: the process ends
    engine = _engine(1)
    guard = megasdc.attach(engine, _settings(folder, audit={"interval": 3}))
    engine.load_checkpoint(str(saved), load_module_only=True)
    train(engine, 1, dist.get_rank())
    note(guard)  # weights alone: not this checkpoint
    engine.load_checkpoint(str(saved))
    assert engine.load_checkpoint(str(saved / "nothing")) == (None, None)
    train(engine, 2, dist.get_rank())
    note(guard)
    engine.save_checkpoint(str(saved), "of_another_line")
    engine.load_checkpoint(str(saved), "global_step2")
    train(engine, 4, dist.get_rank())
    note(guard)
    engine.save_checkpoint(str(saved), "global_step2")  # in the place of what is verified
    note(guard)
    guard.close()
    engine.save_checkpoint(str(saved), "unguarded")
    for tells in (False, True):
        later = _engine(1)
        later.load_checkpoint(str(saved), "unguarded")
        guard = megasdc.attach(later, _settings(folder))
        if tells:
            guard.loaded(saved / "unguarded")
        train(later, 1, dist.get_rank())
        note(guard)
        guard.close()
    assert not {"save_checkpoint", "load_checkpoint"} & set(vars(engine))
    return found


def test_a_checkpoint_that_is_gone_on_from_is_marked(tmp_path: Path) -> None:
    """By an audit after it was loaded, if these ranks have saved it; not one of which weights alone were loaded."""
    step2, unguarded = "global_step2", "unguarded"
    wanted = [([], None, None), *[([step2], step2, None)] * 2, ([], None, step2), ([], None, None)]
    assert run_distributed(_resumed, 2, str(tmp_path)) == [[*wanted, ([], None, unguarded)]] * 2
    later, unknown = (event.fields for event in read_events(tmp_path, kind="guard", name="not_marked"))
    assert "before the guard was attached" in later["reason"] and later["path"] is None
    assert "without a guard" in unknown["reason"] and unknown["path"].endswith(unguarded)


def _gone_on(folder: str, host: str, again: str | None = None) -> None:
    """Body of a rank on a host of this name: save with a guard; then go on from what another start has saved."""
    socket.gethostname = lambda: host
    saved, engine = f"{folder}/saved", _engine()
    with contextlib.closing(megasdc.attach(engine, _settings(folder, audit={"interval": 1}))):
        if again is None:
            for tag in ("one", "two", "three"):
                engine.save_checkpoint(saved, tag)
        else:
            engine.load_checkpoint(saved, again)
            train(engine, 1, dist.get_rank())


def test_what_others_have_saved_is_not_marked(tmp_path: Path) -> None:
    """After a load all replicas have the same weights: that they agree says nothing of who has made them."""
    run_distributed(_gone_on, 2, str(tmp_path), "a")
    run_distributed(_gone_on, 2, str(tmp_path), "b", "one")
    shard = next((tmp_path / "saved" / "two").glob("*zero_pp_rank_1*"))
    shard.write_bytes(shard.read_bytes())  # as a training without a guard does that saves over it
    for tag in ("two", "three"):
        run_distributed(_gone_on, 2, str(tmp_path), "a", tag)
    told = [event.fields for event in read_events(tmp_path, kind="guard", name="not_marked")]
    assert [Path(one["path"]).name for one in told] == ["one", "two"]
    assert "saved with a, of which no rank" in told[0]["reason"] and "was replaced" in told[1]["reason"]
    assert [path.parent.name for path in tmp_path.rglob("megasdc_verified.json")] == ["three"]


def _failed(folder: str) -> list[str]:
    """Body of a rank: audits before steps 1 and 3; the latter ends with an error, and training goes back to step 1."""
    engine = _engine(1)
    with contextlib.closing(megasdc.attach(engine, _settings(folder, audit={"interval": 3}))) as guard:
        train(engine, 1, dist.get_rank())
        engine.save_checkpoint(f"{folder}/saved")
        train(engine, 1, dist.get_rank())
        with pytest.MonkeyPatch.context() as patch, pytest.raises(TypeError):
            patch.setattr(engine.optimizer, "step", None)
            train(engine, 1, dist.get_rank())
        assert guard.audits == 2
        engine.load_checkpoint(f"{folder}/saved")
        train(engine, 1, dist.get_rank())
        assert guard.audits == 2
    dist.barrier()
    return [path.parent.name for path in Path(folder).rglob("megasdc_verified.json")]


def test_an_audit_of_a_step_that_was_not_taken_marks_nothing(tmp_path: Path) -> None:
    """It was of weights that the training has gone back from."""
    assert run_distributed(_failed, 2, str(tmp_path)) == [[]] * 2


def _trainer_resumed(folder: str) -> list[str]:
    """Body of a rank: a Trainer that saves and goes on; the marked folders."""
    for resume in (None, True):
        trainer = llama_trainer(deepspeed_config(1, "fp32"), None, folder, 4 if resume else 2)
        trainer.args.save_strategy = "no" if resume else "steps"
        trainer.args.save_steps = 2
        guard = megasdc.attach(trainer, _settings(folder, audit={"interval": 3}))
        trainer.train(resume_from_checkpoint=resume)
        guard.close()
    assert "train" not in vars(trainer)
    dist.barrier()
    return [str(path.parent.relative_to(folder)) for path in Path(folder).rglob("megasdc_verified.json")]


def test_a_checkpoint_that_a_trainer_goes_on_from_is_marked(tmp_path: Path) -> None:
    """It is loaded before any callback is called."""
    assert run_distributed(_trainer_resumed, 2, str(tmp_path)) == [["checkpoint-2/global_step2"]] * 2


# --- what it records --------------------------------------------------------------------------------------------------


def _traced(folder: str, planted: Planted | None, stages: int) -> list[float]:
    """Body of a rank: train with a trace of each second step, audits beside it; the losses."""
    here = planted if planted is not None and planted.rank == dist.get_rank() else None
    config = deepspeed_config(1, "fp32")
    if stages > 1:
        engine = pipeline_engine(config, stages, here)
    else:
        engine = llama_engine(config, here)
        engine.module.gradient_checkpointing_enable({"use_reentrant": False})
    policy = {"policy": dict.fromkeys(("persistent", "inconclusive"), "warn")}
    guard = megasdc.attach(engine, _settings(folder, trace={"enabled": True, "interval": 2}, sdc=policy))
    losses = train(engine, STEPS, guard.dims.dp_rank)
    guard.close()
    return losses


@pytest.mark.parametrize(
    ("stages", "planted"),
    [
        (1, Planted(1, "model.layers.0.mlp.up_proj", "backward", PERSISTENT)),
        (2, Planted(2, "6", "forward", PERSISTENT)),
    ],
    ids=["llama", "pipeline"],
)
def test_traces_of_two_trainings_are_compared(tmp_path: Path, stages: int, planted: Planted) -> None:
    """Equal ones agree in every result; of a wrong rank the first result is told, in its micro-batch and direction."""
    for name, fault in (("one", None), ("again", None), ("wrong", planted)):
        run_distributed(_traced, 2 * stages, str(tmp_path / name), fault, stages)
    same, different = (_compared(tmp_path, name) for name in ("again", "wrong"))
    assert (same.returncode, different.returncode) == (0, 1), same.stdout + same.stderr
    said = " ".join(different.stdout.split())
    assert f"step 1, micro-batch 0, {planted.phase} of {planted.submodule} (" in said
    found = read_folder(tmp_path / "one" / "trace")
    steps = {address.step for _, trace in found.values() for address in trace.addresses}
    assert steps == {1, 3}
    phases = {address.phase for address in found[0][1].addresses}
    assert phases == {"forward", "backward", "weight_grad", "parameter"} | ({"recompute"} if stages == 1 else set())


def _compared(folder: Path, name: str) -> subprocess.CompletedProcess[str]:
    tool = Path(__file__).parents[2] / "tools" / "compare_traces.py"
    command = [sys.executable, str(tool), str(folder / "one"), str(folder / name)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


# --- what it bounds ---------------------------------------------------------------------------------------------------

THETA, ABSOLUTE, LARGEST = 2.0, 0.02, 0.1
BOUNDS = [
    {"hook": "spike_aware", "theta": THETA, "grace_steps": 0},
    {"hook": "absolute", "theta": ABSOLUTE, "parameters": ["*.mlp.*"]},
]


def _gathered(folder: str, zero: int, precision: dict[str, Any]) -> list[dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Body of a rank: of each step masters and gradients of the whole model before bounds, by DeepSpeed's own tool."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    from megasdc.attached.bounds import GuardBounds

    seen = []
    original = GuardBounds.before_step

    def gather(self: Any, step: int) -> Any:
        named = engine.module.named_parameters()
        seen.append(
            {name: (safe_get_full_fp32_param(one).clone(), safe_get_full_grad(one).clone()) for name, one in named}
        )
        return original(self, step)

    GuardBounds.before_step = gather  # type: ignore[method-assign]
    config = deepspeed_config(zero, "fp32", {"gradient_clipping": LARGEST, **precision})
    engine = llama_engine(config)
    guard = megasdc.attach(engine, _settings(folder, optimizer_hooks=BOUNDS, audit={"enabled": False}))
    train(engine, 5, guard.dims.dp_rank)
    guard.close()
    assert not {"scaled_global_norm", "has_overflow", "step"} & vars(engine.optimizer).keys()
    return seen


@pytest.mark.parametrize(
    ("zero", "precision"),
    [(2, {}), (1, {}), (1, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}})],
    ids=["zero2", "zero1", "bf16"],
)
def test_bounds_of_shards_are_those_of_whole_tensors(tmp_path: Path, zero: int, precision: dict[str, Any]) -> None:
    """Gathered over three ranks, bounded, clipped and stepped in float64 by torch's AdamW, masters are the run's."""
    steps = run_distributed(_gathered, 3, str(tmp_path), zero, precision)[0]
    weights = {name: master.double().requires_grad_() for name, (master, _) in steps[0].items()}
    inner = torch.optim.AdamW(weights.values(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    bounded, clips = 0, list[float]()
    for place, found in enumerate(steps):
        for name, (master, gradient) in found.items():
            apart = (weights[name].detach() - master.double()).norm()
            assert float(apart) <= 1e-6 * float(master.norm()), (place, name)
            exact = gradient.double()
            limit = torch.full_like(exact, ABSOLUTE if ".mlp." in name else torch.inf)
            if place:
                weights_of_v = [0.999 ** (place - 1 - earlier) for earlier in range(place)]
                unclip = sum(weights_of_v) / sum(w * c**2 for w, c in zip(weights_of_v, clips, strict=True))
                moment = inner.state[weights[name]]["exp_avg_sq"] * unclip
                limit = limit.minimum((THETA * moment.clamp(min=1e-16 * unclip)).sqrt())
            weights[name].grad = exact.clamp(-limit, limit)
            bounded += int((exact.abs() > limit).sum())
        norm = float(torch.cat([one.grad.flatten() for one in weights.values() if one.grad is not None]).norm())
        clips.append(min(1.0, LARGEST / (norm + 1e-6)))
        for one in weights.values():
            assert one.grad is not None
            one.grad *= clips[-1]
        inner.step()
    assert bounded > 1000 and min(clips) < 0.9


def _with_nan(folder: str) -> list[int]:
    """Body of a rank: train with NaN in a gradient of rank 0 in one step; exit code and skipped steps, by policy."""
    codes = []
    for policy in ("skip_step", "halt"):
        engine = _engine(2)
        if dist.get_rank() == 0:
            weight, times = engine.module.model.layers[0].mlp.up_proj.weight, iter(range(100))
            weight.register_hook(lambda one, times=times: one * float("nan") if next(times) == 2 else one)
        hooks = [{"hook": "absolute", "theta": 1.0, "non_finite": policy}]
        guard = megasdc.attach(engine, _settings(folder, optimizer_hooks=hooks, audit={"enabled": False}))
        try:
            train(engine, 3, dist.get_rank())
            codes.append(0)
        except SystemExit as error:
            codes.append(int(str(error.code)))
        guard.close()
        assert all(bool(one.isfinite().all()) for one in engine.module.parameters())
        codes.append(engine.skipped_steps)
    return codes


def test_gradients_that_are_not_finite_skip_the_step_or_end_the_training(tmp_path: Path) -> None:
    """On all ranks alike, with the parameter and the rank of the shard; no weight takes them up."""
    assert run_distributed(_with_nan, 2, str(tmp_path)) == [[0, 1, 74, 0]] * 2
    (skip,) = read_events(tmp_path, kind="skip", name="optimizer_step")
    assert skip.step == 2 and "the gradient of model.layers.0.mlp.up_proj.weight has" in skip.fields["reason"]
    places = [event.fields for event in read_events(tmp_path, kind="bounds", name="non_finite")]
    assert {place["action"] for place in places} == {"skip_step", "halt"}
    assert {place["parameter"] for place in places} == {"model.layers.0.mlp.up_proj.weight"}


# --- what it leaves as it was -----------------------------------------------------------------------------------------


def _with_and_without(folder: str, permuted: bool) -> list[tuple[Any, ...]]:
    """Body of a rank: losses, weights and random state at the end, by training, without and with a guard."""
    found = []
    for zero, precision in ((0, "fp32"), (1, "fp32"), (2, "bf16"), (1, "pipeline")):
        ends = []
        for guarded in (False, True):
            if precision == "pipeline":
                engine = pipeline_engine(deepspeed_config(zero, "fp32"), 1, activation_checkpoint_interval=2)
            else:
                engine = _engine(zero, precision, attention_dropout=0.1)
                engine.module.gradient_checkpointing_enable({"use_reentrant": False})
            hooks = _hooks(engine.module)
            torch.manual_seed(5 + dist.get_rank())
            audit = {"interval": 2, "permuted": permuted}
            guard = megasdc.attach(engine, _settings(folder, audit=audit)) if guarded else None
            losses = train(engine, STEPS, dist.get_rank())
            if guard is not None:
                guard.close()
                guard.close()
                assert guard.audits == 3 and _hooks(engine.module) == hooks and "_take_model_step" not in vars(engine)
            drawn = torch.rand(1).item()
            ends.append(
                (losses, _digest(engine.module), drawn, {one.grad is None for one in engine.module.parameters()})
            )
            engine.destroy()
        found.append((ends[0] == ends[1], len(ends[0][0])))
    return found


def _hooks(model: nn.Module) -> int:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, name)) for module in model.modules() for name in names)


@pytest.mark.parametrize("permuted", [False, True])
def test_no_bit_of_a_healthy_training_changes(tmp_path: Path, permuted: bool) -> None:
    """Losses, weights and the generators after it are those without a guard: dropout, recomputation, ZeRO 0 to 2."""
    for of_rank in run_distributed(_with_and_without, 2, str(tmp_path), permuted):
        assert of_rank == [(True, 8), (True, 8), (True, 8), (True, 4)]
    assert not (tmp_path / "reports").exists()
    tried = list(read_events(tmp_path, kind="audit", name="permuted"))
    assert bool(tried) == permuted and {one.step for one in tried} <= {1, 2, 4}
    assert all(sum(one.fields["moved"].values()) > 10 for one in tried)
    (attached, *_) = read_events(tmp_path, kind="guard", name="attached")
    assert "model.layers.0.self_attn" in attached.fields["watched"]


class _Normed(nn.Module):
    """Batch normalisation, whose buffers are of each replica's own samples, and a residual that is added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm(self.first(x))
        out += x
        return self.last(out).square().mean()


@dataclass
class _Answer:
    values: torch.Tensor
    aside: torch.Tensor | None = None


class _Spectrum(nn.Module):
    """Complex results, without parameters."""

    def forward(self, x: torch.Tensor, *, scale: float | None = None) -> torch.Tensor:
        return torch.fft.rfft(x) * (1.0 if scale is None else scale)


class _Shared(nn.Module):
    """One submodule called twice, a frozen one, and no loss: an object of its own with several results."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.twice, self.spectrum = nn.Embedding(16, 8), nn.Linear(8, 8), _Spectrum()
        self.words.requires_grad_(False)
        self.drop = nn.Dropout(0.2)

    def forward(self, *, ids: torch.Tensor, mask: torch.Tensor | None = None) -> _Answer:
        x = self.drop(self.twice(torch.tanh(self.twice(self.words(ids)))))
        return _Answer(self.spectrum(x, scale=None).abs().sum(-1), aside=x.detach())


def _odd_models(folder: str, permuted: bool) -> list[bool]:
    """Body of a rank: whether weights and buffers are, bit for bit, those without a guard, by model."""
    import deepspeed

    alike = []
    for kind in (_Normed, _Shared):
        ends = []
        for guarded in (False, True):
            torch.manual_seed(3)
            model = kind()
            parameters = [one for one in model.parameters() if one.requires_grad]
            config = deepspeed_config(1, "fp32")
            engine = deepspeed.initialize(model=model, model_parameters=parameters, config=config)[0]
            settings = _settings(f"{folder}/{kind.__name__}", audit={"interval": 2, "permuted": permuted})
            guard = megasdc.attach(engine, settings) if guarded else None
            draw = torch.Generator().manual_seed(dist.get_rank())
            for _ in range(2 * STEPS):
                if kind is _Normed:
                    loss = engine(torch.randn(4, 8, generator=draw))
                else:
                    loss = engine(ids=torch.randint(0, 16, (4, 5), generator=draw)).values.mean()
                engine.backward(loss)
                engine.step()
            if guard is not None:
                guard.close()
            ends.append(_digest(engine.module))
            engine.destroy()
        alike.append(ends[0] == ends[1])
    return alike


@pytest.mark.parametrize("permuted", [False, True])
def test_odd_models_are_audited_and_left_as_they_are(tmp_path: Path, permuted: bool) -> None:
    """Buffers of a replica, in-place sums, complex results, frozen and shared submodules, results of any class."""
    assert run_distributed(_odd_models, 2, str(tmp_path), permuted) == [[True, True]] * 2
    for name in ("_Normed", "_Shared"):
        agreed = list(read_events(tmp_path / name, kind="audit", name="agreed"))
        assert [one.step for one in agreed] == [1, 2, 4] and all(one.fields["compared"] > 5 for one in agreed)


def _changed_meanwhile(folder: str) -> list[Any]:
    """Body of a rank: two guards, evaluations, one closed and attached again, a checkpoint loaded; audits of each."""
    one, other = _engine(), _engine()
    guard = megasdc.attach(one, _settings(f"{folder}/one", trace={"enabled": True, "interval": 2}))
    beside = megasdc.attach(other, _settings(f"{folder}/other", audit={"interval": 3}))
    train(one, 2, dist.get_rank())
    for _ in range(3):
        other.eval()
        with torch.no_grad():
            other(input_ids=torch.zeros(1, 4, dtype=torch.int64))
        other.train()
        train(other, 1, dist.get_rank())
    found: list[Any] = [guard.audits, beside.audits]
    guard.close()
    train(one, 2, dist.get_rank())
    one.save_checkpoint(f"{folder}/saved")
    guard = megasdc.attach(one, _settings(f"{folder}/one", trace={"enabled": True, "interval": 2}))
    train(one, 2, dist.get_rank())
    found.append(guard.audits)
    one.load_checkpoint(f"{folder}/saved")
    train(one, 2, dist.get_rank())
    found += [guard.audits, one.global_steps]
    guard.close()
    fresh = _engine()
    late = megasdc.attach(fresh, _settings(f"{folder}/late", audit={"interval": 50}))
    fresh.load_checkpoint(f"{folder}/saved")
    train(fresh, 1, dist.get_rank())
    found.append(late.audits)
    late.close()
    beside.close()
    return found


def test_a_training_may_evaluate_load_and_be_guarded_again(tmp_path: Path) -> None:
    """Audits are at the steps that the engine counts, and after a load the first is the next; a step of a trace that
    was recorded as another is left out.
    """
    assert run_distributed(_changed_meanwhile, 2, str(tmp_path)) == [[2, 2, 2, 4, 6, 1]] * 2
    agreed = [one.step for one in read_events(tmp_path / "one", kind="audit", name="agreed")]
    assert agreed == [1, 2, 5, 6, 5, 6]
    (left_out,) = read_events(tmp_path / "one", kind="trace", name="left_out")
    assert (left_out.step, left_out.fields["recorded_as"]) == (5, 7)
    assert [one.step for one in read_events(tmp_path / "other", kind="audit", name="agreed")] == [1, 3]
    for name, wanted in (("one", [(2, 2, 2, 2), (6, 4, 4, 4)]), ("other", [(3, 3, 2, 2)])):
        closed = list(read_events(tmp_path / name, kind="guard", name="closed"))
        names = ("steps", "audits", "agreed")
        assert [(one.step, *(one.fields[what] for what in names)) for one in closed] == wanted
        assert summarize_run(tmp_path / name).finished and {one.fields["findings"] for one in closed} == {0}


# --- what it refuses --------------------------------------------------------------------------------------------------


def _refusals(folder: str) -> list[str]:
    """Body of a rank: what is said of each mistake."""
    said = []

    def refused(kind: type[Exception], action: Any) -> None:
        with pytest.raises(kind) as caught:
            action()
        said.append(str(caught.value))

    good = _settings(folder)
    engine = _engine()
    refused(ConfigError, lambda: megasdc.attach(engine.module, good))
    refused(ConfigError, lambda: megasdc.attach(engine, {"audit": {"intervall": 3}}))
    refused(ConfigError, lambda: megasdc.attach(engine, {**good, "audit": {"submodules": ["*.up_prj"]}}))
    resets = [{"hook": "momentum_reset"}, {"hook": "absolute"}, {"hook": "absolute", "theta": 1.0, "where": "local"}]
    refused(ConfigError, lambda: megasdc.attach(engine, {**good, "optimizer_hooks": resets}))
    bound = {"hook": "absolute", "theta": 1.0, "parameters": ["*.down_prj.*"]}
    refused(ConfigError, lambda: megasdc.attach(engine, {**good, "optimizer_hooks": [bound]}))
    refused(
        ConfigError, lambda: megasdc.attach(_engine(0), {**good, "optimizer_hooks": [{**bound, "parameters": ["*"]}]})
    )
    blocked = Path(folder) / f"file_{dist.get_rank()}"
    blocked.write_text("")
    run_dir = str(blocked / "runs") if dist.get_rank() == 1 else folder
    refused(StorageError, lambda: megasdc.attach(engine, {"logging": {"run_dir": run_dir}}))
    guard = megasdc.attach(engine, good)
    refused(ConfigError, lambda: megasdc.attach(engine, good))
    engine.module.lm_head = nn.Linear(32, 64, bias=False)
    refused(ConfigError, lambda: train(engine, 1, 0))
    guard.close()
    engine = _engine()
    engine.module.gradient_checkpointing_enable({"use_reentrant": True})
    guard = megasdc.attach(engine, good)
    refused(ConfigError, lambda: train(engine, 1, 0))
    guard.close()
    engine = _engine()
    head, compute = engine.module.lm_head, engine.module.lm_head.forward

    def halved(given: torch.Tensor) -> torch.Tensor:
        head.weight.data.mul_(0.5)
        return compute(given)  # type: ignore[no-any-return]

    head.forward = halved
    guard = megasdc.attach(engine, good)
    refused(ConfigError, lambda: train(engine, 1, 0))
    guard.close()
    engine = _engine()
    guard = megasdc.attach(engine, good)
    refused(ConfigError, engine.compile)
    engine.module.compile(backend="eager")
    refused(ConfigError, lambda: train(engine, 1, 0))
    guard.close()
    assert "compile" not in vars(engine)
    engine = _engine()
    engine.module.model.layers[0].mlp.compile()
    refused(ConfigError, lambda: megasdc.attach(engine, good))
    refused(ConfigError, lambda: megasdc.attach(llama_engine(deepspeed_config(3, "fp32")), good))
    trainer = llama_trainer(deepspeed_config(3, "fp32"), None, folder, 1)
    trainer.args.torch_compile = True
    refused(ConfigError, lambda: megasdc.attach(trainer, {**good, "audit": {"submodules": ["*.up_prj", "*.layers"]}}))
    trainer.is_deepspeed_enabled = False
    refused(ConfigError, lambda: megasdc.attach(trainer, good))
    return said


def test_what_cannot_be_guarded_says_why(tmp_path: Path) -> None:
    """All ranks say the same: the place, the value and what helps."""
    (tmp_path / "run").mkdir()
    wanted = [
        ("engine: got transformers", "needed: what deepspeed.initialize returns first", "cannot be guarded yet"),
        ("audit.intervall: unknown key", "did you mean audit.interval?", "logging: missing"),
        ("audit.submodules.0: got '*.up_prj'", "nearest: "),
        ("0.hook: got 'momentum_reset'", "1.theta: missing", "2.where: got 'local'; allowed here: before_norm"),
        ("optimizer_hooks.0.parameters.0: got '*.down_prj.*', which matches no parameter",),
        ("got bounds with ZeRO 0",),
        ("logging.run_dir", "rank 1"),
        ("engine: it has a guard already",),
        ("submodule lm_head of its model was added, removed or replaced",),
        ("reentrant", "use_reentrant=False"),
        ("writes into its parameter lm_head.weight",),
        *[("its model is compiled",)] * 3,
        ("zero_optimization.stage: got 3", "0 to 2"),
        (
            "TrainingArguments.torch_compile: got True; allowed: False",
            "zero_optimization.stage: got 3",
            "audit.submodules.0: got '*.up_prj'",
            "audit.submodules.1: got '*.layers', which matches no submodule that computes something",
        ),
        ("alone or by DistributedDataParallel or FSDP, which cannot be guarded yet",),
    ]
    for said in run_distributed(_refusals, 2, str(tmp_path / "run")):
        assert len(said) == len(wanted)
        for text, parts in zip(said, wanted, strict=True):
            assert all(part in text for part in parts), text
