"""Comparison of counters, learning rates and digests of random generators between checkpoints."""

from __future__ import annotations

from torch import Tensor

from megasdc.checkpoint.compare.damage import Damage, PieceDamage
from megasdc.checkpoint.compare.report import Options, Report
from megasdc.checkpoint.compare.votes import all_intact, find_expected
from megasdc.checkpoint.formats.pieces import Piece
from megasdc.checkpoint.views.view import GLOBAL_GENERATORS, Scalar, View

_RANKLESS = ("engine/", "optimizer/")
"""Scalars that represent those of all ranks; compared only where layouts differ."""
_OF_A_LAYOUT = ("rank", "loader/")
"""Scalars whose meaning depends on the layout; compared only where all have one layout."""


def compare_scalars(report: Report, options: Options) -> None:
    """Compare the scalars of all checkpoints that have some, and add differences to the report."""
    views = [view for view in report.views if "scalar" in view.slots]
    if len(views) < 2:
        return
    if options.wants("", "scalar"):
        report.problems += [problem for view in views for problem in view.problems]
    others = 0
    layouts = {(view.kind, view.layout) for view in views}
    for name in dict.fromkeys(name for view in views for name in view.scalars):
        if not options.wants(name, "scalar"):
            continue
        if name.startswith(_RANKLESS if len(layouts) == 1 else _OF_A_LAYOUT):
            continue
        holders = [(view, view.scalars[name]) for view in views if name in view.scalars]
        if len(holders) < 2:
            continue
        if name.endswith(GLOBAL_GENERATORS) and len({view.save_id for view, _ in holders}) > 1:
            others += len({scalar.value for _, scalar in holders}) > 1
            continue
        report.num_compared += 1
        _compare(report, name, holders)
    if others:
        report.notes.append(
            f"global random generators of {others} ranks differ; training does not draw from them, so between two "
            "saves that is no difference"
        )


def _compare(report: Report, name: str, holders: list[tuple[View, Scalar]]) -> None:
    classes: dict[str, list[tuple[View, Scalar]]] = {}
    for view, scalar in holders:
        if scalar.value is None:
            against = next((other for other, one in holders if one.value is not None), view)
            detail = f"{scalar.file.name} does not hold it"
            report.add((name, "scalar"), view, against, Damage("missing", detail, _place(scalar)))
        else:
            classes.setdefault(scalar.value, []).append((view, scalar))
    if len(classes) < 2:
        return
    states = [[all_intact([view.changed(one.file)]) for view, one in members] for members in classes.values()]
    right, basis = find_expected([len(members) for members in classes.values()], states)
    value, members = list(classes.items())[right]
    for found, wrong in classes.items():
        for view, scalar in wrong if found != value else ():
            detail = f"{found}, expected {value}"
            report.add((name, "scalar"), view, members[0][0], Damage("scalar", detail, _place(scalar)), basis)


def _place(scalar: Scalar) -> list[PieceDamage]:
    return [PieceDamage.whole(Piece(scalar.file, scalar.owner, 1, _nothing))]


def _nothing() -> Tensor:
    raise FileNotFoundError
