"""Samples: the tokens of the documents in an order that only data, seed and sequence length decide."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megasdc.common.errors import DataError
from megasdc.data.dataset import build_datasets, cached_index
from megasdc.data.manifest import DataManifest
from megasdc.data.prepare import prepare

S = 64


def build(section, cache, num_samples=100, **changes):
    return build_datasets(section.model_copy(update=changes), 640, num_samples, 8, cache)


def test_an_epoch_holds_the_tokens_of_the_documents(tmp_path, prepared):
    """Samples of an epoch, put in order, are the shuffled documents end to end; labels are the next tokens."""
    train, _ = build(prepared, tmp_path, num_samples=10**6)
    data = IndexedDataset(str(Path(prepared.path) / "train"))
    epoch = train._epoch(0)
    stream = np.concatenate([data[document] for document in epoch.document_index])
    assert sorted(epoch.document_index) == list(range(len(data)))
    assert train.samples_per_epoch == (len(stream) - 1) // S
    seen = set()
    for position in range(train.samples_per_epoch):
        tokens, labels, loss_mask = train[position]
        assert (tokens.dtype, labels.dtype, loss_mask.dtype) == (torch.int64, torch.int64, torch.float32)
        start = int(epoch.shuffle_index[position]) * S
        seen.add(start)
        assert tokens.tolist() == stream[start : start + S].tolist()
        assert labels.tolist() == stream[start + 1 : start + S + 1].tolist()
        assert loss_mask.tolist() == [1.0] * S
    assert len(seen) == train.samples_per_epoch


def everything(dataset, count):
    return torch.stack([dataset[position][0] for position in range(count)])


def test_order_depends_on_the_seed_only(tmp_path, prepared):
    """Same seed, same samples, also for a longer stream and another cache; another seed or epoch, another order."""
    train, valid = build(prepared, tmp_path / "a", num_samples=50)
    n = train.samples_per_epoch
    longer, again = build(prepared, tmp_path / "b", num_samples=3 * n)
    assert torch.equal(everything(train, 50), everything(longer, 50))
    assert torch.equal(everything(valid, 8), everything(again, 8))
    assert train.identity == longer.identity != valid.identity
    other, _ = build(prepared, tmp_path / "a", num_samples=50, seed=9)
    assert not torch.equal(everything(train, 50), everything(other, 50))
    assert other.identity != train.identity
    two = everything(longer, 2 * n)
    assert not torch.equal(two[:n], two[n:])
    assert torch.equal(everything(longer, n), two[:n])  # back to an epoch that is not held any more


@pytest.mark.slow
def test_end_of_document_targets_are_masked(tmp_path, prepared):
    """With mask_end_of_document the mask is 0 exactly where the label is the end of a document."""
    plain, _ = build(prepared, tmp_path)
    masked, _ = build(prepared, tmp_path, mask_end_of_document=True)
    end = DataManifest.load(prepared.path).tokenizer.end_of_document
    n = plain.samples_per_epoch
    plain.num_samples = masked.num_samples = n
    hits = 0
    for position in range(n):
        assert torch.equal(plain[position][1], masked[position][1])
        assert plain[position][2].min() == 1.0
        assert torch.equal(masked[position][2] == 0.0, masked[position][1] == end)
        hits += int((masked[position][1] == end).sum())
    assert hits > 0


def test_the_kept_index_is_used(tmp_path, prepared, monkeypatch):
    """The second build reads it and builds none."""
    first, _ = build(prepared, tmp_path)
    (tmp_path / "partial-left-by-a-kill").mkdir()
    monkeypatch.setattr("megasdc.data.dataset.EpochDataset._build_in_memory", None)
    second, _ = build(prepared, tmp_path)
    assert torch.equal(everything(first, 20), everything(second, 20))


def _flip(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "problem"),
    [
        ("shuffle_index.npy", _flip, r"shuffle_index\.npy has checksum \w+, expected \w+"),
        ("sample_index.npy", lambda path: path.write_bytes(path.read_bytes()[:-4]), r"sample_index\.npy has checksum"),
        ("document_index.npy", Path.unlink, r"FileNotFoundError.*document_index\.npy"),
        ("checksums.json", _flip, r"index\.npy has checksum"),
    ],
    ids=["flipped", "torn", "missing", "checksums"],
)
def test_a_damaged_index_is_built_again(tmp_path, prepared, caplog, name, damage, problem):
    """One flipped bit too; it is told once, by the process that does so, and the samples are the same."""
    told = []
    used = (prepared, 640, 100, 0, tmp_path, False, None, lambda *what: told.append(what))
    first = everything(build_datasets(*used)[0], 20)
    (path,) = tmp_path.glob(f"*/{name}")
    damage(path)
    for _ in range(2):
        assert torch.equal(first, everything(build_datasets(*used)[0], 20))
    ((folder, said),) = told
    assert folder == path.parent and re.search(problem, said)
    assert caplog.text.count("is rebuilt, the old one is ") == 1
    (aside,) = tmp_path.glob("damaged-*")  # a run on another host may have it mapped
    assert len(list(aside.iterdir())) >= 3


@pytest.mark.parametrize("same", [True, False])
def test_an_index_of_an_earlier_version_gets_checksums(tmp_path, prepared, same):
    """It has none; where its content is what is expected, nothing else is changed, else it is built again."""
    told = []
    used = (prepared, 640, 100, 0, tmp_path, False, None, lambda *what: told.append(what))
    first = everything(build_datasets(*used)[0], 20)
    (path,) = tmp_path.glob("*/checksums.json")
    content = json.loads(path.read_text())
    path.unlink()
    if not same:
        _flip(path.with_name("shuffle_index.npy"))
    before = path.with_name("shuffle_index.npy").stat().st_ino
    assert torch.equal(first, everything(build_datasets(*used)[0], 20))
    assert json.loads(path.read_text()) == content
    assert (path.with_name("shuffle_index.npy").stat().st_ino == before) == same
    assert ["an earlier version kept it" in said for _, said in told] == [True] * (not same)


def test_cache_that_cannot_be_written(tmp_path, prepared, caplog):
    """Without a place for the index it is built in memory, with a warning, and the samples are the same."""
    (tmp_path / "file").write_text("")
    without, _ = build(prepared, tmp_path / "file")
    assert "no sample index can be kept" in caplog.text
    assert torch.equal(everything(without, 20), everything(build(prepared, tmp_path / "cache")[0], 20))


def digest_in_rank(rank, world_size, rendezvous, section, cache, results):
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    if rank == 2:
        cache = cache.with_name("other node")
    train, _ = build(section, cache)
    results.put(everything(train, 100).tolist())
    torch.distributed.destroy_process_group()


def test_all_ranks_see_the_same_samples(tmp_path, prepared):
    """Ranks of a process group that build at the same time, one with a cache of its own, get equal samples."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    arguments = (3, tmp_path / "rendezvous", prepared, tmp_path / "cache", results)
    ranks = [context.Process(target=digest_in_rank, args=(rank, *arguments)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    samples = [results.get(timeout=60) for _ in ranks]
    for rank in ranks:
        rank.join(30)
        assert rank.exitcode == 0
    assert samples[0] == samples[1] == samples[2] == everything(build(prepared, tmp_path / "c")[0], 100).tolist()
    assert not list((tmp_path / "cache").glob("partial-*"))


def test_bad_fits_are_named(tmp_path, corpus, prepared, section_for):
    """Small vocabulary, long sequences, a missing split, a truncated file: each a DataError with both numbers."""
    with pytest.raises(DataError, match=r"vocabulary has 599 ids, the tokenizer of .* has 600"):
        build_datasets(prepared, 599, 10, 0, tmp_path)
    with pytest.raises(DataError, match=r"sequence_length is 10000000, which needs 10000001 tokens .* has \d+"):
        build(prepared, tmp_path, sequence_length=10_000_000)
    assert build_datasets(prepared, 600, 10, 0, tmp_path)[1] is None
    copy = tmp_path / "copy"
    shutil.copytree(prepared.path, copy)
    (copy / "train.idx").write_bytes((copy / "train.idx").read_bytes()[:-8])
    with pytest.raises(DataError, match=r"train\.idx has \d+ bytes"):
        build(prepared, tmp_path, path=str(copy))


def test_split_without_documents(tmp_path, corpus, prepared, section_for):
    """Evaluation on data without a validation split is refused."""
    from megasdc.data.prepare import prepare

    section = section_for(tmp_path / "out", corpus, split=[1, 0, 0], tokenizer=prepared.tokenizer.model_dump())
    prepare(section, progress=False)
    with pytest.raises(DataError, match=r"has no valid documents: its data\.split is \[1, 0, 0\]"):
        build(section, tmp_path)


class _Interrupted:
    """A value at which Ctrl-C comes while it is written."""

    def __reduce__(self):
        raise KeyboardInterrupt


def test_an_interrupted_index_leaves_nothing(tmp_path):
    """Neither half an index nor the folder that it was written to; a file system without locks would keep it."""
    broken = np.array([_Interrupted()], dtype=object)
    with pytest.raises(KeyboardInterrupt):
        cached_index(tmp_path / "index", ["one"], lambda: (broken,))
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_lock_that_another_process_holds_is_told(tmp_path, monkeypatch, caplog):
    """It is waited for, as long as an index takes to be built; after a while with a word, once."""
    monkeypatch.setattr("megasdc.data.dataset.TOLD_S", 0.0)
    with open(tmp_path / "lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        threading.Timer(0.5, fcntl.flock, (held, fcntl.LOCK_UN)).start()
        (found,) = cached_index(tmp_path / "index", ["one"], lambda: (np.arange(3),))
    assert found.tolist() == [0, 1, 2] and caplog.text.count(f"holds {tmp_path / 'lock'}") == 1


def test_a_sample_is_read_again_from_the_file_alone(tmp_path, corpus, section_for):
    """What the first read keeps - checked blocks, the cached mask of the loss - is not used by the second."""
    section = section_for(tmp_path / "data", corpus)
    prepare(section, workers=1, progress=False)
    dataset, _ = build(section, tmp_path / "cache")
    right = [one.clone() for one in dataset[5]]
    assert all(map(torch.equal, right, dataset.read_again(5)))
    dataset._epoch(0).cached_loss_mask[3] = 0.25
    assert dataset[5][2][3] == 0.25 and torch.equal(dataset.read_again(5)[2], right[2])
    content = np.memmap(dataset.path, np.uint16, "r+")
    (part, *_) = dataset.documents(5)
    place = int(dataset._tokens.index.sequence_pointers[part.document]) // 2 + part.first_token
    content[place] ^= 1
    content.flush()
    assert dataset[5][0][0] == int(right[0][0]) ^ 1, "the block was checked before"
    with pytest.raises(DataError, match=r"train\.bin is damaged: block \d+"):
        dataset.read_again(5)
