"""Pool of tokenizer processes, each fed by a thread."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import megasdc
from megasdc.data.worker import receive, send
from megasdc.errors import DataError
from megasdc.parallel.processes import KILLED_S, kill_all

logger = logging.getLogger(__name__)


class WorkerPool:
    """Worker processes that write shards, each one at a time.

    Processes are started through plain `subprocess`: `multiprocessing` would import the caller's main module again, and
    with it torch, in each of them. ``kind`` and ``tokenizer_folder`` (or file) are those of the tokenizer;
    ``beginning``: id that is put before every document, None: none.
    """

    def __init__(self, kind: str, tokenizer_folder: Path, num_workers: int, beginning: int | None = None) -> None:
        self._beginning = beginning
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._processes = [_start(kind, tokenizer_folder) for _ in range(num_workers)]
        for process in self._processes:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="tokenize")

    def submit(self, path: Path, texts: Sequence[str]) -> Future[None]:
        """Submit a shard to be written; the future raises the worker's error."""
        return self._threads.submit(self._request, path, texts)

    def _request(self, path: Path, texts: Sequence[str]) -> None:
        process = self._idle.get()
        assert process.stdin is not None and process.stdout is not None, "workers are started with pipes"
        try:
            send(process.stdin, (str(path), list(texts), self._beginning))
            error = receive(process.stdout)
        except (EOFError, BrokenPipeError) as broken:
            try:
                code = process.wait(KILLED_S)
            except subprocess.TimeoutExpired:
                raise DataError(
                    f"a tokenizer process (pid {process.pid}) has closed its output on shard {path.name} and does not "
                    "end; see its output"
                ) from broken
            cause = f"signal {-code} (9: often out of memory)" if code < 0 else f"exit code {code}"
            raise DataError(f"a tokenizer process ended by {cause} on shard {path.name}; see its output") from broken
        finally:
            self._idle.put(process)
        if error is not None:
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        left = kill_all(self._processes) if kind is not None else []
        self._threads.shutdown(wait=not left, cancel_futures=True)  # threads of those wait for their answers
        for process in self._processes:
            assert process.stdin is not None and process.stdout is not None, "workers are started with pipes"
            if process.pid in left:
                continue
            with contextlib.suppress(BrokenPipeError):  # a killed worker: its unfinished work is not needed
                process.stdin.close()
            try:
                process.wait(KILLED_S)
            except subprocess.TimeoutExpired:
                logger.warning("a tokenizer process (pid %d) does not end with its input: it is killed", process.pid)
                kill_all([process])
            process.stdout.close()


def _start(kind: str, tokenizer_folder: Path) -> subprocess.Popen[bytes]:
    package = str(Path(megasdc.__file__).resolve().parent.parent)
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH")]))
    # One thread per worker: the pool provides the parallelism.
    environment.update(OMP_NUM_THREADS="1", RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    command = [sys.executable, "-m", "megasdc.data.worker", kind, str(tokenizer_folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
