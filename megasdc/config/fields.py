"""Building blocks of sections: base class, fields with their types and relations, and messages about wrong ones.

A field has a type that refuses what no run can use, an effect of a change at a resume, and perhaps settings without
which it has no effect. Its type in words stands in messages and in the documentation.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from megasdc.common.credentials import REMEDY, SECRET_REMEDY, find_secrets

LARGEST_INTEGER = 2**53
"""Largest integer that every JSON reader keeps exactly (RFC 8259, section 6); no counter needs a larger one."""
ABSENT = "absent: "
"""Prefix, in a description, of a field's meaning when it is not given, if the default of its class does not say it."""

PositiveInt = Annotated[int, Field(gt=0, le=LARGEST_INTEGER)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST_INTEGER)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, lt=1)]

AtResume = Literal["refused", "universal", "flag", "applied", "-"]
"""Effect of a field whose value differs from that in the checkpoint from which a run resumes.

refused: the saved state would be that of another model, or of other replicas. universal: refused too, but a new run may
start with it from a universal checkpoint. flag: refused unless ``--allow-changed`` names the field. applied: used from
the first step on, and reported. -: it affects neither training nor detection, or it controls how a start is made.
"""
REFUSED: dict[str, Any] = {"at_resume": "refused"}
UNIVERSAL: dict[str, Any] = {"at_resume": "universal"}
FLAG: dict[str, Any] = {"at_resume": "flag"}
APPLIED: dict[str, Any] = {"at_resume": "applied"}
NO_MATTER: dict[str, Any] = {"at_resume": "-"}


@dataclass(frozen=True)
class Needs:
    """Settings without which a field has no effect.

    Attributes:
        settings: settings that must all hold. Each is a dotted path from the root of the sections, whose value must be
            none of false, 0, null and empty, or ``path=value`` with the value as JSON; " or " separates alternatives.
        refused: whether a value that asks for something is refused without them; False: a warning is given.
    """

    settings: tuple[str, ...]
    refused: bool


def asks(*settings: str) -> Needs:
    """Relation of a field that asks for a check or another protection: without these settings it is refused."""
    return Needs(settings, refused=True)


def tunes(*settings: str) -> Needs:
    """Relation of a field that only tunes: without these settings one warning says that it has no effect."""
    return Needs(settings, refused=False)


def alternatives(setting: str) -> list[tuple[str, str | None]]:
    """Path and wanted value, as JSON, of each alternative of one of `Needs.settings`; None: anything that is on."""
    parts = [one.partition("=") for one in setting.split(" or ")]
    return [(path, value if equals else None) for path, equals, value in parts]


ALWAYS_READ = Needs((), refused=False)
"""Relation of a field that is read whatever its section needs."""


class Section(BaseModel):
    """Base of all sections: frozen, strict about types, no unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    at_resume: ClassVar[AtResume | None] = None
    """Class of fields without one in ``json_schema_extra``; None: every field that is not a section needs one there."""
    needs: ClassVar[Needs] = ALWAYS_READ
    """Relation of fields without one of their own."""


def setting(
    default: Any,
    description: str | None = None,
    at_resume: dict[str, Any] | None = None,
    needs: Needs | None = None,
    **limits: Any,
) -> Any:
    """A field of a section.

    Args:
        default: default of the field; ``...``: it must be given.
        description: meaning, unit, range, and what 0 or null means.
        at_resume: effect of a change at a resume, such as ``REFUSED``; None: the one that its section states.
        needs: settings without which it has no effect, such as ``asks("audit.enabled")``; None: those of its section.
    """
    extra = dict(at_resume or {})
    if needs is not None:
        extra |= {"needs": list(needs.settings), "without": "refused" if needs.refused else "warning"}
    return Field(default, description=description, json_schema_extra=extra or None, **limits)


def section(kind: type[Section], **settings: Any) -> Any:
    """A field that is a section; where it is not given, that section with its defaults.

    Args:
        kind: class of the section, whose fields all have a default.
    """
    return Field(default_factory=lambda: kind.model_validate({}), **settings)


def at_resume_of(section: type[BaseModel], field: FieldInfo) -> AtResume:
    """The effect of a change of this field at a resume; ValueError if neither the field nor its section states it."""
    extra = field.json_schema_extra
    stated = extra.get("at_resume") if isinstance(extra, dict) else None
    if stated is None:
        stated = getattr(section, "at_resume", None)
    if stated not in get_args(AtResume):
        raise ValueError(f"{section.__name__}: a field states no at_resume ({field.description})")
    return stated  # type: ignore[return-value]


def needs_of(section: type[BaseModel], field: FieldInfo) -> Needs:
    """Settings without which this field has no effect: those of the field, or else those of its section."""
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "needs" in extra:
        return Needs(tuple(extra["needs"]), extra["without"] == "refused")  # type: ignore[arg-type, union-attr]
    return getattr(section, "needs", ALWAYS_READ)


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        paths: dotted paths of the fields that it concerns, the one at fault first. A contradiction is not reported
            while one of its fields is wrong by itself.
        what: message with value got, value needed, and remedy.
        of_host: whether it is about files that this host lacks; a stored configuration may be read without them.
    """

    paths: tuple[str, ...]
    what: str
    of_host: bool = False

    @property
    def text(self) -> str:
        """The message."""
        return f"{self.paths[0]}: {self.what}"


_HIDDEN = "a secret is refused in the file, and not shown here"
OWN_PLACES: dict[tuple[str | int, ...], str] = {
    ("comet", "api_key"): f"{_HIDDEN}; set COMET_API_KEY in the environment, or write ~/.comet.config (mode 0600).",
    ("megasdc", "checkpoint", "archive", "address"): f"{_HIDDEN}; {REMEDY}.",
}
"""Remedy for each key that holds a secret, by path."""


def secret_problems(raw: Mapping[str, Any]) -> dict[tuple[str | int, ...], Problem]:
    """Refusals of secrets in a file, by path; none repeats one."""
    return {
        path: Problem(
            (".".join(map(str, path)),),
            OWN_PLACES.get(path, f"{_HIDDEN}: {SECRET_REMEDY}."),
        )
        for path in find_secrets(raw)
    }


_WORDS: dict[Any, str] = {
    int: "integer",
    float: "number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    dict: "object",
    Any: "any value",
}


_BOUNDS = ((annotated_types.Gt, "gt", ">"), (annotated_types.Ge, "ge", ">="), (annotated_types.Lt, "lt", "<"))


_ALL_BOUNDS = (*_BOUNDS, (annotated_types.Le, "le", "<="))


def json_type_text(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """The JSON values that an annotation allows, in words, such as ``integer > 0 or null``.

    Args:
        metadata: bounds that pydantic has separated from the annotation.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return json_type_text(arguments[0], [*arguments[1:], *metadata])
    if origin is Literal:
        return " or ".join(json.dumps(argument) for argument in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(
            json_type_text(argument, metadata if argument in (int, float) else ()) for argument in arguments
        )
    if origin is list:
        return _list_text(arguments[0], _flat(metadata))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "object"
    words = _WORDS.get(origin or annotation, str(annotation))
    bounds = [
        f"{sign} {getattr(item, name)}"
        for item in _flat(metadata)
        for kind, name, sign in _ALL_BOUNDS
        if isinstance(item, kind) and getattr(item, name) != LARGEST_INTEGER
    ]
    return f"{words} {' and '.join(bounds)}" if bounds else words


def field_text(field: FieldInfo) -> str:
    """The JSON values that a field allows, in words."""
    return json_type_text(field.annotation, field.metadata)


def _flat(metadata: Sequence[Any]) -> Iterator[Any]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from _flat(item.metadata)
        else:
            yield item


def _list_text(element: Any, metadata: Iterator[Any]) -> str:
    low, high = 0, None
    for item in metadata:
        if isinstance(item, annotated_types.MinLen):
            low = item.min_length
        if isinstance(item, annotated_types.MaxLen):
            high = item.max_length
    count = f"{low} " if low == high else f"at least {low} " if low and high is None else ""
    return f"list of {count}({json_type_text(element)})"


def model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section class that an annotation holds, also in a union, else None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Annotated, Union, types.UnionType):
        return next((found for part in get_args(annotation) if (found := model_in(part))), None)
    return None


def element_in(annotation: Any) -> Any:
    """Return the element type of a list annotation, else None."""
    return get_args(annotation)[0] if get_origin(annotation) is list else None


def field_rows(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo, AtResume]]:
    """Yield path, field and effect of a change at a resume, for every field that is not a section."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        inner = model_in(field.annotation)
        element = element_in(field.annotation)
        if inner is not None:
            yield from field_rows(inner, f"{path}.")
            continue
        yield path, field, at_resume_of(model, field)
        if element is not None and (inner := model_in(element)) is not None:
            yield from field_rows(inner, f"{path}[].")


def relations(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo, Needs]]:
    """Yield path, field and relation of every field that needs others to have an effect; entries of lists have none."""
    for name, field in section.model_fields.items():
        path = f"{prefix}{name}"
        if (inner := model_in(field.annotation)) is not None:
            yield from relations(inner, f"{path}.")
            continue
        needs = needs_of(section, field)
        if needs.settings and all(path != other for one in needs.settings for other, _ in alternatives(one)):
            yield path, field, needs
