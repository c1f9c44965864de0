"""Documents: every kind of source, in a fixed order, and a clear error for every bad one."""

from __future__ import annotations

import gzip
import json
import socket
import sysconfig
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from megasdc.config.sections.data import SourceSection
from megasdc.data.sources import (
    OTHER_KINDS,
    LeftOut,
    describe_skipped,
    describe_source,
    fingerprint_source,
    iterate_documents,
    sample_documents,
)
from megasdc.errors import DataError


def files(path, **changes):
    return SourceSection.model_validate({"kind": "files", "path": str(path), **changes})


def jsonl(*texts, key="text"):
    return "".join(json.dumps({key: text}) + "\n" for text in texts).encode()


def test_stdlib_is_the_text_of_its_modules_in_order():
    """The standard library is read byte for byte, sorted, without site-packages; what is left out is counted."""
    skipped = LeftOut()
    texts = list(iterate_documents(SourceSection(kind="stdlib"), skipped))
    root = Path(sysconfig.get_path("stdlib"))
    assert texts[0] == (root / "__future__.py").read_text("utf-8")
    # Distributions that package the library's own tests apart, as Debian does, leave 11 MB of 30.
    assert (20e6 if (root / "test" / "test_os.py").exists() else 8e6) < sum(map(len, texts)) < 60e6
    paths = [path for path in root.rglob("*.py") if "site-packages" not in path.relative_to(root).parts]
    assert len(texts) + sum(skipped.values()) == len(paths)
    assert skipped["files that are not UTF-8"] == sum(not _is_utf8(path.read_bytes()) for path in paths)


def _is_utf8(content):
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def test_stdlib_by_pattern():
    """A pattern picks files below the library's folder; what is picked is part of the fingerprint and the name."""
    root = Path(sysconfig.get_path("stdlib"))
    modules, package = SourceSection(pattern="*.py"), SourceSection(pattern="json/**/*")
    assert list(iterate_documents(package)) == [path.read_text("utf-8") for path in sorted(root.glob("json/*.py"))]
    assert len(list(iterate_documents(modules))) == len(list(root.glob("*.py")))
    prints = [fingerprint_source(source) for source in (SourceSection(), modules, package)]
    assert len({print_["listing"] for print_ in prints}) == 3
    assert describe_source(package).endswith(", json/**/*)")
    with pytest.raises(DataError, match=r"stdlib .*nothing\.py\) holds no text"):
        list(iterate_documents(SourceSection(pattern="nothing.py")))


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress], ids=["plain", "gz", "zst"])
@pytest.mark.parametrize("ending", ["txt", "jsonl"])
def test_text_and_jsonl_packed_or_not(tmp_path, pack, ending):
    """A .txt or .jsonl file reads the same plain, .gz and .zst."""
    suffix = "" if pack is bytes else ".gz" if pack is gzip.compress else ".zst"
    text = "one\n\n\ttwo é\n"
    (tmp_path / f"a b[1].{ending}{suffix}").write_bytes(pack(text.encode() if ending == "txt" else jsonl(text)))
    assert list(iterate_documents(files(tmp_path))) == [text]


def test_packed_files_of_several_parts(tmp_path):
    """Packed files that were joined end to end, as pigz, pzstd and cat make them, are read to their end."""
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one ") + gzip.compress(b"two"))
    (tmp_path / "b.txt.zst").write_bytes(
        zstandard.compress(b"one ") + zstandard.compress(b"") + zstandard.compress(b"2")
    )
    assert list(iterate_documents(files(tmp_path))) == ["one two", "one 2"]


def test_folder_is_sorted_and_mixed(tmp_path):
    """A folder gives its files of all kinds in the order of their names, sub-folders included."""
    (tmp_path / "sub").mkdir()
    pq.write_table(pa.table({"text": ["p1", "p2"]}), tmp_path / "sub" / "b.parquet")
    (tmp_path / "c.jsonl").write_bytes(jsonl("j1", "j2"))
    (tmp_path / "a.txt").write_text("t")
    (tmp_path / "notes.md").write_text("not read")
    assert list(iterate_documents(files(tmp_path))) == ["t", "j1", "j2", "p1", "p2"]
    assert list(iterate_documents(files(tmp_path / "*.jsonl"))) == ["j1", "j2"]
    assert list(iterate_documents(files(tmp_path, max_documents=2))) == ["t", "j1"]


@pytest.mark.parametrize(("unit", "texts"), [("line", ["a", "b", "c"]), ("paragraph", ["a\nb", "c"])])
def test_text_unit(tmp_path, unit, texts):
    """A .txt file can be cut at lines or at empty lines."""
    (tmp_path / "a.txt").write_text("a\nb\n\nc")
    assert list(iterate_documents(files(tmp_path, text_unit=unit))) == texts


def test_text_field_and_documents_without_text(tmp_path):
    """Another column can hold the text; null and empty texts are left out and counted."""
    (tmp_path / "a.jsonl").write_bytes(jsonl("x", None, "", "y", key="content"))
    skipped = LeftOut()
    assert list(iterate_documents(files(tmp_path, text_field="content"), skipped)) == ["x", "y"]
    assert skipped == {"documents without text": 1, "empty documents": 1}
    path = next(tmp_path.glob("*.jsonl"))
    assert skipped.places == {
        "documents without text": [f"file {path}, row 1"],
        "empty documents": [f"file {path}, row 2"],
    }


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_dataset_by_local_stand_in(tmp_path, monkeypatch, streaming):
    """A hub dataset goes through datasets.load_dataset by name, split and streaming; a local folder stands in."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "train.jsonl").write_bytes(jsonl("one", "two", "three"))
    (tmp_path / "validation.jsonl").write_bytes(jsonl("other"))
    section = SourceSection(kind="hub", path=str(tmp_path), streaming=streaming, max_documents=2)
    assert list(iterate_documents(section)) == ["one", "two"]
    assert list(iterate_documents(section.model_copy(update={"split": "validation"}))) == ["other"]
    with pytest.raises(DataError, match=r"split 'nope'.*cannot be read"):
        list(iterate_documents(section.model_copy(update={"split": "nope"})))


def test_local_files_need_no_network(tmp_path, monkeypatch):
    """Reading local files looks up no host and opens no connection."""

    def refuse(*arguments, **named):
        raise AssertionError(f"network used: {arguments}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr("datasets.load.increase_load_count", refuse)
    (tmp_path / "a.txt").write_text("t")
    (tmp_path / "b.jsonl").write_bytes(jsonl("j"))
    pq.write_table(pa.table({"text": ["p"]}), tmp_path / "c.parquet")
    assert list(iterate_documents(files(tmp_path))) == ["t", "j", "p"]


def write_parquet(path, cut=0):
    pq.write_table(pa.table({"text": ["x" * 1000] * 50}), path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size - cut])


BAD = {
    "missing": (lambda d: None, "no file matches"),
    "empty": (lambda d: (d / "x.txt").write_bytes(b""), r"x\.txt is empty \(0 bytes\)"),
    "corrupt parquet": (lambda d: write_parquet(d / "x.parquet", 100), r"x\.parquet cannot be read as parquet"),
    "torn gzip": (
        lambda d: (d / "x.txt.gz").write_bytes(gzip.compress(b"abc" * 999)[:-9]),
        r"x\.txt\.gz cannot be read as text",
    ),
    "torn zst": (
        lambda d: (d / "x.txt.zst").write_bytes(zstandard.compress(bytes(range(256)) * 99)[:-9]),
        r"x\.txt\.zst is cut off",
    ),
    "not UTF-8": (lambda d: (d / "x.txt").write_bytes(b"\xff\xfe\x00"), r"x\.txt cannot be read as text"),
    "broken JSON": (lambda d: (d / "x.jsonl").write_bytes(jsonl("a") + b'{"text"\n'), r"x\.jsonl cannot be read"),
    "lone surrogate": (lambda d: (d / "x.jsonl").write_bytes(b'{"text": "\\ud800 x"}\n'), r"x\.jsonl"),
    "no column": (lambda d: (d / "x.jsonl").write_bytes(jsonl("a", key="body")), r"no column 'text'.*\['body'\]"),
    "not text": (lambda d: (d / "x.jsonl").write_bytes(jsonl(5)), "row 0: column 'text' holds int"),
    "no text at all": (lambda d: (d / "x.jsonl").write_bytes(jsonl("", None)), "holds no text; skipped"),
    "unknown kind": (lambda d: (d / "x.csv").write_text("a"), "not of a known kind"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(tmp_path, case):
    """Each kind of bad input gives a DataError that names the file and what is wrong."""
    write, message = BAD[case]
    write(tmp_path)
    with pytest.raises(DataError, match=message):
        list(iterate_documents(files(tmp_path / "x.*")))


def test_folder_without_known_files(tmp_path):
    """A folder that holds nothing readable is refused with the endings that would be."""
    (tmp_path / "a.csv").write_text("a")
    with pytest.raises(DataError, match=r"no file of a known kind \(\.txt.*1 files of other kinds \(\.csv 1\); rename"):
        list(iterate_documents(files(tmp_path)))


def test_files_of_other_kinds_in_a_folder_are_counted(tmp_path):
    """Their number and endings are told with the remedy; hidden files, and files beside a glob, are nobody's loss."""
    for name in ("a.txt", "b.py", "sub/c.PY", "d.md", ".hidden.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    skipped = LeftOut()
    assert list(iterate_documents(files(tmp_path), skipped)) == ["text"]
    assert (dict(skipped), skipped.places) == ({OTHER_KINDS: 3}, {OTHER_KINDS: [".py 2, .md 1"]})
    told = describe_skipped(OTHER_KINDS, 3, skipped.places)
    assert told.startswith("3 files of other kinds (.py 2, .md 1); rename them to .txt")
    of_glob = LeftOut()
    assert list(iterate_documents(files(tmp_path / "*.txt"), of_glob)) == ["text"]
    assert not of_glob


def test_fingerprint_sees_a_changed_file(tmp_path):
    """The fingerprint of a files source changes with a file's size."""
    (tmp_path / "a.txt").write_text("one")
    before = fingerprint_source(files(tmp_path))
    assert fingerprint_source(files(tmp_path)) == before
    (tmp_path / "a.txt").write_text("other")
    assert fingerprint_source(files(tmp_path)) != before


def test_sample_is_even_and_bounded():
    """A sample spans the whole stream evenly, is about as large as asked for, and small streams are taken whole."""
    documents = [f"{index:04d}" for index in range(10_000)]
    sample, total = sample_documents(iter(documents), 4000)
    assert total == 40_000
    assert abs(sum(map(len, sample)) - 4000) <= 8
    quarters = Counter(int(text) // 2500 for text in sample)
    assert max(quarters.values()) - min(quarters.values()) <= 2
    assert sample_documents(iter(documents), 10**6)[0] == documents
