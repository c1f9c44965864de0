"""Sources of text: the standard library, local files, or a hub dataset, in a fixed order.

A document is one string. Local files and hub datasets are read through Hugging Face `datasets`, one file after the
other and streaming, so that nothing is copied into a cache and an error can name its file. Line ends of ``.txt`` files
become a single newline. Skipped files and documents (not UTF-8 in the standard library, of other kinds in a folder,
empty) are counted.
"""

from __future__ import annotations

import glob
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from megasdc.config.sections.data import SourceSection
from megasdc.errors import DataError

BUILDERS = {".txt": "text", ".jsonl": "json", ".parquet": "parquet"}
"""Builder of `datasets` for each file ending."""
COMPRESSIONS = (".gz", ".zst")
"""Endings that may follow those of `BUILDERS`."""
_BLOCK_BYTES = 1 << 20
NUM_PLACES = 5
"""Number of skipped documents that are listed, for each reason."""
OTHER_KINDS = "files of other kinds"
"""Reason for skipping files of a folder; the place is the ending."""
KINDS_REMEDY = "rename them to .txt to read them, or give a glob such as 'DIR/**/*.txt' as path in data.sources"
"""How to read files that were skipped for `OTHER_KINDS`, or to leave them out on purpose."""
LICENCES = {
    "stdlib": "Python Software Foundation License Version 2; parts under licences named in their files",
    "files": "not known to megasdc: see where the files come from",
    "hub": "see the dataset's card on the Hugging Face hub",
}
"""Licence note of each kind of source."""


class LeftOut(Counter[str]):
    """Counts of skipped documents of a source, by reason.

    ``places``: location of the first of each reason, by file and row; rows count from 0. Of files of other kinds: their
    endings.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, list[str]] = {}

    def add(self, reason: str, place: str) -> None:
        """Count one skipped document."""
        self[reason] += 1
        places = self.places.setdefault(reason, [])
        if len(places) < NUM_PLACES:
            places.append(place)

    def add_kinds(self, kinds: Counter[str]) -> None:
        """Count the skipped files of a folder, by ending."""
        if kinds:
            self[OTHER_KINDS] += kinds.total()
            self.places[OTHER_KINDS] = [_told(kinds)]


def iterate_documents(section: SourceSection, skipped: LeftOut | None = None) -> Iterator[str]:
    """Yield the documents of one source, the same in every call.

    Args:
        skipped: counts skipped documents, by reason, while the iterator runs.

    Returns:
        An iterator over non-empty texts; at most `section.max_documents`.

    Raises:
        DataError: a file is missing, empty or damaged, a column is missing, or the source holds no text at all.
    """
    counts = LeftOut() if skipped is None else skipped
    readers = {"stdlib": _read_stdlib, "files": _read_files, "hub": _read_hub}
    num_documents = 0
    for text in readers[section.kind](section, counts):
        yield text
        num_documents += 1
        if num_documents == section.max_documents:
            return
    if num_documents == 0:
        raise DataError(f"source {describe_source(section)} holds no text; skipped: {dict(counts) or 'nothing'}")


def describe_skipped(reason: str, count: int, places: Mapping[str, Sequence[str]]) -> str:
    """What was skipped for one reason, as text: number, first places, and for files of other kinds the remedy.

    ``places``: as of `LeftOut`, by reason.
    """
    if reason == OTHER_KINDS:
        return f"{count} {reason} ({', '.join(places.get(reason, []))}); {KINDS_REMEDY}"
    named = list(places.get(reason, []))
    return f"{count} {reason} ({'; '.join([*named, *(['...'] if count > len(named) else [])])})"


def sample_documents(documents: Iterable[str], num_characters: int) -> tuple[list[str], int]:
    """Take an even sample of a stream of unknown length, holding at most about twice the sample in memory.

    Every k-th document is kept, and k doubles whenever too much is held; the result depends only on the documents.

    Args:
        documents: the stream; read to its end.
        num_characters: approximate size of the sample; at most twice that, plus one document, is returned.

    Returns:
        The sample in stream order, and the characters of the whole stream.
    """
    kept: list[str] = []
    held = total = 0
    stride = 1
    for index, text in enumerate(documents):
        total += len(text)
        if index % stride:
            continue
        kept.append(text)
        held += len(text)
        while held > 2 * num_characters and len(kept) > 1:
            kept = kept[::2]
            held = sum(map(len, kept))
            stride *= 2
    return _thin(kept, held, num_characters), total


def fingerprint_source(section: SourceSection) -> dict[str, Any]:
    """Fingerprint of a source's input without reading it: names, sizes and times of its files.

    DataError if there are no files.
    """
    if section.kind == "hub":
        return {"kind": "hub"}
    if section.kind == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        rows = [(path.relative_to(root).as_posix(), path.stat().st_size) for path in _list_stdlib(section)]
        return {"python": sys.version.split()[0], **_summarise(rows)}
    stats = [(path, path.stat()) for path in list_files(section)]
    return _summarise([(path.as_posix(), stat.st_size, stat.st_mtime_ns) for path, stat in stats])


def describe_source(section: SourceSection) -> str:
    """Short description of a source for messages."""
    if section.kind == "stdlib":
        return f"stdlib (Python {sys.version.split()[0]}{f', {section.pattern}' if section.pattern else ''})"
    return f"{section.kind} {section.path!r}" + (f" ({section.name})" if section.name else "")


def list_files(section: SourceSection) -> list[Path]:
    """The files of a `files` source, sorted by name.

    A folder is searched recursively for the known endings; hidden files and folders are skipped. A file or glob must
    match known endings only. DataError for no file, an unknown ending, an empty file, or no permission.
    """
    where = _need_path(section)
    try:
        return _list_files(where)
    except OSError as error:
        raise DataError(
            f"{error.filename} cannot be read: {error.strerror}; ask its owner for read permission"
        ) from error


def _list_files(where: str) -> list[Path]:
    known = ", ".join(f"{ending}[.gz|.zst]" for ending in BUILDERS)
    root = Path(where)
    if root.is_dir():
        paths = [path for path in _visible_files(root) if _builder_of(path) is not None]
        if not paths:
            others = _kinds_of(_visible_files(root))
            more = f" but {others.total()} {OTHER_KINDS} ({_told(others)}); {KINDS_REMEDY}" if others else ""
            raise DataError(f"folder {where} holds no file of a known kind ({known}){more}")
    else:
        paths = [root] if root.is_file() else [Path(found) for found in glob.glob(where, recursive=True)]
        paths = [path for path in paths if path.is_file()]
        if not paths:
            raise DataError(f"no file matches {where!r}; give a file, a folder or a glob (now in {Path.cwd()})")
    for path in paths:
        if _builder_of(path) is None:
            raise DataError(f"file {path} is not of a known kind ({known})")
        if path.stat().st_size == 0:
            raise DataError(f"file {path} is empty (0 bytes); remove it or fetch it again")
    return sorted(paths)


def _visible_files(root: Path) -> list[Path]:
    """All files below a folder that are not hidden, nor in a hidden folder."""
    paths = [path for path in root.rglob("*") if path.is_file()]
    return [path for path in paths if not any(part.startswith(".") for part in path.relative_to(root).parts)]


def _other_kinds(section: SourceSection) -> Counter[str]:
    """Number of files of unknown kinds in the folder of a source, by ending; empty for a file or a glob."""
    root = Path(_need_path(section))
    return _kinds_of(path for path in _visible_files(root) if _builder_of(path) is None) if root.is_dir() else Counter()


def _kinds_of(paths: Iterable[Path]) -> Counter[str]:
    """Number of files by ending, with the one before a compression's."""
    endings = ("".join(path.suffixes[-2 if path.suffix in COMPRESSIONS else -1 :]).lower() for path in paths)
    return Counter(ending or "without ending" for ending in endings)


def _told(kinds: Counter[str]) -> str:
    """The most frequent endings with their numbers."""
    told = [f"{kind} {count}" for kind, count in kinds.most_common(NUM_PLACES)]
    return ", ".join([*told, *(["..."] if len(kinds) > NUM_PLACES else [])])


def _read_stdlib(section: SourceSection, skipped: LeftOut) -> Iterator[str]:
    """Yield the Python files of the standard library; test files that deliberately are not UTF-8 are skipped."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in _list_stdlib(section):
        place = f"file {path.relative_to(root).as_posix()}"
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            skipped.add("files that are not UTF-8", place)
            continue
        if text:
            yield text
        else:
            skipped.add("empty documents", place)


def _list_stdlib(section: SourceSection) -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    foreign = {"site-packages", "dist-packages", "__pycache__"}
    found = {path for path in root.glob(section.pattern or "**/*.py") if path.suffix == ".py" and path.is_file()}
    paths = [path for path in found if not foreign & set(path.relative_to(root).parts)]
    return sorted(paths, key=lambda path: path.relative_to(root).as_posix())


def _read_files(section: SourceSection, skipped: LeftOut) -> Iterator[str]:
    import datasets

    files = list_files(section)
    skipped.add_kinds(_other_kinds(section))
    for path in files:
        builder = _builder_of(path)
        assert builder is not None, f"{path} passed list_files"
        by = {"file": "document", "paragraph": "paragraph", "line": "line"}[section.text_unit]
        options = {"sample_by": by} if builder == "text" else {}
        column = "text" if builder == "text" else section.text_field
        try:
            with _plain_name(path) as name:
                # Unlike `load_dataset`, these contact no server, not even to count the download.
                read = getattr(datasets.IterableDataset, f"from_{builder}")
                yield from _texts(read(name, **options), column, f"file {path}", skipped)
        except DataError:
            raise
        except Exception as error:
            # Every reader below `datasets` has its own exceptions; all of them mean that this file is unreadable.
            raise DataError(f"file {path} cannot be read as {builder}: {type(error).__name__}: {error}") from error


def _read_hub(section: SourceSection, skipped: LeftOut) -> Iterator[str]:
    import datasets

    name = _need_path(section)
    place = f"dataset {name!r}, configuration {section.name!r}, split {section.split!r}"
    try:
        rows = datasets.load_dataset(
            name, section.name, split=section.split, streaming=section.streaming, revision=section.revision
        )
        yield from _texts(rows, section.text_field, place, skipped)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{place} cannot be read: {type(error).__name__}: {error}") from error


def _texts(rows: Iterable[dict[str, Any]], column: str, place: str, skipped: LeftOut) -> Iterator[str]:
    for number, row in enumerate(rows):
        if column not in row:
            raise DataError(f"{place} has no column {column!r}; its columns are {sorted(row)}; set text_field to one")
        text = row[column]
        if text is None:
            skipped.add("documents without text", f"{place}, row {number}")
        elif text == "":
            skipped.add("empty documents", f"{place}, row {number}")
        elif isinstance(text, str):
            yield text
        else:
            raise DataError(f"{place}, row {number}: column {column!r} holds {type(text).__name__}, not text")


@contextmanager
def _plain_name(path: Path) -> Iterator[str]:
    """Yield a file name that `datasets` and `fsspec` do not take for a pattern or URL; .zst files are unpacked.

    fsspec 2026.9 reads only the first frame of a .zst file, and accepts a truncated one; so it is unpacked here, into a
    temporary file.
    """
    packed = path.name.lower().endswith(".zst")
    if not packed and not set(str(path.resolve())) & set("*?[]:#"):
        yield str(path.resolve())
        return
    with tempfile.TemporaryDirectory() as folder:
        if packed:
            name = Path(folder) / ("input" + Path(path.stem).suffix)
            _unpack_zst(path, name)
        else:
            name = Path(folder) / ("input" + "".join(path.suffixes[-2:]))
            name.symlink_to(path.resolve())
        yield str(name)


def _unpack_zst(path: Path, target: Path) -> None:
    """Unpack all frames of a .zst file; DataError if it ends inside a frame."""
    import zstandard

    with open(path, "rb") as source, open(target, "wb") as unpacked:
        block = source.read(_BLOCK_BYTES)
        while block:
            frame = zstandard.ZstdDecompressor().decompressobj()
            while not frame.eof:
                if not block:
                    raise DataError(f"file {path} is cut off: it ends inside a compressed frame; fetch it again")
                unpacked.write(frame.decompress(block))
                block = source.read(_BLOCK_BYTES) if not frame.eof else frame.unused_data
            block = block or source.read(_BLOCK_BYTES)


def _builder_of(path: Path) -> str | None:
    name = path.name.lower()
    for ending in COMPRESSIONS:
        name = name.removesuffix(ending)
    return BUILDERS.get(Path(name).suffix)


def _need_path(section: SourceSection) -> str:
    if not section.path:
        raise DataError(f"a source of kind {section.kind!r} needs `path`")
    return section.path


def _summarise(rows: list[tuple[Any, ...]]) -> dict[str, Any]:
    return {
        "num_files": len(rows),
        "size_bytes": sum(row[1] for row in rows),
        "listing": xxhash.xxh3_64_hexdigest(repr(rows).encode()),
    }


def _thin(texts: list[str], held: int, num_characters: int) -> list[str]:
    """Thin texts evenly so that about `num_characters` of `held` remain."""
    if held <= num_characters:
        return texts
    kept, seen, taken = [], 0, 0
    for text in texts:
        seen += len(text)
        if taken * held < seen * num_characters:
            kept.append(text)
            taken += len(text)
    return kept
