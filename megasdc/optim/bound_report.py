"""Reports of gradient bounds: counts of all ranks, by parameter and by submodule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from megasdc.config.sections.optimizer_hooks import BEFORE_NORM, HookSpec
from megasdc.optim.bound_rules import BoundRule, bound_rule
from megasdc.optim.bounds import COLUMNS, PLACES, ShardBounds
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ParallelDims

Totals = dict[str, dict[str, list[float]]]
"""By place (``PLACES``) and full name of the parameter: one number for each of ``COLUMNS``."""
_RATIO = COLUMNS.index("largest_ratio")


def gather_totals(bounds: ShardBounds, dims: ParallelDims, data_group: Any, host_group: Any) -> Totals:
    """Counts of all ranks, every parameter once; the same on all ranks.

    Args:
        data_group: the data-parallel group of this rank.
        host_group: a host group of all ranks, for objects.

    Collective: all ranks of the world.
    Sync: waits for the device.
    """
    table, largest = bounds.table.clone(), bounds.table[:, :, _RATIO].clone()
    dist.all_reduce(table, group=data_group)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=data_group)
    table[:, :, _RATIO] = largest
    own: Totals = {}
    if dims.dp_rank == 0:
        for place, rows in zip(PLACES, table.tolist(), strict=True):
            counted = zip(bounds.names, rows, bounds.counted, strict=True)
            own[place] = {name: row for name, row, counts in counted if counts and row[-1]}
    found: Totals = {}
    for one in gather_objects(own, host_group):
        found = merge_totals(found, one)
    return found


def merge_totals(one: Totals, other: Totals) -> Totals:
    """The sum of both; of the largest ratios the larger."""
    merged: Totals = {place: {name: list(row) for name, row in rows.items()} for place, rows in one.items()}
    for place, rows in other.items():
        of_place = merged.setdefault(place, {})
        for name, row in rows.items():
            of_place[name] = _sum([of_place[name], row]) if name in of_place else list(row)
    return merged


def _sum(rows: Sequence[Sequence[float]]) -> list[float]:
    total = [sum(column) for column in zip(*rows, strict=True)]
    total[_RATIO] = max(row[_RATIO] for row in rows)
    return total


def _by_submodule(rows: dict[str, list[float]]) -> dict[str, list[float]]:
    grouped: dict[str, list[list[float]]] = {}
    for name, row in rows.items():
        grouped.setdefault(name.rpartition(".")[0], []).append(row)
    return {fqn: _sum(of_it) for fqn, of_it in grouped.items()}


def _shares(row: Sequence[float]) -> dict[str, float]:
    one = dict(zip(COLUMNS, row, strict=True))
    return {
        "elements": one["elements"],
        "share": (one["by_absolute"] + one["by_spike"]) / one["elements"],
        "removed_share": one["removed"] / one["mass"] if one["mass"] else 0.0,
        "largest_ratio": one["largest_ratio"],
        "nan": one["nan"],
        "inf": one["inf"],
    }


def bound_rows(totals: Totals) -> dict[str, list[dict[str, Any]]]:
    """For each place, a row for each submodule in the order of the model.

    Columns: elements seen, summed over steps; share of them that was bounded; share of the mass (sum of magnitudes)
    that was removed; largest g^2 / V; numbers of NaN and Inf.
    """
    return {
        place: [
            {"submodule": fqn, **_shares(row)}
            for fqn, row in sorted(_by_submodule(rows).items(), key=lambda one: _in_order(one[0]))
        ]
        for place, rows in totals.items()
        if rows
    }


def _in_order(fqn: str) -> list[tuple[int, int, str]]:
    """Numbers of layers as numbers, whatever comes before and after them."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in fqn.split(".")]


def metrics_of(totals: Totals, specs: Sequence[HookSpec]) -> dict[str, float]:
    """Shares over the parameters that some entry bounds, at its places; NaN and Inf before the norm."""
    rows = [
        row
        for place, of_place in totals.items()
        for name, row in of_place.items()
        if bound_rule(name, specs, place) != BoundRule()
    ]
    seen = [row for row in totals.get(BEFORE_NORM, {}).values()]
    found = {}
    if rows:
        shares = _shares(_sum(rows))
        found = {f"bounds/{name}": shares[name] for name in ("share", "removed_share", "largest_ratio")}
    if seen:
        shares = _shares(_sum(seen))
        found["bounds/non_finite"] = shares["nan"] + shares["inf"]
    return found


def warnings_of(totals: Totals, specs: Sequence[HookSpec]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Shares above a bound's ``warn_share``, each as a sentence and as the fields of an event."""
    for number, spec in enumerate(specs):
        if spec.warn_share is None:
            continue
        column = COLUMNS.index(f"by_{spec.hook.removesuffix('_aware')}")
        fitting = {
            name: row
            for name, row in totals.get(spec.where, {}).items()
            if any(
                one is spec
                for one in (bound_rule(name, specs, spec.where).absolute, bound_rule(name, specs, spec.where).spike)
            )
        }
        for fqn, row in _by_submodule(fitting).items():
            share = row[column] / row[-1]
            if share > spec.warn_share:
                text = (
                    f"optimizer_hooks.{number} ({spec.hook}) bounded {share:.3%} of the elements of {fqn} since the "
                    f"last report, warn_share is {spec.warn_share:.3%}"
                )
                yield text, {"entry": number, "submodule": fqn, "share": share, "warn_share": spec.warn_share}
