"""Data of a step as a page: a row for each part of a document, by replica, micro-batch and sample."""

from __future__ import annotations

from megasdc.lab.triage.step_data import MicroBatchData, SampleData, StepData, TextPart
from megasdc.output.page import Cell, Page, PageSection, Table

SHOWN_CHARACTERS = 60
"""Maximum of the text of a part in a table."""


def step_data_page(result: StepData) -> Page:
    """The page of the documents of a step."""
    has_text = any(part.text is not None for *_, part in _parts(result))
    headings = ["replica", "micro-batch", "sample", "document", "tokens", "of source", "its document"]
    rows = [[*_row(*place), *([_shown(place[-1].text or "")] if has_text else [])] for place in _parts(result)]
    files = list(dict.fromkeys(sample.file for batch in result.micro_batches for sample in batch.samples))
    table = Table(
        "documents",
        [*headings, *(["text"] if has_text else [])],
        rows,
        title=f"documents of {', '.join(files)}",
        note="sample: its position in the stream; tokens: of the document, the first is 0; the last token of a sample "
        "is a label alone, and the first token of another sample",
    )
    return Page(
        title="Data of a step",
        verdict=f"step {result.step} of {result.run}: {_counted(result)}",
        sentences=_sentences(result),
        notes=result.notes,
        sections=[PageSection(tables=[table])],
    )


def _counted(result: StepData) -> str:
    size = result.micro_batch_size
    return f"{result.replicas} replica(s) with {result.planned} planned micro-batch(es) of {size} sample(s)"


def _sentences(result: StepData) -> list[str]:
    found = []
    if result.source is not None:
        found.append(f"The step is audited: micro-batch 0 of replica {result.source} is that of all replicas.")
    dropped = [batch for batch in result.micro_batches if batch.dropped]
    if dropped:
        places = ", ".join(f"{batch.micro_batch} of replica {batch.replica}" for batch in dropped)
        later = "given up" if result.given_up else "in a later step"
        found.append(f"Dropped, so not trained on in this step: micro-batch {places}; their samples are {later}.")
    since = f"those saved after step {result.since}" if result.since else "the beginning of the run"
    agrees = "" if result.confirmed_by is None else f"; the checkpoint of step {result.confirmed_by} agrees"
    found.append(f"Positions in the data were followed from {since}{agrees}.")
    return found


def _parts(result: StepData) -> list[tuple[MicroBatchData, SampleData, TextPart]]:
    return [
        (batch, sample, part) for batch in result.micro_batches for sample in batch.samples for part in sample.parts
    ]


def _row(batch: MicroBatchData, sample: SampleData, part: TextPart) -> list[object]:
    state = " (dropped)" if batch.dropped else " (of all replicas)" if batch.shared else ""
    last = part.first_token + part.num_tokens - 1
    return [
        batch.replica,
        Cell(f"{batch.micro_batch}{state}", float(batch.micro_batch)),
        sample.position,
        part.document,
        Cell(f"{part.first_token} to {last}"),
        part.source,
        part.source_document,
    ]


def _shown(text: str) -> str:
    plain = repr(text[: SHOWN_CHARACTERS + 1])[1:-1]
    return plain if len(plain) <= SHOWN_CHARACTERS else f"{plain[:SHOWN_CHARACTERS]}..."
