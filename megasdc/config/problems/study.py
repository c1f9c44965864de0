"""Contradictions in the settings of a study."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from megasdc.config.problems.problem import Problem
from megasdc.config.sections.faults import near_names
from megasdc.config.sections.megasdc import MegasdcSection
from megasdc.config.sections.study import COMPUTATION_SYNC, FREE_RUN, PARAMETER_SYNC, StudySection
from megasdc.config.submodule_names import submodule_slots

_S = "megasdc.study"


def study_problems(file: MegasdcSection) -> Iterator[Problem]:
    """Yield every contradiction that does not depend on the number of ranks."""
    study = file.study
    if study.mode is None:
        return
    if file.health.enabled:
        yield Problem(
            (f"{_S}.mode", "megasdc.health.enabled"),
            "a study is not watched, since a replica that waits for the others is not stuck; remove health.enabled.",
        )
    yield from _own_problems(study)
    yield from _submodule_problems(file)
    yield from _other_sections(file)


def _own_problems(study: StudySection) -> Iterator[Problem]:
    if study.replicas is None:
        yield _problem("replicas", "mode", f'missing; mode "{study.mode}" needs their number, at least 2')
    elif study.trusted >= study.replicas:
        yield _problem(
            "trusted", "replicas", f"got {study.trusted}, but the replicas are 0 to {study.replicas - 1}; name one"
        )


def _submodule_problems(file: MegasdcSection) -> Iterator[Problem]:
    study = file.study
    if study.mode == COMPUTATION_SYNC and file.model.backend != "torch":
        yield Problem(
            (f"{_S}.mode", "megasdc.model.backend"),
            f'got "{study.mode}" with megasdc.model.backend "{file.model.backend}", whose submodules cannot be '
            'observed; set the backend to "torch".',
        )
    names = list(submodule_slots(file.model, file.parallel))
    for index, pattern in enumerate(study.submodules or ()):
        if not any(fnmatchcase(name, pattern) for name in names):
            path = f"{_S}.submodules.{index}"
            near = ", ".join(near_names(pattern, names))
            yield Problem((path, "megasdc.model"), f"got {pattern!r}, which matches no submodule; nearest: {near}.")


def _other_sections(file: MegasdcSection) -> Iterator[Problem]:
    study = file.study
    if not file.determinism.enabled:
        yield _against(
            study,
            "megasdc.determinism.enabled",
            "false; results that need not repeat differ between healthy replicas too; set it true",
        )
    if file.drop_compute.enabled and file.drop_compute.replay_decisions is None:
        yield _against(
            study,
            "megasdc.drop_compute.enabled",
            "true; each replica would drop different micro-batches; set it false, or replay decisions",
        )
    if file.delay:
        yield _against(study, "megasdc.delay", f"{len(file.delay)} entries; delays change no result; remove them")
    if file.checkpoint.memory.interval:
        yield _against(
            study,
            "megasdc.checkpoint.memory.interval",
            f"{file.checkpoint.memory.interval}; a study resumes from a checkpoint that all replicas have, and memory "
            "need not hold it; set it to 0",
        )
    if file.checkpoint.keep_last == 1:
        yield _against(
            study,
            "megasdc.checkpoint.keep_last",
            "1; a study resumes from a checkpoint that all replicas have, and one killed while saving has only the one "
            "before; set it to 2 or more, or 0",
        )
    if study.mode == FREE_RUN and not file.training.eval_interval:
        yield _against(
            study,
            "megasdc.training.eval_interval",
            "0; the models are evaluated at the end, on eval_samples; set an interval",
        )
    if study.mode == COMPUTATION_SYNC:
        again = "; micro-batches that one replica recomputes are compared with nothing; set it false"
        for path, section in (("sdc.always_on", file.sdc.always_on), ("audit", file.audit)):
            if section.enabled:
                yield _against(study, f"megasdc.{path}.enabled", f"true{again}")
    if study.mode == PARAMETER_SYNC and file.sdc.always_on.enabled and file.sdc.always_on.toleranced:
        yield _against(
            study,
            "megasdc.sdc.always_on.toleranced",
            "true; an update that is overwritten is not the one that its gradient gives; set it false",
        )


def _against(study: StudySection, other: str, text: str) -> Problem:
    return Problem((f"{_S}.mode", other), f'got "{study.mode}" with {other} {text}.')


def _problem(field: str, other: str, text: str) -> Problem:
    return Problem((f"{_S}.{field}", f"{_S}.{other}"), f"{text}.")
