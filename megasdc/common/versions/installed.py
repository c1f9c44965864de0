"""Check of the versions that a process runs with against those permitted and run."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib import metadata

from megasdc.common.errors import LaunchError
from megasdc.common.versions.tested import (
    COMBINATIONS,
    NAMES,
    NOT_RUN,
    PERMITTED,
    RUN_HERE,
    RUN_ON_GPU,
    short_version,
    spell,
    versions_state,
)

ANY_VARIABLE = "MEGASDC_ANY_VERSION"
"""1: versions outside the permitted range are used, with a warning at the start."""


def component_versions() -> dict[str, str]:
    """Version by component, read from package metadata without importing; absent where there is no metadata."""
    found = {"python": platform.python_version()}
    for name in NAMES:
        if name not in found:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue  # a source tree on PYTHONPATH
    return found


def range_problems(versions: Mapping[str, str | None]) -> list[str]:
    """A sentence for each component whose version is known and outside the permitted range."""
    problems = []
    for name, permitted in PERMITTED.items():
        version = versions.get(name)
        if version and ".".join(version.split(".")[:2]) not in permitted.minors:
            problems.append(f"{NAMES[name]} {version} is outside the permitted range {permitted}")
    return problems


def check_range(versions: Mapping[str, str | None]) -> None:
    """Refuses versions, by component, that megasdc does not permit.

    Raises:
        LaunchError: one is outside its range, and ``MEGASDC_ANY_VERSION=1`` is not set.
    """
    problems = range_problems(versions)
    if problems and os.environ.get(ANY_VARIABLE) != "1":
        raise LaunchError(
            f"{'; '.join(problems)}: install a permitted version (launch/constraints.txt has the tested ones), or set "
            f"{ANY_VARIABLE}=1 to try these anyway"
        )


def untested_versions(versions: Mapping[str, str], on_gpu: bool) -> str | None:
    """A warning that versions were not run together, or not on this kind of device; None: they were.

    Args:
        versions: by component; a missing one counts as not run.
        on_gpu: whether ranks compute on NVIDIA GPUs.
    """
    unknown = [NAMES[name] for name in NAMES if name not in versions]
    here = {name: versions.get(name, "of unknown version") for name in NAMES}
    state = NOT_RUN if unknown else versions_state(versions, on_gpu)
    if state == (RUN_ON_GPU if on_gpu else RUN_HERE):
        return None
    if state == NOT_RUN:
        done = f"were not run together{_alone(versions)}"
    else:
        done = f"were run on {'CPUs' if on_gpu else 'GPUs'} only"
    tested = "; ".join(f"{spell(one.versions)} ({one.state})" for one in COMBINATIONS if one.state != NOT_RUN)
    return f"{spell(here)} {done}: look at first results with care, or install what was run: {tested}"


def _alone(versions: Mapping[str, str]) -> str:
    """The versions that were not run in any combination, in brackets; empty: none."""
    never = [
        f"{NAMES[name]} {version}"
        for name, version in versions.items()
        if name in NAMES
        and short_version(name, version)
        not in {short_version(name, one.versions[name]) for one in COMBINATIONS if one.state != NOT_RUN}
    ]
    return f" ({', '.join(never)} in no combination)" if never else ""


def describe_versions() -> str:
    """The installed versions and their state, two lines for ``megasdc --version``."""
    versions = component_versions()
    lines = [f"{NAMES[name]} {versions.get(name, 'not installed')}" for name in NAMES]
    if problems := range_problems(versions):
        return f"{', '.join(lines)}\nnot permitted: {'; '.join(problems)}"
    state = versions_state(versions, on_gpu=False) if set(NAMES) <= versions.keys() else NOT_RUN
    return f"{', '.join(lines)}\nthese together: {state}"
