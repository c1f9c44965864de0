"""Results of DropCompute's commands, read from the JSON files that they wrote with ``--out``.

The commands are ``megasdc dropcompute simulate``, ``drop-speedup`` and ``drop-training`` of ``python -m tools.bench``.
A file's keys tell which one wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megasdc.common.durable import parse_json
from megasdc.common.errors import DataError

SIMULATION, SPEEDUP, TRAINING = "simulation", "speed-up", "training"
_KEYS = {
    SIMULATION: {"environment", "results"},
    SPEEDUP: {"thresholds", "sleep_share"},
    TRAINING: {"verdict", "scores", "runs"},
}
_COMMANDS = (
    "megasdc dropcompute simulate --out FILE.json, python -m tools.bench drop-speedup --out FILE.json or "
    "python -m tools.bench drop-training --out FILE.json"
)


@dataclass(frozen=True)
class Scaling:
    """Simulated scaling for one number of replicas: throughput over linear scaling without and with drops.

    ``waits``: without drops, the share of time that is not spent on waiting; ``waits_formula``: the same by eq. 4,
    None: it does not apply; ``drops``, ``speedup`` and ``drop_rate``: at the best threshold; ``curve``: (drop rate,
    effective speed-up) of every threshold.
    """

    replicas: int
    waits: float
    waits_formula: float | None
    drops: float
    speedup: float
    drop_rate: float
    curve: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class DropResults:
    """All files of a report: simulated scaling by number of replicas and its environment, None without a simulation.

    ``speedups`` and ``trainings``: results of ``bench drop-speedup`` and ``drop-training``; ``files``: kind and path of
    each.
    """

    scaling: Sequence[Scaling] = ()
    environment: Mapping[str, Any] | None = None
    speedups: Sequence[Mapping[str, Any]] = ()
    trainings: Sequence[Mapping[str, Any]] = ()
    files: Sequence[tuple[str, Path]] = field(default_factory=list)


def read_drop_results(paths: Sequence[Path]) -> DropResults:
    """Reads JSON files; at most one simulation, since two may have different environments.

    Raises:
        DataError: a file is none of these or damaged, or there are several simulations.
    """
    found: dict[str, list[Any]] = {kind: [] for kind in _KEYS}
    files = []
    for path in paths:
        kind, content = _read(path)
        found[kind].append(content)
        files.append((kind, path))
    if len(found[SIMULATION]) > 1:
        raise DataError(f"{len(found[SIMULATION])} simulations were given; give one, with all --replicas in it")
    simulated = next(iter(found[SIMULATION]), None)
    try:
        scaling = [] if simulated is None else [_scaling(one) for one in simulated["results"]]
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise DataError(f"the simulation is not of this version ({error!r}); simulate again") from error
    environment = None if simulated is None else simulated["environment"]
    return DropResults(scaling, environment, found[SPEEDUP], found[TRAINING], files)


def _read(path: Path) -> tuple[str, Any]:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as JSON ({error}); give a file that {_COMMANDS} wrote") from error
    kinds = [kind for kind, keys in _KEYS.items() if isinstance(content, dict) and keys <= content.keys()]
    if not kinds:
        raise DataError(f"{path} is no result of DropCompute's commands; give a file that {_COMMANDS} wrote")
    return kinds[0], content


def _scaling(one: Mapping[str, Any]) -> Scaling:
    said, longest, curve = one["simulation"], one["longest"], one["curve"]
    rest = said["communication_s"]
    alone = said["micro_batches"] * one["latency"]["mean_s"] + rest
    waits = alone / (longest["simulated_s"] + rest)
    formula = longest["formula_s"]
    points = zip(curve["completed_share"], curve["speedup"], strict=True)
    return Scaling(
        replicas=said["replicas"],
        waits=waits,
        waits_formula=None if formula is None else alone / (formula + rest),
        drops=waits * one["best"]["speedup"],
        speedup=one["best"]["speedup"],
        drop_rate=one["best"]["drop_rate"],
        curve=tuple(sorted((1 - share, speedup) for share, speedup in points)),
    )
