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

from megasdc.common.errors import DataError
from megasdc.config.data import SourceSection
from megasdc.data.formats import UNREADABLE, LeftOut
from megasdc.data.sources import (
    NOT_LINES,
    OTHER_KINDS,
    describe_skipped,
    describe_source,
    fingerprint_source,
    iterate_documents,
    sample_documents,
)


def files(path, **changes):
    return SourceSection.model_validate({"kind": "files", "path": str(path), **changes})


def jsonl(*texts, key="text"):
    return "".join(json.dumps({key: text}) + "\n" for text in texts).encode()


@pytest.mark.slow
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


def with_window(content, log):
    """A frame of .zst that says that it needs a window of so many bits, as `zstd --long` writes it from a stream."""
    packer = zstandard.ZstdCompressor().compressobj()
    frame = bytearray(packer.compress(content) + packer.flush())
    frame[5] = (log - 10) << 3
    return bytes(frame)


def test_zst_with_long_windows(tmp_path):
    """Frames up to the window of `zstd --long=31` are read, several in a file too; larger ones are never skipped."""
    assert zstandard.get_frame_parameters(with_window(b"a", 31)).window_size == 1 << 31
    skippable = b"\x50\x2a\x4d\x18\x05\x00\x00\x00other"
    packed = with_window(jsonl("a"), 31) + skippable + zstandard.compress(jsonl("b")) + with_window(jsonl("c"), 28)
    for name in ("a.jsonl.zst", "b.json.zst"):
        (tmp_path / name).write_bytes(packed)
    assert list(iterate_documents(files(tmp_path))) == ["a", "b", "c"] * 2
    (tmp_path / "c.txt.zst").write_bytes(with_window(b"a", 32))
    with pytest.raises(DataError, match=r"c\.txt\.zst was packed with a window .*; at most 2 GiB can; .*--long=27"):
        list(iterate_documents(files(tmp_path), LeftOut(9)))


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


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_paragraphs(tmp_path, end):
    """Lines between blank ones, whatever ends a line, with spaces or without; none is part of a paragraph."""
    lines = ["", "  a", "b ", "", "", "c", " \t", "d", "\f", "", ""]
    (tmp_path / "a.txt").write_bytes(end.join(lines).encode())
    assert list(iterate_documents(files(tmp_path, text_unit="paragraph"))) == ["  a\nb ", "c", "d\n\f"]


def test_text_field_and_documents_without_text(tmp_path):
    """Another column can hold the text; null and empty texts are left out and counted."""
    (tmp_path / "a.jsonl").write_bytes(jsonl("x", None, "", "y", key="content"))
    skipped = LeftOut()
    assert list(iterate_documents(files(tmp_path, text_field="content"), skipped)) == ["x", "y"]
    assert skipped == {"documents without text": 1, "empty documents": 1}
    path = next(tmp_path.glob("*.jsonl"))
    assert skipped.places == {
        "documents without text": [f"file {path}, line 2"],
        "empty documents": [f"file {path}, line 3"],
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


NUISANCES = [
    {"late": 1},
    {"mixed": 1},
    {"mixed": "text"},
    {"null": None},
    {"null": "text"},
    {"list": []},
    {"list": ["text"]},
    {"list": [{"text": "other"}]},
    {"number": 1},
    {"number": 0.5},
    {"number": float("nan")},
    {"number": 10**400},
    {"half": "\ud800"},
    {"map": {"a": 1}},
    {"map": {"b": {"text": 1}}},
    {"type": "user", "message": {"role": "user"}},
]
"""What rows hold beside their text, from public data sets that a schema of the first rows does not fit."""


def test_rows_hold_what_they_want_beside_their_text(tmp_path):
    """Only the field is read, so that a file of over 10 MB may hold any other keys and kinds late, and text late."""
    rows = [{"other": 1}, {"text": None}, *({"text": f"{number} " + "x" * 1000} for number in range(11_000))]
    rows += [{"text": f"with {number}", **nuisance} for number, nuisance in enumerate(NUISANCES)]
    lines = [json.dumps(row) for row in rows] + ['{"text": "long", "number": ' + "9" * 5000 + "}"]
    content = "\n".join(lines).encode() + b'\n{"text": "bytes", "other": "\xff"}\n'
    assert len(content) > 11_000_000
    (tmp_path / "a.jsonl").write_bytes(content)
    skipped = LeftOut()
    texts = [row["text"] for row in rows[2:]] + ["long", "bytes"]
    assert list(iterate_documents(files(tmp_path), skipped)) == texts
    assert skipped == {"documents without text": 2}
    table = pa.table({"text": ["x"], "other": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))})
    pq.write_table(table, tmp_path / "b.parquet")
    assert list(iterate_documents(files(tmp_path / "b.parquet"))) == ["x"]


@pytest.mark.parametrize(
    "content",
    [
        b'{"text": "a"}{"text": "b"} {"text": "c"}',
        b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}\r{"text": "c"}\n',
        b'{\n "text": "a", "x": [\n1\n]\n}\n{"text":\n"b"}\n{"text": "c"}\n',
        b'[{"text": "a"},\n {"text": "b"}, {"text": "c"}]',
        b'["a", "b",\n"c"]',
        b'[\n {"text":\n"a"}\n, {"te\\u0078t": "b"},\n\n{"text": "c"}]\n\n',
        b'{"text":\n"a"} {"text":\n"b"} {"text": "c"}\n',
    ],
)
def test_other_layouts_of_json(tmp_path, content):
    """Objects that share a line, go on over lines, or are elements of an array in a .jsonl file are read as before."""
    (tmp_path / "a.jsonl").write_bytes(content)
    assert list(iterate_documents(files(tmp_path))) == ["a", "b", "c"]


def test_unreadable_within_a_limit(tmp_path):
    """Up to max_unreadable documents, lines and files are skipped and counted; one fewer is an error for the last."""
    (tmp_path / "a.jsonl").write_bytes(
        jsonl("1") + b'{"text": [\n' + jsonl("2") + b'{"text": "\xff"}\n' + jsonl(5, "3")
    )
    (tmp_path / "b.txt").write_bytes(b"\xff")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(jsonl("4"))[:-4])
    (tmp_path / "d.jsonl").write_bytes(b"")
    table = pa.table({"text": pa.array([b"5", b"\xff", b"6"]).view(pa.string())})
    pq.write_table(table, tmp_path / "e.parquet")
    skipped = LeftOut(7)
    assert list(iterate_documents(files(tmp_path), skipped)) == ["1", "2", "3", "4", "5", "6"]
    assert skipped == {UNREADABLE: 7}
    names = [place.removeprefix(f"file {tmp_path}/") for place in skipped.places[UNREADABLE]]
    assert names == ["d.jsonl", *(f"a.jsonl, line {number}" for number in (2, 4, 5)), "b.txt"]
    with pytest.raises(DataError, match=r"e\.parquet, row 1 is not UTF-8.*\(6 before it were skipped\)"):
        list(iterate_documents(files(tmp_path), LeftOut(6)))


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress], ids=["plain", "gz", "zst"])
def test_json_that_holds_json_lines(tmp_path, pack):
    """A .json file that begins with an object with the text is read as JSON lines; others are counted by name."""
    suffix = {bytes: "", gzip.compress: ".gz"}.get(pack, ".zst")
    lines = (
        b"\n" + json.dumps({"url": "u", "text": "a"}).encode() + b"\n" + json.dumps({"text": "b", "x": [1]}).encode()
    )
    (tmp_path / f"c4-train.00000-of-01024.json{suffix}").write_bytes(pack(lines))
    (tmp_path / "info.json").write_text(json.dumps({"text": "of a description"}, indent=1))
    (tmp_path / "list.json").write_text('[{"name": "a"}]')
    inner = '{\n "rows": [\n{"text": "x"}\n,\n' + '{"text": "y"},\n' * 2000 + '{"text": "z"}\n]}'
    (tmp_path / "rows.json").write_text(inner)
    skipped = LeftOut()
    assert list(iterate_documents(files(tmp_path), skipped)) == ["a", "b"]
    places = [f"file {tmp_path}/{name}.json" for name in ("info", "list", "rows")]
    assert (dict(skipped), skipped.places) == ({NOT_LINES: 3}, {NOT_LINES: places})
    assert "rows.json); write them as JSON lines" in describe_skipped(NOT_LINES, 3, skipped.places)
    empty = tmp_path / "c4-train.00001-of-01024.json"
    empty.write_bytes(b"")  # no other kind of file among shards, but one that was not fetched
    with pytest.raises(DataError, match=r"c4-train\.00001-of-01024\.json is empty"):
        list(iterate_documents(files(tmp_path)))
    empty.unlink()
    (tmp_path / "data.json").write_text('[{"text": "a"}]')
    with pytest.raises(DataError, match=r"data\.json is one JSON array"):
        list(iterate_documents(files(tmp_path)))


@pytest.mark.parametrize(
    "first",
    [
        b'{"id": 1}',
        b"null",
        b"5",
        b'{"text": "cut',
        b'{"text": [',
        b'{"id":\n1\n}',
        b'{"text": 1, "text": 2}',
        b'{"a": 1}{}',
    ],
)
def test_first_line_does_not_decide_about_a_json_file(tmp_path, first):
    """A .json shard is read though its first line holds no text, or is damaged, which is told."""
    (tmp_path / "a.jsonl").write_bytes(jsonl("a"))
    (tmp_path / "b.json").write_bytes(first + b"\n" + jsonl("b", "c"))
    skipped = LeftOut(1)
    assert list(iterate_documents(files(tmp_path), skipped)) == ["a", "b", "c"]
    assert skipped.total() == (2 if b"}{" in first else 1)
    assert next(place for places in skipped.places.values() for place in places) == f"file {tmp_path}/b.json, line 1"
    (tmp_path / "b.json").write_bytes(b'{"id": 1}\n' * 1001 + jsonl("b"))
    skipped = LeftOut()
    assert list(iterate_documents(files(tmp_path), skipped)) == ["a"]
    assert skipped.places == {NOT_LINES: [f"file {tmp_path}/b.json"]}


def test_a_value_over_many_lines(tmp_path, monkeypatch):
    """An object may go on over any number of lines; one that is cut off costs no time."""
    (tmp_path / "a.jsonl").write_bytes(b'{\n"text": "a", "x": [\n' + b"1,\n" * 50_000 + b"1]}\n" + jsonl("b"))
    assert list(iterate_documents(files(tmp_path))) == ["a", "b"]
    cut = b'{"text": "a", "x":\n' * 500 + b'[\n"text",\n' + b"1,\n" * 20_000
    (tmp_path / "a.jsonl").write_bytes(cut + b'{"text": "c"}\n' + jsonl("b"))
    skipped = LeftOut(30_000)
    monkeypatch.setattr("megasdc.data.formats._MAX_RETRIED_CHARACTERS", 1 << 12)
    calls = Calls(json.JSONDecoder.raw_decode)
    monkeypatch.setattr(json.JSONDecoder, "raw_decode", calls)
    assert list(iterate_documents(files(tmp_path), skipped)) == ["c", "b"]
    assert skipped == {UNREADABLE: 20_502}
    assert calls.num_characters < 200 * len(cut)


class Calls:
    """Counts of what a method of the JSON decoder is given."""

    def __init__(self, real):
        self.num_characters = 0
        self.real = real

    def __get__(self, decoder, kind):
        def call(text, idx=0):
            self.num_characters += len(text) - idx
            return self.real(decoder, text, idx)

        return call


def test_a_value_that_is_too_long_is_told(tmp_path, monkeypatch):
    """The limit for a value over several lines is named in the error."""
    monkeypatch.setattr("megasdc.data.formats._MAX_VALUE_CHARACTERS", 1 << 20)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a", "x": [\n' + (b"1," * 1000 + b"\n") * 1000 + b"1]}\n")
    with pytest.raises(DataError, match=r"line 1 cannot be read as JSON: .* does not end within 1,048,576 characters"):
        list(iterate_documents(files(tmp_path)))


def test_linked_folders_are_read_once(tmp_path):
    """Folders behind links are read, each once, after what is in the folder; loops and dead links are counted."""
    root = tmp_path / "root"
    for name in ("root/b", "elsewhere/deep", "elsewhere/.hidden"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("root/b/b.txt", "elsewhere/e.txt", "elsewhere/deep/d.txt", "elsewhere/.hidden/h.txt"):
        (tmp_path / name).write_text(Path(name).stem)
    links = {
        "a": "b",
        "c": "../elsewhere/deep",
        "d": "../elsewhere",
        "b/up": "..",
        "top": "../..",
        "gone.txt": "nothing",
    }
    for link, target in links.items():
        (root / link).symlink_to(target)
    skipped = LeftOut()
    assert list(iterate_documents(files(root), skipped)) == ["b", "d", "e"]
    assert skipped.places == {
        "links that lead nowhere": [f"file {root}/gone.txt"],
        "linked folders that are read already": [f"folder {root}/{name}" for name in ("a", "top", "b/up")],
    }


def test_empty_files_are_counted(tmp_path):
    """A shard without rows, and packed nothing, are counted by name."""
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b""))
    (tmp_path / "c.json.zst").write_bytes(zstandard.compress(b"\n"))
    (tmp_path / "d.txt").write_text("d")
    skipped = LeftOut()
    assert list(iterate_documents(files(tmp_path), skipped)) == ["d"]
    names = ("a.parquet", "b.jsonl.gz", "c.json.zst")
    assert skipped.places == {"empty files": [f"file {tmp_path / name}" for name in names]}


@pytest.mark.parametrize("unit", ["file", "line", "paragraph"])
def test_byte_order_mark_is_no_text(tmp_path, unit):
    """A byte order mark at the start of a file is left out; one within is text."""
    (tmp_path / "a.txt").write_bytes("\ufeffa\ufeff".encode())
    (tmp_path / "b.jsonl").write_bytes("\ufeff".encode() + jsonl("\ufeffb"))
    assert list(iterate_documents(files(tmp_path, text_unit=unit))) == ["a\ufeff", "\ufeffb"]


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
        r"x\.txt\.zst cannot be read as text: .*cut off",
    ),
    "not UTF-8": (lambda d: (d / "x.txt").write_bytes(b"a\xff\xfe\x00"), r"x\.txt is not UTF-8: character 1 is"),
    "broken JSON": (
        lambda d: (d / "x.jsonl").write_bytes(jsonl("a") + b'{"text"\n' + jsonl("b")),
        r"x\.jsonl, line 2 cannot be read as JSON: Expecting ':' delimiter at character 8; .*data\.max_unreadable",
    ),
    "cut off JSON": (
        lambda d: (d / "x.jsonl").write_bytes(jsonl(*"ab" * 6000)[:-4]),
        r"x\.jsonl, line 12000 cannot be read as JSON: Unterminated string",
    ),
    "lone surrogate": (
        lambda d: (d / "x.jsonl").write_bytes(b'{"text": "\\ud800 x"}\n'),
        r"x\.jsonl, line 1 is not UTF-8",
    ),
    "key twice": (lambda d: (d / "x.jsonl").write_bytes(b'{"text": "a", "text": "b"}\n'), 'line 1 has "text" twice'),
    "escaped key twice": (
        lambda d: (d / "x.jsonl").write_bytes(b'{"te\\u0078t": "a", "text": "b"}\n'),
        'line 1 has "text" twice',
    ),
    "key twice over lines": (
        lambda d: (d / "x.jsonl").write_bytes(jsonl("a") + b'{\n"text": "a",\n"text": "b"}\n'),
        'line 2 has "text" twice',
    ),
    "key twice in an array": (
        lambda d: (d / "x.jsonl").write_bytes(b'["a",\n{"text": "a", "text": "b"}]'),
        'line 2 has "text" twice',
    ),
    "key twice beside a long number": (
        lambda d: (d / "x.jsonl").write_bytes(b'{"text": "a", "text": "b", "n": %s}' % (b"9" * 5000)),
        'line 1 has "text" twice',
    ),
    "damaged array": (
        lambda d: (d / "x.jsonl").write_bytes(b'["a",\n"b" "c",\n"d"]'),
        r"line 2 cannot be read as JSON: Expecting ',' .* character 5; what follows in its array is not read",
    ),
    "cut off array": (
        lambda d: (d / "x.jsonl").write_bytes(b'["a",\n"b",\n'),
        "line 2 is the last, and its array does",
    ),
    "column twice": (
        lambda d: pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), d / "x.parquet"),
        r"x\.parquet has 2 columns 'text'",
    ),
    "not an object": (lambda d: (d / "x.jsonl").write_bytes(jsonl("a") + b"\n5\n"), "line 3 is int, not an object"),
    "array of JSON": (
        lambda d: (d / "x.json").write_bytes(b'\n [{"text": "a"}]'),
        r"x\.json is one JSON array; write an object a line: `cat .*x\.json \| jq -c '\.\[\]'` into .* \.jsonl",
    ),
    "array of texts": (lambda d: (d / "x.json").write_bytes(b'["a", "b"]'), r"jq -c '\.\[\] \| \{text: \.\}'`"),
    "object over lines": (
        lambda d: (d / "x.json.gz").write_bytes(gzip.compress(json.dumps({"text": "a"}, indent=1).encode())),
        r"x\.json\.gz is not JSON lines: .*`zcat .*x\.json\.gz \| jq -c \.` into .*\.jsonl",
    ),
    "JSON of another field": (
        lambda d: (d / "x.json").write_bytes(b'{"body": "a"}'),
        r"no 'text', its keys are \['body'\]",
    ),
    "no column": (lambda d: (d / "x.jsonl").write_bytes(jsonl("a", key="body")), r"no column 'text'.*\['body'\]"),
    "not text": (lambda d: (d / "x.jsonl").write_bytes(jsonl(5)), "line 1 holds int in column 'text', not text"),
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
    with pytest.raises(
        DataError, match=r"no file of a known kind \(\.txt.*1 files of other kinds \(\.csv 1\); write them as"
    ):
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
    assert told.startswith("3 files of other kinds (.py 2, .md 1); write them as JSON lines")
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
