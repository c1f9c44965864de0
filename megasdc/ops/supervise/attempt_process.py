"""The process of one attempt: the front of a launch, which leaves how it ended in a file.

    python -m megasdc.ops.supervise.attempt_process REQUEST

``REQUEST`` is JSON: ``launch``, the fields of ``LaunchRequest``, and ``result``, the file. A front that is killed
leaves none.
"""

from __future__ import annotations

import json
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from megasdc.common import durable
from megasdc.common.durable import parse_json, write_durably
from megasdc.common.errors import MegasdcError, StorageError
from megasdc.common.origin import boot_id
from megasdc.ops.launch.front import launch_run
from megasdc.ops.launch.launch_verdict import LaunchVerdict
from megasdc.ops.launch.request import LaunchRequest, UserProgram
from megasdc.ops.launch.supervision import print_front_message
from megasdc.ops.supervise.diagnosis import SIGNALS
from megasdc.train.signals import ExitSignals, exiting_on_signals

MODULE = "megasdc.ops.supervise.attempt_process"
HELD = (signal.SIGINT, signal.SIGTERM)
"""Signals that who starts a front blocks for it, until it can write down that they have ended it."""


@dataclass(frozen=True, kw_only=True)
class FrontResult(LaunchVerdict):
    """How a launch ended, or why it was refused.

    Args:
        ended_at: when it did, seconds since the epoch.
        monotonic: when that was on the monotonic clock of its host; None: of an earlier version.
        boot: id of its kernel since it was booted; None: likewise.
    """

    ended_at: float = field(default_factory=time.time)
    monotonic: float | None = field(default_factory=time.monotonic)
    boot: str | None = field(default_factory=boot_id)


def attempt_file(folder: Path, attempt: int, launch_id: str, ending: str) -> Path:
    """A file of an attempt in the folder of a supervisor, by its ending: ``log``, ``hosts``, ``json`` (the result)."""
    return folder / f"attempt_{attempt:04d}_{launch_id}.{ending}"


def load_result(path: Path) -> FrontResult | None:
    """The result that a front left; None: it was killed and left none, or the file is damaged."""
    try:
        raw = {"monotonic": None, "boot": None, **parse_json(path.read_text(encoding="utf-8"))}
        return FrontResult(**raw)
    except (FileNotFoundError, ValueError, TypeError):
        return None


def run_attempt(launch: dict[str, Any], signals: ExitSignals) -> FrontResult:
    """Launch, and wait for the end; every error becomes a result, and a signal before the launcher passes it on.

    Args:
        signals: end nothing any more once it is known how ranks have ended.
    """
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
        result = _launch(launch, signals)
        signals.only_note()
        return result
    except SystemExit as end:
        code = int(end.code or 0)
        text = f"{signal.Signals(code - SIGNALS).name} before ranks were started"
        print_front_message(text)
        return FrontResult(code, None, None, [text], stopped_by=code - SIGNALS)


def _launch(launch: dict[str, Any], signals: ExitSignals) -> FrontResult:
    try:
        found = launch_run(request_of(launch), on_verdict=signals.only_note)
        return FrontResult(**{one.name: getattr(found, one.name) for one in fields(LaunchVerdict)})
    except MegasdcError as error:
        print_front_message(f"error: {error}")
        return FrontResult(error.exit_code, None, None, str(error).splitlines())
    except Exception as error:  # whatever it is, the supervisor has to know
        traceback.print_exc()
        return FrontResult(1, None, None, [f"the front of the launch failed: {error!r}"])


def request_of(launch: dict[str, Any]) -> LaunchRequest:
    """A request from its fields as JSON has them."""
    named = ("config_path", "hostfile", "script")
    paths = {name: None if launch[name] is None else Path(launch[name]) for name in named}
    program = launch["program"] and {"program": UserProgram(**_with_tuples(launch["program"]))}
    return LaunchRequest(**{**_with_tuples(launch), **paths, **(program or {})})


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def main() -> int:
    """Launch as the first argument says; returns the exit code."""
    request = json.loads(sys.argv[1])
    with exiting_on_signals() as signals:
        durable.end_waits_when(lambda: signals.noted)
        result = run_attempt(request["launch"], signals)
        path, text = Path(request["result"]), json.dumps(asdict(result)) + "\n"
        # Without room the exit code says it all, and who has asked it to end waits for it; others are waited for.
        is_short = result.exit_code == StorageError.exit_code or result.stopped_by is not None
        at_most_s = durable.END_S if is_short else None
        try:
            durable.wait_for_room(lambda: write_durably(path, text), path, print_front_message, at_most_s=at_most_s)
        except OSError as error:
            print_front_message(f"how the launch has ended could not be written: {error}")
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
