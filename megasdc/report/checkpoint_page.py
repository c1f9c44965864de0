"""Page of a comparison of checkpoints: verdict, findings, place in the model, bits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import torch

from megasdc.checkpoint.compare.report import Finding, Report
from megasdc.checkpoint.views.view import Slot
from megasdc.report.pages import write_page
from megasdc.tensors.bits import bit_layout

MAX_FINDINGS, MAX_ROWS = 500, 200
"""Maximum of findings in the table and of rows in the heat map; those that differ come first."""
LISTED = 4
"""Maximum of owners that are named."""
ALL = "all"
_SINCE = {True: "as it was saved", False: "changed since it was saved", None: "no manifest says how it was"}


def write_comparison(report: Report, keys: Sequence[tuple[str, Slot]], path: Path) -> None:
    """Write a comparison as one HTML page that needs no network.

    Args:
        report: of the comparison.
        keys: tensors that were compared, from ``tensors_to_compare``.
        path: the file; replaced.

    Raises:
        StorageError: it cannot be written.
    """
    letters = _letters(report)
    maps, left_out = _maps(report.findings, keys)
    bits = _bits(report.findings)
    shown = report.findings[:MAX_FINDINGS]
    more = len(report.findings) - len(shown)
    write_page(
        "checkpoints.html",
        path,
        title="Comparison of checkpoints",
        state="different" if report.findings else "unsure" if report.problems else "same",
        verdict=verdict(report),
        checkpoints=[
            {"letter": letters[str(view.path)], "kind": view.kind, "layout": view.layout, "path": str(view.path)}
            for view in report.views
        ],
        summary=f"{report.num_compared:,} tensors and values were compared; {report.num_tolerated:,} differ within "
        "what is allowed.",
        problems=report.problems,
        notes=report.notes,
        rows=[_row(finding, letters) for finding in shown],
        more=f"{more:,} more findings are not shown; --json has all." if more else "",
        slots=list(dict.fromkeys(finding.slot for finding in shown)),
        patterns=list(dict.fromkeys(finding.pattern for finding in shown)),
        left_out=f"{left_out:,} more tensors are not shown." if left_out else "",
        dtypes=list(dict.fromkeys(one["dtype"] for one in bits)),
        data={"maps": maps, "bits": bits},
    )


def verdict(report: Report) -> str:
    """The verdict in a sentence or two."""
    unread = len(report.problems)
    rest = f" {unread} file{'s' if unread > 1 else ''} could not be compared." if unread else ""
    if report.same:
        if unread:
            return f"Not wholly compared: of what could be read nothing differs.{rest}"
        if report.num_tolerated:
            return f"Same within what is allowed: {report.num_tolerated:,} tensors differ by no more."
        return f"Same: all {report.num_compared:,} tensors and values are equal in every bit."
    letters = _letters(report)
    places = {(finding.fqn, finding.slot) for finding in report.findings}
    wrong = " and ".join(dict.fromkeys(letters[finding.checkpoint] for finding in report.findings))
    whose = _whose(report.findings)
    if len(places) == 1:
        ((fqn, slot),) = places
        what = f"{slot} of {fqn} in {wrong}"
    else:
        what = f"{len(places):,} of {report.num_compared:,} tensors and values in {wrong}"
    what = f"{what}: {_kinds(report.findings)}{whose}."
    bases = {finding.basis for finding in report.findings if finding.measure is not None}
    basis = " Nothing tells which side is wrong." if bases == {""} else ""
    if len(bases) == 1 and not basis:
        basis = f" The other side is taken for right ({bases.pop()})."
    return f"Different: {what}{basis}{rest}"


def _kinds(findings: Sequence[Finding]) -> str:
    """The patterns, the most frequent first; one that more than half of the findings have stands for all."""
    counts = Counter(finding.pattern for finding in findings).most_common()
    pattern, most = counts[0]
    if len(counts) > 1 and 2 * most > len(findings):
        return f"mostly {pattern}"
    return ", ".join(name for name, _ in counts)


def _whose(findings: Sequence[Finding]) -> str:
    """Ranks and hosts that wrote what differs, where the format records them."""
    every = (one.piece.owner for finding in findings for one in finding.pieces)
    owners = {owner.rank: owner for owner in every if owner.rank is not None}
    if not owners:
        return ""
    if len(owners) == 1:
        return f"; written by {next(iter(owners.values()))}"
    hosts = ", ".join(sorted({str(owner.host) for owner in owners.values()})[:LISTED])
    ranks = ", ".join(str(rank) for rank in sorted(owners)[:LISTED])
    return f"; written by {len(owners)} ranks ({ranks}{', ...' if len(owners) > LISTED else ''}) on {hosts}"


def _letters(report: Report) -> dict[str, str]:
    """A short name of each checkpoint: A to Z, then numbers."""
    names: dict[str, str] = {}
    for place, view in enumerate(report.views):
        names.setdefault(str(view.path), ascii_uppercase[place] if place < len(ascii_uppercase) else str(place + 1))
    return names


def _row(finding: Finding, letters: dict[str, str]) -> dict[str, Any]:
    found = finding.measure
    ends = ulp = relative = "-"
    if found is not None:
        ends = str(found.first) if found.first == found.last else f"{found.first} to {found.last}"
        ulp = "-" if found.max_ulp is None else f"{found.max_ulp:,}"
        relative = f"{found.max_relative:.3g}"
    return {
        "letter": letters[finding.checkpoint],
        "fqn": finding.fqn,
        "slot": finding.slot,
        "pattern": finding.pattern,
        "detail": finding.detail,
        "meaning": finding.meaning,
        "owners": [
            {
                "owner": str(one.piece.owner),
                "file": one.piece.file.name,
                "since": _SINCE[finding.unchanged.get(one.piece.file.name)],
            }
            for one in finding.pieces[:LISTED]
        ],
        "more_owners": len(finding.pieces) - LISTED,
        "count": "-" if found is None else f"{found.num_different:,} of {found.numel:,}",
        "ends": ends,
        "ulp": ulp,
        "relative": relative,
    }


def _maps(findings: Sequence[Finding], keys: Sequence[tuple[str, Slot]]) -> tuple[dict[str, dict[str, Any]], int]:
    """A heat map of each slot and of all, and how many rows were omitted; empty where no tensor differs."""
    by_slot: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.slot != "scalar":
            by_slot.setdefault(finding.slot, []).append(finding)
    if not by_slot:
        return {}, 0
    differing = {_cell(finding.fqn)[1] for found in by_slot.values() for finding in found}
    names = dict.fromkeys(_cell(fqn)[1] for fqn, _ in keys)
    rows = sorted(names, key=lambda name: name not in differing)[:MAX_ROWS]
    kept = [name for name in names if name in set(rows)]
    slots = [slot for slot in dict.fromkeys(slot for _, slot in keys)]
    maps = {ALL: _map([one for found in by_slot.values() for one in found], [fqn for fqn, _ in keys], kept)}
    for slot in slots:
        maps[slot] = _map(by_slot.get(slot, []), [fqn for fqn, other in keys if other == slot], kept)
    return maps, len(names) - len(kept)


def _map(findings: Sequence[Finding], fqns: Sequence[str], rows: list[str]) -> dict[str, Any]:
    """Shares and relative differences as log10, ``equal`` where nothing differs, None where there is no tensor."""
    places = {_cell(fqn) for fqn in fqns}
    columns = sorted({layer for layer, _ in places}, key=lambda layer: (not layer.isdigit(), layer.zfill(9)))
    worst: dict[tuple[str, str], tuple[float, float, str]] = {}
    for finding in findings:
        share, relative, text = _extent(finding)
        place = _cell(finding.fqn)
        old = worst.get(place, (0.0, 0.0, ""))
        worst[place] = (max(old[0], share), max(old[1], relative), f"{old[2]}<br>{text}" if old[2] else text)
    shades: dict[str, list[list[float | str | None]]] = {"share": [], "relative": []}
    texts: list[list[str]] = []
    for row in rows:
        line = [worst.get((layer, row)) for layer in columns]
        held = [(layer, row) in places for layer in columns]
        shades["share"].append([_shade(cell and cell[0], there) for cell, there in zip(line, held, strict=True)])
        shades["relative"].append([_shade(cell and cell[1], there) for cell, there in zip(line, held, strict=True)])
        texts.append([cell[2] if cell else "equal in every bit" for cell in line])
    return {"rows": rows, "columns": columns, "texts": texts, **shades}


def _shade(value: float | None, there: bool) -> float | str | None:
    """A cell of the heat map: log10 of the value; ``equal``; None where there is no tensor."""
    if value is not None:
        return math.log10(value)
    return "equal" if there else None


def _extent(finding: Finding) -> tuple[float, float, str]:
    """Share of elements that differ and largest relative difference, at most 1 each, and both in words."""
    found = finding.measure
    if found is None:
        return 1.0, 1.0, f"{finding.slot}: {finding.pattern}"
    share = found.num_different / found.numel
    text = (
        f"{finding.slot}: {finding.pattern}, {found.num_different:,} of {found.numel:,} differ, "
        f"relative {found.max_relative:.3g}"
    )
    smallest = 1e-12  # +0 and -0 differ in a bit, but by 0
    return share, min(max(found.max_relative, smallest), 1.0), text


def _cell(fqn: str) -> tuple[str, str]:
    """(layer, name in the layer) of a tensor: the first number in its name, and the name without that number."""
    parts = fqn.split(".")
    at = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    if at is None:
        return "-", fqn
    return parts[at], ".".join(parts[:at] + parts[at + 1 :])


def _bits(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Number of elements in which each bit differs, by slot and dtype, and the meaning of each bit."""
    counts: dict[tuple[str, str], list[int]] = {}
    for finding in findings:
        if finding.measure is not None:
            key, new = (finding.slot, finding.measure.dtype), finding.measure.flips
            counts[key] = [a + b for a, b in zip(counts.get(key, [0] * len(new)), new, strict=True)]
    return [
        {"slot": slot, "dtype": dtype, "counts": found, "parts": _parts(dtype, len(found))}
        for (slot, dtype), found in counts.items()
    ]


def _parts(dtype: str, width: int) -> list[str]:
    """Meaning of each bit of a dtype, the lowest first."""
    kind = getattr(torch, dtype)
    if not kind.is_floating_point:
        return ["integer"] * width
    return [next(part for part, bits in bit_layout(kind).items() if bit in bits) for bit in range(width)]
