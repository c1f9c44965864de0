"""How does a bundle of faults that imitates one unhealthy node become specs?

The profiles are JSON files beside this module, in ``profiles/``; a user's own file of the same form may be named by
its path.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from pydantic import Field, ValidationError

from megasdc.config.fault_checks import PLACE_FIELDS
from megasdc.config.fault_sections import FaultSpec
from megasdc.config.fields import Section
from megasdc.config.read import read_json
from megasdc.errors import ConfigError

PROFILE_FOLDER = Path(__file__).with_name("profiles")


class NodeProfile(Section):
    """One node as published, and what had to be assumed to imitate it."""

    description: str = Field(..., description="Which node.")
    source: str = Field(..., description="Where its figures were published.")
    published: dict[str, float] = Field(..., description="The figures, by name.")
    assumed: list[str] = Field(..., description="What is not published and was chosen, a sentence each.")
    faults: list[FaultSpec] = Field(..., description="What imitates it.")


def profile_names() -> list[str]:
    """Names of the profiles that come with the package."""
    return sorted(path.stem for path in PROFILE_FOLDER.glob("*.json"))


def load_profile(name: str) -> NodeProfile:
    """Read a profile by its name, or from a file whose path ends in ``.json``.

    Raises:
        ConfigError: there is none, or it is not one.
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
    """Put each profile's faults in the place of the entry that names it, with the entry's ranks and steps.

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
