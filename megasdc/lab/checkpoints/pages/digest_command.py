"""The part of ``tools/compare_checkpoints.py`` that compares manifests and writes extracts of blocks that differ.

Comparison of manifests as a page.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import typer

from megasdc.common.program import echo
from megasdc.common.progress import bytes_bar
from megasdc.lab.checkpoints.digest import Digest, count_bytes, digest_path, is_digest, read_digest
from megasdc.lab.checkpoints.digest_report import WHATS, Difference, DigestReport
from megasdc.lab.checkpoints.digests import compare_digests
from megasdc.lab.checkpoints.extract import write_extracts
from megasdc.output.page import Page, Section
from megasdc.output.table import Table, few
from megasdc.output.terminal import print_pages


def digest_page(report: DigestReport, limit: int) -> Page:
    """The page of a comparison, with at most ``limit`` differences on a terminal."""
    first = f", {report.first_different} first" if report.first_different else ""
    different = f"Different: {len(report.differences):,} tensors, values and files{first}"
    odd = [
        f"{label} is not what is expected: "
        + "; ".join(dict.fromkeys(one.basis for one in report.differences if one.digest == label and one.basis))
        for label in report.odd
    ]
    kinds = dict.fromkeys(one.what for one in report.differences)
    headings = ("on", "file", "tensor or value", "what", "blocks", "bytes", "elements", "holds", "writer", "detail")
    return Page(
        title="Comparison of manifests",
        verdict="Same" if report.same else different,
        state="same" if report.same else "different",
        sentences=[*_digests(report), f"{report.num_files:,} files compared by digest"],
        notes=report.notes,
        sections=[
            Section(
                facts={name: "same" if same else "different" for name, same in report.checkpoints.items() if name},
                tables=[Table("differences", headings, [_row(one) for one in report.differences], listed=limit)],
            ),
            Section(facts={what: WHATS[what] for what in kinds}),
            Section(sentences=odd or ([] if report.same else ["nothing tells which side is wrong"])),
        ],
    )


def _digests(report: DigestReport) -> list[str]:
    said = []
    for label, digest in zip(report.labels, report.digests, strict=True):
        when = datetime.fromtimestamp(digest.time, UTC).isoformat(timespec="seconds")
        how = "as it was saved" if digest.as_saved else "as it was read"
        said.append(f"{label}: {len(digest.files):,} files, {digest.size_bytes / 1e9:.3f} GB, {how} at {when}")
    return said


def _row(one: Difference) -> tuple[str | int | None, ...]:
    holds = list(dict.fromkeys(name for part in one.ranges for name in part.parameters))
    since = {True: "as it was saved", False: "changed since it was saved", None: ""}[one.unchanged]
    return (
        one.digest,
        f"{one.checkpoint}/{one.file}" if one.checkpoint else one.file,
        one.name,
        one.what,
        one.num_blocks or None,
        few([f"{part.bytes[0]}-{part.bytes[1]}" for part in one.ranges]),
        few([f"{part.elements[0]}-{part.elements[1]}" for part in one.ranges if part.elements]),
        few(holds),
        "-" if one.rank is None else f"rank {one.rank} on {one.node}",
        "; ".join(filter(None, (one.detail, since))),
    )


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
