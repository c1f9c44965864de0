"""Formats of files with text: plain text, JSON lines and Parquet, packed (.gz, .zst) or not.

Of JSON lines and Parquet the one field that holds the text is read, whatever else a row holds. A value of JSON may go
on over several lines, and a line may hold several values. Rows of Parquet count from 0, lines of files from 1. What is
not UTF-8 is decoded with surrogates, which no valid text holds, so that one check finds it in every format.
"""

from __future__ import annotations

import gzip
import io
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megasdc.config.sections.data import SourceSection
from megasdc.errors import DataError

KINDS = {".txt": "text", ".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet"}
"""Format of each file ending; a .json file only if it holds JSON lines, see `json_problem`."""
COMPRESSIONS = (".gz", ".zst")
"""Endings that may follow those of `KINDS`."""
NUM_PLACES = 5
"""Number of skipped documents that are listed, for each reason."""
UNREADABLE = "what cannot be read"
"""Reason for skipping within `data.max_unreadable`."""
_BUFFER_BYTES = 1 << 20
_PACKED_BYTES = 1 << 16
_TEXT_CHARACTERS = 10 << 20
_MAX_LINES = 1000
"""Lines that one JSON value may go on for; each costs another attempt to read it."""
_MAX_FIRST_LINE_BYTES = 1 << 28
_BATCH_ROWS = 1024
_BYTE_ORDER_MARK = "\ufeff"
_WHITESPACE = " \t\r\n"
_DECODER = json.JSONDecoder()
_PAIRS = json.JSONDecoder(object_pairs_hook=list)
_LONG_NUMBERS = json.JSONDecoder(parse_int=float)  # Python refuses to convert whole numbers of more than 4,300 digits


class LeftOut(Counter[str]):
    """Counts of skipped documents of a source, by reason.

    ``places``: location of the first of each reason, by file and row or line. Of files of other kinds: their endings.
    ``max_unreadable``: how many of `UNREADABLE` are accepted.
    """

    def __init__(self, max_unreadable: int = 0) -> None:
        super().__init__()
        self.max_unreadable = max_unreadable
        self.places: dict[str, list[str]] = {}

    def add(self, reason: str, place: str) -> None:
        """Count one skipped document."""
        self[reason] += 1
        places = self.places.setdefault(reason, [])
        if len(places) < NUM_PLACES:
            places.append(place)

    def add_unreadable(self, place: str, problem: str) -> None:
        """Count one document, line or file that cannot be read; DataError if that is more than are accepted."""
        if self[UNREADABLE] >= self.max_unreadable:
            before = f" ({self[UNREADABLE]} before it were skipped)" if self[UNREADABLE] else ""
            raise DataError(
                f"{place} {problem}{before}; mend or remove it, or let data.max_unreadable say how many may be skipped"
            )
        self.add(UNREADABLE, place)


@dataclass(frozen=True)
class Unreadable:
    """Stands for a value that cannot be read; ``problem`` follows its place in a sentence."""

    problem: str


def kind_of(path: Path) -> str | None:
    """Format of a file by its ending, one of the values of `KINDS`; None: another."""
    name = path.name.lower()
    for ending in COMPRESSIONS:
        name = name.removesuffix(ending)
    return KINDS.get(Path(name).suffix)


def read_file(path: Path, section: SourceSection, skipped: LeftOut) -> Iterator[str]:
    """Yield the non-empty documents of one file of a known kind.

    Raises:
        DataError: the column is missing; more cannot be read than ``skipped`` accepts.
    """
    place, kind = f"file {path}", kind_of(path)
    before, num_documents = skipped.total(), 0
    column: str = section.text_field
    unit: str
    if kind == "text":
        column, unit, values = "text", section.text_unit, _text_values(path, section.text_unit)
    elif kind == "json":
        unit, values = "line", _json_column(path, section.text_field)
    else:
        unit, values = "row", _parquet_column(path, section.text_field)
    try:
        for text in take_texts(
            values, column, lambda number: place if unit == "file" else f"{place}, {unit} {number}", skipped
        ):
            num_documents += 1
            yield text
    except DataError:
        raise
    except Exception as error:
        # Every decompressor and reader has its own exceptions; all of them mean that this file is unreadable.
        skipped.add_unreadable(place, f"cannot be read as {kind}: {type(error).__name__}: {error}")
    if num_documents == 0 and skipped.total() == before:
        skipped.add("empty files", place)


def take_texts(
    values: Iterable[tuple[int, Any]], column: str, place: Callable[[int], str], skipped: LeftOut
) -> Iterator[str]:
    """Yield those of numbered values that are non-empty text, and count the others.

    Args:
        place: where a value is, by its number.
    """
    for number, value in values:
        if value is None:
            skipped.add("documents without text", place(number))
        elif value == "":
            skipped.add("empty documents", place(number))
        elif not isinstance(value, str):
            problem = f"holds {type(value).__name__} in column {column!r}, not text"
            skipped.add_unreadable(place(number), value.problem if isinstance(value, Unreadable) else problem)
        elif value.isascii() or not (surrogate := _surrogate(value)):
            yield value
        else:
            skipped.add_unreadable(place(number), surrogate)


def json_problem(path: Path, field: str) -> tuple[str, bool] | None:
    """Why a .json file is not one of JSON lines whose first object has the field; None: it is.

    A file that cannot be unpacked counts as one, so that reading it reports that.

    Returns:
        What the file is, with the remedy, for messages; and whether it is an array that holds the text.
    """
    try:
        with _open(path) as file:
            lines = iter(lambda: file.readline(_MAX_FIRST_LINE_BYTES), b"")
            decoded = (line.decode("utf-8", "surrogateescape").strip(_BYTE_ORDER_MARK + _WHITESPACE) for line in lines)
            first = next(filter(None, decoded), "")
            if first.startswith("["):
                return _array_problem(path, field, first + file.read(_PACKED_BYTES).decode("utf-8", "surrogateescape"))
    except Exception:
        return None
    try:
        value = _decode(first)[0] if first else {field: ""}
    except (ValueError, RecursionError):
        many = f"is not JSON lines: its first line is no whole object; write one a line: `{_unpacker(path)} | jq -c .`"
        return f"{many} into a file that ends in .jsonl, in its place", False
    if isinstance(value, dict) and field in value:
        return None
    keys = f"its keys are {sorted(value)}" if isinstance(value, dict) else f"it is {type(value).__name__}"
    return f"is JSON whose first line has no {field!r}, {keys}; set text_field to the one that holds the text", False


def _array_problem(path: Path, field: str, start: str) -> tuple[str, bool]:
    """As `json_problem`, of a file that starts with an array."""
    try:
        first, _ = _DECODER.raw_decode(start[1:].lstrip(_WHITESPACE))
    except (ValueError, RecursionError):
        first = None
    whole = "'.[] | {text: .}'" if isinstance(first, str) else "'.[]'"
    problem = f"is one JSON array; write an object a line: `{_unpacker(path)} | jq -c {whole}`"
    return f"{problem} into a file that ends in .jsonl, in its place", isinstance(first, dict) and field in first


def _unpacker(path: Path) -> str:
    return {".gz": "zcat", ".zst": "zstdcat"}.get(path.suffix.lower(), "cat") + f" {path}"


def _surrogate(text: str) -> str:
    """What is wrong with a text that is not UTF-8; empty: it is."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"is not UTF-8: character {error.start} is an invalid byte or half a surrogate pair"
    return ""


def _text_values(path: Path, unit: str) -> Iterator[tuple[int, str]]:
    """Documents of a text file; line ends become a newline, and a byte order mark at its start is no text."""
    with io.TextIOWrapper(_open(path), encoding="utf-8-sig", errors="surrogateescape") as file:
        if unit == "file":
            yield 1, file.read()
        elif unit == "line":
            for number, line in enumerate(file, 1):
                yield number, line.rstrip("\n")
        else:
            number, rest = 1, ""
            while block := file.read(_TEXT_CHARACTERS):
                *paragraphs, rest = (rest + block).split("\n\n")
                for paragraph in filter(None, paragraphs):
                    yield number, paragraph
                    number += 1
            if rest:
                yield number, rest


def _json_column(path: Path, field: str) -> Iterator[tuple[int, Any]]:
    """The field of each object in a file of JSON; DataError if none has it."""
    keys: list[str] | None = None
    known = False
    with _open(path) as file:
        start = file.peek(_PACKED_BYTES).decode("utf-8", "replace").lstrip(_BYTE_ORDER_MARK + _WHITESPACE)
        for number, value in _array_values(file) if start.startswith("[") else _json_values(file, field):
            if value is None:
                yield number, None
            elif not isinstance(value, dict):
                other = Unreadable(f"is {type(value).__name__}, not an object of JSON")
                yield number, value if isinstance(value, Unreadable) else other
            elif field in value:
                known = True
                yield number, value[field]
            else:
                keys = sorted(value) if keys is None else keys
                yield number, None
    if keys is not None and not known:
        raise _no_column(path, field, keys)


def _no_column(path: Path, column: str, names: list[str]) -> DataError:
    return DataError(f"file {path} has no column {column!r}; its columns are {names}; set text_field to one")


def _array_values(file: BinaryIO) -> Iterator[tuple[int, Any]]:
    """Elements of one array, all on its first line; those that are text stand for objects with the key ``text``."""
    for value in json.loads(file.read().decode("utf-8-sig", "surrogateescape")):
        yield 1, {"text": value} if isinstance(value, str) else value


def _json_values(file: BinaryIO, field: str) -> Iterator[tuple[int, Any]]:
    """Values of a file of JSON lines, each with the number of the line on which it begins."""
    key = json.dumps(field, ensure_ascii=False)
    lines = enumerate(file, 1)
    back: list[tuple[int, str]] = []

    def following() -> tuple[int, str] | None:
        if back:
            return back.pop()
        number, line = next(lines, (0, b""))
        text = line.decode("utf-8", "surrogateescape")
        return (number, text.removeprefix(_BYTE_ORDER_MARK) if number == 1 else text) if number else None

    while (line := following()) is not None:
        number, text = line
        try:
            value = _DECODER.decode(text)
        except (ValueError, RecursionError):
            for value in _read_on(text.strip(_WHITESPACE), following, back):
                yield number, value
            continue
        if (
            text.count(key) > 1
            and isinstance(value, dict)
            and [name for name, _ in _PAIRS.decode(text)].count(field) > 1
        ):
            value = Unreadable(f"has {key} twice")  # of which Python takes the last
        yield number, value


def _read_on(text: str, following: Callable[[], tuple[int, str] | None], back: list[tuple[int, str]]) -> list[Any]:
    """Values of a line that is not one value: none, several, or one that goes on in the next lines.

    ``following`` gives the next line; what turns out to be no part of the value is put into ``back``, last first.
    """
    problem = ""
    taken: list[tuple[int, str]] = []
    while True:
        try:
            return _decode(text)
        except json.JSONDecodeError as error:
            problem = problem or f"{error.msg} at character {error.pos + 1}"
            is_open = error.pos >= len(text) and not error.msg.startswith("Unterminated")
        except RecursionError:
            problem, is_open = "it is nested too deeply", False
        more = following() if is_open and len(taken) < _MAX_LINES else None
        if more is None:
            back.extend(reversed(taken))
            return [Unreadable(f"cannot be read as JSON: {problem}")]
        taken.append(more)
        text = f"{text}\n{more[1].rstrip(_WHITESPACE)}"


def _decode(text: str) -> list[Any]:
    """All values of a text of JSON that begins with one; JSONDecodeError where it holds other things."""
    values, at = [], 0
    while at < len(text):
        try:
            value, at = _DECODER.raw_decode(text, at)
        except json.JSONDecodeError:
            raise
        except ValueError:
            value, at = _LONG_NUMBERS.raw_decode(text, at)
        values.append(value)
        while at < len(text) and text[at] in _WHITESPACE:
            at += 1
    return values


def _parquet_column(path: Path, column: str) -> Iterator[tuple[int, Any]]:
    """The column of each row of a Parquet file; DataError if it has none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with tempfile.TemporaryFile() as unpacked:
        if path.suffix.lower() in COMPRESSIONS:  # the table of contents is at the end
            with _open(path) as file:
                shutil.copyfileobj(file, unpacked)
        with pq.ParquetFile(unpacked if path.suffix.lower() in COMPRESSIONS else path) as content:
            names = content.schema_arrow.names
            if column not in names and content.metadata.num_rows:
                raise _no_column(path, column, sorted(names))
            if names.count(column) > 1:
                raise DataError(f"file {path} has {names.count(column)} columns {column!r}; rename all but one")
            number = 0
            for batch in content.iter_batches(_BATCH_ROWS, columns=[column]):
                rows = batch.column(batch.schema.get_field_index(column))
                try:
                    values = rows.to_pylist()
                except UnicodeDecodeError:
                    content_bytes = rows.cast(pa.large_string()).cast(pa.large_binary()).to_pylist()
                    values = [row and row.decode("utf-8", "surrogateescape") for row in content_bytes]
                yield from enumerate(values, number)
                number += len(values)


def _open(path: Path) -> io.BufferedReader:
    """Open a file to read its bytes, unpacked by its ending."""
    ending = path.suffix.lower()
    if ending in COMPRESSIONS:
        return io.BufferedReader(_Unpacked(_unpack_gz(path) if ending == ".gz" else _unpack_zst(path)), _BUFFER_BYTES)
    return io.BufferedReader(open(path, "rb", buffering=0), _BUFFER_BYTES)


class _Unpacked(io.RawIOBase):
    """A file of blocks; all before an error are read."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        super().__init__()
        self._blocks = blocks
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer; 0 at the end."""
        while not self._ready:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._ready = memoryview(block)
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size


def _unpack_gz(path: Path) -> Iterator[bytes]:
    with gzip.open(path, "rb") as file:
        while block := file.read1(_BUFFER_BYTES):
            yield block


def _unpack_zst(path: Path) -> Iterator[bytes]:
    """All frames; EOFError if the file ends inside one, which `zstandard` accepts."""
    import zstandard

    with open(path, "rb") as source:
        block = source.read(_PACKED_BYTES)
        while block:
            frame = zstandard.ZstdDecompressor().decompressobj()
            while not frame.eof:
                if not block:
                    raise EOFError("it is cut off, inside a compressed frame; fetch it again")
                yield frame.decompress(block)
                block = source.read(_PACKED_BYTES) if not frame.eof else frame.unused_data
            block = block or source.read(_PACKED_BYTES)
