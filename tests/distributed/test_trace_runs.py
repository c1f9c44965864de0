"""Do training runs write what they computed, without changing it, and the same every time?"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from harness import run_distributed
from whole_runs import events_of, metrics_of, prepare_text, pretrain_rank, state_of, train_run, write_config

from megasdc.common.addresses import MICRO_BATCH_PHASES
from megasdc.lab.traces.traces import compare_traces_of_runs, load_traces
from megasdc.sdc.trace import Trace, compare_rank, read_folder

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


def _config(folder: Path, name: str, data: Path, **changes: Any) -> Path:
    changes = {"training__eval_interval": 0, "training__steps": 4, "checkpoint__interval": 2, **changes}
    return write_config(folder / f"{name}.json", data, folder / name, **changes)


def _ok(results: list[Any]) -> None:
    assert [code for code, _ in results if code] == [], results


def _traces(run_dir: Path) -> dict[int, Trace]:
    return {rank: trace for rank, (_, trace) in read_folder(run_dir / "trace").items()}


def _final(run_dir: Path) -> Any:
    return state_of(run_dir / "checkpoints" / "step_00000004"), metrics_of(run_dir)


def _pretrain_without_observers(config: str) -> tuple[int, str | None]:
    """Train where attaching anything to a submodule fails."""
    from megasdc.engine.observer import Observer
    from megasdc.model.submodules import Attachment

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("something was attached")

    Observer.__init__ = Attachment.__init__ = refuse
    return pretrain_rank(config, [])


def test_off_attaches_nothing_and_on_changes_nothing(tmp_path: Path, data: Path) -> None:
    """Parameters, optimizer states and metrics with a trace are those without; without, no observer is ever made."""
    common = {"training__eval_interval": 2, "parallel__tensor": 2}
    off = _config(tmp_path, "off", data, **common)
    on = _config(tmp_path, "on", data, trace__enabled=True, **common)
    _ok(run_distributed(_pretrain_without_observers, 2, str(off), init=False))
    _ok(train_run(on, 2))
    assert _final(tmp_path / "on") == _final(tmp_path / "off")
    assert not (tmp_path / "off" / "trace").exists()
    traces = _traces(tmp_path / "on")
    assert all({address.step for address in trace.addresses} == {1, 2, 3, 4} for trace in traces.values())
    again = _config(tmp_path, "again", data, trace__enabled=True, **common)  # the first has no step left to observe
    refused = run_distributed(_pretrain_without_observers, 2, str(again), init=False)
    assert all(code == 1 and "something was attached" in text for code, text in refused), refused


def test_the_section_chooses_what_is_recorded(tmp_path: Path, data: Path) -> None:
    """Steps, micro-batches, phases and layers that were not asked for are not in the file; the header says what was."""
    wanted = {"interval": 2, "micro_batches": [1], "phases": ["forward", "update"], "layers": [2], "enabled": True}
    config = _config(tmp_path, "a", data, trace={**wanted, "algorithm": "mixed_sum_64.v1"})
    _ok(train_run(config, 1))
    ((header, trace),) = read_folder(tmp_path / "a" / "trace").values()
    assert {address.step for address in trace.addresses} == {1, 3}
    assert {address.phase for address in trace.addresses} == {"forward", "update"}
    assert {address.micro_batch for address in trace.addresses} == {1, None}
    assert {address.fqn.split(".")[0] for address in trace.addresses} == {"2", "loss"}
    assert {key: header[key] for key in wanted if key != "enabled"} == {
        k: v for k, v in wanted.items() if k != "enabled"
    }
    assert (header["algorithm"], header["precision"], header["first_step"]) == ("mixed_sum_64.v1", "fp32", 1)
    assert header["layout"] == {"tensor": 1, "pipeline": 1, "data": 1}
    assert {"torch", "deepspeed", "megatron-core", "megasdc"} <= set(header["versions"])


@pytest.mark.parametrize("layout", [(1, 1, 2), (2, 2, 1)], ids=str)
def test_the_same_config_gives_the_same_trace(tmp_path: Path, data: Path, layout: tuple[int, int, int]) -> None:
    """Two runs in other processes agree in every checksum; so do one that stopped and went on, and one that was killed.

    Dropout is on: masks too come out the same.
    """
    tensor, pipeline, replicas = layout
    world = tensor * pipeline * replicas
    common = {
        "trace__enabled": True,
        "parallel__tensor": tensor,
        "parallel__pipeline": pipeline,
        "model__hidden_dropout": 0.1,
        "model__attention_dropout": 0.1,
    }
    whole, again, parts, killed = (
        _config(tmp_path, name, data, **common) for name in ("whole", "again", "parts", "killed")
    )
    _ok(train_run(whole, world))
    _ok(train_run(again, world))
    expected = _traces(tmp_path / "whole")
    assert all(len(trace) > 300 for trace in expected.values())
    assert _traces(tmp_path / "again") == expected
    _ok(train_run(parts, world, "megasdc.training.stop_step=3"))
    _ok(train_run(parts, world, "megasdc.checkpoint.resume=must"))
    assert len(list((tmp_path / "parts" / "trace").iterdir())) == 2 * world
    assert _traces(tmp_path / "parts") == expected
    run_distributed(_pretrain_then_die, world, str(killed), 4, init=False, expect_exit={0: -9}, grace_s=5.0)
    _ok(train_run(killed, world, "megasdc.checkpoint.resume=must"))
    assert _traces(tmp_path / "killed") == expected


def _pretrain_then_die(config: str, step: int) -> tuple[int, str | None]:
    """Train, and kill rank 0 after a step's checksums are recorded and before its checkpoint is."""
    from megasdc.train.trace import TraceRecorder

    after_step = TraceRecorder.after_step

    def die(self: Any, run: Any, result: Any) -> None:
        after_step(self, run, result)
        if result.step == step and run.dims.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    TraceRecorder.after_step = die
    return pretrain_rank(config, [])


def test_a_run_begun_anew_keeps_the_older_trace(tmp_path: Path, data: Path) -> None:
    """Without the checkpoints, the run starts at step 1, is not mixed with what was recorded, and loses nothing."""
    config = _config(tmp_path, "a", data, trace__enabled=True)
    _ok(train_run(config, 1, "megasdc.training.stop_step=2"))
    _ok(train_run(config, 1))
    expected = _traces(tmp_path / "a")
    (tmp_path / "a" / "checkpoints").rename(tmp_path / "elsewhere")
    _ok(train_run(config, 1, "megasdc.training.stop_step=3"))
    trace = _traces(tmp_path / "a")[0]
    assert {address.step for address in trace.addresses} == {1, 2, 3}
    assert {one.address.step for one in compare_rank(0, expected[0], trace)} == {4}
    assert len(list((tmp_path / "a" / "trace").glob("*.until_*"))) == 2
    assert len(events_of(tmp_path / "a", "start", "trace_set_aside")) == 2


def test_micro_batch_phases_name_a_micro_batch(tmp_path: Path, data: Path) -> None:
    """Every result of a micro-batch has its number, the others have none."""
    config = _config(tmp_path, "a", data, trace__enabled=True, training__steps=1)
    _ok(train_run(config, 2))
    for trace in _traces(tmp_path / "a").values():
        numbers = {a.micro_batch for a in trace.addresses if a.phase in MICRO_BATCH_PHASES}
        assert numbers == {0, 1}
        assert {a.micro_batch for a in trace.addresses if a.phase not in MICRO_BATCH_PHASES} == {None}


def test_what_may_differ_between_runs_is_told(tmp_path: Path, data: Path) -> None:
    """Another number of threads may round otherwise: it is noted beside what is found; what is only saved is not."""
    common = {"trace__enabled": True, "training__steps": 2}
    one, two, same = (
        _config(tmp_path, "one", data, **common),
        _config(tmp_path, "two", data, parallel__threads=2, **common),
        _config(tmp_path, "same", data, checkpoint__keep_last=1, logging__interval=2, **common),
    )
    for config in (one, two, same):
        _ok(train_run(config, 1))
    runs = {name: load_traces(tmp_path / name) for name in ("one", "two", "same")}
    notes = compare_traces_of_runs(runs["one"], runs["two"]).notes
    assert [note.split(":")[0] for note in notes] == ["threads", "config_digest"]
    assert "1 in the first, 2 in the second" in notes[0]
    report = compare_traces_of_runs(runs["one"], runs["same"])
    assert report.same and report.notes == [] and report.steps == [1, 2]


def test_a_stage_without_results_has_a_file_too(tmp_path: Path, data: Path) -> None:
    """With layers of the last stage alone, the first writes an empty trace, and runs can be compared."""
    common = {"trace": {"enabled": True, "layers": [3], "interval": 2}, "parallel__pipeline": 2}
    one, two = (_config(tmp_path, name, data, **common) for name in ("one", "two"))
    for config in (one, two):
        _ok(train_run(config, 2))
    runs = [load_traces(tmp_path / name) for name in ("one", "two")]
    assert len(runs[0].traces[0]) == 0 and {address.fqn[0] for address in runs[0].traces[1].addresses} == {"3", "l"}
    report = compare_traces_of_runs(*runs)
    assert report.same and report.steps == [1, 3] and report.comparison.compared == len(runs[0].traces[1])
