"""Result of a triage as a page: the verdict, what was compared, documents with their losses, gradients by parameter."""

from __future__ import annotations

from megasdc.common.words import ranges
from megasdc.lab.triage.conclusion import StepComparison, Verdict
from megasdc.lab.triage.step_data import SampleData
from megasdc.lab.triage.step_data_page import SHOWN_CHARACTERS
from megasdc.lab.triage.triage import Triage
from megasdc.metrics.writer import ParameterDetails
from megasdc.output.page import Cell, Page, PageSection, State, Table, number_cell

NAMED = 3
"""Maximum of samples in the sentences."""
_STATES: dict[Verdict, State] = {
    "hardware": "different",
    "data": "different",
    "optimizer": "different",
    "nothing": "same",
    "inconclusive": "unsure",
}


def triage_page(result: Triage, limit: int) -> Page:
    """The page of a triage; ``limit``: maximum of rows of a table on a terminal."""
    since = f"the checkpoint of step {result.since}" if result.since else "the run's beginning"
    hosts = " and ".join(dict.fromkeys(", ".join(one) for one in result.hosts))
    facts = {
        "replayed": f"from {since} on {hosts}, in {result.folder}",
        "second replay": _compared(result.evidence.replays),
        "recorded run": _compared(result.evidence.recorded),
    }
    return Page(
        title="Triage of a step",
        verdict=f"step {result.step} of {result.run}: {result.conclusion.verdict}",
        state=_STATES[result.conclusion.verdict],
        sentences=[*result.conclusion.because, *_far_samples(result)],
        notes=result.data.notes,
        sections=[
            PageSection(facts=facts),
            PageSection(tables=[_documents(result, limit), _parameters(result, limit), _devices(result)]),
        ],
    )


def _compared(difference: StepComparison) -> str:
    told = f"{difference.compared:,} values compared, {difference.first or 'all equal'}"
    if not difference.compared:
        told = "nothing to compare"
    return f"{told}; {difference.note}" if difference.note else told


def _far_samples(result: Triage) -> list[str]:
    """A sentence for each of the first samples whose loss is far from the others'."""
    batches = {(one.replica, one.micro_batch): one.samples for one in result.data.micro_batches}
    found = []
    for one in result.evidence.samples[:NAMED]:
        replica, micro_batch, place = one.place
        sample = batches[replica, micro_batch][place]
        found.append(
            f"Sample {sample.position} (replica {replica}, micro-batch {micro_batch}) has loss {one.loss:.4g}, usual "
            f"is {one.usual:.4g}: document {_named(sample)}."
        )
    return found


def _named(sample: SampleData) -> str:
    return ", ".join(f"{part.source_document} of {part.source}" for part in sample.parts)


def _documents(result: Triage, limit: int) -> Table:
    losses = {}
    for one in [] if result.step_details is None else result.step_details.samples:
        losses.update({(one.replica, one.micro_batch, place): loss for place, loss in enumerate(one.losses)})
    far = {one.place: one.deviations for one in result.evidence.samples}
    rows = []
    for batch in result.data.micro_batches:
        for place, sample in enumerate(batch.samples):
            at = (batch.replica, batch.micro_batch, place)
            documents = _named(sample)
            text = repr("".join(part.text or "" for part in sample.parts)[:SHOWN_CHARACTERS])[1:-1]
            loss = number_cell(
                losses.get(at), look="bad" if at in far else "", missing="dropped" if batch.dropped else "-"
            )
            rows.append((*at[:2], sample.position, loss, number_cell(far.get(at), "+.1f"), documents, text))
    rows.sort(key=lambda row: -abs(row[4].value or 0))
    return Table(
        "documents",
        ("replica", "micro-batch", "sample", "loss", "deviations", "documents", "text"),
        rows,
        title="samples, those whose loss is far from the others' first",
        listed=limit,
    )


def _parameters(result: Triage, limit: int) -> Table:
    large = {one.name: one for one in reversed(result.evidence.updates or ())}
    found = {} if result.step_details is None else result.step_details.parameters

    def key(item: tuple[str, ParameterDetails]) -> tuple[float, float]:
        own = large.get(item[0])
        return (0.0 if own is None else -own.times, -item[1].gradient_norm)

    rows = [
        (
            name,
            one.gradient_norm,
            one.largest_gradient,
            one.non_finite,
            number_cell(one.update_norm / one.weight_norm if one.weight_norm else None),
            Cell("") if name not in large else Cell(f"{large[name].what} {large[name].times:.3g} times the usual"),
        )
        for name, one in sorted(found.items(), key=key)
    ]
    headings = ("parameter", "gradient norm", "largest element", "NaN, Inf", "update / weight", "large")
    return Table("parameters", headings, rows, title="gradients before bounds and clip", listed=limit)


def _devices(result: Triage) -> Table:
    rows = [
        (
            one.node,
            ranges(one.ranks),
            one.name,
            one.verdict,
            one.text,
            ", ".join(f"{name} {count}" for name, count in one.counters.items()),
        )
        for one in result.devices
    ]
    headings = ("node", "ranks", "device", "verdict", "because", "counters since the start")
    return Table("devices", headings, rows, title="devices of the run at that step: context, no proof")
