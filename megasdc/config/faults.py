"""Faults and delays that are injected, for drills and campaigns: their entries, profiles of nodes, and checks.

A fault's entry defines where (phase, submodule, place, steps), what (kind, elements) and how often (probability, burst,
once). Every draw is a function of the seed, the entry's index in the list, the rank and the address, so that the same
configuration injects the same faults again, also after a resume. An entry of `delay` defines ranks, duration and
distribution.

A profile is a set of faults that simulates one unhealthy node, and is expanded to entries. Profiles are JSON files
beside this module, in ``profiles/``; a user's own file of the same format may be given by its path.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from megasdc.common.addresses import ACCUMULATED_GRAD, MICRO_BATCH_PHASES, PHASES
from megasdc.common.errors import ConfigError
from megasdc.config.fields import NonNegativeInt, PositiveFloat, PositiveInt, Problem, Section, setting
from megasdc.config.read import read_json

OPTIMIZER_STATE, COLLECTIVE, CHECKPOINT, TOKENS = "optimizer_state", "collective", "checkpoint", "tokens"
NORM, CLIPPED_GRAD, HYPERPARAMETER = "norm", "clipped_grad", "hyperparameter"
STATE_AT_REST, COPY, PLACE = "state_at_rest", "copy", "place"
_OBSERVED = tuple(phase for phase in PHASES if phase != ACCUMULATED_GRAD)  # faults in it: collective
FAULT_PHASES = (
    *(*_OBSERVED, OPTIMIZER_STATE, COLLECTIVE, CHECKPOINT, TOKENS),
    *(NORM, CLIPPED_GRAD, HYPERPARAMETER, STATE_AT_REST, COPY, PLACE),  # last: draws depend on the order
)
"""The phases of addresses, and phases of faults that have no address of their own.

optimizer_state: masters and moments in place, just before the optimizer reads them. collective: this rank's
accumulated gradient of a whole step, after the sums over tied stages and tensor ranks and before the sum over replicas.
checkpoint: a file that this rank wrote, after the checkpoint is complete. tokens: a micro-batch after the loader has
checked it, as this rank reads it. norm: the numbers by which this rank clips. clipped_grad: its shard after clipping,
as the inner optimizer reads it. hyperparameter: numbers of the optimizer's groups for one step, and Adam's count of
steps, which stays wrong. state_at_rest: masters and moments in place, after a step. copy: what this rank gives to the
all-gather, so that all replicas get it alike. place: how many samples this rank has consumed, before a step.
"""
NORM_SLOTS = ("part", "total", "factor", "blocks")
"""This rank's part of the squared norm before the sum over ranks, the norm, the factor applied to its shard, and the
sums of blocks with which checks compare the norm."""
HYPERPARAMETERS = ("lr", "beta1", "beta2", "eps", "weight_decay", "step")
"""Adam's hyperparameters; the slot has the number of the group before the name, such as ``0.lr``."""
PLACE_SLOT = "consumed"
BIT_KINDS = ("bit_flip", "stuck_at_0", "stuck_at_1")
Share = Annotated[float, Field(ge=0, le=1)]


class BurstSection(Section):
    """Faults that come in bursts."""

    at_resume = "applied"

    length: PositiveInt = setting(..., "Steps of one burst.")
    probability: Share = setting(..., "Probability that a burst starts at a step, in [0, 1].")


class FaultPlace(Section):
    """On which ranks, in which steps and micro-batches; what is null does not restrict."""

    at_resume = "applied"

    rank: NonNegativeInt | None = setting(None, "Global rank; in a study: rank of its replica; null: any.")
    replica: NonNegativeInt | None = setting(
        None,
        "Place along the data dimension; in a study: which of its replicas; with Local-SGD: over the data ranks of all "
        "replicas; null: any.",
    )
    stage: NonNegativeInt | None = setting(None, "Pipeline stage; null: any.")
    tensor_rank: NonNegativeInt | None = setting(None, "Place along the tensor dimension; null: any.")
    host: str | None = setting(None, "Pattern of host names, such as `node7*`; null: any.")
    steps: list[PositiveInt | None] = setting(
        [1, None], "First and last step; null as last: to the end.", min_length=2, max_length=2
    )
    micro_batches: list[NonNegativeInt] | None = setting(None, "Micro-batches of a step, the first is 0; null: all.")


class FaultSpec(FaultPlace):
    """One fault in what a run computes or stores, or with `profile` the bundle of a whole node."""

    profile: str | None = setting(
        None,
        "Name of a node profile, or a JSON file like them, whose faults replace this entry; ranks, host, steps, "
        "micro-batches, `min_hidden_size` and `seed` of this entry apply to all of them.",
    )
    submodule: str = setting("*", "Pattern of full names of submodules, such as `*.mlp.linear_fc1`.", min_length=1)
    phase: Literal[FAULT_PHASES] = setting(  # type: ignore[valid-type]
        "forward",
        "Where the fault is injected: forward, recompute: the output; backward: the input's gradient; "
        "weight_grad: one micro-batch's; reduced_grad: this rank's shard; update: right after the inner optimizer; "
        "parameter: after the all-gather; optimizer_state: masters and moments before the step; collective: the "
        "accumulated gradient before the sum over replicas; checkpoint: bytes of a file this rank saved; tokens: a "
        "micro-batch before the model; norm: the numbers by which this rank clips; clipped_grad: this rank's shard "
        "after clipping; hyperparameter: numbers of the optimizer's groups, and its count of steps; state_at_rest: "
        "masters and moments after a step; copy: what this rank gives to the all-gather; place: samples consumed.",
    )
    slot: str | None = setting(
        None,
        "Pattern of the tensor of the submodule, such as `output`, `query`, `weight`, `weight.exp_avg`; with phase "
        "tokens `tokens` or `labels`, norm `part`, `total`, `factor` or `blocks`, hyperparameter `0.lr` (group 0), "
        "`*.step`; null: any.",
    )
    file: str | None = setting(None, "Phase checkpoint: pattern of file names; null: any file of the rank.")
    kind: Literal["bit_flip", "stuck_at_0", "stuck_at_1", "value", "scale", "noise"] = setting(
        "bit_flip", "What happens to an element."
    )
    bits: Literal["sign", "exponent", "mantissa", "any"] | list[Annotated[int, Field(ge=0, le=63)]] = setting(
        "any", "bit_flip, stuck_at: all bits of a list of numbers (0 is the lowest), or random ones of a part."
    )
    num_bits: PositiveInt = setting(1, "How many different bits of the named part in each element.")
    value: Literal["nan", "inf", "-inf"] | float | None = setting(None, "Kind value: what is put there.")
    factor: float | None = setting(None, "Kind scale: what elements are multiplied by.")
    deviation: PositiveFloat | None = setting(
        None, "Kind noise: standard deviation d; x becomes x (1 + d z), z standard normal."
    )
    elements: PositiveInt = setting(
        1, "How many elements of the tensor, at most all; with pattern column, how many columns."
    )
    element_probability: Share | None = setting(
        None, "Instead of `elements`: each element is changed with this probability, in [0, 1]."
    )
    pattern: Literal["random", "adjacent", "periodic", "column", "indices"] = setting(
        "random",
        "Which elements, in row-major order: random; adjacent: one run; periodic: a run in every `period`; column: "
        "whole columns of the last dimension; indices: those given.",
    )
    period: PositiveInt | None = setting(None, "Pattern periodic: elements from one run to the next.")
    run: PositiveInt = setting(1, "Pattern periodic: adjacent elements of each run; at most `period`.")
    indices: list[NonNegativeInt] | None = setting(
        None, "Pattern indices: row-major places; those outside a tensor are ignored."
    )
    only_above: Annotated[float, Field(ge=0)] | None = setting(
        None, "Only elements of at least this magnitude; pattern random picks among them."
    )
    only_below: Annotated[float, Field(ge=0)] | None = setting(None, "Only elements of at most this magnitude.")
    same_elements: bool = setting(
        False,
        "Change the same elements and bits of a tensor each time, and the same as other specs with this setting, seed "
        "and pattern: a persistent fault.",
    )
    bound_to: Literal["values", "unit"] = setting(
        "values",
        "What a fault stays with where an operation is computed with its elements in other places (`audit.permuted`): "
        "the values, wherever they are, or the unit that computes a place, with what is there now.",
    )
    min_hidden_size: PositiveInt | None = setting(None, "Only in models at least so wide; null: in all.")
    probability: Share = setting(1.0, "Probability of firing at each result that fits, in [0, 1].")
    burst: BurstSection | None = setting(None, "Fire only within bursts; null: in all steps.")
    once: bool = setting(
        False, "Fire until bits were changed once on a rank; a run that resumes from before that repeats it."
    )
    seed: NonNegativeInt = setting(0, "Seed of every draw.")


class ProcessFaultSpec(FaultPlace):
    """One fault of a whole process: it ends, stops, or is slow."""

    kind: Literal["exit", "sigkill", "sigstop", "hang", "slow"] = setting(
        ...,
        "exit: end at once with `exit_code`; sigkill, sigstop: the signal to itself; hang: never join the collectives "
        "that follow; slow: after each pass sleep `factor` - 1 times what the pass took.",
    )
    phase: Literal["forward", "backward", "collective", "update"] = setting(
        "forward",
        "When: before a micro-batch's forward or backward pass, before the gradients are summed over replicas, before "
        "the optimizer steps; with slow, after the pass.",
    )
    exit_code: Annotated[int, Field(ge=0, le=255)] = setting(1, "Kind exit: the code.")
    factor: Annotated[float, Field(ge=1)] | None = setting(
        None, "Kind slow: time of a pass with the fault over time without, at least 1."
    )
    after_restart: bool = setting(
        False, "Fire again in a run that was restarted after it had fired, as a bad machine would."
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


def fault_spec_problems(spec: FaultSpec) -> Iterator[Fault]:
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


def missing_in_model(spec: FaultSpec, slots: dict[str, dict[str, tuple[str, ...]]]) -> Iterator[Fault]:
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
        replicas: number of replicas of a study, each of that layout, which ``replica`` then numbers; None: no study.
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


Seconds = Annotated[float, Field(ge=0)]


class DelaySpec(FaultPlace):
    """One delay before micro-batches; without a rank or tensor rank, on tensor rank 0 of each stage that fits."""

    at_resume = "applied"

    kind: Literal[
        "bounded_lognormal",
        "normal",
        "gamma",
        "exponential",
        "bursts",
        "slow_rank",
        "slow_periods",
        "trace",
        "resampled",
    ] = setting(
        ...,
        "How long, for each micro-batch and stage: drawn anew (bounded_lognormal is the environment of DropCompute's "
        "paper, normal, gamma, exponential); `delay_s` while a burst of a replica lasts, always on one `replica` "
        "(slow_rank), or in a part of each period; as recorded in a file (trace), or a recorded step drawn at random "
        "(resampled).",
    )
    mean_s: Seconds | None = setting(None, "bounded_lognormal, normal, gamma, exponential: mean; needed there.")
    std_s: Seconds | None = setting(None, "normal, gamma: standard deviation; needed there.")
    delay_s: Seconds | None = setting(
        None, "bursts, slow_rank, slow_periods: of a micro-batch while slow; needed there."
    )
    probability: Share | None = setting(
        None, "bursts: that one of a replica begins in a step, in [0, 1]; needed there."
    )
    num_steps: PositiveInt | None = setting(None, "bursts: steps that one lasts; needed there.")
    period_steps: PositiveInt | None = setting(
        None,
        "slow_periods: from the begin of one slow time of a replica to the next, each replica at its own time; needed "
        "there.",
    )
    slow_steps: PositiveInt | None = setting(None, "slow_periods: slow ones of each period, at most all; needed there.")
    path: str | None = setting(
        None,
        "trace, resampled: .npy file of seconds [replica, step, micro-batch], or with a fourth axis of stages; needed "
        "there. In a trace each axis starts again at its end.",
        min_length=1,
    )
    micro_batch_latency_s: PositiveFloat | None = setting(
        None,
        "What mean, deviation, delay and file are multiples of, as in the paper, where the mean is 0.5 of a "
        "micro-batch's latency; null: they are seconds.",
    )
    preemptible: bool = setting(
        False,
        "The delay ends when the time of the replica is up. So it is on the rank that decides whether a micro-batch "
        "is started, tensor rank 0 of the first stage; on other ranks a delay always lasts to its end.",
    )
    seed: NonNegativeInt = setting(1, "Seed of every draw, with the place of the entry in the list.")


PARAMETERS_OF = {
    "bounded_lognormal": ("mean_s",),
    "normal": ("mean_s", "std_s"),
    "gamma": ("mean_s", "std_s"),
    "exponential": ("mean_s",),
    "bursts": ("probability", "num_steps", "delay_s"),
    "slow_rank": ("replica", "delay_s"),
    "slow_periods": ("period_steps", "slow_steps", "delay_s"),
    "trace": ("path",),
    "resampled": ("path",),
}
"""Fields that each kind needs besides its place; it does not read the other fields named here."""


_PARAMETERS = sorted({name for names in PARAMETERS_OF.values() for name in names} - FaultPlace.model_fields.keys())


def delay_problems(specs: Sequence[DelaySpec]) -> Iterator[Problem]:
    """Yield the problems of delays that do not depend on the number of ranks."""
    for index, spec in enumerate(specs):
        path = f"megasdc.delay.{index}"
        for field, text in (*step_problems(spec), *_parameter_problems(spec), *_value_problems(spec)):
            yield Problem((f"{path}.{field}", f"{path}.kind"), f"{text}.")
        if "path" in PARAMETERS_OF[spec.kind] and spec.path is not None and not Path(spec.path).is_file():
            what = f"got {spec.path!r}, which is not a file; give one written with numpy.save."
            yield Problem((f"{path}.path", f"{path}.kind"), what, of_host=True)


def _parameter_problems(spec: DelaySpec) -> Iterator[Fault]:
    for field in PARAMETERS_OF[spec.kind]:
        if getattr(spec, field) is None:
            yield field, f"missing; kind {spec.kind} needs it"
    for field in _PARAMETERS:
        if field not in PARAMETERS_OF[spec.kind] and getattr(spec, field) is not None:
            readers = [kind for kind, names in PARAMETERS_OF.items() if field in names]
            yield (
                field,
                f"got {getattr(spec, field)}, but kind {spec.kind} does not read it (only {', '.join(readers)}); "
                "remove it",
            )


def _value_problems(spec: DelaySpec) -> Iterator[Fault]:
    if spec.kind == "gamma":
        for field in ("mean_s", "std_s"):
            if getattr(spec, field) == 0:
                yield field, "got 0.0; kind gamma needs more than 0"
    if spec.slow_steps is not None and spec.period_steps is not None and spec.slow_steps > spec.period_steps:
        yield "slow_steps", f"got {spec.slow_steps}, more than period_steps {spec.period_steps}; needed at most all"
    if spec.preemptible and (spec.stage or spec.tensor_rank):
        yield (
            "preemptible",
            f"got true with stage {spec.stage}, tensor_rank {spec.tensor_rank}; only tensor rank 0 of stage 0 decides "
            "whether a micro-batch is started, so a delay on another rank cannot be cut short; remove it",
        )


PROFILE_FOLDER = Path(__file__).with_name("profiles")


class NodeProfile(Section):
    """One published node, and the assumptions made to simulate it."""

    description: str = Field(..., description="Which node.")
    source: str = Field(..., description="Where its figures were published.")
    published: dict[str, float] = Field(..., description="The figures, by name.")
    assumed: list[str] = Field(..., description="What is not published and was chosen, a sentence each.")
    faults: list[FaultSpec] = Field(..., description="Faults that simulate it.")


def profile_names() -> list[str]:
    """Names of the package's profiles."""
    return sorted(path.stem for path in PROFILE_FOLDER.glob("*.json"))


def load_profile(name: str) -> NodeProfile:
    """Read a profile by its name, or from a file whose path ends in ``.json``.

    Raises:
        ConfigError: there is no such profile, or the file is not a valid one.
    """
    own = name.endswith(".json")
    if not own and name not in profile_names():
        raise ConfigError(f"there is no node profile {name!r}; there are {', '.join(profile_names())}")
    path = Path(name) if own else PROFILE_FOLDER / f"{name}.json"
    raw, problems = read_json(path)
    if problems:
        raise ConfigError(problems, str(path))
    try:
        profile = NodeProfile.model_validate(raw)
    except ValidationError as error:
        texts = [
            f"{'.'.join(map(str, item['loc']))}: {item['msg']}; got {json.dumps(item['input'], default=str)[:60]}"
            for item in error.errors(include_url=False)
        ]
        raise ConfigError(texts, str(path)) from error
    if nested := [index for index, spec in enumerate(profile.faults) if spec.profile is not None]:
        raise ConfigError(f"faults.{nested[0]}.profile: a profile cannot name another", str(path))
    return profile


def expand_faults(faults: Iterable[FaultSpec]) -> list[FaultSpec]:
    """Replace each entry that names a profile by the profile's faults, with the entry's ranks, steps and seed.

    Raises:
        ConfigError: as ``load_profile``.
    """
    expanded = []
    for entry in faults:
        if entry.profile is None:
            expanded.append(entry)
            continue
        fields = FaultSpec.model_fields
        said = {name: getattr(entry, name) for name in PLACE_FIELDS if getattr(entry, name) != fields[name].default}
        expanded += [spec.model_copy(update=said) for spec in load_profile(entry.profile).faults]
    return expanded
