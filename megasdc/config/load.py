"""Loading of a JSON file into a checked run configuration.

The file is a DeepSpeed config plus the key ``megasdc``. Reading, overrides, preset, checks and defaults come in this
order; all problems are reported at once. Relative paths in the file are not changed, and so are relative to the folder
in which the run is started, not to the folder of the file.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from megasdc.common.errors import ConfigError
from megasdc.common.origin import CONFIG_FILE
from megasdc.config.contradictions import find_problems
from megasdc.config.deepspeed import MONITORS, DeepSpeedPart, fill_defaults, precision_of, recompute_interval_of
from megasdc.config.fields import Problem, at_resume_of, element_in, model_in, secret_problems
from megasdc.config.guard import GuardSettings
from megasdc.config.model import PRESETS
from megasdc.config.protect import missing_fields, put
from megasdc.config.read import apply_overrides, read_json, shown
from megasdc.config.schema import (
    Path_,
    home_problems,
    homes_of,
    locate_key,
    nearest,
    remove_key,
    remove_removed,
    reset_warnings,
    sort_out,
    type_problems,
    unusable_problems,
)
from megasdc.config.sections import OFF, STANDARD, STRICT, MegasdcSection

_PREFIX = "megasdc."
SCHEMA_KEY = "$schema"
"""Key by which a file names its schema, for editors."""


class WholeFile(DeepSpeedPart):
    """The whole file: DeepSpeed's keys and ours."""

    megasdc: MegasdcSection


@dataclass(frozen=True)
class RunConfig:
    """A checked configuration with every default filled in.

    Attributes:
        deepspeed: DeepSpeed's keys, without ``megasdc``. Of the three batch sizes, those that depend on the world
            size may be absent: `resolve_batch` returns all three.
        megasdc: our sections, presets expanded.
        source: the file it was read from; None if it came from a dict. Ignored by ``==``.
        allow_changed: fields that may differ from the checkpoint at a resume. Ignored by ``==``.
        reset: sentences about fields that were reset since an override has turned off what they need. Ignored by
            ``==``.
    """

    deepspeed: dict[str, Any]
    megasdc: MegasdcSection
    source: str | None = field(default=None, compare=False)
    allow_changed: tuple[str, ...] = field(default=(), compare=False)
    reset: tuple[str, ...] = field(default=(), compare=False)

    @property
    def precision(self) -> str:
        """Dtype in which the model trains: ``fp32``, ``bf16`` or ``fp16``."""
        return precision_of(self.deepspeed)

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer's state lies in the memory of the host, not of the device."""
        offload = self.deepspeed["zero_optimization"].get("offload_optimizer") or {}
        return bool(offload.get("device", "none") != "none")

    @property
    def recompute_interval(self) -> int:
        """Number of layers between two that keep their input to recompute from; 0: nothing is recomputed."""
        return recompute_interval_of(self.deepspeed)

    def resolved(self) -> dict[str, Any]:
        """Return the complete file with defaults filled in; loading it yields an equal configuration."""
        return {**copy.deepcopy(self.deepspeed), "megasdc": self.megasdc.model_dump(mode="json")}

    def in_folder(self, folder: Path) -> dict[str, Any]:
        """The same as of a run in another folder, which reports to nobody else and has no earlier checkpoints."""
        raw = {key: value for key, value in self.resolved().items() if key not in MONITORS}
        raw["megasdc"]["logging"] |= {"run_dir": str(folder), "prometheus": None}
        raw["megasdc"]["checkpoint"] |= {"folder": None}
        return raw


FindMore = Callable[["RunConfig"], Iterable[str]]


def load_config(
    path: Path | str,
    overrides: Sequence[str] = (),
    allow_changed: Sequence[str] = (),
    find_more: FindMore = lambda config: (),
) -> RunConfig:
    """Read, check and complete a JSON file.

    Args:
        overrides: texts ``a.b.c=value``, applied in order before anything is checked.
        allow_changed: paths ``a.b.c`` of fields that may differ at a resume, see `megasdc.config.changes`.
        find_more: further problems, such as those of a number of ranks; asked where every value can be used, also if
            some contradict each other.

    Raises:
        ConfigError: with every problem; each states dotted path, value got, values allowed, remedy.
    """
    raw, problems = read_json(path)
    if raw and set(raw) <= set(GuardSettings.model_fields):
        told = f"{', '.join(raw)}: it is the file of a guard; check it by: megasdc check-config --guard {path}"
        raise ConfigError([told], str(path))
    problems += _allowance_problems(allow_changed)
    return replace(_build(raw, overrides, str(path), problems, find_more), allow_changed=tuple(allow_changed))


def parse_config(
    raw: dict[str, Any], overrides: Sequence[str] = (), source: str | None = None, *, stored: bool = False
) -> RunConfig:
    """Check and complete a configuration that is already a dict, which is not modified.

    Args:
        overrides: as in `load_config`.
        source: its origin, for messages.
        stored: whether it is a saved result of `RunConfig.resolved`, perhaps changed or by an earlier version: fields
            that lack what they need, secrets, and removed keys are then silently reset or removed instead of refused,
            and files that it names may be those of another host.

    Raises:
        ConfigError: as `load_config`.
    """
    return _build(copy.deepcopy(raw), overrides, source, [], stored=stored)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a whole file: types, ranges, defaults and meanings of all fields.

    Contradictions between fields are checked by `load_config` only.
    """
    schema = WholeFile.model_json_schema()
    preset = schema["$defs"]["ModelSection"]["properties"]["preset"]
    preset["anyOf"] = [{"enum": list(PRESETS), "type": "string"}, {"type": "null"}]
    schema["properties"][SCHEMA_KEY] = {"type": "string", "description": "This schema; for editors alone."}
    return {SCHEMA_KEY: "https://json-schema.org/draft/2020-12/schema", **schema, "title": "A run of megasdc"}


def _build(
    raw: dict[str, Any],
    overrides: Sequence[str],
    source: str | None,
    problems: list[str],
    find_more: FindMore = lambda config: (),
    *,
    stored: bool = False,
) -> RunConfig:
    raw.pop(SCHEMA_KEY, None)
    if stored:
        remove_removed(raw)
    before = copy.deepcopy(raw) if overrides else raw
    problems += apply_overrides(raw, overrides, _list_default)
    secrets = secret_problems(raw)
    for path in secrets:  # first, so that no other message shows one
        remove_key(raw, path)
    wrong = _expand_preset(raw) | unusable_problems(raw) | type_problems(raw, WholeFile)
    wrong |= {} if stored else secrets | home_problems(raw)
    found = list(wrong.values())
    bad = [path for problem in found for path in problem.paths]
    file = _repaired(raw, list(wrong))
    file = _expand_protect(raw, file, stored=stored)
    own, names = raw.get("megasdc"), [text.partition("=")[0].strip() for text in overrides]
    of_file = _sections_before(before, file.protect, stored=stored) if overrides else own
    given_ones = [one if isinstance(one, dict) else {} for one in (own, of_file)]
    reset, refused = sort_out(file, given_ones[0], given_ones[1], names, _PREFIX, stored=stored)
    file = _repaired(raw, [("megasdc", *one.path.split(".")) for one in reset]) if reset else file
    given = {key: value for key, value in raw.items() if key != "megasdc"}
    deepspeed = fill_defaults(given, file.training.steps, file.checkpoint.storage == "node_local")
    for problem in (*refused, *find_problems(deepspeed, given, file)):
        if stored and problem.of_host:
            continue
        if not any(_inside(path, other) for path in problem.paths for other in bad):
            found.append(problem)
    config = RunConfig(deepspeed, file, source, reset=() if stored else tuple(reset_warnings(reset, _PREFIX)))
    problems += [problem.text for problem in found]
    problems += [] if wrong else find_more(config)
    if problems:
        raise ConfigError(problems, source)
    return config


def _allowance_problems(names: Iterable[str]) -> list[str]:
    """Problems of names after ``--allow-changed``: no field, or a field whose change is always refused."""
    problems = []
    for name in names:
        path: Path_ = tuple(int(key) if key.isdecimal() else key for key in name.split("."))
        found, info, annotation = locate_key(path, WholeFile)
        section = model_in(locate_key(path[:-1], WholeFile)[2]) if path[:-1] else WholeFile
        if section is not None and model_in(annotation) is not None:
            problems.append(f"--allow-changed {name}: is a section; name its fields, one by one.")
        elif found != path or info is None or section is None:
            homes = homes_of(str(path[-1]), WholeFile)
            hint = f"did you mean {' or '.join(homes[:3])}?" if homes else "see megasdc config-table."
            problems.append(f"--allow-changed {name}: is no field of the configuration; {hint}")
        elif at_resume_of(section, info) in ("refused", "universal"):
            problems.append(
                f"--allow-changed {name}: no run can resume with another value; start a new run in another "
                "megasdc.logging.run_dir, or see docs/guides/resume.md."
            )
    return problems


def _expand_preset(raw: dict[str, Any]) -> dict[Path_, Problem]:
    """Add a preset's sizes that are not given, in place; an unknown preset marks the sizes not given as unreliable."""
    section = raw.get("megasdc")
    model = section.get("model") if isinstance(section, dict) else None
    name = model.get("preset") if isinstance(model, dict) else None
    if not isinstance(section, dict) or not isinstance(model, dict) or not isinstance(name, str):
        return {}
    if name in PRESETS:
        section["model"] = {**PRESETS[name], **model}
        return {}
    meant = nearest(name, PRESETS)
    hint = f"did you mean {meant!r}? " if meant else ""
    what = f"got {shown(name)}; {hint}allowed: null, {', '.join(PRESETS)}."
    sizes = {key for preset in PRESETS.values() for key in preset} - set(model)
    paths = ("megasdc.model.preset", *(f"megasdc.model.{key}" for key in sorted(sizes)))
    return {("megasdc", "model", "preset"): Problem(paths, what)}


def _expand_protect(raw: dict[str, Any], file: MegasdcSection, *, stored: bool) -> MegasdcSection:
    """Add the word `protect` and its fields that a file without wrong values does not give, in place.

    ``file``: its sections, ``stored``: as in ``parse_config``. Returns the sections with these fields.
    """
    section = raw.get("megasdc")
    if not isinstance(section, dict):
        return file
    section.setdefault("protect", OFF if stored else word_of_run(file.logging.run_dir) or STANDARD)
    file = file.model_copy(update={"protect": section["protect"]})
    given = {key: value for key, value in raw.items() if key != "megasdc"}
    if file.protect == OFF:
        return file
    deepspeed = fill_defaults(given, file.training.steps, file.checkpoint.storage == "node_local")
    fields = missing_fields(file, deepspeed, section)
    for path, value in fields.items():
        put(section, path, value)
    return _repaired(raw, []) if fields else file


def word_of_run(run_dir: Path | str) -> str | None:
    """The word `protect` of the run that a folder holds, "off" of one that is older than the word; None: no run."""
    path = Path(run_dir) / CONFIG_FILE
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))["megasdc"].get("protect", OFF)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return OFF  # a run whose record is damaged: who reads it says so
    return kept if kept in (OFF, STANDARD, STRICT) else OFF


def _sections_before(raw: dict[str, Any], word: str, *, stored: bool) -> Any:
    """The sections of a file before its overrides, with the fields of its word `protect`; its wrong values removed.

    ``word``: that of the file with its overrides, which a file without one has as well.
    """
    section = raw.get("megasdc")
    if isinstance(section, dict) and section.setdefault("protect", word) != OFF:
        wrong = unusable_problems(raw) | type_problems(raw, WholeFile)
        _expand_protect(raw, _repaired(raw, list(wrong)), stored=stored)
    return section


def _list_default(path: Path_) -> list[Any] | None:
    found, info, annotation = locate_key(path, WholeFile)
    if found != path or info is None or element_in(annotation) is None or info.is_required():
        return None
    default = info.get_default(call_default_factory=True, validated_data={})
    return [item.model_dump(mode="json") if isinstance(item, BaseModel) else item for item in default]


def _inside(path: str, other: str) -> bool:
    """Whether the paths are equal or one contains the other."""
    return path == other or path.startswith(f"{other}.") or other.startswith(f"{path}.")


_PLACEHOLDERS: dict[str, dict[str, Any]] = {
    "data": {"path": "?"},
    "training": {"steps": 1},
    "logging": {"run_dir": "?"},
}


def _repaired(raw: dict[str, Any], bad: Sequence[Path_]) -> MegasdcSection:
    """Build our sections without the wrong values, removed in place, so that the other fields can be cross-checked."""
    for path in bad:
        remove_key(raw, _without_needed(path))
    section = raw.get("megasdc")
    merged: dict[str, Any] = dict(section) if isinstance(section, dict) else {}
    for key, needed in _PLACEHOLDERS.items():
        merged[key] = {**needed, **merged.get(key, {})}
    return MegasdcSection.model_validate(merged)


def _without_needed(path: Path_) -> Path_:
    """Shorten a path to its list if it names a required field of a list item."""
    _, info, _ = locate_key(path, WholeFile)
    numbers = [place for place, item in enumerate(path) if isinstance(item, int)]
    return path[: numbers[-1]] if numbers and info is not None and info.is_required() else path
