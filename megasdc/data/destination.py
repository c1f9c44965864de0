"""Destination of prepared data: checks before the work, lock, and publication of the result."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megasdc.common.durable import commit_folder
from megasdc.common.errors import DataError
from megasdc.common.run_lock import open_lock_file
from megasdc.config.data import DataSection, SourceSection
from megasdc.data.formats import NUM_PLACES
from megasdc.data.manifest import MANIFEST_FILE, Manifest, verify_prepared
from megasdc.data.sources import fingerprint_source, newly_read
from megasdc.data.tokenizer import checksum_tokenizer


def describe_settings(section: DataSection) -> dict[str, Any]:
    """Settings that the result depends on, with fingerprints of the input."""
    tokenizer = section.tokenizer.of_tokens()
    path = section.tokenizer.path
    if path is not None:
        tokenizer["checksum"] = checksum_tokenizer(section.tokenizer.kind, path) if Path(path).exists() else None
    # Only where it is set: data that were prepared before it existed have the same settings.
    accepted = {"max_unreadable": section.max_unreadable} if section.max_unreadable else {}
    return {
        **accepted,
        **({"bos": True} if section.bos else {}),
        "seed": section.seed,
        "split": list(section.split),
        "tokenizer": tokenizer,
        "sources": [{**source.model_dump(), "input": fingerprint_source(source)} for source in section.sources],
    }


def check_destination(out: Path, settings: dict[str, Any], force: bool) -> Manifest | None:
    """The manifest of equal prepared data, or None if data can be written; with force every byte is checked."""
    if not out.exists():
        return None
    if not out.is_dir() or not (out / MANIFEST_FILE).exists():
        if out.is_dir() and not any(out.iterdir()):
            return None
        raise DataError(f"{out} exists and is not prepared data; give another folder, nothing was changed")
    try:
        manifest = Manifest.load(out)
        if differences := list(_differences(manifest.settings, settings)):
            raise DataError(
                f"{out} was prepared with other settings: {'; '.join(differences)}{_read_since(manifest, settings)}; "
                "give another megasdc.data.path or --out, or replace it with --force; runs that use these data then "
                "stop"
            )
        return verify_prepared(out, quick=not force)
    except DataError:
        if force:
            return None
        raise


def _read_since(manifest: Manifest, settings: dict[str, Any]) -> str:
    """The files that are read now and were not by the version that prepared the data, as the end of a sentence."""
    told = []
    for number, (old, new) in enumerate(zip(manifest.settings.get("sources", []), settings["sources"], strict=False)):
        section = SourceSection(**{name: value for name, value in new.items() if name != "input"})
        if old.get("input") != new["input"] and (paths := newly_read(section, old.get("input", {}))):
            names = ", ".join(path.relative_to(section.path or "").as_posix() for path in paths[:NUM_PLACES])
            more = f" and {len(paths) - NUM_PLACES} more" if len(paths) > NUM_PLACES else ""
            told.append(
                f"; data.sources.{number} differs only by files that earlier versions left out, or that have come "
                f"since: {names}{more} (runs may go on with the data as they are)"
            )
    return "".join(told)


def _differences(old: Any, new: Any, path: str = "data") -> Iterator[str]:
    """Yield every setting that differs, by dotted path with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, now) in enumerate(zip(old, new, strict=True)):
            yield from _differences(before, now, f"{path}.{index}")
    elif old != new:
        yield f"{path} was {old!r}, is {new!r}"


def publish(work: Path, out: Path) -> None:
    """Move the result to its destination; replaced data are removed only after that."""
    commit_folder(work / "result", out)
    shutil.rmtree(work)


@contextmanager
def lock_folder(work: Path) -> Iterator[None]:
    """Lock the work folder against other processes; the lock ends with the process, also when it is killed."""
    work.mkdir(parents=True, exist_ok=True)
    path = work / "lock"
    with open_lock_file(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"another process is preparing data in {work}; wait for it") from error
        if not path.exists() or path.stat().st_ino != os.fstat(file.fileno()).st_ino:
            raise DataError(f"another process has just finished preparing data in {work}; call again")
        yield
