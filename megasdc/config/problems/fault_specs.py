"""Checks of fault specs: fields that contradict each other, names that do not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from megasdc.common.addresses import MICRO_BATCH_PHASES
from megasdc.config.sections.faults import (
    BIT_KINDS,
    CHECKPOINT,
    HYPERPARAMETER,
    HYPERPARAMETERS,
    NORM,
    NORM_SLOTS,
    PLACE,
    PLACE_SLOT,
    TOKENS,
    FaultPlace,
    FaultSpec,
    ProcessFaultSpec,
)

Fault = tuple[str, str]
"""(field, problem)."""
SLOTS_OF = {
    TOKENS: ("tokens", "labels"),
    NORM: NORM_SLOTS,
    HYPERPARAMETER: tuple(f"{group}.{name}" for group in (0, 1) for name in HYPERPARAMETERS),
    PLACE: (PLACE_SLOT,),
}
"""Slots of phases whose tensors belong to no submodule."""
WITHOUT_SUBMODULE = (CHECKPOINT, *SLOTS_OF)
WHOLE_NUMBERS = (CHECKPOINT, TOKENS, PLACE)
PLACE_FIELDS = (*FaultPlace.model_fields, "min_hidden_size", "seed")
"""Fields that an entry with a profile may set."""


def _default(spec: FaultPlace, field: str) -> bool:
    return bool(getattr(spec, field) == type(spec).model_fields[field].default)


def spec_problems(spec: FaultSpec) -> Iterator[Fault]:
    """Yield contradictions within one spec, independent of the model."""
    yield from step_problems(spec)
    if spec.profile is not None:
        for field in FaultSpec.model_fields:
            if field not in (*PLACE_FIELDS, "profile") and not _default(spec, field):
                yield field, f"the profile {spec.profile!r} defines the fault; remove this field or the profile"
        return
    yield from _unused_fields(spec)
    yield from _missing_fields(spec)
    yield from _range_problems(spec)
    yield from _phase_problems(spec)


def process_problems(spec: ProcessFaultSpec) -> Iterator[Fault]:
    """Yield contradictions within one fault of a process."""
    yield from step_problems(spec)
    if spec.kind == "slow":
        if spec.factor is None:
            yield "factor", "kind slow needs it: how many times as long a pass takes"
        if spec.phase not in ("forward", "backward"):
            yield "phase", "only passes can be slow: forward or backward"
        if spec.after_restart:
            yield "after_restart", "kind slow continues after a restart anyway; remove it"
    elif spec.factor is not None:
        yield "factor", f"is read with kind slow only, not {spec.kind}; remove it"
    if spec.kind != "exit" and spec.exit_code != 1:
        yield "exit_code", f"is read with kind exit only, not {spec.kind}; remove it"
    if spec.phase not in ("forward", "backward") and spec.micro_batches is not None:
        yield "micro_batches", f"phase {spec.phase} belongs to a whole step; remove it"


def step_problems(spec: FaultPlace) -> Iterator[Fault]:
    """Yield problems of the range of steps."""
    first, last = spec.steps
    if first is None:
        yield "steps", "the first step is missing; only the last may be null"
    elif last is not None and last < first:
        yield "steps", f"the last step {last} is before the first {first}"


def _unused_fields(spec: FaultSpec) -> Iterator[Fault]:
    """Fields that are not read because of another field's value."""
    readers: dict[str, tuple[str, tuple[str, ...]]] = {
        "bits": ("kind", BIT_KINDS),
        "num_bits": ("kind", BIT_KINDS),
        "value": ("kind", ("value",)),
        "factor": ("kind", ("scale",)),
        "deviation": ("kind", ("noise",)),
        "period": ("pattern", ("periodic",)),
        "run": ("pattern", ("periodic",)),
        "indices": ("pattern", ("indices",)),
        "element_probability": ("pattern", ("random",)),
        "file": ("phase", (CHECKPOINT,)),
        "micro_batches": ("phase", (*MICRO_BATCH_PHASES, TOKENS)),
    }
    for field, (by, values) in readers.items():
        got = getattr(spec, by)
        if not _default(spec, field) and got not in values:
            yield field, f"is read with {by} {' or '.join(values)} only, not {got}; remove it or change {by}"
    if isinstance(spec.bits, list) and spec.num_bits != 1:
        yield "num_bits", "all bits of a list are taken; remove it, or name a part such as mantissa in bits"
    if spec.elements != 1 and spec.element_probability is not None:
        yield "element_probability", f"replaces elements {spec.elements}; remove one of them"
    if spec.elements != 1 and spec.pattern == "indices":
        yield "elements", "pattern indices gives the elements itself; remove it"


def _missing_fields(spec: FaultSpec) -> Iterator[Fault]:
    needs = [("kind", "value", "value"), ("kind", "scale", "factor"), ("kind", "noise", "deviation")]
    needs += [("pattern", "periodic", "period"), ("pattern", "indices", "indices")]
    for by, value, field in needs:
        if getattr(spec, by) == value and getattr(spec, field) in (None, []):
            yield field, f"{by} {value} needs it"
    if spec.bits == []:
        yield "bits", "is an empty list; name at least one bit"


def _range_problems(spec: FaultSpec) -> Iterator[Fault]:
    if spec.only_above is not None and spec.only_below is not None and spec.only_above > spec.only_below:
        yield "only_above", f"{spec.only_above} is more than only_below {spec.only_below}: no value fits"
    if spec.period is not None and spec.run > spec.period:
        yield "run", f"{spec.run} adjacent elements do not fit in a period of {spec.period}"


def _phase_problems(spec: FaultSpec) -> Iterator[Fault]:
    """Problems of faults in phases without a submodule."""
    if spec.phase not in WITHOUT_SUBMODULE:
        return
    if spec.submodule != "*":
        yield "submodule", f"phase {spec.phase} belongs to no submodule; remove it"
    if spec.phase in WHOLE_NUMBERS:
        yield from _whole_number_problems(spec)
    slots = SLOTS_OF.get(spec.phase, ())
    if slots and spec.slot is not None and not any(fnmatchcase(name, spec.slot) for name in slots):
        yield "slot", f"got {spec.slot!r}; phase {spec.phase} has {', '.join(slots)}"


def _whole_number_problems(spec: FaultSpec) -> Iterator[Fault]:
    """Problems of faults in ids, places and bytes."""
    if spec.kind in ("scale", "noise"):
        yield "kind", f"phase {spec.phase} holds whole numbers; use bit_flip, stuck_at_0, stuck_at_1 or value"
    if isinstance(spec.bits, str) and spec.bits != "any":
        yield "bits", f'phase {spec.phase} holds whole numbers, which have no {spec.bits}; use "any" or bit numbers'
    limit = 255 if spec.phase == CHECKPOINT else 2**31 - 1
    if spec.value is not None and not (
        not isinstance(spec.value, str) and spec.value == int(spec.value) and 0 <= spec.value <= limit
    ):
        yield "value", f"phase {spec.phase} holds whole numbers from 0 to {limit}, got {spec.value}"
    if spec.phase == CHECKPOINT:
        if isinstance(spec.bits, list) and max(spec.bits, default=0) > 7:
            yield "bits", f"a byte has bits 0 to 7, got {max(spec.bits)}"
        if spec.pattern == "column":
            yield "pattern", "a file has no columns"
        if spec.slot is not None:
            yield "slot", "phase checkpoint has files; name them with file"


def model_problems(spec: FaultSpec, slots: dict[str, dict[str, tuple[str, ...]]]) -> Iterator[Fault]:
    """Yield submodules, phases and slots that the model does not have, of a spec without a profile.

    ``slots`` are those of ``submodule_slots``.
    """
    if spec.phase in WITHOUT_SUBMODULE:
        return
    found = [name for name in slots if fnmatchcase(name, spec.submodule)]
    if not found:
        yield (
            "submodule",
            f"got {spec.submodule!r}, which matches no submodule; "
            f"nearest: {', '.join(near_names(spec.submodule, slots))}",
        )
        return
    there = [slots[name][spec.phase] for name in found if spec.phase in slots[name]]
    if not there:
        phases = sorted({phase for name in found for phase in slots[name]})
        yield "phase", f"{spec.submodule} has no result in phase {spec.phase}; it has {', '.join(phases)}"
    elif spec.slot is not None and not any(fnmatchcase(slot, spec.slot) for names in there for slot in names):
        names = sorted({slot for names in there for slot in names})
        yield "slot", f"got {spec.slot!r}; {spec.submodule} has in phase {spec.phase}: {', '.join(names)}"


def near_names(pattern: str, names: Iterable[str]) -> Sequence[str]:
    """Names that are most similar to a pattern, one of many equal layers."""
    by_tail = {name.partition(".layer.")[2] or name: name for name in reversed(list(names))}
    wanted = pattern.replace("*", "").strip(".").removeprefix("layer.")
    found = difflib.get_close_matches(wanted, by_tail, n=3, cutoff=0.3) or list(by_tail)[-3:]
    return [by_tail[name] for name in found]


def place_problems(
    spec: FaultPlace, tensor: int, pipeline: int, data: int, replicas: int | None = None
) -> Iterator[Fault]:
    """Yield ranks, replicas and stages that the layout does not have.

    Args:
        replicas: of a study, each of that layout; then ``replica`` is one of them.
    """
    of_study = "" if replicas is None else f" in each of {replicas} replicas"
    sizes = {
        "rank": tensor * pipeline * data,
        "replica": data if replicas is None else replicas,
        "stage": pipeline,
        "tensor_rank": tensor,
    }
    for field, size in sizes.items():
        got = getattr(spec, field)
        if got is not None and got >= size:
            layout = f"tensor {tensor} x pipeline {pipeline} x data {data}{of_study}"
            yield field, f"got {got}, but there are {size} ({layout})"
