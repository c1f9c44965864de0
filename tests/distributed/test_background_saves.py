"""Saves beside training: the same files, the same run, and whatever goes wrong leaves the checkpoint before."""

import os
import re
import signal
import subprocess
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_model import Run
from harness import run_distributed
from small_disk import small_disk

from megasdc.checkpoint import writer_main, writer_process
from megasdc.checkpoint.files import list_steps
from megasdc.checkpoint.manifest import read_manifest
from megasdc.checkpoint.ranks import CheckpointGroup
from megasdc.checkpoint.save import DiskSaver, Retention, SaveResult
from megasdc.checkpoint.snapshot import SavedState
from megasdc.checkpoint.verify import verify_checkpoint
from megasdc.determinism import capture_rng
from megasdc.events import EventLog, read_events
from megasdc.parallel.collectives import StepAgreement


class ForkedWriter(subprocess.Popen[bytes]):
    """A writer without seconds of imports: a fork of its rank, with no open file of it but the pipe."""

    def __init__(self, command: list[str], *, pass_fds: list[int], **_: Any) -> None:
        self.args, self.returncode = command, None
        self.stdin = self.stdout = self.stderr = None
        self._waitpid_lock, self._child_created = threading.Lock(), True
        rank, pipe = os.getpid(), pass_fds[0]
        self.pid = os.fork()
        if self.pid == 0:
            os.closerange(3, pipe)
            os.closerange(pipe + 1, 4096)
            writer_main.main(Connection(pipe), rank, describes=True)
            os._exit(0)


class Beside:
    """A run that saves beside its steps, as the training loop does; its writer is a fork unless ``is_fresh``."""

    def __init__(
        self,
        folder: str,
        layout: dict[str, Any] | None = None,
        keep_last: int = 0,
        *,
        is_fresh: bool = False,
        **ranks: Any,
    ) -> None:
        if not is_fresh:
            vars(writer_process)["subprocess"] = SimpleNamespace(**{**vars(subprocess), "Popen": ForkedWriter})
        self.run = Run(**(layout or {}))
        self.saver = DiskSaver(
            Path(folder), self.run.dims, CheckpointGroup(**ranks), torch.device("cpu"), Retention(keep_last)
        )
        self.agreement = StepAgreement(None)
        step = self.run.engine._INSTRUCTION_MAP
        names = {kind.__name__: kind for kind in step}
        update = step[names["OptimizerStep"]]

        def wait_and_update(engine: Any, *args: Any, **kwargs: Any) -> None:
            self.saver.wait_for_copy()
            update(engine, *args, **kwargs)

        self.run.engine._INSTRUCTION_MAP = {**step, names["OptimizerStep"]: wait_and_update}

    def begin(self) -> None:
        run = self.run
        state = SavedState({"positions": [run.consumed]}, {"rng": capture_rng(), "consumed": run.consumed})
        self.saver.begin(run.engine, run.engine.global_steps, state)

    def step(self) -> SaveResult | None:
        self.run.train(1)
        self.agreement.start(self.saver.fields)
        self.agreement.finish()
        return self.saver.advance()


def _save_both_ways(folder: str, layout: dict[str, Any], ranks: dict[str, Any]) -> tuple[str, str]:
    plain = Run(**layout)
    plain.train(2)
    plain.save(f"{folder}/sync", **ranks)
    plain.train(3)
    beside = Beside(f"{folder}/async", layout, is_fresh=ranks["storage"] == "node_local", **ranks)
    beside.run.train(2)
    beside.begin()
    beside.step()
    result = beside.saver.finish()
    assert result is not None
    assert result.step == 2
    beside.run.train(2)
    beside.saver.close()
    resumed = Run(**{**layout, "seed": 9})
    assert resumed.resume(f"{folder}/async", **ranks) is not None
    resumed.train(3)
    assert resumed.digest() == plain.digest()
    return plain.digest(), beside.run.digest()


@pytest.mark.parametrize(
    ("ranks", "layout", "storage"),
    [
        pytest.param(2, {}, "shared", marks=pytest.mark.full),
        (2, {"dtype": "bf16"}, "shared"),
        pytest.param(4, {"tensor": 2, "pipeline": 2}, "shared", marks=pytest.mark.full),
        (2, {"pipeline": 2}, "node_local"),
    ],
)
def test_files_and_run_are_those_of_a_save_that_waits(
    tmp_path: Path, ranks: int, layout: dict[str, Any], storage: str
) -> None:
    """Each tensor and value of each file is equal, the run is not changed, and it resumes bit for bit.

    With storage of the node the writers are the processes that a run starts, else forks.
    """
    for before, after in run_distributed(_save_both_ways, ranks, str(tmp_path), layout, {"storage": storage}):
        assert before == after
    steps = [tmp_path / way / "step_00000002" for way in ("sync", "async")]
    contents = [{one.name: _without_places(one) for one in read_manifest(step).files} for step in steps]
    assert contents[0] == contents[1]
    assert verify_checkpoint(steps[1]).problems == []


def _without_places(record: Any) -> Any:
    content = record.content
    tensors = [(one.name, one.type, one.blocks) for one in content.tensors]
    return record.tensors, sorted(tensors), content.values, content.rest, content.fragments


def _fail(folder: str, what: str, events: str) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    beside = Beside(folder, events=EventLog(events, rank), keep_last=1)
    saver = beside.saver
    beside.run.train(1)
    beside.begin()
    beside.step()
    assert saver.finish() is not None
    filling = Path(folder) / "filling"
    if what == "disk full" and rank == 0:
        filling.write_bytes(bytes(_free(folder)))
    beside.begin()
    if what == "killed" and rank == 1:
        os.kill(saver._writer.pid or 0, signal.SIGSTOP)
    if what == "bit" and rank == 1:
        _flip(saver)
    beside.step()
    if what == "killed" and rank == 1:
        os.kill(saver._writer.pid or 0, signal.SIGKILL)
    beside.step()
    assert saver.finish() is None
    found = {"failed": saver.failed, "left": list_steps(folder), "names": sorted(os.listdir(folder))}
    torch.distributed.barrier()
    if what == "disk full" and rank == 0:
        filling.unlink()
    torch.distributed.barrier()
    beside.begin()
    beside.step()
    again = saver.finish()
    saver.close()
    return {**found, "again": again is not None and list_steps(folder) == [again.step]}


def _flip(saver: DiskSaver) -> None:
    """Change a bit in shared memory after it was copied."""
    snapshot: Any = saver._snapshots[0]
    file = next(one for one in snapshot._copying.result() if one.name.startswith("zero_pp_rank_1"))
    memory = snapshot._images[file.name].memory
    memory[max(file.layout.tensors, key=lambda one: one.size_bytes).offset + 5] ^= 1


def _free(folder: str) -> int:
    place = os.statvfs(folder)
    return max(0, place.f_bavail * place.f_frsize - 8192)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("killed", r"rank 1 on .*: its writer \(process \d+\) was killed by signal 9"),
        ("disk full", "the disk is full"),
        ("bit", "data/.* in the snapshot of zero_pp_rank_1_mp_rank_00_optim_states.pt is not what was copied"),
    ],
)
def test_a_failed_save_leaves_the_one_before(tmp_path: Path, what: str, told: str) -> None:
    """All ranks learn it, training goes on, nothing older is deleted, and the next save is right."""
    with small_disk(tmp_path / "disk", 400_000) as disk:
        folder = disk / "run"
        found = run_distributed(_fail, 2, str(folder), what, str(tmp_path))
    for one in found:
        assert one["failed"] == 1
        assert one["left"] == [1]
        assert not [name for name in one["names"] if name.startswith(".tmp")]
        assert one["again"]
    (event,) = read_events(tmp_path, kind="warning", name="checkpoint_not_saved")
    assert event.step == 2
    assert re.search(told, event.fields["message"])


def _stop_writer(folder: str) -> list[int]:
    beside = Beside(folder)
    beside.run.train(1)
    beside.begin()
    beside.saver._writer.start()
    if torch.distributed.get_rank() == 0:
        os.kill(beside.saver._writer.pid or 0, signal.SIGSTOP)
    for _ in range(5):
        assert beside.step() is None
    found = list_steps(folder)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        os.kill(beside.saver._writer.pid or 0, signal.SIGCONT)
    assert beside.saver.finish() is not None
    beside.saver.close()
    return [*found, *list_steps(folder)]


def test_a_writer_that_stands_still_holds_up_nothing(tmp_path: Path) -> None:
    """Steps go on, the checkpoint is not there; it comes when the writer goes on."""
    assert run_distributed(_stop_writer, 2, str(tmp_path / "run")) == [[1], [1]]


def _reserve(folder: str) -> bool:
    beside = Beside(folder)
    saver: Any = beside.saver
    beside.run.train(1)
    saver.reserve(beside.run.engine, SavedState({}, {"rng": capture_rng(), "consumed": 1}), is_asked=True)
    pid, images = saver._writer.pid, saver._snapshots[0]._images
    maps = {name: image.memory for name, image in images.items()}
    beside.begin()
    beside.step()
    result = saver.finish()
    kept = pid is not None and saver._writer.pid == pid and all(image.memory is maps[n] for n, image in images.items())
    saver.close()
    return kept and result is not None


def test_a_save_takes_the_memory_that_was_reserved(tmp_path: Path) -> None:
    """Memory and writer that were there before the first save are those of the save."""
    assert run_distributed(_reserve, 2, str(tmp_path)) == [True, True]
