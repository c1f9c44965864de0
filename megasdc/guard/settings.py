"""Reading of a guard's file."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megasdc.config.read import read_json
from megasdc.config.schema import type_problems, unusable_problems
from megasdc.config.sections.guard import GuardSettings
from megasdc.errors import ConfigError


def load_settings(given: Path | str | Mapping[str, Any]) -> GuardSettings:
    """Read and check the settings of a guard.

    Args:
        given: path of a JSON file, or what it would hold.

    Raises:
        ConfigError: with every problem; each states dotted path, value got, values allowed, remedy.
    """
    if isinstance(given, Mapping):
        raw, problems, source = copy.deepcopy(dict(given)), list[str](), None
    else:
        raw, problems = read_json(given)
        source = str(given)
    found = unusable_problems(raw) | type_problems(raw, GuardSettings)
    problems += [one.text for one in found.values()]
    if problems:
        raise ConfigError(problems, source)
    return GuardSettings.model_validate(raw)
