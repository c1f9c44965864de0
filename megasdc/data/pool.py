"""Pool of tokenizer processes, each fed by a thread.

Worker process that tokenizes shards: ``python -m megasdc.data.pool KIND TOKENIZER_FOLDER``.

Requests and replies are length-prefixed pickles on standard input and output; both ends are this package. The process
ends when its input does, so that no worker outlives a killed parent. Imports no torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import megasdc
from megasdc.common.errors import DataError
from megasdc.data.shards import write_shard
from megasdc.data.tokenizer import load_tokenizer
from megasdc.parallel.processes import KILLED_S, kill_all

_LENGTH = struct.Struct("<Q")


def send(stream: IO[bytes], message: Any) -> None:
    """Write one message."""
    content = pickle.dumps(message)
    stream.write(_LENGTH.pack(len(content)))
    stream.write(content)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Read one message; EOFError if the other end closed the stream, also in the middle of a message."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError("the other process has ended")
    (length,) = _LENGTH.unpack(head)
    content = stream.read(length)
    if len(content) < length:
        raise EOFError("the other process ended in the middle of a message")
    return pickle.loads(content)


def main() -> None:
    """Serve requests ``(shard path, texts, beginning)`` until the input ends; reply ``None`` or the error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C signals the whole process group; the parent ends the workers
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library that prints must not break the protocol
    # transformers 5 imports torch if it is installed, whatever USE_TORCH is; None here hides it.
    sys.modules["torch"] = None  # type: ignore[assignment]
    kind, folder = sys.argv[1:]
    tokenizer = None
    while True:
        try:
            path, texts, beginning = receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            tokenizer = tokenizer or load_tokenizer(kind, folder)
            write_shard(Path(path), tokenizer, texts, beginning)
            send(replies, None)
        except (DataError, OSError) as error:
            send(replies, error)


if __name__ == "__main__":
    main()


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
    command = [sys.executable, "-m", "megasdc.data.pool", kind, str(tokenizer_folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
