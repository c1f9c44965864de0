"""``megasdc supervise``: reads what is asked for, opens the journal, and supervises."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from types import FrameType

from megasdc.config import load_config
from megasdc.errors import LaunchError
from megasdc.launcher.hosts import read_hostfile
from megasdc.launcher.request import DEFAULT_SCRIPT, LaunchRequest
from megasdc.supervisor.engine import FrontEngine
from megasdc.supervisor.history import HOSTS, History
from megasdc.supervisor.host_tests import StressTests
from megasdc.supervisor.journal import FOLDER, Journal
from megasdc.supervisor.policy import Limits
from megasdc.supervisor.supervise import Supervisor


def say(line: str) -> None:
    """Print a message of the supervisor to standard error."""
    print(f"megasdc supervise: {line}", file=sys.stderr, flush=True)


def supervise_run(
    config_path: Path,
    launcher_args: Sequence[str] = (),
    hostfile: Path | None = None,
    script: Path | None = None,
    overrides: Sequence[str] = (),
    allow_changed: Sequence[str] = (),
) -> int:
    """Supervise a run to its end; returns the exit code of its last attempt.

    Raises:
        ConfigError: the configuration is wrong.
        LaunchError: there is no hostfile, it is wrong, or has too few hosts; or another supervisor has the run.
        StorageError: the journal is damaged, or cannot be written.
    """
    if hostfile is None:
        raise LaunchError(
            "--hostfile is missing: a supervisor chooses hosts from it; for this host alone, name it there"
        )
    config = load_config(config_path, overrides, allow_changed)
    section, slots = config.megasdc.supervise, read_hostfile(hostfile)
    num_hosts = section.num_hosts or len(slots)
    if num_hosts > len(slots):
        raise LaunchError(f"megasdc.supervise.num_hosts is {num_hosts}, and {hostfile} has {len(slots)} hosts")
    run_dir = Path.cwd() / config.megasdc.logging.run_dir
    request = LaunchRequest(
        config_path.absolute(),
        launcher_args=tuple(launcher_args),
        overrides=tuple(overrides),
        allow_changed=tuple(allow_changed),
        script=DEFAULT_SCRIPT if script is None else script.absolute(),
    )
    stop = Event()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        stop.set()

    with Journal(run_dir / FOLDER, say) as journal:
        _open(journal, request.config_path, slots, num_hosts)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, on_signal)
        engine = FrontEngine(run_dir / FOLDER, run_dir, config.megasdc.training.steps, request)
        tests = StressTests(run_dir / FOLDER, section.test_rounds, section.golden)
        limits = Limits(
            per_hour=section.failures_per_hour,
            without_progress=section.without_progress,
            same_step=section.same_step,
            pause_s=section.pause_s,
            longest_pause_s=section.longest_pause_s,
            returns=section.returns,
            retest_s=section.retest_s,
        )
        return Supervisor(journal, engine, tests, limits, stop, say).run()


def _open(journal: Journal, config: Path, slots: dict[str, int], num_hosts: int) -> None:
    """Write what begins the journal, or goes on with it: the run, and hosts where they have changed.

    Raises:
        LaunchError: it is the journal of another run.
    """
    history = History.of(journal.entries)
    if history.stage and history.config != str(config):
        raise LaunchError(
            f"{journal.path} is of the run of {history.config}, not of {config}; give that file, or another "
            "megasdc.logging.run_dir"
        )
    if (history.slots, history.num_hosts) != (slots, num_hosts):
        journal.write(HOSTS, slots=slots, num_hosts=num_hosts)
    if not history.stage or history.exit_code is not None:
        journal.write("opened", config=str(config))
