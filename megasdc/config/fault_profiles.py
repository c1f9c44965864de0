"""Node profiles: sets of faults that simulate one unhealthy node, expanded to fault specs.

The profiles are JSON files beside this module, in ``profiles/``; a user's own file of the same format may be given by
its path.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from pydantic import Field, ValidationError

from megasdc.common.errors import ConfigError
from megasdc.config.fields import Section
from megasdc.config.read import read_json
from megasdc.config.sections.faults import PLACE_FIELDS, FaultSpec

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
