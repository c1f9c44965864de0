"""Base class of all sections, types of their numbers, and effect of a change at a resume."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

LARGEST_INTEGER = 2**53
"""Largest integer that every JSON reader keeps exactly (RFC 8259, section 6); no counter needs a larger one."""
ABSENT = "absent: "
"""Begins, in a description, what a field is where it is not given, if the default of its class does not say it."""

PositiveInt = Annotated[int, Field(gt=0, le=LARGEST_INTEGER)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST_INTEGER)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, lt=1)]

AtResume = Literal["refused", "universal", "flag", "applied", "-"]
"""Effect of a field whose value differs from that in the checkpoint from which a run resumes.

refused: the saved weights would be those of another model. universal: refused too, but a new run may start with it
from a universal checkpoint. flag: refused unless ``--allow-changed`` names the field. applied: used from the first step
on, and reported. -: it affects neither training nor detection, or it controls how a start is made.
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
        settings: all must hold. Each is a dotted path from the root of the sections, which must be none of false, 0,
            null and empty, or ``path=value`` with the value as JSON; " or " separates alternatives.
        refused: whether a value that asks for something is refused without them; False: it is warned of.
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
        default: of the field; ``...``: it must be given.
        description: meaning, unit, range, and what 0 or null means.
        at_resume: effect of a change at a resume, such as ``REFUSED``; None: the one that its section states.
        needs: without what it has no effect, such as ``asks("audit.enabled")``; None: as its section states.
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
    """Without what this field has no effect: as it states, or else its section."""
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "needs" in extra:
        return Needs(tuple(extra["needs"]), extra["without"] == "refused")  # type: ignore[arg-type, union-attr]
    return getattr(section, "needs", ALWAYS_READ)
