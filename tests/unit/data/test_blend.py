"""Blends: Megatron's order, exact shares, the same samples after a resume, in a longer run and in every process."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.blended_dataset import BlendedDataset

from megasdc.common.errors import CheckpointError, DataError
from megasdc.data import dataset
from megasdc.data.dataset import BlendedTokens, blend_order, build_datasets, verify_section_data
from megasdc.data.loader import EvalLoader, MicroBatchLoader
from megasdc.data.manifest import DataManifest
from megasdc.data.position import merge_positions, position_for
from megasdc.data.prepare import prepare

TOKENIZER_FILE = "tokenizer/tokenizer.model"


@pytest.fixture(scope="module")
def second(tmp_path_factory, corpus, prepared, section_for):
    """A smaller folder of other text, with the tokenizer of the first."""
    folder = tmp_path_factory.mktemp("second")
    (folder / "text").mkdir()
    for path in sorted(corpus.glob("*.txt"))[:8]:
        (folder / "text" / path.name).write_text(path.read_text()[::-1])
    tokenizer = {"path": str(Path(prepared.path) / TOKENIZER_FILE)}
    section = section_for(folder / "data", folder / "text", tokenizer=tokenizer)
    prepare(section, progress=False)
    return section


@pytest.fixture
def section(prepared, second):
    """Both folders, three samples of the first for one of the second."""
    return blend_of(prepared, (prepared, 3.0), (second, 1.0))


def blend_of(base, *parts, **changes):
    content = base.model_dump()
    content["blend"] = [{"path": part.path, "weight": weight} for part, weight in parts]
    return type(base).model_validate({**content, **changes})


def build(section, cache, num_samples=100, num_eval=8):
    return build_datasets(section, 640, num_samples, num_eval, cache)


def same(first, other):
    return all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_samples_are_all_different_until_a_part_begins_anew(tmp_path, section):
    """The first num_distinct samples of a blend are of different places, and the next one is seen again."""
    train, _ = build(section, tmp_path, num_samples=10**4)
    ends = [part.samples_per_epoch for part in train.parts]

    def place(position):
        part, inner = train.locate(position)
        return part, inner // ends[part]

    n = train.num_distinct
    assert min(ends) < n < sum(ends)
    assert {place(position)[1] for position in range(n)} == {0}
    assert place(n)[1] == 1
    short, _ = build(section, tmp_path, num_samples=10)
    assert short.num_distinct == 10


def test_samples_are_those_of_megatrons_blended_dataset(tmp_path, section):
    """Within the first epoch of both parts, every sample is the one that Megatron's own BlendedDataset gives."""
    train, _ = build(section, tmp_path, num_samples=10**4)
    epochs = [part._epoch(0) for part in train.parts]
    n = min(len(epochs[0]) * 4 // 3, len(epochs[1]) * 4) - 8
    assert n > 200
    theirs = BlendedDataset(epochs, [3.0, 1.0], n, SimpleNamespace(defer_npy_index_mmap=False, path_to_cache=None))
    for position in range(n):
        expected = theirs[position]
        assert train.locate(position)[0] == expected["dataset_id"]
        assert torch.equal(train[position][0], expected["tokens"])
        assert torch.equal(train[position][1], expected["labels"])


def test_each_part_is_used_in_its_own_order_and_then_again(tmp_path, prepared, second, section):
    """The samples of a part are its own stream in order, each once an epoch; a part that is used up begins again."""
    alone = [build_datasets(part, 640, 10**6, 0, tmp_path)[0] for part in (prepared, second)]
    n = 4 * alone[1].samples_per_epoch * 2 + 40
    train, _ = build(section, tmp_path, num_samples=n)
    taken = [0, 0]
    for position in range(n):
        part, inner = train.locate(position)
        assert inner == taken[part]
        assert same(train[position], alone[part][inner])
        taken[part] += 1
    assert taken[1] > 2 * alone[1].samples_per_epoch


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9))
def test_shares_converge_to_the_weights(weights):
    """At every position no part has more than one sample too many; with two parts the error is below one sample."""
    shares = np.array(weights) / np.sum(weights)
    part_of, position = blend_order(shares.tolist(), 3000)
    counts = np.cumsum(part_of[:, None] == np.arange(len(weights)), axis=0)
    wanted = np.arange(1, 3001)[:, None] * shares
    surplus = counts - wanted
    assert surplus.max() < 1 + 1e-6
    if len(weights) <= 2:
        assert np.abs(surplus).max() < 1 + 1e-6
    assert np.abs(surplus[-1]).max() / 3000 < len(weights) / 3000
    assert [int(position[part_of == part].max(initial=-1)) + 1 for part in range(len(weights))] == counts[-1].tolist()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6), st.integers(1, 500), st.integers(0, 500))
def test_a_longer_order_begins_with_the_shorter(weights, size, more):
    """The order of a prolonged run has the shorter one as its beginning."""
    shares = (np.array(weights) / np.sum(weights)).tolist()
    short, long = blend_order(shares, size), blend_order(shares, size + more)
    assert all(np.array_equal(a, b[:size]) for a, b in zip(short, long, strict=True))


def test_prolonging_keeps_the_order(tmp_path, section, monkeypatch):
    """A longer stream, whose index has more windows, gives the same samples and has the same identity."""
    monkeypatch.setattr(dataset, "WINDOW_SAMPLES", 64)
    short, _ = build(section, tmp_path, num_samples=60)
    long, _ = build(section, tmp_path, num_samples=300)
    assert len(list(tmp_path.glob("blend-*"))) == 2
    assert short.identity == long.identity
    assert all(same(short[position], long[position]) for position in range(60))


def test_a_stream_that_is_prolonged_in_place_keeps_its_samples(tmp_path, section, monkeypatch):
    """It reaches further, also past the kept order, and a call for less changes nothing."""
    monkeypatch.setattr(dataset, "WINDOW_SAMPLES", 64)
    stream, _ = build(section, tmp_path / "short", num_samples=50)
    longer, _ = build(section, tmp_path / "long", num_samples=300)
    stream.extend(300)
    stream.extend(20)
    assert len(stream) == 300
    assert all(same(stream[position], longer[position]) for position in range(0, 300, 7))


def test_resume_is_bit_identical_after_unequal_consumption(tmp_path, section):
    """Replicas that took different numbers of samples go on with the very batches they would have got."""
    loaders = [MicroBatchLoader(build(section, tmp_path / "a", 900)[0], 2, rank, 3) for rank in range(3)]
    for rank, loader in enumerate(loaders):
        for _ in range(5 + 2 * rank):
            next(loader)
    merged = merge_positions([loader.state_dict() for loader in loaders])
    assert merged["consumed"] == {"0": 10, "1": 14, "2": 18}
    for rank, loader in enumerate(loaders):
        again = build(section, tmp_path / "b", 2000)[0]
        resumed = MicroBatchLoader(again, 2, rank, 3, position=position_for(merged, rank, 3, again))
        for _ in range(40):
            (tokens, rest), (tokens_again, rest_again) = next(loader), next(resumed)
            assert torch.equal(tokens, tokens_again) and same(rest, rest_again)


def test_another_blend_is_refused_on_resume(tmp_path, prepared, second, section):
    """Other weights, order, seed or parts have another identity, which the loader refuses; scaled weights do not."""
    train, valid = build(section, tmp_path)
    merged = merge_positions([MicroBatchLoader(train, 1, 0, 1).state_dict()])
    others = [
        blend_of(prepared, (prepared, 3.0), (second, 1.5)),
        blend_of(prepared, (second, 3.0), (prepared, 1.0)),
        blend_of(prepared, (prepared, 3.0), (second, 1.0), seed=9),
        blend_of(prepared, (prepared, 3.0), (second, 1.0), sequence_length=32),
        blend_of(prepared, (prepared, 3.0)),
        prepared,
    ]
    identities = {train.identity, valid.identity}
    for other in others:
        stream = build(other, tmp_path)[0]
        identities.add(stream.identity)
        with pytest.raises(CheckpointError, match=r"other files, data\.seed, .* or data\.blend; resume with the same"):
            position_for(merged, 0, 1, stream)
    assert len(identities) == 8
    scaled = blend_of(prepared, (prepared, 6), (second, 2))
    assert build(scaled, tmp_path)[0].identity == train.identity


def test_blends_do_not_share_a_kept_order(tmp_path, prepared, second):
    """Blends with other weights in one cache folder each have their own shares."""
    for weight, expected in ((3.0, {0: 75, 1: 25}), (1.0, {0: 50, 1: 50}), (4.0, {0: 80, 1: 20})):
        train, _ = build(blend_of(prepared, (prepared, weight), (second, 1.0)), tmp_path)
        assert Counter(train.locate(position)[0] for position in range(100)) == expected


def test_identity_is_of_the_content_not_of_the_place(tmp_path, prepared, second, section):
    """A copy of a folder elsewhere is the same stream, so that data may be moved between launches."""
    copy = tmp_path / "moved"
    shutil.copytree(second.path, copy)
    moved = blend_of(prepared, (prepared, 3.0), (second.model_copy(update={"path": str(copy)}), 1.0))
    assert build(moved, tmp_path)[0].identity == build(section, tmp_path)[0].identity


def test_validation_has_the_same_shares(tmp_path, section):
    """The validation stream draws from the validation documents of all parts by the same weights."""
    _, valid = build(section, tmp_path, num_eval=40)
    assert Counter(valid.locate(position)[0] for position in range(40)) == {0: 30, 1: 10}
    assert [part.path.name for part in valid.parts] == ["valid.bin"] * 2
    batches = [list(EvalLoader(valid, 4, 0, 1, 40)) for _ in range(2)]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(*batches, strict=True))


def test_one_part_is_that_part(tmp_path, prepared):
    """A blend of one folder gives the samples of the folder."""
    train, _ = build(blend_of(prepared, (prepared, 0.5)), tmp_path)
    alone, _ = build(prepared, tmp_path)
    assert all(same(train[position], alone[position]) for position in range(100))


def build_and_hang(section, cache, said):
    def hang(weights, size):
        said.set()
        time.sleep(60)

    dataset.blend_order = hang
    build(section, cache)


def test_kill_while_the_index_is_built_leaves_nothing_half(tmp_path, section):
    """A process killed while it builds holds no lock and leaves no index; one killed while it writes neither."""
    context = multiprocessing.get_context("fork")
    said = context.Event()
    process = context.Process(target=build_and_hang, args=(section, tmp_path, said))
    process.start()
    assert said.wait(60)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert list(tmp_path.glob("blend-*")) == []
    half = tmp_path / "partial-killed"
    half.mkdir()
    (half / "part.npy").write_bytes(b"\x93NUMPY")
    train, _ = build(section, tmp_path)
    assert not half.exists()
    assert len(list(tmp_path.glob("blend-*"))) == 1
    again, _ = build(section, tmp_path / "anew")
    assert all(same(train[position], again[position]) for position in range(100))
    (index,) = tmp_path.glob("blend-*/position.npy")
    index.write_bytes(index.read_bytes()[:-8])
    told = []
    healed = build_datasets(section, 640, 100, 0, tmp_path, on_damage=lambda *what: told.append(what))[0]
    assert [folder for folder, _ in told] == [index.parent]
    assert all(same(healed[position], again[position]) for position in range(100))


def digest_in_process(section, cache, results):
    train, _ = build(section, cache, 300)
    results.put([train[position][0].tolist() for position in range(0, 300, 7)])


def test_processes_that_build_at_once_agree(tmp_path, section):
    """Processes that build at the same time in one cache folder see equal samples."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=digest_in_process, args=(section, tmp_path, results)) for _ in range(3)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert found[0] == found[1] == found[2]


def test_bad_parts_are_named(tmp_path, corpus, prepared, second, section, section_for):
    """A missing folder, a torn file and a foreign tokenizer are each named, those of all folders at once."""
    torn = tmp_path / "torn"
    shutil.copytree(second.path, torn)
    (torn / "valid.bin").write_bytes(b"")
    parts = [(prepared, 1), (place(second, tmp_path / "nowhere"), 1), (place(second, torn), 1)]
    with pytest.raises(DataError) as caught:
        build(blend_of(prepared, *parts), tmp_path)
    missing, short = str(caught.value).splitlines()
    assert "nowhere/manifest.json is missing" in missing and "megasdc prepare-data" in missing
    assert "torn/valid.bin has 0 bytes, its manifest says" in short
    foreign = section_for(tmp_path / "foreign", corpus, tokenizer={"vocab_size": 500, "train_characters": 100_000})
    prepare(foreign, progress=False)
    with pytest.raises(DataError, match=rf"{prepared.path} and {foreign.path} have different tokenizers.*600 and 500"):
        build(blend_of(prepared, (prepared, 1), (second, 1), (foreign, 2)), tmp_path)
    with pytest.raises(DataError, match=r"data\.tokenizer is .* but .* was prepared with"):
        verify_section_data(blend_of(foreign, (prepared, 1), (second, 1), path=prepared.path))
    with pytest.raises(DataError, match="vocabulary has 599 ids"):
        build_datasets(section, 599, 10, 0, tmp_path)
    with pytest.raises(IndexError, match=r"position 100 is not in \[0, 100\) of .*train\.bin \+ .*train\.bin"):
        build(section, tmp_path)[0][100]


def test_damage_is_named_by_part(tmp_path, prepared, second, to_version_1):
    """An id beyond the vocabulary is refused with the file of its part, not with all files."""
    copy = tmp_path / "copy"
    shutil.copytree(second.path, copy)
    tokens = np.fromfile(copy / "train.bin", dtype=np.uint16)
    tokens[:] = 64_000
    tokens.tofile(copy / "train.bin")
    to_version_1(copy)
    train, _ = build(blend_of(prepared, (prepared, 3), (place(second, copy), 1)), tmp_path / "cache")
    first = next(position for position in range(100) if train.locate(position)[0] == 1)
    loader = MicroBatchLoader(train, 1, 0, 1)
    for _ in range(first):
        next(loader)
    message = rf"copy/train\.bin, sample position 0 \(position {first} of the blend\), token 0: id 64000 is not in"
    with pytest.raises(DataError, match=message):
        next(loader)


def place(section, path):
    return section.model_copy(update={"path": str(path)})


def test_a_given_tokenizer_is_recognised(second):
    """Data prepared with a tokenizer given by path are accepted by the section that prepared them."""
    assert DataManifest.load(second.path).settings["tokenizer"]["checksum"]
    assert len(verify_section_data(second)) == 1


def test_many_weights_are_normalised():
    """Weights need not sum to 1."""
    parts = [SimpleNamespace(path=Path(name), identity=name) for name in "abc"]
    stream = BlendedTokens(parts, [2, 1, 1], 8, 10, Path("/dev/null/no cache"))
    assert stream.weights == [0.5, 0.25, 0.25]
    assert Counter(stream.locate(position)[0] for position in range(8)) == {0: 4, 1: 2, 2: 2}
