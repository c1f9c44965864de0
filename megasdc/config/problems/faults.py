"""Problems of the faults in a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megasdc.common.addresses import RECOMPUTE
from megasdc.common.errors import ConfigError
from megasdc.config.fault_profiles import expand_faults
from megasdc.config.problems.problem import Problem
from megasdc.config.sections.faults import (
    WITHOUT_SUBMODULE,
    FaultSpec,
    fault_spec_problems,
    missing_in_model,
    place_problems,
    process_problems,
)
from megasdc.config.sections.megasdc import MegasdcSection
from megasdc.config.submodule_names import submodule_slots

_MODEL_PATHS = ("megasdc.model", "megasdc.parallel")


def fault_problems(file: MegasdcSection, deepspeed: dict[str, Any]) -> Iterator[Problem]:
    """Yield every problem of a fault, by itself or with the model.

    Args:
        deepspeed: DeepSpeed's keys with defaults filled in.
    """
    slots = submodule_slots(file.model, file.parallel) if file.faults else {}
    interval = deepspeed.get("pipeline", {}).get("activation_checkpoint_interval", 0)
    for index, entry in enumerate(file.faults):
        path = f"megasdc.faults.{index}"
        problems = list(fault_spec_problems(entry))
        try:
            expanded = [] if problems else expand_faults([entry])
        except ConfigError as error:
            problems += [("profile", text) for text in error.problems]
            expanded = []
        for spec in expanded:
            problems += fault_spec_problems(spec) if entry.profile is not None else ()
            problems += missing_in_model(spec, slots)
            problems += _backend_problems(spec, file.model.backend)
            if spec.phase == RECOMPUTE and not interval:
                problems.append(("phase", "nothing is recomputed; set pipeline.activation_checkpoint_interval"))
        for field, text in dict.fromkeys(problems):
            place = f"{path}.profile" if entry.profile is not None and expanded else f"{path}.{field}"
            yield Problem((place, *_MODEL_PATHS), f"{text}.")
    for index, process in enumerate(file.process_faults):
        for field, text in process_problems(process):
            place = f"megasdc.process_faults.{index}.{field}"
            yield Problem((place,), f"{text}.")


def _backend_problems(spec: FaultSpec, backend: str) -> Iterator[tuple[str, str]]:
    if backend != "torch" and spec.phase not in WITHOUT_SUBMODULE:
        yield "phase", f'results of megasdc.model.backend "{backend}" cannot be observed; set "torch" or drop the fault'


def fault_place_problems(file: MegasdcSection, tensor: int, pipeline: int, data: int) -> list[str]:
    """Problems of faults and delays on ranks that a layout does not have."""
    lists: dict[str, Sequence[Any]] = {
        "faults": file.faults,
        "process_faults": file.process_faults,
        "delay": file.delay,
    }
    return [
        f"megasdc.{name}.{index}.{field}: {text}."
        for name, faults in lists.items()
        for index, spec in enumerate(faults)
        for field, text in place_problems(spec, tensor, pipeline, data, file.study.replicas)
    ]
