"""Check of the storage of checkpoints: how fast this host writes and reads there, and how many fit."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from rich.filesize import decimal

from megasdc.common.errors import DataError, StorageError
from megasdc.data.manifest import DataManifest
from megasdc.ops.preflight.job import Job
from megasdc.ops.preflight.result import CheckStatus, PreflightFinding, with_warnings
from megasdc.train.memory import memory_of_stages

MOST_BYTES, MOST_S = 256 << 20, 20.0
"""Of what is written as a test."""
SHARE = 4
"""A quarter of the free space may be written."""
PIECE = 16 << 20
FILE = "storage.bin"


def check_storage(job: Job) -> PreflightFinding:
    """Write, sync and read a file where checkpoints will lie, and compare free space with what they need.

    Raises:
        StorageError: it cannot be written, or there is too little space.
    """
    predicted = predict_checkpoint(job)
    free = available_bytes(job)
    path = job.storage / FILE
    try:
        size, write_s, read_s = measure(path, min(MOST_BYTES, shutil.disk_usage(job.storage).free // SHARE))
    except OSError as error:
        raise StorageError(
            f"{path}: {error.strerror}; free space, or choose another megasdc.checkpoint.folder"
        ) from error
    finally:
        with suppress(OSError):  # the folder goes as a whole later, which tells what is left
            path.unlink()
    where = " of each host's folder, this host's" if job.config.megasdc.checkpoint.storage == "node_local" else ""
    text = (
        f"write and sync {size / write_s / 1e6:,.0f} MB/s, read {size / read_s / 1e6:,.0f} MB/s{where}; "
        f"{decimal(free)} free for {job.num_checkpoints:,} checkpoints of about {decimal(round(predicted))}"
    )
    figures = {
        "write_bytes_per_s": size / write_s,
        "read_bytes_per_s": size / read_s,
        "available_bytes": free,
        "predicted_checkpoint_bytes": predicted,
        "num_checkpoints": job.num_checkpoints,
    }
    if problem := too_small(job, predicted, free):
        return PreflightFinding(CheckStatus.FAILED, f"{text}; {problem}", StorageError.exit_code, figures)
    return with_warnings(text, [], figures)


def too_small(job: Job, checkpoint_bytes: float, free: float) -> str | None:
    """What is wrong where the checkpoints of the run do not fit; None: they do."""
    needed = job.num_checkpoints * checkpoint_bytes
    if needed <= free:
        return None
    return (
        f"{job.num_checkpoints:,} checkpoints need {decimal(round(needed))}, and {decimal(round(free))} are free or "
        "theirs: free space, lower megasdc.checkpoint.keep_last (0 keeps all), or choose another "
        "megasdc.checkpoint.folder"
    )


def available_bytes(job: Job) -> int:
    """Bytes that are free where checkpoints lie, and those that checkpoints of this run take there already."""
    sections = job.config.megasdc
    own = Path.cwd() / (sections.checkpoint.folder or f"{sections.logging.run_dir}/checkpoints")
    taken = 0
    for path in own.glob("step_*/**/*"):
        with suppress(FileNotFoundError):
            taken += path.stat().st_size if path.is_file() else 0
    return shutil.disk_usage(job.storage).free + taken


def predict_checkpoint(job: Job) -> float:
    """Bytes of weights, master weights and moments of the whole model."""
    section = job.config.megasdc.data
    vocab_size = section.tokenizer.vocab_size
    with suppress(DataError):  # the check of the data says so
        vocab_size = DataManifest.load(section.folders[0]).tokenizer.vocab_size
    stages = memory_of_stages(job.config, vocab_size, 1, 1)
    return job.config.megasdc.parallel.tensor * sum(stage.weights + stage.state for stage in stages)


def measure(path: Path, most: int) -> tuple[int, float, float]:
    """Write a file and read it from the device.

    Returns:
        Its bytes, and the seconds of both.
    """
    piece, size = os.urandom(PIECE), 0
    began = time.monotonic()
    with open(path, "wb", buffering=0) as file:
        while size < most and time.monotonic() - began < MOST_S:
            size += file.write(piece[: most - size])
        os.fsync(file.fileno())
        write_s = time.monotonic() - began
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that it is not read from memory
    began = time.monotonic()
    with open(path, "rb", buffering=0) as file:
        while file.read(PIECE):
            pass
    return size, write_s, time.monotonic() - began
