"""Small records on disk as JSON with a checksum of their own content, so that a changed byte is noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, TypeVar

import xxhash
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from megasdc.common.durable import write_durably
from megasdc.common.errors import CheckpointError

R = TypeVar("R", bound=BaseModel)
_TOLD = 3


def _is_inside(name: str) -> str:
    if not name.isprintable() or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError("it is no path in the folder")
    return name


Count = Annotated[int, Field(ge=0)]
Time = Annotated[float, Field(ge=0, lt=253_402_300_800)]
"""Seconds since the epoch, up to the year 9999."""
Xxh3 = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Inside = Annotated[str, Field(min_length=1), AfterValidator(_is_inside)]
"""Path of a file relative to its folder, without ``..``."""


class Record(BaseModel):
    """Base of records: frozen, strict types, no unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


def record_text(record: BaseModel, indent: int | None = 1) -> str:
    """A record as JSON, with a checksum of its own content; ``indent``: spaces per level, None: all in one line."""
    content = record.model_dump(mode="json")
    separators = None if indent is not None else (",", ":")
    whole = {**content, "checksum": _digest(content)}
    return json.dumps(whole, indent=indent, sort_keys=True, separators=separators) + "\n"


def write_record(path: Path, record: BaseModel) -> None:
    """Write a record as JSON, with a checksum of its own content."""
    write_durably(path, record_text(record))


def read_record(path: Path, kind: type[R], version: int) -> R:
    """Read and check a record that ``write_record`` has written.

    Args:
        kind: class of the record, with a field ``format_version``.
        version: value that the field must have.

    Raises:
        CheckpointError: it is missing, unreadable, changed since it was written, or of another version.
    """
    try:
        return read_text(path, path.read_text(encoding="utf-8"), kind, version)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: the save did not finish, or the file was removed") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error


def read_text(path: Path | str, text: str, kind: type[R], version: int) -> R:
    """Parse and check a text of ``record_text``; arguments as in ``read_record``, ``path`` is for messages.

    CheckpointError if it is incomplete, changed since it was written, or of another version.
    """
    try:
        if not text.endswith("}\n"):
            raise ValueError("its end is missing")
        content = json.loads(text)
        claimed = content.pop("checksum")
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error
    if (found := _digest(content)) != claimed:
        raise CheckpointError(f"{path} was changed: its content has checksum {found}, recorded is {claimed}")
    if content.get("format_version") != version:
        raise CheckpointError(
            f"{path} has format version {content.get('format_version')}, this megasdc reads {version}"
        )
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise CheckpointError(f"{path} has content that no checkpoint has: {_explain(error)}") from error


def _explain(error: ValidationError) -> str:
    """The first problems, each with its location and value."""
    told = [
        f"{'.'.join(map(str, one['loc'])) or 'all of it'}: {one['msg']}"
        + (f", got {one['input']!r:.60}" if one["loc"] else "")
        for one in error.errors(include_url=False)
    ]
    more = f"; and {len(told) - _TOLD} more" if len(told) > _TOLD else ""
    return "; ".join(told[:_TOLD]) + more


def _digest(content: dict[str, Any]) -> str:
    """XXH3-128 of canonical JSON."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
