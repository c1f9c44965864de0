"""Is a run repeatable, does it go on bit for bit after every kind of end, and does bad input end it well?"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from runs import MODELS, events_of, metrics_of, prepare_text, pretrain_rank, state_of, train_run, write_config

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


def _final(run_dir: Path, step: int = 6) -> tuple[dict[str, str], list[dict[str, Any]]]:
    return state_of(run_dir / "checkpoints" / f"step_{step:08d}"), metrics_of(run_dir)


def _ok(results: list[Any]) -> None:
    assert [code for code, _ in results if code] == [], results


def test_the_same_config_gives_the_same_run(tmp_path: Path, data: Path) -> None:
    """Two runs of one config agree in every tensor, counter, loss, rate and norm."""
    finals = []
    for name in ("a", "b"):
        config = write_config(tmp_path / f"{name}.json", data, tmp_path / name)
        _ok(train_run(config, 2))
        finals.append(_final(tmp_path / name))
    assert finals[0] == finals[1]
    assert len(finals[0][1]) >= 6


RESUMES = [
    ("1x1x2", 1, 1, 2, "gpt", {}),
    ("1x1x2_dropout", 1, 1, 2, "gpt", {"model__hidden_dropout": 0.1, "model__attention_dropout": 0.1}),
    ("1x2x1", 1, 2, 1, "gpt", {}),
    ("2x1x1_bf16", 2, 1, 1, "llama", {"deepspeed__bf16": {"enabled": True}}),
    ("2x2x2_bf16_dropout", 2, 2, 2, "gpt", {"deepspeed__bf16": {"enabled": True}, "model__hidden_dropout": 0.1}),
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
    """A run that stopped at step 3 and went on equals one that never stopped."""
    world = tensor * pipeline * replicas
    common = {"model": dict(MODELS[model]), "parallel__tensor": tensor, "parallel__pipeline": pipeline, **changes}
    whole = write_config(tmp_path / "whole.json", data, tmp_path / "whole", **common)
    parts = write_config(tmp_path / "parts.json", data, tmp_path / "parts", **common)
    _ok(train_run(whole, world))
    _ok(train_run(parts, world, "megasdc.training.stop_step=3"))
    _ok(train_run(parts, world, "megasdc.checkpoint.resume=must"))
    assert _final(tmp_path / "parts") == _final(tmp_path / "whole")
    assert {event["step"] for event in events_of(tmp_path / "parts", "resume", "checkpoint")} == {3}


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
            from megasdc.train import saving

            save = saving.save_checkpoint

            def die_in_save(engine: Any, folder: Path, at: int, **options: Any) -> Any:
                if at == step:
                    delay = float(moment.split("_")[1])
                    threading.Thread(target=lambda: (time.sleep(delay), os.kill(os.getpid(), signal.SIGKILL))).start()
                return save(engine, folder, at, **options)

            saving.save_checkpoint = die_in_save
    return pretrain_rank(config, [])


@pytest.mark.parametrize(
    ("rank", "step", "moment"),
    [(0, 3, "step"), (1, 5, "step"), (0, 4, "save_0.0"), (1, 4, "save_0.003"), (0, 4, "save_0.02")],
)
def test_resume_after_kill_is_bit_identical(tmp_path: Path, data: Path, rank: int, step: int, moment: str) -> None:
    """SIGKILL of a rank in a step or inside a save loses at most the steps since the last checkpoint."""
    from harness import run_distributed

    whole = write_config(tmp_path / "whole.json", data, tmp_path / "whole")
    parts = write_config(tmp_path / "parts.json", data, tmp_path / "parts")
    _ok(train_run(whole, 2))
    run_distributed(
        _pretrain_then_die, 2, str(parts), rank, step, moment, init=False, expect_exit={rank: -9}, grace_s=5.0
    )
    _ok(train_run(parts, 2, "megasdc.checkpoint.resume=must"))
    assert _final(tmp_path / "parts") == _final(tmp_path / "whole")


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, data: Path) -> None:
    """With one byte flipped in the newest checkpoint all ranks use the one before, say so, and end the same."""
    whole = write_config(tmp_path / "whole.json", data, tmp_path / "whole")
    parts = write_config(tmp_path / "parts.json", data, tmp_path / "parts")
    _ok(train_run(whole, 2))
    _ok(train_run(parts, 2, "megasdc.training.stop_step=4"))
    victim = sorted((tmp_path / "parts" / "checkpoints" / "step_00000004").glob("zero_pp_rank_1*optim_states.pt"))[0]
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    _ok(train_run(parts, 2))
    assert {event["step"] for event in events_of(tmp_path / "parts", "resume", "checkpoint")} == {2}
    skipped = [event for event in events_of(tmp_path / "parts", "skip", "checkpoint")]
    assert any(victim.name in json.dumps(event) for event in skipped), skipped
    assert _final(tmp_path / "parts") == _final(tmp_path / "whole")


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
    from harness import run_distributed

    config = write_config(tmp_path / "a.json", data, tmp_path / "a", checkpoint__interval=0)
    _ok(run_distributed(_pretrain_with_sigterm, 2, str(config), 1, 3, init=False))
    assert (tmp_path / "a" / "checkpoints" / "step_00000003").is_dir()
    assert {event["reason"] for event in events_of(tmp_path / "a", "stop", "requested")} == {"signal SIGTERM"}


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
