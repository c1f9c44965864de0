"""Short facts of a run: configuration, layout and hosts, versions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megasdc.checkpoint.files import list_steps, step_folder
from megasdc.checkpoint.manifest import read_manifest
from megasdc.common.errors import MegasdcError
from megasdc.common.words import few
from megasdc.config.deepspeed import precision_of
from megasdc.config.drop_compute import BACKWARD_PASS
from megasdc.config.faults import DelaySpec, FaultSpec, ProcessFaultSpec
from megasdc.config.hooks import HookSpec
from megasdc.ops.run_folder.record import RunRecord
from megasdc.ops.run_folder.status import guard_of

LISTED_HOSTS = 12
"""Maximum of hosts that are named."""
OWN_PLACE = ("megasdc.logging.run_dir", "megasdc.checkpoint.folder")
"""Settings that differ between any two runs."""
_SPECS: dict[str, TypeAdapter[Any]] = {
    "megasdc.faults": TypeAdapter(FaultSpec),
    "megasdc.process_faults": TypeAdapter(ProcessFaultSpec),
    "megasdc.delay": TypeAdapter(DelaySpec),
    "megasdc.optimizer_hooks": TypeAdapter(HookSpec),
}
"""Lists of sections, of which only non-default fields are shown."""
_NAMED = {
    "learning rate": "optimizer.params.lr",
    "betas": "optimizer.params.betas",
    "weight decay": "optimizer.params.weight_decay",
    "schedule": "scheduler.type",
    "warm-up steps": "scheduler.params.warmup_num_steps",
    "norm clipping": "gradient_clipping",
    "global batch": "train_batch_size",
    "sequence length": "megasdc.data.sequence_length",
    "data": "megasdc.data.path",
    "seed": "megasdc.training.seed",
    "deterministic": "megasdc.determinism.enabled",
}


def highlights(run: RunRecord) -> dict[str, str]:
    """The main settings of a configuration, by name, or what a guard did; empty where it is not known."""
    if not run.config:
        guard = guard_of(run)
        return {} if guard is None else {"guard": str(guard)}
    found = {"model": _model(run), "precision": precision_of(run.config)}
    found |= {name: format_value(value) for name, path in _NAMED.items() if (value := run.setting(path)) is not None}
    return found | _features(run)


def _model(run: RunRecord) -> str:
    sizes = run.setting("megasdc.model") or {}
    named = f"{sizes['preset']}: " if sizes.get("preset") else ""
    parts = (("layers", "num_layers"), ("wide", "hidden_size"), ("heads", "num_attention_heads"))
    return named + ", ".join(f"{sizes[key]:,} {word}" for word, key in parts if isinstance(sizes.get(key), int))


def _features(run: RunRecord) -> dict[str, str]:
    """The enabled features, with their main settings."""
    found = {}
    if run.setting("megasdc.audit.enabled"):
        found["audits"] = f"every {run.setting('megasdc.audit.interval')} steps"
    if run.setting("megasdc.sdc.always_on.enabled"):
        found["checks of every step"] = "on"
    if hooks := run.setting("megasdc.optimizer_hooks"):
        found["gradient bounds"] = ", ".join(_hook(one) for one in hooks)
    if run.setting("megasdc.drop_compute.enabled"):
        tau = run.setting("megasdc.drop_compute.threshold")
        granularity = run.setting("megasdc.drop_compute.granularity")
        ends = f", granularity {granularity}" if granularity == BACKWARD_PASS else ""
        found["DropCompute"] = f"threshold {format_value(tau)}{ends}"
    if faults := run.setting("megasdc.faults"):
        found["faults, on purpose"] = ", ".join(_fault(one) for one in faults)
    if faults := run.setting("megasdc.process_faults"):
        found["process faults, on purpose"] = ", ".join(str(one.get("kind")) for one in faults)
    if delays := run.setting("megasdc.delay"):
        found["delays, on purpose"] = ", ".join(str(one.get("kind")) for one in delays)
    return found


def _hook(spec: Mapping[str, Any]) -> str:
    theta = f" {format_value(spec['theta'])}" if spec.get("theta") is not None else ""
    return f"{spec.get('hook')}{theta}"


def _fault(spec: Mapping[str, Any]) -> str:
    what = f"profile {spec['profile']}" if spec.get("profile") else f"{spec.get('kind')} in {spec.get('phase')}"
    return f"{what} on rank {spec['rank']}" if spec.get("rank") is not None else what


def places(run: RunRecord) -> dict[str, str]:
    """Layout, ranks and hosts of the last start, by name."""
    found = {}
    starts = run.of("start", "run")
    if starts:
        fields = starts[-1].fields
        layout = fields.get("layout")
        if isinstance(layout, dict):
            found["layout"] = ", ".join(f"{name} {size}" for name, size in layout.items())
        found["ranks"] = format_value(fields.get("world_size"))
    hosts = sorted({one.host for one in run.since_last_start(run.events)})
    if hosts:
        found["hosts"] = few(hosts, LISTED_HOSTS)
    return found


def run_versions(run: RunRecord) -> dict[str, str]:
    """Package versions reported at the run's last start, else those in its newest checkpoint; empty: not known."""
    starts = run.of("start", "run")
    told = starts[-1].fields.get("versions") if starts else None
    if isinstance(told, dict):
        return {str(name): str(version) for name, version in told.items()}
    folder = checkpoints(run)
    for step in reversed(list_steps(folder)):
        try:
            return dict(read_manifest(folder / step_folder(step)).versions)
        except MegasdcError:
            continue  # damaged, which verify-checkpoint reports; an older one has versions too
    return {}


def checkpoints(run: RunRecord) -> Path:
    """The configured folder of a run's checkpoints; by default one in the run folder."""
    configured = run.setting("megasdc.checkpoint.folder")
    return Path(configured) if configured else run.path / "checkpoints"


def differing_settings(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Settings in which runs differ: (dotted path, value of each run); "-" where one has none."""
    flat = [dict(_flatten(run.config)) for run in runs]
    paths = dict.fromkeys(path for one in flat for path in one)
    rows = [(path, [one.get(path, "-") for one in flat]) for path in paths if path not in OWN_PLACE]
    return [(path, values) for path, values in rows if len(set(values)) > 1]


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flatten(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, ", ".join(_spec(path, one) for one in value) if path in _SPECS and value else format_value(value)


def _spec(path: str, value: Any) -> str:
    """An entry of a list of sections: its non-default fields."""
    try:
        said = _SPECS[path].validate_python(value).model_dump(mode="json", exclude_defaults=True)
    except ValidationError:
        return format_value(value)  # of another version of the package
    return " ".join(f"{key} {format_value(one)}" for key, one in said.items())


def format_value(value: Any) -> str:
    """A value as readable text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)
