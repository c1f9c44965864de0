"""Page of DropCompute's results: scaling, thresholds, measured speed-up, effect on training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megasdc.lab.report.run_pages.drop_results import DropResults, read_drop_results
from megasdc.lab.report.run_pages.figures.drop_results import (
    loss_figures,
    measured_scaling_figure,
    rate_figure,
    scaling_figure,
    speedup_figure,
)
from megasdc.output.page import Page, PageSection, number_cell, percent, table_of

SOURCE = "Giladi et al., NeurIPS 2023, arXiv 2306.10598"
PAPER = (
    f"The paper's ({SOURCE}): BERT-Large ends at F1 91.32 with nothing dropped, 91.34 with 2.5 to 3 % dropped, "
    "91.44 with 5.5 to 6 %, 91.19 with 10 to 11 %; at the last with 11 % more steps 91.40, with a batch larger by 11 % "
    "91.38, with samples recomputed 91.19. 64 workers took 13 % less time for about 3 % more steps. Training was "
    "faster by 18 % before the system was tuned and by 5 % after."
)
LIMITS = (
    "Latencies are drawn, after the distribution that the paper gives for its delay environment; real clusters have "
    "others, and most straggling there comes from uneven work, which dropping micro-batches does not cure. Models "
    "are small, so that losses stand for the direction alone."
)


def drop_result_page(paths: Sequence[Path], title: str | None = None) -> Page:
    """The page of results of DropCompute's commands; raises as ``read_drop_results``."""
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
            PageSection("Files", facts={str(path): kind for kind, path in results.files}),
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


def _scaling(results: DropResults) -> list[PageSection]:
    if not results.scaling:
        return []
    columns = {
        "replicas": "replicas",
        "without a threshold": "waits:.1%",
        "by eq. 4": "waits_formula:.1%",
        "best threshold": "drops:.1%",
        "effective speed-up": "speedup:.4f",
        "dropped": "drop_rate:.1%",
    }
    assert results.environment is not None, "read with the simulation"
    environment = results.environment
    facts = {
        "latency": f"{environment['latency_s']:g} s and delays",
        "delays": "; ".join(map(_delay, environment["delays"])) or "none",
        "seed": str(environment["seed"]),
    }
    note = f"Throughput over linear scaling, as in the paper's first figure ({SOURCE})."
    return [
        PageSection(
            "Scaling",
            [note],
            facts,
            [table_of("drop_scaling_table", results.scaling, columns, searched=False)],
            [scaling_figure(results.scaling), rate_figure(results.scaling)],
        )
    ]


def _delay(one: Mapping[str, Any]) -> str:
    return ", ".join([one["kind"], *(f"{key} {value}" for key, value in one.items() if key != "kind")])


def _measured_scaling(results: DropResults) -> list[PageSection]:
    figure = measured_scaling_figure(results.speedups)
    return [] if figure is None else [PageSection("Measured with several numbers of replicas", figures=[figure])]


def _measured(place: int, result: Mapping[str, Any]) -> PageSection:
    columns: dict[str, Any] = {
        "threshold, s": lambda one: number_cell(one["tau_s"], ".4g", missing="none"),
        "chosen by": lambda one: "the run" if one["own"] else "the measurement",
        "dropped: predicted": "predicted_rate:.1%",
        "dropped": "rate:.1%",
        "predicted": "predicted:.4f",
        "measured": "speedup:.4f",
        "difference": lambda one: percent(one["difference"], result["bar"]),
    }
    table = table_of(f"drop_measured_table_{place}", result["thresholds"], columns, searched=False)
    return PageSection("Measured", [_made(result)], tables=[table], figures=[speedup_figure(place, result)])


def _training(place: int, result: Mapping[str, Any]) -> PageSection:
    columns: dict[str, Any] = {
        "setting": "name",
        "final loss": lambda one: number_cell(sum(one["losses"]) / len(one["losses"]), ".4f"),
        "increase": "over_none:+.2%",
        "smallest": lambda one: number_cell(min(one["increases"]), "+.2%"),
        "largest": lambda one: number_cell(max(one["increases"]), "+.2%"),
        "beyond chance": _beyond_chance,
        "steps": "steps:,.0f",
        "samples": "samples:.1%",
        "time": "time:.1%",
    }
    table = table_of(f"drop_training_table_{place}", result["scores"], columns, searched=False)
    return PageSection("Training", [_made(result), PAPER], tables=[table], figures=loss_figures(place, result))


def _beyond_chance(one: Mapping[str, Any]) -> str:
    if not one["setting"]["rate"]:
        return "-"
    return "all seeds agree" if min(one["increases"]) > 0 or max(one["increases"]) < 0 else "no"


def _made(result: Mapping[str, Any]) -> str:
    machine = {**result["machine"], **result["machine"].get("versions", {})}
    return "; ".join(f"{key} {value}" for key, value in machine.items() if isinstance(value, str | int | float)) + "."
