"""Data of all runs of a sweep: checked before the first run, and prepared where they are missing."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from megasdc.common.errors import ConfigError, MegasdcError
from megasdc.config import DataSection, MegasdcSection
from megasdc.data.destination import describe_settings
from megasdc.data.manifest import MANIFEST_FILE, Manifest
from megasdc.data.prepare import prepare
from megasdc.data.verify import verify_prepared
from megasdc.lab.sweeps.plan import PlannedRun


def data_of(run: PlannedRun) -> DataSection:
    """The data section of a run."""
    return MegasdcSection.model_validate(run.config["megasdc"]).data


def find_missing_data(runs: Iterable[PlannedRun]) -> list[DataSection]:
    """Checks that data are complete, or that their sources exist; returns the sections to prepare, each once.

    A source on the Hugging Face hub is not checked.

    Raises:
        ConfigError: data are damaged, or sources are missing; all problems at once.
    """
    missing, problems = [], []
    for section in {(data := data_of(run)).model_dump_json(): data for run in runs}.values():
        try:
            if all((Path(folder) / MANIFEST_FILE).exists() for folder in section.folders):
                _verify(section)
            elif section.blend:
                problems.append(f"megasdc.data.blend: {section.folders} are not all prepared; prepare them first.")
            else:
                describe_settings(section)
                missing.append(section)
        except MegasdcError as error:
            problems.append(f"megasdc.data: {error}")
    if problems:
        raise ConfigError(problems)
    return missing


def _verify(section: DataSection) -> None:
    if not section.blend:
        verify_prepared(section.path)
        return
    from megasdc.data.dataset import verify_data  # imports torch and Megatron-core, which takes seconds

    verify_data(section)


def prepare_missing(missing: Iterable[DataSection], progress: bool) -> None:
    """Prepares data, on all cores of this process; raises as ``prepare``."""
    for section in missing:
        prepare(section, workers=len(os.sched_getaffinity(0)), progress=progress)


def frequency_entropy(section: DataSection) -> float:
    """Loss of a model that knows token frequencies alone, nats; of a blend, that of its first part."""
    return Manifest.load(section.folders[0]).unigram_entropy_nats
