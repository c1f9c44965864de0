"""Is the cause of a strange step found: a fault of hardware, or a document?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import run_command
from whole_runs import prepare_text, train_run, write_config

from megasdc.common.errors import CorruptionError
from megasdc.config.load import load_config
from megasdc.lab.triage.step_data import StepData, Wanted, data_of_plan

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(400)]

STEPS, SAVED = 24, 16
"""Steps of a run, and that of the checkpoint from which it is replayed."""
STRANGE = "".join(chr(0x4E00 + number * 37) for number in range(60))
"""A document in characters that no other has."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text of which one document is strange."""
    from megasdc.config.data import DataSection
    from megasdc.data.prepare import prepare

    folder = tmp_path_factory.mktemp("text")
    tokenizer = prepare_text(folder) / "tokenizer"
    text = (folder / "texts" / "inspect.txt").read_text()
    for number in range(40):
        (folder / f"{number}.txt").write_text(text[number * 900 :][:900])
    (folder / "strange.txt").write_text(STRANGE)
    section = {
        "path": str(folder / "strange"),
        "split": [1, 0, 0],
        "sources": [{"kind": "files", "path": str(folder / "*.txt")}],
        "tokenizer": {"path": str(tokenizer)},
    }
    prepare(DataSection.model_validate(section), progress=False)
    return folder / "strange"


def config_of(folder: Path, data: Path, seed: int, **changes: Any) -> Path:
    """A run of two replicas that logs and keeps what a triage needs."""
    options = {
        "training__steps": STEPS,
        "training__eval_interval": 0,
        "checkpoint__interval": SAVED,
        "data__seed": seed,
        **changes,
    }
    return write_config(folder / "config.json", data, folder / "run", deepspeed__train_batch_size=8, **options)


def strange_samples(result: StepData) -> list[tuple[int, int]]:
    """Replica and micro-batch of samples that are mostly of the strange document."""
    return [
        (batch.replica, batch.micro_batch)
        for batch in result.micro_batches
        for sample in batch.samples
        if sum(part.num_tokens for part in sample.parts if set(part.text or "") & set(STRANGE)) > 24
    ]


def triage(run: Path, step: int) -> tuple[int, dict[str, Any]]:
    """Run the command; returns exit code and result."""
    done = run_command("triage", str(run), str(step), "--json")
    assert done.stdout.startswith("{"), done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_strange_document_is_named(tmp_path: Path, data: Path) -> None:
    """Replays of a clean step agree with the run in every bit, and the sample of the strange document stands out."""
    for seed in range(1, 60):
        config = config_of(tmp_path, data, seed)
        found = {
            step: strange_samples(data_of_plan(load_config(config), 2, Wanted(step, text=True)))
            for step in range(SAVED + 1, STEPS + 1)
        }
        steps = [step for step, samples in found.items() if samples and step >= SAVED + 3]
        if steps:
            break
    assert train_run(config, 2) == [(0, None), (0, None)]
    code, result = triage(tmp_path / "run", steps[0])
    assert (code, result["conclusion"]["verdict"]) == (0, "data"), result["conclusion"]
    assert result["since"] == SAVED
    assert result["evidence"]["replays"]["compared"] > 1000 and result["evidence"]["recorded"]["compared"] > 4
    assert tuple(result["evidence"]["samples"][0]["place"][:2]) in found[steps[0]]
    assert sorted(result["step_details"]["parameters"])


def test_a_fault_of_hardware_is_found(tmp_path: Path, data: Path) -> None:
    """A step whose gradients a fault changed is not what its replays compute, which agree; the trace names the rank."""
    fault = {"phase": "weight_grad", "submodule": "2.layer.mlp.linear_fc1", "kind": "scale", "factor": 3.0, "rank": 1}
    options = {"faults": [{**fault, "steps": [20, 20]}], "trace__enabled": True}
    assert train_run(config_of(tmp_path, data, 1, **options), 2) == [(0, None), (0, None)]
    code, result = triage(tmp_path / "run", 20)
    assert (code, result["conclusion"]["verdict"]) == (CorruptionError.exit_code, "hardware"), result["conclusion"]
    recorded = result["evidence"]["recorded"]
    assert recorded["rank"] == 1 and "2.layer.mlp.linear_fc1" in recorded["first"] and "step 20" in recorded["first"]
    assert result["evidence"]["replays"]["first"] is None
