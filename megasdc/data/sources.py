"""Sources: text of the standard library, of local files or a hub dataset, in a fixed order, or files of token ids.

Token ids are read by `megasdc.data.indexed`; where their files are is said here. A document of text is one string.
Local files are read one after the other and streaming, so that nothing is copied into a cache and an error can name its
file; hub datasets are read through Hugging Face `datasets`. What is skipped (files of the standard library that are not
UTF-8, of other kinds in a folder, empty documents, unreadable ones within `data.max_unreadable`) is counted.
"""

from __future__ import annotations

import glob
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from megasdc.common.errors import DataError
from megasdc.config.data import SourceSection
from megasdc.data.formats import (
    COMPRESSIONS,
    KINDS,
    NUM_PLACES,
    LeftOut,
    collect_texts,
    format_kind,
    json_problem,
    read_file,
)

OTHER_KINDS = "files of other kinds"
"""Reason for skipping files of a folder; the place is the ending."""
KINDS_REMEDY = (
    "write them as JSON lines (.jsonl, an object a line with the text in it), rename those to .txt that hold nothing "
    "but the text of one document, or give a glob such as 'DIR/**/*.txt' as path in data.sources to leave them out"
)
"""Remedy for files that were skipped for `OTHER_KINDS`: ways to read them, or to leave them out on purpose."""
NOT_LINES = "JSON files that are not JSON lines with the text"
"""Reason for skipping .json files of a folder."""
MEGATRON = "megatron"
"""Kind of a source of token ids, see `megasdc.data.indexed`."""
PAIR = (".bin", ".idx")
"""Endings of a pair of files of such a source."""
NOT_PAIRS = "files that are neither .bin nor .idx"
"""Reason for skipping files of its folder."""
NUM_SAMPLED_FILES = 32
"""Maximum number of files of a source in the sample on which a tokenizer is tried."""
LICENCES = {
    "stdlib": "Python Software Foundation License Version 2; parts under licences named in their files",
    "files": "not known to megasdc: see where the files come from",
    "hub": "see the dataset's card on the Hugging Face hub",
    "megatron": "not known to megasdc: see where the files come from",
}
"""Licence note of each kind of source."""


def iterate_documents(section: SourceSection, skipped: LeftOut | None = None) -> Iterator[str]:
    """Yield the documents of one source of text, the same in every call.

    Args:
        skipped: counts skipped documents, by reason, while the iterator runs.

    Returns:
        An iterator over non-empty texts; at most `section.max_documents`.

    Raises:
        DataError: a file is missing, empty or damaged, more cannot be read than ``skipped`` accepts, a column is
            missing, or the source holds no text at all.
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
    """Text on the documents skipped for one reason: number, first places, and a remedy for files that are not read.

    ``places``: as of `LeftOut`, by reason.
    """
    if reason == OTHER_KINDS:
        return f"{count} {reason} ({', '.join(places.get(reason, []))}); {KINDS_REMEDY}"
    named = list(places.get(reason, []))
    remedy = f"; {KINDS_REMEDY}" if reason == NOT_LINES else ""
    return f"{count} {reason} ({'; '.join([*named, *(['...'] if count > len(named) else [])])}){remedy}"


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


def sample_starts(section: SourceSection, num_characters: int) -> list[str]:
    """Beginnings of a source: of files, evenly spread, the first documents of each; else the first documents.

    It takes a short time, whatever the size of the source; what cannot be read is passed over.
    """
    skipped = LeftOut(sys.maxsize)
    streams = [iterate_documents(section, skipped)]
    if section.kind == "files" and section.max_documents is None:
        paths = list_files(section)
        chosen = paths[:: -(-len(paths) // NUM_SAMPLED_FILES)]
        streams = [read_file(path, section, skipped) for path in chosen if path.stat().st_size]
    texts = []
    for stream in streams:
        left = num_characters // len(streams)
        for text in stream:
            texts.append(text[:left])
            left -= len(text)
            if left <= 0:
                break
    return texts


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
    if section.kind == MEGATRON:
        return _fingerprint(Path(f"{prefix}{ending}") for prefix in list_pairs(section) for ending in PAIR)
    return _fingerprint(list_files(section))


def newly_read(section: SourceSection, before: dict[str, Any]) -> list[Path]:
    """Files of a folder that earlier versions of this module left out, if the others have the fingerprint of before.

    They read no .json and .ndjson files, and no folder behind a link. Empty where that explains no difference.
    """
    root = Path(section.path or "")
    if section.kind != "files" or not root.is_dir():
        return []
    paths = list_files(section)
    new = [path for path in paths if _ending(path) in (".json", ".ndjson") or _is_behind_link(path, root)]
    return new if new and _fingerprint(sorted({*paths} - {*new})) == before else []


def _is_behind_link(path: Path, root: Path) -> bool:
    return any(folder.is_symlink() for folder in path.parents[: len(path.relative_to(root).parts) - 1])


def _fingerprint(paths: Iterable[Path]) -> dict[str, Any]:
    stats = [(path, path.stat()) for path in paths]
    return _summarise([(path.as_posix(), stat.st_size, stat.st_mtime_ns) for path, stat in stats])


def describe_source(section: SourceSection) -> str:
    """Short description of a source for messages."""
    if section.kind == "stdlib":
        return f"stdlib (Python {sys.version.split()[0]}{f', {section.pattern}' if section.pattern else ''})"
    return f"{section.kind} {section.path!r}" + (f" ({section.name})" if section.name else "")


def list_files(section: SourceSection, skipped: LeftOut | None = None) -> list[Path]:
    """The files of a `files` source, sorted by name.

    A folder is searched recursively for the known endings, through linked folders too; hidden files and folders are
    skipped, and .json files that `json_problem` does not take for JSON lines. A file or glob must match known kinds
    only. DataError for no file, an unknown kind, an array of JSON that holds the text, or no permission.

    Args:
        skipped: counts what a folder holds and is not read.
    """
    where = _need_path(section)
    try:
        if Path(where).is_dir():
            return sorted(_files_of_folder(Path(where), section.text_field, LeftOut() if skipped is None else skipped))
        return sorted(_files_of_glob(where, section.text_field))
    except OSError as error:
        raise DataError(
            f"{error.filename} cannot be read: {error.strerror}; ask its owner for read permission"
        ) from error


def list_pairs(section: SourceSection, skipped: LeftOut | None = None) -> list[Path]:
    """The prefixes of the pairs PREFIX.bin and PREFIX.idx of a `megatron` source, sorted by name.

    A folder is searched as by `list_files`. DataError for no pair, one file of a pair alone, or no permission.

    Args:
        skipped: counts what a folder holds and is not read.
    """
    where = _need_path(section)
    counts = LeftOut() if skipped is None else skipped
    try:
        visible = _visible_files(Path(where), counts) if Path(where).is_dir() else None
        files = [Path(f"{_prefix(where)}{ending}") for ending in PAIR] if visible is None else visible
        present = {path for path in files if path.suffix in PAIR and path.is_file()}
    except OSError as error:
        raise DataError(
            f"{error.filename} cannot be read: {error.strerror}; ask its owner for read permission"
        ) from error
    if not present:
        raise DataError(
            f"{where!r} is no pair of files PREFIX.bin and PREFIX.idx, nor a folder of pairs (now in {Path.cwd()}); "
            "megasdc.data.sources.*.path names the prefix, one of the files, or the folder"
        )
    for path in sorted(present):
        other = path.with_suffix(PAIR[1 - PAIR.index(path.suffix)])
        if other not in present:
            raise DataError(f"file {other} is missing, {path.name} is there: copy it too, or make both again")
    for path in sorted({*(visible or [])} - present):
        counts.add(NOT_PAIRS, f"file {path}")
    return sorted({path.with_suffix("") for path in present})


def _prefix(path: str) -> str:
    """The prefix of a pair, of which it or one of the files is given."""
    return path[: -len(PAIR[0])] if path.endswith(PAIR) else path


def _known_endings() -> str:
    return ", ".join(f"{ending}[.gz|.zst]" for ending in KINDS)


def _files_of_folder(root: Path, field: str, skipped: LeftOut) -> list[Path]:
    visible = _visible_files(root, skipped)
    paths = [path for path in visible if format_kind(path) is not None and not _is_json(path)]
    others = [path for path in visible if format_kind(path) is None]
    unclear = [path for path in visible if _is_json(path)]
    empty = [path for path in unclear if path.stat().st_size == 0]
    problems = {path: json_problem(path, field) for path in unclear if path not in empty}
    for path, problem in problems.items():
        if problem is not None and problem[1]:
            raise DataError(f"file {path} {problem[0]}")
    of_lines = [path for path, problem in problems.items() if problem is None]
    paths += [*of_lines, *(empty if of_lines else [])]  # among shards, one that is empty is a damaged one
    left = sorted({*unclear} - {*paths})
    kinds = _kinds_of(others)
    if not paths:
        kinds += _kinds_of(left)
        more = f" but {kinds.total()} {OTHER_KINDS} ({_most_frequent(kinds)}); {KINDS_REMEDY}" if kinds else ""
        first = next((f"; file {path} {found[0]}" for path in left if (found := problems.get(path))), "")
        raise DataError(f"folder {root} holds no file of a known kind ({_known_endings()}){more}{first}")
    for path in left:
        skipped.add(NOT_LINES, f"file {path}")
    if others:
        skipped[OTHER_KINDS] += len(others)
        skipped.places[OTHER_KINDS] = [_most_frequent(kinds)]
    return paths


def _files_of_glob(where: str, field: str) -> list[Path]:
    paths = [Path(where)] if Path(where).is_file() else [Path(found) for found in glob.glob(where, recursive=True)]
    paths = [path for path in paths if path.is_file()]
    if not paths:
        raise DataError(f"no file matches {where!r}; give a file, a folder or a glob (now in {Path.cwd()})")
    for path in paths:
        if format_kind(path) is None:
            raise DataError(f"file {path} is not of a known kind ({_known_endings()}); {KINDS_REMEDY}")
        if _is_json(path) and (problem := json_problem(path, field)):
            raise DataError(f"file {path} {problem[0]}")
    return paths


def _is_json(path: Path) -> bool:
    """Whether a file's ending leaves open whether it holds JSON lines."""
    return _ending(path) == ".json"


def _ending(path: Path) -> str:
    """A file's ending before that of a compression."""
    return (Path(path.stem) if path.suffix.lower() in COMPRESSIONS else path).suffix.lower()


def _visible_files(root: Path, skipped: LeftOut) -> list[Path]:
    """All files below a folder that are not hidden, nor in a hidden folder.

    Links to folders are followed in the order of their names after all that is below the folder itself; no folder is
    read twice, and none that holds the link to it.
    """
    paths: list[Path] = []
    entered: set[str] = set()

    def closed(error: OSError) -> None:
        if error.filename == str(root):
            raise error
        skipped.add("folders that cannot be opened", f"folder {error.filename}: {error.strerror}")

    links = [root]
    while links:
        link = links.pop(0)
        real = os.path.realpath(link)
        holds_link = link != root and Path(os.path.realpath(link.parent)).is_relative_to(real)
        if real in entered or holds_link:
            skipped.add("linked folders that are read already", f"folder {link}")
            continue
        for folder, folders, names in os.walk(link, onerror=closed):
            entered.add(os.path.realpath(folder))
            shown = [Path(folder, name) for name in sorted(folders) if not name.startswith(".")]
            links += [path for path in shown if path.is_symlink()]
            own = [path for path in shown if not path.is_symlink()]
            folders[:] = [path.name for path in own if os.path.realpath(path) not in entered]
            for path in (Path(folder, name) for name in names if not name.startswith(".")):
                if path.is_file():
                    paths.append(path)
                elif path.is_symlink():
                    skipped.add("links that lead nowhere", f"file {path}")
    return paths


def _kinds_of(paths: Iterable[Path]) -> Counter[str]:
    """Number of files by ending, with the one before a compression's."""
    endings = ("".join(path.suffixes[-2 if path.suffix in COMPRESSIONS else -1 :]).lower() for path in paths)
    return Counter(ending or "without ending" for ending in endings)


def _most_frequent(kinds: Counter[str]) -> str:
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
    paths = list_files(section, skipped)
    empty = {path for path in paths if path.stat().st_size == 0}
    for path in sorted(empty):
        skipped.add_unreadable(f"file {path}", "is empty (0 bytes)")
    for path in paths:
        if path not in empty:
            yield from read_file(path, section, skipped)


def _read_hub(section: SourceSection, skipped: LeftOut) -> Iterator[str]:
    import datasets

    name = _need_path(section)
    place = f"dataset {name!r}, configuration {section.name!r}, split {section.split!r}"
    try:
        rows = datasets.load_dataset(
            name, section.name, split=section.split, streaming=section.streaming, revision=section.revision
        )
        values = _column(rows, section.text_field, place)
        yield from collect_texts(values, section.text_field, lambda number: f"{place}, row {number}", skipped)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{place} cannot be read: {type(error).__name__}: {error}") from error


def _column(rows: Iterable[dict[str, Any]], column: str, place: str) -> Iterator[tuple[int, Any]]:
    for number, row in enumerate(rows):
        if column not in row:
            raise DataError(f"{place} has no column {column!r}; its columns are {sorted(row)}; set text_field to one")
        yield number, row[column]


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
