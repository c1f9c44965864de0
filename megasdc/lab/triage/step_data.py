"""Documents that every replica and micro-batch of a step is trained on."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megasdc.checkpoint.manifest import read_universal_manifest
from megasdc.common.errors import ConfigError, DataError
from megasdc.common.origin import CONFIG_FILE
from megasdc.config.checks import check_layout
from megasdc.config.data import DataSection
from megasdc.config.load import RunConfig, parse_config
from megasdc.data.dataset import BlendedTokens, TokenDataset, build_split, verify_section_data
from megasdc.data.manifest import TOKENIZER_FOLDER, DataManifest
from megasdc.data.merge import DocumentOrigins
from megasdc.data.position import StepWork, planned_positions
from megasdc.data.tokenizer import Tokenizer, load_tokenizer
from megasdc.dropcompute.gate import DECISIONS_FILE, StepDecisions, read_decisions
from megasdc.lab.triage.history import RunHistory, RunStart, read_history
from megasdc.lab.triage.positions import RunPast, follow_positions
from megasdc.lab.triage.step_settings import settings_of_starts
from megasdc.metrics.writer import read_metrics
from megasdc.train.checkpointer import checkpoint_folder


@dataclass(frozen=True)
class TextPart:
    """Consecutive tokens of one document.

    Args:
        document: its number in the file of the split, the first is 0.
        first_token: number in the document, the first is 0.
        num_tokens: of the part.
        source: that `prepare-data` read it from.
        source_document: its number among the documents read there, the first is 0.
        text: of the part; None: not asked for.
    """

    document: int
    first_token: int
    num_tokens: int
    source: str
    source_document: int
    text: str | None = None


@dataclass(frozen=True)
class SampleData:
    """One sample: s tokens and the label of the last one.

    Args:
        position: in the training stream of the run.
        file: of the tokens.
        file_position: in the stream of that file alone; another one only in a blend.
        epoch: of that file, the first is 0.
        tokens: [s + 1]; token k + 1 is the label of token k.
        parts: of documents, in order.
    """

    position: int
    file: str
    file_position: int
    epoch: int
    tokens: list[int]
    parts: list[TextPart]


@dataclass(frozen=True)
class MicroBatchData:
    """A micro-batch of one replica; ``dropped``: planned and not started; ``shared``: all replicas compute it."""

    replica: int
    micro_batch: int
    dropped: bool
    shared: bool
    samples: list[SampleData]


@dataclass(frozen=True)
class StepData:
    """What a step is trained on.

    Args:
        run: folder, or file of the configuration.
        source: replica whose first micro-batch all replicas compute, in an audited step; None: each computes its own.
        since: step of the saved state from which the positions were followed, 0: the run's beginning.
        confirmed_by: step of the next checkpoint, which agrees with them; None: there is none.
        given_up: samples of dropped micro-batches are not used in the next step.
        micro_batches: those asked for, by replica and number.
        notes: what is not known for sure, a sentence each.
    """

    run: str
    step: int
    replicas: int
    micro_batch_size: int
    planned: int
    source: int | None
    since: int
    confirmed_by: int | None
    given_up: bool
    micro_batches: list[MicroBatchData]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Wanted:
    """What of a step is wanted: replicas and micro-batches, empty for all; ``text``: with the text of the documents."""

    step: int
    replicas: Collection[int] = ()
    micro_batches: Collection[int] = ()
    text: bool = False


def data_of_run(folder: Path, wanted: Wanted, overrides: Sequence[str] = ()) -> StepData:
    """Find the data of a step of a run, also of one that is to come.

    Args:
        folder: the run folder.
        overrides: texts ``a.b.c=value`` for its configuration, of keys below ``megasdc.data``.

    Raises:
        ConfigError: an override is not of the data.
        DataError: the folder holds no run, the step is not one of its steps, or files of the run or the data are
            missing or damaged.
        CheckpointError: the data are not those of the run.
    """
    if other := [text for text in overrides if not text.startswith("megasdc.data.")]:
        problems = [f"{text}: has no effect here; only megasdc.data may be elsewhere." for text in other]
        raise ConfigError(problems, "--set")
    config, past = read_past(folder, overrides)
    last, notes = past.last_step, list(past.history.notes)
    steps = max(config.megasdc.training.steps, last)
    if wanted.step > steps:
        raise DataError(f"step {wanted.step} was asked for, {folder} has steps up to {steps}")
    if wanted.step > last:
        drops = ", with nothing dropped" if past.settings[-1].drops.enabled else ""
        notes.append(f"step {wanted.step} is not known to have been run yet: this is what is planned{drops}")
    found = _data_of(config, past, wanted, notes)
    if found.since == 0 and found.confirmed_by is None:
        found.notes.append("no checkpoint is left that says whether the data are still those that the run used")
    return found


def read_past(folder: Path, overrides: Sequence[str] = ()) -> tuple[RunConfig, RunPast]:
    """Read the configuration of a run's last start, and what is known of its steps; errors as of ``data_of_run``."""
    config = parse_config(_read_resolved(folder), overrides, str(folder / CONFIG_FILE), stored=True)
    if config.megasdc.study.replicas is not None:
        raise DataError(f"{folder} holds a study of several runs; give one of its folders replica_K")
    history, section = read_history(folder), config.megasdc.checkpoint
    settings = settings_of_starts(config, history.starts)
    decisions: dict[int, StepDecisions] = {}
    if any(one.drops.enabled for one in settings):
        try:
            decisions = read_decisions(folder / DECISIONS_FILE, settings[-1].data, None)
        except ConfigError as error:
            raise DataError(f"{folder}: which micro-batches were dropped is not known: {error.problems[0]}") from error
    checkpoints = checkpoint_folder(config)
    if section.folder is None:
        checkpoints = folder / checkpoints.name  # the run may have been moved
    past = RunPast(
        name=str(folder),
        history=history,
        settings=settings,
        decisions=decisions,
        checkpoints=checkpoints,
        without_loader="loader" in section.universal_without,
        rows=read_metrics(folder),
    )
    return config, past


def data_of_plan(config: RunConfig, world_size: int, wanted: Wanted) -> StepData:
    """Find the data of a step of a run that would begin with this configuration.

    Args:
        world_size: number of ranks.

    Raises:
        ConfigError: the layout does not fit.
        DataError: the step is not one of its steps, or the data are missing or damaged.
        CheckpointError: its universal checkpoint is damaged, or of other data.
    """
    sections, name = config.megasdc, str(config.source)
    layout = check_layout(config, world_size)
    universal = sections.checkpoint.universal
    start = RunStart(0, layout.data) if universal is None else _universal_start(universal, layout.data)
    replayed = sections.drop_compute.replay_decisions if sections.drop_compute.enabled else None
    past = RunPast(
        name,
        RunHistory([start]),
        settings_of_starts(config, [start]),
        {} if replayed is None else read_decisions(replayed, layout.data, layout.accumulation_steps),
        checkpoint_folder(config),
        "loader" in sections.checkpoint.universal_without,
    )
    if wanted.step > sections.training.steps:
        raise DataError(f"step {wanted.step} was asked for, {name} has {sections.training.steps} steps")
    drops = " with nothing dropped" if sections.drop_compute.enabled and replayed is None else ""
    return _data_of(config, past, wanted, [f"this is what is planned{drops}; audits on request are not known"])


def _read_resolved(folder: Path) -> dict[str, Any]:
    try:
        raw = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(
            f"{folder} holds no run: {CONFIG_FILE} is missing; give a folder that megasdc.logging.run_dir names, of "
            "replicas one of its folders replica_K"
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / CONFIG_FILE} cannot be read: {error}; copy the run folder again") from error
    if not isinstance(raw, dict):
        raise DataError(f"{folder / CONFIG_FILE} is damaged: it holds no object; copy the run folder again")
    return raw


def _universal_start(folder: str, data: int) -> RunStart:
    return RunStart(read_universal_manifest(Path(folder)).step, data, folder)


def _data_of(config: RunConfig, past: RunPast, wanted: Wanted, notes: list[str]) -> StepData:
    section, step = config.megasdc.data, wanted.step
    _check_folders(section, past.name)
    manifests = verify_section_data(section)
    stream = build_split(section, manifests[0].tokenizer.vocab_size, "train", 1)
    epoch = stream.samples_per_epoch if isinstance(stream, TokenDataset) else None
    positions = follow_positions(past, step, stream, epoch, notes)
    work = past.work(step)
    planned = planned_positions(positions.before, work, epoch)
    _check_wanted(wanted, work, past.name)
    stream.extend(1 + max(position for replica in planned for batch in replica for position in batch))
    reader = _Reader(stream, section, manifests, wanted.text)
    return StepData(
        run=past.name,
        step=step,
        replicas=len(planned),
        micro_batch_size=work.size,
        planned=work.planned,
        source=work.source,
        since=positions.since,
        confirmed_by=positions.confirmed_by,
        given_up=work.given_up,
        micro_batches=list(_micro_batches(planned, work, wanted, reader)),
        notes=notes,
    )


def _micro_batches(
    planned: list[list[list[int]]], work: StepWork, wanted: Wanted, reader: _Reader
) -> Iterator[MicroBatchData]:
    for replica, batches in enumerate(planned):
        for number, positions in enumerate(batches):
            if (replica in wanted.replicas or not wanted.replicas) and (
                number in wanted.micro_batches or not wanted.micro_batches
            ):
                yield MicroBatchData(
                    replica,
                    number,
                    dropped=number >= work.completed[replica],
                    shared=number == 0 and work.source is not None,
                    samples=[reader.sample(position) for position in positions],
                )


class _Reader:
    """Reads samples with their documents; ``text``: with their text."""

    def __init__(
        self, stream: TokenDataset | BlendedTokens, section: DataSection, manifests: list[DataManifest], text: bool
    ) -> None:
        self._stream = stream
        self._origins = [DocumentOrigins(manifest, "train") for manifest in manifests]
        self._tokenizer: Tokenizer | None = None
        if text:
            folder = Path(section.folders[0]) / TOKENIZER_FOLDER
            self._tokenizer = load_tokenizer(manifests[0].tokenizer.kind, folder)

    def sample(self, position: int) -> SampleData:
        """The sample at a position of the stream."""
        part, inner = 0, position
        dataset: object = self._stream
        if isinstance(self._stream, BlendedTokens):
            part, inner = self._stream.locate(position)
            dataset = self._stream.parts[part]
        assert isinstance(dataset, TokenDataset), "a blend is of prepared folders"
        tokens, labels, _ = dataset[inner]
        ids = torch.cat([tokens, labels[-1:]]).tolist()
        parts, begin = [], 0
        for found in dataset.documents(inner):
            own = ids[begin : begin + found.num_tokens]
            begin += found.num_tokens
            source, number = self._origins[part].of(found.document)
            text = None if self._tokenizer is None else self._tokenizer.decode(own)
            parts.append(TextPart(found.document, found.first_token, found.num_tokens, source, number, text))
        return SampleData(position, str(dataset.path), inner, inner // dataset.samples_per_epoch, ids, parts)


def _check_folders(section: DataSection, name: str) -> None:
    for folder in section.folders:
        if not Path(folder).exists():
            raise DataError(
                f"the data {folder} of {name} do not exist; name them with --set megasdc.data.path=DIR, or start in "
                "the folder that the run was started in"
            )


def _check_wanted(wanted: Wanted, work: StepWork, name: str) -> None:
    """Refuse replicas and micro-batches that the step does not have."""
    for option, values, count in (
        ("--replica", wanted.replicas, len(work.completed)),
        ("--micro-batch", wanted.micro_batches, work.planned),
    ):
        if outside := [value for value in values if not 0 <= value < count]:
            raise DataError(f"{option} is {outside[0]}, step {wanted.step} of {name} has {count}: 0 to {count - 1}")
