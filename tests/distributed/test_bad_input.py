"""Does bad input end every rank with its documented code and a message that names place, value and remedy?"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_distributed
from whole_runs import events_of, prepare_text, train_run, write_config

from megasdc.common.run_lock import Holder, acquire_lock, read_holder
from megasdc.events import read_events
from megasdc.metrics.writer import read_metrics

pytestmark = pytest.mark.distributed

HANG, PEER = 75, 79


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text; tests that damage it copy it first."""
    return prepare_text(tmp_path_factory.mktemp("text"))


def _truncate(folder: Path) -> None:
    content = (folder / "train.bin").read_bytes()
    (folder / "train.bin").write_bytes(content[:-100])


def _empty(folder: Path) -> None:
    (folder / "train.idx").write_bytes(b"")


def _foreign_ids(folder: Path) -> None:
    content = bytearray((folder / "train.bin").read_bytes())
    content[: len(content) // 2] = b"\xff" * (len(content) // 2)
    (folder / "train.bin").write_bytes(content)


def _edit_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"vocab_size": 500', '"vocab_size": 400'))


def _other_tokenizer(folder: Path) -> None:
    model = next(iter((folder / "tokenizer").glob("*.model")))
    content = bytearray(model.read_bytes())
    content[-1] ^= 1
    model.write_bytes(content)


DAMAGES: list[tuple[str, Callable[[Path], Any], str]] = [
    ("missing", shutil.rmtree, r"data/manifest.json is missing.*prepare-data"),
    ("truncated", _truncate, r"train.bin has \d+ bytes, its manifest says \d+"),
    ("empty", _empty, r"train.idx has 0 bytes, its manifest says \d+"),
    ("foreign_ids", _foreign_ids, r"train.bin is damaged: block 0 \(bytes 0 to 65535\) has checksum"),
    ("edited_manifest", _edit_manifest, r"manifest.json was changed: its content has checksum \w+, expected \w+"),
    ("other_tokenizer", _other_tokenizer, r"tokenizer/\S+ has checksum"),
]


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGES, ids=[name for name, _, _ in DAMAGES])
def test_damaged_data_end_with_the_data_code(
    tmp_path: Path, data: Path, name: str, damage: Callable[[Path], Any], message: str
) -> None:
    """Missing, truncated, empty and foreign data end with code 71 (or 75, 79 on a rank that only lost its peer)."""
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    damage(copy)
    # A rank whose peer has failed waits for it up to the timeout here, where no launcher ends it.
    results = train_run(write_config(tmp_path / "c.json", copy, tmp_path / "run", parallel__timeout_s=5.0), 2)
    assert {code for code, _ in results} <= {71, HANG, PEER}
    _matches(results, 71, message)
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_data_of_the_version_before_train(tmp_path: Path, data: Path) -> None:
    """Data without checksums of blocks are trained on, which one event of the run says, by folder."""
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    content = json.loads((copy / "manifest.json").read_text())
    del content["checksum"], content["block_bytes"]
    for source in content["sources"]:
        del source["skipped_at"]
    kept = {name: record for name, record in content["files"].items() if not name.endswith(".checksums")}
    (copy / "manifest.json").write_text(json.dumps({**content, "format_version": 1, "files": kept}))
    config = write_config(tmp_path / "c.json", copy, tmp_path / "run")
    assert train_run(config, 2, "megasdc.training.stop_step=1") == [(0, None)] * 2
    events = events_of(tmp_path / "run", "data", "unchecked")
    assert [(event["rank"], event["folder"]) for event in events] == [(0, str(copy))]


def _matches(results: list[Any], code: int, message: str) -> None:
    texts = [text for got, text in results if got == code]
    assert texts, results
    assert all(re.search(message, text, re.DOTALL) for text in texts), texts


CONFIG_PROBLEMS: list[tuple[str, dict[str, Any], str]] = [
    ("positions", {"data__sequence_length": 65}, r"sequence_length.*65.*max_positions.*64"),
    ("batch", {"deepspeed__train_batch_size": 1}, r"train_batch_size: got 1.*data-parallel size 2"),
    ("layout", {"parallel__tensor": 3}, r"tensor"),
    ("layers", {"model__num_layers": 3, "parallel__pipeline": 2}, r"num_layers.*3.*2"),
    ("unknown_key", {"training__stepz": 5}, r"megasdc.training.stepz: unknown key.*megasdc.training.steps"),
    ("wrong_type", {"training__steps": "ten"}, r'megasdc.training.steps: got "?ten'),
    ("megatron", {"model__megatron": {"qk_layernrom": True}}, r"qk_layernrom.*qk_layernorm"),
    ("heads", {"model__num_attention_heads": 3}, r"num_attention_heads"),
]


@pytest.mark.parametrize(("name", "changes", "message"), CONFIG_PROBLEMS, ids=[name for name, _, _ in CONFIG_PROBLEMS])
def test_wrong_config_ends_with_the_config_code(
    tmp_path: Path, data: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    """What does not fit is refused by all ranks with code 70 before anything is written."""
    results = train_run(write_config(tmp_path / "c.json", data, tmp_path / "run", **changes), 2)
    assert {code for code, _ in results} == {70}
    _matches(results, 70, message)
    assert not (tmp_path / "run").exists()


def test_fp16_is_refused_where_the_processor_has_none(tmp_path: Path, data: Path) -> None:
    """fp16 trains on a CPU that oneDNN computes it on; elsewhere it ends with code 70, the host and a remedy."""
    changes = {"deepspeed__fp16": {"enabled": True, "initial_scale_power": 8}, "training__steps": 1}
    (code, message), *_ = train_run(write_config(tmp_path / "c.json", data, tmp_path / "run", **changes), 1)
    if torch.ops.mkldnn._is_mkldnn_fp16_supported():
        assert (code, message) == (0, None)
        return
    assert code == 70
    assert re.search(r"fp16.enabled: got true.*AVX512-FP16.*another precision", message, re.DOTALL)


def test_a_tokenizer_that_the_data_were_not_made_with(tmp_path: Path, data: Path) -> None:
    """A configuration that names another tokenizer than the data's is refused with code 71 and both."""
    config = write_config(tmp_path / "c.json", data, tmp_path / "run", data__tokenizer={"vocab_size": 600})
    results = train_run(config, 1)
    _matches(results, 71, r"600.*500")


def test_an_unwritable_run_folder(tmp_path: Path, data: Path) -> None:
    """A run folder that cannot be made ends with code 77 and its name."""
    (tmp_path / "file").write_text("")
    results = train_run(write_config(tmp_path / "c.json", data, tmp_path / "file" / "run"), 2)
    assert {code for code, _ in results} == {77}
    _matches(results, 77, r"file/run is not writable")


def test_a_run_folder_in_use(tmp_path: Path, data: Path) -> None:
    """Every rank of a second launch into a folder ends with code 78 and who has it, and nothing there is changed."""
    run, elsewhere = tmp_path / "run", tmp_path / "checkpoints"
    for folder in (run, elsewhere):
        folder.mkdir()
    config = write_config(tmp_path / "c.json", data, run, training__steps=1, checkpoint__folder=str(elsewhere))
    for folder in (run, elsewhere):
        lock = acquire_lock(folder, Holder.this_process("theirs", "20260102-030405-abcdef"), print)
        before = _content(folder)
        results = train_run(config, 2)
        assert {code for code, _ in results} == {78}
        _matches(results, 78, rf"{folder} is in use by launch 20260102-030405-abcdef .*process {os.getpid()}, since")
        assert _content(folder) == before
        if folder == run:  # refused before the ranks meet, and thus before they look for the lock
            results = train_run(config, 2, f"megasdc.data.path={tmp_path / 'absent'}")
            assert {code for code, _ in results} == {71}
            assert _content(folder) == before
        lock.release()
    assert not list(run.glob("events/*")) and read_holder(run) is None
    assert [code for code, _ in train_run(config, 2)] == [0, 0]
    assert read_holder(run) is read_holder(elsewhere) is None


def _stop_in_the_start(config: str, folder: str) -> None:
    """Body of a rank: rank 1 stands still when the folder is held; rank 0, which waits for it, is asked to stop."""
    from megasdc.pretrain import pretrain
    from megasdc.train import build, signals

    signals.STUCK_S, build_engine = 1.0, build.build_training_engine

    def building(*args: Any, **kwargs: Any) -> Any:
        assert read_holder(Path(folder)) is not None
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return build_engine(*args, **kwargs)

    build.build_training_engine = building
    code, _ = pretrain(config, [], (), lambda code, error: os._exit(code))
    os._exit(code)


def test_a_start_that_is_ended_gives_its_folder_back(tmp_path: Path, data: Path) -> None:
    """Rank 0 is stuck with the folder in its hands; nobody on another host has to wait for its signs of life."""
    config, run = write_config(tmp_path / "c.json", data, tmp_path / "run"), str(tmp_path / "run")
    run_distributed(_stop_in_the_start, 2, str(config), run, init=False, expect_exit={0: 79}, timeout_s=50, grace_s=0)
    assert read_holder(tmp_path / "run") is None


def _content(folder: Path) -> dict[str, bytes]:
    """All files but the record, which counts up."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock.json"]
    return {str(path): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"model__hidden_size": 64}, r"hidden_size|model"), ({"parallel__tensor": 2}, r"TP1.*TP2|layout")],
    ids=["other_size", "other_layout"],
)
def test_resume_with_another_model_or_layout(tmp_path: Path, data: Path, changes: dict[str, Any], message: str) -> None:
    """A checkpoint of another model or layout is refused by all ranks with code 72, and stays as it is."""
    config = write_config(tmp_path / "c.json", data, tmp_path / "run")
    assert train_run(config, 2, "megasdc.training.stop_step=2") == [(0, None)] * 2
    before = sorted((path.name, path.stat().st_size) for path in (tmp_path / "run/checkpoints").rglob("*"))
    other = write_config(tmp_path / "other.json", data, tmp_path / "run", **changes)
    resolved = (tmp_path / "run" / "resolved.json").read_text()
    results = train_run(other, 2)
    assert (tmp_path / "run" / "resolved.json").read_text() == resolved
    assert {code for code, _ in results} == {72}
    _matches(results, 72, message)
    assert before == sorted((path.name, path.stat().st_size) for path in (tmp_path / "run/checkpoints").rglob("*"))


def test_resume_never_protects_a_run(tmp_path: Path, data: Path) -> None:
    """With resume "never" a folder that holds a checkpoint is refused with code 72 and a remedy."""
    config = write_config(tmp_path / "c.json", data, tmp_path / "run")
    assert train_run(config, 1, "megasdc.training.stop_step=2") == [(0, None)]
    folder = tmp_path / "run" / "checkpoints"
    (folder / ".tmp_step_00000003").mkdir()
    (folder / "step_00000002").rename(folder / ".tmp_replaced_step_00000002")
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    results = train_run(config, 1, "megasdc.checkpoint.resume=never")
    _matches(results, 72, r"step 2.*never.*another folder.*nothing in it was changed")
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == before


def test_an_interrupted_rank_saves_and_leaves_a_record(tmp_path: Path, data: Path) -> None:
    """SIGINT while training ends it as SIGTERM does: with a checkpoint, its reason, and exit code 0."""
    config = write_config(tmp_path / "c.json", data, tmp_path / "run", training__steps=1_000_000)
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    script = Path(__file__).parents[2] / "launch" / "pretrain_gpt.py"
    # A shell that starts tests in the background has SIGINT ignored, which children inherit.
    start = "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); del sys.argv[0]; "
    process = subprocess.Popen(
        [sys.executable, "-c", f"{start}runpy.run_path(sys.argv[0], run_name='__main__')", script, "--config", config],
        env={**os.environ, **variables, "MEGASDC_LAUNCH_ID": "this"},
    )
    try:
        end = time.monotonic() + 300
        while not read_metrics(tmp_path / "run") and time.monotonic() < end:
            assert process.poll() is None
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 0
    finally:
        process.kill()
    record = json.loads((tmp_path / "run" / "done" / "this" / "rank_00000.json").read_text())
    assert (record["exit_code"], record["error_class"]) == (0, None)
    (stop,) = read_events(tmp_path / "run", kind="stop", name="requested")
    assert stop.fields["reason"] == "signal SIGINT"
    assert (tmp_path / "run" / "checkpoints" / f"step_{stop.step:08d}").is_dir()
