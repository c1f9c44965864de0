"""The part of ``tools/compare_checkpoints.py`` that compares manifests and writes extracts of blocks that differ."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import typer

from megasdc.common.program import echo
from megasdc.common.progress import bytes_bar
from megasdc.lab.checkpoints.digest import Digest, count_bytes, digest_path, is_digest, read_digest
from megasdc.lab.checkpoints.digests import compare_digests
from megasdc.lab.checkpoints.extract import write_extracts
from megasdc.lab.checkpoints.pages.digest_page import digest_page
from megasdc.output.terminal import print_pages


def goes_by_digest(paths: Sequence[Path], extract: Path | None) -> bool:
    """Whether a comparison uses manifests: some are given, or extracts are requested."""
    return extract is not None or any(map(is_digest, paths))


def compare_by_digest(
    paths: Sequence[Path],
    *,
    extract: Path | None,
    as_json: bool,
    limit: int,
) -> bool:
    """Compares manifests, and folders by manifests computed here; prints the result and returns whether all is equal.

    ``extract``: folder for the blocks that differ, of each path that is not a manifest; None: none are written.
    ``limit``: maximum of differences listed.

    Raises:
        CheckpointError: one cannot be read, or they have nothing in common.
        StorageError: blocks cannot be written.
    """
    here = {place: path for place, path in enumerate(paths) if not is_digest(path)}
    if extract is not None and not here:
        raise typer.BadParameter(
            "blocks are read from folders, but all that is given are manifests: give the folder "
            "of this machine in place of its manifest",
            param_hint="--extract",
        )
    quiet = as_json or not sys.stderr.isatty()
    with bytes_bar("reading", sum(map(count_bytes, here.values())), quiet=quiet) as advance:
        report = compare_digests([_digest(path, advance) for path in paths])
    written = []
    if extract is not None and not report.same:
        written = write_extracts(report, here, extract)
    if as_json:
        echo(json.dumps({**report.as_dict(), "extracts": [str(path) for path in written]}, indent=2))
    else:
        print_pages([digest_page(report, limit)])
        for path in written:
            echo(f"blocks that differ: {path}, {path.stat().st_size:,} bytes")
    return report.same


def _digest(path: Path, advance: Callable[[int], None]) -> Digest:
    return read_digest(path) if is_digest(path) else digest_path(path, progress=advance)
