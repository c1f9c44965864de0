"""Processes of this host that megasdc starts itself: fresh ones, or forks of a server that has imported all they need.

Importing PyTorch, DeepSpeed and Megatron-core takes seconds a process; a fork of the server has them at once. A device
cannot be used after a fork, so on hosts with GPUs every process is fresh.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from typing import Any, Protocol

from megasdc.parallel.local_ranks import base_environment

PRELOAD = (
    "numpy",
    "torch",
    "torch.distributed.elastic.rendezvous",
    "torch.utils.tensorboard",
    "deepspeed",
    "deepspeed.runtime.pipe.engine",
    "deepspeed.runtime.bf16_optimizer",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.comm.torch",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization",
    "megatron.core",
    "megasdc.pretrain",
    "megasdc.train.gradient_bounds",
    "megasdc.train.drop_compute",
    "megasdc.train.trace",
    "megasdc.train.detection.budget",
    "megasdc.train.detection.step_checker",
    "megasdc.faults.drill",
    "megasdc.faults.stored",
    "megasdc.common.frozen",
)
"""Modules that the server imports once, in this order, among them those of features that only some runs have."""
logger = logging.getLogger(__name__)

KILLED_S = 30.0
"""Seconds to wait until killed processes are gone, longer than it takes: one that waits in the kernel may never go."""
ORPHANED = 79
"""Exit code of a fork whose starter is gone, so that nobody would read its results; that of a lost peer."""


class Process(Protocol):
    """Common interface of ``subprocess.Popen`` and ``Fork``."""

    @property
    def pid(self) -> int:
        """Process id."""

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code; raises ``subprocess.TimeoutExpired``."""

    def send_signal(self, sig: int) -> None:
        """Send a signal, if it still runs."""

    def kill(self) -> None:
        """End it, if it still runs."""


def kill_all(processes: Sequence[Process]) -> list[int]:
    """Kill processes and wait until they are gone, for ``KILLED_S`` together.

    Returns:
        Ids of processes that are not gone, which are reported: they wait in the kernel, and are left.
    """
    for process in processes:
        process.kill()
    end, left = time.monotonic() + KILLED_S, list[int]()
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            left.append(process.pid)
    if left:
        logger.warning(
            "processes that were killed do not end (pid %s): they wait in the kernel, such as for a disk or a device "
            "that does not answer; they are left, and may hold files and devices until the host is restarted",
            ", ".join(map(str, left)),
        )
    return left


@dataclass(frozen=True)
class Descriptor:
    """An open file that a process gets; among its arguments it stands for the number that the file has there."""

    number: int


def fork_server() -> Any:
    """The multiprocessing context of this process's forks; its server starts with the first of them.

    Its environment is this process's when it starts, so what torch reads once is set here. Spawned processes, which
    import everything, on a host with GPUs.

    Raises:
        LaunchError: an operator that the ranks need cannot be compiled.
    """
    import torch

    os.environ.update({name: value for name, value in base_environment(1).items() if name not in os.environ})
    os.environ.setdefault("PYTHONWARNINGS", "ignore:Transformer Engine and Apex are not installed")
    if torch.cuda.device_count():
        return multiprocessing.get_context("spawn")
    os.environ["DS_ACCELERATOR"] = "cpu"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    return context


def start_module(
    module: str,
    arguments: Sequence[str | Descriptor],
    environment: Mapping[str, str],
    stdin: int,
    stdout: int,
    stderr: int,
    fresh: bool = False,
) -> Process:
    """Run a module as ``python -m`` does.

    Args:
        module: module whose ``__main__`` part is run.
        arguments: arguments of the command line.
        environment: whole environment of the process. In a fork, settings that PyTorch reads at its import are the
            server's.
        stdin: an open file, or ``subprocess.DEVNULL``, as ``stdout`` and ``stderr``.
        fresh: whether the process is never a fork, also where there are no GPUs.
    """
    # PyTorch reads the number of threads when it is imported: of a fork it is the server's unless the module sets it.
    context = None if fresh or "OMP_NUM_THREADS" not in environment else fork_server()
    if context is not None and context.get_start_method() == "forkserver":
        return Fork(context, module, arguments, environment, (stdin, stdout, stderr))
    words = [str(one.number) if isinstance(one, Descriptor) else one for one in arguments]
    return subprocess.Popen(
        [sys.executable, "-m", module, *words],
        env=dict(environment),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=[one.number for one in arguments if isinstance(one, Descriptor)],
    )


class Fork:
    """A fork of the server that runs a module; it ends when the process that started it has gone.

    Args:
        context: context of ``fork_server``, which spawns processes on hosts with GPUs.
        module: see ``start_module``; the others likewise.
        streams: standard input, output and error of the process.
    """

    def __init__(
        self,
        context: Any,
        module: str,
        arguments: Sequence[str | Descriptor],
        environment: Mapping[str, str],
        streams: tuple[int, int, int],
    ) -> None:
        # Copies: a spawned process refuses one file in two places.
        files = [os.open(os.devnull, os.O_RDWR) if one == subprocess.DEVNULL else os.dup(one) for one in streams]
        self._lifeline, theirs = context.Pipe()
        opened = [_Passed(number) for number in files]
        passed = [_Passed(one.number) if isinstance(one, Descriptor) else one for one in arguments]
        given = (theirs, module, passed, dict(environment), opened)
        self._process = context.Process(target=_run, args=given, daemon=True)
        self._process.start()
        self._one_reads = threading.Lock()  # the code comes once through a pipe: of two readers one would get 255
        theirs.close()
        for number in files:
            os.close(number)

    @property
    def pid(self) -> int:
        """Process id."""
        return int(self._process.pid)

    @property
    def sentinel(self) -> int:
        """Descriptor for ``multiprocessing.connection.wait``, ready once the process has ended."""
        return int(self._process.sentinel)

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        with self._one_reads:
            return self._process.exitcode  # type: ignore[no-any-return]

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code.

        Raises:
            subprocess.TimeoutExpired: the process still runs.
        """
        ended = wait_for_any([self._process.sentinel], timeout)
        with self._one_reads:
            if ended:  # of a spawned process some moments before its exit code is there
                self._process.join(timeout)
            code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
        return int(code)

    def send_signal(self, sig: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        """End it, if it still runs."""
        self.send_signal(signal.SIGKILL)


class _Passed:
    """An open file on its way into a process that is being started; ``detach`` gives its number there."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._copy: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_copy": reduction.DupFd(self._number)}

    def detach(self) -> int:
        """Number of the file in this process; may be called once."""
        return int(self._copy.detach())


def leave_with_the_starter(lifeline: Connection) -> None:
    """End this process once the one that holds the other end of a pipe has gone; returns at once."""

    def wait() -> None:
        with contextlib.suppress(EOFError, OSError):
            lifeline.recv()
        os._exit(ORPHANED)

    threading.Thread(target=wait, daemon=True).start()


def _run(
    lifeline: Connection,
    module: str,
    arguments: list[str | _Passed],
    environment: dict[str, str],
    streams: list[_Passed],
) -> None:
    """Body of a fork: as if an interpreter had been started for the module."""
    for number, stream in enumerate(streams):
        os.dup2(stream.detach(), number)
    words = [str(one.detach()) if isinstance(one, _Passed) else one for one in arguments]
    leave_with_the_starter(lifeline)
    run_module(module, words, environment)


def run_module(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a module in this process, see ``run_main``, and end with its exit code."""
    os._exit(run_main(module, arguments, environment))  # the interpreter's own end takes as long as some steps


def run_main(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a module, or the path of a script, in this process as ``python -m`` does; returns its exit code.

    What ``environment`` lacks of this process's own is removed.
    """
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    code: Any = 0
    try:
        if module.endswith(".py"):
            runpy.run_path(module, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:  # as the interpreter does; this process has no other caller
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return int(code or 0)
