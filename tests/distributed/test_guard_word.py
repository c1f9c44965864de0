"""Does one word protect a training that is not megasdc's own, as far as its engine allows, and change no bit of it?"""

from __future__ import annotations

import contextlib
import hashlib
import io
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_distributed
from torch import nn

import megasdc
from megasdc.attached import attach as attached
from megasdc.attached.batch_replayer import BatchReplayer
from megasdc.common.errors import ConfigError
from megasdc.events import read_events
from megasdc.sdc.incident import load_incidents
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
OFTEN = {"audit": {"interval": 2}, "sdc": {"budget": 1.0}}
"""So often that all checks look in a few steps."""


def _digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(name.encode() + value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _settings(folder: str, name: str) -> dict[str, Any]:
    return {"logging": {"run_dir": f"{folder}/{name}"}, **OFTEN}


def _with_and_without(folder: str) -> list[bool]:
    """Body of a rank: whether losses, weights and generators at the end are alike, with and without the word."""
    found = []
    for name, zero, precision in (("0", 0, "fp32"), ("1", 1, "fp32"), ("2", 2, "bf16"), ("pipeline", 1, "fp32")):
        ends = []
        for word in (None, "standard", "strict")[: 2 + (name == "1")]:
            config = deepspeed_config(zero, precision)
            engine = pipeline_engine(config, 1) if name == "pipeline" else llama_engine(config, attention_dropout=0.1)
            torch.manual_seed(5 + dist.get_rank())
            guard = megasdc.attach(engine, _settings(folder, name + word), protect=word) if word else None
            losses = train(engine, STEPS, dist.get_rank())
            if guard is not None:
                guard.close()
                assert guard.audits == 3
            ends.append((losses, _digest(engine.module), torch.rand(1).item()))
            engine.destroy()
        found += [one == ends[0] for one in ends[1:]]
    return found


@pytest.mark.parametrize("ranks", [2, 1])
def test_no_bit_of_a_protected_training_changes(tmp_path: Path, ranks: int) -> None:
    """With dropout, ZeRO 0 to 2 and a pipeline, though it is audited and each step is looked at; what an engine or the
    number of replicas forbids is told with what it would need.
    """
    assert run_distributed(_with_and_without, ranks, str(tmp_path)) == [[True] * 5] * ranks
    looks = {"sums of rows", "slices of the optimizer", "NaN and Inf", "audits every 2 steps"}
    compared = {"parameters of all replicas"} if ranks == 2 else {"audits of each device with itself"}
    for name, more in (("0", looks - {"slices of the optimizer"}), ("1", looks), ("2", looks), ("pipeline", looks)):
        folder = tmp_path / f"{name}standard"
        ((attach_event,), (start,)) = (
            list(read_events(folder, kind=kind, name=one))
            for kind, one in (("guard", "attached"), ("start", "protection"))
        )
        assert {*attach_event.fields["checks"]} - {"ranks that are slow"} == more | compared
        covered, cost, gaps, own = start.fields["lines"]
        assert start.fields["word"] == "standard" and "NaN and Inf in each step" in covered
        assert ("with ZeRO 0" in gaps or "ZeRO 0, where no rank owns a shard" in gaps) == (name == "0")
        assert ("there is one, which is compared with itself" in gaps) == (ranks == 1)
        assert f"{3 - ranks} micro-batch" in cost and "audit.interval 2 (preset: 100)" in own
        assert not list(read_events(folder, kind="guard", name="not_audited")), "nothing is asked for in vain"
        assert not (folder / "reports").exists()


def _with_fault(folder: str, word: str, fault: str) -> int:
    """Body of a rank: train with a fault on rank 1; the exit code."""
    planted = Planted(1, "lm_head", "forward", TRANSIENT) if fault == "transient" and dist.get_rank() == 1 else None
    engine = llama_engine(deepspeed_config(1, "fp32"), planted)
    guard = megasdc.attach(engine, _settings(folder, word + fault), protect=word)
    try:
        train(engine, 2, guard.dims.dp_rank)
        if fault == "parameter" and guard.dims.rank == 1:
            engine.module.model.layers[0].mlp.up_proj.weight.data[3, 5] += 1e-3
        train(engine, 2, guard.dims.dp_rank)
        return 0
    except SystemExit as error:
        return int(str(error.code))
    finally:
        guard.close()


def test_a_fault_is_found_and_named_and_strict_always_ends(tmp_path: Path) -> None:
    """A weight that one rank has otherwise ends both; what an audit finds once ends a strict training alone."""
    cases = [("standard", "parameter", 73), ("standard", "transient", 0), ("strict", "transient", 73)]
    for word, fault, code in cases:
        assert run_distributed(_with_fault, 3, str(tmp_path), word, fault) == [code] * 3
        ((_, incident),) = load_incidents(tmp_path / (word + fault) / "reports", [])
        assert [one.rank for one in incident.flagged] == [1]
        assert incident.done == ("halted" if code else "committed")


def _two_guards(folder: str) -> tuple[str, str]:
    """Body of a rank: the guard that `megasdc run` attaches, and then the program's own; what it says at the end."""
    engine = llama_engine(deepspeed_config(1, "fp32"))
    first = attached.attach(engine, _settings(folder, "run"), protect="standard", gives_way=True)
    second = megasdc.attach(engine, _settings(folder, "own"))
    train(engine, 2, dist.get_rank())
    second.close()
    first.close()
    left = {*vars(engine)} & {"_take_model_step", "save_checkpoint", "load_checkpoint"}
    names = [one.name for name in ("run", "own") for one in read_events(Path(folder, name), kind="guard")]
    return ",".join(names), ",".join(left)


def test_a_guard_of_the_programs_own_takes_the_place_of_the_one_of_a_run(tmp_path: Path) -> None:
    """Nothing of the first is left, and it tells of no end."""
    assert run_distributed(_two_guards, 1, str(tmp_path)) == [("attached,not_audited,attached,closed", "")]


def _reentrant(folder: str) -> list[Any]:
    """Body of a rank: end of a training that cannot be computed beside itself, by word; or the error."""
    found: list[Any] = []
    for word in (None, "standard", "strict"):
        engine = llama_engine(deepspeed_config(1, "fp32"), attention_dropout=0.1)
        engine.module.gradient_checkpointing_enable({"use_reentrant": True})
        torch.manual_seed(5 + dist.get_rank())
        settings = {"logging": {"run_dir": f"{folder}/{word}"}}
        guard = megasdc.attach(engine, settings, protect=word) if word else None
        try:
            found.append((train(engine, STEPS, dist.get_rank()), _digest(engine.module), torch.rand(1).item()))
        except ConfigError as error:
            found.append(str(error))
        if guard is not None:
            guard.close()
        engine.destroy()
    return found


def test_a_model_that_cannot_be_audited_is_protected_by_the_rest(tmp_path: Path) -> None:
    """With `standard`, which says so; a strict training ends. No bit changes."""
    for plain, standard, strict in run_distributed(_reentrant, 2, str(tmp_path)):
        assert standard == plain and "use_reentrant=False" in strict
    (told,) = read_events(tmp_path / "standard", kind="guard", name="not_audited")
    assert told.step == 1 and "use_reentrant=False" in told.fields["reason"]
    assert not (tmp_path / "standard" / "reports").exists()


def _trainer(folder: str, word: str | None, planted: Planted | None = None) -> tuple[Any, str]:
    """Losses, weights and generator of a ``Trainer`` after some steps, or its exit code; and what it has printed."""
    fault = planted if planted is not None and planted.rank == dist.get_rank() else None
    trainer = llama_trainer(deepspeed_config(1, "fp32"), fault, folder, STEPS, attention_dropout=0.1)
    losses, compute = list[float](), trainer.training_step

    def noting(*args: Any, **options: Any) -> Any:
        losses.append((loss := compute(*args, **options)).item())
        return loss

    trainer.training_step = noting
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        guard = megasdc.attach(trainer, _settings(folder, "guard"), protect=word) if word else None
        try:
            trainer.train()
            end: Any = losses, _digest(trainer.model), torch.rand(1).item()
        except SystemExit as error:
            end = int(str(error.code))
        if guard is not None:
            guard.close()
    return end, printed.getvalue()


def _trainers(folder: str) -> list[tuple[Any, str]]:
    """Body of a rank: without a word, with it, and with a rank that is wrong."""
    wrong = Planted(1, "model.layers.1.mlp.up_proj", "forward", PERSISTENT)
    plain, word = _trainer(f"{folder}/plain", None), _trainer(f"{folder}/word", "standard")
    return [plain, word, _trainer(f"{folder}/wrong", "standard", wrong)]


def test_a_trainer_of_hugging_face_is_protected_by_the_word(tmp_path: Path) -> None:
    """No bit of it changes, the lines of the start are printed on one rank, and a wrong rank is named and ends all."""
    (first, second) = run_distributed(_trainers, 2, str(tmp_path))
    for plain, protected, wrong in (first, second):
        assert len(plain[0][0]) == 2 * STEPS and protected[0] == plain[0] and wrong[0] == 73
    for what in ("attached after step 0 to ", *(f"standard, {one}: " for one in ("covered", "cost", "not covered"))):
        assert what in first[1][1] and what not in second[1][1]
    (closed,) = read_events(tmp_path / "word" / "guard", kind="guard", name="closed")
    assert closed.fields == {"steps": STEPS, "audits": 3, "agreed": 3, "findings": 0}
    ((_, incident),) = load_incidents(tmp_path / "wrong" / "guard" / "reports", [])
    assert ([one.rank for one in incident.flagged], incident.done) == ([1], "halted")


def _thinned(folder: str) -> int:
    """Body of a rank: audits, which take a second longer on one rank, in 13 steps."""
    compute = BatchReplayer.compute

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(dist.get_rank())
        return compute(*args, **options)

    settings = {"logging": {"run_dir": folder}, "audit": {"interval": 1, "longest_interval": 8}, "sdc": {"budget": 0.3}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchReplayer, "compute", slow)
        engine = llama_engine(deepspeed_config(1, "fp32"))
        with contextlib.closing(megasdc.attach(engine, settings, protect="standard")) as guard:
            train(engine, 13, dist.get_rank())
    return guard.audits


def test_audits_come_more_rarely_while_they_take_too_much(tmp_path: Path) -> None:
    """At the start every 4, since one is half of a step at least; every 8 once it was measured on the slowest rank."""
    assert run_distributed(_thinned, 2, str(tmp_path)) == [3, 3], "steps 1, 4 and 8"
    (told,) = read_events(tmp_path, kind="sdc", name="audit_interval")
    assert told.fields["interval"] == 8 and told.fields["cost"] > 0.6 and 4 < told.step < 8
    assert (
        "audits every 1 to 8 steps" in next(iter(read_events(tmp_path, kind="guard", name="attached"))).fields["checks"]
    )
