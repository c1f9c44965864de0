"""How does a test run a function on several gloo ranks? One helper, one preloaded fork server.

Importing torch, DeepSpeed and Megatron-core costs seconds a process, so a fork server imports them once and each
rank is a fork of it. The rendezvous store lives in the test process: no port is guessed, and it outlives every rank.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from fused_switch import apply_fused_switch
from host_forks import PASSED_ON, go_on_at_host, is_elsewhere, serve_own_forks

from megasdc.ops.launch.orphans import NODE_PID_VARIABLE
from megasdc.parallel import processes
from megasdc.parallel.local_ranks import EXTENSIONS_VARIABLE, default_extensions_dir

PRELOAD = (
    "pytest",
    *processes.PRELOAD[:-1],
    "torch.testing",
    "megatron.core.tensor_parallel",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.transformer.transformer_layer",
    "megatron.core.datasets.indexed_dataset",
    "pandas",
    "pyarrow",
    "rich.progress",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "xxhash",
    "megasdc.cli",
    processes.PRELOAD[-1],
)
"""Imported once by the fork server, in this order; a name that cannot be imported is passed over and fails later."""

STACK_SIGNAL = signal.SIGUSR2
_TAIL_BYTES = 6000


@dataclass
class _Failure:
    """Why a rank failed: when (seconds since the epoch) and the text of its traceback."""

    rank: int
    time: float
    text: str


def run_distributed(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    env: Mapping[str, str] | None = None,
    init: bool = True,
    expect_exit: Mapping[int, int] | None = None,
    grace_s: float = 10.0,
    **kwargs: Any,
) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` on ``world_size`` gloo ranks and return what each rank returned.

    Args:
        fn: a function at module level; it learns its rank from ``torch.distributed`` or the environment.
        world_size: number of ranks, each a process with one thread.
        *args: picklable arguments of fn.
        timeout_s: seconds until the run counts as hung.
        env: further environment variables of the ranks, set before fn is imported.
        init: call ``deepspeed.init_distributed("gloo")`` first; false leaves that to fn.
        expect_exit: ranks that must end by themselves, and their exit code (-9: killed by SIGKILL). Once they have, the
            others get ``grace_s`` seconds to return or fail; whatever they do is accepted.
        grace_s: see expect_exit.
        **kwargs: picklable keyword arguments of fn.

    Returns:
        One result a rank; None for a rank of ``expect_exit``, and for its peers when they failed or were ended.

    Raises:
        AssertionError: a rank raised (with the earliest traceback), died, or the run hung (with all stacks).
    """
    import torch

    expected = dict(expect_exit or {})
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    scratch = Path(tempfile.mkdtemp(prefix="ranks_"))
    context = _fork_server()
    workers: list[Any] = []
    pipes: list[Connection] = []
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            settings = _rank_environment(rank, world_size, store.port) | dict(env or {})
            log = str(scratch / f"rank_{rank}.log")
            worker = context.Process(
                target=_rank_main, args=(theirs, rank, settings, log, init, fn, args, kwargs), daemon=True
            )
            worker.start()
            theirs.close()
            workers.append(worker)
            pipes.append(ours)
        return _collect(workers, pipes, scratch, timeout_s, expected, grace_s)
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.kill()
        for worker in workers:
            worker.join()
        for pipe in pipes:
            pipe.close()
        shutil.rmtree(scratch, ignore_errors=True)


def run_command(
    *arguments: str, env: Mapping[str, str | None] | None = None, timeout_s: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run ``megasdc`` with these arguments as a fork of the server; ranks that it starts are forks of it too.

    For commands that a user starts as a program, without seconds of imports in each process. What happens while a
    program starts needs a real one.

    Args:
        *arguments: of the command line.
        env: changes of the environment; None removes a variable.
        timeout_s: seconds until the command counts as hung.

    Raises:
        AssertionError: it hung, with what it had printed.
    """
    return StartedCommand("megasdc", arguments, env).wait(timeout_s)


class StartedCommand:
    """A program that runs as a fork of the server.

    Args:
        program: a module, or the path of a script.
        arguments: of the command line.
        env: changes of the environment; None removes a variable.
        forked_ranks: also ranks that the program wants as fresh processes are forks of the server.
        is_server: its forks are of itself, with what it has changed in modules.
    """

    def __init__(
        self,
        program: str,
        arguments: Sequence[str],
        env: Mapping[str, str | None] | None = None,
        forked_ranks: bool = False,
        is_server: bool = False,
    ) -> None:
        settings = {name: value for name, value in {**os.environ, **(env or {})}.items() if value is not None}
        self._words = [program, *arguments]
        self._files = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115 - closed in wait
        with open(os.devnull) as nothing:
            streams = [nothing.fileno(), *(file.fileno() for file in self._files)]
            body = _Command(streams, self._words, settings, os.getcwd(), forked_ranks, is_server)
            self._process = _fork_server().Process(target=body)
            self._process.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return int(self._process.pid)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.join()

    def wait(self, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Its exit code and what it printed.

        Raises:
            AssertionError: it hung, with what it had printed.
        """
        self._process.join(timeout_s)
        if hung := self._process.exitcode is None:
            self.kill()
        texts = []
        for file in self._files:
            with file:
                file.seek(0)
                texts.append(file.read())
        ended = subprocess.CompletedProcess(self._words, self._process.exitcode, *texts)
        if hung:
            raise AssertionError(f"{ended.args} hangs after {timeout_s} s\n{ended.stdout}\n{ended.stderr}")
        return ended


def fork_fresh_ranks(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Make ranks that this process would start as fresh processes forks of its server.

    Args:
        replace: sets an attribute of a module.
    """

    def start_fork(*arguments: Any) -> Any:
        """As ``start_module``, whose last argument asks for a fresh process."""
        return processes.start_module(*arguments[:6])

    for module in ("megasdc.parallel.run_ranks", "megasdc.ops.golden.watched_ranks"):
        replace(importlib.import_module(module), "start_module", start_fork)


_PROGRAM = """#!{python} -IS
import os, pickle, signal, socket, sys
words = sys.argv[1:]
name = os.path.basename(sys.argv[0])
if name != "python":
    words = [{modules!r}[name], *words]
else:
    while words and words[0] in ("-u", "-P", "-B"):
        del words[0]
    if words[:1] == ["-m"]:
        del words[0]
    if not words or (words[0].startswith({real!r}) and words[0] != {forked!r}):
        os.execv({python!r}, sys.argv)
with socket.socket(socket.AF_UNIX) as asked:
    asked.connect({address!r})
    text = pickle.dumps((words, dict(os.environ), os.getcwd()))
    socket.send_fds(asked, [len(text).to_bytes(8, "little")], [0, 1, 2])
    asked.sendall(text)
    for number in {passed_on!r}:
        signal.signal(number, lambda got, _: asked.sendall(bytes([got])))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {passed_on!r})
    asked.settimeout(1)  # it runs every second, as a front of a launch has to
    code = None
    while code is None:
        try:
            code = int(asked.recv(16) or 1)
        except TimeoutError:
            pass
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
_MODULES = {"megasdc": "megasdc", "deepspeed": "deepspeed.launcher.runner"}
_REAL = ("-", "megasdc.ops.launch.", "megasdc.ops.health.", "megasdc.checkpoint.writer_main", "megasdc.ops.archive.")
"""Starts of what such a program runs itself: it looks at its parent, or gets further open files; no torch is needed."""
_FORKED = "megasdc.ops.launch.user_program"


@contextlib.contextmanager
def forked_programs(folder: Path) -> Iterator[Path]:
    """A folder for ``PATH`` whose ``megasdc``, ``deepspeed`` and ``python``, and ranks, are forks of the server.

    For commands that call programs by their names, see ``run_command``: they have the caller's streams and environment,
    get its signals, and end with it. Called on a test host (``megasdc.ops.cluster``) they run there. ``python`` runs
    modules and scripts so, and itself what looks at its parent or gets further open files (``_REAL``), and all else.

    Args:
        folder: for the programs and a socket; a short path, as sockets' names must be.
    """
    context = _fork_server()
    address = str(folder / "socket")
    programs = folder / "bin"
    programs.mkdir()
    for name in ("pyvenv.cfg", "lib"):  # the interpreter that runs under the name of ``python`` finds its packages
        (folder / name).symlink_to(Path(sys.prefix, name))
    options = {"python": sys.executable, "address": address, "modules": _MODULES, "real": _REAL, "forked": _FORKED}
    text = _PROGRAM.format(**options, passed_on=tuple(map(int, PASSED_ON)))
    for name in ("python", *_MODULES):
        (programs / name).write_text(text, encoding="utf-8")
        (programs / name).chmod(0o755)
    starting = threading.Lock()

    def answer(caller: socket.socket) -> None:
        with caller:
            size, streams, _, _ = socket.recv_fds(caller, 8, 3)
            said = caller.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL)
            words, environment, cwd = pickle.loads(said)
            environment.pop(NODE_PID_VARIABLE, None)  # the parent of a fork is the server
            pid = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            host = pid if is_elsewhere(pid) else None
            body = _Command(streams, words, environment, cwd, python=str(programs / "python"), host=host)
            command = context.Process(target=body)
            with starting:  # a start looks at all processes, whose exit codes can be read once
                command.start()
                multiprocessing.process._children.discard(command)  # type: ignore[attr-defined]
            for stream in streams:
                os.close(stream)
            while command.sentinel not in wait([command.sentinel, caller]):
                if not (got := caller.recv(1)):  # the caller was killed
                    command.kill()
                    break
                os.kill(command.pid, got[0])
            command.join()
            with contextlib.suppress(OSError):
                caller.sendall(str(command.exitcode).encode())

    def serve(server: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed below
            while True:
                threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        try:
            yield programs
        finally:
            server.shutdown(socket.SHUT_RDWR)


@dataclass
class _Command:
    """Body of a command's process; streams are numbers of open files, here or, once it is unpickled, there.

    ``python``: what it knows as its interpreter; ``host``: a process of the test host that it is to run on.
    """

    streams: list[int]
    words: list[str]
    settings: dict[str, str]
    folder: str
    forked_ranks: bool = False
    is_server: bool = False
    python: str | None = None
    host: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "streams": list(map(DupFd, self.streams))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({**state, "streams": [stream.detach() for stream in state["streams"]]})

    def __call__(self) -> None:
        for number, stream in enumerate(self.streams):
            os.dup2(stream, number)
            os.close(stream)
        if self.host is not None:
            go_on_at_host(self.host)
        if self.host is not None or self.is_server:
            serve_own_forks()
        else:
            # A fork knows its server's address, but would start another one, since it is not the server's parent.
            forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
        os.chdir(self.folder)
        apply_fused_switch()
        if self.forked_ranks:
            fork_fresh_ranks()
        if self.python is not None:
            sys.executable = self.python
            sys.path[:0] = filter(None, self.settings.get("PYTHONPATH", "").split(os.pathsep))
        atexit._clear()  # what the server would do at its end
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]
        weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
        program, *arguments = self.words
        code = processes.run_main(program, arguments, self.settings)
        atexit._run_exitfuncs()
        os._exit(code)


def _collect(
    workers: list[Any],
    pipes: list[Connection],
    scratch: Path,
    timeout_s: float,
    expected: dict[int, int],
    grace_s: float,
) -> list[Any]:
    """Wait for every rank; see ``run_distributed`` for what is returned and raised."""
    results: list[Any] = [None] * len(workers)
    failures: list[_Failure] = []
    open_ranks = set(range(len(workers)))
    left: set[int] = set()
    deadline = time.monotonic() + timeout_s
    peers_deadline: float | None = None
    while open_ranks:
        until = deadline if peers_deadline is None else min(deadline, peers_deadline)
        waiting = {pipes[rank]: rank for rank in open_ranks}
        ready = wait(list(waiting), timeout=max(0.0, until - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = waiting[pipe]  # type: ignore[index]
            open_ranks.discard(rank)
            try:
                kind, value, when = pipe.recv()  # type: ignore[union-attr]
            except (EOFError, ConnectionResetError):
                workers[rank].join(5)
                code = workers[rank].exitcode
                left.add(rank)
                if rank in expected and code == expected[rank]:
                    continue
                failures.append(_Failure(rank, time.time(), f"ended with exit code {code}\n{_log_tail(scratch, rank)}"))
                continue
            if kind == "result":
                results[rank] = value
            else:
                failures.append(_Failure(rank, when, f"{value}\n{_log_tail(scratch, rank)}"))
        if expected and expected.keys() <= left:
            peers_deadline = peers_deadline or time.monotonic() + grace_s
        elif failures and not expected:
            peers_deadline = peers_deadline or time.monotonic() + 0.5  # an earlier failure may still be on its way
    if expected and expected.keys() <= left and not any(failure.rank in expected for failure in failures):
        return results
    if failures:
        first = min(failures, key=lambda failure: failure.time)
        raise AssertionError(
            f"rank {first.rank} of {len(workers)} failed first "
            f"(failed: {sorted(failure.rank for failure in failures)}):\n{first.text}"
        )
    if missing := sorted(expected.keys() - left):
        raise AssertionError(f"ranks {missing} should have ended with {expected}\n{_stacks(workers, scratch)}")
    if open_ranks:
        raise AssertionError(f"ranks {sorted(open_ranks)} hang after {timeout_s} s\n{_stacks(workers, scratch)}")
    for pipe in pipes:  # all leave together: no rank closes its sockets under a peer
        with contextlib.suppress(OSError):
            pipe.send("leave")
    for worker in workers:
        worker.join(10)
    return results


def _stacks(workers: list[Any], scratch: Path) -> str:
    """Ask every living rank for the stacks of its threads and return their logs' ends."""
    for worker in workers:
        if worker.is_alive():
            os.kill(worker.pid, STACK_SIGNAL)
    time.sleep(1.0)
    return "\n".join(f"--- rank {rank}\n{_log_tail(scratch, rank)}" for rank in range(len(workers)))


def _log_tail(scratch: Path, rank: int) -> str:
    """Return the end of what a rank has printed."""
    path = scratch / f"rank_{rank}.log"
    data = path.read_bytes() if path.exists() else b""
    return f"[output of rank {rank}]\n{data[-_TAIL_BYTES:].decode(errors='replace')}"


def _rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the variables that a launcher would set; the store is the test process's."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }


def _fork_server() -> Any:
    """Return the multiprocessing context whose server has imported the stack; started on first use."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault(EXTENSIONS_VARIABLE, default_extensions_dir())
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    return context


def _rank_main(
    pipe: Connection,
    rank: int,
    settings: dict[str, str],
    log: str,
    init: bool,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Body of a rank: set up, run, report, and leave when the test process says so."""
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=stream)
    faulthandler.register(STACK_SIGNAL, file=stream, all_threads=True)
    os.environ.update(settings)
    try:
        import numpy
        import torch

        apply_fused_switch()
        torch.set_num_threads(1)
        for seed in (random.seed, numpy.random.seed, torch.manual_seed):
            seed(1234)
        if init:
            import deepspeed

            from megasdc.parallel.groups import share_network_thread, without_inference_operator

            share_network_thread()
            with without_inference_operator():
                deepspeed.init_distributed("gloo", verbose=False)
        message = ("result", fn(*args, **kwargs), time.time())
    except BaseException:
        message = ("failure", traceback.format_exc(), time.time())
    try:
        pipe.send(message)
    except Exception:
        pipe.send(("failure", f"the result cannot be pickled\n{traceback.format_exc()}", time.time()))
    with contextlib.suppress(EOFError, ConnectionResetError):
        pipe.recv()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
