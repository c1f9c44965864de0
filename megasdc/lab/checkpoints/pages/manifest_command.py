"""The command behind ``megasdc manifest``: reads, writes the manifest, and prints a summary."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import typer

from megasdc.checkpoint.records import record_text
from megasdc.common.errors import StorageError
from megasdc.common.program import bytes_bar, echo, safe_console, write_atomically
from megasdc.lab.checkpoints.digest import DIGEST_SUFFIX, Digest, count_bytes, digest_path

STANDARD_OUTPUT = "-"


def make_manifest(path: Path, out: str | None, jobs: int | None, as_json: bool) -> None:
    """Writes the manifest of the checkpoints at a path.

    Args:
        path: see ``digest_path``.
        out: file to write, ``-`` for standard output; None: one in the working folder.
        jobs: threads that read; None: one per core.
        as_json: print the summary as JSON.

    Raises:
        CheckpointError: there is nothing of which a manifest can be made, or a file cannot be read.
        StorageError: the manifest cannot be written.
    """
    if as_json and out == STANDARD_OUTPUT:
        raise typer.BadParameter("--json and --out - would both write to standard output", param_hint="--out")
    started = time.monotonic()
    with bytes_bar("reading", count_bytes(path), quiet=as_json or not sys.stderr.isatty()) as advance:
        digest = digest_path(path, jobs=jobs, progress=advance)
    duration_s = time.monotonic() - started
    text = record_text(digest, indent=None)
    if out == STANDARD_OUTPUT:
        echo(text, nl=False)
    else:
        name = path.resolve().name
        target = Path(f"{name}.{digest.host}{DIGEST_SUFFIX}" if out is None else out)
        try:
            write_atomically(target, text)
        except OSError as error:
            raise StorageError(f"{target} cannot be written: {error.strerror}; choose another --out") from error
        _print(digest, str(target), len(text), duration_s, as_json)
    for file in digest.files:
        if file.problem is not None:
            echo(f"megasdc: warning: only the bytes of {file.name} were read: {file.problem}", err=True)


def _print(digest: Digest, out: str, manifest_bytes: int, duration_s: float, as_json: bool) -> None:
    tensors = [one for file in digest.files if file.content is not None for one in file.content.tensors]
    size = digest.size_bytes
    summary = {
        "host": digest.host,
        "path": digest.path,
        "out": out,
        "num_checkpoints": len(digest.checkpoints),
        "num_files": len(digest.files),
        "num_tensors": len(tensors),
        "size_bytes": size,
        "manifest_bytes": manifest_bytes,
        "duration_s": round(duration_s, 3),
        "problems": [file.problem for file in digest.files if file.problem is not None],
    }
    if as_json:
        echo(json.dumps(summary, indent=2))
        return
    safe_console(soft_wrap=True, highlight=False).print(
        f"{out}: {len(digest.files):,} files, {len(tensors):,} tensors, {size / 1e9:.3f} GB of {digest.path} on "
        f"{digest.host}; manifest of {manifest_bytes / 1e3:,.1f} KB; {size / 1e9 / max(duration_s, 1e-9):.2f} GB/s",
        markup=False,
    )
