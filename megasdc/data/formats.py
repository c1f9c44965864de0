"""Formats of files with text: plain text, JSON lines and Parquet, packed (.gz, .zst) or not.

Of JSON lines and Parquet the one field that holds the text is read, whatever else a row holds. A value of JSON may go
on over several lines, and a line may hold several values. Rows of Parquet count from 0, lines of files from 1. What is
not UTF-8 is decoded with surrogates, which no valid text holds, so that one check finds it in every format.
"""

from __future__ import annotations

import functools
import gzip
import io
import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megasdc.common.errors import DataError
from megasdc.config.data import SourceSection

KINDS = {".txt": "text", ".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet"}
"""Format of each file ending; a .json file only if it holds JSON lines, see `json_problem`."""
COMPRESSIONS = (".gz", ".zst")
"""Endings that may follow those of `KINDS`."""
NUM_PLACES = 5
"""Number of skipped documents that are listed, for each reason."""
UNREADABLE = "what cannot be read"
"""Reason for skipping within `data.max_unreadable`."""
_BUFFER_BYTES = 1 << 20
_ARRAY_BYTES = 1 << 16
_ZST_BYTES = 1 << 12
"""Bytes of a .zst file that are unpacked at once: to 128 MiB at most, as 4 bytes may stand for 128 KiB."""
_MAX_WINDOW_BYTES = 1 << 31
"""Largest window of a .zst frame, that of `zstd --long=31`, and of the library; so much memory a file may need."""
_MAX_VALUE_CHARACTERS = 1 << 28
"""A value of JSON that is longer must be on one line."""
_MAX_RETRIED_CHARACTERS = 1 << 17
"""As `_MAX_VALUE_CHARACTERS`, of a value that begins within another one that cannot be read."""
_NUM_FIRST_LINES = 1000
"""Number of lines after the first of a .json file in which an object with the text is searched."""
_MAX_FIRST_LINE_BYTES = 1 << 28
_MAX_FIRST_BYTES = 1 << 24
"""Maximum number of bytes of those lines."""
_BATCH_ROWS = 1024
_BYTE_ORDER_MARK = "\ufeff"
_WHITESPACE = " \t\r\n"
_DECODER = json.JSONDecoder()
_PAIRS = json.JSONDecoder(object_pairs_hook=list, parse_int=float)
_LONG_NUMBERS = json.JSONDecoder(parse_int=float)  # Python refuses to convert whole numbers of more than 4,300 digits
_AFTER = {"": "[", "[": "]", "value": ",]", ",": "", "]": ""}
"""Characters that may follow each token of an array of JSON, besides values."""


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


def format_kind(path: Path) -> str | None:
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
    place, kind = f"file {path}", format_kind(path)
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
        for text in collect_texts(
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


def collect_texts(
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
    """Reason why a .json file is not one of JSON lines with an object with the field among the first; None: it is.

    A file that cannot be unpacked counts as one, so that reading it reports that, and so does one of blanks.

    Returns:
        What the file is, with the remedy, for messages; and whether it is an array that holds the text.
    """
    try:
        with _open(path) as file:
            lines = _Lines(_first_lines(file))
            first = lines.peek()
            if first.startswith("["):
                return _array_problem(path, field, first + file.read(_ARRAY_BYTES).decode("utf-8", "surrogateescape"))
            if not first or _has_lines(lines, field):
                return None
    except Exception:
        return None
    try:
        value = _line_values(first, field)[0][0]
    except (ValueError, RecursionError):
        many = f"is not JSON lines: its first line is no whole object; write one a line: `{_unpacker(path)} | jq -c .`"
        return f"{many} into a file that ends in .jsonl, in its place", False
    keys = f"its keys are {sorted(value)}" if isinstance(value, dict) else f"it is {type(value).__name__}"
    problem = f"is JSON whose first line has no {field!r}, {keys}, nor has one of {_NUM_FIRST_LINES:,} after it"
    return f"{problem}; set text_field to the one that holds the text", False


def _first_lines(file: BinaryIO) -> Iterator[bytes]:
    """The first lines of a .json file, which decide what it is: so many that are not blank, or of so many bytes."""
    number = size = 0
    while number <= _NUM_FIRST_LINES and size < _MAX_FIRST_BYTES and (line := file.readline(_MAX_FIRST_LINE_BYTES)):
        yield line
        size += len(line) if number else 0
        number += not line.isspace()


def _has_lines(lines: _Lines, field: str) -> bool:
    """Whether one of the lines is an object with the field, and no part of a value over several lines."""
    while (line := lines.next_line()) is not None:
        try:
            values = _line_values(line[1].strip(_WHITESPACE), field)[0]
        except (ValueError, RecursionError):
            if _read_on(line, lines, field, _line_values)[1] is None and lines.is_open:
                return False
            continue
        # What cannot be read here has the field twice.
        if any(isinstance(value, Unreadable) or (isinstance(value, dict) and field in value) for value in values):
            return True
    return False


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
    """Problem of a text that is not UTF-8; empty: it is."""
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
            yield from enumerate(_paragraphs(file), 1)


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """Paragraphs of a text: lines between blank ones, which are empty or have nothing but spaces and tabs."""
    held: list[str] = []
    for line in lines:
        if line.strip(" \t\n"):
            held.append(line)
        elif held:
            yield "".join(held).removesuffix("\n")
            held = []
    if held:
        yield "".join(held).removesuffix("\n")


def _json_column(path: Path, field: str) -> Iterator[tuple[int, Any]]:
    """The field of each object in a file of JSON; DataError if none has it."""
    keys: list[str] | None = None
    known = False
    with _open(path) as file:
        lines = _Lines(file)
        read = _array_values if lines.peek().startswith("[") else _json_values
        for number, value in read(lines, field):
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


class _Lines:
    """The lines of a file with their numbers, from 1; lines that were taken and not needed can be put back.

    ``is_open``: whether the last value that could not be read is right as far as the lines go.
    """

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._lines = enumerate(lines, 1)
        self._back: list[tuple[int, str]] = []  # last first
        self._failed_before = 0
        self.is_open = False

    def next_line(self) -> tuple[int, str] | None:
        """The next line; None at the end. A byte order mark at the start of the file is no part of it."""
        if self._back:
            return self._back.pop()
        number, line = next(self._lines, (0, b""))
        text = line.decode("utf-8", "surrogateescape")
        return (number, text.removeprefix(_BYTE_ORDER_MARK) if number == 1 else text) if number else None

    def push_back(self, lines: Sequence[tuple[int, str]]) -> None:
        """Give back lines that were taken last."""
        self._back.extend(reversed(lines))

    def peek(self) -> str:
        """The next line that is not blank, without the blanks around it; empty: there is none."""
        while (line := self.next_line()) is not None:
            if text := line[1].strip(_WHITESPACE):
                self.push_back([line])
                return text
        return ""

    def extend(self, number: int, text: str, taken: list[tuple[int, str]]) -> str | None:
        """A text that begins in a line with the lines after it, about twice as long, so that trying again is cheap.

        ``taken``: those that are part of it already, to which the further ones are added. None: the file ends, or the
        text is longer than `limit`.
        """
        size, parts = 0, [text]
        room = self.limit(number) - len(text)
        while size <= min(len(text), room) and (line := self.next_line()) is not None:
            taken.append(line)
            parts.append(line[1].rstrip(_WHITESPACE))
            size += len(parts[-1]) + 1
        return "\n".join(parts) if len(parts) > 1 else None

    def limit(self, number: int) -> int:
        """Characters over which a value that begins in a line may go on."""
        return _MAX_RETRIED_CHARACTERS if number < self._failed_before else _MAX_VALUE_CHARACTERS

    def failed(self, number: int, is_open: bool) -> None:
        """A value could be read to this line alone, so that what begins before it is not read as far again."""
        self._failed_before = max(self._failed_before, number)
        self.is_open = is_open


def _json_values(lines: _Lines, field: str) -> Iterator[tuple[int, Any]]:
    """Values of a file of JSON lines, each with the number of the line on which it begins."""
    while (line := lines.next_line()) is not None:
        number, text = line
        try:
            values = [_once(_DECODER.decode(text), text, field)]
        except (ValueError, RecursionError):
            values, _ = _read_on(line, lines, field, _line_values)
        for value in values:
            yield number, value


def _array_values(lines: _Lines, field: str) -> Iterator[tuple[int, Any]]:
    """Elements of the one array of a file; those that are text stand for objects with the key ``text``."""
    number = 1
    before: str | None = ""
    while before is not None and (line := lines.next_line()) is not None:
        number = line[0]
        values, before = _read_on(line, lines, field, functools.partial(_elements, before))
        if before is None:
            values = [Unreadable(f"{value.problem}; what follows in its array is not read") for value in values]
        for value in values:
            yield number, {"text": value} if isinstance(value, str) else value
    if before not in (None, "]"):
        yield number, Unreadable("is the last, and its array does not end")


def _read_on(
    line: tuple[int, str],
    lines: _Lines,
    field: str,
    decode: Callable[[str, str], tuple[list[Any], int, str]],
) -> tuple[list[Any], str | None]:
    """Values of a line, of which the last may go on in the next lines; and what came last, None: it cannot be read.

    ``decode``: gives of a text that begins with the line the values to the end of a line, that end, and what came last.
    """
    number, text = line[0], line[1].strip(_WHITESPACE)
    problem = ""
    taken: list[tuple[int, str]] = []
    while True:
        try:
            values, end, last = decode(text, field)
        except json.JSONDecodeError as error:
            at = number + text.count("\n", 0, error.pos)
            more = f"; as a value over several lines it fails in line {at}: {error.msg}" if taken else ""
            problem = problem or f"{error.msg} at character {error.pos + 1}"
            is_open = error.pos >= len(text) and not error.msg.startswith("Unterminated")
        except RecursionError:
            at, more, problem, is_open = number + len(taken), "", "it is nested too deeply", False
        else:
            lines.push_back(taken[text.count("\n", 0, end) :])
            return values, last
        if is_open and len(text) > lines.limit(number):
            more = f"; as a value over several lines it does not end within {lines.limit(number):,} characters"
        longer = lines.extend(number, text, taken) if is_open else None
        if longer is None:
            lines.failed(at + is_open, is_open)
            lines.push_back(taken)
            return [Unreadable(f"cannot be read as JSON: {problem}{more}")], None
        text = longer


def _line_values(text: str, field: str) -> tuple[list[Any], int, str]:
    """Values of a text of JSON to the end of the line on which one ends; JSONDecodeError for anything else there."""
    values, at = [], 0
    while at < len(text) and text[at] != "\n":
        value, at = _value_at(text, at, field)
        values.append(value)
        at = _after_blanks(text, at)
    return values, at, ""


def _elements(before: str, text: str, field: str) -> tuple[list[Any], int, str]:
    """As `_line_values`, of a part of an array, with what came last: ``[``, ``value``, ``,`` or ``]``.

    ``before``: what came last before the text; empty: nothing.
    """
    values, at = [], 0
    while at < len(text) and text[at] != "\n":
        if before == "," or (before == "[" and text[at] != "]"):
            value, at = _value_at(text, at, field)
            values.append(value)
            before = "value"
        elif text[at] in _AFTER[before]:
            before = text[at]
            at += 1
        else:
            raise json.JSONDecodeError("Expecting ',' delimiter" if before == "value" else "Extra data", text, at)
        at = _after_blanks(text, at)
    return values, at, before


def _after_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r":
        at += 1
    return at


def _value_at(text: str, start: int, field: str) -> tuple[Any, int]:
    """The value of JSON that begins at a place of a text, and its end; JSONDecodeError where none does."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError:
        raise
    except ValueError:
        value, end = _LONG_NUMBERS.raw_decode(text, start)
    return _once(value, text[start:end], field), end


def _once(value: Any, text: str, field: str) -> Any:
    """A value of JSON; `Unreadable` if it has the field twice, of which Python takes the last."""
    if not isinstance(value, dict):
        return value
    plain, sign, spellings = _spellings(field)
    if text.count(plain) < 2 and not (sign in text and len(spellings.findall(text)) > 1):
        return value
    pairs = _PAIRS.decode(text)
    return Unreadable(f"has {plain} twice") if sum(name == field for name, _ in pairs) > 1 else value


@functools.cache
def _spellings(field: str) -> tuple[str, str, re.Pattern[str]]:
    r"""A key as JSON writes it, what is in the text of any other spelling of it, and all spellings, as ``\u0078``."""
    letters = []
    for letter in field:
        units = letter.encode("utf-16-be", "surrogatepass").hex()
        code = "".join(rf"\\u(?i:{units[at : at + 4]})" for at in range(0, len(units), 4))
        plain = re.escape(json.dumps(letter, ensure_ascii=False)[1:-1])
        letters.append(f"(?:{plain}|{code}|\\\\/)" if letter == "/" else f"(?:{plain}|{code})")
    sign = "\\u00" if re.fullmatch(r"[\w. -]*", field, re.ASCII) else "\\"
    return json.dumps(field, ensure_ascii=False), sign, re.compile(f'"{"".join(letters)}"')


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
        """Always true: the file can be read."""
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
    """All frames; EOFError if the file ends inside one, which `zstandard` accepts.

    DataError for a frame whose window is not to be held in memory: the file is whole, so that none is left out for it.
    """
    import zstandard

    with open(path, "rb", buffering=_BUFFER_BYTES) as source:
        block = source.read(_ZST_BYTES)
        while block:
            frame = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj()
            while not frame.eof:
                if not block:
                    raise EOFError("it is cut off, inside a compressed frame; fetch it again")
                try:
                    unpacked = frame.decompress(block)
                except zstandard.ZstdError as error:
                    if "memory" not in str(error):
                        raise
                    raise DataError(
                        f"file {path} was packed with a window that does not fit into memory ({error}); at most "
                        f"{_MAX_WINDOW_BYTES >> 30} GiB can; unpack it where it does, or pack it again with `--long=27`"
                    ) from error
                yield unpacked
                block = source.read(_ZST_BYTES) if not frame.eof else frame.unused_data
            block = block or source.read(_ZST_BYTES)
