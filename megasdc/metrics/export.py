"""Rebuilding a sink from ``metrics.jsonl``, which has every number of a run once, also after resumes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.common.durable import parse_json
from megasdc.common.errors import DataError, LaunchError, StorageError
from megasdc.common.imports import is_installed
from megasdc.common.origin import CONFIG_FILE, read_identity
from megasdc.common.program import OnProgress
from megasdc.metrics.sinks import CsvSink, PrometheusSink, Sink, TensorBoardSink, WandbRun, WandbSink, shown_config
from megasdc.metrics.writer import METRICS_FILE, PLACE, read_metrics

PROMETHEUS_FILE = "metrics.prom"


@dataclass(frozen=True)
class Exported:
    """Result of an export.

    Args:
        to: kind of the sink.
        out: folder that was written.
        lines: number of lines of ``metrics.jsonl`` that were read.
        values: number of values in these lines.
    """

    to: str
    out: str
    lines: int
    values: int


def export_metrics(run_dir: Path, to: str, out: Path, on_progress: OnProgress) -> Exported:
    """Rebuild a sink from a run's metrics; the run may be training.

    Args:
        to: kind of the sink, one of ``KINDS``.
        out: folder to write; absent or empty.
        on_progress: function called after each line.

    Raises:
        DataError: the run has no metrics.
        LaunchError: the package of the sink is not installed.
        StorageError: the folder holds something, or cannot be written.
    """
    rows = read_metrics(run_dir)
    if not rows:
        replicas = any(run_dir.glob(f"replica_*/{METRICS_FILE}"))
        more = "; give one of its folders replica_K" if replicas else ""
        raise DataError(f"{run_dir} has no metrics: {METRICS_FILE} is absent or holds no whole line{more}")
    if to == "wandb" and not is_installed("wandb"):
        raise LaunchError("the package wandb is not installed; run `pip install wandb`")
    if out.is_dir() and any(out.iterdir()):
        raise StorageError(f"{out} is not empty; choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    sink = KINDS[to](run_dir, out)
    values = 0
    for number, row in enumerate(rows, 1):
        shown = {name: value for name, value in row.items() if name not in PLACE}
        sink.write(row["step"], row["time"], shown)
        values += len(shown)
        on_progress("writing", number, len(rows))
    sink.close()
    if isinstance(sink, PrometheusSink):
        (out / PROMETHEUS_FILE).write_bytes(sink.text())
    return Exported(to, str(out), len(rows), values)


def _tensorboard(run_dir: Path, out: Path) -> Sink:
    return TensorBoardSink(out, 0)


def _csv(run_dir: Path, out: Path) -> Sink:
    return CsvSink(out, 0)


def _prometheus(run_dir: Path, out: Path) -> Sink:
    identity = read_identity(run_dir)
    section = _config(run_dir).get("megasdc", {}).get("local_sgd") or {}
    replica = section.get("replica") if section.get("replicas") else None
    return PrometheusSink(_run_name(run_dir), 0 if identity is None else identity.attempt, replica=replica)


def _wandb(run_dir: Path, out: Path) -> Sink:
    """A run of W&B on this machine, to be sent by ``wandb sync``, with all starts of our run."""
    config = _config(run_dir)
    section = config.get("wandb", {})
    where = WandbRun(
        folder=out,
        run=_run_name(run_dir),
        name="exported",
        project=section.get("project", "deepspeed"),
        team=section.get("team"),
        group=section.get("group"),
        config=shown_config(config),
        tags=("exported",),
        mode="offline",
    )
    return WandbSink(where, run_dir)


def _run_name(run_dir: Path) -> str:
    """Id of the run; of one of an earlier version the name of its folder."""
    identity = read_identity(run_dir)
    return run_dir.resolve().name if identity is None else identity.run


def _config(run_dir: Path) -> dict[str, Any]:
    """The run's configuration; empty where it was not kept."""
    path = run_dir / CONFIG_FILE
    if not path.exists():
        return {}
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}") from error
    return content if isinstance(content, dict) else {}


KINDS: Mapping[str, Callable[[Path, Path], Sink]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "csv": _csv,
    "prometheus": _prometheus,
}
"""Function that opens each kind of sink, from a run folder and a folder to write."""
