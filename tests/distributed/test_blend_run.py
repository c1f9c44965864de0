"""Does a run on a blend of folders go on bit for bit, and is another blend refused?"""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from whole_runs import events_of, metrics_of, prepare_text, state_of, train_run, write_config

from megasdc.common.errors import CheckpointError
from megasdc.config.data import DataSection
from megasdc.data.dataset import build_split

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A blend of two folders of different text and one tokenizer; the second is smaller than an evaluation."""
    from megasdc.config.data import DataSection
    from megasdc.data.prepare import prepare

    folder = tmp_path_factory.mktemp("blend")
    first = prepare_text(folder)
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in ("json/decoder", "json/encoder", "json/scanner"):
        (folder / f"{Path(name).name}.txt").write_bytes((library / f"{name}.py").read_bytes())
    second = DataSection.model_validate(
        {
            "path": str(folder / "second"),
            "split": [1, 1, 0],
            "sources": [{"kind": "files", "path": str(folder / "*.txt")}],
            "tokenizer": {"path": str(first / "tokenizer")},
        }
    )
    prepare(second, progress=False)
    return [{"path": str(first), "weight": 3}, {"path": second.path, "weight": 1}]


def test_a_blend_resumes_bit_identically(tmp_path: Path, parts: list[dict[str, Any]]) -> None:
    """A run on a blend that stopped and was prolonged equals one that never stopped; other weights are refused."""
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}  # does not depend on the number of steps
    options: dict[str, Any] = {"data__blend": parts, "deepspeed__scheduler": schedule}
    first = Path(parts[0]["path"])
    whole = write_config(tmp_path / "whole.json", first, tmp_path / "whole", **options)
    halves = write_config(tmp_path / "halves.json", first, tmp_path / "halves", **options)
    assert {code for code, _ in train_run(whole, 2)} == {0}
    assert {code for code, _ in train_run(halves, 2, "megasdc.training.steps=3")} == {0}
    refused = train_run(halves, 2, "megasdc.data.blend.1.weight=2")
    assert {code for code, _ in refused} == {CheckpointError.exit_code}
    assert all("data.blend" in str(message) for _, message in refused)
    assert {code for code, _ in train_run(halves, 2, "megasdc.checkpoint.resume=must")} == {0}
    assert {event["step"] for event in events_of(tmp_path / "halves", "resume", "checkpoint")} == {3}
    finals = [state_of(tmp_path / name / "checkpoints" / "step_00000006") for name in ("whole", "halves")]
    assert finals[0] == finals[1]
    assert metrics_of(tmp_path / "whole") == metrics_of(tmp_path / "halves")
    assert json.loads((tmp_path / "whole" / "resolved.json").read_text())["megasdc"]["data"]["blend"] == parts


def test_an_evaluation_says_which_part_ends_a_blend(tmp_path: Path, parts: list[dict[str, Any]]) -> None:
    """Samples stop where the first part is used up, though the other holds more; the note names it and its number."""
    from megasdc.train.inference import evaluate_weights

    config = write_config(tmp_path / "c.json", Path(parts[0]["path"]), tmp_path / "run", training={"steps": 1})
    assert train_run(config, 1) == [(0, None)]
    blend = {"data__blend": parts, "training": {"steps": 1}}
    config = write_config(tmp_path / "c.json", Path(parts[0]["path"]), tmp_path / "run", **blend)
    held = {}
    for part in parts:
        section = DataSection.model_validate({"path": part["path"], "sequence_length": 32})
        held[part["path"]] = build_split(section, 500, "valid", 1).num_distinct
    found = evaluate_weights(tmp_path / "run" / "checkpoints", config_path=config, samples=10_000)
    assert found.samples < sum(held.values())
    (note,) = found.notes
    assert f"blend's valid was used for {found.samples}" in note
    assert any(f"{path}/valid.bin holds {number} of this length" in note for path, number in held.items())
