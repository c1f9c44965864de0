"""Changes of the configuration since a checkpoint was saved, and whether the run may resume with them.

The class of each field, ``megasdc.config.fields.AtResume``, is given where the field is declared. Configurations are
compared as plain values, so that one of another version, with more or fewer fields, can be compared too.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from megasdc.common.errors import ConfigError
from megasdc.config.checks import batch_sizes
from megasdc.config.fields import AtResume, at_resume_of, element_in, model_in
from megasdc.config.load import RunConfig, WholeFile
from megasdc.config.model import ModelSection, ffn_width, head_width, query_groups
from megasdc.config.read import dotted, shown

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_WIDTHS = {"kv_channels": head_width, "ffn_hidden_size": ffn_width, "num_query_groups": query_groups}
_ABSENT = object()


@dataclass(frozen=True)
class ChangedField:
    """One field with a changed value.

    Attributes:
        path: dotted path of the field.
        old: value in the checkpoint; the default where it has none.
        new: value of this start.
        at_resume: effect of the change.
    """

    path: str
    old: Any
    new: Any
    at_resume: AtResume

    def __str__(self) -> str:
        return f"{self.path}: saved with {shown(self.old)}, now {shown(self.new)}"


def find_changes(saved: Mapping[str, Any], config: RunConfig, saved_data: int, data: int) -> list[ChangedField]:
    """List the fields that differ, without those whose change has no effect.

    Args:
        saved: the resolved configuration in the checkpoint.
        config: configuration of this start.
        saved_data: data-parallel size of the run that saved, for the batch sizes derived from it.
        data: data-parallel size of this start.
    """
    old, new = copy.deepcopy(dict(saved)), config.resolved()
    _fill_batch_sizes(old, config, saved_data)
    _fill_batch_sizes(new, config, data)
    _fill_widths(old, new)
    return [change for change in _compare_sections(WholeFile, old, new, ()) if change.at_resume != "-"]


def may_change(change: ChangedField, allowed: Collection[str], universal: bool) -> bool:
    """Whether a run may resume with this changed field.

    Args:
        allowed: paths given by ``--allow-changed``.
        universal: whether a new run starts from a universal checkpoint.
    """
    if change.at_resume == "flag":
        return universal or any(change.path == name or change.path.startswith(f"{name}.") for name in allowed)
    return change.at_resume == "applied" or (change.at_resume == "universal" and universal)


def explain_refusal(refused: Iterable[ChangedField]) -> str:
    """Message with the changed fields that prevent a resume, and the remedy."""
    refused = list(refused)
    kinds, lines = {change.at_resume for change in refused}, [f"  - {change}" for change in refused]
    remedies = ["Set the saved values again, or start a new run in another megasdc.logging.run_dir."]
    if "universal" in kinds:
        names = ", ".join(change.path for change in refused if change.at_resume == "universal")
        remedies.append(
            f"A new run can start with another {names} from a universal checkpoint: megasdc convert-checkpoint, then "
            "megasdc.checkpoint.universal."
        )
    if "flag" in kinds:
        flags = " ".join(f"--allow-changed {change.path}" for change in refused if change.at_resume == "flag")
        others = [change.path for change in refused if change.at_resume != "flag"]
        of_these = f" of the others, once {', '.join(others)} are as saved" if others else ""
        remedies.append(f"To resume with the new values{of_these} anyway, add {flags}.")
    head = "it was saved with another configuration, with which this run cannot resume:"
    return "\n".join([head, *lines, " ".join(remedies)])


def _fill_batch_sizes(raw: dict[str, Any], config: RunConfig, data: int) -> None:
    """Fill in derived batch sizes, so that equal sizes compare equal whichever of them are given."""
    given = {name: raw[name] for name in _BATCH if raw.get(name) is not None}
    with suppress(ConfigError):
        raw.update(zip(_BATCH, batch_sizes(replace(config, deepspeed=given), data), strict=True))


def _fill_widths(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Fill in a derived width of the model where only one of the two configurations gives it."""
    models = [raw.get("megasdc", {}).get("model", {}) for raw in (old, new)]
    for name, derive in _WIDTHS.items():
        if (models[0].get(name) is None) == (models[1].get(name) is None):
            continue
        for model in models:
            with suppress(ValidationError):
                known = {key: value for key, value in model.items() if key in ModelSection.model_fields}
                model[name] = derive(ModelSection.model_validate(known))


def _compare_sections(
    section: type[BaseModel], old: Mapping[str, Any], new: Mapping[str, Any], at: tuple[str | int, ...]
) -> Iterator[ChangedField]:
    for name in dict.fromkeys([*section.model_fields, *old, *new]):
        before, after = old.get(name, _ABSENT), new.get(name, _ABSENT)
        field = section.model_fields.get(name)
        if before is _ABSENT and after is _ABSENT:
            continue
        if field is None:  # of another version: nothing reads it now
            yield ChangedField(dotted((*at, name)), _plain(before), _plain(after), "applied")
            continue
        before, after = (_default(field) if value is _ABSENT else value for value in (before, after))
        yield from _compare_values(section, field, before, after, (*at, name))


def _compare_values(
    section: type[BaseModel], field: FieldInfo, old: Any, new: Any, at: tuple[str | int, ...]
) -> Iterator[ChangedField]:
    if old == new:
        return
    inner, element = model_in(field.annotation), model_in(element_in(field.annotation))
    if inner is not None and isinstance(old, Mapping) and isinstance(new, Mapping):
        yield from _compare_sections(inner, old, new, at)
    elif isinstance(old, list) and isinstance(new, list) and element is not None and len(old) == len(new):
        for place, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from _compare_sections(element, before, after, (*at, place))
    else:
        yield ChangedField(dotted(at), old, new, at_resume_of(section, field))


def _default(field: FieldInfo) -> Any:
    if field.is_required():
        return None
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, list):
        return [item.model_dump(mode="json") if isinstance(item, BaseModel) else item for item in value]
    return value


def _plain(value: Any) -> Any:
    return None if value is _ABSENT else value
