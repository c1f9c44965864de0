"""Preparation: what is written is what direct tokenization gives, once and whole, however often it is killed."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
import sentencepiece
import zstandard
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megasdc.common.errors import DataError, StorageError
from megasdc.data.formats import UNREADABLE
from megasdc.data.manifest import DataManifest, verify_prepared
from megasdc.data.merge import assign_splits, entropy_nats
from megasdc.data.pool import WorkerPool
from megasdc.data.prepare import prepare
from megasdc.data.sources import iterate_documents
from megasdc.data.tokenizer import load_tokenizer, train_sentencepiece

SMALL_SHARDS = 20_000
PREPARE = (
    "import sys; from megasdc.config.data import DataSection; from megasdc.data.prepare import prepare;"
    f"prepare(DataSection.model_validate_json(sys.argv[1]), workers=2, shard_characters={SMALL_SHARDS})"
)


def content(folder):
    """All files of a folder by relative name."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def work_folder(section):
    return Path(section.path).with_name(f".{Path(section.path).name}.preparing")


def test_read_back_by_megatron_equals_direct_tokenization(prepared):
    """Every document is in exactly one split, as its own tokens and one end-of-document token, in source order."""
    folder = Path(prepared.path)
    tokenizer = load_tokenizer("sentencepiece", folder / "tokenizer")
    texts = list(iterate_documents(prepared.sources[0]))
    splits = assign_splits(len(texts), prepared.split, prepared.seed)
    manifest = DataManifest.load(folder)
    for index, name in enumerate(("train", "valid", "test")):
        expected = [text for text, split in zip(texts, splits, strict=True) if split == index]
        data = IndexedDataset(str(folder / name))
        assert len(data) == len(expected) == manifest.splits[name].num_documents
        for row, text in zip(data, expected, strict=True):
            assert row.dtype == np.uint16
            assert row.tolist() == [*tokenizer.encode([text])[0], tokenizer.end_of_document]
        assert manifest.splits[name].num_tokens == int(data.sequence_lengths.sum())
        assert manifest.splits[name].num_bytes == sum(len(text.encode()) for text in expected)


def test_manifest_says_what_is_there(prepared):
    """The manifest holds the tokenizer's checksum, the entropy of the training tokens, and a licence note."""
    folder = Path(prepared.path)
    manifest = verify_prepared(folder, quick=False)
    assert manifest.tokenizer.checksum == load_tokenizer("sentencepiece", folder / "tokenizer").checksum
    counts = Counter(np.fromfile(folder / "train.bin", dtype=np.uint16).tolist())
    total = sum(counts.values())
    entropy = -sum(number / total * math.log(number / total) for number in counts.values())
    assert manifest.unigram_entropy_nats == pytest.approx(entropy, rel=1e-12)
    assert manifest.sources[0].num_documents == 40
    assert manifest.sources[0].licence
    assert set(manifest.files) == set(content(folder)) - {"manifest.json"}


def test_result_does_not_depend_on_workers_or_shards(tmp_path, corpus, prepared, section_for):
    """Another number of workers and another size of shards give the same bytes in every file."""
    section = section_for(tmp_path / "again", corpus)
    prepare(section, workers=3, progress=False, shard_characters=SMALL_SHARDS)
    assert content(Path(section.path)) == content(Path(prepared.path))
    assert not work_folder(section).exists()


def wait_for(process, condition):
    while not condition():
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.001)


@pytest.mark.slow
def test_killed_runs_resume_to_the_same_bytes(tmp_path, corpus, prepared, section_for, caplog):
    """A run killed while tokenizing or writing leaves no destination and no worker; the next reuses good shards."""
    section = section_for(tmp_path / "killed", corpus)
    work = work_folder(section)

    def shards():
        return list(work.glob("shards/*.npz"))

    for moment in (lambda: len(shards()) >= 3, (work / "result" / "train.bin").exists):
        process = subprocess.Popen([sys.executable, "-c", PREPARE, section.model_dump_json()])
        wait_for(process, moment)
        workers = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not Path(section.path).exists()
        assert psutil.wait_procs(workers, timeout=30)[1] == []
    num_shards = len(shards())
    first, second, third = shards()[:3]
    shutil.copy(first, second)
    third.write_bytes(third.read_bytes()[:-50])
    with caplog.at_level(logging.INFO, "megasdc"):
        prepare(section, workers=2, progress=False, shard_characters=SMALL_SHARDS)
    assert f"resumed: {num_shards - 2} of {num_shards} shards" in caplog.text
    assert content(Path(section.path)) == content(Path(prepared.path))


def test_equal_settings_reuse_and_others_refuse(tmp_path, corpus, section_for):
    """A second call returns what is there; other settings or input are refused by name, and replaced with force."""
    source = tmp_path / "text"
    shutil.copytree(corpus, source)
    section = section_for(tmp_path / "out", source)
    first = prepare(section, progress=False)
    times = {path: path.stat().st_mtime_ns for path in Path(section.path).rglob("*")}
    assert prepare(section, workers=2, progress=False) == first
    assert {path: path.stat().st_mtime_ns for path in Path(section.path).rglob("*")} == times
    other = section.model_copy(update={"seed": 5})
    with pytest.raises(
        DataError, match=r"other settings: data\.seed was 1234, is 5; give another .* or replace it with --force"
    ):
        prepare(other, progress=False)
    assert {path: path.stat().st_mtime_ns for path in Path(section.path).rglob("*")} == times
    changed = prepare(other, progress=False, force=True)
    assert changed.files["train.bin"] != first.files["train.bin"]
    verify_prepared(section.path, quick=False)
    (source / "zzz.txt").write_text("one more")
    with pytest.raises(DataError, match=r"data\.sources\.0\.input\.listing was"):
        prepare(other, progress=False)


def test_files_that_earlier_versions_left_out_are_named(tmp_path, corpus, prepared, section_for):
    """Where data are not found again because of .json and .ndjson files and linked folders alone, the error says so."""
    source = tmp_path / "text"
    (source / "sub").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    for name in ("a.txt", "sub/b.jsonl", "../elsewhere/f.txt"):
        (source / name).write_text('{"text": "some text"}\n')
    tokenizer = {"path": str(Path(prepared.path) / "tokenizer")}
    section = section_for(tmp_path / "out", source, split=[1, 0, 0], tokenizer=tokenizer)
    first = prepare(section, progress=False)
    for name in ("c.json.zst", "sub/d.ndjson"):
        content = b'{"text": "more"}\n'
        (source / name).write_bytes(zstandard.compress(content) if name.endswith("zst") else content)
    (source / "link").symlink_to("../elsewhere")
    named = r"data\.sources\.0 differs only by files .* since: c\.json\.zst, link/f\.txt, sub/d\.ndjson \(runs may"
    with pytest.raises(DataError, match=named):
        prepare(section, progress=False)
    (source / "a.txt").write_text("other text")
    with pytest.raises(DataError, match="other settings") as other:
        prepare(section, progress=False)
    assert "differs only" not in str(other.value)
    assert DataManifest.load(Path(section.path)) == first


def test_damaged_destination_is_refused_and_repaired_with_force(tmp_path, corpus, prepared, section_for):
    """Prepared data that lost bytes are not taken for whole; force makes them again."""
    section = section_for(tmp_path / "out", corpus)
    shutil.copytree(prepared.path, section.path)
    path = Path(section.path) / "train.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"train\.bin has \d+ bytes, its manifest says"):
        prepare(section, progress=False)
    prepare(section, progress=False, force=True)
    assert content(Path(section.path)) == content(Path(prepared.path))


def test_foreign_folder_is_never_touched(tmp_path, corpus, section_for):
    """A folder that holds something else is refused, also with force, and stays as it is."""
    section = section_for(tmp_path / "home", corpus)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("dear")
    with pytest.raises(DataError, match="is not prepared data"):
        prepare(section, progress=False, force=True)
    assert content(tmp_path / "home") == {"letter": b"dear"}


def test_two_at_once(tmp_path, corpus, section_for):
    """A second process that prepares the same folder is refused."""
    section = section_for(tmp_path / "out", corpus)
    work_folder(section).mkdir()
    with open(work_folder(section) / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another process is preparing"):
            prepare(section, progress=False)
    prepare(section, progress=False)


def test_unreadable_lines_of_all_sources(tmp_path, prepared, section_for):
    """The limit is that of all sources together, in each pass over them; data that need none keep their settings."""
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_bytes(b'{"text": "%s"}\n{"text"\n' % (name.encode() * 5000))
    given = {
        "split": [1, 0, 0],
        "sources": [{"kind": "files", "path": str(tmp_path / f"{name}.jsonl")} for name in "ab"],
        "tokenizer": {"vocab_size": 262, "train_characters": 1000},
    }
    with pytest.raises(DataError, match=r"b\.jsonl, line 2 cannot be read as JSON"):
        prepare(section_for(tmp_path / "out", "", **given, max_unreadable=1), progress=False)
    manifest = prepare(section_for(tmp_path / "out", "", **given, max_unreadable=2), progress=False)
    assert [source.skipped for source in manifest.sources] == [{UNREADABLE: 1}] * 2
    assert manifest.settings["max_unreadable"] == 2
    assert "max_unreadable" not in DataManifest.load(prepared.path).settings


def test_tokenizer_that_does_not_know_the_text(tmp_path, prepared, section_for):
    """One that knows less than half is refused before all is encoded, unless accepted; shares are in the manifest."""
    model = tmp_path / "t.model"
    with open(model, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["abc def"] * 50), model_writer=file, vocab_size=12, model_type="char", minloglevel=2
        )
    (tmp_path / "a").mkdir()
    for name, text in (("a", "abcd" * 100), ("b", "สวัสดี " * 200)):
        (tmp_path / "a" / f"{name}.txt").write_text(text)
    tokenizer = {"path": str(model)}
    refused = section_for(tmp_path / "out", tmp_path / "a", split=[1, 0, 0], tokenizer=tokenizer)
    with pytest.raises(DataError, match=r"does not know 66\.7% of 1,800 characters .*data\.tokenizer\.accept_unknown"):
        prepare(refused, progress=False)
    assert not list(work_folder(refused).glob("shards/*"))
    tokenizer["accept_unknown"] = True
    accepted = section_for(tmp_path / "out", tmp_path / "a", split=[1, 0, 0], tokenizer=tokenizer)
    manifest = prepare(accepted, progress=False)
    assert manifest.round_trip.unknown_share == pytest.approx(1200 / 1800)
    assert prepare(refused, progress=False) == manifest  # what is there was accepted
    assert DataManifest.load(prepared.path).round_trip.changed_share == 0


def test_unwritable_destination(tmp_path, corpus, section_for):
    """A destination below a file is a StorageError that names it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot write prepared data to .*file/out"):
        prepare(section_for(tmp_path / "file" / "out", corpus), progress=False)


def test_full_disk_in_a_worker(tmp_path, corpus, section_for, monkeypatch):
    """A disk that fills up is a StorageError, and what was finished is kept for the next run."""
    section = section_for(tmp_path / "out", corpus)
    request = WorkerPool._request

    def fill_up(pool, process, path, texts):
        if path.name.startswith("00000003"):
            raise OSError(28, "No space left on device")
        request(pool, process, path, texts)

    with monkeypatch.context() as patch:
        patch.setattr(WorkerPool, "_request", fill_up)
        with pytest.raises(StorageError, match="No space left on device; finished shards are kept"):
            prepare(section, progress=False, shard_characters=SMALL_SHARDS)
    assert list(work_folder(section).glob("shards/00000000-*.npz"))
    prepare(section, progress=False, shard_characters=SMALL_SHARDS)


def test_dead_worker(tmp_path, corpus):
    """A worker that is killed gives an error with the signal instead of a hang."""
    train_sentencepiece([path.read_text() for path in corpus.glob("*.txt")], tmp_path / "tokenizer.model", 400)
    with WorkerPool("sentencepiece", tmp_path, 1) as pool:
        pool._processes[0].kill()
        with pytest.raises(DataError, match=r"ended by signal 9"):
            pool.submit(tmp_path / "00000000-x.npz", ["text"]).result(timeout=30)


def test_a_worker_that_does_not_end_is_killed(tmp_path, monkeypatch, caplog):
    """Once its input has ended and it has had its time; preparation waited for it without a limit or a word."""
    monkeypatch.setattr("megasdc.data.pool.KILLED_S", 0.5)
    with WorkerPool("sentencepiece", tmp_path, 1) as pool:
        (worker,) = pool._processes
        worker.send_signal(signal.SIGSTOP)
    assert worker.returncode == -signal.SIGKILL and f"(pid {worker.pid})" in caplog.text


UNENDING = """
import signal, sys, time
from pathlib import Path
from megasdc.data import pool
from megasdc.parallel import processes

processes.KILLED_S = 0.2
workers = pool.WorkerPool("sentencepiece", Path("none"), 1)
worker = workers._processes[0]
Path(sys.argv[1]).write_text(str(worker.pid))
worker.send_signal(signal.SIGSTOP)
worker.kill = lambda: None  # as where it waits in the kernel
try:
    with workers:
        running = workers.submit(Path("none"), ["text"])
        while not running.running():
            time.sleep(0.01)
        raise KeyboardInterrupt
except KeyboardInterrupt:
    sys.exit(7)
"""


def test_a_worker_that_cannot_be_killed_is_left(tmp_path):
    """Preparation ends with its own exit code; Python waited at its end for the thread that waits for the worker."""
    pid = tmp_path / "pid"
    try:
        assert subprocess.run([sys.executable, "-c", UNENDING, str(pid)], check=False, timeout=120).returncode == 7
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


def test_worker_reports_its_error(tmp_path, prepared):
    """What a worker cannot do is raised in the caller, by its own name, and the worker goes on."""
    with WorkerPool("sentencepiece", Path(prepared.path) / "tokenizer", 1) as pool:
        with pytest.raises(FileNotFoundError, match=r"nowhere"):
            pool.submit(tmp_path / "nowhere" / "00000000-x.npz", ["text"]).result(timeout=30)
        pool.submit(tmp_path / "00000000-x.npz", ["text"]).result(timeout=30)
    assert (tmp_path / "00000000-x.npz").exists()


def test_given_tokenizer_and_splits_left_out(tmp_path, corpus, prepared, section_for):
    """A given model is used as it is and copied; a split with share 0 has no files."""
    model = Path(prepared.path) / "tokenizer" / "tokenizer.model"
    section = section_for(
        tmp_path / "out", corpus, split=[1, 0, 0], tokenizer={"kind": "sentencepiece", "path": str(model)}
    )
    manifest = prepare(section, progress=False)
    assert set(manifest.splits) == {"train"}
    assert set(manifest.files) == {"train.bin", "train.checksums", "train.idx", "tokenizer/tokenizer.model"}
    assert manifest.tokenizer == DataManifest.load(prepared.path).tokenizer


@pytest.mark.slow
def test_huggingface_tokenizer(tmp_path, corpus, huggingface_folder, section_for):
    """Prepared with a Hugging Face tokenizer, the ids are its own, and the copy in the folder decodes them."""
    tokenizer = {"kind": "huggingface", "path": str(huggingface_folder)}
    section = section_for(tmp_path / "out", corpus, split=[1, 0, 0], tokenizer=tokenizer)
    manifest = prepare(section, workers=2, progress=False)
    copy = load_tokenizer("huggingface", tmp_path / "out" / "tokenizer")
    assert (manifest.tokenizer.vocab_size, manifest.tokenizer.checksum) == (500, copy.checksum)
    original = load_tokenizer("huggingface", huggingface_folder)
    data = IndexedDataset(str(tmp_path / "out" / "train"))
    for row, text in zip(data, iterate_documents(section.sources[0]), strict=True):
        assert row.tolist() == [*original.encode([text])[0], original.end_of_document]
        assert copy.decode(row) == text
    assert prepare(section, progress=False) == manifest
    with pytest.raises(DataError, match="must name a folder or a hub tokenizer"):
        prepare(section_for(tmp_path / "other", corpus, tokenizer={"kind": "huggingface"}), progress=False)


@pytest.mark.slow
def test_workers_import_no_torch(tmp_path, huggingface_folder):
    """A worker maps no library of torch, also with a Hugging Face tokenizer; it would cost seconds and memory each."""
    with WorkerPool("huggingface", huggingface_folder, 1) as pool:
        pool.submit(tmp_path / "00000000-x.npz", ["text"]).result(timeout=60)
        mapped = psutil.Process(pool._processes[0].pid).memory_maps()
    assert len(mapped) > 10
    assert [one.path for one in mapped if "torch" in Path(one.path).parts] == []  # the folder of the package


@pytest.mark.parametrize("num_documents", [3, 10, 99, 1000])
def test_assign_splits(num_documents):
    """Counts follow the shares to within one, every share gets a document, and the seed decides which."""
    splits = assign_splits(num_documents, [98, 1, 1], seed=7)
    counts = np.bincount(splits, minlength=3)
    assert counts.sum() == num_documents
    assert counts.min() >= 1
    assert abs(counts[1] - num_documents / 100) <= 1
    assert (splits == assign_splits(num_documents, [98, 1, 1], seed=7)).all()
    if num_documents > 10:
        assert (splits != assign_splits(num_documents, [98, 1, 1], seed=8)).any()
        held_out = np.flatnonzero(splits) / num_documents
        assert num_documents < 1000 or 0.3 < held_out.mean() < 0.7


def test_assign_splits_errors():
    """Too few documents, or no share at all, is a DataError that says so."""
    with pytest.raises(DataError, match=r"2 document\(s\) cannot fill 3 splits"):
        assign_splits(2, [98, 1, 1], seed=0)
    with pytest.raises(DataError, match="at least one share"):
        assign_splits(2, [0, 0, 0], seed=0)


def test_entropy_of_known_tables():
    """Entropy of n equal counts is ln n, of a single one 0."""
    assert entropy_nats(np.array([5, 5, 0, 5])) == pytest.approx(math.log(3), rel=1e-12)
    assert entropy_nats(np.array([0, 9])) == 0.0
