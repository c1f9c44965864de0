"""Configuration of one replica of a study: that of an ordinary run, which could be started alone."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megasdc.config.sections.faults import FaultPlace, FaultSpec
from megasdc.config.sections.study import StudySection

if TYPE_CHECKING:
    from megasdc.config.load import RunConfig

T = TypeVar("T", bound=FaultPlace)
_SEEDS_APART = 1 << 32
"""Difference between the seeds of a fault in consecutive replicas, so that their draws are independent."""


def replica_folder(folder: Path | str, replica: int) -> Path:
    """Folder of a replica, in place of ``folder`` of an ordinary run."""
    return Path(folder) / f"replica_{replica}"


def harmed_replica(study: StudySection) -> int:
    """The replica that is not trusted, in a study of two."""
    return 0 if study.trusted else 1


def replica_config(config: RunConfig, replica: int) -> RunConfig:
    """The configuration of one replica, counted from 0, of a study: own folders, only its faults, no study."""
    sections = config.megasdc
    logging = sections.logging.model_copy(
        update={
            "run_dir": str(replica_folder(sections.logging.run_dir, replica)),
            "progress_bar": sections.logging.progress_bar and replica == sections.study.trusted,
            "prometheus": sections.logging.prometheus if replica == sections.study.trusted else None,
        }
    )
    checkpoint = sections.checkpoint
    if checkpoint.folder is not None:
        checkpoint = checkpoint.model_copy(update={"folder": str(replica_folder(checkpoint.folder, replica))})
    own = {
        "study": StudySection.model_validate({}),
        "logging": logging,
        "checkpoint": checkpoint,
        "faults": [_reseeded(spec, replica) for spec in _of_replica(sections.faults, replica)],
        "process_faults": _of_replica(sections.process_faults, replica),
    }
    return replace(config, deepspeed=_own_monitors(config.deepspeed, replica), megasdc=sections.model_copy(update=own))


def _of_replica(faults: Iterable[T], replica: int) -> list[T]:
    return [spec.model_copy(update={"replica": None}) for spec in faults if spec.replica in (None, replica)]


def _reseeded(spec: FaultSpec, replica: int) -> FaultSpec:
    return spec.model_copy(update={"seed": spec.seed + replica * _SEEDS_APART})


def _own_monitors(deepspeed: dict[str, Any], replica: int) -> dict[str, Any]:
    """Give each replica its own names of TensorBoard and CSV files."""
    own = copy.deepcopy(deepspeed)
    for name in ("tensorboard", "csv_monitor"):
        if own.get(name, {}).get("enabled"):
            own[name]["job_name"] = f"{own[name]['job_name']}_replica_{replica}"
    return own
