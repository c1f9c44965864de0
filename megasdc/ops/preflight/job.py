"""What the checks of a preflight work on: the configuration, the hosts, and folders of their own.

Folders that a preflight writes to, of its own, one preflight of a run at a time; removed at its end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from megasdc.common import run_lock
from megasdc.common.errors import ConfigError, LaunchError, StorageError
from megasdc.common.program import OnProgress
from megasdc.common.run_lock import WITHOUT_FLOCK, open_lock_file
from megasdc.config.load import RunConfig, load_config
from megasdc.ops.launch.hosts import hostfile_text, read_hostfile
from megasdc.ops.launch.plan import LaunchPlan, new_launch_id, plan_launch
from megasdc.ops.launch.request import DEFAULT_SCRIPT, LaunchRequest
from megasdc.ops.preflight import remove_on_host
from megasdc.ops.preflight.commands import Commands
from megasdc.ops.preflight.request import PreflightRequest

FOLDER, LOCK_FILE = "preflight", ".lock"
"""The first in the run folder, and in that of checkpoints where one is configured."""
_ENDING_S = 5.0
"""Seconds in which what a preflight has ended may still write into its folder, or remove what it wrote."""

Say = Callable[[str], None]


@contextlib.contextmanager
def scratch_folder(parent: Path, name: str, *, keep: bool, say: Say) -> Iterator[Path]:
    """A new folder ``preflight/NAME``; at the end it goes, and so do folders above that were made for it.

    Args:
        parent: the folder that it lies in, made where it is absent.
        keep: it stays.
        say: receives a message where it cannot be removed.

    Raises:
        LaunchError: another preflight works there.
        StorageError: the folder cannot be written.
    """
    above = parent / FOLDER
    made = [folder for folder in (above, *above.parents) if not folder.exists()]
    lock = _lock(above)
    try:
        folder = above / name
        try:
            folder.mkdir()
        except OSError as error:
            raise _unwritable(folder, error) from error
        try:
            yield folder
        finally:
            if not keep:
                _remove(folder, say)
    finally:
        with contextlib.suppress(OSError):
            (above / LOCK_FILE).unlink()
        lock.close()
        if not keep:
            for one in made:
                with contextlib.suppress(OSError):  # something else was put there meanwhile
                    one.rmdir()


def _lock(folder: Path) -> IO[str]:
    """Make a folder and lock it; returns an open file, with which the lock goes."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = open_lock_file(folder / LOCK_FILE)
        except OSError as error:
            raise _unwritable(folder, error) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat((folder / LOCK_FILE).stat(), os.fstat(file.fileno())):
                return file
        except FileNotFoundError:
            pass  # who had it has just ended, and removed it
        except BlockingIOError as error:
            file.close()
            raise LaunchError(f"{folder} is in use by another preflight of this run; wait for its end") from error
        except OSError as error:
            if error.errno in WITHOUT_FLOCK:
                return file
            file.close()
            raise _unwritable(folder, error) from error
        file.close()


def _unwritable(folder: Path, error: OSError) -> StorageError:
    return StorageError(f"{folder} cannot be written: {error.strerror}; free space, or get the right to")


def _remove(folder: Path, say: Say) -> None:
    until = time.monotonic() + _ENDING_S
    while folder.exists():  # else another host of the run has removed it
        try:
            shutil.rmtree(folder)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY) or time.monotonic() > until:
                say(f"{folder} cannot be removed: {error}; remove it by hand")
                return
            time.sleep(0.05)


REMOVE_S = 60.0


def print_preflight_message(line: str) -> None:
    """Print a message of the preflight to standard error."""
    print(f"megasdc preflight: {line}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Job:
    """The run that a preflight is of.

    Args:
        plan: its launch, on the first ``supervise.num_hosts`` hosts.
        spares: ranks of each host beyond them.
        folder: of this preflight.
        checkpoints: folder of this preflight in that of checkpoints; None: checkpoints lie in run folders.
        on_progress: called with what is done, how much of it, and of how much.
    """

    request: PreflightRequest
    config: RunConfig
    plan: LaunchPlan
    spares: dict[str, int]
    folder: Path
    checkpoints: Path | None
    commands: Commands
    on_progress: OnProgress

    @property
    def slots(self) -> dict[str, int]:
        """Ranks of each host of the run."""
        return {host: len(slots) for host, slots in self.plan.placement.slots.items()}

    @property
    def num_ranks(self) -> int:
        """Of the run."""
        return len(self.plan.placement.host_of_rank)

    @property
    def steps(self) -> int:
        """Of the short runs: those asked for, or those of the run where it has fewer."""
        return min(self.request.steps, self.config.megasdc.training.steps)

    @property
    def storage(self) -> Path:
        """A folder of this preflight where checkpoints of the run will lie."""
        return self.checkpoints or self.folder

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints that the run has at once, with the one that is being written."""
        section, steps = self.config.megasdc.checkpoint, self.config.megasdc.training.steps
        saves = -(-steps // section.interval) if section.interval else 1
        kept = min(saves, section.keep_last or saves) + (steps // section.keep_every if section.keep_every else 0)
        return min(saves, kept + 1)

    def hostfile(self, slots: dict[str, int], name: str) -> list[str]:
        """Options that name hosts in a new hostfile; none where the run is on this host alone."""
        if self.request.hostfile is None:
            return []
        return ["--hostfile", str(write_hostfile(self.folder / f"{name}.hosts", slots))]


def write_hostfile(path: Path, slots: dict[str, int]) -> Path:
    """Write the lines of some hosts; returns the path."""
    path.write_text(hostfile_text(slots), encoding="utf-8")
    return path


@contextlib.contextmanager
def prepared(request: PreflightRequest, on_progress: OnProgress) -> Iterator[Job]:
    """Read the configuration and the hostfile, and make folders, which are gone afterwards unless they are kept.

    Raises:
        ConfigError: the configuration or its layout is wrong, or of a study.
        LaunchError: hostfile or options are wrong, there are too few hosts, or the run folder is in use.
        StorageError: a folder cannot be written.
    """
    config = load_config(request.config_path, request.overrides)
    sections, used, spares = config.megasdc, dict[str, int](), dict[str, int]()
    if sections.study.mode is not None:
        raise ConfigError("megasdc.study.mode: a preflight is of a run, not of a study; remove it", config.source)
    if request.hostfile is not None:
        used, spares = divided(read_hostfile(request.hostfile), sections.supervise.num_hosts, request.hostfile)
    run_dir = Path.cwd() / sections.logging.run_dir
    run_lock.check_free(run_dir, print_preflight_message)
    name = new_launch_id()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch_folder(run_dir, name, keep=request.keep, say=print_preflight_message))
        checkpoints = None
        if sections.checkpoint.folder is not None:
            parent = Path.cwd() / sections.checkpoint.folder
            checkpoints = stack.enter_context(
                scratch_folder(parent, name, keep=request.keep, say=print_preflight_message)
            )
        launch = LaunchRequest(
            request.config_path.absolute(),
            hostfile=None if request.hostfile is None else write_hostfile(folder / "run.hosts", used),
            num_gpus=request.num_ranks,
            launcher_args=request.launcher_args,
            overrides=request.overrides,
            script=DEFAULT_SCRIPT if request.script is None else request.script.absolute(),
        )
        job = Job(
            request,
            config,
            plan_launch(launch, print_preflight_message),
            spares,
            folder,
            checkpoints,
            Commands(folder),
            on_progress,
        )
        if not request.keep:
            stack.callback(_remove_elsewhere, job)
        yield job


def divided(slots: dict[str, int], num_hosts: int | None, hostfile: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Hosts of a run and its spares, each with its ranks.

    Args:
        slots: of the hostfile.
        num_hosts: ``supervise.num_hosts``.

    Raises:
        LaunchError: there are too few.
    """
    count = num_hosts or len(slots)
    if count > len(slots):
        raise LaunchError(f"megasdc.supervise.num_hosts is {count}, and {hostfile} has {len(slots)} hosts")
    hosts = list(slots.items())
    return dict(hosts[:count]), dict(hosts[count:])


def _remove_elsewhere(job: Job) -> None:
    """Remove folders of this preflight on hosts that do not share this one's, if anything was started there."""
    plan = job.plan
    if not (plan.transport.remote and job.commands.started):
        return
    request = {"folders": [str(folder) for folder in (job.folder, job.checkpoints) if folder is not None]}
    program = Path(remove_on_host.__file__)
    for answer in plan.transport.run(plan.placement.hosts, program, request, timeout_s=REMOVE_S):
        if answer.problem or answer.value:
            what = answer.problem or f"{answer.host}: {', '.join(answer.value)} cannot be removed"
            print_preflight_message(f"{what}; folders {FOLDER}/{job.folder.name} may be left there")


def spares_only(plan: LaunchPlan, spares: dict[str, int]) -> LaunchPlan:
    """The plan with the spares in place of its hosts, on which no port is needed."""
    slots = {host: list(range(count)) for host, count in spares.items()}
    return replace(plan, placement=replace(plan.placement, slots=slots), needs=replace(plan.needs, master_port=None))
