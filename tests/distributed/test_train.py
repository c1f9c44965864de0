"""Is a run repeatable, does it go on bit for bit after every kind of end, and does bad input end it well?"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from harness import run_distributed
from small_disk import small_disk
from whole_runs import MODELS, events_of, metrics_of, prepare_text, pretrain_rank, state_of, train_run, write_config

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, data: Path) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """The end of a run on two ranks that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    _ok(train_run(write_config(folder / "whole.json", data, folder / "run"), 2))
    return _final(folder / "run")


def _final(run_dir: Path, step: int = 6) -> tuple[dict[str, str], list[dict[str, Any]]]:
    return state_of(run_dir / "checkpoints" / f"step_{step:08d}"), metrics_of(run_dir)


def _ok(results: list[Any]) -> None:
    assert [code for code, _ in results if code] == [], results


def test_the_same_config_gives_the_same_run(tmp_path: Path, data: Path, whole: Any) -> None:
    """Two runs of one config agree in every tensor, counter, loss, rate and norm."""
    _ok(train_run(write_config(tmp_path / "again.json", data, tmp_path / "again"), 2))
    assert _final(tmp_path / "again") == whole
    assert len(whole[1]) >= 6


DEEPSPEED_ADAM = {"deepspeed__optimizer__params__torch_adam": False}
OFFLOADED = {"deepspeed__zero_optimization__offload_optimizer": {"device": "cpu"}}
RESUMES = [
    ("1x1x2_dropout", 1, 1, 2, "gpt", {"model__hidden_dropout": 0.1, "model__attention_dropout": 0.1}),
    ("1x2x1", 1, 2, 1, "gpt", {}),
    ("1x3x1", 1, 3, 1, "gpt", {"model__num_layers": 3}),
    ("2x1x1_bf16", 2, 1, 1, "llama", {"deepspeed__bf16": {"enabled": True}}),
    ("2x2x2_bf16_dropout", 2, 2, 2, "gpt", {"deepspeed__bf16": {"enabled": True}, "model__hidden_dropout": 0.1}),
    pytest.param("2x1x2_adam_offloaded", 2, 1, 2, "gpt", OFFLOADED, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("name", "tensor", "pipeline", "replicas", "model", "changes"), RESUMES, ids=str)
def test_resume_is_bit_identical(
    tmp_path: Path,
    data: Path,
    name: str,
    tensor: int,
    pipeline: int,
    replicas: int,
    model: str,
    changes: dict[str, Any],
) -> None:
    """A run that stopped at step 3 and went on equals one that never stopped; without dropout, see the next tests."""
    world = tensor * pipeline * replicas
    common = {"model": dict(MODELS[model]), "parallel__tensor": tensor, "parallel__pipeline": pipeline, **changes}
    whole = write_config(tmp_path / "whole.json", data, tmp_path / "whole", **common)
    parts = write_config(tmp_path / "parts.json", data, tmp_path / "parts", **common)
    _ok(train_run(whole, world))
    _ok(train_run(parts, world, "megasdc.training.stop_step=3"))
    _ok(train_run(parts, world, "megasdc.checkpoint.resume=must"))
    assert _final(tmp_path / "parts") == _final(tmp_path / "whole")
    assert {event["step"] for event in events_of(tmp_path / "parts", "resume", "checkpoint")} == {3}


@pytest.mark.full
def test_every_adam_takes_the_same_steps(tmp_path: Path, data: Path) -> None:
    """PyTorch's AdamW, DeepSpeed's for the device and its CPU Adam on offloaded states, to the rounding of fp32.

    The last goes on bit for bit after a stop. The first use of each compiles it, for longer than a minute.
    """
    losses = {}
    for name, changes in {"torch": {}, "fused": DEEPSPEED_ADAM, "cpu": {**DEEPSPEED_ADAM, **OFFLOADED}}.items():
        config = write_config(tmp_path / f"{name}.json", data, tmp_path / name, **changes)
        _ok(train_run(config, 2, timeout_s=500))
        losses[name] = [row["train/loss"] for row in metrics_of(tmp_path / name) if "train/loss" in row]
    assert len(losses["torch"]) == 6
    assert losses["fused"] == pytest.approx(losses["torch"], rel=1e-5)
    assert losses["cpu"] == pytest.approx(losses["torch"], rel=1e-5)
    parts = write_config(tmp_path / "parts.json", data, tmp_path / "parts", **DEEPSPEED_ADAM, **OFFLOADED)
    _ok(train_run(parts, 2, "megasdc.training.stop_step=3"))
    _ok(train_run(parts, 2, "megasdc.checkpoint.resume=must"))
    assert _final(tmp_path / "parts") == _final(tmp_path / "cpu")


def test_hook_states_go_on(tmp_path: Path, data: Path) -> None:
    """A log interval that spans a stop is reported as if there had been none."""
    options = {"logging__interval": 4, "checkpoint__interval": 3}
    whole = write_config(tmp_path / "whole.json", data, tmp_path / "whole", **options)
    parts = write_config(tmp_path / "parts.json", data, tmp_path / "parts", **options)
    _ok(train_run(whole, 2))
    _ok(train_run(parts, 2, "megasdc.training.stop_step=5"))
    last = tmp_path / "parts" / "checkpoints" / "step_00000005"
    last.rename(tmp_path / "elsewhere")
    _ok(train_run(parts, 2))
    assert metrics_of(tmp_path / "parts") == metrics_of(tmp_path / "whole")


def test_metrics_of_another_run_are_set_aside(tmp_path: Path, data: Path) -> None:
    """Without a checkpoint to go on from, the metrics found are renamed, told, and not mixed with the new ones."""
    config = write_config(tmp_path / "a.json", data, tmp_path / "a")
    _ok(train_run(config, 1))
    before = (tmp_path / "a" / "metrics.jsonl").read_text()
    _ok(train_run(config, 1, f"megasdc.checkpoint.folder={tmp_path / 'other'}"))
    (kept,) = (tmp_path / "a").glob("metrics.until_*.jsonl")
    assert kept.read_text() == before
    assert events_of(tmp_path / "a", "start", "metrics_set_aside")


def _pretrain_then_die(config: str, rank: int, step: int, moment: str) -> tuple[int, str | None]:
    """Train, and kill one rank with SIGKILL: inside a step, or inside the save after it."""
    if int(os.environ["RANK"]) == rank:
        if moment == "step":
            from megasdc.engine.engine import TrainingEngine

            original = TrainingEngine._run_reduce_grads

            def die_in_step(self: Any) -> None:
                if self.step_number == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                original(self)

            TrainingEngine._INSTRUCTION_MAP = {
                kind: die_in_step if function is original else function
                for kind, function in TrainingEngine._INSTRUCTION_MAP.items()
            }
        else:
            from megasdc.train import checkpointer

            save = checkpointer.save_checkpoint

            def die_in_save(engine: Any, folder: Path, at: int, *options: Any) -> Any:
                if at == step:
                    delay = float(moment.split("_")[1])
                    threading.Thread(target=lambda: (time.sleep(delay), os.kill(os.getpid(), signal.SIGKILL))).start()
                return save(engine, folder, at, *options)

            checkpointer.save_checkpoint = die_in_save
    return pretrain_rank(config, [])


@pytest.mark.parametrize(
    ("rank", "step", "moment"),
    [(0, 3, "step"), (1, 5, "step"), (0, 4, "save_0.0"), (1, 4, "save_0.003"), (0, 4, "save_0.02")],
)
def test_resume_after_kill_is_bit_identical(
    tmp_path: Path, data: Path, whole: Any, rank: int, step: int, moment: str
) -> None:
    """SIGKILL of a rank in a step or inside a save loses at most the steps since the last checkpoint."""
    parts = write_config(tmp_path / "parts.json", data, tmp_path / "parts", checkpoint__interval=2)
    run_distributed(
        _pretrain_then_die, 2, str(parts), rank, step, moment, init=False, expect_exit={rank: -9}, grace_s=5.0
    )
    _ok(train_run(parts, 2, "megasdc.checkpoint.resume=must"))
    assert _final(tmp_path / "parts") == whole


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, data: Path, whole: Any) -> None:
    """With one byte flipped in the newest checkpoint all ranks use the one before, say so, and end the same."""
    parts = write_config(tmp_path / "parts.json", data, tmp_path / "parts", checkpoint__interval=2)
    _ok(train_run(parts, 2, "megasdc.training.stop_step=4"))
    victim = sorted((tmp_path / "parts" / "checkpoints" / "step_00000004").glob("zero_pp_rank_1*optim_states.pt"))[0]
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    _ok(train_run(parts, 2))
    assert {event["step"] for event in events_of(tmp_path / "parts", "resume", "checkpoint")} == {2}
    skipped = [event for event in events_of(tmp_path / "parts", "skip", "checkpoint")]
    assert any(victim.name in json.dumps(event) for event in skipped), skipped
    assert _final(tmp_path / "parts") == whole


def _pretrain_with_sigterm(config: str, rank: int, step: int) -> tuple[int, str | None]:
    from megasdc.engine.engine import TrainingEngine

    if int(os.environ["RANK"]) == rank:
        original = TrainingEngine.train_step

        def signalled(self: Any, batches: Any) -> Any:
            if self.step_number == step:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(self, batches)

        TrainingEngine.train_step = signalled
    return pretrain_rank(config, [])


def test_sigterm_saves_and_ends_well(tmp_path: Path, data: Path) -> None:
    """SIGTERM to one rank ends all ranks after that step with a checkpoint and exit code 0."""
    config = write_config(tmp_path / "a.json", data, tmp_path / "a", checkpoint__interval=0)
    _ok(run_distributed(_pretrain_with_sigterm, 2, str(config), 1, 3, init=False))
    assert (tmp_path / "a" / "checkpoints" / "step_00000003").is_dir()
    assert {event["reason"] for event in events_of(tmp_path / "a", "stop", "requested")} == {"signal SIGTERM"}


def _stopped_while_the_last_save_waits(config: str) -> tuple[int, str | None]:
    from megasdc.train import checkpointer as saver

    saver.AGAIN_S = 0.5
    original = saver.Saver._wait_for_room

    def signalled(self: Any, run: Any, error: Exception | None) -> bool:
        assert run.is_last_step and not run.end.must_stop_soon
        is_over = original(self, run, error)
        if int(os.environ["RANK"]) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            saver.Saver._wait_for_room = original  # type: ignore[method-assign]
        return is_over

    if int(os.environ["RANK"]) == 1:
        saver.Saver._wait_for_room = signalled  # type: ignore[method-assign]
    return pretrain_rank(config, [])


def test_a_stop_signal_ends_the_wait_of_the_last_save_for_room(tmp_path: Path, data: Path) -> None:
    """To one rank, all end together with 77 and their reason; nobody waits for the rest of a quarter of an hour."""
    with small_disk(tmp_path / "disk", 300_000) as disk:
        config = write_config(tmp_path / "a.json", data, tmp_path / "a", checkpoint__folder=str(disk / "checkpoints"))
        ended = run_distributed(_stopped_while_the_last_save_waits, 2, str(config), init=False, timeout_s=60)
    assert [code for code, _ in ended] == [77, 77], ended
    assert all("step 6" in text for _, text in ended), ended


def _room_comes_back_late(config: str, disk: str, has_room: bool) -> tuple[int, str | None]:
    """Rank 0 fills the run's file system in its last step; there is room again when ranks would have given up."""
    from megasdc.common import durable
    from megasdc.train.stop import StopWatch

    ends, after_s = StopWatch.after_step, 2.5

    def fill(self: Any, run: Any, result: Any) -> None:
        ends(self, run, result)
        if run.step == run.steps and run.dims.rank == 0:
            path = f"{disk}/filler"
            with open(path, "wb", buffering=0) as filler, contextlib.suppress(OSError):
                while filler.write(bytes(4096)) == 4096:
                    pass
            if has_room:
                threading.Timer(after_s, lambda: os.truncate(path, 0)).start()

    durable.END_S, StopWatch.after_step = 0.5, fill  # type: ignore[method-assign]
    return pretrain_rank(config, [])


@pytest.mark.parametrize("has_room", [True, False])
def test_the_end_of_a_run_waits_for_room(tmp_path: Path, data: Path, has_room: bool) -> None:
    """Where its last checkpoint is elsewhere, too: no line is lost, or all ranks end with 77 once the limit is over."""
    with small_disk(tmp_path / "disk", 400_000) as disk:
        config = write_config(
            *(tmp_path / "a.json", data, disk / "a"),
            checkpoint__folder=str(tmp_path / "checkpoints"),
            logging__wait_for_room_s=60 if has_room else 2,
        )
        ended = run_distributed(_room_comes_back_late, 2, str(config), str(disk), has_room, init=False, timeout_s=90)
        assert [code for code, _ in ended] == [0 if has_room else 77] * 2, ended
        if not has_room:
            assert all("has had no room" in text for _, text in ended), ended
            return
        assert [row["step"] for row in metrics_of(disk / "a") if "train/loss" in row] == [1, 2, 3, 4, 5, 6]
        assert [one["lost_lines"] for one in events_of(disk / "a", "storage", "has_room")] == [0, 0]
        assert events_of(disk / "a", "end", "run")


def test_metrics_are_cut_back_on_resume(tmp_path: Path, data: Path) -> None:
    """Steps that are done again are reported once."""
    config = write_config(tmp_path / "a.json", data, tmp_path / "a", checkpoint__interval=2)
    _ok(train_run(config, 1, "megasdc.training.stop_step=5"))
    newest = tmp_path / "a" / "checkpoints" / "step_00000005"
    (newest / "manifest.json").unlink()
    _ok(train_run(config, 1))
    steps = [row["step"] for row in metrics_of(tmp_path / "a") if "train/loss" in row]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert events_of(tmp_path / "a", "resume", "metrics_cut_back")


def test_events_name_run_and_attempt(tmp_path: Path, data: Path) -> None:
    """All ranks write the run's id, which a restart and even one that fails keep, and the number of the start."""
    config = write_config(tmp_path / "a.json", data, tmp_path / "a", training__steps=1, training__eval_interval=0)
    _ok(train_run(config, 2))
    codes = {code for code, _ in train_run(config, 2, "megasdc.model.hidden_size=64")}
    lines = [json.loads(line) for path in (tmp_path / "a/events").iterdir() for line in path.read_text().splitlines()]
    run = json.loads((tmp_path / "a" / "run.json").read_text())
    assert codes == {72} and run["attempt"] == 2 and {line["run"] for line in lines} == {run["run"]}
    assert {(line["rank"], line["attempt"]) for line in lines} >= {(0, 1), (0, 2), (1, 2)}
    (failed, *_) = [line for line in lines if (line["kind"], line["name"]) == ("end", "failed")]
    assert failed["attempt"] == 2 and failed["monotonic"] > 0 and failed["device"] is None


def _pretrain_with_bad_gradient(config: str, step: int, value: float) -> tuple[int, str | None]:
    """Train with one gradient element of one rank replaced, before the reduction, in one step or from it on."""
    from megasdc.engine.engine import TrainingEngine

    original = TrainingEngine._run_backward

    def poisoned(self: Any, buffer_id: int) -> None:
        original(self, buffer_id)
        if self.dims.rank == 0 and (self.step_number == step or (step < 0 and self.step_number >= -step)):
            from megasdc.optim.zero1 import accumulated_gradient

            gradient = accumulated_gradient(self.optimizer, next(self.module.parameters()))
            gradient.view(-1)[0] = value

    TrainingEngine._INSTRUCTION_MAP = {
        kind: poisoned if function is original else function
        for kind, function in TrainingEngine._INSTRUCTION_MAP.items()
    }
    return pretrain_rank(config, [])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_skipped_step_is_told(tmp_path: Path, data: Path, precision: str, value: float) -> None:
    """A step whose gradient is not finite is skipped on all ranks, told and counted, and training goes on."""
    changes = {"deepspeed__bf16": {"enabled": True}} if precision == "bf16" else {}
    config = write_config(tmp_path / "a.json", data, tmp_path / "a", **changes)
    _ok(run_distributed(_pretrain_with_bad_gradient, 2, str(config), 3, value, init=False))
    skips = events_of(tmp_path / "a", "skip", "optimizer_step")
    assert {(event["rank"], event["step"]) for event in skips} == {(0, 3), (1, 3)}
    rows = [row for row in metrics_of(tmp_path / "a") if "train/loss" in row]
    assert [row["train/skipped_steps"] for row in rows] == [0, 0, 1, 1, 1, 1]
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]


def test_too_many_skipped_steps_end_the_run(tmp_path: Path, data: Path) -> None:
    """Past the limit of skipped steps in a row all ranks end with code 74."""
    config = write_config(tmp_path / "a.json", data, tmp_path / "a", training__max_skipped_steps=2)
    results = run_distributed(_pretrain_with_bad_gradient, 2, str(config), -2, float("nan"), init=False)
    assert {code for code, _ in results} == {74}
    assert all("skipped 2 steps in a row, up to step 3" in text for _, text in results)


def test_time_limit_saves_and_ends_well(tmp_path: Path, data: Path) -> None:
    """When the time is up the run ends after the step with a checkpoint and exit code 0."""
    config = write_config(tmp_path / "a.json", data, tmp_path / "a", training__time_limit_s=0.001)
    _ok(train_run(config, 2))
    assert (tmp_path / "a" / "checkpoints" / "step_00000001").is_dir()


def test_given_layer_counts_and_llama_stages(tmp_path: Path, data: Path) -> None:
    """Stages with given counts of layers train the same model as one rank."""
    model = {**MODELS["llama"], "num_layers": 3}
    one = write_config(tmp_path / "one.json", data, tmp_path / "one", model=model)
    two = write_config(
        tmp_path / "two.json", data, tmp_path / "two", model=model, parallel__pipeline=2, parallel__partition=[2, 1]
    )
    _ok(train_run(one, 1))
    _ok(train_run(two, 2))
    losses = [
        [row["train/loss"] for row in metrics_of(tmp_path / name) if "train/loss" in row] for name in ("one", "two")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.full
def test_random_kills_never_change_the_result(tmp_path: Path, data: Path) -> None:
    """20 SIGKILLs of random ranks at random moments, some inside saves, each resumed: the end is bit-identical."""
    import random

    whole = write_config(tmp_path / "whole.json", data, tmp_path / "whole", training__steps=40)
    options = {"training__steps": 40, "checkpoint__interval": 2}
    parts = write_config(tmp_path / "parts.json", data, tmp_path / "parts", **options)
    _ok(train_run(whole, 2))
    chance = random.Random(7)
    for _ in range(20):
        rank, delay = chance.randrange(2), chance.uniform(0.5, 3.0)
        run_distributed(
            _pretrain_killed_after, 2, str(parts), rank, delay, init=False, expect_exit={rank: -9}, grace_s=5.0
        )
    _ok(train_run(parts, 2))
    assert _final(tmp_path / "parts", 40) == _final(tmp_path / "whole", 40)


def _pretrain_killed_after(config: str, rank: int, delay_s: float) -> tuple[int, str | None]:
    """Train while a timer kills one rank; a rank that is done first waits for its end."""
    if int(os.environ["RANK"]) == rank:
        threading.Thread(target=lambda: (time.sleep(delay_s), os.kill(os.getpid(), signal.SIGKILL))).start()
    result = pretrain_rank(config, [])
    if int(os.environ["RANK"]) == rank:
        time.sleep(60)
    return result
