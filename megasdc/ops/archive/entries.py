"""What an archive holds: the parts of each step of each run, and what is wrong with their records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import xxhash

from megasdc.common.errors import CheckpointError
from megasdc.ops.archive.record import (
    LARGEST_RECORD,
    RECEIPTS,
    RUNS,
    Part,
    Receipt,
    parse_part_file,
    parse_record,
    part_file,
    receipt_file,
)
from megasdc.ops.archive.store import Store

Key = tuple[str, int, str]
"""Run, step and part."""


@dataclass(frozen=True)
class ArchivedStep:
    """One step of a run; ``parts`` by name; ``problems``: one sentence each, empty: it can be pulled."""

    run: str
    step: int
    parts: dict[str, Part]
    problems: list[str] = field(default_factory=list)

    @property
    def quantized(self) -> str:
        """Of the first part with quantized moments; empty: every bit is as it was saved."""
        return next((str(part.quantized) for part in self.parts.values() if part.quantized is not None), "")

    @property
    def size_bytes(self) -> int:
        """Bytes of all files of all parts."""
        return sum(part.size_bytes for part in self.parts.values())

    def as_dict(self) -> dict[str, Any]:
        """The entry as JSON-compatible values."""
        return {
            "run": self.run,
            "step": self.step,
            "parts": sorted(self.parts),
            "size_bytes": self.size_bytes,
            "time": max((part.time for part in self.parts.values()), default=None),
            "layout": next((part.layout for part in self.parts.values()), None),
            "quantized": self.quantized or None,
            "problems": self.problems,
        }


@dataclass(frozen=True)
class Names:
    """Names of what an archive holds: parts by run and step; ``strange``: files that do not belong to an archive."""

    parts: dict[tuple[str, int], set[str]]
    strange: list[str]


def list_names(store: Store, run: str | None = None) -> Names:
    """Names of all steps, in order, of an archive or of one run; also of those of which only a receipt is left."""
    below = f"/{run}" if run is not None else ""
    parts: dict[tuple[str, int], set[str]] = {}
    strange = []
    for name in (*store.sizes(RUNS + below), *store.sizes(RECEIPTS + below)):
        if (key := parse_part_file(name)) is None:
            strange.append(name)
        else:
            parts.setdefault(key[:2], set()).add(key[2])
    return Names(dict(sorted(parts.items())), strange)


def read_entry(store: Store, run: str, step: int, names: set[str]) -> ArchivedStep:
    """Read the parts of one step, by their names; damaged ones become problems."""
    entry = ArchivedStep(run, step, {})
    for name in sorted(names):
        try:
            entry.parts[name] = read_part(store, (run, step, name))
        except CheckpointError as error:
            entry.problems.append(str(error))
    entry.problems.extend(_incomplete(entry.parts))
    return entry


def read_entries(store: Store, run: str | None = None) -> list[ArchivedStep]:
    """All steps of an archive, or of one run, in order; damaged ones too, with what is wrong."""
    return [read_entry(store, *key, names) for key, names in list_names(store, run).parts.items()]


def read_part(store: Store, key: Key) -> Part:
    """Read a part and check it against its receipt and its place.

    Raises:
        CheckpointError: its record or its receipt is missing or damaged, or of another step.
    """
    name, receipt_name = part_file(*key), receipt_file(*key)
    stored = store.read(name, LARGEST_RECORD)
    stored_receipt = store.read(receipt_name, LARGEST_RECORD)
    if stored is not None and stored_receipt is None:
        raise CheckpointError(f"{store.address}/{receipt_name} is missing: the push did not finish, or it was lost")
    receipt = parse_record(store, receipt_name, stored_receipt, Receipt)
    part = parse_record(store, name, stored, Part)
    for found in ((part.run, part.step, part.name), (receipt.run, receipt.step, receipt.part)):
        if found != key:
            raise CheckpointError(f"{store.address}/{name} or its receipt is of step {found[1]} of {found[0]}")
    if stored is None or xxhash.xxh3_128_hexdigest(stored) != receipt.record:
        raise CheckpointError(f"{store.address}/{name} is another than {receipt_name} says: pushed at the same time?")
    return part


def _incomplete(parts: dict[str, Part]) -> list[str]:
    """Problems: parts that are missing, or of different saves."""
    problems: list[str] = []
    if not parts:
        return problems
    needed = sorted({name for part in parts.values() for name in part.needed()})
    if missing := [name for name in needed if name not in parts]:
        problems.append(f"{', '.join(missing)} of {len(needed)} parts missing: push each node's folder")
    if len({part.save_id for part in parts.values()}) > 1:
        problems.append("its parts are of different saves of this step: remove it with prune --step, and push it again")
    return problems
