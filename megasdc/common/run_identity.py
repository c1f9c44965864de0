"""Identity of a run in its folder: an id that stays the same over restarts, and the number of starts so far."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from megasdc.common.durable import parse_json, write_durably
from megasdc.common.errors import StorageError
from megasdc.common.room import wait_for_room

IDENTITY_FILE = "run.json"
FORMAT = "megasdc.run.v1"


@dataclass(frozen=True)
class RunIdentity:
    """Content of ``run.json``.

    Args:
        run: id of the run, made at its first start.
        attempt: number of the last start, the first is 1.
    """

    run: str
    attempt: int


def read_identity(folder: Path | str) -> RunIdentity | None:
    """Identity of the run in a folder; None: it was never started, or by a version that kept none.

    Raises:
        StorageError: the file is damaged or cannot be read.
    """
    path = Path(folder) / IDENTITY_FILE
    try:
        raw = parse_json(path.read_text(encoding="utf-8"))
        if raw["format"] != FORMAT or not isinstance(raw["run"], str) or not isinstance(raw["attempt"], int):
            raise ValueError(f"it is not of format {FORMAT}")
        return RunIdentity(raw["run"], raw["attempt"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"{path} cannot be used: {error}; delete it, then the next start gives the run a new id"
        ) from error


def count_start(folder: Path | str) -> RunIdentity:
    """Count this start of the run in a folder; the first one gives the run its id. Call on one rank.

    Raises:
        StorageError: the file is damaged, or cannot be written.
    """
    found = read_identity(folder)
    new = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    identity = RunIdentity(new, 1) if found is None else RunIdentity(found.run, found.attempt + 1)
    path = Path(folder) / IDENTITY_FILE
    try:
        text = json.dumps({"format": FORMAT, **asdict(identity)}) + "\n"
        wait_for_room(lambda: write_durably(path, text), path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error.strerror})") from error
    return identity
