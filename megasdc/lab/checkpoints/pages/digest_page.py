"""Comparison of manifests as a page."""

from __future__ import annotations

from datetime import UTC, datetime

from megasdc.lab.checkpoints.digest_report import WHATS, Difference, DigestReport
from megasdc.output.page import Page, Section
from megasdc.output.table import Table, few


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
