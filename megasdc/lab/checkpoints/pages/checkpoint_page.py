"""Comparison of checkpoints as a page: verdict, findings, place in the model, bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any

import torch

from megasdc.checkpoint.views import Slot
from megasdc.lab.checkpoints.damage import MEANINGS, PieceDamage
from megasdc.lab.checkpoints.report import CheckpointMismatch, Options, Report
from megasdc.output.figure import Figure, Version, bars, layer_map, layout, line_look, map_axes
from megasdc.output.page import Cell, Page, PageSection, Table, number_cell
from megasdc.tensors.bits import bit_layout

MAX_FINDINGS, MAX_ROWS = 500, 200
"""Maximum of findings in the table and of rows in the heat map; those that differ come first."""
LISTED = 4
"""Maximum of owners that are named."""
ALL = "all"
SHADES = ("share of elements that differ", "largest relative difference")
_SINCE = {True: "as it was saved", False: "changed since it was saved", None: "no manifest says how it was"}


def comparison_page(report: Report, keys: Sequence[tuple[str, Slot]], options: Options, limit: int) -> Page:
    """The page of a comparison of the tensors ``keys``, with at most ``limit`` findings on a terminal."""
    letters = _letters(report)
    views = {
        letters[str(view.path)]: f"{view.path}: {view.kind}{f', {view.layout}' if view.layout else ''}"
        for view in report.views
    }
    counts = Counter(finding.pattern for finding in report.findings)
    compared = f"{report.num_compared:,} tensors and values compared"
    if options.ulp or options.rtol:
        compared += f", {report.num_tolerated:,} differ within what is allowed"
    return Page(
        title="Comparison of checkpoints",
        verdict=comparison_verdict(report),
        state="different" if report.findings else "unsure" if report.problems else "same",
        sentences=[compared],
        notes=report.notes,
        sections=[
            PageSection(facts=views),
            *([PageSection("Not compared", items=report.problems)] if report.problems else []),
            PageSection("What differs", tables=[_findings(report, letters, limit)]),
            PageSection("Patterns", facts={f"{name} ({count:,})": MEANINGS[name] for name, count in counts.items()}),
            PageSection("Files", items=_where(report)),
            PageSection("Where", figures=_maps(report.findings, keys)),
            PageSection("Which bits", figures=_bits(report.findings)),
        ],
    )


def comparison_verdict(report: Report) -> str:
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


def _kinds(findings: Sequence[CheckpointMismatch]) -> str:
    """The patterns, the most frequent first; one that more than half of the findings have stands for all."""
    counts = Counter(finding.pattern for finding in findings).most_common()
    pattern, most = counts[0]
    if len(counts) > 1 and 2 * most > len(findings):
        return f"mostly {pattern}"
    return ", ".join(name for name, _ in counts)


def _whose(findings: Sequence[CheckpointMismatch]) -> str:
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


def _findings(report: Report, letters: dict[str, str], limit: int) -> Table:
    headings = ("in", "tensor", "slot", "pattern", "owner", "differ", "first to last", "ULP", "relative")
    return Table(
        "findings",
        headings,
        [_row(finding, letters) for finding in report.findings],
        ("slot", "pattern"),
        shown=MAX_FINDINGS,
        listed=limit,
        elsewhere=("owner",),
        complete="--json",
    )


def _row(finding: CheckpointMismatch, letters: dict[str, str]) -> tuple[Cell | str | None, ...]:
    found = finding.measure
    pattern = f"{finding.pattern} ({finding.detail})" if finding.detail else finding.pattern
    what = (letters[finding.checkpoint], finding.fqn, finding.slot)
    why = Cell(pattern, more=(finding.meaning,), group=finding.pattern)
    owners = [
        (str(one.piece.owner), f"{one.piece.file.name}; {_since(finding, one)}") for one in finding.pieces[:LISTED]
    ]
    lines = [line for owner in owners for line in owner]
    if (more := len(finding.pieces) - LISTED) > 0:
        lines.append(f"and {more} more pieces")
    owner = Cell(lines[0] if lines else "-", more=tuple(lines[1:]))
    if found is None:
        return (*what, why, owner, None, None, None, None)
    ends = str(found.first) if found.first == found.last else f"{found.first} to {found.last}"
    count = number_cell(found.num_different, ",d", more=f" of {found.numel:,}")
    return (*what, why, owner, count, ends, number_cell(found.max_ulp, ",d"), number_cell(found.max_relative, ".3g"))


def _since(finding: CheckpointMismatch, damage: PieceDamage) -> str:
    """Whether the file of a piece changed after it was saved."""
    return _SINCE[finding.unchanged.get(damage.piece.file.name)]


def _where(report: Report) -> list[str]:
    """One line per file: its owner, whether it changed after it was saved, and its number of findings."""
    lines: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for finding in report.findings:
        for one in finding.pieces:
            file = str(one.piece.file)
            lines[file] = f"{file}: {one.piece.owner}; {_since(finding, one)}"
            counts[file] += 1
    bases = dict.fromkeys(
        f"{finding.checkpoint}: "
        + (f"expected is {finding.basis}" if finding.basis else "nothing tells which side is wrong")
        for finding in report.findings
    )
    return [*(f"{line}; {counts[file]:,} findings" for file, line in lines.items()), *bases]


def _maps(findings: Sequence[CheckpointMismatch], keys: Sequence[tuple[str, Slot]]) -> list[Figure]:
    """A heat map of each slot and of all; none where no tensor differs."""
    by_slot: dict[str, list[CheckpointMismatch]] = {}
    for finding in findings:
        if finding.slot != "scalar":
            by_slot.setdefault(finding.slot, []).append(finding)
    if not by_slot:
        return []
    differing = {_cell(finding.fqn)[1] for found in by_slot.values() for finding in found}
    names = dict.fromkeys(_cell(fqn)[1] for fqn, _ in keys)
    kept = set(sorted(names, key=lambda name: name not in differing)[:MAX_ROWS])
    rows = [name for name in names if name in kept]
    tensors: dict[str, list[str]] = {ALL: [fqn for fqn, _ in keys]}
    for fqn, slot in keys:
        tensors.setdefault(slot, []).append(fqn)
    by_slot[ALL] = [one for found in by_slot.values() for one in found]
    versions = [one for slot, fqns in tensors.items() for one in _versions(slot, by_slot.get(slot, []), fqns, rows)]
    caption = (
        "One cell a tensor and layer, by its place in the pipeline, logarithmic; grey: equal in every bit; empty: "
        "there is no such tensor. Of several checkpoints or copies the largest is shown."
    )
    if left := len(names) - len(rows):
        caption += f" {left:,} more tensors are not shown."
    columns: dict[str, Sequence[Any]] = {
        "tensor": [one.fqn for one in by_slot[ALL]],
        "slot": [one.slot for one in by_slot[ALL]],
        "share": [_extent(one)[0] for one in by_slot[ALL]],
        "relative": [_extent(one)[1] for one in by_slot[ALL]],
    }
    first = versions[0]
    title = "Tensors that differ"
    return [Figure("map", title, caption, first.traces, first.layout, columns, False, ("Slot", "Shade"), versions)]


def _versions(slot: str, findings: Sequence[CheckpointMismatch], fqns: Sequence[str], rows: list[str]) -> list[Version]:
    """The heat map of a slot, shaded by share and by relative difference."""
    worst: dict[tuple[str, str], tuple[float, float, str]] = {}
    for finding in findings:
        share, relative, text = _extent(finding)
        place = _cell(finding.fqn)
        old = worst.get(place, (0.0, 0.0, ""))
        worst[place] = (max(old[0], share), max(old[1], relative), f"{old[2]}<br>{text}" if old[2] else text)
    equal = {_cell(fqn): (0.0, 0.0, "equal in every bit") for fqn in fqns}
    cells = {place: worst.get(place, one) for place, one in equal.items()}
    num_layers = len({layer for layer, _ in cells})
    margins: dict[str, Any] = {
        "margin": {"l": 10, "r": 10, "t": 40, "b": 10},
        "meta": {"min_width": 160 + 16 * num_layers},
    }
    drawn = layout(130 + 20 * len(rows), "layer", hovermode="closest", **map_axes(), **margins)
    return [
        Version(
            (slot, shade),
            layer_map({place: (one[:2][at], one[2]) for place, one in cells.items()}, rows, top=0),
            drawn,
        )
        for at, shade in enumerate(SHADES)
    ]


def _extent(finding: CheckpointMismatch) -> tuple[float, float, str]:
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


def _bits(findings: Sequence[CheckpointMismatch]) -> list[Figure]:
    """Number of elements in which each bit differs, a figure for each dtype."""
    counts: dict[tuple[str, str], Counter[int]] = {}
    for finding in findings:
        if finding.measure is not None:
            for slot in (ALL, finding.slot):
                own = counts.setdefault((finding.measure.dtype, slot), Counter())
                own.update(dict(enumerate(finding.measure.flips)))
    slots = [ALL, *dict.fromkeys(slot for _, slot in counts if slot != ALL)]
    return [
        _bits_of(dtype, {slot: counts.get((dtype, slot)) for slot in slots}) for dtype, slot in counts if slot == ALL
    ]


def _bits_of(dtype: str, counts: dict[str, Counter[int] | None]) -> Figure:
    parts = _parts(dtype, len(counts[ALL] or ()))
    hover = "bit %{x}: %{y:,} elements"
    versions = []
    for slot, own in counts.items():
        of_part = {part: [bit for bit, name in enumerate(parts) if name == part] for part in reversed(parts)}
        traces = [
            bars(part, bits, [own[bit] for bit in bits], line_look(place)[0], hover)
            for place, (part, bits) in enumerate(of_part.items())
            if own is not None
        ]
        versions.append(Version((slot,), traces))
    drawn = layout(
        260,
        "bit",
        "elements",
        legend=True,
        bargap=0.15,
        xaxis={"autorange": "reversed", "dtick": 4 if len(parts) > 16 else 1},
        yaxis={"rangemode": "tozero"},
    )
    caption = (
        "In how many of the elements that differ each bit does, the sign on the left. A flip in memory or on a link is "
        "one bit anywhere; wrong arithmetic and drift are in the lowest bits of the mantissa first."
    )
    columns = {
        "bit": range(len(parts)),
        **{slot: [own[bit] for bit in range(len(parts))] for slot, own in counts.items() if own},
    }
    return Figure(f"bits_{dtype}", dtype, caption, versions[0].traces, drawn, columns, False, ("Slot",), versions)


def _parts(dtype: str, width: int) -> list[str]:
    """Meaning of each bit of a dtype, the lowest first."""
    kind = getattr(torch, dtype)
    if not kind.is_floating_point:
        return ["integer"] * width
    return [next(part for part, bits in bit_layout(kind).items() if bit in bits) for bit in range(width)]
