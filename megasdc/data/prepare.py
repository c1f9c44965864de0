"""Preparation of text for training: documents, tokenizer, shards in parallel, Megatron's files, manifest.

Its destination is checked before the work and locked, and the result is published whole.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import rich.progress

from megasdc.common.durable import TEMPORARY_PREFIX, commit_folder, sync_path
from megasdc.common.errors import DataError, StorageError
from megasdc.common.program import drawn_bar
from megasdc.common.run_lock import open_lock_file
from megasdc.config.data import DataSection, SourceSection
from megasdc.data.formats import NUM_PLACES, UNREADABLE, LeftOut
from megasdc.data.indexed import IdSource
from megasdc.data.manifest import (
    BLOCK_BYTES,
    FORMAT_VERSION,
    MANIFEST_FILE,
    TOKENIZER_FOLDER,
    DataManifest,
    RoundTripRecord,
    SourceRecord,
    TokenizerRecord,
    digest_settings,
    record_files,
    verify_prepared,
    write_checksums,
)
from megasdc.data.merge import assign_splits, entropy_nats, merge_shards
from megasdc.data.pool import WorkerPool
from megasdc.data.shards import SHARD_CHARACTERS, group_documents, read_shard, shard_path
from megasdc.data.sources import (
    LICENCES,
    MEGATRON,
    describe_source,
    fingerprint_source,
    iterate_documents,
    newly_read,
    sample_documents,
    sample_starts,
)
from megasdc.data.tokenizer import (
    SENTENCEPIECE_FILE,
    Tokenizer,
    checksum_tokenizer,
    load_tokenizer,
    measure_round_trip,
    train_sentencepiece,
)

logger = logging.getLogger(__name__)

TRIED_CHARACTERS = 100_000
"""Number of characters of each source on which the tokenizer is tried before all are encoded."""
MAX_UNKNOWN_SHARE = 0.5
"""Share of unknown characters in its sample above which a tokenizer is refused, unless `tokenizer.accept_unknown`."""
STREAMED_SAMPLE_FACTOR = 4
"""The tokenizer's sample of a streamed source comes from its first `train_characters` times this factor."""


def prepare(
    section: DataSection,
    out_dir: Path | str | None = None,
    workers: int = 1,
    progress: bool = True,
    force: bool = False,
    shard_characters: int = SHARD_CHARACTERS,
) -> DataManifest:
    """Make a folder of prepared data, or reuse an equal one.

    Args:
        out_dir: the folder to make; None: `section.path`.
        workers: number of tokenizing processes; the result does not depend on it.
        progress: whether a progress bar is shown on standard error.
        force: whether prepared data that are damaged or have other settings are replaced.
        shard_characters: characters per shard, the unit lost when a run is killed. The result does not depend on it.

    Returns:
        The manifest of the folder.

    Raises:
        DataError: the sources or the tokenizer are unusable; the destination holds something else; another process is
            preparing it.
        StorageError: the destination cannot be written.
        ValueError: `workers` is below 1.
    """
    if workers < 1:
        raise ValueError(f"workers is {workers}, must be at least 1")
    out = Path(section.path if out_dir is None else out_dir).absolute()
    settings = describe_settings(section)
    if (present := check_destination(out, settings, force)) is not None:
        return present
    work = out.with_name(f".{out.name}.preparing")
    try:
        with lock_folder(work):
            if (present := check_destination(out, settings, force)) is not None:
                shutil.rmtree(work)
                return present
            with _progress_bar(progress) as bar:
                manifest = _build(section, settings, work, workers, shard_characters, bar)
            publish(work, out)
            return manifest
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise
        raise StorageError(
            f"cannot write prepared data to {out}: {error}; finished shards are kept in {work}"
        ) from error


def _build(
    section: DataSection,
    settings: dict[str, Any],
    work: Path,
    workers: int,
    shard_characters: int,
    bar: rich.progress.Progress,
) -> DataManifest:
    """Build the whole folder as ``work/result``."""
    tokenizer_folder, num_characters = _provide_tokenizer(section, settings, work, bar)
    tokenizer = load_tokenizer(section.tokenizer.kind, tokenizer_folder)
    beginning = _beginning(section, tokenizer)
    copied = _open_ids(section, tokenizer, beginning, bar)
    round_trip = _try_tokenizer(section, tokenizer)
    stream = _Stream(section.sources, section.max_unreadable, copied)
    workers = workers if len(copied) < len(section.sources) else 0  # none where there is no text
    groups = group_documents(stream, shard_characters)
    shards = _tokenize(groups, num_characters, tokenizer, tokenizer_folder, work, workers, bar, beginning)
    result = work / "result"
    shutil.rmtree(result, ignore_errors=True)
    result.mkdir()
    splits = assign_splits(sum(stream.num_documents), section.split, section.seed)
    task = bar.add_task("writing", total=len(shards))
    records, frequencies, dtype = merge_shards(
        shards, splits, result, tokenizer.vocab_size, lambda done: bar.advance(task, done)
    )
    for name in records:
        write_checksums(result / f"{name}.bin")
    shutil.copytree(tokenizer_folder, result / TOKENIZER_FOLDER)
    manifest = DataManifest(
        format_version=FORMAT_VERSION,
        settings=settings,
        settings_digest=digest_settings(settings),
        sources=stream.records(),
        tokenizer=TokenizerRecord(
            kind=tokenizer.kind,
            vocab_size=tokenizer.vocab_size,
            end_of_document=tokenizer.end_of_document,
            checksum=tokenizer.checksum,
        ),
        splits=records,
        dtype=dtype,
        unigram_entropy_nats=entropy_nats(frequencies),
        versions={
            name: version(name) for name in ("megatron-core", "numpy", "datasets", "sentencepiece", "transformers")
        },
        files=record_files(result),
        block_bytes=BLOCK_BYTES,
        round_trip=round_trip,
    )
    manifest.save(result)
    sync_path(result / TOKENIZER_FOLDER)
    return manifest


def _open_ids(
    section: DataSection, tokenizer: Tokenizer, beginning: int | None, bar: rich.progress.Progress
) -> dict[int, IdSource]:
    """The sources of ids by their number, every id checked, before any text is tokenized."""
    copied = {}
    for index, source in enumerate(section.sources):
        if source.kind == MEGATRON:
            task = bar.add_task(f"checking the ids of {source.path}", total=None)
            advance = partial(bar.advance, task)
            copied[index] = IdSource(source, tokenizer, beginning, advance)
            bar.update(task, total=1, completed=1)
    return copied


def _try_tokenizer(section: DataSection, tokenizer: Tokenizer) -> RoundTripRecord | None:
    """Round trip of a sample of all sources; DataError if the tokenizer does not know half and that is not accepted."""
    sources = [source for source in section.sources if source.kind != MEGATRON]
    texts = [text for source in sources for text in sample_starts(source, TRIED_CHARACTERS)]
    found = measure_round_trip(tokenizer, texts)
    if not found.num_characters:
        return None
    record = RoundTripRecord(
        num_characters=found.num_characters,
        changed_share=found.changed / found.num_characters,
        unknown_share=found.unknown / found.num_characters,
    )
    if record.unknown_share > MAX_UNKNOWN_SHARE and not section.tokenizer.accept_unknown:
        raise DataError(
            f"the tokenizer does not know {record.unknown_share:.1%} of {found.num_characters:,} characters from the "
            f"sources, more than {MAX_UNKNOWN_SHARE:.0%}: they all become one id; give one that was made for this text "
            "as data.tokenizer.path, or set data.tokenizer.accept_unknown to true"
        )
    return record


@dataclass
class _Stream:
    """All documents of all sources, with counts; DataError if more than ``max_unreadable`` cannot be read.

    A source of ids, one of ``copied``, stands for its documents.
    """

    sources: list[SourceSection]
    max_unreadable: int
    copied: Mapping[int, IdSource]
    num_documents: list[int] = field(default_factory=list)
    skipped: list[LeftOut] = field(default_factory=list)

    def __iter__(self) -> Iterator[str | IdSource]:
        self.num_documents = [0] * len(self.sources)
        self.skipped = []
        for index, source in enumerate(self.sources):
            if index in self.copied:
                self.skipped.append(self.copied[index].skipped)
                self.num_documents[index] = self.copied[index].num_documents
                yield self.copied[index]
                continue
            before = sum(skipped[UNREADABLE] for skipped in self.skipped)
            self.skipped.append(LeftOut(self.max_unreadable - before))
            for text in iterate_documents(source, self.skipped[index]):
                self.num_documents[index] += 1
                yield text

    def records(self) -> list[SourceRecord]:
        """Records of the sources, for the manifest."""
        return [
            SourceRecord(
                source=describe_source(source),
                licence=LICENCES[source.kind],
                num_documents=count,
                skipped=dict(sorted(skipped.items())),
                skipped_at=dict(sorted(skipped.places.items())),
                ids=self.copied[index].record if index in self.copied else None,
            )
            for index, (source, count, skipped) in enumerate(
                zip(self.sources, self.num_documents, self.skipped, strict=True)
            )
        ]


def _tokenize(
    groups: Iterable[tuple[int, list[str] | IdSource]],
    num_characters: int | None,
    tokenizer: Tokenizer,
    tokenizer_folder: Path,
    work: Path,
    workers: int,
    bar: rich.progress.Progress,
    beginning: int | None,
) -> list[Path | IdSource]:
    """Write every missing shard; return the paths of all in order, with the sources of ids among them."""
    folder = work / "shards"
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{TEMPORARY_PREFIX}*"):
        left.unlink()
    task = bar.add_task("tokenizing", total=num_characters, visible=workers > 0)
    parts: list[Path | IdSource] = []
    running: dict[Future[None], int] = {}
    num_reused = 0

    def collect(limit: int) -> None:
        while len(running) > limit:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                future.result()
                bar.advance(task, running.pop(future))

    with WorkerPool(*tokenizer.worker_files(tokenizer_folder, work), workers, beginning) as pool:
        for index, texts in groups:
            if isinstance(texts, IdSource):
                parts.append(texts)
                continue
            path = shard_path(folder, index, texts, tokenizer.checksum, beginning)
            parts.append(path)
            size = sum(map(len, texts))
            if _is_whole(path):
                num_reused += 1
                bar.advance(task, size)
            else:
                running[pool.submit(path, texts)] = size
                collect(2 * workers)
        collect(0)
    if num_reused:
        logger.info(
            "resumed: %d of %d shards were already tokenized", num_reused, sum(isinstance(part, Path) for part in parts)
        )
    return parts


def _beginning(section: DataSection, tokenizer: Tokenizer) -> int | None:
    """The id that is put before every document, or None; DataError if the tokenizer has none."""
    if section.bos and tokenizer.beginning_of_document is None:
        raise DataError(
            "megasdc.data.bos is true, but the tokenizer has no beginning-of-sequence token; set bos to null, or "
            "use a tokenizer that has one (of Hugging Face: bos_token in its tokenizer_config.json)"
        )
    return tokenizer.beginning_of_document if section.bos else None


def _is_whole(path: Path) -> bool:
    """Whether a shard exists and is readable; a damaged one is written again."""
    if not path.exists():
        return False
    try:
        read_shard(path)
    except DataError as error:
        logger.warning("%s; it is written again", error)
        return False
    return True


def _provide_tokenizer(
    section: DataSection, settings: dict[str, Any], work: Path, bar: rich.progress.Progress
) -> tuple[Path, int | None]:
    """Train or copy the tokenizer into the work folder; return its folder, and the characters of all text if known."""
    wanted = section.tokenizer
    folder = work / f"tokenizer-{digest_settings(settings)}"
    done = folder / ".complete"
    if done.exists():
        return folder / "files", None
    shutil.rmtree(folder, ignore_errors=True)
    num_characters = None
    if wanted.path is None and any(source.kind == MEGATRON for source in section.sources):
        raise DataError(f"data.tokenizer.path is not set; a source of kind {MEGATRON!r} needs the tokenizer of its ids")
    if wanted.path is not None:
        load_tokenizer(wanted.kind, wanted.path).save(folder / "files")
    elif wanted.kind == "sentencepiece":
        task = bar.add_task("reading for the tokenizer", total=None)
        texts, num_characters = sample_documents(_sampled(section), wanted.train_characters)
        bar.update(task, description=f"training the tokenizer on {sum(map(len, texts)):,} characters")
        train_sentencepiece(texts, folder / "files" / SENTENCEPIECE_FILE, wanted.vocab_size, wanted.model_type)
        bar.update(task, total=1, completed=1)
        if any(source.streaming for source in section.sources):
            num_characters = None
    else:
        raise DataError("data.tokenizer.path must name a folder or a hub tokenizer for kind 'huggingface'")
    done.touch()
    return folder / "files", num_characters


def _sampled(section: DataSection) -> Iterator[str]:
    """Yield the documents for the tokenizer's sample: all, but only the first of a streamed source."""
    max_unreadable = section.max_unreadable
    for source in section.sources:
        left = STREAMED_SAMPLE_FACTOR * section.tokenizer.train_characters
        skipped = LeftOut(max_unreadable)
        for text in iterate_documents(source, skipped):
            yield text
            left -= len(text)
            if source.streaming and left <= 0:
                break
        max_unreadable -= skipped[UNREADABLE]


@contextmanager
def _progress_bar(show: bool) -> Iterator[rich.progress.Progress]:
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    with drawn_bar(*columns, quiet=not show, transient=False) as bar:
        yield bar


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


def check_destination(out: Path, settings: dict[str, Any], force: bool) -> DataManifest | None:
    """The manifest of equal prepared data, or None if data can be written; with force every byte is checked."""
    if not out.exists():
        return None
    if not out.is_dir() or not (out / MANIFEST_FILE).exists():
        if out.is_dir() and not any(out.iterdir()):
            return None
        raise DataError(f"{out} exists and is not prepared data; give another folder, nothing was changed")
    try:
        manifest = DataManifest.load(out)
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


def _read_since(manifest: DataManifest, settings: dict[str, Any]) -> str:
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
