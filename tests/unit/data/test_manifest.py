"""The manifest: every kind of damage to a folder is refused with the file named."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import xxhash
from megatron.core.datasets.indexed_dataset import DType
from typer.testing import CliRunner

from megasdc.cli import app
from megasdc.common.errors import DataError, StorageError
from megasdc.config.data import DataSection
from megasdc.data import manifest
from megasdc.data.dataset import build_datasets
from megasdc.data.manifest import (
    SHORT_TOKENS,
    DataManifest,
    add_checksums,
    check_folder,
    digest_settings,
    unchecked,
    verify_prepared,
)
from megasdc.data.prepare import prepare


@pytest.fixture
def folder(tmp_path, prepared):
    shutil.copytree(prepared.path, tmp_path / "copy", ignore=shutil.ignore_patterns(".index_cache"))
    return tmp_path / "copy"


def flip(path: Path, at: int | None = None):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)


FILES = [
    *(f"{split}.{ending}" for split in ("train", "valid", "test") for ending in ("bin", "idx", "checksums")),
    "tokenizer/tokenizer.model",
]


@pytest.mark.parametrize("name", FILES)
def test_missing_truncated_and_flipped(folder, name):
    """A missing or shorter file is found at once, and a flipped bit, as all blocks of these files are looked at."""
    path = folder / name
    whole = path.read_bytes()
    verify_prepared(folder, quick=False)
    flip(path)
    for quick in (True, False):
        with pytest.raises(DataError, match=rf"{name} (has checksum \w+, its manifest says|is damaged: block \d)"):
            verify_prepared(folder, quick=quick)
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=f"{name} has {len(whole) - 1} bytes, its manifest says {len(whole)}"):
        verify_prepared(folder)
    path.unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        verify_prepared(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "is damaged"),
        (lambda text: text.replace('"splits"', '"split"'), "was changed: its content has checksum"),
        (lambda text: text.replace('"format_version": 2', '"format_version": 99'), "format version 99"),
        (lambda text: text.replace('"format_version": 2', '"format_version": 1'), "is damaged"),
        (lambda text: text.replace('"vocab_size": 600', '"vocab_size": 601'), "was changed: its content has checksum"),
        (lambda text: "[]", "is damaged"),
        (lambda text: "[" * 100_000, "is damaged"),
    ],
)
def test_damaged_manifest(folder, damage, message):
    """A manifest that is torn, changed, of another form or another version is refused."""
    path = folder / "manifest.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(DataError, match=message):
        verify_prepared(folder)


IMPOSSIBLE = [
    (("dtype", "int64"), "dtype is int64, tokens with 600 ids are uint16"),
    (("dtype", "int32"), "dtype is int32, tokens with 600 ids are uint16"),
    (("files", {}), "files lacks test.bin"),
    (("splits", {}), "splits is empty"),
    (("tokenizer.vocab_size", 2**40), "tokenizer.vocab_size"),
    (("tokenizer.vocab_size", 70_000), "dtype is uint16, tokens with 70000 ids are int32"),
    (("tokenizer.vocab_size", 0), "tokenizer.vocab_size"),
    (("tokenizer.end_of_document", 600), "end_of_document is 600 of 600 ids"),
    (("splits.train.num_tokens", -1), "splits.train.num_tokens"),
    (("splits.train.num_tokens", 5), r"train.bin has \d+ bytes by files, 10 by splits"),
    (("splits.valid.num_documents", 1), r"valid.idx has \d+ bytes by files, 62 by splits"),
    (("settings.seed", 5), "settings_digest is"),
    (("files.tokenizer/../../secret", {"size_bytes": 1, "checksum": ""}), "is no file of prepared data"),
]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("change", "message"), IMPOSSIBLE)
def test_a_manifest_that_contradicts_itself(folder, version, change, message, to_version_1):
    """What cannot be so is refused, in manifests without a checksum and in those whose checksum was made anew."""
    if version == 1:
        to_version_1(folder)
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    content.pop("checksum", None)
    *parents, last = change[0].split(".", 2 if "splits" in change[0] else 1)
    place = content
    for parent in parents:
        place = place[parent]
    place[last] = change[1]
    if version == 2:
        content["checksum"] = digest_settings(content)
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=rf"manifest.json is damaged: .*{message}.*prepare the data again"):
        DataManifest.load(folder)


def test_width_of_a_token_is_that_of_megatron():
    """The rule that decides between tokens of two and of four bytes is Megatron-core's."""
    assert DType.optimal_dtype(SHORT_TOKENS - 1) is np.uint16
    assert DType.optimal_dtype(SHORT_TOKENS) is np.int32


def test_no_manifest(tmp_path):
    """A folder without a manifest is no prepared data; the message says which command makes them."""
    with pytest.raises(DataError, match="run `megasdc prepare-data`"):
        verify_prepared(tmp_path)


@pytest.mark.parametrize("path", ["/dev/null", "/dev/full"])
def test_what_is_no_folder_is_named(path):
    """A device or a file as data.path is told as such, not by a traceback."""
    with pytest.raises(DataError, match=f"{path}/manifest.json cannot be read: Not a directory"):
        DataManifest.load(path)


def test_checksums_of_blocks_are_those_of_the_file(folder):
    """Each is the XXH3-64 of its 64 KiB, the last one of what is left."""
    content = (folder / "train.bin").read_bytes()
    assert len(content) % 65536
    expected = [xxhash.xxh3_64_intdigest(content[at : at + 65536]) for at in range(0, len(content), 65536)]
    assert np.fromfile(folder / "train.checksums", dtype="<u8").tolist() == expected


@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_block_is_checked_when_it_is_first_read(folder, prepared, split, tmp_path):
    """Damage that comes after the start is refused before a token of its block is used, by name."""
    section = prepared.model_copy(update={"path": str(folder)})
    streams = dict(zip(("train", "valid"), build_datasets(section, 640, 2000, 50, tmp_path / "cache"), strict=True))
    number = (folder / f"{split}.bin").stat().st_size // 65536 // 2
    flip(folder / f"{split}.bin", at=number * 65536 + 100)
    start = number * 65536
    message = rf"{split}.bin is damaged: block {number} \(bytes {start} to \d+\) has checksum \w+, expected \w+; "
    with pytest.raises(DataError, match=message):
        for position in range(len(streams[split])):
            streams[split][position]


def test_every_block_is_read_once_and_gives_the_same_tokens(folder, monkeypatch):
    """The checked reader returns what the plain one does, at odd places and lengths, and checks a block once."""
    content = (folder / "train.bin").read_bytes()
    checked = []
    problem = manifest.BlockChecksums.problem
    monkeypatch.setattr(manifest.BlockChecksums, "problem", lambda *args: (checked.append(args[1]), problem(*args))[1])

    class Plain:
        def read(self, dtype, count, offset):
            return np.frombuffer(content, dtype=dtype, count=count, offset=offset)

    manifest.write_checksums(folder / "train.bin", 1000)
    reader = manifest.CheckedReader(Plain(), manifest.BlockChecksums(folder / "train.bin", 1000), len(content))
    for offset, count in ((0, 1), (998, 1), (998, 2), (5000, 3000), (len(content) - 2, 1), (0, len(content) // 2)):
        assert (reader.read(np.uint16, count, offset) == np.frombuffer(content, np.uint16, count, offset)).all()
    assert sorted(checked) == list(range(-(-len(content) // 1000)))


def test_a_sample_looks_at_other_blocks_each_time(folder):
    """The first, the last and some blocks between them; over several starts, all."""
    data = folder / "train.bin"
    manifest.write_checksums(data, 4096)
    seen = set()

    class Listening(manifest.BlockChecksums):
        def problem(self, number, block):
            seen.add(number)
            return super().problem(number, block)

    few = Listening(data, 4096)
    assert len(few) > 2 * manifest.NUM_SAMPLED
    assert not list(few.sample_problems())
    assert len(seen) == manifest.NUM_SAMPLED
    assert {0, len(few) - 1} <= seen
    for _ in range(200):
        list(few.sample_problems())
    assert seen == set(range(len(few)))


def test_a_full_check_names_every_damage(folder):
    """All damaged blocks and files are told at once; whole data give none."""
    assert check_folder(folder).ok
    for at in (5, 70_000):
        flip(folder / "train.bin", at)
    flip(folder / "valid.idx")
    (folder / "test.bin").unlink()
    report = check_folder(folder)
    text = report.render()
    for part in (
        "block 0 (bytes 0 to 65535)",
        "block 1 (bytes 65536 to",
        "valid.idx has checksum",
        "test.bin is missing",
    ):
        assert part in text
    assert len(report.problems) == 5  # train.bin's own checksum and its two blocks
    assert not report.ok


def test_data_of_the_version_before(folder, prepared, tmp_path, to_version_1):
    """They train; what is not checked is said; checksums can be added, after which the same samples come."""
    section = prepared.model_copy(update={"path": str(folder)})
    before = build_datasets(section, 640, 5, 0, tmp_path / "cache")[0]
    to_version_1(folder)
    earlier = build_datasets(section, 640, 5, 0, tmp_path / "cache")[0]
    assert "--add-checksums" in unchecked(folder, verify_prepared(folder))
    flip(folder / "train.bin")
    verify_prepared(folder)
    assert [problem.split()[1] for problem in check_folder(folder).problems] == ["has"]
    flip(folder / "train.bin")
    assert "--add-checksums" in check_folder(folder).render()
    add_checksums(folder)
    assert unchecked(folder, verify_prepared(folder, quick=False)) is None
    assert check_folder(folder).ok
    for name in ("train.checksums", "test.checksums"):
        assert (folder / name).read_bytes() == (Path(prepared.path) / name).read_bytes()
    now = build_datasets(section, 640, 5, 0, tmp_path / "cache")[0]
    assert before.identity == earlier.identity == now.identity
    assert all((a == b).all() for index in range(5) for a, b in zip(before[index], now[index], strict=True))


def test_a_vocabulary_of_the_version_before_is_asked_of_the_tokenizer(folder, to_version_1):
    """Its manifest has no checksum, so that the full check asks the tokenizer itself."""
    to_version_1(folder)
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    content["tokenizer"]["vocab_size"] = 700
    path.write_text(json.dumps(content))
    (problem,) = check_folder(folder).problems
    assert "has vocab_size 600, the manifest says 700" in problem


def test_the_command(folder, to_version_1):
    """verify-data ends with 0 or 71, lists as JSON, adds checksums to sound data only, and looks at every folder."""
    run = CliRunner().invoke
    to_version_1(folder)
    flip(folder / "train.bin")
    assert run(app, ["verify-data", "--add-checksums", str(folder)]).exit_code == 71
    assert not list(folder.glob("*.checksums"))
    flip(folder / "train.bin")
    done = run(app, ["verify-data", "--add-checksums", str(folder)])
    assert done.exit_code == 0, done.output
    assert "all unchanged" in done.stdout
    assert DataManifest.load(folder).format_version == 2
    done = run(app, ["verify-data", "--json", str(folder), str(folder / "none")])
    assert done.exit_code == 71
    whole, none = json.loads(done.stdout)
    assert (whole["ok"], whole["problems"], whole["note"], none["ok"]) == (True, [], None, False)
    assert "run `megasdc prepare-data`" in none["problems"][0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_checksums_cannot_be_added_to_a_read_only_folder(folder, to_version_1):
    """The storage code, and nothing is changed."""
    to_version_1(folder)
    folder.chmod(0o555)
    with pytest.raises(StorageError, match="nothing was changed"):
        add_checksums(folder)


def test_force_replaces_damage_that_a_quick_look_may_miss(folder, corpus, section_for, monkeypatch):
    """`--force` looks at every byte, so that the remedy of every message helps."""
    section: DataSection = section_for(folder, corpus)
    flip(folder / "train.bin")
    monkeypatch.setattr(manifest.BlockChecksums, "sample_problems", lambda self: iter(()))
    prepare(section, progress=False)
    assert not check_folder(folder).ok
    prepare(section, progress=False, force=True)
    assert check_folder(folder).ok
