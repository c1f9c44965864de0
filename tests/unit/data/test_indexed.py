"""Megatron's own .bin/.idx as a source: ids are copied as Megatron-core wrote them, and no file is believed."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from megasdc.common.errors import DataError
from megasdc.config.data import SourceSection
from megasdc.data.indexed import describe_ids, open_pair
from megasdc.data.manifest import DataManifest, verify_prepared
from megasdc.data.prepare import prepare
from megasdc.data.sources import NOT_PAIRS, iterate_documents
from megasdc.data.tokenizer import load_tokenizer


def build(prefix, documents, dtype=np.int32, modes=False):
    """Write a pair by Megatron-core's builder; a document is a list of sequences of ids."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, multimodal=modes is not False)
    for sequences in documents:
        for sequence in sequences:
            builder.add_item(torch.tensor(sequence), *([modes] if modes is not False else []))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.fixture(scope="module")
def tokenizer(prepared):
    return load_tokenizer("sentencepiece", Path(prepared.path) / "tokenizer")


@pytest.fixture
def of_ids(tmp_path, prepared, section_for):
    """Settings that prepare a pair, or a folder of them, with the tokenizer of the prepared corpus."""

    def make(path, **changes):
        sources = [{"kind": "megatron", "path": str(path)}]
        given = {"sources": sources, "split": [1, 0, 0], "tokenizer": {"path": str(Path(prepared.path) / "tokenizer")}}
        return section_for(tmp_path / "out", "", **{**given, **changes})

    return make


def read_back(section, split="train"):
    return [row.tolist() for row in IndexedDataset(str(Path(section.path) / split))]


def said(section, manifest, path="T"):
    return "\n".join(describe_ids(manifest.sources[0], manifest.tokenizer, path, section.bos is True))


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("path", ["a.text_document", "a.text_document.idx", "a.text_document.bin"])
def test_the_bytes_are_those_of_the_same_text(tmp_path, prepared, tokenizer, of_ids, path, ended):
    """Ids of the tokenizer for the texts become the files that the texts become, with --append-eod or without."""
    end = [tokenizer.end_of_document] if ended else []
    texts = list(iterate_documents(prepared.sources[0]))
    build(tmp_path / "a.text_document", [[ids + end] for ids in tokenizer.encode(texts)], np.uint16)
    section = of_ids(tmp_path / path, split=prepared.split)
    manifest = prepare(section, progress=False)
    names = [f"{split}.{ending}" for split in ("train", "valid", "test") for ending in ("bin", "idx", "checksums")]
    for name in [*names, "tokenizer/tokenizer.model"]:
        assert (Path(section.path) / name).read_bytes() == (Path(prepared.path) / name).read_bytes(), name
    of_text = DataManifest.load(prepared.path)
    assert manifest.unigram_entropy_nats == of_text.unigram_entropy_nats
    assert manifest.splits == {
        name: split.model_copy(update={"num_bytes": None}) for name, split in of_text.splits.items()
    }
    assert manifest == verify_prepared(section.path, quick=False) == prepare(section, progress=False)
    assert "ids" not in json.loads((Path(prepared.path) / "manifest.json").read_text())["sources"][0]
    record = manifest.sources[0].ids
    assert (record.num_ended, record.num_ends_within, record.dtypes) == (40 * ended, 0, ["uint16"])
    assert texts[0].startswith(record.sample) and len(record.sample) > 20


@pytest.mark.parametrize(
    ("dtype", "block"),
    [(np.uint8, 5), (np.int8, 9), (np.int16, 99), (np.uint16, 1 << 22), (np.int32, 7), (np.int64, 1)],
)
def test_documents_of_several_sequences(tmp_path, tokenizer, of_ids, monkeypatch, dtype, block):
    """Documents of any number of sequences, of any type of ids, are read back with one end, whatever a block holds."""
    monkeypatch.setattr("megasdc.data.indexed.BLOCK_TOKENS", block)
    monkeypatch.setattr("megasdc.data.indexed.BLOCK_ENTRIES", block)
    random, end = np.random.default_rng(5), tokenizer.end_of_document
    documents = [
        [random.integers(2, 127, random.integers(0, 6)).tolist() for _ in range(random.integers(0, 5))]
        for _ in range(60)
    ]
    for number, sequences in enumerate(documents):
        if number % 3 == 0 and sequences:
            sequences[-1].append(end)
    build(tmp_path / "a", documents, dtype)
    pair = open_pair(tmp_path / "a")
    joined = [[id_ for sequence in sequences for id_ in sequence] for sequences in documents]
    assert pair.ends.tolist() == np.cumsum([len(ids) for ids in joined]).tolist()
    full = [ids for ids in joined if ids]
    manifest = prepare(section := of_ids(tmp_path / "a"), progress=False)
    assert read_back(section) == [ids if ids[-1] == end else [*ids, end] for ids in full]
    assert manifest.sources[0].skipped == {"empty documents": len(joined) - len(full)}
    assert manifest.sources[0].ids.num_ended == sum(ids[-1] == end for ids in full)
    few = of_ids(tmp_path / "a", sources=[{**section.sources[0].model_dump(), "max_documents": 7}])
    prepare(few, progress=False, force=True)
    assert read_back(few) == [ids if ids[-1] == end else [*ids, end] for ids in full[:7]]


def test_what_is_taken_for_granted_is_told(tmp_path, tokenizer, of_ids):
    """How documents ended is said with counts, and ends within them stay."""
    end, ids = tokenizer.end_of_document, tokenizer.encode(["import os\n"])[0]
    build(tmp_path / "a", [[[*ids, end]], [[5, end, 6]], [[7]]])
    text = said(section := of_ids(tmp_path / "a"), prepare(section, progress=False))
    assert read_back(section) == [[*ids, end], [5, end, 6, end], [7, end]]
    assert f"{len(ids) + 5} ids (int32) of 3 documents in 1 pair(s)" in text and "for ids of T (600 ids)" in text
    assert r"the first document begins with 'import os\n'" in text
    assert f"1 of 3 documents ended with its end-of-document id {end}, one was added to each of the other 2" in text
    assert "1 more of these ids are within documents, and stay there" in text
    for number, words in (
        (0, "no document ended with its .*, one was added to each"),
        (1, "every document .* none was"),
    ):
        build(tmp_path / "a", [[[5, 6, *[end] * number]]])
        manifest = prepare(section, progress=False, force=True)
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(said(section, manifest))


def test_beginnings(tmp_path, of_ids, huggingface_folder):
    """With data.bos each document begins with one such token; without, those that are there stay, and are told."""
    folder = Path(shutil.copytree(huggingface_folder, tmp_path / "hf"))
    content = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**content, "bos_token": "!"}))
    tokenizer = load_tokenizer("huggingface", folder)
    start, end = tokenizer.beginning_of_document, tokenizer.end_of_document
    assert start not in (None, end)
    build(tmp_path / "a", [[[start, 40, 41]], [[42, 43, end]], [[44]]])
    changes = {"tokenizer": {"kind": "huggingface", "path": str(folder)}}
    plain = of_ids(tmp_path / "a", **changes)
    text = said(plain, prepare(plain, progress=False))
    assert read_back(plain) == [[start, 40, 41, end], [42, 43, end], [44, end]]
    assert "1 of 3 documents began with its beginning-of-sequence token, which stays, though data.bos is null" in text
    begun = of_ids(tmp_path / "a", bos=True, **changes)
    text = said(begun, prepare(begun, progress=False, force=True))
    assert read_back(begun) == [[start, 40, 41, end], [start, 42, 43, end], [start, 44, end]]
    assert "1 of 3 documents began with its beginning-of-sequence token, one was added to each of the other 2" in text


def test_folders_and_sources_of_text_beside(tmp_path, tokenizer, of_ids):
    """Pairs of a folder, behind links too, and text before and after them keep their order; other files are counted."""
    end = tokenizer.end_of_document
    build(tmp_path / "pairs" / "b", [[[5]]])
    build(tmp_path / "pairs" / "a" / "z.1", [[[6]], [[7]]], np.uint16)
    build(tmp_path / "elsewhere" / "c", [[[8]]])
    (tmp_path / "pairs" / "link").symlink_to("../elsewhere")
    (tmp_path / "pairs" / "a.json").write_text("{}")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    text = [{"kind": "files", "path": str(tmp_path / name)} for name in ("a.txt", "b.txt")]
    section = of_ids(
        "", sources=[text[0], {"kind": "megatron", "path": str(tmp_path / "pairs")}, text[1]], max_unreadable=1
    )
    manifest = prepare(section, progress=False)
    one, two = tokenizer.encode(["one", "two"])
    assert read_back(section) == [[*one, end], [6, end], [7, end], [5, end], [8, end], [*two, end]]
    assert [source.num_documents for source in manifest.sources] == [1, 4, 1]
    assert manifest.sources[1].skipped_at == {NOT_PAIRS: [f"file {tmp_path}/pairs/a.json"]}
    assert (manifest.sources[1].ids.num_pairs, manifest.sources[1].ids.dtypes) == (3, ["int32", "uint16"])
    assert manifest.round_trip.num_characters == 6 and manifest.splits["train"].num_bytes is None


def test_a_changed_file_is_noticed(tmp_path, of_ids):
    """Prepared data are not taken for those of a pair that was written anew, nor of one more in the folder."""
    build(tmp_path / "pairs" / "a", [[[5, 6]]])
    manifest = prepare(section := of_ids(tmp_path / "pairs"), progress=False)
    assert prepare(section, progress=False) == manifest
    os.utime(tmp_path / "pairs" / "a.bin", ns=(0, time.time_ns()))
    with pytest.raises(DataError, match=r"data\.sources\.0\.input\.listing was"):
        prepare(section, progress=False)
    build(tmp_path / "pairs" / "b", [[[7]]])
    with pytest.raises(DataError, match=r"data\.sources\.0\.input\.num_files was 2, is 4"):
        prepare(section, progress=False)


def header(num_sequences=3, num_bounds=3, magic=b"MMIDIDX\x00\x00", version=1, code=4):
    return struct.pack("<9sQBQQ", magic, version, code, num_sequences, num_bounds)


def change(path, at, content):
    data = bytearray(path.read_bytes())
    data[at : at + len(content)] = content
    path.write_bytes(data)


BAD = {
    "cut off bin": (
        lambda d: change_size(d / "a.bin", -4),
        r"a\.bin has 16 bytes, its index a\.idx is for .*20: one of",
    ),
    "longer bin": (lambda d: change_size(d / "a.bin", 4), r"a\.bin has 24 bytes, its index a\.idx is for 20: one of"),
    "cut off idx": (
        lambda d: change_size(d / "a.idx", -8),
        r"a\.idx is cut off or damaged: it has 86 bytes; the 3 seq",
    ),
    "cut off header": (lambda d: (d / "a.idx").write_bytes(header()[:20]), r"a\.idx is cut off: it has 20 bytes"),
    "empty idx": (lambda d: (d / "a.idx").write_bytes(b""), r"a\.idx is cut off: it has 0 bytes"),
    "other file": (
        lambda d: (d / "a.idx").write_bytes(b"hello"),
        r"a\.idx is no index of Megatron's: it begins with b'h",
    ),
    "fairseq": (lambda d: change(d / "a.idx", 0, b"TNTIDX\x00\x00"), r"a\.idx has the old format of fairseq .*mmap"),
    "version": (lambda d: change(d / "a.idx", 0, header(version=2)), "has version 2 of the format, only 1 is"),
    "floats": (
        lambda d: change(d / "a.idx", 0, header(code=7)),
        r"a\.idx holds float32; token ids are uint8, .*, uint16",
    ),
    "no type": (lambda d: change(d / "a.idx", 0, header(code=77)), "a type of number 77, which is not known"),
    "many sequences": (
        lambda d: change(d / "a.idx", 0, header(2**63, 2**62)),
        "cut off or damaged: it has 94 bytes; the 9",
    ),
    "no documents": (lambda d: change(d / "a.idx", 0, header(5, 0)), "5 sequences and 0 bounds"),
    "negative size": (lambda d: change(d / "a.idx", 34, struct.pack("<i", -1)), "sequence 0 has -1 tokens from byte 0"),
    "large size": (
        lambda d: change(d / "a.idx", 34, struct.pack("<i", 2**31 - 1)),
        "sequence 1 has 1 tokens from byte 8",
    ),
    "place": (
        lambda d: change(d / "a.idx", 46 + 8, struct.pack("<q", 4)),
        "from byte 4 on, those before it end at byte 8",
    ),
    "bounds": (
        lambda d: change(d / "a.idx", 70, struct.pack("<qqq", 0, 9, 3)),
        "reach from sequence 0 to 3, needed are all",
    ),
    "no bound": (lambda d: change(d / "a.idx", 70, struct.pack("<qqq", 0, 1, 2)), "reach from sequence 0 to 2, needed"),
    "no bin": (lambda d: (d / "a.bin").unlink(), r"file .*/a\.bin is missing, a\.idx is there"),
    "no idx": (lambda d: (d / "a.idx").unlink(), r"file .*/a\.idx is missing, a\.bin is there"),
    "neither": (
        lambda d: [(d / f"a.{name}").unlink() for name in ("bin", "idx")],
        "is no pair of files PREFIX.bin and",
    ),
    "modes": (lambda d: build(d / "a", [[[5]], [[6]]], modes=1), r"a\.idx is multimodal: sequence 0 has mode 1"),
    "large id": (
        lambda d: build(d / "a", [[[5, 6]], [[]], [[7], [8, 600]]]),
        r"a\.bin, document 2, token 2 \(all count from 0\) is id 600, the tokenizer has ids 0 to 599; give",
    ),
    "negative id": (lambda d: build(d / "a", [[[5, -1]]]), r"a\.bin, document 0, token 1 .* is id -1, the tokenizer"),
    "no tokens": (lambda d: build(d / "a", [[[]]]), r"holds no tokens; skipped: \{'empty files': 1\}"),
}


def change_size(path, by):
    path.write_bytes(path.read_bytes()[:by] if by < 0 else path.read_bytes() + bytes(by))


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("folder", [False, True])
def test_bad_files(tmp_path, of_ids, what, folder):
    """A file that is damaged, of another format or for another tokenizer is refused by name, and nothing is written."""
    build(tmp_path / "in" / "a", [[[5, 6]], [[7], [8, 9]]])
    damage, message = BAD[what]
    damage(tmp_path / "in")
    section = of_ids(tmp_path / "in" / ("" if folder else "a"))
    with pytest.raises(DataError, match=message):
        prepare(section, progress=False)
    assert not Path(section.path).exists()


def test_modes_of_text_are_none(tmp_path, of_ids, tokenizer):
    """A file with modes that are all 0 is text."""
    build(tmp_path / "a", [[[5, 6]], [[7]]], modes=0)
    prepare(section := of_ids(tmp_path / "a"), progress=False)
    assert read_back(section) == [[5, 6, tokenizer.end_of_document], [7, tokenizer.end_of_document]]


def test_a_tokenizer_must_be_given(tmp_path, of_ids):
    """None is trained for ids that are there."""
    build(tmp_path / "a", [[[5]]])
    with pytest.raises(DataError, match=r"data\.tokenizer\.path is not set; .* 'megatron' needs the tokenizer"):
        prepare(of_ids(tmp_path / "a", tokenizer={}), progress=False)
    assert SourceSection(kind="megatron", path="a").kind == "megatron"
