"""Page of a launch of replicas of Local-SGD: its rounds, and the runs of all replicas side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megasdc.common.errors import DataError
from megasdc.lab.report.run_pages.facts import highlights, places, run_versions
from megasdc.lab.report.run_pages.figures.compare import together
from megasdc.lab.report.run_pages.run_page import incidents_table, rounds_section, summary_of
from megasdc.ops.run_folder.marks import INCIDENT, counts_of, marks_of
from megasdc.ops.run_folder.record import OnProgress, RunRecord, is_run, load_run
from megasdc.ops.run_folder.replicas import RoundsSummary, replica_folders, summarize_rounds
from megasdc.ops.run_folder.status import status_of
from megasdc.output.page import Cell, Page, PageSection, Table, alarming, number_cell, plain_values, table_of

_CURVES = (
    ("losses", "Training loss, nats per token", "train/loss"),
    ("eval_losses", "Evaluation loss, nats per token", "eval/loss"),
    ("gradient_norms", "Gradient norm", "train/grad_norm"),
    ("throughput", "Throughput, tokens per second", "speed/tokens_per_s"),
)
"""Name, title and metric of each figure."""


def replicas_page(folder: Path, out: Path, title: str | None = None, on_progress: OnProgress | None = None) -> Page:
    """The page of a launch's folder; ``out``: its path, for relative links.

    Raises:
        DataError: none of its replicas has begun here.
    """
    runs = {one: load_run(path, on_progress) for one, path in replica_folders(folder).items() if is_run(path)}
    summary = summarize_rounds(folder)
    if not runs or summary is None:
        raise DataError(f"{folder} holds replicas of Local-SGD, none of which has begun here")
    names = {f"replica {one}": run for one, run in runs.items()}
    name = title or f"Run {folder.resolve().name}"
    counts = {one: counts_of(marks_of(run)) for one, run in runs.items()}
    incidents = sum(of.get(INCIDENT, 0) for of in counts.values())
    states = {status_of(run).state for run in runs.values()}
    first = next(iter(runs.values()))
    return Page(
        kind="replicas",
        title=name,
        verdict=f"{name}: {_verdict(summary, runs)}",
        state="different" if incidents or "failed" in states else "same" if states == {"done"} else "unsure",
        sentences=[f"Folder {folder}, with a run folder for each replica."],
        tiles=_tiles(summary, incidents),
        notes=[f"{name}: {note}" for name, run in names.items() for note in run.notes],
        sections=[
            *_incidents(names, out),
            PageSection("Replicas", tables=[_side_by_side(summary, runs)]),
            *rounds_section(folder, summary, names),
            PageSection("Over the steps", figures=[*filter(None, (together(*one, names) for one in _CURVES))]),
            PageSection("Configuration", facts=highlights(first)),
            PageSection("Where and with what", tables=[_places(names)]),
        ],
        summary=plain_values(
            {
                "run": str(folder),
                "rounds": asdict(summary),
                "runs": [
                    {"replica": one, **summary_of(run, status_of(run), marks_of(run))} for one, run in runs.items()
                ],
            }
        ),
    )


def _verdict(summary: RoundsSummary, runs: Mapping[int, RunRecord]) -> str:
    planned = "" if summary.planned_rounds is None else f" of {summary.planned_rounds:,}"
    texts = {one: status_of(run).text.rstrip(".") for one, run in runs.items()}
    alike = set(texts.values())
    states = alike.pop() if len(alike) == 1 else "; ".join(f"replica {one} {text}" for one, text in texts.items())
    rounds = f"{summary.rounds:,}{planned} rounds of {summary.replicas} replicas"
    times = len(summary.left_out)
    return f"{rounds}; {states}; a replica was left out {times:,} time{'' if times == 1 else 's'}."


def _tiles(summary: RoundsSummary, incidents: int) -> dict[str, str]:
    planned = "" if summary.planned_rounds is None else f" of {summary.planned_rounds:,}"
    tiles = {"rounds": f"{summary.rounds:,}{planned}", "replicas": str(summary.replicas), "incidents": str(incidents)}
    tiles["times left out"] = f"{len(summary.left_out):,}"
    if summary.fetched_bytes is not None:
        tiles["fetched from other replicas"] = f"{summary.fetched_bytes / 1e6:,.1f} MB"
    if summary.waited_s is not None:
        tiles["waited for others, all replicas"] = f"{summary.waited_s:,.1f} s"
    if summary.drop_share:
        tiles["micro-batches dropped"] = f"{summary.drop_share:.1%}"
    return tiles


def _incidents(names: Mapping[str, RunRecord], out: Path) -> list[PageSection]:
    tables = []
    for place, (name, run) in enumerate(names.items()):
        if run.incidents:
            tables.append(replace(incidents_table(run, out), name=f"incidents_{place}", title=name))
    return [PageSection("Incidents", tables=tables)] if tables else []


def _side_by_side(summary: RoundsSummary, runs: Mapping[int, RunRecord]) -> Table:
    def last(run: RunRecord | None, metric: str, form: str) -> Cell:
        series = None if run is None else run.series.get(metric)
        return number_cell(None if series is None else float(series.values[-1]), form)

    def state(run: RunRecord | None) -> Cell:
        found = "its folder is not here" if run is None else status_of(run).state
        return Cell(found, look="bad" if found == "failed" else "")

    columns: dict[str, Any] = {
        "replica": "replica",
        "state": lambda one: state(runs.get(one.replica)),
        "step": lambda one: status_of(runs[one.replica]).step if one.replica in runs else None,
        "rounds": "rounds",
        "left out": lambda one: alarming(sum(out.replica == one.replica for out in summary.left_out)),
        "tokens in rounds": "tokens",
        "loss": lambda one: last(runs.get(one.replica), "train/loss", ".4f"),
        "evaluation loss": lambda one: last(runs.get(one.replica), "eval/loss", ".4f"),
        "tokens per second": lambda one: last(runs.get(one.replica), "speed/tokens_per_s", ",.0f"),
        "fetched, MB": lambda one: number_cell(
            None if one.fetched_bytes is None else one.fetched_bytes / 1e6, ",.1f", missing="-"
        ),
        "waited, s": lambda one: number_cell(one.waited_s, ",.1f"),
        "folder": "run_dir",
    }
    return table_of("replicas", summary.of_replicas, columns, filters=("state",))


def _places(names: Mapping[str, RunRecord]) -> Table:
    rows = []
    for name, run in names.items():
        found = places(run)
        told = ", ".join(f"{package} {version}" for package, version in run_versions(run).items())
        rows.append((name, *(found.get(key, "-") for key in ("layout", "hosts")), told or "-"))
    return Table("places", ("replica", "layout", "hosts", "versions"), rows, searched=False)
