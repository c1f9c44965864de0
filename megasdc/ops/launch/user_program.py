"""Entry point of a rank of a training that is not megasdc's own: runs its script as Python would, tells how it ends.

Called as ``python -u -m megasdc.ops.launch.user_program [--local_rank=N] SETTINGS``, the settings those of
``megasdc.ops.launch.request.UserProgram`` as JSON. The script sees what it would see without it: its own arguments, its
folder first on ``sys.path``, ``__main__``. Added are the records of start and end, the progress record that this host's
agent watches, and with a word in `protect` a guard of each engine that trains.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import json
import logging
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from megasdc.attached.settings import RUN_VARIABLE
from megasdc.common import durable
from megasdc.common.errors import ERRORS_BY_EXIT_CODE, ConfigError, HangError, MegasdcError, StorageError
from megasdc.common.host import deepspeed_buffer, remove_buffers
from megasdc.common.program import INTERRUPTED
from megasdc.config.environment import record_collectives
from megasdc.ops.health.program_health import ProgramHealth
from megasdc.ops.launch.orphans import NODE_PID_VARIABLE, follow_parent, launcher_has_gone
from megasdc.ops.launch.plan import SLOTS_VARIABLE
from megasdc.ops.launch.records import LAUNCH_ID_VARIABLE, left_buffers, write_done, write_started
from megasdc.parallel.rendezvous import on_one_address

logger = logging.getLogger(__name__)

UNGUARDED = (
    "protect: nothing was protected, since the program has made no engine that trains by deepspeed.initialize; start "
    "it without the word, or attach a guard in it: megasdc.attach(engine, protect=...)"
)


def main(argv: Sequence[str]) -> None:
    """Run the program, and end the process with its exit code.

    A rank that has failed ends without the destructors of its process groups, which may wait for ranks that have gone;
    what the program has registered with ``atexit`` runs first. Processes that it forks leave no record.
    """
    *extra, text = argv
    settings = json.loads(text)
    _take_installed_package()
    rank, run_dir, own = int(os.environ["RANK"]), Path(settings["run_dir"]), os.getpid()
    follow_parent()
    durable.set_limit(settings["wait_for_room_s"])
    record_collectives(os.environ)
    end: dict[str, Any] = {"code": 1, "error": None, "end": None}

    def leave() -> None:
        """End this rank: its health and its record; with an exit code other than 0 the process, too, at once."""
        if os.getpid() != own:
            return
        if health is not None:
            health.close()
        if NODE_PID_VARIABLE not in os.environ or launcher_has_gone():  # else it does so once all ranks have ended
            remove_buffers([buffer])
        write_done(run_dir, rank, end["code"], end["error"], end=end["end"])
        if end["code"]:
            _flush()
            os._exit(end["code"])

    def leave_at_once(code: int, message: str) -> None:
        """Record and report an error, and end the process, from the thread that watches it."""
        error = ERRORS_BY_EXIT_CODE.get(code, HangError)(message)
        _try_print(lambda: print(f"rank {rank}: {error}", file=sys.stderr))
        write_done(run_dir, rank, code, error)
        _flush()
        os._exit(code)

    buffer = deepspeed_buffer(rank)
    remove_buffers([buffer, *left_buffers(run_dir, rank)])  # of launches that were killed
    write_started(run_dir, rank, buffer)
    health = _watch(settings, rank, run_dir, leave_at_once)
    atexit.register(leave)  # the first to be registered is the last to be called
    _after_import("torch.distributed.rendezvous", _bind_store_to_one_address)
    guards = _protect(settings)
    end["code"], end["error"] = _run(settings, extra)
    if settings.get("guard") is not None and not guards and not end["code"]:
        end["code"], end["error"] = ConfigError.exit_code, ConfigError(UNGUARDED)
        _try_print(lambda: print(f"rank {rank}: {UNGUARDED}", file=sys.stderr))
    end["end"] = None if end["code"] else "its program has ended"
    if end["code"]:
        sys.exit(end["code"])


def _take_installed_package() -> None:
    """Have ``import megasdc`` mean this package where Python has taken a folder of that name in its place.

    A folder `megasdc` without ``__init__.py`` where the program starts, such as a clone of the repository, comes before
    a package that is installed with ``pip install --editable``.
    """
    taken = sys.modules["megasdc"]
    if taken.__file__ is not None:
        return
    folder = Path(__file__).parents[2]
    spec = spec_from_file_location("megasdc", folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec is not None and spec.loader is not None
    package = sys.modules["megasdc"] = module_from_spec(spec)
    vars(package).update({name: one for name, one in vars(taken).items() if isinstance(one, ModuleType)})
    spec.loader.exec_module(package)


def _after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Do something with a module once the program imports it, which this file does not: it may set variables before."""
    if name in sys.modules:
        then(sys.modules[name])
        return

    class Finder(MetaPathFinder):
        def find_spec(
            self, wanted: str, path: Sequence[str] | None, _target: ModuleType | None = None
        ) -> ModuleSpec | None:
            """The module's own spec, whose loader does the thing once it has run the module; None: another module.

            The finder stays until then: others may only ask whether the module is there.
            """
            if wanted != name:
                return None
            spec = PathFinder.find_spec(wanted, path)
            if spec is not None and spec.loader is not None:
                load = spec.loader.exec_module

                def load_and_change(module: ModuleType) -> None:
                    """Run the module, and do the thing with it."""
                    load(module)
                    if self in sys.meta_path:
                        sys.meta_path.remove(self)
                        then(module)

                vars(spec.loader)["exec_module"] = load_and_change
            return spec

    sys.meta_path.insert(0, Finder())


def _bind_store_to_one_address(rendezvous: ModuleType) -> None:
    """The store of ``env://``, which listens on all addresses else (torch 2.13)."""
    vars(rendezvous)["TCPStore"] = on_one_address(rendezvous.TCPStore)


def _protect(settings: Mapping[str, Any]) -> list[str]:
    """Tell the program's guard of this run, and have engines guarded that the program makes and attaches none to.

    Returns the types of engines that have got a guard, which become more.
    """
    guards: list[str] = []
    os.environ[RUN_VARIABLE] = json.dumps({"run_dir": settings["run_dir"], "protect": settings.get("protect")})
    if (given := settings.get("guard")) is None:
        return guards
    guard = {**given, "logging": {**given.get("logging", {}), "run_dir": settings["run_dir"]}}

    def guard_engines(deepspeed: ModuleType) -> None:
        """Have ``deepspeed.initialize`` attach a guard to each engine with an optimizer that it returns.

        The guard gives way to one that the program attaches itself.
        """
        initialize = deepspeed.initialize

        @functools.wraps(initialize)
        def guarded(*args: Any, **options: Any) -> Any:
            """What ``deepspeed.initialize`` returns, its engine with a guard.

            Raises:
                ConfigError: the engine cannot be guarded; on all ranks.

            Collective: all ranks of the world.
            """
            made = initialize(*args, **options)
            if getattr(made[0], "optimizer", None) is not None:  # else it does not train
                from megasdc.attached.attach import attach
                from megasdc.ops.health.attached import build_phases, build_stragglers

                attach(made[0], guard, [build_stragglers, build_phases], gives_way=True)
                guards.append(type(made[0]).__name__)
            return made

        vars(deepspeed)["initialize"] = guarded

    _after_import("deepspeed", guard_engines)
    return guards


def _watch(
    settings: Mapping[str, Any], rank: int, run_dir: Path, leave: Callable[[int, str], None]
) -> ProgramHealth | None:
    """Watch this rank; without shared memory it trains nevertheless, with a warning."""
    if not settings["watched"]:
        return None
    slots, launch_id = json.loads(os.environ[SLOTS_VARIABLE]), os.environ[LAUNCH_ID_VARIABLE]
    try:
        limits = settings["hang_floor_s"], settings["slow_floor_s"], settings["hang_factor"]
        return ProgramHealth(slots, rank, run_dir, launch_id, limits, settings["alert_command"], leave)
    except (StorageError, OSError) as error:
        logger.warning("health: rank %d is not watched: %s", rank, error)
        return None


def _run(settings: Mapping[str, Any], extra: Sequence[str]) -> tuple[int, BaseException | None]:
    """Run the program; its exit code, and what it has raised, which is told as Python would."""
    name = settings["name"]
    sys.argv = [name, *extra, *settings["arguments"]]
    try:
        if settings["is_module"]:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            _run_script(Path(name))
    except SystemExit as error:
        code = error.code
        if code is None or isinstance(code, int):
            return int(code or 0) & 0xFF, error if code else None
        _try_print(lambda: print(code, file=sys.stderr))
        return 1, error
    except KeyboardInterrupt as error:
        return INTERRUPTED, error
    except BaseException as error:
        raised = error.with_traceback(_without_own_frames(error))  # hooks of libraries look there
        sys.last_type, sys.last_value, sys.last_traceback = type(raised), raised, raised.__traceback__  # as Python does
        _try_print(lambda: sys.excepthook(type(raised), raised, raised.__traceback__))
        return error.exit_code if isinstance(error, MegasdcError) else 1, error
    return 0, None


def _run_script(path: Path) -> None:
    """Run a file as ``__main__``, which it stays until the process ends: threads and ``atexit`` may need it."""
    sys.path[0] = str(path.resolve().parent)
    module = ModuleType("__main__")
    vars(module).update(__file__=str(path), __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = module
    with open(path, "rb") as file:
        code = compile(file.read(), str(path), "exec")
    exec(code, vars(module))


def _without_own_frames(error: BaseException) -> TracebackType | None:
    """The traceback from the first line of the program on; None: it did not come so far, as with a wrong syntax."""
    found = error.__traceback__
    while found is not None and found.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        found = found.tb_next
    return found


def _try_print(say: Callable[[], object]) -> None:
    """Print something where that is possible: a stream may be closed, or its other end."""
    with suppress(OSError, ValueError):
        say()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            _try_print(stream.flush)


if __name__ == "__main__":
    main(sys.argv[1:])
