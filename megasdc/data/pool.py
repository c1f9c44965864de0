"""Pool of tokenizer processes, each fed by a thread."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Self

import megasdc
from megasdc.common.errors import DataError
from megasdc.data.worker import receive, send
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
        self._requests: queue.SimpleQueue[tuple[Future[None], Path, Sequence[str]] | None] = queue.SimpleQueue()
        self._processes = [_start(kind, tokenizer_folder) for _ in range(num_workers)]
        # Daemons, unlike those of an executor: at its end Python would join one whose worker cannot be killed.
        self._threads = [
            threading.Thread(target=self._serve, args=(process,), name=f"tokenize-{index}", daemon=True)
            for index, process in enumerate(self._processes)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, path: Path, texts: Sequence[str]) -> Future[None]:
        """Submit a shard to be written; the future raises the worker's error."""
        future: Future[None] = Future()
        self._requests.put((future, path, texts))
        return future

    def _serve(self, process: subprocess.Popen[bytes]) -> None:
        """Hand requests to one worker until None comes."""
        while (request := self._requests.get()) is not None:
            future, path, texts = request
            if not future.set_running_or_notify_cancel():
                continue
            try:
                self._request(process, path, texts)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

    def _request(self, process: subprocess.Popen[bytes], path: Path, texts: Sequence[str]) -> None:
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
        if error is not None:
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        left = kill_all(self._processes) if kind is not None else []
        with contextlib.suppress(queue.Empty):
            while (request := self._requests.get_nowait()) is not None:
                request[0].cancel()
        for _ in self._threads:
            self._requests.put(None)
        for process, thread in zip(self._processes, self._threads, strict=True):
            if process.pid not in left:  # threads of those wait for their answers
                thread.join()
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
