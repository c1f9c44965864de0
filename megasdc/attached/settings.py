"""Reading of a guard's file."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.attached.protect import Conditions, expand
from megasdc.common.errors import ConfigError
from megasdc.config.fields import secret_problems
from megasdc.config.guard import EARLIER_NAMES, GuardAlwaysOnSection, GuardSettings
from megasdc.config.read import apply_overrides, read_json
from megasdc.config.schema import home_problems, remove_key, reset_warnings, sort_out, type_problems, unusable_problems
from megasdc.config.sections import OFF

logger = logging.getLogger(__name__)

TRIAL_VARIABLE = "MEGASDC_GUARD_TRIAL"
"""Environment variable of a trial: JSON with ``folder`` and ``steps``. The guard then traces all steps to that folder,
saves nothing, and ends the process after so many steps (``megasdc check-determinism``)."""
RUN_VARIABLE = "MEGASDC_GUARD_RUN"
"""Environment variable of a rank that ``megasdc run`` has started: JSON with ``folder``, that of the run, and
``protect``, the word of its command line or None."""
WHY_NOT = {
    "repair": "the step's micro-batches are the loop's, and cannot be run again for use",
    "isolate": "the program would have to build its groups, model and data again on the ranks that go on",
}
"""Reasons why a guard does not have some policies."""
FOREIGN = ("megasdc", "train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization")
"""Keys that only configurations of runs or of DeepSpeed have."""


@dataclass(frozen=True)
class ReproRun:
    """A short run that is compared with another one."""

    folder: str
    steps: int

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> ReproRun | None:
        """Trial of this process, from its environment; None: it is an ordinary training."""
        text = environ.get(TRIAL_VARIABLE)
        return cls(**json.loads(text)) if text else None

    def applied(self, settings: GuardSettings) -> GuardSettings:
        """Copy of the settings with the changes of a trial."""
        return settings.model_copy(
            update={
                "protect": OFF,
                "logging": settings.logging.model_copy(update={"run_dir": self.folder}),
                "audit": settings.audit.model_copy(update={"enabled": False}),
                "sdc": settings.sdc.model_copy(update={"always_on": GuardAlwaysOnSection(), "golden": None}),
                "trace": settings.trace.model_copy(update={"enabled": True, "interval": 1}),
            }
        )


@dataclass(frozen=True)
class RankOfRun:
    """What ``megasdc run`` tells the guard of a program; of one that was started otherwise, nothing.

    Args:
        run_dir: folder of the run; None: nothing has started it.
        protect: word of the command line, which stands in place of the guard's own; None: none.
    """

    run_dir: str | None = None
    protect: str | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> RankOfRun:
        """That of this process, from its environment."""
        text = environ.get(RUN_VARIABLE)
        return cls(**json.loads(text)) if text else cls()

    def folder(self, program: str) -> str:
        """Folder of a guard whose settings name none.

        Args:
            program: path of the script, as in ``sys.argv``.
        """
        script = Path(program)
        name = script.parent.name if script.stem == "__main__" else script.stem
        return self.run_dir or f"runs/{name if name and not name.startswith('-') else 'guarded'}"


def with_word(settings: GuardSettings, word: str | None) -> GuardSettings:
    """Copy of settings with another word `protect`; None: their own.

    Raises:
        ConfigError: there is no such word.
    """
    if word is None:
        return settings
    given = {**settings.model_dump(mode="json", exclude_unset=True), "protect": word}
    if problems := type_problems(given, GuardSettings):
        raise ConfigError([one.text for one in problems.values()])
    return GuardSettings.model_validate(given)


def load_settings(
    given: Path | str | Mapping[str, Any],
    overrides: Sequence[str] = (),
    run_dir: str | None = None,
    *,
    word_needed: bool = False,
) -> GuardSettings:
    """Read and check the settings of a guard; the fields of their word are added when it is attached.

    Args:
        given: path of a JSON file, or its contents.
        overrides: changes of settings, as texts ``a.b.c=value``.
        run_dir: folder of the run where neither names one.
        word_needed: whether that is so only where the file or an override has a word other than off in `protect`.

    Raises:
        ConfigError: settings are wrong; each problem states dotted path, value got, values allowed, remedy.
    """
    if isinstance(given, Mapping):
        raw, problems, source = copy.deepcopy(dict(given)), list[str](), None
    else:
        raw, problems = read_json(given)
        source = str(given)
    if foreign := [key for key in FOREIGN if key in raw]:
        needed = 'such as {"logging": {"run_dir": "runs/guarded"}}, see docs/guides/attach.md.'
        told = f"{', '.join(foreign)}: of files of runs or of DeepSpeed alone; needed: the file of a guard, {needed}"
        raise ConfigError([told], source)
    before, names = copy.deepcopy(raw), [text.partition("=")[0].strip() for text in overrides]
    problems += apply_overrides(raw, overrides, lambda _: None)
    _rename_earlier(before, ())
    _rename_earlier(raw, names)
    is_asked = not word_needed or any(file.get("protect", OFF) != OFF for file in (before, raw))
    for file in (before, raw):
        if run_dir is not None and is_asked and isinstance(file.get("logging", {}), dict):
            file.setdefault("logging", {}).setdefault("run_dir", run_dir)
    secrets = secret_problems(raw)
    for path in secrets:  # first, so that no other message shows one
        remove_key(raw, path)
    found = unusable_problems(raw) | type_problems(raw, GuardSettings) | secrets | home_problems(raw)
    problems += [one.text for one in found.values()]
    if not problems:
        names = [EARLIER_NAMES.get(name, name) for name in names]
        given, of_file = _with_fields(raw), _with_fields(before)
        settings = GuardSettings.model_validate(given)
        reset, refused = sort_out(settings, given, of_file, names, "", stored=False)
        for one in reset:
            remove_key(raw, tuple(one.path.split(".")))
        for warning in reset_warnings(reset, ""):
            logger.warning("%s", warning)
        settings = GuardSettings.model_validate(raw)
        if not (problems := [one.text for one in refused] + _unsupported(settings)):
            return settings
    raise ConfigError(problems, source)


def _with_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """A file with the fields of its word, as far as they are known before a start; one with wrong values as it is."""
    if raw.get("protect", OFF) == OFF or type_problems(raw, GuardSettings):
        return raw
    found = expand(GuardSettings.model_validate(raw), Conditions())
    return found.model_dump(mode="json", exclude_unset=True)


def _rename_earlier(raw: dict[str, Any], overridden: Collection[str]) -> None:
    """Give keys of earlier versions their names of now, in place; a file that has both is refused for the earlier one.

    Args:
        overridden: dotted paths of overrides, which are stronger than what the file has by the other name.
    """
    for old, new in EARLIER_NAMES.items():
        (at, key), (to, name) = old.split("."), new.split(".")
        if not isinstance(given := raw.get(at), dict) or key not in given:
            continue
        if not isinstance(target := raw.setdefault(to, {}), dict) or (
            name in target and not {old, new} & {*overridden}
        ):
            continue
        value = given.pop(key)
        if key == "hang_after_s" and value == 0:  # nothing watches
            name, value = "enabled", False
        if new not in overridden:
            target[name] = value


def golden_problems(settings: GuardSettings, *, writes: bool) -> list[str]:
    """Problems of the golden file's path on this host, a sentence each.

    Args:
        writes: whether this process is the one that writes a golden file.
    """
    path = settings.sdc.golden
    if path is None:
        return []
    if settings.golden.record:
        return recording_problems(path) if writes else []
    exists = _exists(path)
    if isinstance(exists, str):
        return [exists]
    if exists:
        return []
    return [f"sdc.golden: there is no file {path} on this host; record it by golden.record, or copy it here."]


def recording_problems(path: Path | str) -> list[str]:
    """Reasons why this host cannot record a golden file at a path, a sentence each; its folder need not exist."""
    exists = _exists(path)
    if isinstance(exists, str):
        return [exists]
    if exists:
        return [existing(path)]
    folder = next(one for one in Path(path).absolute().parents if os.path.lexists(one))
    if not folder.is_dir():
        return [f"sdc.golden: {path} cannot be written: {folder} is no folder; choose another path."]
    if not os.access(folder, os.W_OK | os.X_OK):
        return [f"sdc.golden: {path} cannot be written: this user may not write to {folder}; choose another path."]
    return []


def _exists(path: Path | str) -> bool | str:
    """Whether the path exists; a text: why that cannot be tested."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        return f"sdc.golden: {path} cannot be looked at on this host: {why}; choose another path."
    return True


def existing(path: Path | str) -> str:
    """Error message where a golden file is to be recorded and exists already."""
    return f'golden.record: got true, and sdc.golden "{path}" exists; remove it, or set golden.record to false.'


def _unsupported(settings: GuardSettings) -> list[str]:
    """Problems of settings that megasdc supports only in its own runs, a sentence each."""
    supervise, problems = settings.supervise, list[str]()
    for name, policy in settings.sdc.policy:
        if policy in WHY_NOT:
            problems.append(f'sdc.policy.{name}: got "{policy}"; allowed: "halt" or "warn", since {WHY_NOT[policy]}.')
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
