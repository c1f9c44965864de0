"""Format of a sweep file: one JSON object with a base configuration, variations, nodes, seeds and sizes.

Paths, in the file and in its base, are relative to the working folder of the command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, Field, ValidationError

from megasdc.common.errors import ConfigError
from megasdc.config.faults import FaultSpec
from megasdc.config.fields import NonNegativeInt, PositiveFloat, PositiveInt, Section
from megasdc.config.read import dotted, read_json, shown
from megasdc.config.schema import nearest

HEALTHY = "healthy"
"""Name of the node without faults, which every sweep has."""
Overrides = dict[str, Any]
"""Values by dotted path, as for ``--set``."""


class StartSpec(Section):
    """Checkpoint from which the runs of a cell start: that of a cell's run with the same seed."""

    cell: str | None = Field(None, description="The cell whose run is taken; null: this one.")
    step: PositiveInt = Field(..., description="After which step.")
    of: Literal["healthy", "node"] = Field(
        "healthy",
        description="Whose checkpoint: that of the cell's healthy run, from which every node goes on; or that of each "
        "node's own run, which then goes on on a healthy machine, without faults.",
    )
    weights: bool = Field(
        False,
        description="Start from the weights alone, at step 0, so that data, schedule and optimizer may be others; "
        "false: go on after the step with all that the checkpoint holds.",
    )


class CellSpec(Section):
    """One row of a table: settings with which all nodes and seeds are run."""

    name: str = Field(..., min_length=1, description="As tables show it.")
    set: Overrides = Field({}, description="Values by dotted path, over those of the sweep.")
    start: StartSpec | None = Field(None, description="Checkpoint to start from; null: from scratch.")
    paper: str | None = Field(None, description="Row of a paper to stand beside, `TABLE/ROW`; null: none.")


class NodeSpec(Section):
    """One simulated unhealthy node."""

    name: str = Field(..., min_length=1, description="As tables show it.")
    profile: str | None = Field(None, description="A node profile by its name or path; null: `faults` alone.")
    faults: list[FaultSpec] = Field([], description="Faults besides those of the profile.")
    seed: NonNegativeInt = Field(0, description="Seed of its draws, used together with the seed of the run.")
    control: bool = Field(
        False,
        description="Perturbed by so little that its effect is chance: not an unhealthy node, but what differences of "
        "others are to be seen against.",
    )
    made_up: bool = Field(
        False, description="Follows no published figures of a node: counted apart from those that do."
    )


Named = TypeVar("Named", CellSpec, NodeSpec)


class DecisiveSpec(Section):
    """Cells that decide on a finding, run with other, usually more, seeds."""

    cells: list[str] = Field([], description="Their names; a cell made by a grid has the name that is printed.")
    seeds: list[NonNegativeInt] = Field([], description="Seeds of these cells, instead of `seeds`.")


class Variant(Section):
    """Differences of one size; a given field replaces the sweep's, and `set` is merged into the sweep's.

    A cell or node that is named as one of the sweep's takes from it what it does not say itself.
    """

    base: str | None = Field(None, description="See the sweep.")
    ranks: PositiveInt | None = Field(None, description="See the sweep.")
    set: Overrides = Field({}, description="See the sweep.")
    grid: dict[str, list[Any]] | None = Field(None, description="See the sweep.")
    cells: list[CellSpec] | None = Field(None, description="See the sweep.")
    nodes: list[NodeSpec] | None = Field(None, description="See the sweep.")
    seeds: list[NonNegativeInt] | None = Field(None, min_length=1, description="See the sweep.")
    decisive: DecisiveSpec | None = Field(None, description="See the sweep.")
    final_steps: PositiveInt | None = Field(None, description="See the sweep.")
    diverged_above_frequencies: bool | None = Field(None, description="See the sweep.")


class SweepFile(Section):
    """A sweep."""

    name: str = Field(..., pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="Names its folder.")
    description: str = Field("", description="What it is for, and how its numbers were chosen.")
    tables: list[str] = Field([], description="Tables of papers that it makes, such as `pei_table_1`.")
    base: str = Field(..., description="Configuration file of every run; without faults.")
    ranks: PositiveInt = Field(1, description="Ranks of a run, processes of one host.")
    set: Overrides = Field({}, description="Values by dotted path, over those of the base.")
    grid: dict[str, list[Any]] = Field({}, description="Values to combine by dotted path; all combinations are run.")
    cells: list[CellSpec] = Field([], description="Rows; with a grid, each with all of its combinations.")
    nodes: list[NodeSpec] = Field([], description="Unhealthy nodes; a healthy one is always run.")
    seeds: list[NonNegativeInt] = Field([1234], min_length=1, description="Seeds of weights and of fault draws.")
    decisive: DecisiveSpec = Field(
        default_factory=lambda: DecisiveSpec.model_validate({}), description="Cells with more seeds."
    )
    final_steps: PositiveInt = Field(20, description="Last steps whose mean training loss is the final loss.")
    diverged_rise: PositiveFloat = Field(
        0.1,
        description="A run has diverged when its final loss is above its lowest mean over as many steps by this share.",
    )
    diverged_above_frequencies: bool = Field(
        True,
        description="A run has diverged too when its final loss is above that of a model that knows only how frequent "
        "tokens are; false where runs are too short to get below it.",
    )
    keep_checkpoints: bool = Field(False, description="Keep the checkpoints of finished runs.")
    sizes: dict[str, Variant] = Field({}, description="Variants of the sweep by name, such as smoke, cpu, paper.")


def load_sweep(path: Path | str, size: str | None) -> SweepFile:
    """Reads a sweep file with one of its sizes applied, which ``sizes`` then holds alone.

    ``size``: None: its first, or the file itself if it has no sizes.

    Raises:
        ConfigError: it cannot be read, has unknown keys or wrong values, or lacks the size; all problems at once.
    """
    raw, problems = read_json(path)
    try:
        sweep = SweepFile.model_validate(raw)
    except ValidationError as error:
        problems += [_sentence(raw, item) for item in error.errors(include_url=False, include_input=False)]
        raise ConfigError(problems, str(path)) from error
    if problems:
        raise ConfigError(problems, str(path))
    if size is None and sweep.sizes:
        size = next(iter(sweep.sizes))
    if size is None:
        return sweep
    if size not in sweep.sizes:
        raise ConfigError(f"sizes: there is no {size!r}; there are {', '.join(sweep.sizes) or 'none'}.", str(path))
    return _with_variant(sweep, size, sweep.sizes[size])


def _with_variant(sweep: SweepFile, size: str, variant: Variant) -> SweepFile:
    said = {name: getattr(variant, name) for name in variant.model_fields_set if getattr(variant, name) is not None}
    said["set"] = {**sweep.set, **variant.set}
    if variant.cells is not None:
        said["cells"] = [_completed(cell, sweep.cells) for cell in variant.cells]
    if variant.nodes is not None:
        said["nodes"] = [_completed(node, sweep.nodes) for node in variant.nodes]
    return sweep.model_copy(update={**said, "sizes": {size: variant}})


def _completed(given: Named, known: Sequence[Named]) -> Named:
    """A cell or node of a size, with what it does not say taken from the sweep's of that name; ``set`` is merged."""
    base = next((one for one in known if one.name == given.name), None)
    if base is None:
        return given
    said = {name: getattr(given, name) for name in given.model_fields_set}
    if isinstance(base, CellSpec) and "set" in said:
        said["set"] = {**base.set, **said["set"]}
    return base.model_copy(update=said)


def _sentence(raw: Any, item: Mapping[str, Any]) -> str:
    """One problem as a sentence with dotted path, value and remedy."""
    path = tuple(item["loc"])
    value = _value_at(raw, path)
    if item["type"] == "missing":
        return f"{dotted(path)}: missing."
    if item["type"] != "extra_forbidden":
        return f"{dotted(path)}: got {shown(value)}; {item['msg'][:1].lower()}{item['msg'][1:]}."
    names = _fields_at(path[:-1])
    meant = nearest(str(path[-1]), names)
    hint = f"did you mean {dotted((*path[:-1], meant))}?" if meant else "remove it."
    return f"{dotted(path)}: unknown key (value {shown(value)}); {hint} Allowed: {', '.join(names)}."


def _fields_at(path: tuple[str | int, ...]) -> list[str]:
    """Names of the fields of the object at a path; list indices and names of sizes are skipped."""
    model: type[BaseModel] = SweepFile
    for key in path:
        if isinstance(key, str) and key in model.model_fields:
            model = _section_in(model.model_fields[key].annotation) or model
    return list(model.model_fields)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section class anywhere in an annotation, also in a list or a dict."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _section_in(part))), None)


def _value_at(raw: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        try:
            raw = raw[key]
        except (KeyError, IndexError, TypeError):
            return None
    return raw
