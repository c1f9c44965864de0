"""Is what `inspect-data` says of a step what the run's loaders handed to the engine in it, token for token?"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import run_command, run_distributed
from whole_runs import prepare_text, pretrain_rank, write_config

from megasdc.common.errors import CheckpointError, DataError
from megasdc.lab.triage.step_data import StepData, Wanted, data_of_run

pytestmark = pytest.mark.distributed

STEPS = 6
DROPPING = {"enabled": True, "threshold": 0.15, "warmup_steps": 1, "max_drop_rate": 1.0}
LATE = {"kind": "bounded_lognormal", "mean_s": 0.08, "seed": 3}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Data of which a step uses more than a third."""
    from megasdc.config.data import DataSection
    from megasdc.data.prepare import prepare

    folder = tmp_path_factory.mktemp("short")
    text = (Path(__file__).parent / "tiny.py").read_text()
    for number in range(3):
        (folder / f"{number}.txt").write_text(text[number * 300 : number * 300 + 300])
    section = {
        "path": str(folder / "data"),
        "split": [1, 0, 0],
        "sources": [{"kind": "files", "path": str(folder / "*.txt")}],
        "tokenizer": {"path": str(data / "tokenizer")},
    }
    prepare(DataSection.model_validate(section), progress=False)
    return folder / "data"


def recorded_rank(config: str, overrides: list[str], out: str) -> tuple[int, str | None]:
    """Body of a rank: train, and write down what the engine is handed in each step."""
    from megasdc.engine.engine import StepResult, TrainingEngine

    train_step = TrainingEngine.train_step

    def recording(self: TrainingEngine, batches: Iterator[Any]) -> StepResult:
        handed: list[list[list[int]]] = []

        def watched() -> Iterator[Any]:
            for tokens, (labels, mask) in batches:
                rows = [[*row, last] for row, last in zip(tokens.tolist(), labels[:, -1].tolist(), strict=True)]
                if not self.is_replaying:  # an audit's extra micro-batch is none of the step's
                    handed.append(rows)
                yield tokens, (labels, mask)

        result = train_step(self, watched())
        if self.is_first_stage() and self.dims.tp_rank == 0:
            with open(Path(out) / f"replica_{self.dims.dp_rank}.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": result.step, "handed": handed}) + "\n")
        return result

    TrainingEngine.train_step = recording  # type: ignore[method-assign]
    return pretrain_rank(config, overrides)


def train(config: Path, ranks: int, out: Path, *overrides: str) -> None:
    """Train with every rank recorded."""
    out.mkdir(exist_ok=True)
    results = run_distributed(recorded_rank, ranks, str(config), list(overrides), str(out), init=False)
    assert [code for code, _ in results if code] == [], results


def handed(out: Path) -> dict[tuple[int, int], list[list[list[int]]]]:
    """What each replica was handed in each step, [micro-batch][sample][token]; the last time it took the step."""
    found = {}
    for path in out.glob("replica_*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            found[line["step"], int(path.stem.removeprefix("replica_"))] = line["handed"]
    return found


def told(result: StepData, replica: int, *, dropped: bool = False) -> list[list[list[int]]]:
    """What is said of a replica's step: tokens of the micro-batches that it started, or of those that it did not."""
    chosen = [one for one in result.micro_batches if one.replica == replica and one.dropped is dropped]
    return [[sample.tokens for sample in batch.samples] for batch in chosen]


def compare(run: Path, out: Path, first: int = 1, last: int = STEPS) -> list[StepData]:
    """Compare every step of a run with what was handed out; returns what was said."""
    expected, results = handed(out), []
    assert {step for step, _ in expected} == set(range(first, last + 1))
    for step in range(first, last + 1):
        result = data_of_run(run, Wanted(step))
        for replica in range(result.replicas):
            assert told(result, replica) == expected[step, replica], (step, replica)
        results.append(result)
    return results


def test_epochs_resumes_and_changed_batches(tmp_path: Path, short: Path) -> None:
    """Over several epochs, with other micro-batches after a resume, and with only the last checkpoint kept."""
    options = {"deepspeed__train_batch_size": 8, "training__eval_interval": 0, "checkpoint__interval": 2}
    config = write_config(tmp_path / "c.json", short, tmp_path / "run", **options, checkpoint__keep_last=1)
    train(config, 2, tmp_path / "out", "megasdc.training.stop_step=3")
    train(config, 2, tmp_path / "out", "train_micro_batch_size_per_gpu=2")
    results = compare(tmp_path / "run", tmp_path / "out")
    samples = [sample for one in results for batch in one.micro_batches for sample in batch.samples]
    assert max(sample.epoch for sample in samples) >= 2
    assert [one.micro_batch_size for one in results] == [1, 1, 1, 2, 2, 2]
    # Checkpoint 4 is kept besides the last: a finite step was taken from it.
    assert [one.confirmed_by for one in results] == [4] * 4 + [STEPS] * 2
    assert [one.since for one in results] == [0] * 4 + [4] * 2


def test_blends(tmp_path: Path, data: Path, short: Path) -> None:
    """Of a blend each sample is of the folder that it names, and steps begin at the nearest checkpoint."""
    parts = [{"path": str(data), "weight": 3}, {"path": str(short), "weight": 1}]
    options = {"data__blend": parts, "training__eval_interval": 0, "checkpoint__interval": 2}
    config = write_config(tmp_path / "c.json", data, tmp_path / "run", **options)
    train(config, 2, tmp_path / "out")
    results = compare(tmp_path / "run", tmp_path / "out")
    files = {sample.file for one in results for batch in one.micro_batches for sample in batch.samples}
    assert files == {f"{part['path']}/train.bin" for part in parts}
    assert [(one.since, one.confirmed_by) for one in results] == [(0, 2), (0, 2), (2, 4), (2, 4), (4, 6), (4, 6)]


@pytest.mark.parametrize(
    "samples", [{}, {"samples": "discard"}, {"samples": "discard", "compensation": "resample"}], ids=str
)
def test_dropped_and_shared_micro_batches(tmp_path: Path, short: Path, samples: dict[str, Any]) -> None:
    """With audits and late replicas: what was dropped is told and not handed out, what is shared is the source's."""
    options = {
        "deepspeed__train_batch_size": 8,
        "training__eval_interval": 0,
        "drop_compute": {**DROPPING, **samples},
        "delay": [LATE],
        "audit": {"enabled": True, "interval": 2},
        "determinism": {"enabled": True},
    }
    config = write_config(tmp_path / "c.json", short, tmp_path / "run", **options)
    train(config, 2, tmp_path / "out", "megasdc.training.stop_step=4")
    train(config, 2, tmp_path / "out")
    results = compare(tmp_path / "run", tmp_path / "out")
    lines = [json.loads(line) for line in (tmp_path / "run" / "decisions.jsonl").read_text().splitlines()]
    completed = {line["step"]: line["completed"] for line in lines if "step" in line}
    assert sum(len(told(one, replica, dropped=True)) for one in results for replica in range(2)) > 0
    for one in results:
        assert [4 - len(told(one, replica, dropped=True)) for replica in range(2)] == completed[one.step]
        assert one.source == (one.step // 2 % 2 if one.step % 2 == 0 else None)
        if one.source is not None:
            assert told(one, 0)[0] == told(one, 1)[0]


def test_another_layout_through_the_universal_form(tmp_path: Path, data: Path) -> None:
    """A run that goes on with other replicas, after drops: its steps too, and none of the run that it began from."""
    from megasdc.interchange.convert import convert_to_universal

    options = {"deepspeed__train_batch_size": 8, "training__eval_interval": 0}
    dropping = {"drop_compute": DROPPING, "delay": [LATE]}
    config = write_config(tmp_path / "a.json", data, tmp_path / "a", **options, **dropping, training__steps=3)
    train(config, 2, tmp_path / "out_a")
    universal = tmp_path / "universal"
    convert_to_universal(tmp_path / "a" / "checkpoints", universal, progress=False)
    config = write_config(tmp_path / "b.json", data, tmp_path / "b", **options, checkpoint__universal=str(universal))
    train(config, 4, tmp_path / "out_b")
    compare(tmp_path / "b", tmp_path / "out_b", first=4)
    with pytest.raises(DataError, match=r"step 3 is not of .* it began after step 3"):
        data_of_run(tmp_path / "b", Wanted(3))


def test_the_command(tmp_path: Path, data: Path) -> None:
    """The command prints the documents and their text; a plan says the same; what cannot be told is refused."""
    config = write_config(tmp_path / "c.json", data, tmp_path / "run", training__eval_interval=0)
    train(config, 2, tmp_path / "out")
    done = run_command("inspect-data", str(tmp_path / "run"), "--at-step", "5", "--text", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    own = [one for one in result["micro_batches"] if one["replica"] == 1]
    found = [[sample["tokens"] for sample in one["samples"]] for one in own]
    assert found == handed(tmp_path / "out")[5, 1]
    parts_of = [part for one in result["micro_batches"] for sample in one["samples"] for part in sample["parts"]]
    for part in parts_of:
        files = sorted((data.parent / "texts").glob("*.txt"))
        assert part["text"] in files[part["source_document"]].read_text()
    planned = run_command(
        "inspect-data", "--config", str(config), "--world-size", "2", "--at-step", "5", "--text", "--json"
    )
    assert json.loads(planned.stdout)["micro_batches"] == result["micro_batches"]
    shown = run_command("inspect-data", str(tmp_path / "run"), "--at-step", "5", "--replica", "1", "--micro-batch", "0")
    assert "agrees" in shown.stdout and str(data / "train.bin") in shown.stdout
    beyond = run_command("inspect-data", str(tmp_path / "run"), "--at-step", "7")
    assert beyond.returncode == DataError.exit_code and "has steps up to 6" in beyond.stderr
    both = run_command("inspect-data", str(tmp_path / "run"), "--config", str(config), "--at-step", "5")
    assert both.returncode == 2

    shutil.copytree(tmp_path / "run", tmp_path / "other")
    resolved = json.loads((tmp_path / "other" / "resolved.json").read_text())
    resolved["megasdc"]["data"]["seed"] += 1
    (tmp_path / "other" / "resolved.json").write_text(json.dumps(resolved))
    with pytest.raises(CheckpointError, match=r"other files, data\.seed"):
        data_of_run(tmp_path / "other", Wanted(5))
