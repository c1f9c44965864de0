"""Reading of a guard's file."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megasdc.config.read import apply_overrides, read_json
from megasdc.config.schema import type_problems, unusable_problems
from megasdc.config.sections.guard import GuardSettings
from megasdc.config.sections.supervise import SuperviseSection
from megasdc.errors import ConfigError


def load_settings(
    given: Path | str | Mapping[str, Any], overrides: Sequence[str] = (), run_dir: str | None = None
) -> GuardSettings:
    """Read and check the settings of a guard.

    Args:
        given: path of a JSON file, or what it would hold.
        overrides: texts ``a.b.c=value``.
        run_dir: folder of the run where neither names one.

    Raises:
        ConfigError: with every problem; each states dotted path, value got, values allowed, remedy.
    """
    if isinstance(given, Mapping):
        raw, problems, source = copy.deepcopy(dict(given)), list[str](), None
    else:
        raw, problems = read_json(given)
        source = str(given)
    problems += apply_overrides(raw, overrides, lambda _: None)
    if run_dir is not None and isinstance(raw.get("logging", {}), dict):
        raw.setdefault("logging", {}).setdefault("run_dir", run_dir)
    found = unusable_problems(raw) | type_problems(raw, GuardSettings)
    problems += [one.text for one in found.values()]
    if not problems:
        settings = GuardSettings.model_validate(raw)
        if not (problems := _unsupported(settings.supervise)):
            return settings
    raise ConfigError(problems, source)


def _unsupported(supervise: SuperviseSection) -> list[str]:
    """What megasdc does with its own runs alone."""
    problems = []
    if supervise.min_hosts is not None:
        problems.append(
            f"supervise.min_hosts: got {supervise.min_hosts}; allowed: null, since only megasdc's own runs can go on "
            "from a checkpoint with other numbers of hosts."
        )
    if supervise.rewind_steps:
        problems.append(
            f"supervise.rewind_steps: got {supervise.rewind_steps}; allowed: 0, since only megasdc's own runs can skip "
            "samples."
        )
    return problems
