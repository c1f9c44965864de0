"""Pages of a study and of a sweep.

Of a study: where, when and how far results of the other replicas differ from the trusted replica's. Of a sweep: the
paper's table beside ours, figures, what was varied, limits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megasdc.common.words import duration
from megasdc.config.checks import replica_folder
from megasdc.lab.report import study_tables
from megasdc.lab.report.run_pages.facts import highlights, run_versions
from megasdc.lab.report.run_pages.figures.nodes import node_figures
from megasdc.lab.report.run_pages.figures.study import (
    bits_figure,
    burst_figure,
    distance_figure,
    mismatch_map,
    severity_figure,
    study_loss_figures,
)
from megasdc.lab.report.run_pages.figures.sweep import increases, sweep_figures
from megasdc.lab.studies.tables import StudySummary, describe_study, mismatch_rows, summarize_study, torn_note
from megasdc.lab.sweeps.ma_tables import node_tables
from megasdc.lab.sweeps.outcome import DONE, STATUSES
from megasdc.lab.sweeps.papers.tables import PAPER_TABLES, PaperRow
from megasdc.lab.sweeps.pei_metrics import EPSILON, CellScore, NodesScore
from megasdc.lab.sweeps.results import SweepResults, read_sweep
from megasdc.lab.sweeps.sweep_file import HEALTHY
from megasdc.lab.sweeps.table import SweepTable, tabulate
from megasdc.ops.run_folder.record import load_run
from megasdc.ops.run_folder.status import status_of
from megasdc.ops.run_folder.study_log import WHOLE, Line, read_study
from megasdc.output.figure import Figure
from megasdc.output.page import Cell, Page, PageSection, State, Table, number_cell, percent, plain_values, table_of

MODES = {
    "computation_sync": "each submodule's own result is compared element by element and overwritten by the trusted one",
    "parameter_sync": "gradients are compared, and after each step parameters and optimizer state are overwritten by "
    "the trusted ones",
    "free_run": "nothing is overwritten",
}
SAMPLES = 200
"""Maximum of single elements in the page; the CSV has all."""


def study_page(folder: Path, title: str | None = None) -> Page:
    """The page of a study, also of one in progress.

    Raises ``DataError`` where a file of the study is damaged.
    """
    summary = summarize_study(folder)
    told = describe_study(summary)
    trusted = load_run(replica_folder(folder, summary.trusted))
    status = status_of(trusted)
    name = title or f"Study {folder.resolve().name}"
    wrong = sum(row.mismatches for row in summary.mismatches)
    apart = any(row.worst or row.not_finite for row in summary.distances)
    equal = not wrong and not apart
    steps = f"{summary.steps:,}" if status.planned is None else f"{summary.steps:,} of {status.planned:,}"
    tiles = {"replicas": str(summary.replicas), "trusted": str(summary.trusted), "steps": steps}
    if summary.mismatches:
        compared = sum(row.elements for row in summary.mismatches)
        tiles |= {"elements compared": f"{compared:,}", "mismatches": f"{wrong:,}"}
    return Page(
        kind="study",
        title=name,
        verdict=f"{name}: {'no difference in any bit of what was compared' if equal else told[0]}.",
        state="same" if equal else "different",
        sentences=[
            f"Replica {summary.trusted}: {status.text}",
            f"Mode {summary.mode}: {MODES[summary.mode]}. Ma et al. 2025, arXiv 2502.12340.",
            *told[1:],
        ],
        tiles=tiles,
        notes=[*filter(None, [torn_note(summary)]), *trusted.notes],
        sections=[
            *_tables(summary, list(read_study(folder, "mismatch"))),
            PageSection("Figures", figures=_figures(folder, summary)),
            PageSection("Settings of the trusted replica", facts={**highlights(trusted), **run_versions(trusted)}),
        ],
        summary=plain_values(summary.as_dict()),
    )


def _figures(folder: Path, summary: StudySummary) -> list[Figure]:
    mismatches = list(read_study(folder, "mismatch"))
    rows = mismatch_rows([*read_study(folder, "compared"), *mismatches], "submodule")
    found: list[Figure | None] = []
    for replica in range(summary.replicas):
        own = [line for line in mismatches if line["replica"] == replica]
        found.append(mismatch_map(replica, rows))
        if own:
            found += [draw(replica, own) for draw in (burst_figure, severity_figure, bits_figure)]
    for quantity in ("gradient", "parameters"):
        lines: list[Line] = list(read_study(folder, quantity))
        if any(line["ratio"] != 0 for line in lines):
            found.append(distance_figure(quantity, lines))
    if losses := list(read_study(folder, "loss")):
        found += study_loss_figures(losses)
    return [one for one in found if one is not None]


def _tables(summary: StudySummary, mismatches: Sequence[Line]) -> list[PageSection]:
    whole_first = sorted(summary.distances, key=lambda row: row.fqn != WHOLE)
    found = {
        "Results compared": study_tables.mismatches(summary),
        "Gradients and parameters compared": study_tables.distances(whole_first),
        "Losses": study_tables.losses(summary),
        "Evaluation of the end models": study_tables.evaluations(summary),
        "Single wrong elements": _samples(mismatches),
    }
    return [PageSection(heading, tables=[table]) for heading, table in found.items() if table.rows]


def _samples(mismatches: Sequence[Line]) -> Table:
    """The recorded single elements, at most ``megasdc.study.sampled_elements`` of each wrong result."""
    names = ("replica", "rank", "step", "micro_batch", "fqn", "phase")
    rows = [
        (*(line[name] for name in names), place, trusted, value)
        for line in mismatches
        for place, trusted, value in line["samples"]
    ]
    headings = ("replica", "rank", "step", "micro-batch", "of", "phase", "element", "trusted value", "value")
    return Table("samples", headings, rows, ("replica", "rank", "phase"), shown=SAMPLES)


LIMITS = (
    "The nodes are simulated. Their faults are drawn from profiles: what was published of real nodes (how often "
    "results of a submodule are wrong, and by how much) is restated, the rest is assumed: which bits, which values, "
    "how bursts lie in time, whether errors depend on data, load or heat. So the sweep tells how training with these "
    "settings bears errors of such a rate and size. It does not tell how often real nodes err, nor which of them a "
    "setting would survive, and nothing of faults that no profile describes, such as those common to all nodes.",
    "Losses of another model, other data and fewer steps than the paper's cannot be set against the paper's losses. "
    "What can be compared is the direction: which setting is harmed, which is not, and what bounds cost the healthy "
    "run. A difference smaller than the spread over seeds is no finding, and with one seed the spread is not known.",
)
_HEALTHY_COLUMNS = ("cell", "healthy", "chance")
_NODE_COLUMNS = ("worst case", "increase", "its node", "worse", "diverged", "NaN", "failed")
_PAPER = ("paper: healthy", "paper: worst case", "paper: increase", "paper: worse", "paper: diverged")


def sweep_page(folder: Path, title: str | None = None) -> Page:
    """The page of a sweep; raises ``StorageError`` where the folder holds none, or its tables are not written yet."""
    results = read_sweep(folder)
    table = tabulate(results)
    size = f", size {table.size}" if table.size else ""
    name = title or f"Sweep {table.name}{size}"
    lost = [row for row in results.rows if row["status"] != DONE]
    said = results.sweep["sweep"]
    return Page(
        kind="sweep",
        title=name,
        verdict=f"{name}: {_verdict(table)}",
        state=_state(table),
        sentences=[said["description"]] if said["description"] else [],
        tiles=_tiles(results),
        notes=_notes(results),
        sections=[
            *_results(table),
            PageSection("What simulated faults cannot tell", LIMITS),
            PageSection("Runs that are not done", tables=[_lost(lost)])
            if lost
            else PageSection("Runs that are not done", ["None."]),
            PageSection("Figures", figures=[*node_figures(results, table.nodes), *sweep_figures(results, table)]),
            PageSection(
                "Settings", _how(results), _facts(results), tables=[_settings(results), _simulated(results.sweep)]
            ),
            PageSection("All runs", tables=[_runs(results)]),
        ],
        summary=plain_values(table.as_dict()),
    )


def sweep_table_page(table: SweepTable) -> Page:
    """What a sweep has found so far, for a terminal."""
    return Page(table.name, f"{table.name}: {_verdict(table)}", _state(table), sections=_results(table))


def _results(table: SweepTable) -> list[PageSection]:
    """Scores beside the paper's, and studies of nodes, where the sweep's runs are studies."""
    scores = [PageSection(*_paper_heading(table), tables=_scores(table))] if table.trained_scores else []
    return [*scores, *([PageSection("Studies of nodes", tables=node_tables(table.nodes))] if table.nodes else [])]


def _verdict(table: SweepTable) -> str:
    if not table.done:
        return f"no run has finished yet; there will be {table.planned:,} rows."
    scores = table.trained_scores.values()
    going = "" if table.done == table.planned else f"{table.done:,} of {table.planned:,} rows are there; "
    bad = f"worse than healthy by more than {EPSILON:.1%}, diverges or ends with NaN"
    harmed = sum(score.harmed for score in scores)
    if not scores:
        return f"{going}{len(table.nodes):,} studies of nodes, each kept equal to its trusted replica."
    return f"{going}in {harmed or 'none'} of {len(scores)} cells a node is {bad}."


def _state(table: SweepTable) -> State:
    """``same`` for a complete sweep without failed runs, else ``unsure``; a sweep is neither good nor bad."""
    failed = any(
        score.healthy_failed or score.published.failed or score.made_up.failed for score in table.scores.values()
    )
    return "same" if table.done == table.planned and not failed else "unsure"


def _tiles(results: SweepResults) -> dict[str, str]:
    counts = {status: sum(row["status"] == status for row in results.rows) for status in STATUSES}
    seconds = {row["run_id"]: row["seconds"] for row in results.rows}
    return {
        "rows": f"{len(results.rows):,} of {results.places:,}",
        **{status if status != "nan" else "NaN": f"{count:,}" for status, count in counts.items()},
        "seeds": str(len({row["seed"] for row in results.rows})),
        "time of all runs": duration(sum(seconds.values())),
    }


def _notes(results: SweepResults) -> list[str]:
    missing = results.places - len(results.rows)
    if not missing:
        return []
    return [f"{missing:,} of {results.places:,} rows are not there yet; numbers of their cells will change"]


def _paper_heading(table: SweepTable) -> tuple[str, list[str]]:
    sentences = [
        "Worst case: largest final loss over unhealthy nodes that are done, and its increase over the healthy one. "
        f"Worse: nodes with an increase above {EPSILON:.1%}. Diverged and NaN nodes are counted apart. With several "
        "seeds: means, and the standard deviation over seeds. Chance: how far a control, a run that one low bit was "
        "changed in once, parts from the healthy one; what is smaller is no finding. Made up: nodes that follow no "
        "published figures, apart."
    ]
    for name in table.tables:
        sentences.append(f"The paper: {PAPER_TABLES[name].title}; {PAPER_TABLES[name].source}.")
    return ("The paper's table beside ours" if table.tables else "Cells"), sentences


def _scores(table: SweepTable) -> list[Table]:
    """Nodes that follow published figures beside the paper's numbers; made-up ones in a table of their own."""
    scores = table.trained_scores.items()
    rows = [
        (
            cell,
            *_healthy(score),
            *_nodes(score.published, score),
            *(_theirs(table.papers[cell]) if table.tables else ()),
        )
        for cell, score in scores
    ]
    headings = (*_HEALTHY_COLUMNS, *_NODE_COLUMNS, *(_PAPER if table.tables else ()))
    found = [Table("cells", headings, rows, searched=False)]
    if any(score.made_up.nodes for _, score in scores):
        apart = [(cell, *_nodes(score.made_up, score)) for cell, score in scores]
        headings = ("cell", f"made-up nodes: {_NODE_COLUMNS[0]}", *_NODE_COLUMNS[1:])
        found.append(Table("made_up_nodes", headings, apart, searched=False))
    return found


def _healthy(score: CellScore) -> tuple[Cell, ...]:
    healthy = number_cell(score.healthy, ".4f", missing="not done")
    spread = None if score.healthy_spread is None else f"{score.healthy_spread:.4f}"
    return _with_spread(healthy, spread), number_cell(score.chance, ".3%")


def _nodes(score: NodesScore, of: CellScore) -> tuple[Cell, ...]:
    spread = None if score.worst_spread is None else f"{score.worst_spread:.3%}"
    failed = (*((f"healthy ({of.healthy_failed})",) if of.healthy_failed else ()), *score.failed)
    return (
        number_cell(score.worst, ".4f"),
        _with_spread(percent(score.worst_increase, EPSILON), spread),
        Cell(score.worst_node or "-"),
        Cell(f"{score.worse} of {score.nodes}", float(score.worse), look="bad" if score.worse else ""),
        *(
            Cell(", ".join(nodes) or "0", float(len(nodes)), look="bad" if nodes else "")
            for nodes in (score.diverged, score.nan, failed)
        ),
    )


def _with_spread(cell: Cell, spread: str | None) -> Cell:
    return cell if spread is None else Cell(f"{cell.text} ± {spread}", cell.value, look=cell.look)


def _theirs(row: PaperRow | None) -> tuple[Cell, ...]:
    if row is None:
        return tuple(Cell("-") for _ in _PAPER)
    worst = Cell("diverge") if row.worst is None else number_cell(row.worst, "g")
    increase = Cell("-") if row.increase is None else number_cell(row.increase, "+.2%")
    return number_cell(row.healthy, "g"), worst, increase, number_cell(row.worse, "d"), number_cell(row.diverged, "d")


def _lost(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns: dict[str, Any] = {
        "cell": "cell",
        "node": "node",
        "seed": "seed:d",
        "ended": lambda row: Cell(row["status"], look="bad"),
        "last step": "steps",
        "why": "reason",
        "folder": _folder,
    }
    return table_of("not_done", rows, columns, filters=("cell", "node", "ended"))


def _folder(row: Mapping[str, Any]) -> str:
    return f"runs/{row['run_id']}"


def _how(results: SweepResults) -> list[str]:
    said = results.sweep["sweep"]
    common = ", ".join(f"{path} {json.dumps(value)}" for path, value in said["set"].items())
    return [f"All runs: {said['base']}" + (f", with {common}" if common else "") + "."]


def _facts(results: SweepResults) -> dict[str, str]:
    said = results.sweep["sweep"]
    decisive = said["decisive"]
    above = ", or above that of token frequencies" if said["diverged_above_frequencies"] else ""
    seeds = ", ".join(map(str, said["seeds"]))
    if decisive["cells"]:
        seeds += f"; {', '.join(map(str, decisive['seeds']))} in {', '.join(decisive['cells'])}"
    seconds = sorted({row["run_id"]: row["seconds"] for row in results.rows}.values())
    return {
        "seeds": seeds,
        "ranks of a run": str(said["ranks"]),
        "final loss": f"mean over the last {said['final_steps']} steps",
        "diverged": f"final loss {said['diverged_rise']:.0%} above the lowest that it had reached{above}",
        "time of a run": f"median {duration(seconds[len(seconds) // 2])}, longest {duration(seconds[-1])}"
        if seconds
        else "-",
        "versions": ", ".join(f"{name} {version}" for name, version in results.sweep["versions"].items()),
        "folder": str(results.folder),
    }


def _settings(results: SweepResults) -> Table:
    varied = results.sweep["varied"]
    by_cell = {place["cell"]: place for place in results.sweep["places"]}
    rows = [
        (cell, place["start"], *(_value(place["settings"].get(path)) for path in varied))
        for cell, place in by_cell.items()
    ]
    return Table("cell_settings", ("cell", "start", *varied), rows, searched=False)


def _value(value: Any) -> Cell:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number_cell(float(value), "g")
    return Cell("-" if value is None else json.dumps(value))


def _simulated(sweep: Mapping[str, Any]) -> Table:
    rows = []
    for one in sweep["sweep"]["nodes"]:
        profile = sweep["profiles"].get(one["profile"], {})
        published = ", ".join(f"{name} {value:g}" for name, value in profile.get("published", {}).items())
        rows.append(
            (
                _labelled(one["name"], one),
                profile.get("description", "-"),
                published.replace("_", " ") or "-",
                " ".join(profile.get("assumed", [])) or "-",
                _faults([*profile.get("faults", []), *one["faults"]]),
                number_cell(one["seed"], "d"),
            )
        )
    headings = ("node", "what it is", "published", "assumed", "faults", "seed")
    return Table("nodes", headings, rows, searched=False)


def _faults(faults: Sequence[Mapping[str, Any]]) -> str:
    places = dict.fromkeys(f"{one['kind']} in {one['phase']} of {one['submodule']}" for one in faults)
    return "; ".join(places) or "-"


def _runs(results: SweepResults) -> Table:
    rise = increases(results.rows)
    columns: dict[str, Any] = {
        "cell": "cell",
        "node": _node,
        "profile": lambda row: row["profile"] or "-",
        "seed": "seed:d",
        "ended": lambda row: Cell(row["status"], look="" if row["status"] == DONE else "bad"),
        "final loss": "final_loss:.4f",
        "increase": lambda row: percent(rise.get((row["cell"], row["node"], row["seed"])), EPSILON),
        "evaluation loss": "eval_loss:.4f",
        "steps": "steps",
        "skipped": "skipped_steps",
        "seconds": "seconds:,.1f",
        "folder": _folder,
    }
    return table_of("all_runs", results.rows, columns, filters=("cell", "node", "ended"))


def _node(row: Mapping[str, Any]) -> Cell:
    trusted = row["node"] == HEALTHY or row["control"]
    return Cell(_labelled(row["node"], row), look="good" if trusted else "")


def _labelled(name: str, of: Mapping[str, Any]) -> str:
    """A node's name, marked where it is a control or made up; ``of``: its row or its entry in the sweep."""
    kind = "control" if of["control"] else "made up" if of["made_up"] else ""
    return f"{name} ({kind})" if kind else name
