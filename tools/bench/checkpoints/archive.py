"""Size and rates of archiving checkpoints of small models that were really trained, in fp32 and in bf16.

Each run saves twice, ``apart`` steps from one another, and goes on for as many steps. Both checkpoints are pushed into
a folder and pulled; then one with quantized moments, from which the run is resumed, for its losses. Sizes by kind of
tensor come from encoding each block once more, as the push does, and by zstd alone at level 3.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.checkpoint.files import step_folder
from megasdc.checkpoint.manifest import FileRecord, parts_of, read_manifest
from megasdc.common.errors import MegasdcError
from megasdc.metrics.writer import read_metrics
from megasdc.ops.archive.block import block_name, decode_block, encode_block
from megasdc.ops.archive.cut import Cutter, TypedRange, find_ranges
from megasdc.ops.archive.pull import pull_checkpoint
from megasdc.ops.archive.push import push_checkpoint
from megasdc.parallel.run_ranks import TAIL_CHARACTERS
from tools.bench.checkpoints.options import ArchiveBenchOptions
from tools.bench.machine import describe_machine
from tools.bench.rank import Progress, ignore_progress, scratch_folder
from tools.bench.result import Report, Result, table
from tools.bench.small.gpt import prepare_library, small_config

RANKS = 2
BITS = 8
_PARTS = ("trained", "archived", "resumed")


@dataclass(frozen=True)
class KindSize:
    """Bytes of all blocks of a kind: as they are, by zstd alone, as the archive stores them."""

    raw_bytes: int = 0
    zstd_bytes: int = 0
    stored_bytes: int = 0

    def plus(self, raw: int, zstd: int, stored: int) -> KindSize:
        """With one block more."""
        return KindSize(self.raw_bytes + raw, self.zstd_bytes + zstd, self.stored_bytes + stored)


@dataclass(frozen=True)
class Archived:
    """What was measured in one precision.

    Attributes:
        kinds: sizes by kind, without regard to blocks that are there twice.
        size_bytes: of the first checkpoint; ``stored_bytes``: of its push.
        first_twice: share of the first checkpoint's bytes in blocks that it has more than once, each stored once.
        second_known: the same of the second, with blocks that the first had stored; ``second_stored``: bytes.
        quantized_bytes: stored with quantized moments; ``quantized_error``: as the archive tells it.
        encode_mb_s, decode_mb_s: one thread, without the disk; ``push_mb_s``, ``pull_mb_s``: into and from a folder.
        loss_distance: largest relative distance of losses after a resume from quantized moments; ``loss_change``: by
            how much the loss of a step differs from that of the step before, relative, the median over those steps.
    """

    kinds: dict[str, KindSize]
    size_bytes: int
    stored_bytes: int
    first_twice: float
    second_known: float
    second_stored: int
    quantized_bytes: int
    quantized_error: str
    encode_mb_s: float
    decode_mb_s: float
    push_mb_s: float
    pull_mb_s: float
    loss_distance: float
    loss_change: float


@dataclass(frozen=True)
class ArchiveResult(Result):
    """What was measured, by precision."""

    also = ()
    archived: dict[str, Archived]

    def report(self) -> Report:
        """A table of sizes and a few lines for each precision."""
        for precision, found in self.archived.items():
            rows = []
            total = KindSize()
            for kind, size in found.kinds.items():
                rows.append(_row(kind, size))
                total = total.plus(size.raw_bytes, size.zstd_bytes, size.stored_bytes)
            rows.append(_row("all", total))
            title = f"{precision}: {self.options.gpt}, {RANKS} ranks, step {self.options.steps}"
            yield table(title, ("what", "raw MB", "zstd alone", "archive"), rows, total=True)
            yield (
                f"first checkpoint {found.size_bytes / 1e6:.1f} MB, stored {found.stored_bytes / 1e6:.1f} MB "
                f"({found.stored_bytes / found.size_bytes:.3f}), {found.first_twice:.1%} being in it twice; of the "
                f"second {found.second_known:.1%} was there or twice in it, stored {found.second_stored / 1e6:.1f} MB"
            )
            yield (
                f"moments of {BITS} bits: stored {found.quantized_bytes / 1e6:.1f} MB "
                f"({found.quantized_bytes / found.size_bytes:.3f}); {found.quantized_error}; losses of the next "
                f"{self.options.apart} steps differ by at most {found.loss_distance:.1e}, from step to step by "
                f"{found.loss_change:.1e}"
            )
            yield (
                f"one thread: encoding {found.encode_mb_s:.0f} MB/s, decoding {found.decode_mb_s:.0f} MB/s; "
                f"{self.options.workers} threads with the disk: push {found.push_mb_s:.0f} MB/s, pull "
                f"{found.pull_mb_s:.0f} MB/s"
            )


def _row(kind: str, size: KindSize) -> list[str]:
    raw = max(1, size.raw_bytes)
    return [kind, f"{raw / 1e6:.2f}", f"{size.zstd_bytes / raw:.3f}", f"{size.stored_bytes / raw:.3f}"]


def bench_archive(options: ArchiveBenchOptions, on_progress: Progress = ignore_progress) -> ArchiveResult:
    """Measure on this machine."""
    machine = describe_machine()
    found = {}
    with scratch_folder() as scratch:
        data = prepare_library(scratch / "data", options.gpt.vocab, "a*.py")
        for precision in options.precisions.split(","):
            folder = scratch / precision
            folder.mkdir()
            found[precision] = _measure(options, precision, folder, data, on_progress)
    return ArchiveResult(machine, options, found)


def _measure(options: ArchiveBenchOptions, precision: str, folder: Path, data: Path, on_progress: Progress) -> Archived:
    losses = _train(options, precision, folder, "run", data)
    on_progress(precision, 1, len(_PARTS))
    checkpoints = folder / "run" / "checkpoints"
    last = checkpoints / step_folder(options.steps)
    archive = str(folder / "archive")
    first = push_checkpoint(checkpoints / step_folder(options.steps - options.apart), archive, workers=options.workers)
    second = push_checkpoint(last, archive, workers=options.workers)
    pulled = pull_checkpoint(archive, folder / "pulled", workers=options.workers)
    quantized = push_checkpoint(last, str(folder / "quantized"), quantize_bits=BITS, workers=options.workers)
    kinds, encode_mb_s, decode_mb_s = _encode(last)
    on_progress(precision, 2, len(_PARTS))
    pull_checkpoint(str(folder / "quantized"), folder / "resumed" / "checkpoints", accept_quantized=True)
    resumed = _train(options, precision, folder, "resumed", data)
    on_progress(precision, 3, len(_PARTS))
    after = sorted(step for step in losses if step > options.steps)
    changes = sorted(abs(losses[step] / losses[step - 1] - 1) for step in after)
    return Archived(
        kinds=kinds,
        size_bytes=first.size_bytes,
        stored_bytes=first.stored_bytes,
        first_twice=first.known_bytes / first.size_bytes,
        second_known=second.known_bytes / second.size_bytes,
        second_stored=second.stored_bytes,
        quantized_bytes=quantized.stored_bytes,
        quantized_error=str(quantized.quantized),
        encode_mb_s=encode_mb_s,
        decode_mb_s=decode_mb_s,
        push_mb_s=second.size_bytes / 1e6 / second.duration_s,
        pull_mb_s=pulled.size_bytes / 1e6 / pulled.duration_s,
        loss_distance=max(abs(resumed[step] / losses[step] - 1) for step in after),
        loss_change=changes[len(changes) // 2],
    )


def _train(options: ArchiveBenchOptions, precision: str, folder: Path, name: str, data: Path) -> dict[int, float]:
    """Train, or go on, to the last step in a folder of that name; returns the loss by step."""
    steps = options.steps + options.apart
    sections = {"checkpoint": {"interval": options.apart, "keep_last": 0}}
    config = small_config(options.gpt, folder / name, steps, sections, data=data)
    config["megasdc"]["logging"]["interval"] = 1
    config["scheduler"]["params"]["total_num_steps"] = 10 * steps  # in the middle of a run, not at its end
    if precision == "bf16":
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    file = folder / f"{name}_config.json"  # run.json is the identity of a run
    file.write_text(json.dumps(config), encoding="utf-8")
    argv = [sys.executable, "-m", "megasdc", "launch", "--num-ranks", str(RANKS), "--config", str(file)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MegasdcError(f"training ended with code {done.returncode}: {done.stderr[-TAIL_CHARACTERS:]}")
    return {row["step"]: row["train/loss"] for row in read_metrics(folder / name) if "train/loss" in row}


def _encode(folder: Path) -> tuple[dict[str, KindSize], float, float]:
    """Sizes by kind of a checkpoint, and the rates of encoding and decoding it in MB/s."""
    kinds: dict[str, KindSize] = {}
    encode_s = decode_s = 0.0
    total = 0
    for kind, raw, width in _blocks(folder):
        started = time.perf_counter()
        stored = encode_block(raw, width)
        encode_s += time.perf_counter() - started
        digest = block_name(raw)
        started = time.perf_counter()
        decode_block(stored, digest, len(raw))
        decode_s += time.perf_counter() - started
        total += len(raw)
        kinds[kind] = kinds.get(kind, KindSize()).plus(len(raw), len(encode_block(raw)), len(stored))
    return kinds, total / 1e6 / encode_s, total / 1e6 / decode_s


def _blocks(folder: Path) -> Iterator[tuple[str, bytes, int]]:
    """Kind, bytes and width of each block of a checkpoint."""
    for record in read_manifest(folder).files:
        ranges = find_ranges(record.name, record.content)
        with open(folder / record.name, "rb") as file:
            for _, raw, place in Cutter(file, record.size_bytes, ranges).blocks():
                yield _kind(record, place), raw, 1 if place is None else place.width


def _kind(record: FileRecord, place: TypedRange | None) -> str:
    """The slot of a range, such as ``exp_avg``; of all other bytes ``rest``."""
    content: Any = record.content
    for tensor in content.tensors if place is not None else ():
        if place is not None and tensor.offset <= place.offset < tensor.offset + tensor.size_bytes:
            return next((slot for _, slot, _, _ in parts_of(record.name, tensor, content)), "rest")
    return "rest"
