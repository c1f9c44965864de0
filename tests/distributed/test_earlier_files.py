"""Are run folders, checkpoints and golden files of an earlier commit resumed, summarised, compared and verified?

They are in ``earlier.tar.xz``; ``earlier_files.py`` has made it, and says what is in it. Bits of a training are
compared where the processor and PyTorch are those that made it; others may sum in another order, which moves losses of
so few steps by some 1e-6, and is allowed ``OTHER_CPU``.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from earlier_files import (
    CHECKPOINTS,
    CHECKS,
    GUARD_STEPS,
    MODEL_VOCAB,
    NODE_SAVED,
    REPOSITORY,
    SAID,
    SAVED,
    command,
    cpu_kind,
    evaluated,
    run_guarded,
    unpack,
    unsaid,
    versions,
    what_is_said,
)
from harness import StartedCommand, run_command, run_distributed
from whole_runs import events_of, metrics_of, train_run

from megasdc.attached.golden import load_golden_part
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.golden import load_header, machine_key

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
OTHER_CPU, OTHER_LAYOUT = 1e-4, 1e-5
"""Relative tolerances: on another processor, and at another layout of fp32."""


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked files, which no test changes."""
    return unpack(Path(__file__).with_name("earlier.tar.xz"), tmp_path_factory.mktemp("earlier"))


def _stored(earlier: Path, name: str) -> Any:
    return json.loads((earlier / name).read_text(encoding="utf-8"))


def _agree(earlier: Path, found: Any, expected: Any) -> None:
    """Equal numbers, which another processor may round otherwise."""
    if _stored(earlier, "made.json")["cpu"] == cpu_kind():
        assert found == expected
    else:
        assert len(found) == len(expected)
        assert found == [pytest.approx(one, rel=OTHER_CPU) for one in expected]


def _rows(rows: list[dict[str, Any]], after: int) -> list[dict[str, Any]]:
    return [row for row in rows if row["step"] > after]


def _moved(earlier: Path, folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> Path:
    """A stored configuration whose run folder is ``folder/name``, with a change."""
    config = _stored(earlier, f"{name}.json")
    config["megasdc"]["logging"]["run_dir"] = str(folder / name)
    change(config["megasdc"])
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def _tool(name: str, *paths: Path) -> int | None:
    done = StartedCommand(str(REPOSITORY / "tools" / name), list(map(str, paths))).wait(120)
    return done.returncode


def test_commands_say_what_they_said(earlier: Path) -> None:
    """Summary, report, inspection and verification of every file: each number, name and short text is the same."""
    said = _stored(earlier, SAID)
    loss = said.pop("loss of imported")
    assert unsaid(said, what_is_said(earlier)) == []
    assert (earlier / "page.html").stat().st_size > 10_000
    assert evaluated(earlier / "imported", earlier / "halted.json") == pytest.approx(loss, rel=OTHER_CPU)


def test_a_halted_run_goes_on(earlier: Path, tmp_path: Path) -> None:
    """From its verified checkpoint, every hook with its state, to the metrics of a run that nothing disturbed."""
    run_dir = Path(shutil.copytree(earlier / "halted", tmp_path / "halted"))
    config = _moved(earlier, tmp_path, "halted", lambda sections: sections.pop("faults"))
    assert train_run(config, 2) == [(0, None)] * 2
    assert [event["step"] for event in events_of(run_dir, "resume", "checkpoint")] == [SAVED]
    assert events_of(run_dir, "resume", "hook_states_missing") == []
    (unused,) = events_of(run_dir, "resume", "hook_states_unused")
    assert unused["hooks"] == ["FaultDrill", "TolerancedChecks"], (
        "faults are not injected any more, and checks are gone"
    )
    _agree(earlier, _rows(metrics_of(run_dir), SAVED), _rows(_stored(earlier, "metrics.json")["straight"], SAVED))
    summary = command("summary", run_dir)
    assert (summary["failure"], summary["resumed_from"]) == (None, [SAVED])


def test_a_universal_checkpoint_goes_on_at_another_layout(earlier: Path, tmp_path: Path) -> None:
    """One replica of two tensor ranks has the losses of two replicas, within a tolerance."""

    def change(sections: dict[str, Any]) -> None:
        for name in ("faults", *CHECKS):
            del sections[name]
        sections["parallel"]["tensor"] = 2
        sections["checkpoint"]["universal"] = str(earlier / CHECKPOINTS["universal"])

    config = _moved(earlier, tmp_path, "halted", change)
    assert train_run(config, 2) == [(0, None)] * 2
    (event,) = events_of(tmp_path / "halted", "resume", "universal")
    assert (event["step"], event["without"]) == (SAVED, [])
    assert events_of(tmp_path / "halted", "resume", "hook_states_missing") == []
    rows = (metrics_of(tmp_path / "halted"), _stored(earlier, "metrics.json")["straight"])
    found, expected = ([row["train/loss"] for row in _rows(one, SAVED) if "train/loss" in row] for one in rows)
    same = _stored(earlier, "made.json")["cpu"] == cpu_kind()
    assert found == pytest.approx(expected, rel=OTHER_LAYOUT if same else OTHER_CPU)


def test_a_node_local_checkpoint_goes_on(earlier: Path, tmp_path: Path) -> None:
    """Saved beside training at two tensor ranks and two stages, it leads to the metrics of an uninterrupted run."""
    run_dir = Path(shutil.copytree(earlier / "node_local", tmp_path / "node_local"))
    assert train_run(_moved(earlier, tmp_path, "node_local", lambda sections: None), 4) == [(0, None)] * 4
    assert [event["step"] for event in events_of(run_dir, "resume", "checkpoint")] == [NODE_SAVED]
    expected = _rows(_stored(earlier, "metrics.json")["node_straight"], NODE_SAVED)
    _agree(earlier, _rows(metrics_of(run_dir), NODE_SAVED), expected)


def test_what_is_equal_compares_equal(earlier: Path, tmp_path: Path) -> None:
    """A checkpoint and its universal form, its manifest of then and one of now, and traces of the run."""
    checkpoint = earlier / CHECKPOINTS["halted"]
    command("manifest", checkpoint, "--out", tmp_path / "now.manifest")
    assert _tool("compare_checkpoints.py", checkpoint, earlier / CHECKPOINTS["universal"]) == 0
    assert _tool("compare_checkpoints.py", earlier / "halted.manifest", tmp_path / "now.manifest") == 0
    assert _tool("compare_traces.py", earlier / "halted", earlier / "halted") == 0


def test_an_archive_gives_back_the_checkpoint(earlier: Path, tmp_path: Path) -> None:
    """Every file, byte for byte."""
    command("archive", "pull", earlier / "archive", tmp_path)
    (pulled,) = tmp_path.glob("step_*")
    original = earlier / CHECKPOINTS["halted"]
    names = {path.name for path in pulled.iterdir()}
    assert names >= {path.name for path in original.iterdir()} - {"verified.json"}
    assert all((pulled / name).read_bytes() == (original / name).read_bytes() for name in names)


def test_an_export_is_the_imported_model(earlier: Path) -> None:
    """Transformers reads it, and has the loss that megasdc has with the weights imported from it."""
    import transformers

    from megasdc.config.data import DataSection
    from megasdc.data.dataset import build_split
    from megasdc.data.loader import EvalLoader

    model = transformers.AutoModelForCausalLM.from_pretrained(earlier / "exported").eval()
    section = DataSection.model_validate({"path": str(earlier / "data"), "sequence_length": 32, "split": [8, 1, 1]})
    losses = []
    for tokens, (labels, _) in EvalLoader(build_split(section, MODEL_VOCAB, "valid", 4), 1, 0, 1, 4):
        with torch.no_grad():
            losses.append(torch.nn.functional.cross_entropy(model(tokens).logits[0].double(), labels[0]))
    assert float(torch.stack(losses).mean()) == pytest.approx(_stored(earlier, SAID)["loss of imported"], rel=1e-5)


def test_a_golden_file_is_verified(earlier: Path) -> None:
    """Healthy where it was recorded; elsewhere, or with other versions, not comparable by that alone."""
    done = run_command("golden", "verify", str(earlier / "megasdc.golden"), "--repeats", "1", "--json")
    assert done.stdout, done.stderr
    made, (rank,) = _stored(earlier, "made.json"), json.loads(done.stdout)["ranks"]
    processor = load_header(earlier / "megasdc.golden")["key"]["device"]  # also family and model
    if (made["cpu"], made["versions"], processor) == (cpu_kind(), versions(), machine_key()["device"]):
        assert (done.returncode, rank["status"]) == (0, "healthy"), rank
    else:
        assert (done.returncode, rank["status"]) == (80, "not comparable"), rank
        assert "unknown key" not in rank["detail"] and ": golden " in rank["detail"]


def test_the_golden_file_of_a_guard_is_read(earlier: Path) -> None:
    """Its batch and its trace, for what its own key says, on any machine."""
    file = earlier / "guard.golden"
    with zipfile.ZipFile(file) as packed:
        (part,) = json.loads(packed.read("header.json"))["parts"].values()
    found = load_golden_part(file, ParallelDims(1, 1, 2), part["key"])
    tokens = [sent.value for sent in found.batch.options.values() if isinstance(sent.value, torch.Tensor)]
    assert [list(one.shape) for one in tokens] == [[2, 16]] * 2 and torch.equal(*tokens)
    assert len(found.trace) > 8


def test_a_guard_takes_its_file(earlier: Path, tmp_path: Path) -> None:
    """A training that is guarded by it has the losses of then, and its golden file accuses nobody."""
    made, settings = _stored(earlier, "made.json"), _stored(earlier, "guard.json")
    settings["logging"]["run_dir"] = str(tmp_path / "guarded")
    with zipfile.ZipFile(earlier / "guard.golden") as archive:
        (part, *_) = json.loads(archive.read("header.json"))["parts"].values()
    made_by = (made["cpu"], made["versions"], part["key"]["transformers"], part["key"]["device"])
    here = (cpu_kind(), versions(), metadata.version("transformers"), machine_key()["device"])
    recorded_here = made_by == here
    if not recorded_here:
        settings["golden"]["path"] = None  # refused: its key is of another machine or version
    (tmp_path / "guard.json").write_text(json.dumps(settings), encoding="utf-8")
    found = run_distributed(run_guarded, 2, str(tmp_path / "guard.json"), GUARD_STEPS, False)
    assert [code for code, _ in found] == [0, 0]
    for losses, expected in zip(
        (losses for _, losses in found), _stored(earlier, "metrics.json")["guarded"], strict=True
    ):
        _agree(earlier, losses, expected)
    assert len(events_of(tmp_path / "guarded", "golden", "agreed")) == 2 * recorded_here
