"""Page of DropCompute's results: scaling, thresholds, measured speed-up, effect on training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megasdc.report.result.page import Page, Section
from megasdc.report.result.table import Cell, Table, cell, number, percent
from megasdc.report.run_pages.drop_results import DropResults, Scaling, read_drop_results
from megasdc.report.run_pages.figures.drop_results import (
    loss_figures,
    measured_scaling_figure,
    scaling_figure,
    speedup_figure,
    threshold_figure,
)

SOURCE = "Giladi et al., NeurIPS 2023, arXiv 2306.10598"
PAPER = (
    f"The paper's ({SOURCE}): BERT-Large ends at F1 91.32 with nothing left out, 91.34 with 2.5 to 3 % left out, "
    "91.44 with 5.5 to 6 %, 91.19 with 10 to 11 %; at the last with 11 % more steps 91.40, with a batch larger by 11 % "
    "91.38, with samples computed again 91.19. 64 workers took 13 % less time for about 3 % more steps. Training was "
    "faster by 18 % before the system was tuned and by 5 % after."
)
LIMITS = (
    "Latencies are drawn, after the distribution that the paper gives for its delay environment; real clusters have "
    "others, and most straggling there comes from uneven work, which leaving micro-batches out does not cure. Models "
    "are small, so that losses stand for the direction alone."
)


def drop_result_page(paths: Sequence[Path], title: str | None = None) -> Page:
    """Build the page.

    Args:
        paths: results of DropCompute's commands.
        title: of the page; None: DropCompute.

    Raises:
        DataError: as ``read_drop_results``.
    """
    results = read_drop_results(paths)
    name = title or "DropCompute"
    said = _sentences(results)
    missed = [one for one in results.speedups if not one["passed"]]
    return Page(
        kind="drops",
        title=name,
        verdict=f"{name}: {said[0]}",
        state="unsure" if missed else "same",
        sentences=[*said[1:], LIMITS],
        tiles=_tiles(results),
        notes=[],
        sections=[
            *_scaling(results),
            *_measured_scaling(results),
            *(_measured(place, one) for place, one in enumerate(results.speedups)),
            *(_training(place, one) for place, one in enumerate(results.trainings)),
            Section("Files", facts={str(path): kind for kind, path in results.files}),
        ],
        summary={"files": [{"kind": kind, "path": str(path)} for kind, path in results.files], "sentences": said},
    )


def _sentences(results: DropResults) -> list[str]:
    """The results, a sentence per file; at least one."""
    said = []
    if results.scaling:
        most = results.scaling[-1]
        said.append(
            f"with {most.replicas:,} replicas {most.drops:.0%} of linear scaling instead of {most.waits:.0%}, "
            f"{most.drop_rate:.1%} of micro-batches left out (simulated)."
        )
    for one in results.speedups:
        apart = max(abs(found["difference"]) for found in one["thresholds"])
        words = "within" if one["passed"] else "not within"
        said.append(
            f"Measured effective speed-ups of {one['options']['replicas']} replicas are {words} {one['bar']:.0%} of "
            f"the predicted ones (at most {apart:.1%} apart)."
        )
    said += [one["verdict"] for one in results.trainings]
    return said


def _tiles(results: DropResults) -> dict[str, str]:
    found = {}
    if results.scaling:
        best = max(results.scaling, key=lambda one: one.speedup)
        found["largest effective speed-up, simulated"] = f"{best.speedup:.3f} ({best.replicas:,} replicas)"
    if results.speedups:
        rows = [found for one in results.speedups for found in one["thresholds"]]
        found["largest measured"] = f"{max(one['speedup'] for one in rows):.3f}"
    return found


def _scaling(results: DropResults) -> list[Section]:
    if not results.scaling:
        return []
    headings = ("replicas", "without a threshold", "by eq. 4", "best threshold", "effective speed-up", "left out")
    rows = [_scaling_row(one) for one in results.scaling]
    assert results.environment is not None, "read with the simulation"
    environment = results.environment
    facts = {
        "latency": f"{environment['latency_s']:g} s and delays",
        "delays": "; ".join(map(_delay, environment["delays"])) or "none",
        "seed": str(environment["seed"]),
    }
    note = f"Throughput over linear scaling, as in the paper's first figure ({SOURCE})."
    return [
        Section(
            "Scaling",
            [note],
            facts,
            [Table("drop_scaling_table", headings, rows, searched=False)],
            [scaling_figure(results.scaling), threshold_figure(results.scaling)],
        )
    ]


def _delay(one: Mapping[str, Any]) -> str:
    return ", ".join([one["kind"], *(f"{key} {value}" for key, value in one.items() if key != "kind")])


def _scaling_row(one: Scaling) -> tuple[Cell, ...]:
    return (
        cell(one.replicas),
        number(one.waits, ".1%"),
        number(one.waits_formula, ".1%"),
        number(one.drops, ".1%"),
        number(one.speedup, ".4f"),
        number(one.drop_rate, ".1%"),
    )


def _measured_scaling(results: DropResults) -> list[Section]:
    figure = measured_scaling_figure(results.speedups)
    return [] if figure is None else [Section("Measured with several numbers of replicas", figures=[figure])]


def _measured(place: int, result: Mapping[str, Any]) -> Section:
    headings = ("threshold, s", "chosen by", "left out: predicted", "left out", "predicted", "measured", "difference")
    rows = tuple(
        (
            number(one["tau_s"], ".4g", missing="none"),
            Cell("the run" if one["own"] else "the measurement"),
            number(one["predicted_rate"], ".1%"),
            number(one["rate"], ".1%"),
            number(one["predicted"], ".4f"),
            number(one["speedup"], ".4f"),
            percent(one["difference"], result["bar"]),
        )
        for one in result["thresholds"]
    )
    table = Table(f"drop_measured_table_{place}", headings, rows, searched=False)
    return Section("Measured", [_made(result)], tables=[table], figures=[speedup_figure(place, result)])


def _training(place: int, result: Mapping[str, Any]) -> Section:
    headings = ("setting", "final loss", "increase", "smallest", "largest", "beyond chance", "steps", "samples", "time")
    rows = [_training_row(one) for one in result["scores"]]
    table = Table(f"drop_training_table_{place}", headings, rows, searched=False)
    return Section("Training", [_made(result), PAPER], tables=[table], figures=loss_figures(place, result))


def _training_row(one: Mapping[str, Any]) -> tuple[Cell, ...]:
    losses, increases = one["losses"], one["increases"]
    sure = min(increases) > 0 or max(increases) < 0
    return (
        Cell(one["name"]),
        number(sum(losses) / len(losses), ".4f"),
        number(one["over_none"], "+.2%"),
        number(min(increases), "+.2%"),
        number(max(increases), "+.2%"),
        Cell("-" if not one["setting"]["rate"] else "all seeds agree" if sure else "no"),
        number(one["steps"], ",.0f"),
        number(one["samples"], ".1%"),
        number(one["time"], ".1%"),
    )


def _made(result: Mapping[str, Any]) -> str:
    machine = {**result["machine"], **result["machine"].get("versions", {})}
    return "; ".join(f"{key} {value}" for key, value in machine.items() if isinstance(value, str | int | float)) + "."
