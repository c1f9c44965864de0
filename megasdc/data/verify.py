"""Verification of prepared data: a quick check before a start, or of every byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megasdc.common.errors import DataError, StorageError
from megasdc.data.blocks import BLOCK_BYTES, REMEDY, BlockChecksums, checksums_file, write_checksums
from megasdc.data.manifest import FORMAT_VERSION, TOKENIZER_FOLDER, FileRecord, Manifest, checksum_file, record_file
from megasdc.data.tokenizer import load_tokenizer

ADD_CHECKSUMS = "megasdc verify-data --add-checksums"


def verify_prepared(folder: Path | str, quick: bool = True) -> Manifest:
    """Check that a folder of prepared data is complete and unchanged; returns its manifest.

    Args:
        quick: check the size and a few blocks of each ``.bin`` file, and every byte of all others; false: every byte of
            all files.

    Raises:
        DataError: a file is missing, has another size or checksum; names it.
    """
    manifest = Manifest.load(folder)
    if problem := next(_file_problems(Path(folder), manifest, quick), None):
        raise DataError(f"{problem}; {REMEDY}")
    return manifest


def unchecked(folder: Path | str, manifest: Manifest) -> str | None:
    """Note that data of an earlier version cannot be checked at the start and in the loader; None: they can."""
    if manifest.block_bytes is not None:
        return None
    return (
        f"{folder} was prepared by a version that kept no checksums of blocks nor of the manifest: the tokens that are "
        f"used are not checked; `{ADD_CHECKSUMS} {folder}` checks every byte once and adds them"
    )


@dataclass(frozen=True)
class DataReport:
    """Result of the verification of prepared data; problems are one sentence each; ``note``: see ``unchecked``."""

    folder: str
    problems: list[str]
    num_files: int = 0
    size_bytes: int = 0
    note: str | None = None

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON-compatible values."""
        return {"ok": self.ok, **asdict(self)}

    def render(self) -> str:
        """The result as text."""
        if self.ok:
            lines = [f"{self.folder}: {self.num_files} files, {self.size_bytes:,} bytes, all unchanged"]
        else:
            count = len(self.problems)
            lines = [f"{self.folder}: {count} problem{'s' if count != 1 else ''}"]
            lines += [*(f"  - {problem}" for problem in self.problems), f"  {REMEDY}"]
        return "\n".join([*lines, *([f"  {self.note}"] if self.note else [])])


def check_folder(folder: Path, advance: Callable[[int], None] = lambda size: None) -> DataReport:
    """Verify every byte of prepared data; report all problems, not only the first.

    Args:
        advance: called with the bytes of each piece read.
    """
    try:
        manifest = Manifest.load(folder)
    except DataError as error:
        return DataReport(str(folder), [str(error).removesuffix(f"; {REMEDY}")])
    problems = list(_file_problems(folder, manifest, False, advance))
    if not problems:
        problems = list(_tokenizer_problems(folder, manifest))
    sizes = [record.size_bytes for record in manifest.files.values()]
    return DataReport(str(folder), problems, len(sizes), sum(sizes), unchecked(folder, manifest))


def add_checksums(folder: Path) -> None:
    """Add block checksums to data of an earlier version and update its manifest; run `check_folder` before.

    No other file is changed; running jobs may keep using the data. StorageError if the folder cannot be written.
    """
    manifest = Manifest.load(folder)
    if manifest.block_bytes is not None:
        return
    files = dict(manifest.files)
    try:
        for name in manifest.splits:
            path = write_checksums(folder / f"{name}.bin")
            files[path.name] = record_file(path)
        _renewed(manifest, files).save(folder)
    except OSError as error:
        raise StorageError(f"no checksums can be added to {folder}: {error}; nothing was changed") from error


def _renewed(manifest: Manifest, files: dict[str, FileRecord]) -> Manifest:
    content = {name: value for name, value in manifest if name not in ("files", "block_bytes", "format_version")}
    return Manifest(**content, files=files, block_bytes=BLOCK_BYTES, format_version=FORMAT_VERSION)


def _file_problems(
    root: Path, manifest: Manifest, quick: bool, advance: Callable[[int], None] = lambda size: None
) -> Iterator[str]:
    """Problems of the files: first all sizes, then checksums, with ``.bin`` files after their ``.checksums``."""
    wrong = set()
    for name, record in manifest.files.items():
        if problem := _size_problem(root / name, record):
            wrong.add(root / name)
            yield problem
    tokens = {root / f"{name}.bin" for name in manifest.splits}
    for name, record in sorted(manifest.files.items(), key=lambda item: root / item[0] in tokens):
        path = root / name
        if path in wrong:
            continue
        if not (quick and path in tokens) and (found := checksum_file(path, advance)) != record.checksum:
            wrong.add(path)
            yield f"{path} has checksum {found}, its manifest says {record.checksum}"
        if path in tokens and manifest.block_bytes is not None and checksums_file(path) not in wrong:
            checksums = BlockChecksums(path, manifest.block_bytes)
            if quick:
                yield from checksums.sample_problems()
            elif path in wrong:
                yield from checksums.find_problems()


def _size_problem(path: Path, record: FileRecord) -> str | None:
    """Problem of a file's size; None if it is as expected."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return f"{path} is missing, its manifest lists {record.size_bytes} bytes"
    return None if size == record.size_bytes else f"{path} has {size} bytes, its manifest says {record.size_bytes}"


def _tokenizer_problems(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Differences between the manifest's record of the tokenizer and the tokenizer."""
    record = manifest.tokenizer
    try:
        tokenizer = load_tokenizer(record.kind, folder / TOKENIZER_FOLDER)
    except (DataError, ValueError) as error:
        yield str(error)
        return
    for name in ("vocab_size", "end_of_document", "checksum"):
        if (found := getattr(tokenizer, name)) != (said := getattr(record, name)):
            yield f"{folder / TOKENIZER_FOLDER} has {name} {found}, the manifest says {said}"
