"""How does a run become processes? Forks of one server that has imported everything; each trains as any rank does.

Importing the stack costs seconds, so a server does it once and each rank is a fork of it. A device cannot be used
after a fork, so that on hosts with GPUs every rank is a fresh process. A rank ends when the process that started it
is gone: nobody else would read its results, and who comes next would write into the same folder.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megasdc.parallel.local_ranks import base_environment, hold_store, rank_environment

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
    "megatron.core",
    "megasdc.train.build",
    "megasdc.train.main",
    "megasdc.imports.frozen",
)
LOG_FOLDER = "logs"
ORPHANED = 79
"""Exit code of a rank whose starter is gone; that of a lost peer."""


def server() -> Any:
    """The multiprocessing context that ranks are started with; its server starts with the first rank.

    Its environment is this process's when it starts, so what torch reads once is set here.

    Raises:
        LaunchError: what the ranks need cannot be compiled.
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


def warm_up(context: Any) -> None:
    """Wait until the server has imported everything, so that what is timed next does not."""
    process = context.Process(target=os.getpid)
    process.start()
    process.join()


@dataclass
class RunningRanks:
    """The processes of one run.

    Args:
        processes: by rank.
        lifelines: held open as long as the ranks may go on.
        store: the rendezvous; lives here, so that no port is guessed.
    """

    processes: list[Any]
    lifelines: list[Connection]
    store: Any

    def __post_init__(self) -> None:
        self._codes: list[int | None] = [None] * len(self.processes)

    @property
    def sentinels(self) -> list[int]:
        """What is ready once a process has ended, of those that ``settle`` has not seen ended yet."""
        return [process.sentinel for process, code in zip(self.processes, self._codes, strict=True) if code is None]

    def settle(self) -> list[int] | None:
        """Exit codes, negative for signals, once all have ended; None before.

        When one rank has failed the others are ended: without it they would wait until their timeout.
        """
        self._codes = [process.exitcode for process in self.processes]
        if any(self._codes):
            for process in self.processes:
                process.join(0.5)
            self.end()
            self._codes = [
                code if code is not None else process.exitcode
                for code, process in zip(self._codes, self.processes, strict=True)
            ]
        codes = [code for code in self._codes if code is not None]
        return codes if len(codes) == len(self.processes) else None

    def end(self) -> None:
        """End all processes and wait for them."""
        for process in self.processes:
            if process.exitcode is None:
                process.kill()
        for process in self.processes:
            process.join()
        for lifeline in self.lifelines:
            lifeline.close()


def start_ranks(context: Any, config: Path, folder: Path, ranks: int, slot: int) -> RunningRanks:
    """Start the ranks of a run.

    Args:
        context: from ``server``.
        config: the run's file.
        folder: the run's; what ranks print goes to ``logs`` in it.
        ranks: how many.
        slot: place among the runs side by side; with GPUs, decides on which.
    """
    store = hold_store()
    logs = folder / LOG_FOLDER
    logs.mkdir(parents=True, exist_ok=True)
    devices = ",".join(str(slot * ranks + rank) for rank in range(ranks))
    processes, lifelines = [], []
    for rank in range(ranks):
        settings = rank_environment(rank, ranks, 0, "127.0.0.1", store.port) | {
            "CUDA_VISIBLE_DEVICES": _visible(devices),
        }
        ours, theirs = context.Pipe()
        arguments = (theirs, settings, str(config), str(logs / f"rank_{rank}.log"))
        process = context.Process(target=_rank_main, args=arguments, daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        lifelines.append(ours)
    return RunningRanks(processes, lifelines, store)


def _visible(devices: str) -> str:
    """Those of the devices that this process itself may use."""
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not own:
        return devices
    names = own.split(",")
    return ",".join(names[int(device)] for device in devices.split(",") if int(device) < len(names))


def _rank_main(lifeline: Connection, settings: dict[str, str], config: str, log: str) -> None:
    """Body of a rank: train as the entry script does, and leave with its exit code."""
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.update(settings)
    threading.Thread(target=_leave_with_the_starter, args=(lifeline,), daemon=True).start()
    from megasdc.train.main import pretrain

    code, _ = pretrain(config, [])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the interpreter's own end takes as long as some steps


def _leave_with_the_starter(lifeline: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv()
    os._exit(ORPHANED)
