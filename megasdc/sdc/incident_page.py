"""Page of an incident, which needs no network, and both reports in the run folder.

It shows first what happened where and what was done, then the instructions, then the evidence: what the referee found
of results that ranks disagree on, and heat maps of differing results by submodule and rank, small enough to read with
hundreds of both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from statistics import median

from megasdc.common.addresses import BACKWARD, FORWARD, PARAMETER, RECOMPUTE, REDUCED_GRAD, UPDATE, WEIGHT_GRAD
from megasdc.common.durable import write_when_room
from megasdc.common.errors import CorruptionError, StorageError
from megasdc.common.words import few, ranges
from megasdc.output.html import page_text
from megasdc.output.page import Cell, Fold, Page, PageSection, Table
from megasdc.sdc.incident import (
    INJECTED,
    WRITTEN,
    FlaggedRank,
    Incident,
    Opinion,
    RankPlace,
    RoundEvidence,
    StepFate,
    headline,
    how_often,
    incident_to_json,
    place_of,
)

MAX_ROWS, MAX_COLUMNS = 200, 48
SHADES = (
    "In the tables a number says how many results of a submodule differ on a rank; an empty cell: none. The more, the "
    "stronger the shade: up to a quarter of the largest, up to half, below the largest, the largest. A diamond and a "
    "frame mark where it began. Ranks with equal columns share one, neighbouring submodules with equal rows share one; "
    "each of them has the number shown."
)
_PARTS = {
    "Forward": (FORWARD, RECOMPUTE),
    "Backward": (BACKWARD, WEIGHT_GRAD),
    "Gradients, update and parameters": (REDUCED_GRAD, UPDATE, PARAMETER),
}
_TIERS = {
    "audit": "an audit: replicas computed the same micro-batch and did not agree",
    "recompute": "the activation recompute: a rank computed a forward result twice and got two values",
    "permuted": "a permuted replay: a rank computed a micro-batch with elements in other places and got other values",
    "rows": "the sums of a product's rows: one is off, and an element of it outside of what rounding allows",
    "tokens": "the comparison of a micro-batch with the file: the model was given something else",
    "place": "the comparison of the place in the data with what follows from the steps and their decisions",
    "parameters": "the comparison of parameters: replicas hold different values",
    "copies": "the comparison of parameters that every tensor rank holds whole: they hold different values",
    "reduction": "the sum of gradients over replicas, of which a slice was added up again",
    "state": "a part of the optimizer's state, which changed between two steps",
    "update": "a slice of the optimizer's update, which another rank, or this one elsewhere, computed again",
    "settings": "what an optimizer step used, hyperparameters and step counts: replicas have not the same",
    "norm": "the norm of the gradient: ranks used other norms, or not the one that their parts add up to",
    "clipping": "the clipping of the gradient: a rank used another factor",
    "copy": "the parameters that were gathered: they are not their owner's masters in the model's type",
    "golden": "the golden workload, which ranks computed beside the run: a result is not that of trusted hardware",
    "round": "the look at outer gradients before a round of Local-SGD: this replica's cannot be used",
}
_NOT_REPEATED = "Not reproduced: found once, in what cannot be repeated."
_VERDICTS = {
    "persistent": "Persistent: repeated, the same wrong value came each time.",
    "intermittent": "Intermittent: wrong again, repeated or since an earlier finding, but not always or not equally.",
    "not_reproduced": "Not reproduced: repeated, every result was right.",
    "inconclusive": "Inconclusive: results differ, but what was computed does not tell which rank is wrong.",
}
_BASES = {
    "relative to the majority": "Right is what the majority of replicas computed; no golden trace confirms it.",
    "golden trace": "Right is what the golden trace says, which trusted hardware computed.",
    "replay": "Right is what ranks computed when they repeated the micro-batch.",
    "referee": "Right is what fp64 says of the product, within the bound of the rounding of its type.",
    "own code in fp64": "Right is what the submodule's own code computes in fp64, but for an estimate of rounding.",
    "own recomputation": "The rank contradicts itself: its two results of the same work differ.",
    "own copy": "Right is what the rank itself had left there after the last step.",
    "file of the data": "Right is what the file of the prepared data holds, whose blocks have their checksums.",
    "mean of the replicas' gradients": "Right is the mean of what replicas gave; owner, adder or link made another.",
    "step and decisions": "Right is where the run's steps, and which micro-batches they took, lead from its start.",
    "own settings of the step before": "The rank contradicts itself: what no other rank changed since the step before.",
    "own results elsewhere": "The rank contradicts itself: its result changes when its elements are in other places.",
    "parts of the norm": "Right is what the squares of all gradients' blocks add up to.",
    "own norm": "Right is what follows from the norm that the rank itself used.",
    "own digest": "Right is what the rank itself had left there after the last step; it is lost.",
    "master shard": "Right is what the owners of the parameters keep in their fp32 master shards.",
    "copies on tensor ranks": "Right is what most tensor ranks hold of parameters that all of them hold whole.",
    "rounds of all replicas": "What is right is not known: weights are not those that all replicas began with, not "
    "finite, or their distance from them is far from the other replicas' and from its own of earlier rounds.",
}
_ENDS = f"all ranks end with exit code {CorruptionError.exit_code}."
_OUTCOMES = {
    "halted": f"Training was halted: nothing more was committed or saved, {_ENDS}",
    "isolated": "Nothing of the step was committed. The other replicas go on in the same processes, with the same "
    "samples a step, from the newest step in memory or on the disk that may be used; its ranks have ended.",
    "repaired": "The work was redone, all ranks agreed, and that result was used; training continues.",
    "committed": "The step was committed as it was, with what is wrong in it; training continues, and no checkpoint "
    "saved from then on will be verified.",
    "left out": "The round was made of the other replicas' weights alone. This one has taken them over, its moments "
    "have begun anew, and it takes part in later rounds.",
}


_HALTED: dict[StepFate | None, str] = {
    "not taken": f"Training was halted before the step was taken: {_ENDS}",
    "taken": f"Training was halted once the step was taken, so that parameters may hold what is wrong: {_ENDS}",
    "skipped": f"Training was halted in a step that the optimizer has skipped, so that no parameter changed: {_ENDS}",
}


_WRITTEN = {
    "state": "What had changed was put back from the rank's own copy before the step read it; training continues.",
    "update": "The update was computed again, and what is right was written in its place; training continues.",
}


def _outcome(incident: Incident) -> str:
    """Sentence on what was done."""
    if incident.done == "halted" and incident.script is not None:
        return _HALTED.get(incident.script.fate, _OUTCOMES["halted"])
    if incident.done == "repaired" and incident.tier in WRITTEN:
        return _WRITTEN[incident.tier]
    return _OUTCOMES[incident.done]


def write_incident(incident: Incident) -> tuple[Path, Path]:
    """Write both reports of an incident to its run folder, each atomically; earlier reports are kept.

    Returns:
        ``reports/incident_step_NNNNNNNN.json`` and ``.html`` in the run folder, with a number where that name is taken.

    Raises:
        StorageError: one cannot be written.
    """
    data, page = report_paths(incident.run_dir, incident.step)
    try:
        write_when_room(data, incident_to_json(incident))
        write_when_room(page, page_text(incident_page(incident, data.name)))
    except OSError as error:
        raise StorageError(
            f"the report of the corruption in step {incident.step} cannot be written into {data.parent}: {error}; it "
            "was: " + headline(incident)
        ) from error
    return data, page


def report_paths(run_dir: Path | str, step: int) -> tuple[Path, Path]:
    """Unused names for the JSON and HTML reports of an incident of this step."""
    folder, stem, number = Path(run_dir) / "reports", f"incident_step_{step:08d}", 1
    while True:
        name = stem if number == 1 else f"{stem}_{number}"
        paths = folder / f"{name}.json", folder / f"{name}.html"
        if not any(path.exists() for path in paths):
            return paths
        number += 1


def incident_page(incident: Incident, json_name: str) -> Page:
    """The page; ``json_name``: of the JSON file beside it."""
    policy = f"policy {incident.policy}, " if incident.round is None else ""
    sentences = [
        _outcome(incident),
        f"Run {incident.run_dir}, {policy}found by {_TIERS[incident.tier]}.",
        *([f"{INJECTED}."] if incident.injected else []),
    ]
    return Page(
        f"Corruption in step {incident.step}: " + " and ".join(incident.hosts),
        headline(incident),
        "different",
        sentences=sentences,
        sections=[
            PageSection("What to do", steps=[Fold(one.text, "\n".join(one.commands)) for one in incident.what_to_do]),
            _summary(incident),
            *(_evidence(incident) if incident.round is None else ()),
            _earlier(incident),
            *_environment(incident, json_name),
        ],
    )


def _summary(incident: Incident) -> PageSection:
    if incident.round is not None:
        return _summary_of_round(incident, incident.round)
    told = _VERDICTS[incident.verdict]
    if incident.verdict == "not_reproduced" and not any(one.repeats for one in incident.flagged):
        told = _NOT_REPEATED
    told += f" {_BASES[incident.basis]}" if incident.flagged or incident.owners else ""
    if owners := incident.owners:
        who, named = ("Rank", "owns the sum and is") if len(owners) == 1 else ("Ranks", "own sums and are")
        told += f" {who} {ranges(owners)} {named} not named alone, since no other rank has a right copy of the sum."
    flagged = [
        (
            *_place(one),
            one.verdict.replace("_", " "),
            *(str(place_of(incident.tier, one.first)), one.expected or "not known", one.got or "not known"),
            _repeats(one),
        )
        for one in incident.flagged
    ]
    disputed = [(*_place(one), str(one.first), one.got or "none") for one in incident.disputed]
    title = "Disputed: these ranks disagree, and it is not known which is right"
    if incident.owners:
        title = "Disputed: the sum is of what these ranks gave, and it is not known what made it wrong"
    first = ("verdict", "first wrong result", "expected", "got", "when repeated")
    tables = [
        Table("flagged", (*_PLACE, *first), flagged),
        Table("disputed", (*_PLACE, "first result that differs", "got"), disputed, title=title),
    ]
    return PageSection("What is known", [told], tables=tables)


def _summary_of_round(incident: Incident, found: RoundEvidence) -> PageSection:
    """What was looked at of a replica of Local-SGD, with the numbers."""
    ranks = Table(
        "replica", _PLACE, [_place(one) for one in incident.suspects], title=f"Ranks of replica {found.replica}"
    )
    told = [f"Replica {found.replica}, round {found.round}: {found.reason}.", _BASES[incident.basis]]
    if (look := found.look) is None:
        return PageSection("What is known", told, tables=[ranks])
    others = sorted(look.others.values())
    rows: list[tuple[object, ...]] = [
        ("weights", "finite" if look.finite else "NaN or Inf", "finite"),
        ("weights at the round's beginning", "as most" if look.as_others else "others", "those of most replicas"),
        ("local steps", look.steps, f"other replicas: {few(sorted(look.steps_of_others.values()), 8)}"),
    ]
    norm = f"{look.norm:.6g}" + ("" if look.finite else ", of what is finite")
    if others:
        span = f"median {median(others):.6g} of {len(others)}, from {others[0]:.6g} to {others[-1]:.6g}"
        rows.append(("norm of the outer gradient", norm, f"other replicas: {span}"))
    if look.own_mean is not None and look.own_deviation is not None:
        rows.append(
            (
                "norm of the outer gradient",
                norm,
                f"its last {look.own_rounds} rounds: mean {look.own_mean:.6g}, standard deviation "
                f"{look.own_deviation:.3g}",
            )
        )
    looked = Table("looked_at", ("what was looked at", "this replica", "compared with"), rows, searched=False)
    return PageSection("What is known", told, tables=[looked, ranks])


def _evidence(incident: Incident) -> Iterator[PageSection]:
    """What the referee found, and heat maps."""
    differing = [count for of in incident.evidence.differing.values() for by in of.values() for count in by.values()]
    counts = (
        f"{incident.evidence.compared:,} results were compared, {sum(differing):,} differ. Whatever is computed from a "
        "wrong result differs too: what matters is where it began."
    )
    told = [
        *([counts] if differing else []),  # checks of the optimizer's step count no results
        *(f"The referee on {one.address}: undecided: {one.reason}." for one in incident.opinions if one.worst is None),
    ]
    opinions = [_opinion(place, one) for place, one in enumerate(incident.opinions) if one.worst is not None]
    yield PageSection("Evidence", told, tables=opinions)
    if maps := build_heat_maps(incident):
        yield PageSection(sentences=[SHADES], tables=maps)


def _opinion(place: int, one: Opinion) -> Table:
    worst, is_estimate = one.worst, one.basis == "own code in fp64"
    assert worst is not None, "an element is outside"
    explains = (
        "rounding is estimated to make a difference of" if is_estimate else "rounding explains at most a difference of"
    )
    apart = ", of which right and wrong results are far apart multiples" if is_estimate else ""
    differ = "1 element that differs was" if one.elements == 1 else f"{one.elements:,} elements that differ were"
    rows = [("exact", str(worst.exact), "")]
    for rank, value in worst.values.items():
        rows.append((f"rank {rank}", str(value), "within the bound" if one.within[rank] else "outside: wrong"))
    return Table(
        f"referee_{place}",
        ("", "value", ""),
        rows,
        title=f"The referee on {one.address}",
        note=f"{differ} computed in fp64. Of the one farthest outside, row "
        f"{worst.element[0]}, column {worst.element[1]}, {explains} {worst.bound:.6g}{apart}.",
    )


def _earlier(incident: Incident) -> PageSection:
    rows = [
        (
            datetime.fromtimestamp(one.time, UTC).strftime("%Y-%m-%d %H:%M:%S"),
            *("" if one.step is None else one.step, one.rank, one.host, f"{one.kind} {one.name}"),
            "" if one.attempt is None else f"{one.attempt}{' (this one)' if one.attempt == incident.attempt else ''}",
            ", ".join(f"{name} {json.dumps(value, default=str)}" for name, value in one.fields.items()),
        )
        for one in incident.earlier
    ]
    told = [] if rows else ["None are known that may belong to this one."]
    if any(one.attempt != incident.attempt for one in incident.earlier):
        told.append("Some are of earlier starts in the same folder, whose devices and faults may be others.")
    if incident.not_read:
        told.append("Not all files of the run could be read for this report:")
    table = Table("earlier", ("time (UTC)", "step", "rank", "host", "what", "start", "more"), rows)
    return PageSection("Earlier events", told, items=incident.not_read, tables=[table])


def _environment(incident: Incident, json_name: str) -> Iterator[PageSection]:
    layout = ", ".join(f"{name} {size}" for name, size in incident.environment.layout.items())
    versions = ", ".join(f"{name} {version}" for name, version in incident.environment.versions.items())
    roles = {one.rank: "disputed" for one in incident.disputed} | {one.rank: "flagged" for one in incident.flagged}
    rows = [(*_place(one), roles.get(one.rank, "")) for one in incident.ranks]
    table = Table(
        "all_ranks",
        (*_PLACE, ""),
        rows,
        title="The rank" if len(rows) == 1 else f"All {len(rows)} ranks",
        complete=json_name,
    )
    yield PageSection("Environment", [f"{layout}, {incident.environment.precision}; {versions}."], tables=[table])
    yield PageSection(sentences=[f"All numbers are in {json_name}, in the same folder."])


_PLACE = ("rank", "host", "device", "dp", "pp", "tp")


def _place(one: RankPlace) -> tuple[int | str, ...]:
    return one.rank, one.host, one.device, one.dp_rank, one.pp_rank, one.tp_rank


def build_heat_maps(incident: Incident) -> list[Table]:
    """Tables of rank and submodule for each direction in which results differ.

    Rows are in execution order; a cell is of one submodule (or neighbours whose cells are all equal) on one rank (or
    several): the number of results that differ, of each; its look: the shade, 1 to 4 by the share of the largest
    number, and whether the first wrong result is here. A note states what is not shown.
    """
    maps = []
    ranks = sorted({one.rank for one in incident.ranks})
    for title, phases in _PARTS.items():
        counts = _sum_phases(incident.evidence.differing, phases)
        if counts:
            origins = {(one.first.fqn, one.rank) for one in incident.suspects if one.first.phase in phases}
            maps.append(_heat_map(f"{title} ({', '.join(phases)})", counts, ranks, origins))
    return maps


def _sum_phases(
    differing: Mapping[str, Mapping[str, Mapping[int, int]]], phases: tuple[str, ...]
) -> dict[str, dict[int, int]]:
    """Number of differing results over several phases, by submodule and rank; only counts above 0."""
    counts: dict[str, dict[int, int]] = {}
    for phase in phases:
        for fqn, by_rank in differing.get(phase, {}).items():
            for rank, count in by_rank.items():
                if count:
                    of_submodule = counts.setdefault(fqn, {})
                    of_submodule[rank] = of_submodule.get(rank, 0) + count
    return counts


def _heat_map(
    title: str, counts: dict[str, dict[int, int]], ranks: Sequence[int], origins: set[tuple[str, int]]
) -> Table:
    largest = max(count for by_rank in counts.values() for count in by_rank.values())
    alike: dict[tuple[tuple[int, bool], ...], list[int]] = {}
    for rank in ranks:
        column = tuple((by_rank.get(rank, 0), (fqn, rank) in origins) for fqn, by_rank in counts.items())
        alike.setdefault(column, []).append(rank)
    # If not all columns fit, those with an origin are kept first; in the table columns are ordered by rank.
    chosen = sorted(alike, key=lambda column: (not any(origin for _, origin in column), alike[column][0]))
    columns = sorted(chosen[:MAX_COLUMNS], key=lambda column: alike[column][0])
    rows = []
    table = zip(counts, zip(*columns, strict=True), strict=True)
    for values, members in groupby(table, key=lambda pair: pair[1]):
        names = [fqn for fqn, _ in members]
        label = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)})"
        rows.append([label, *(_heat_cell(count, largest, origin) for count, origin in values)])
    notes = []
    if len(alike) > MAX_COLUMNS:
        left = sum(len(alike[column]) for column in chosen[MAX_COLUMNS:])
        notes.append(f"{left} more ranks, whose columns differ from these, are not shown.")
    if len(rows) > MAX_ROWS:
        notes.append(f"{len(rows) - MAX_ROWS} more rows, of later results, are not shown.")
    headings = ("submodule", *(ranges(alike[column]) for column in columns))
    name = title.split(maxsplit=1)[0].strip(",").lower()
    return Table(name, headings, rows[:MAX_ROWS], title=title, note=" ".join(notes), searched=False)


def _heat_cell(count: int, largest: int, origin: bool) -> Cell:
    if not count:
        return Cell("")
    shade = 4 if count == largest else min(3, -(-4 * count // largest))
    return Cell(str(count), count, look=f"s{shade}{' origin' if origin else ''}")


def _repeats(one: FlaggedRank) -> str:
    if one.repeats == 0:
        return "not repeated"
    text = how_often(one.verdict, one.wrong_repeats, one.repeats)
    if one.rate_bound is not None:
        text += f"; at most {one.rate_bound:.1%} of its micro-batches are wrong (95 % confidence)"
    return text
