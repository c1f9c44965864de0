"""Start and done records of the ranks of a launch: one small file per rank, written and read without torch.

The launcher's exit code alone proves nothing: pdsh that is killed by a signal returns 0, and DeepSpeed starts a local
run when the hostfile is missing. A launch therefore counts as done only when every rank has written its record,
``<run_dir>/done/<launch_id>/rank_NNNNN.json``. Ranks get the launch id in the environment variable
``MEGASDC_LAUNCH_ID``; without it (a plain ``deepspeed`` command) nothing would read the records, and none are written.
Times are those of the host that wrote a record: by its date, and on its monotonic clock, from one boot to the next.
Earlier versions wrote the date alone.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import NoneType
from typing import TypeVar

from megasdc.common import origin
from megasdc.common.credentials import without_credentials
from megasdc.common.durable import END_S, parse_json, wait_for_room, write_whole
from megasdc.common.host import MemoryKill, memory_use
from megasdc.common.origin import Moment
from megasdc.ops.launch.orphans import launcher_has_gone

logger = logging.getLogger(__name__)

LAUNCH_ID_VARIABLE = origin.LAUNCH_ID_VARIABLE


@dataclass(frozen=True)
class StartedRecord:
    """A rank has started the training script; fields are named as in the file.

    ``buffer``: name of what DeepSpeed may leave of it in shared memory, None: nothing; ``memory_bytes``: that were left
    there for programs, None: not known.
    """

    rank: int
    host: str
    pid: int
    time: float
    boot_id: str | None = None
    monotonic: float | None = None
    buffer: str | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class DoneRecord:
    """A rank has ended by itself; fields are named as in the file.

    ``exit_code`` is that of the process; ``error_class``, ``message`` and its ``first_line`` are None without an error;
    ``launcher_gone``: whether the launcher of its host had ended before it; ``end``: how a training ended without an
    error, None: what it ran did not come so far, whatever its exit code.
    """

    rank: int
    host: str
    exit_code: int
    error_class: str | None
    message: str | None
    time: float
    first_line: str | None
    launcher_gone: bool = False
    boot_id: str | None = None
    monotonic: float | None = None
    end: str | None = None

    @property
    def has_ended_well(self) -> bool:
        """Whether it ended with 0, and says how what it ran came to its end."""
        return self.exit_code == 0 and self.end is not None

    @property
    def ended_at(self) -> Moment:
        """When it was written."""
        return Moment(self.host, self.time, self.boot_id, self.monotonic)


@dataclass(frozen=True)
class HostRecord:
    """DeepSpeed's launcher on a host has failed; fields are named as in the file.

    ``exit_code`` is that of its shell: 128 + n if signal n ended it.
    """

    host: str
    exit_code: int
    time: float
    boot_id: str | None = None
    monotonic: float | None = None


@dataclass(frozen=True)
class EndedRecord:
    """A rank's process has ended with an exit code other than 0, as its launcher saw; fields are named as in the file.

    It has ended by itself: the launcher ends the others of its host after that. ``exit_code``: -n if signal n ended it;
    ``memory``: fields of ``MemoryKill`` if the kernel has ended it for want of memory.
    """

    rank: int
    host: str
    exit_code: int
    time: float
    boot_id: str | None = None
    monotonic: float | None = None
    memory: dict[str, int | None] | None = None

    @property
    def ended_at(self) -> Moment:
        """When it was seen."""
        return Moment(self.host, self.time, self.boot_id, self.monotonic)


@dataclass(frozen=True)
class LaunchRecords:
    """All records of one launch, by rank or host, and files that are not valid records."""

    started: dict[int, StartedRecord] = field(default_factory=dict)
    done: dict[int, DoneRecord] = field(default_factory=dict)
    failed_hosts: dict[str, HostRecord] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)
    ended: dict[int, EndedRecord] = field(default_factory=dict)


def records_dir(run_dir: Path | str, launch_id: str) -> Path:
    """Return the folder that holds the records of one launch."""
    return Path(run_dir) / "done" / launch_id


def write_started(run_dir: Path | str, rank: int, buffer: str | None = None) -> Path | None:
    """Record that a rank has started.

    Args:
        run_dir: created if absent.
        rank: global rank.
        buffer: see ``StartedRecord``.

    Returns:
        The file written; None without a launch id in the environment, or when it could not be written.
    """
    now = Moment.now()
    left: int | None = None
    with suppress(OSError, ValueError, KeyError):
        use = memory_use()
        left = use.total - use.used
    record = StartedRecord(rank, now.host, os.getpid(), now.time, now.boot_id, now.monotonic, buffer, left)
    return _write_of_rank(run_dir, f"started_{rank:05d}.json", asdict(record))


def left_buffers(run_dir: Path | str, rank: int) -> list[str]:
    """Names of buffers that a rank of this number may have left in this host's memory in earlier launches of a run."""
    host, found = Moment.now().host, []
    for path in records_dir(run_dir, "*").parent.glob(f"*/started_{rank:05d}.json"):
        try:
            record = StartedRecord(**parse_json(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue
        if record.host == host and isinstance(record.buffer, str):
            found.append(record.buffer)
    return found


def write_done(
    run_dir: Path | str, rank: int, exit_code: int, error: BaseException | None = None, *, end: str | None = None
) -> Path | None:
    """Record how a rank ended; the last thing a rank does before it exits.

    Args:
        run_dir: created if absent.
        rank: global rank.
        exit_code: exit code that the process will return.
        error: the exception that ended it, if any.
        end: how what it ran came to its end without an error: at its last step, or where it stopped before, and why.

    Returns:
        The file written; None without a launch id in the environment, or when it could not be written.
    """
    message, now = None if error is None else _text_of(error), Moment.now()
    record = DoneRecord(
        rank=rank,
        host=now.host,
        exit_code=exit_code,
        error_class=None if error is None else type(error).__name__,
        message=message,
        time=now.time,
        first_line=None if message is None else next(iter(message.splitlines()), ""),
        launcher_gone=launcher_has_gone(),
        boot_id=now.boot_id,
        monotonic=now.monotonic,
        end=end,
    )
    return _write_of_rank(run_dir, f"rank_{rank:05d}.json", asdict(record))


def _text_of(error: BaseException) -> str:
    """Its message; an exception of the user's may have none, or fail to tell it."""
    try:
        return without_credentials(str(error) or repr(error))
    except Exception as failed:
        return f"{type(error).__name__}, whose message cannot be read: {type(failed).__name__}"


def write_host_failed(folder: Path, exit_code: int) -> Path | None:
    """Record that this host's launcher has failed with an exit code, never 0, in ``records_dir``, created if absent.

    Returns the file written; None when it could not be written.
    """
    now = Moment.now()
    record = HostRecord(now.host, exit_code, now.time, now.boot_id, now.monotonic)
    return _write(folder, f"host_{record.host}.json", asdict(record))


def write_ended(folder: Path, rank: int, exit_code: int, memory: MemoryKill | None = None) -> Path | None:
    """Record that a rank of this host has ended by itself with a code other than 0, in ``records_dir``.

    ``memory``: it was ended for want of memory.

    Returns the file written; None when it could not be written.
    """
    now = Moment.now()
    numbers = None if memory is None else asdict(memory)
    record = EndedRecord(rank, now.host, exit_code, now.time, now.boot_id, now.monotonic, numbers)
    return _write(folder, f"ended_{rank:05d}.json", asdict(record))


def read_done(folder: Path, rank: int) -> DoneRecord | None:
    """How a rank of this host has ended, as it says in ``records_dir``; None: it has left no record."""
    name = f"rank_{rank:05d}.json"
    try:
        text = (folder / name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return parse_records({name: text}).done.get(rank)


def collect(run_dir: Path | str, launch_id: str) -> LaunchRecords:
    """Read the records of one launch that this host can see; empty if the folder does not exist."""
    folder = records_dir(run_dir, launch_id)
    if not folder.is_dir():
        return LaunchRecords()
    texts, unreadable = {}, []
    for path in folder.glob("*_*.json"):
        try:
            texts[path.name] = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            unreadable.append(f"{path.name} cannot be read: {error}")
    records = parse_records(texts)
    records.unreadable.extend(unreadable)
    return records


def parse_records(texts: Mapping[str, str]) -> LaunchRecords:
    """Parse records of any host from contents by file name; files that are no valid records are in ``unreadable``."""
    records = LaunchRecords()
    for name, text in sorted(texts.items()):
        try:
            if name.startswith("started_"):
                started = _checked(StartedRecord(**parse_json(text)))
                records.started[started.rank] = started
            elif name.startswith("rank_"):
                done = _checked(DoneRecord(**parse_json(text)))
                records.done[done.rank] = done
            elif name.startswith("ended_"):
                ended = _checked(EndedRecord(**parse_json(text)))
                records.ended[ended.rank] = ended
            elif name.startswith("host_"):
                failed = _checked(HostRecord(**parse_json(text)))
                records.failed_hosts[failed.host] = failed
        except (ValueError, TypeError) as error:
            records.unreadable.append(f"{name} is not a record: {error}")
    return records


Record = TypeVar("Record", StartedRecord, DoneRecord, EndedRecord, HostRecord)
_NUMBER: tuple[type, ...] = (int, float)
_TEXT: tuple[type, ...] = (str, NoneType)
_LARGEST = 2.0**63
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("error_class", "message", "first_line", "end", "buffer"), _TEXT),
    "rank": (int,),
    "host": (str,),
    "exit_code": (int,),
    "time": _NUMBER,
    "boot_id": (str, NoneType),
    "monotonic": (*_NUMBER, NoneType),
    "memory_bytes": (int, NoneType),
    "memory": (dict, NoneType),
}
"""Of fields that are calculated with, or searched."""


def _checked(record: Record) -> Record:
    """The record; ValueError: a field is of another type than its class says, or is a number that nothing has."""
    own = {name: getattr(record, name) for name in _TYPES if hasattr(record, name)}
    wrong = [name for name, value in own.items() if isinstance(value, bool) or not isinstance(value, _TYPES[name])]
    wrong += [name for name, value in own.items() if isinstance(value, int | float) and not abs(value) < _LARGEST]
    wrong += ["rank"] if "rank" in own and not wrong and own["rank"] < 0 else []
    memory = own.get("memory")
    if not wrong and memory is not None:
        numbers = asdict(MemoryKill(**memory)).values()
        wrong = [] if all(one is None or (type(one) is int and abs(one) < _LARGEST) for one in numbers) else ["memory"]
    if wrong:
        raise ValueError(f"{wrong[0]} is {own[wrong[0]]!r}")
    return record


def _write_of_rank(run_dir: Path | str, name: str, record: dict[str, object]) -> Path | None:
    launch_id = os.environ.get(LAUNCH_ID_VARIABLE)
    return _write(records_dir(run_dir, launch_id), name, record) if launch_id else None


def _write(folder: Path, name: str, record: dict[str, object]) -> Path | None:
    """Write one record under a temporary name and rename it, so that a reader never sees a partial file.

    A record that cannot be written must not hide how the rank ended, so it is only logged as a warning; the front then
    reports a rank without a record.
    """
    path = folder / name
    try:
        wait_for_room(lambda: write_whole(path, json.dumps(record) + "\n"), path, logger.warning, at_most_s=END_S)
    except OSError as error:
        logger.warning("record %s could not be written: %s", path, error)
        return None
    return path
