"""Sinks: programs and files that show metrics beside ``metrics.jsonl``; one that fails is reported and closed.

CSV: a file a metric, named and laid out as DeepSpeed's ``csv_monitor`` does. Differences: one head line a file, not
one a start; rows after the step from which a run goes on are dropped; ``nan`` stands for what ``metrics.jsonl`` has as
null.

TensorBoard: an event file a start; steps that are done again after a resume replace those of the start before.

Prometheus: the last value of each metric as a gauge, on a port of one address or as text.

DeepSpeed's monitor, for Comet alone.

Weights & Biases: one of its runs over all starts, with the run's id, or one for each start in a group of that id, with
the incidents of the run folder. A run of W&B drops what it gets of steps that it already has: steps that are done again
after a resume are not sent again, or are in a run of their own. ``WANDB_MODE=offline`` writes to the run folder alone,
for ``wandb sync``.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import importlib
import json
import logging
import math
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

import megasdc
from megasdc.common.durable import LineFile, parse_json, replacing, write_durably
from megasdc.common.wire import split_address
from megasdc.metrics.names import METRICS

if TYPE_CHECKING:
    from prometheus_client import Gauge


Values = Mapping[str, float | int | None]
"""Metrics of one line by name, as ``metrics.jsonl`` holds them: None for NaN and Inf."""
OnFailure = Callable[[str, str], None]
"""Function called with the name of a sink that failed, and the reason."""


class Sink(ABC):
    """Shows metrics; a failure in one stops neither the run nor the other sinks."""

    name: str

    @abstractmethod
    def write(self, step: int, at: float, values: Values) -> None:
        """Show the metrics of one line.

        Args:
            step: optimizer step, the first is 1; it never falls.
            at: seconds since the epoch.
            values: values by name.
        """

    @abstractmethod
    def close(self) -> None:
        """Write buffered values and close; nothing is written afterwards."""


def number_of_value(value: float | int | None) -> float | int:
    """A value of a line as a number: NaN for None, whether it was NaN or Inf."""
    return math.nan if value is None else value


def open_sinks(openers: Mapping[str, Callable[[], Sink]], on_failure: OnFailure) -> list[Sink]:
    """Open sinks by name; those that fail are reported and left out, since all numbers are in ``metrics.jsonl``."""
    opened = []
    for name, opener in openers.items():
        try:
            opened.append(opener())
        except Exception as error:  # whatever a tracker raises: no login, no network, no port
            on_failure(name, describe(error))
    return opened


def describe(error: Exception) -> str:
    """An error in one line."""
    text = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def csv_path(folder: Path, name: str) -> Path:
    """Path of a metric's CSV file."""
    return folder / f"{name.replace('/', '_')}.csv"


class CsvSink(Sink):
    """Appends ``step,value`` to a file for each metric.

    Args:
        folder: folder of the files; created if absent.
        step: last step before this start; later rows are dropped.
    """

    name = "csv_monitor"

    def __init__(self, folder: Path | str, step: int) -> None:
        self._folder = Path(folder)
        self._files: dict[str, LineFile] = {}
        self._folder.mkdir(parents=True, exist_ok=True)
        for name in METRICS:
            _cut_back(csv_path(self._folder, name), step)

    def write(self, step: int, at: float, values: Values) -> None:
        """Append a row for each value."""
        for name, value in values.items():
            if name not in self._files:
                self._files[name] = LineFile(csv_path(self._folder, name))
            file = self._files[name]
            rows = csv.writer(file)
            if file.is_new:
                rows.writerow(["step", name.rpartition("/")[2]])
            rows.writerow([step, number_of_value(value)])

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


def _cut_back(path: Path, step: int) -> None:
    """Keep the head line and the whole rows up to a step."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = lines[:1] + [line for line in lines[1:] if line.endswith(b"\n") and _step_of(line) <= step]
    if len(kept) < len(lines):
        with replacing(path, "wb") as file:
            file.writelines(kept)


def _step_of(row: bytes) -> float:
    """Step of a row; infinite for a line that is no row, such as a second head line of DeepSpeed's."""
    first = row.split(b",", 1)[0]
    return int(first) if first.isdigit() else float("inf")


class TensorBoardSink(Sink):
    """Writes scalars, in single precision, to event files.

    Args:
        folder: folder of the event files; created if absent.
        step: last step before this start; readers drop later steps in earlier files.
    """

    name = "tensorboard"

    def __init__(self, folder: Path | str, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1)  # type: ignore[no-untyped-call]

    def write(self, step: int, at: float, values: Values) -> None:
        """Add a scalar for each value, with the line's time."""
        for name, value in values.items():
            self._writer.add_scalar(name, number_of_value(value), step, walltime=at)  # type: ignore[no-untyped-call]
        self._writer.flush()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Close the file."""
        self._writer.close()  # type: ignore[no-untyped-call]


PREFIX = "megasdc_"


def gauge_name(name: str) -> str:
    """Name of a metric's gauge."""
    return PREFIX + name.replace("/", "_")


class PrometheusSink(Sink):
    """Keeps a gauge for each metric, with the run's id as label.

    Args:
        run: id of the run.
        attempt: number of this start.
        address: ``HOST:PORT`` at which ``/metrics`` is served, by a thread; None: nowhere.
        replica: number of this replica of Local-SGD, a further label; None: there are none.

    Raises:
        OSError: the address cannot be bound.
    """

    name = "prometheus"

    def __init__(self, run: str, attempt: int, address: str | None = None, replica: int | None = None) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._labels = {"run": run} if replica is None else {"run": run, "replica": str(replica)}
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._set(f"{PREFIX}attempt", "number of this start of the run", attempt)
        self._server = None
        if address is not None:
            host, port = split_address(address)
            self._server, self._thread = start_http_server(port, host, self._registry)

    def write(self, step: int, at: float, values: Values) -> None:
        """Set the gauges."""
        for name, value in values.items():
            self._set(gauge_name(name), METRICS[name], number_of_value(value))
        self._set(f"{PREFIX}step", "optimizer step of the last line", step)
        self._set(f"{PREFIX}written_timestamp_seconds", "time of the last line, seconds since the epoch", at)

    def _set(self, name: str, meaning: str, value: float) -> None:
        from prometheus_client import Gauge

        if name not in self._gauges:
            self._gauges[name] = Gauge(name, meaning, list(self._labels), registry=self._registry)
        self._gauges[name].labels(**self._labels).set(value)

    def text(self) -> bytes:
        """All gauges in Prometheus' text format."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None


class DeepSpeedMonitorSink(Sink):
    """Hands metrics to the monitor of DeepSpeed's engine.

    Args:
        monitor: the enabled monitor of the engine.
    """

    name = "comet"

    def __init__(self, monitor: Any) -> None:
        self._monitor = monitor

    def write(self, step: int, at: float, values: Values) -> None:
        """Write the values as events."""
        self._monitor.write_events([(name, number_of_value(value), step) for name, value in values.items()])

    def close(self) -> None:
        """Do nothing: DeepSpeed's monitor cannot be closed."""


PATTERNS = ("reports/incident_*.json", "health/incidents/*.json")
UNREADABLE = "incident that cannot be read"


@dataclass(frozen=True)
class IncidentFile:
    """Title and text of an incident, for trackers.

    Args:
        title: kind of the incident.
        text: sentence on what happened.
        files: the incident's JSON file and page, as far as they exist and can be read.
    """

    title: str
    text: str
    files: tuple[Path, ...]


def list_incidents(run_dir: Path) -> list[Path]:
    """Files of all incidents of a run."""
    return sorted(path for pattern in PATTERNS for path in run_dir.glob(pattern))


def read_incident(path: Path) -> IncidentFile:
    """Read title and text of an incident; those of a damaged file report that it is damaged."""
    page = path.with_suffix(".html")
    files = (path, page) if page.exists() else (path,)
    try:
        return IncidentFile(*_describe(parse_json(path.read_text(encoding="utf-8"))), files)
    except OSError as error:
        return IncidentFile(UNREADABLE, f"{path} cannot be read: {error}", ())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return IncidentFile(UNREADABLE, f"{path} is damaged: {error!r}", files)


def _describe(content: dict[str, Any]) -> tuple[str, str]:
    """Title and text: those of a standstill are in its file, those of a finding of corruption are made from it."""
    if "kind" in content:
        return str(content["kind"]), str(content.get("message", ""))
    suspects = content.get("flagged") or content.get("disputed") or []
    ranks = ", ".join(f"rank {one['rank']} on {one['host']}" for one in suspects)
    if (of_round := content.get("round")) is not None:
        where = f"round {of_round['round']} without replica {of_round['replica']} ({ranks})"
        return "silent data corruption", f"step {content['step']}, {where}: {of_round['reason']}; {content['done']}"
    named = "named as wrong" if content.get("flagged") else "differ, and one of them is wrong"
    text = f"step {content['step']}, {content['tier']}: {ranks} {named}; {content['verdict']}, {content['done']}"
    return "silent data corruption", text


TOLD_FILE = "told_incidents.json"
"""Name of the file with the incidents reported to W&B, in the folder ``wandb`` of the run folder."""
GIT_LIMIT_S = 10.0
FINISH_S = 120.0
"""Seconds that W&B may take at the end to send the rest; it retries for hours if its server does not answer."""
FORGET_S = 5.0
"""Seconds that it may take to forget its process once that was ended."""
SERVICE = "wandb-core"
"""Name of W&B's own process, a child of this one."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WandbRun:
    """A run of W&B.

    Args:
        folder: parent of its folder ``wandb``.
        run: id of our run, the default of its group.
        name: suffix that is added to the run's id, such as the number of the start; None: none.
        project: project of W&B.
        team: entity of W&B; None: that of the login.
        group: group of W&B; None: the run's id.
        config: resolved configuration, without secrets.
        tags: tags shown beside its name.
        mode: ``offline``; None: as ``WANDB_MODE`` says, else online.
        goes_on: earlier starts may have made this run of W&B, and later ones go on with it.
        reached: newest step that earlier starts have sent to it; steps up to it are not sent again.
    """

    folder: Path
    run: str
    name: str | None
    project: str
    team: str | None
    group: str | None
    config: Mapping[str, Any]
    tags: tuple[str, ...]
    mode: str | None = None
    goes_on: bool = False
    reached: int = 0


class WandbSink(Sink):
    """Logs each line under its step and time, and reports incidents in the run folder.

    Args:
        where: the run of W&B.
        incidents: run folder whose incidents are reported; None: none are.

    Raises:
        Exception: W&B's own, if it cannot start.
    """

    name = "wandb"

    def __init__(self, where: WandbRun, incidents: Path | None) -> None:
        wandb: Any = importlib.import_module("wandb")  # may be absent, also where types are checked
        self._wandb, self._incidents, self._reached = wandb, incidents, where.reached
        suffix = () if where.name is None else (where.name,)
        self._told_path = where.folder / "wandb" / TOLD_FILE
        self._run = wandb.init(
            project=where.project,
            entity=where.team,
            group=where.group or where.run,
            id="-".join((where.run, *suffix)),
            name=" ".join((where.run, *suffix)),
            resume="allow" if where.goes_on else None,
            allow_val_change=True,  # of a start with a changed configuration
            config={**where.config, "megasdc_commit": source_commit()},
            tags=where.tags,
            dir=str(where.folder),
            mode=where.mode,
            settings=wandb.Settings(console="off", silent=True, init_timeout=60.0),
        )
        self._run.define_metric("train/tokens")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._alert_incidents()

    def write(self, step: int, at: float, values: Values) -> None:
        """Log the line, unless an earlier start has; W&B merges lines of one step."""
        if step > self._reached:
            numbers = {name: number_of_value(value) for name, value in values.items()}
            self._run.log({**numbers, "step": step, "_timestamp": at}, step=step)
        self._alert_incidents()

    def close(self) -> None:
        """Report new incidents, and wait until W&B has sent everything.

        Raises:
            TimeoutError: W&B does not finish in time.
        """
        self._alert_incidents()
        folder = Path(self._run.dir).parent
        if not _within(FINISH_S, self._finish):
            _kill_service()
            with contextlib.suppress(OSError, RuntimeError):  # W&B forgets the process that was killed
                _within(FORGET_S, self._teardown)
            raise TimeoutError(f"W&B has not taken all within {FINISH_S:g} s; `wandb sync {folder}` sends the rest")

    def _alert_incidents(self) -> None:
        """Alert W&B of each incident that neither this start nor an earlier one has reported, and log its files."""
        found = [] if self._incidents is None else list_incidents(self._incidents)
        if not found:
            return
        told: list[str] = json.loads(self._told_path.read_text()) if self._told_path.exists() else []
        for path in found:
            if path.name not in told:
                self._alert(path.stem, read_incident(path))
                told.append(path.name)
                write_durably(self._told_path, json.dumps(told) + "\n")

    def _alert(self, name: str, incident: IncidentFile) -> None:
        if incident.title == UNREADABLE:
            logger.warning("incident: %s", incident.text)
        self._run.alert(incident.title, incident.text, level=self._wandb.AlertLevel.ERROR, wait_duration=0)
        artifact = self._wandb.Artifact(name, type="incident", description=incident.text)
        for path in incident.files:
            artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def _finish(self) -> None:
        self._run.finish()
        self._teardown()  # an offline run's file is whole only when W&B's own process has ended (0.26)

    def _teardown(self) -> None:
        try:
            self._wandb.teardown()
        except SystemExit as ended:  # so W&B says that its process failed; the run goes on
            raise RuntimeError(f"W&B's own process ended with code {ended.code}") from ended


def _within(limit_s: float, action: Callable[[], None]) -> bool:
    """Call a function that may never end, in a thread; returns whether it ended in time, and raises its error."""
    problems: list[Exception] = []

    def act() -> None:
        try:
            action()
        except Exception as error:  # raised below, where somebody hears it
            problems.append(error)

    thread = threading.Thread(target=act, name="finish", daemon=True)
    thread.start()
    thread.join(limit_s)
    if problems:
        raise problems[0]
    return not thread.is_alive()


def _kill_service() -> None:
    """End W&B's own process, which is waited for at the end of this one; what it has not sent lies in its folder."""
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() == SERVICE:
                process.kill()


def shown_config(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved configuration without what may be secret: Comet's key, and the command of alerts."""
    shown = copy.deepcopy(dict(resolved))
    shown.get("comet", {}).pop("api_key", None)
    shown.get("megasdc", {}).get("health", {}).pop("alert_command", None)
    return shown


def source_commit() -> str | None:
    """Commit of the repository that has megasdc's source; None: none has it, or git is not installed.

    An installed package may lie in the folder of another repository, which does not have its files.
    """
    folder = str(Path(megasdc.__file__).parent)
    command = ["git", "-C", folder, "rev-parse", "HEAD", "HEAD:./__init__.py"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split()[0]
